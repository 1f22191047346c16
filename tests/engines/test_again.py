"""`fedhet run --again`: a run is repeated, and the first difference is named; what a run says about its making."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
from torch import nn
from typer.testing import CliRunner

import fedhet
from fedhet import cli
from fedhet.engines.again import difference
from fedhet.utils.files import read_arrays, write_arrays
from fedhet.utils.machine import revision, spent

SETTINGS = {"preset": "fedavg/digits", "clients": 2, "rounds": 2, "local-epochs": 1, "architectures": "mlp-20"}


def again(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["run", "--again", *map(str, words)], prog_name="fedhet")
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedhet.run(SETTINGS, out=tmp_path_factory.mktemp("runs") / "try", progress=False).folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "copy")


def test_a_repeated_run_has_the_same_bytes(original: Path) -> None:
    code, said = again(original)
    assert code == 0
    assert "have the same bytes: history without times, models and checkpoints" in said
    repeated = original.with_name("try-again")
    models = [path.name for path in (original / "models").iterdir()]
    assert "global.safetensors" in models
    for name in models:
        assert (repeated / "models" / name).read_bytes() == (original / "models" / name).read_bytes()


def test_a_run_says_what_made_it(original: Path) -> None:
    summary = json.loads((original / "summary.json").read_text())
    assert 0 < summary["cpu_seconds"] < 600
    assert psutil.Process().memory_info().rss / 10 < summary["peak_memory"] < psutil.virtual_memory().total
    page = (original / "report.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in ("host", "command", "versions", "devices of clients", "time"))
    before, _ = spent()
    sum(number * number for number in range(10**6))
    assert spent()[0] >= before


@pytest.mark.parametrize("name", ["models/global.safetensors", "checkpoint/2.safetensors"])
def test_the_first_array_that_differs(original: Path, copy: Path, name: str) -> None:
    assert difference(original, copy) == ""
    arrays, metadata = read_arrays(copy / name)
    changed = next(key for key, array in arrays.items() if array.dtype == np.float32)
    arrays[changed] = arrays[changed] + np.float32(0.25)
    write_arrays(copy / name, arrays, metadata={key: metadata[key] for key in metadata if key != "digest"})
    assert difference(original, copy) == f"the first array that differs is {changed} of {name}, by up to 0.25."
    (copy / name).unlink()
    assert difference(original, copy) == f"only one has {name}."


def test_the_first_round_that_differs(copy: Path) -> None:
    original = shutil.copytree(copy, copy.with_name("original"))
    lines = (copy / "history.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["timing"] = {"seconds": 1.0}
        row["metrics"]["diverged"] = math.nan
    for folder in (original, copy):
        (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        row["timing"] = {"seconds": 2.0}
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    (copy / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert difference(original, copy) == ""
    rows[2]["train_loss"] += 1e-9
    (copy / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = copy / "config.toml"
    config.write_text(config.read_text().replace("[versions]\n", '[versions]\nbrand = "new"\n'))
    said = "the histories differ first in round 2, in train_loss."
    assert difference(original, copy) == said
    assert difference(copy, original) == f"{said} It ran with brand new (now None)."
    config.write_text(config.read_text().replace("seed = 0", "seed = 1"))
    code, printed = again(copy)
    assert code == 1
    assert "the histories differ first in round 0" in printed or "differ first in round 1" in printed


def test_what_cannot_be_repeated(original: Path, copy: Path, tmp_path: Path) -> None:
    assert again(original, "--seed", 3) == (
        2,
        "fedhet: --again repeats a run as it was: leave out CONFIG, --resume, --set and --seed",
    )
    (copy / "summary.json").unlink()
    code, said = again(copy)
    assert code == 2
    assert "is not complete: continue it with fedhet run --resume" in said
    own = fedhet.run(SETTINGS | {"architectures": "", "rounds": 1}, model=mine, out=tmp_path / "own", progress=False)
    code, said = again(own.folder)
    assert code == 2
    assert "used your own model" in said
    assert not own.folder.with_name("own-again").exists()


def mine() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert revision(tmp_path) == ""
    git("init")
    for name in ("one.py", "two words.py", "three.py"):
        (tmp_path / name).write_text(f"{name}\n")
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "new.py").touch()
    (tmp_path / "inner").mkdir()
    assert revision(tmp_path / "inner") == commit
    (tmp_path / "two words.py").write_text("changed")
    git("mv", "three.py", "moved.py")
    assert revision(tmp_path) == f"{commit}, changed: moved.py, two words.py"
