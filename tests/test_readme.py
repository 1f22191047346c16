"""The examples of README.md and of the pages in `fedhet`, run as they are printed, and commands of studies."""

import ast
import importlib
import inspect
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn
from typer.testing import CliRunner

import fedhet
from fedhet import cli, data, models
from fedhet.algorithms import matching
from fedhet.algorithms.alignment import cka
from fedhet.config import configuration
from fedhet.data import text
from fedhet.engines.running import RunResult
from fedhet.errors import ConfigError, DataError, ModelError
from fedhet.flower.grid import LocalGrid
from fedhet.methods import registry
from fedhet.methods.sharing import NetworkDescription
from fedhet.testing import MethodContract
from fedhet.utils.files import read_arrays

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "run_configs" / "README.md", *sorted((ROOT / "fedhet").rglob("README.md"))]
PAGES += [ROOT / "fedhet" / "results" / "MODELS.md"]
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
ALL = "\n".join(TEXT.values())
STUDIES = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "run_configs").glob("*/README.md")))


def blocks() -> dict[str, str]:
    """The pages' Python blocks that open with their file's name, by that name."""
    return dict(re.findall(r"```python\n# (\w+)\.py[^\n]*\n(.*?)```", ALL, re.DOTALL))


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


@pytest.mark.slow
def test_own_model_and_data_in_an_existing_flower_app(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert blocks().keys() >= {"client_app", "server_app"}
    client_app = importlib.import_module("client_app").app
    server_app = importlib.import_module("server_app").app
    server_app(
        LocalGrid(client_app, clients=3),
        Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}),
    )
    printed = capsys.readouterr().out
    accuracies = [float(number) for number in re.findall(r"accuracy (0\.\d+)", printed)]
    assert accuracies
    assert accuracies[-1] > 0.8
    assert (app / "runs" / "mine" / "summary.json").is_file()
    # Clients and server share a disk here, so personal models are with the results.
    assert len(list((app / "runs" / "mine" / "models").glob("*.safetensors"))) == 3


@pytest.mark.parametrize("strategy", ["FedAvg", "FedRep"])
def test_an_app_that_trains_with_a_loop_of_its_own(app: Path, strategy: str) -> None:
    made = getattr(fedhet, strategy)(
        rounds=2, local_epochs=12, learning_rate=0.05, closing_epochs=0, out=str(app / "run")
    )
    made.start(LocalGrid(importlib.import_module("hospital").app, clients=3))
    last = json.loads((app / "run" / "history.jsonl").read_text().splitlines()[-1])
    assert last["received"]["accuracy"]["weighted"] == pytest.approx(last["metrics"]["eval_acc"])
    assert last["metrics"]["eval_acc"] > 0.6


@pytest.mark.usefixtures("no_report")
def test_a_private_run(app: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("dp_accounting")
    private = importlib.import_module("private_app")
    with caplog.at_level("INFO", logger="flwr"):
        private.server_app(
            LocalGrid(private.client_app, clients=10),
            Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}),
        )
    printed = [line.partition("privacy: ")[2] for line in caplog.messages if line.startswith("privacy: ")][-1]
    assert printed
    assert json.loads((app / "runs" / "private" / "summary.json").read_text())["privacy"]["rounds"] == 5


def test_a_whole_method_of_ones_own(app: Path) -> None:
    assert 20 <= len(blocks()["lg"].splitlines()) <= 40
    settings = {"preset": "local/digits", "method": "lg:LG", "lg.warm-up": 1, "clients": 2, "rounds": 3}
    done = fedhet.run({**settings, "architectures": "cnn,cnn-3-3"}, out=app / "run")
    assert done.summary["method"] == "lg"
    files = re.findall(r"^\| (`[^|]+) \|", TEXT[ROOT / "fedhet" / "results" / "README.md"], re.MULTILINE)
    named = {name for line in files for name in re.findall(r"`([^`]+)`", line)} - {
        "tensorboard/",
        "wandb/",
        "../mlflow.db",
    }
    assert {"config.toml", "models/", "state/"} <= named
    assert [name for name in named if not (app / "run" / name).exists()] == []
    assert [row["failures"] for row in done.history] == [[]] * 5
    assert [row["metrics"]["spread"] > 0 for row in done.history[1:4]] == [False, True, True]
    head = 4 * (32 * 10 + 10)
    assert [row["bytes_up"] for row in done.history[1:4]] == [2 * head] * 3
    with pytest.raises(ConfigError, match=r"did you mean 'lg.warm-up'"):
        fedhet.run({**settings, "lg.warmup": 2}, out=app / "other")


class TestOnesOwnMethod(MethodContract):
    """The README's method keeps the contract, as its test says."""

    method = "lg:LG"

    @pytest.fixture(autouse=True)
    def _importable(self, app: Path) -> None:
        assert "MethodContract" in blocks()["test_lg"]


