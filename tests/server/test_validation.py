"""Validation in a run: measured, recorded, and the reason to stop early."""

import json

import pytest

from fedhet import config as configuration
from fedhet.client.app import make_client_app
from fedhet.engines.local import run_locally
from fedhet.errors import ConfigError
from fedhet.observing import Observer
from fedhet.results.history import read_history
from fedhet.server.reporter import watch_validation
from fedhet.state import State

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
        config = config.but(chosen=frozenset({"clients", *settings}))
        folder = tmp_path / name
        run_locally(config, folder, app=app, observers=observers, resume=(folder / "config.toml").exists())
        return read_history(folder), json.loads((folder / "summary.json").read_text())

    return federate


@pytest.mark.parametrize(("method", "scored"), [("fedavg", "received"), ("local", "trained")])
def test_every_evaluation_has_one_on_the_validation_part(federate, method, scored):
    rows, summary = federate(method=method, validation=0.2, evaluate_every=2)
    assert [row["round"] for row in rows if "validation" in row] == [2, 4, 5]
    last = rows[-1]["validation"][scored]
    assert summary["validation_accuracy"] == last["accuracy"]
    assert last["accuracy"]["weighted"] * 12 == pytest.approx(round(last["accuracy"]["weighted"] * 12))  # of 3 x 4
    assert summary["examples"]["labelled"] == 3 * 16
    assert summary["stopped_early"] is None


def test_without_a_validation_part_nothing_of_it_is_told(federate):
    rows, summary = federate(rounds=1)
    assert not any("validation" in row for row in rows)
    assert not {"validation_accuracy", "stopped_early"} & summary.keys()


def test_ones_own_data_lose_their_part_of_the_training_examples(federate, tiny):
    app = make_client_app(tiny.model, tiny.data)
    rows, summary = federate(app=app, validation=0.5, rounds=1)
    assert summary["examples"]["labelled"] == 7 + 9 + 11
    assert rows[-1]["validation"]["received"]["clients"] == 3


def test_only_the_test_part_for_all_still_validates(federate):
    rows, _ = federate(rounds=1, test_on="global", validation=0.2)
    assert rows[-1]["received"] is None
    assert rows[-1]["validation"]["received"] is not None


def test_work_is_counted_by_round_and_summed(federate):
    rows, summary = federate(local_epochs=2)
    assert [row["work"]["steps"] for row in rows] == [0, *[3 * 2 * 3] * 4, 0]
    assert summary["work"] == {"private_steps": 72, "steps": 72, "forwards": 4 * 3 * 2 * 20}


def test_further_batches_of_a_term_count_as_forward_passes(federate):
    settings = {"fedhenn.rad-batch": 32, "public_samples": 64, "rounds": 2, "batch_size": 10, "closing_epochs": 0}
    settings |= {"fraction_train": 1.0, "local_epochs": 1, "fedhenn.schedule": "constant"}
    _, summary = federate(method="fedhenn", **settings)
    assert summary["examples"] == {"labelled": 60, "unlabelled": 64}
    # Two rounds of three clients with two steps each; in the first round there are no peers' kernels yet.
    assert summary["work"]["steps"] == 12
    assert summary["work"]["forwards"] in (120 + 6 * 32, 120 + 12 * 32)


def stopped(accuracies, patience):
    state = State()
    for round, accuracy in enumerate(accuracies, start=1):
        row = {"round": round, "validation": {"trained": {"accuracy": {"weighted": accuracy}}, "received": None}}
        if not state.stopped:
            watch_validation(state, row, "trained", patience)
    return state.stopped


@pytest.mark.parametrize(
    ("accuracies", "patience", "round"),
    [
        ([0.1, 0.2, 0.3, 0.4], 1, 0),
        ([0.1, 0.2, 0.2, 0.4], 1, 3),
        ([0.1, 0.2, 0.2, 0.4], 2, 0),
        ([0.5, 0.4, 0.3, 0.6], 2, 3),
        ([0.5, 0.4, 0.3, 0.6], 0, 0),
        ([0.5, None, 0.4, 0.3], 2, 4),
    ],
)
def test_training_ends_after_so_many_evaluations_without_a_better_one(accuracies, patience, round):
    assert stopped(accuracies, patience) == round


def test_a_run_that_ended_early_says_so_and_closes_as_usual(federate):
    settings = {"validation": 0.2, "rounds": 30, "learning_rate": 1e-6, "early_stopping": 2}
    rows, summary = federate(**settings)
    assert (summary["stopped_early"], summary["rounds"], summary["status"]) == (3, 3, "completed")
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["final"]
    rows, summary = federate("closing", closing_epochs=1, **settings)
    assert (summary["stopped_early"], summary["rounds"]) == (3, 4)
    assert len(rows[4]["participants"]) == 3
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4, 5]


def test_an_observer_can_end_training(federate):
    class AfterTwo(Observer):
        def round(self, run, report):
            if report.row["round"] == 2:
                run.state.stopped = 2

    rows, summary = federate(observers=[AfterTwo()])
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["final"]
    assert (summary["rounds"], summary["status"]) == (2, "completed")


def test_a_resumed_run_ends_where_it_would_have_ended(federate, tmp_path):
    settings = {"validation": 0.2, "rounds": 30, "learning_rate": 1e-6, "early_stopping": 3}
    whole, _ = federate("whole", **settings)

    inner = make_client_app()

    def app(message, context):
        if message.metadata.group_id == "3":
            raise KeyboardInterrupt
        return inner(message, context)

    with pytest.raises(KeyboardInterrupt):
        federate("cut", app=app, **settings)
    resumed, summary = federate("cut", **settings)
    without = [
        [{key: value for key, value in row.items() if key != "timing"} for row in rows] for rows in (whole, resumed)
    ]
    assert without[0] == without[1]
    assert summary["stopped_early"] == 4


def test_early_stopping_needs_a_validation_part():
    with pytest.raises(ConfigError, match=r"early-stopping has no effect with validation = 0.0: set validation, or"):
        configuration.resolve(SETTINGS | {"early-stopping": 3})
    with pytest.raises(ConfigError, match=r"validation = 1\.0: must be below 1"):
        configuration.resolve(SETTINGS | {"validation": 1})
