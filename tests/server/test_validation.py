"""Validation in a run: measured, recorded, and the reason to stop early."""

import json

import pytest

from fedhet.client.app import make_client_app
from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.results.history import read_history
from fedhet.results.observers import Observer

pytestmark = pytest.mark.usefixtures("no_report")

SETTINGS = {
    "method": "fedavg",
    "architectures": "mlp",
    "clients": 3,
    "rounds": 4,
    "samples-per-client": 20,
    "learning-rate": 0.1,
    "batch-size": 8,
}


@pytest.fixture
def federate(tmp_path):
    def federate(name="run", app=None, observers=(), **settings):
        config = configuration.resolve({**SETTINGS, **{key.replace("_", "-"): v for key, v in settings.items()}})
        config = config.replace(origins=dict.fromkeys(["clients", *settings], "code"))
        folder = tmp_path / name
        run_locally(config, folder, app=app, observers=observers, resume=(folder / "config.toml").exists())
        return read_history(folder), json.loads((folder / "summary.json").read_text())

    return federate


@pytest.mark.parametrize(("method", "scored"), [("fedavg", "received"), ("local", "trained")])
def test_validation_in_every_evaluation(federate, method, scored):
    rows, summary = federate(method=method, validation=0.2, evaluate_every=2)
    assert [row["round"] for row in rows if "validation" in row] == [2, 4, 5]
    last = rows[-1]["validation"][scored]
    assert summary["validation_accuracy"] == last["accuracy"]
    assert last["accuracy"]["weighted"] * 12 == pytest.approx(round(last["accuracy"]["weighted"] * 12))  # of 3 x 4
    assert summary["examples"]["labelled"] == 3 * 16


def test_validation_part_of_own_data(federate, tiny):
    app = make_client_app(tiny.model, tiny.data)
    rows, summary = federate(app=app, validation=0.5, rounds=1)
    assert summary["examples"]["labelled"] == 7 + 9 + 11
    assert rows[-1]["validation"]["received"]["clients"] == 3


def test_work_is_counted(federate):
    rows, summary = federate(local_epochs=2)
    assert [row["work"]["steps"] for row in rows] == [0, *[3 * 2 * 3] * 4, 0]
    assert summary["work"] == {"private_steps": 72, "steps": 72, "forwards": 4 * 3 * 2 * 20}


def test_an_observer_can_end_training(federate):
    class AfterTwo(Observer):
        def round(self, run, report):
            if report.row["round"] == 2:
                run.state.stopped = 2

    rows, summary = federate(observers=[AfterTwo()])
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["final"]
    assert (summary["rounds"], summary["status"]) == (2, "completed")
