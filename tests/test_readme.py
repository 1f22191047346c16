"""The README's examples, run as they are printed: own model and data in a Flower app, and a method of one's own."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import fedhet
from fedhet.engines.grid import LocalGrid, server_context
from fedhet.errors import ConfigError
from fedhet.testing import MethodContract

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
    # Clients and server share a disk here, so personal models are with the results.
    assert len(list((app / "runs" / "mine" / "models").glob("*.safetensors"))) == 3


def test_a_whole_method_of_ones_own(app: Path) -> None:
    assert 20 <= len(blocks()["lg"].splitlines()) <= 40
    settings = {"preset": "local/digits", "method": "lg:method", "lg.warm-up": 1, "clients": 2, "rounds": 3}
    done = fedhet.run({**settings, "architectures": "cnn,cnn-3-3"}, out=app / "run")
    assert done.summary["method"] == "lg"
    assert [row["failures"] for row in done.history] == [[]] * 5
    assert [row["metrics"]["spread"] > 0 for row in done.history[1:4]] == [False, True, True]
    head = 4 * (32 * 10 + 10)
    assert [row["bytes_up"] for row in done.history[1:4]] == [2 * head] * 3
    with pytest.raises(ConfigError, match=r"did you mean 'lg.warm-up'"):
        fedhet.run({**settings, "lg.warmup": 2}, out=app / "other")


class TestOnesOwnMethod(MethodContract):
    """The README's method keeps the contract, as its test says."""

    method = "lg:method"

    @pytest.fixture(autouse=True)
    def _importable(self, app: Path) -> None:
        assert "MethodContract" in blocks()["test_lg"]