def test_a_loss_term_of_ones_own(app: Path) -> None:
    settings = {"preset": "fedproto/digits", "method": "cosine:Cosine", "cosine.weight": 5.0, "clients": 2, "rounds": 2}
    done = fedhet.run({**settings, "architectures": "mlp-20", "report": False}, out=app / "run")
    without = fedhet.run({**settings, "architectures": "mlp-20", "cosine.weight": 0, "report": False}, out=app / "none")
    assert [row["failures"] for row in done.history] == [[]] * len(done.history)
    before, after = ([run.history[round]["train_loss"] for run in (done, without)] for round in (1, 2))
    assert before[0] == before[1]
    assert after[0] > after[1]


def test_a_subclass_of_an_included_method(app: Path) -> None:
    """It is FedProx without decay, and in the first round."""
    settings = {"preset": "fedprox/digits", "clients": 2, "local-epochs": 1, "architectures": "mlp-20", "report": False}

    def trained(name: str, **more: object) -> dict[str, np.ndarray]:
        fedhet.run({**settings, **more}, out=app / name)
        return read_arrays(app / name / "models" / "global.safetensors")[0]

    mine = {"method": "fading:Fading", "fading.mu": 0.5}
    prox = {"method": "fedprox", "fedprox.mu": 0.5}
    once = trained("once", rounds=1, **prox)
    for decay, rounds, like in ((1.0, 2, prox), (0.0, 1, prox), (0.5, 2, None)):
        arrays = trained(f"{decay}-{rounds}", rounds=rounds, **mine, **{"fading.decay": decay})
        expected = trained(f"prox-{rounds}", rounds=rounds, **prox) if rounds == 2 and like else once
        assert all(np.array_equal(arrays[name], expected[name]) for name in expected) == bool(like)


def test_a_key_and_a_state(app: Path) -> None:
    """Up to W(2) - W(1), momentum adds beta (W(1) - W(0)) to what FedAvg does."""

    def trained(name: str, **settings: object) -> dict[str, np.ndarray]:
        few = {"clients": 2, "rounds": 2, "local-epochs": 1, "architectures": "mlp-20", "report": False}
        fedhet.run({"preset": "fedavg/digits", **few, **settings}, out=app / name)
        return read_arrays(app / name / "models" / "global.safetensors")[0]

    plain = trained("fedavg")
    none, some, more = (
        trained(f"beta{beta}", method="fedavgm:FedAvgM", **{"fedavgm.beta": beta}) for beta in (0.0, 0.4, 0.8)
    )
    for name, array in plain.items():
        assert np.allclose(none[name], array, atol=1e-5)
        assert np.allclose(more[name] - some[name], some[name] - none[name], atol=1e-5)
    assert max(np.abs(some[name] - none[name]).max() for name in plain) > 1e-3


@pytest.mark.usefixtures("app", "no_report")
def test_a_model_is_used() -> None:
    page = TEXT[ROOT / "fedhet" / "results" / "MODELS.md"]
    assert len(re.sub(r"```.*?```", "", page, flags=re.DOTALL).split()) <= 220
    names = {"__name__": "__main__"}
    exec(compile(blocks()["use"], "use.py", "exec"), names)
    scores, network = names["scores"], names["network"]
    with torch.no_grad():
        phi = network.network[:2](names["rows"]) @ network.network[2].projection.weight.T
        phi = phi + network.network[2].projection.bias
    distances = (phi[:, None] - network.prototypes[network.rows]).square().sum(2)
    assert torch.allclose(scores, -distances, atol=1e-4)
    letters = text.encode("To be, or not to be")[-80:].long()[None]
    assert models.build("char-lstm", (80,), 90)(letters).shape == (1, 90)


