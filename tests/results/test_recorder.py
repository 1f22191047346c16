import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from synthetic_runs import history_row

from fedhet.config import configuration
from fedhet.errors import FedhetError
from fedhet.messages import to_tensor
from fedhet.methods.method import Traits
from fedhet.methods.sharing import EVERYTHING
from fedhet.results.history import read_clients, read_history
from fedhet.results.observers import RoundReport, RunInfo
from fedhet.results.recorder import RunDirectory, check_folder
from fedhet.results.summary import summarised
from fedhet.server import ClientRecord, State
from fedhet.utils.files import read_tensors, write_tensors
from fedhet.utils.statistics import ClientRow

pytestmark = pytest.mark.usefixtures("no_report")


CONFIG = configuration.resolve({"method": "fedavg", "rounds": 3, "learning-rate": 0.05})


def run_of(round=0):
    clients = {"0": ClientRecord(5, "mlp", round), "1": ClientRecord(7, "mlp", round)}
    return RunInfo(
        "fedavg",
        Traits(networks="equal", shares=EVERYTHING),
        State(round, clients, model={"w": np.full(2, float(round), np.float32)}),
        devices=("cpu",),
    )


def report(number, value=0.5, **more):
    some = {"participants": ["0", "1"], "train_loss": 0.1 + 0.2, "bytes_up": 8, "bytes_down": 4}
    row = history_row(number, received=value, **some, timing={"seconds": 1.5}, **more)
    return RoundReport(row, [ClientRow(number, c, "mlp", 5, 0.1 + 0.2, None, 4, 2) for c in "01"])


def record(directory, *numbers):
    for number in numbers:
        directory.round(run_of(number), report(number, number / 10))


