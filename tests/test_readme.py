"""The README's example of a user's own model and data in a Flower app of their own, run as it is printed."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from fedhet.engines.local import LocalGrid, server_context

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks() -> dict[str, str]:
    """The README's Python blocks that open with their file's name, by that name."""
    code = re.findall(r"```python\n# (\w+)\.py[^\n]*\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return dict(code)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the example's files, importable, and the working directory of the run."""
    for name, code in blocks().items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield tmp_path
    for name in blocks():
        sys.modules.pop(name, None)


def test_own_model_and_data_in_an_existing_flower_app(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert blocks().keys() >= {"client_app", "server_app"}
    client_app = importlib.import_module("client_app").app
    server_app = importlib.import_module("server_app").app
    server_app(LocalGrid(client_app, clients=3), server_context())
    printed = capsys.readouterr().out
    accuracies = [float(number) for number in re.findall(r"accuracy (0\.\d+)", printed)]
    assert accuracies
    assert accuracies[-1] > 0.8
    assert (app / "runs" / "mine" / "summary.json").is_file()
    # Personal models stay with the clients, here in the home folder that all three share.
    assert len(list((app / "home" / ".fedhet" / "state").glob("*/models/*.safetensors"))) == 3