def test_a_data_set_by_name(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedhet.data.examples._LOADERS", dict(data.examples._LOADERS))
    importlib.import_module("tables")
    settings = {"preset": "local/digits", "dataset": "wine", "report": False}
    with pytest.raises(DataError, match="must be less than the") as refused:
        fedhet.run(settings)
    lines = str(refused.value).splitlines()
    assert lines[-1].endswith("the preset local/digits")
    fitting = {**settings, "public-samples": 0, "classes-per-client": 2, "clients": 3, "rounds": 3}
    with pytest.raises(ModelError, match=r"model 'char-lstm': .* \(13,\) .*RuntimeError") as refused:
        fedhet.run({**fitting, "architectures": "char-lstm"})
    assert len(str(refused.value).splitlines()) == 2
    assert (
        fedhet.run({**fitting, "architectures": "mlp-20"}, out=app / "run").summary["personal_accuracy"]["mean"] > 0.8
    )
    data.LOADED.pop(("wine", None, 0))


def test_the_map_of_a_layer_keeps_kinds_apart() -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", ALL, re.DOTALL) if "SECOND_LAST" in block)
    names: dict[str, object] = {}
    exec(code, names)
    keys = []
    for widths in ((5, 4), (7, 4), (5, 4)):
        model = torch.nn.Sequential(
            torch.nn.Linear(3, widths[0]), torch.nn.ReLU(), torch.nn.Linear(*widths), torch.nn.Linear(4, 2)
        )
        shared = names["SECOND_LAST"].names(NetworkDescription(model, "3", "mine"), model.state_dict(), statistics=True)
        assert [*shared] == ["2.weight", "2.bias"]
        keys.append({*shared.values()})
    assert keys[0] == keys[2]
    assert not keys[0] & keys[1]


def test_the_table_of_traits_is_true() -> None:
    page = TEXT[ROOT / "fedhet" / "methods" / "README.md"].split("\n## Four questions")[0]
    table = re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", page, re.MULTILINE)
    rows = {name: cells.split(" | ") for name, cells in table}
    assert len(rows) == 5
    for name, (networks, shares, *others) in rows.items():
        method = registry.method(name)
        traits = method.traits_of(method.Options())
        assert traits.shares is getattr(fedhet.methods.sharing, shares)
        told = [traits.networks, traits.keeps, traits.scored, str(traits.common_init), traits.public]
        assert told == [networks, *others], name


def test_strategies_are_found_by_their_class_names() -> None:
    assert {registry.strategy(name).__name__ for name in registry.own_methods()} <= {*dir(fedhet)}
    assert "FederatedStrategy" not in dir(fedhet)


def test_the_steps_of_a_round_name_functions_that_exist() -> None:
    steps = re.findall(r"`([a-z_/]+\.py):([a-z_]+)`", TEXT[ROOT / "fedhet" / "README.md"])
    assert len(steps) >= 10
    for file, function in steps:
        folder = ROOT if file.startswith(("strategies", "client_apps")) else ROOT / "fedhet"
        assert f"def {function}(" in (folder / file).read_text(encoding="utf-8"), f"{file}:{function}"


def test_pages_link_to_files_that_exist() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(page for top in ("fedhet", "run_configs", "tests") for page in (ROOT / top).rglob("*.md")),
    ]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 100
    assert [f"{page.name}: {link}" for page, link in links if not is_there(page, *link.partition("#")[::2])] == []


def is_there(page: Path, file: str, heading: str) -> bool:
    """Whether a link's file exists, and has its heading."""
    target = page.parent / file if file else page
    if not heading or not target.is_file():
        return target.exists()
    titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.usefixtures("planning")
@pytest.mark.parametrize("name", ["own", "tuned"])
def test_a_comparison_in_python_is_understood(name: str) -> None:
    with pytest.raises(Planned):
        exec(compile(blocks()[name], f"{name}.py", "exec"), {"__name__": "__main__"})


@pytest.mark.usefixtures("app", "no_report")
def test_what_one_does_with_the_first_own_run() -> None:
    page = TEXT[ROOT / "README.md"]
    names: dict[str, Any] = {"__name__": "own"}
    exec(blocks()["own"], names)
    settings = ast.literal_eval(re.search(r"settings = ({.*})", blocks()["own"])[1])
    names["settings"] = {**settings, "rounds": 5, "local-epochs": 1}
    (run,) = re.findall(r"`(fedhet\.run\(.*?)`", page)
    exec(run, names)
    (code,) = re.findall(r"```python\n(network = .*?)```", page, re.DOTALL)
    exec(code, names)
    inputs, labels = names["my_data"]
    assert names["network"](torch.tensor(inputs, dtype=torch.float32)).shape == (len(labels), 10)
    assert [*Path("runs").glob("*/models/round-5")]


@pytest.mark.usefixtures("app", "no_report")
def test_first_lines_of_the_pages_on_data_and_on_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (("rounds", 5), ("local-epochs", 1)):
        monkeypatch.setitem(configuration.OWN_SETTINGS, key, value)
    names: dict[str, Any] = {"__name__": "own"}
    exec(blocks()["own"], names)
    inputs, labels = names["my_data"]
    frame = pandas.DataFrame(inputs[:400]).add_prefix("x").assign(outcome=labels[:400], hospital=["a", "b"] * 200)
    names |= {"inputs": inputs[:400], "labels": labels[:400], "frame": frame, "my_model": lambda: nn.Linear(64, 10)}
    for folder, beginning in (("data", "split = "), ("results", "own = ")):
        page = TEXT[ROOT / "fedhet" / folder / "README.md"]
        (code,) = re.findall(rf"```python\n({beginning}.*?)```", page, re.DOTALL)
        exec(code, names)
    assert Path("runs/try/models/round-5").is_dir()
    assert names["network"](torch.zeros(1, 64)).shape == (1, 10)


