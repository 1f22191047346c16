"""Small runs of a method on digits, and what can be seen of them."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fedhet import make_client_app
from fedhet.config import configuration
from fedhet.flower.grid import LocalGrid
from fedhet.flower.messages import decode
from fedhet.methods import registry
from fedhet.results.history import read_clients
from fedhet.results.observers import Observer
from fedhet.server.app import serve
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo
from fedhet.testing import Run
from fedhet.training import Training
from fedhet.utils.files import read_tensors

SETTINGS = {
    "dataset": "digits",
    "architectures": "mlp",
    "clients": 3,
    "rounds": 2,
    "local-epochs": 2,
    "batch-size": 16,
    "learning-rate": 0.1,
    "samples-per-client": 32,
    "closing-epochs": 0,
    "fraction-train": 1.0,
    "device": "cpu",  # tests compare to the last bit, and tensors of clients with those of the test
}


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    """The report takes longer than the run that it is on, and has tests of its own."""
    monkeypatch.setattr("fedhet.results.recorder.write_report", lambda folder: folder / "report.html")


@dataclass
class Done(Run):
    """A finished run.

    Attributes:
        config: its configuration.
        states: the strategy's state after each round.
        received: the arrays that each client was sent to train on, by round and client.
        values: the values that each client was sent to train with, likewise.
        sent: the arrays that each client sent after training, likewise.
        examples: the number of training examples that each client told.
    """

    config: Any = None
    states: dict[int, Any] = field(default_factory=dict)
    received: dict[tuple[int, str], Any] = field(default_factory=dict)
    values: dict[tuple[int, str], Any] = field(default_factory=dict)
    sent: dict[tuple[int, str], Any] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)

    @property
    def clients(self):
        """The rows of clients.csv."""
        return read_clients(self.folder)

    @property
    def state(self):
        """The strategy's state, read from the checkpoint."""
        state = registry.strategy(self.config.method_name).state_class
        return state.load(next((self.folder / "checkpoint").glob("*.safetensors")))

    @property
    def global_model(self):
        """The global model of the strategy's state."""
        strategy = registry.strategy(self.config.method_name)(self.config)
        strategy.state = self.state
        return strategy.global_model()

    @property
    def failures(self):
        """Round, client and reason of every failure."""
        return [(row["round"], each["client"], each["reason"]) for row in self.rows for each in row["failures"]]

    def info(self, client="0"):
        """A client as the configured population knows it."""
        return ClientInfo(client, int(client), self.config.clients, self.config)

    def kept(self, client, round):
        """A client's own network after a round; only that of the last two rounds is kept."""
        tensors = read_tensors(self.folder / "state" / "clients" / client / f"{round}.safetensors")
        return {name.removeprefix("model/"): tensor for name, tensor in tensors.items()}

    def saved(self, name):
        """A saved model's tensors."""
        return read_tensors(self.folder / "models" / f"{name}.safetensors")

    def network(self, client="0", tensors=None):
        """A client's personal network, or that with other tensors."""
        model = client_setup.model_of(self.info(client))
        model.load_state_dict(self.saved(client) if tensors is None else tensors, strict=False)
        return model.eval()


class Nodes(LocalGrid, Observer):
    """A grid whose nodes may come late, and an observer that tells it of rounds and keeps the strategy's states."""

    def __init__(self, app, clients, since):
        super().__init__(app, clients)
        self._since, self._last, self.states = since, -1, {}

    def get_node_ids(self):
        """The nodes that are there by now."""
        places = {node: context.node_config["partition-id"] for node, context in self._contexts.items()}
        return [node for node, place in places.items() if self._since.get(place, 0) <= self._last + 1]

    def round(self, run, report):
        self._last = report.row["round"]
        self.states[self._last] = copy.deepcopy(run.state)


@pytest.fixture(scope="session")
def federated():
    """Runs a method on digits in a folder.

    `since` says from which round on a partition is there, if not from the handshake (round 0); `before` is called with
    round and client before a client trains, and may raise.
    """

    def federated(folder, method, *, model=None, data=None, public=None, since=None, before=None, **settings):
        settings = {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}
        config = configuration.resolve(SETTINGS, over={"method": method, **settings})
        app = make_client_app(model, data)
        # Who is there is for the nodes to say, and the fixture's settings are no user's.
        origins = dict.fromkeys(config.chosen & settings.keys() - {"clients"}, "code")
        config = config.replace(state_dir=str(folder / "state"), origins=origins)

        def spying(message, context):
            key = int(message.metadata.group_id), str(context.node_config["partition-id"])
            trains = message.metadata.message_type == "train"
            if trains and before:
                before(*key)
            reply = app(message, context)
            if trains:
                payload = decode(message.content)
                done.received[key], done.values[key] = payload.arrays, payload.values
                if "metrics" in reply.content:
                    done.sent[key] = decode(reply.content).arrays
                    done.examples[key[1]] = reply.content["metrics"]["num-examples"]
            return reply

        grid = Nodes(spying, config.clients, since or {})
        done = Done(folder, config, grid.states)
        shared = client_setup.public_dataset(config) if public is None else public
        with torch.random.fork_rng(devices=[]):
            serve(config, grid, folder, engine="local", public=shared, observers=[grid])
        return done

    return federated


@pytest.fixture
def federate(federated, tmp_path):
    """Runs a method on digits, in a folder of its own, and tells what came of it (see `federated`)."""
    return lambda method, name="run", **settings: federated(tmp_path / name, method, **settings)


@pytest.fixture
def phases(monkeypatch):
    """Every phase of training, with the network's tensors before it and after it."""
    seen, result = [], Training.result

    def spying(training):
        before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
        trained = result(training)
        after = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
        seen.append((training.phase, before, after))
        return trained

    monkeypatch.setattr(Training, "result", spying)
    return seen


@pytest.fixture
def changed():
    """Names of the tensors that a phase changed."""

    def changed(before, after):
        return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}

    return changed
