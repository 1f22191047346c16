"""Run folders: one run at a time, and bad input is refused before anything is written."""

import fcntl

import pytest
from typer.testing import CliRunner

import fedhet
from fedhet import cli
from fedhet.client.app import make_client_app
from fedhet.config import configuration
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower.grid import LocalGrid

pytestmark = pytest.mark.usefixtures("no_report", "home")

SETTINGS = {
    "method": "fedavg",
    "architectures": "mlp",
    "clients": 2,
    "rounds": 2,
    "samples-per-client": 16,
    "public-samples": 0,
    "closing-epochs": 0,
}


@pytest.fixture
def done(tmp_path):
    fedhet.run(SETTINGS, out=tmp_path / "run")
    return tmp_path / "run"


def test_a_folder_is_one_runs_at_a_time(done):
    with (done / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
        with pytest.raises(ConfigError, match="is in use by another run"):
            fedhet.run({"rounds": 3}, resume=done)
        assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before
        with pytest.raises(ConfigError, match="is in use by another run"):
            _start(SETTINGS | {"resume": True}, done)
    assert fedhet.run({"rounds": 3}, resume=done).summary["rounds"] == 3


def test_resuming_with_fewer_rounds_is_refused(done):
    summary = (done / "summary.json").read_text()
    with pytest.raises(ConfigError, match=r"rounds = 1: .* has 2 rounds already"):
        fedhet.run({"rounds": 1}, resume=done)
    assert (done / "summary.json").read_text() == summary


def test_an_empty_configuration_is_no_run(done):
    (done / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="contains no run to resume"):
        fedhet.run(resume=done)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"clients": 10**11}, "clients = 100000000000: must be at most 100000"),
        ({"input-size": 10**5}, "input-size = 100000: must be at most 2048"),
        ({"method": "fedma", "fedma.max-growth": 0.5}, "max-growth = 0.5: must be at least 1, or 0"),
        ({"method": "fedhenn", "fedhenn.rad-batch": 7}, "rad-batch = 7: must be at least 8, or 0"),
        ({"method": "fedmd"}, "public-samples = 500"),
        ({"device": "cuda"}, "torch sees no GPU"),
        ({"aggregation": "best"}, "must be one of mean, median"),
        ({"threads-per-client": 10**6}, "threads-per-client = 1000000: must be at most 1024"),
        ({"method": "fedproto", "fedproto.width": 10**9}, "fedproto.width = 1000000000: must be at most 65536"),
        ({"input-size": 2048, "architectures": "vgg9"}, "vgg9 has 34.4 GB of weights, and training needs three times"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(settings, reason, tmp_path, monkeypatch):
    monkeypatch.setattr("fedhet.setup.client_setup.memory", lambda: 16 * 10**9)
    arguments = [f"--set={key}={value}" for key, value in {**SETTINGS, **settings}.items()]
    made = CliRunner().invoke(cli.app, ["run", "local/digits", *arguments, "--out", str(tmp_path / "run")])
    assert made.exit_code == 2, made.output
    assert reason in made.output.replace("\n", " ")
    assert "Traceback" not in made.output
    assert not (tmp_path / "run").exists()


def _start(settings, out):
    fedhet.FedAvg(configuration.resolve(settings | {"out": str(out)})).start(LocalGrid(make_client_app(), 2))


@pytest.mark.parametrize("hook", ["configure_fit", "aggregate_fit"])
def test_a_failing_hook_ends_the_run(hook, tmp_path, monkeypatch):
    whole, ordinary = fedhet.run(SETTINGS, out=tmp_path / "whole"), getattr(fedhet.FedAvg, hook)

    def breaks(strategy, round, given):
        if round == 2:
            raise ArithmeticError("singular")
        return ordinary(strategy, round, given)

    with monkeypatch.context() as patched:
        patched.setattr(fedhet.FedAvg, hook, breaks)
        with pytest.raises(FedhetError, match=rf"round 2: {hook} of fedavg failed .*singular.* after round 1"):
            fedhet.run(SETTINGS, out=tmp_path / "run")
    assert fedhet.run(resume=tmp_path / "run").summary["personal_accuracy"] == whole.summary["personal_accuracy"]


def test_too_few_clients_fail_the_run(tiny):
    def model(client):
        return tiny.model() if client.name != "2" else None

    with pytest.raises(FedhetError, match=r"only 2 clients can take part, but 3 are needed; .*:\n  .*returned None"):
        fedhet.FedAvg(rounds=1, min_clients=3).start(LocalGrid(tiny.app(model), 3))