def test_files_of_a_run(tmp_path):
    directory = RunDirectory(tmp_path / "run", CONFIG, "local")
    record(directory, 0, 1, 2, 3)
    run = run_of(3)
    directory.round(run, report(4, 0.75, final=True))
    write_tensors(tmp_path / "run" / "state" / "models" / "1.safetensors", {"w": to_tensor(np.ones(2))})
    directory.finished(run)
    folder = tmp_path / "run"
    assert [row["round"] for row in read_history(folder)] == [0, 1, 2, 3, 4]
    assert read_history(folder)[1] == report(1, 0.1).row
    assert read_clients(folder)[2:4] == report(1).clients
    assert (folder / "clients.csv").read_text().splitlines()[0] == (
        "round,client,architecture,examples,accuracy,loss,bytes_up,bytes_down,epsilon"
    )
    assert read_tensors(folder / "models" / "global.safetensors")["w"].tolist() == [3, 3]
    assert read_tensors(folder / "models" / "1.safetensors")["w"].tolist() == [1, 1]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.pop("ran").keys() >= {"host", "command"}
    assert summary.pop("versions").keys() >= {"fedhet", "flwr", "python", "torch"}
    assert summary.pop("cpu_seconds") >= 0
    assert summary.pop("peak_memory") > 0
    assert summary | {"seconds": 0} == {
        "method": "fedavg",
        "dataset": "digits",
        "clients": 2,
        "rounds": 3,
        "seed": 0,
        "engine": "local",
        "devices": ["cpu"],
        "personal": "received",
        "task": "",
        "metric": "accuracy",
        "predicts_by": "the client's network",
        "personal_accuracy": dict.fromkeys(("weighted", "mean", "std", "min", "max"), 0.75),
        "received_accuracy": dict.fromkeys(("weighted", "mean", "std", "min", "max"), 0.75),
        "trained_accuracy": None,
        "global_accuracy": {"weighted": 0.75, "mean": 0.75},
        "examples": {"labelled": 12, "unlabelled": 0},
        "work": {"private_steps": 0, "steps": 0, "forwards": 0},
        "bytes_up": 40,
        "bytes_down": 20,
        "failures": 0,
        "seconds": 0,
        "status": "completed",
    }


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["flwr-serverapp", "--token", "5ec4e7", "--parent-pid", "1"], "flwr-serverapp --token ... --parent-pid 1"),
        (
            ["x.py", "--token=5ec4e7", "--api-key", "5ec4e7", "WANDB_API_KEY=5ec4e7"],
            "x.py --token=... --api-key ... WANDB_API_KEY=...",
        ),
        (
            ["x.py", "--password=my pass phrase", "--secret", "it's a secret", "--seed", "3"],
            "x.py --password=... --secret ... --seed 3",
        ),
        (["x.py", "https://me:5ec4e7@host/data"], "x.py https://...@host/data"),  # pragma: allowlist secret
        (["x.py", "https://me:5e@c4e7@host/data"], "x.py https://...@host/data"),  # pragma: allowlist secret
        (["fedhet", "run", "--set", "seed=3"], "fedhet run --set seed=3"),
    ],
)
def test_secrets_in_a_command_line_are_not_written(words, written, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", words)
    directory = RunDirectory(tmp_path / "run", CONFIG, "local")
    record(directory, 0)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["ran"]["command"] == written


def test_its_configuration_is_complete(tmp_path):
    RunDirectory(tmp_path, CONFIG.replace(state_dir=str(tmp_path / "state"), out="elsewhere"), "local")
    table = tomllib.loads((tmp_path / "config.toml").read_text())
    assert {"fedhet", "flwr", "torch", "python"} <= table["versions"].keys()
    assert "out" not in table
    assert "state-dir" not in table
    assert configuration.resolve(configuration.read(tmp_path / "config.toml")) == CONFIG


@pytest.mark.parametrize("place", ["state", "state-of-others"])
def test_identity_of_a_run(place, tmp_path):
    config = CONFIG.replace(state_dir=str(tmp_path / place))
    first = RunDirectory(tmp_path, config, "local").resumed(State(run="drawn"))
    assert first.run == ("" if place == "state" else "drawn")
    assert RunDirectory(tmp_path / "other", config, "flwr", simulated=False).resumed(State(run="drawn")).run == "drawn"


def test_the_last_round_counts(tmp_path):
    directory = RunDirectory(tmp_path, CONFIG, "local")
    for number, value in ((1, 0.9), (2, 0.3)):
        directory.round(run_of(number), report(number, value))
    assert summarised(read_history(tmp_path), run_of(2), CONFIG)["personal_accuracy"]["weighted"] == 0.3


def test_earlier_runs_are_never_overwritten(tmp_path):
    record(RunDirectory(tmp_path, CONFIG, "local"), 0, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(FedhetError, match="already contains a run"):
        check_folder(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with pytest.raises(FedhetError, match="contains no run to resume"):
        check_folder(tmp_path / "other", resume=True)


def test_failed_runs_have_a_reason(tmp_path):
    directory = RunDirectory(tmp_path, CONFIG, "local")
    record(directory, 0)
    for error, reason in ((FedhetError("no client"), "no client"), (KeyError("a"), "KeyError: 'a'")):
        directory.failed(run_of(), error)
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert (summary["status"], summary["error"]) == ("failed", reason)


def files(folder):
    return {name: (folder / name).read_bytes() for name in ("history.jsonl", "clients.csv", "config.toml")}


def test_resuming_goes_back_to_the_last_complete_round(tmp_path):
    record(RunDirectory(tmp_path / "whole", CONFIG, "local"), 0, 1, 2)
    folder = tmp_path / "run"
    directory = RunDirectory(folder, CONFIG, "local")
    record(directory, 0, 1, 2)
    # A crash after the rows of a round, and before its state; another in mid-write.
    for path in (folder / "history.jsonl", folder / "clients.csv"):
        lines = path.read_text().splitlines()
        path.write_text(
            path.read_text() + lines[-1].replace('"round": 2', '"round": 3').replace("2,", "3,", 1) + "\n3,0,m"
        )
    directory.finished(run_of(2))
    resumed = RunDirectory(folder, CONFIG, "local", resume=True)
    assert resumed.resumed(State()).round == 2
    resumed.started(run_of(2), 3, 3)
    assert files(folder) == files(tmp_path / "whole")
    assert not (folder / "summary.json").exists()
    assert not list((folder / "models").iterdir())
    assert resumed.earlier_seconds == 4.5
    record(resumed, 3)
    assert [row["round"] for row in read_history(folder)] == [0, 1, 2, 3]


def test_resuming_before_the_first_checkpoint(tmp_path):
    RunDirectory(tmp_path, CONFIG, "local")
    (tmp_path / "history.jsonl").write_text(json.dumps(report(0).row) + "\n")
    resumed = RunDirectory(tmp_path, CONFIG, "local", resume=True)
    assert resumed.resumed(fresh := State()) is fresh
    resumed.started(run_of(), 1, 3)
    assert read_history(tmp_path) == []
    assert read_clients(tmp_path) == []


@pytest.mark.parametrize("settings", [{"method": "fedkd"}, {"lr-schedule": "cosine"}, {}])
def test_a_resumed_run_with_other_plans(tmp_path, caplog, settings):
    config = configuration.resolve({"method": "fedavg", "rounds": 2, **settings})
    record(RunDirectory(tmp_path, config, "local"), 0, 1)
    RunDirectory(tmp_path, config.replace(rounds=4), "local", resume=True)
    assert ("the rounds so far ran with rounds = 2" in caplog.text) is bool(settings)


def test_personal_models_are_collected(tmp_path):
    config = CONFIG.replace(state_dir=str(tmp_path / "state-of-clients"))
    write_tensors(tmp_path / "state-of-clients" / "models" / "0.safetensors", {"w": to_tensor(np.ones(2))})
    directory = RunDirectory(tmp_path / "run", config, "local")
    record(directory, 0)
    directory.finished(run_of(0))
    assert (tmp_path / "run" / "models" / "0.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("history.jsonl", "flipped"),
        ("clients.csv", "shortened"),
        ("checkpoint/2.safetensors", "flipped"),
        ("checkpoint/2.safetensors", "missing"),
    ],
)
def test_damaged_runs_are_not_resumed(tmp_path, name, damage):
    record(RunDirectory(tmp_path, CONFIG, "local"), 0, 1, 2)
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        place = content.rindex(b"1" if path.suffix != ".safetensors" else bytes(1))
        content[place] ^= 1
    path.write_bytes(content[: len(content) // 2] if damage == "shortened" else content)
    if damage == "missing":
        path.unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if damage == "missing" and path.suffix == ".safetensors":
        assert RunDirectory(tmp_path, CONFIG, "local", resume=True).resumed(fresh := State()) is fresh
        return
    with pytest.raises(FedhetError, match="damaged"):
        RunDirectory(tmp_path, CONFIG, "local", resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_checkpoints_of_another_round(tmp_path):
    record(RunDirectory(tmp_path, CONFIG, "local"), 0, 1, 2)
    (tmp_path / "checkpoint" / "2.safetensors").rename(tmp_path / "checkpoint" / "1.safetensors")
    with pytest.raises(FedhetError, match="is damaged: its lines up to round 1 do not match the digest in"):
        RunDirectory(tmp_path, CONFIG, "local", resume=True).resumed(State())


@pytest.mark.parametrize("name", ["=1+1", "-a", "＝1", "a\x1b[31m", "a\u202e", "a\nb", "-0.5"])
def test_names_in_clients_csv(tmp_path, name):
    directory, said = RunDirectory(tmp_path, CONFIG, "local"), report(1)
    row = said.clients[0]
    said.clients[:] = [replace(row, client=name, architecture=name)]
    directory.round(run_of(1), said)
    text = (tmp_path / "clients.csv").read_text()
    assert all(char.isprintable() or char == "\n" for char in text)
    line = text.splitlines()[1].split(",")[1]
    assert line == name if name in ("-1", "-0.5") else line[0] in "'a"
    before = text
    RunDirectory(tmp_path, CONFIG, "local", resume=True)
    assert (tmp_path / "clients.csv").read_text() == before
    assert read_clients(tmp_path)[0].client == line
