"""The commands of the pages, run to their end in the order of print, at one round and with few clients."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from fedhet import cli

from .test_readme import PAGES, ROOT, TEXT, blocks

ELSEWHERE = {
    "--install-completion": "changes the files of the shell",
    "--engine ray": "tests/engines/test_ray.py",
    "recommend --budget": "is README.md's with other clients",
    "--engine hospitals": "tests/engines/test_deployment.py",
    "fedhet node ": "needs a node: tests/client/test_node_check.py, tests/engines/test_deployment.py",
}
"""Parts of commands that are not run here, and why not or where."""

SHORT = {"--budget": "40s", "--seeds": "0"}
"""Values of options in place of those that are printed."""

FEW = {
    "run": "rounds=1 local-epochs=1",
    "compare": "rounds=1 local-epochs=1 closing-epochs=1 clients=2",
    "recommend": "rounds=1 local-epochs=1 clients=3",
}


def commands() -> list[str]:
    """The `fedhet` commands of all pages' blocks, each once, without comments and those that are run elsewhere."""
    text = "\n".join(TEXT[page] for page in PAGES)
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(block for language, block in fenced if language in ("", "bash")).replace("\\\n", " ").splitlines()
    printed = [re.split(r"\s+#", line)[0].strip() for line in lines if line.startswith("fedhet ")]
    return [each for each in dict.fromkeys(printed) if not any(part in each for part in ELSEWHERE)]


def shortened(command: str) -> list[str]:
    """A command's words at one round, or two where more are printed, with one seed and two values of a tuned key."""
    words = shlex.split(command)[1:]
    if "--again" in words:  # as it was
        return words
    if words[0] == "recommend":
        words += ["--methods", "fedhenn", *([] if "--budget" in words else ["--budget", ""])]
        words += (
            [] if "--out" in words else ["--out", f"runs/{'-'.join(words)}"]
        )  # pages are read in folders of their own
    for option in SHORT.keys() & {*words}:
        words[words.index(option) + 1] = SHORT[option]
    words = [re.sub(r"^([a-z0-9.-]+=[^,]+,[^,]+),\S+", r"\1", word) for word in words]
    words = ["rounds=2" if word.startswith("rounds=") else word for word in words]
    few = "rounds=2" if "--resume" in words else FEW.get(words[0], "")
    return words + [word for each in few.split() if f"{each.split('=')[0]}=" not in command for word in ("--set", each)]


@pytest.mark.slow
def test_the_commands_of_the_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in blocks().items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    (tmp_path / "run_configs").symlink_to(ROOT / "run_configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for number in range(40):  # images of two classes in the folder of the page of data
        path = tmp_path / "FOLDER" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 6 * number).save(path)
    listed = commands()
    assert len(listed) >= 15
    for command in listed:
        if "runs/one runs/two" in command:
            for name in ("one", "two"):
                shutil.copytree("runs/try", f"runs/{name}")
        result = CliRunner().invoke(cli.app, shortened(command), prog_name="fedhet")
        assert result.exit_code == 0, f"{command}\n{result.output}"
    for name in blocks():
        sys.modules.pop(name, None)