def test_keys_that_are_named_exist() -> None:
    named = re.findall(r"`([a-z][a-z0-9.-]*) ?= ?[^`]+`", ALL)
    known = {key for key, *_ in configuration.keys()} | {"lg.warm-up", "extra-keys", "preset", "task"}  # noqa: SIM118
    assert len(named) > 10
    assert sorted({*named} - known) == []


def commands(text: str) -> list[str]:
    """A text's `fedhet` commands, in blocks and within sentences, without comments."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    blocks = "\n".join(block for language, block in fenced if language in ("", "bash"))
    blocks = blocks.replace("&& ", "\n").replace("\\\n", "")
    inline = [" ".join(found.split()) for found in re.findall(r"`(fedhet\s(?:run|compare)\s[^`]+)`", text)]
    found = [line.split("  #")[0].strip() for line in blocks.splitlines() if line.startswith("fedhet ")]
    left_out = {"fedhet --install-completion", "fedhet run runs/try/config.toml", "fedhet run --again runs/try"}
    elsewhere = "fedhet node ", "fedhet results "  # which need a node or a SuperLink
    return sorted(line for line in {*found, *inline} - left_out if not line.startswith(elsewhere))


class Planned(Exception):
    """A comparison has been checked, and its first runs would begin."""


@pytest.fixture
def planning(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands, in the folder of a checkout, end where training or drawing would begin."""

    def begin(*_: object, **__: object) -> NoReturn:
        raise Planned

    monkeypatch.setattr("fedhet.comparing.runs.Execution.__call__", begin)
    monkeypatch.setattr("fedhet.comparing.announce", begin)
    monkeypatch.setattr("fedhet.comparing.recommending.ask", begin)
    monkeypatch.setattr("fedhet.engines.evaluating.evaluate", begin)
    monkeypatch.setattr("fedhet.engines.running.run", lambda config, **settings: RunResult(app, {}))
    monkeypatch.setattr("fedhet.results.report.write_report", Path)
    monkeypatch.setattr("fedhet.results.report.compare_folders", lambda folders, out: out)
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("planning")
@pytest.mark.parametrize("command", commands(ALL))
def test_every_command_is_understood(command: str) -> None:
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:], prog_name="fedhet")
    assert result.exit_code == 0 or isinstance(result.exception, Planned), result.output


@pytest.mark.usefixtures("planning")
@pytest.mark.parametrize("command", commands(STUDIES))
def test_every_command_of_a_study_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where training begins, without its data, which only the user has."""
    monkeypatch.setattr("fedhet.setup.client_setup.check", lambda config, **own: None)
    result = CliRunner().invoke(cli.app, shlex.split(command.replace("=S", "=0"))[1:], prog_name="fedhet")
    assert result.exit_code == 0 or isinstance(result.exception, Planned), result.output


PUBLIC = {
    "fedhet": ["run", "compare", "make_client_app", "make_server_app", "wrap", "FedAvg", "FedHeNN", "FedMA"],
    "fedhet.algorithms.alignment.cka": ["linear_cka", "debiased_linear_cka", "rbf_cka"],
    "fedhet.algorithms.matching": ["match_layer", "LayerMatch"],
    "fedhet.registry": ["methods", "models", "datasets", "partitions"],
    "fedhet.algorithms.graphs": ["permute"],
}
"""Names outside this repository that others import: they stay, or CHANGELOG.md says what takes their place."""


@pytest.mark.parametrize(("module", "names"), PUBLIC.items())
def test_public_names_stay(module: str, names: list[str]) -> None:
    imported = importlib.import_module(module)
    assert [name for name in names if not callable(getattr(imported, name, None))] == []


def test_public_functions_take_what_they_took() -> None:
    keywords = {
        "sigma2": 1.0,
        "sigma0_2": 1.0,
        "gamma": 7.0,
        "prior_mean": 0.0,
        "sweeps": 5,
        "seed": 0,
        "average": "map",
    }
    taken = inspect.signature(matching.match_layer).parameters
    assert {name: taken[name].default for name in keywords} == keywords
    assert {"assignments", "weights", "counts"} <= {field.name for field in fields(matching.LayerMatch)}
    assert "threshold" in inspect.signature(cka.rbf_cka).parameters
    assert {"config", "out", "engine"} <= inspect.signature(fedhet.run).parameters.keys()
    names = importlib.import_module("fedhet.registry")
    listed = [names.methods(), names.models(), names.datasets(), names.partitions()]
    assert all(each and all(isinstance(name, str) for name in each) for each in listed)
