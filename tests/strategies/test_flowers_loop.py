"""Under Flower's own loop, which knows nothing of closing rounds and of rounds that a method settles."""

import json

import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedhet import FedAvg, FedMA, make_client_app, models
from fedhet.config.configuration import parse
from fedhet.flower import decode_arrays
from fedhet.flower.grid import LocalGrid

SETTINGS = {"dataset": "digits", "architectures": "mlp", "clients": 3, "samples_per_client": 32, "batch_size": 16}
CLOSING = {"rounds": 2, "closing_epochs": 5, "local_epochs": 1, "fraction_train": 0.34, "learning_rate": 0.05}
GROUPS = 2  # of the MLP, which has two hidden layers


class Watch:
    """A ClientApp, and an observer: both keep what they are told of training."""

    def __init__(self):
        self.app, self.asked, self.rows = make_client_app(), [], {}

    def __call__(self, message, context):
        if message.metadata.message_type == "train":
            record = message.content["request"]
            request, config = json.loads(record["request"]), parse(record["settings"])
            self.asked.append((request["round"], request["epochs"], config.rounds, request["evaluate"]))
        return self.app(message, context)

    def started(self, run, first, last):
        self.last = last

    def round(self, run, report):
        self.rows[report.row["round"]] = report.row

    def finished(self, run): ...

    def failed(self, run, error): ...


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture
def start(watch, tmp_path):
    """Starts a method in Flower's loop, from the initial weights of a model that is given."""

    def start(method, num_rounds, **settings):
        strategy = method(state_dir=str(tmp_path), observers=[watch], **SETTINGS, **settings)
        first = ArrayRecord(models.build("mlp", (1, 8, 8), 10).state_dict())
        grid = LocalGrid(watch, 3)
        return strategy, Strategy.start(strategy, grid, initial_arrays=first, num_rounds=num_rounds, timeout=5)

    return start


def test_no_closing_round(start, watch):
    _, result = start(FedAvg, 2, **CLOSING)
    assert set(result.train_metrics_clientapp) == {1, 2}
    assert [(round, epochs) for round, epochs, *_ in watch.asked] == [(1, 1), (2, 1)]
    # Who trains is evaluated in its reply, as in fedhet's own loop; all clients are, in an exchange of its own.
    assert all(evaluate for *_, evaluate in watch.asked)
    assert set(result.evaluate_metrics_clientapp) == {1, 2}


def test_closing_round_of_fedhets_loop(watch, tmp_path):
    FedAvg(state_dir=str(tmp_path), observers=[watch], **SETTINGS, **CLOSING).start(LocalGrid(watch, 3))
    assert [(round, epochs) for round, epochs, *_ in watch.asked] == [(1, 1), (2, 1), (3, 5), (3, 5), (3, 5)]
    assert watch.last == 3


def test_rounds_of_fedma(start, watch):
    passes = 2 * (GROUPS + 1)
    strategy, result = start(FedMA, passes, passes=2, local_epochs=1)
    assert strategy.config.rounds == passes
    assert {rounds for _, _, rounds, _ in watch.asked} == {passes}
    assert [row["failures"] for row in watch.rows.values()] == [[]] * len(watch.rows)
    assert {*range(1, passes + 1)} <= watch.rows.keys()
    assert (strategy.state.pass_, strategy.state.step) == (2, 0)
    widths = [len(decode_arrays(result.arrays)[f"body.{index}.weight"]) for index in (1, 3)]
    assert all(width >= 200 for width in widths)
    # There is a global model to evaluate once a pass is complete; that of round 0 is what Flower was given.
    evaluated = [round for round, metrics in result.evaluate_metrics_clientapp.items() if metrics]
    assert evaluated[-1] == passes
