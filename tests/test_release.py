"""What is released: the package's files and names, and what Flower's hub takes."""

import doctest
import hashlib
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from flwr.cli.config_utils import load_and_validate
from torch import nn

import fedhet
from fedhet import cli, flower
from fedhet.algorithms.graphs.graph import architecture_graph
from fedhet.client.policy import NODE_KEYS
from fedhet.methods.options import Config, fields_of, kebab
from fedhet.methods.registry import module_of

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MEGABYTE = 1024 * 1024


def promised(kind: str) -> list[str]:
    """Return the names of a kind that users rely on."""
    lines = (ROOT / "tests" / "promised.txt").read_text(encoding="utf-8").splitlines()
    names = [name for line_kind, name in map(str.split, lines) if line_kind == kind]
    assert names
    return names


class TestWhatUsersRelyOn:
    """A name that is to go is deprecated first, as the section Versions of fedhet/README.md says."""

    def test_commands(self) -> None:
        commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
        assert {*promised("command")} <= commands

    @pytest.mark.parametrize("name", promised("python"))
    def test_python(self, name: str) -> None:
        package, *attributes = name.split(".")
        if len(attributes) > 1:
            importlib.import_module(f"{package}.{attributes[0]}")
        assert callable(reduce(getattr, attributes, fedhet)) or name.endswith(".cka")

    def test_keys(self) -> None:
        assert {*promised("key")} <= {kebab(field) for field in fields_of(Config)}
        assert {*promised("node-key")} <= NODE_KEYS

    def test_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        settings = {"clients": 2, "rounds": 1, "samples-per-client": 20}
        fedhet.compare(["local"], settings, seeds=[0], out="compared")
        (run,) = (path.parent for path in Path("compared").glob("*/config.toml"))
        assert [name for name in promised("run-file") if not (run / name).exists()] == []
        assert [name for name in promised("comparison-file") if not (Path("compared") / name).exists()] == []

    def test_the_page_says_so(self) -> None:
        page = (ROOT / "fedhet" / "README.md").read_text(encoding="utf-8")
        section = page.partition("## Versions\n")[2].partition("\n## ")[0]
        for kind in ("command", "run-file", "comparison-file"):
            assert [
                name for name in promised(kind) if name.split("/")[0].removeprefix("comparison") not in section
            ] == []


class TestPackage:
    def test_the_wheel_has_the_packages_presets_pages_and_nothing_else(self, tmp_path: Path) -> None:
        pytest.importorskip("hatchling")
        words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = tmp_path.iterdir()
        sources = {"fedhet": "", "strategies": "fedhet/", "client_apps": "fedhet/", "run_configs": "fedhet/"}
        expected = set()
        for folder, into in sources.items():
            for path in (ROOT / folder).rglob("*"):
                name = path.relative_to(ROOT).as_posix()
                study = name.startswith("run_configs/") and (path.suffix in (".py", ".ipynb") or "/studies/" in name)
                pointer = name.startswith(("fedhet/strategies/", "fedhet/client_apps/"))
                if path.is_file() and "__pycache__" not in path.parts and not study and not pointer:
                    expected.add(into + name)
        packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        assert packed == expected
        assert wheel.stat().st_size < MEGABYTE, "README.md states this size"

    def test_the_newest_flower_is_the_one_that_is_installed_by_default(self) -> None:
        (requirement,) = (line for line in PROJECT["project"]["dependencies"] if line.startswith("flwr["))
        assert requirement.endswith(f"<1.{flower.NEWEST + 1}")
        assert flower.newer_than_tested(f"1.{flower.NEWEST}.3") == ""
        assert "is tested with: use a newer fedhet" in flower.newer_than_tested(f"1.{flower.NEWEST + 1}.0.dev20261026")

    def test_versions_agree(self) -> None:
        version = PROJECT["project"]["version"]
        assert fedhet.__version__ == version
        for page, line in {"CITATION.cff": f"version: {version}", "README.md": f"version = {{{version}}}"}.items():
            assert line in (ROOT / page).read_text(encoding="utf-8")
        assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    def test_flowers_hub_takes_the_app(self, tmp_path: Path) -> None:
        """The files that git has are those that the hub gets, since it leaves out what `.gitignore` names."""
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_bytes((ROOT / name).read_bytes())
        publish = importlib.import_module("flwr.cli.app_cmd.publish")
        publish._validate_files(publish._collect_file_paths(tmp_path))
        config, _ = load_and_validate(ROOT / "pyproject.toml", check_module=False)
        assert 0 < len(config["project"]["description"]) <= 200
        publish._validate_app_name(config["project"]["name"], "name")


class TestPublishing:
    @pytest.mark.parametrize(
        ("schema", "pattern"),
        [
            ("github-workflows", ".github/workflows/*.yml"),
            ("github-issue-forms", ".github/ISSUE_TEMPLATE/*.yml"),
            ("dependabot", ".github/dependabot.yml"),
            ("citation-file-format", "CITATION.cff"),
        ],
    )
    def test_files_have_their_schema(self, schema: str, pattern: str) -> None:
        pytest.importorskip("check_jsonschema")
        files = [str(path) for path in ROOT.glob(pattern)]
        assert files
        words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout

    def test_every_paper_of_the_methods_is_cited(self) -> None:
        page = (ROOT / "run_configs" / "README.md").read_text(encoding="utf-8")
        sources = [row.split("|")[4] for row in page.splitlines() if row.startswith("| `") and row.count("|") == 5]
        papers = [
            paper for source in sources for paper in re.findall(r"(\w+) (?:et al\.|and \w+),[^;]*?(\d{4})", source)
        ]
        assert len(papers) > 30
        citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
        cited = re.findall(r'family-names: "(\w+)".*?year: (\d{4})', citation, re.DOTALL)
        assert {*papers} - {*cited} == set()

    def test_the_recipe_has_all_dependencies(self, tmp_path: Path) -> None:
        sdist = tmp_path / "fedhet.tar.gz"
        sdist.write_bytes(b"")
        recipe = module_of(str(ROOT / ".ci" / "recipe.py"))
        content = yaml.safe_load(recipe.recipe(sdist, ["someone"]))
        assert content["source"]["sha256"] == hashlib.sha256(b"").hexdigest()
        assert len(content["requirements"]["run"]) == len(PROJECT["project"]["dependencies"]) + 2  # Python and Ray
        assert content["extra"]["recipe-maintainers"] == ["someone"]

    def test_the_paper_is_short(self) -> None:
        text = (ROOT / "paper.md").read_text(encoding="utf-8").split("---", 2)[2]
        keys = {*re.findall(r"@(\w+)", text)}
        assert len(text.split()) <= 1000
        assert keys
        assert keys == {*re.findall(r"^@\w+\{(\w+),", (ROOT / "paper.bib").read_text(encoding="utf-8"), re.MULTILINE)}


class TestDocstrings:
    """The examples in docstrings print what they say."""

    EXAMPLES = sorted(path for path in (ROOT / "fedhet").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))

    @pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
    def test_examples_run(self, path: Path) -> None:
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        names = {"np": np, "torch": torch, "nn": nn, "architecture_graph": architecture_graph}
        failed, tried = doctest.testmod(module, extraglobs=names)
        assert tried > 0
        assert failed == 0
