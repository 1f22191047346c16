"""Runs told to TensorBoard, Weights & Biases and MLflow, in stand-ins for those that are not installed."""

import sys
from types import SimpleNamespace

import pytest

import fedhet
from fedhet.errors import ConfigError

pytestmark = pytest.mark.usefixtures("home", "no_report")


def run(tiny, folder, log):
    settings = {"method": "fedavg", "clients": 2, "rounds": 2, "closing_epochs": 0, "log": log}
    return fedhet.run(settings, model=tiny.model, data=tiny.data, out=folder)


@pytest.mark.parametrize("log", ["tensorboard", "wandb", "mlflow"])
def test_every_round_is_told_and_the_run_is_ended(log, tiny, tmp_path, monkeypatch):
    told, begun, ended = {}, [], []

    def add(values, step):
        told.setdefault(step, {}).update(values)

    def begin(*args, **settings):
        begun.append((args, settings))
        return SimpleNamespace(log=add, finish=lambda **how: ended.append(how))

    def add_scalar(name, value, step):
        add({name: value}, step)

    writer = SimpleNamespace(add_scalar=add_scalar, close=lambda: ended.append(0))
    board = SimpleNamespace(SummaryWriter=lambda where: begun.append(where) or writer)
    stand_ins = {
        "tensorboard": ("torch.utils.tensorboard", board),
        "wandb": ("wandb", SimpleNamespace(init=begin)),
        "mlflow": (
            "mlflow",
            SimpleNamespace(
                set_tracking_uri=lambda uri: begun.append(uri),
                set_experiment=lambda name: None,
                start_run=begin,
                log_params=lambda values: begun.append(values),
                log_metrics=add,
                end_run=lambda *status: ended.append(status),
            ),
        ),
    }  # fmt: skip
    name, module = stand_ins[log]
    monkeypatch.setitem(sys.modules, name, module)
    done = run(tiny, tmp_path / "run", log)
    weighted = "received.accuracy.weighted" if log == "mlflow" else "received/accuracy/weighted"
    assert sorted(told) == [0, 1, 2, 3]
    assert told[3][weighted] == done.summary["personal_accuracy"]["weighted"]
    assert len(ended) == 1
    assert str(tmp_path) in str(begun)


def test_missing_and_unknown_loggers(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="log = 'wandb' needs wandb, which is not installed: pip install wandb"):
        run(tiny, tmp_path / "run", "wandb")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: 1 / 0))
    with pytest.raises(ConfigError, match="log = 'wandb' cannot start: ZeroDivisionError: division by zero"):
        run(tiny, tmp_path / "run", "wandb")
    assert run(tiny, tmp_path / "run", "").summary["status"] == "completed"  # nothing was left that is in its way
    with pytest.raises(ConfigError, match="unknown log 'tensorbord'; did you mean 'tensorboard'"):
        run(tiny, tmp_path / "other", "tensorbord")
