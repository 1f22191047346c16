"""The base strategy, on in-process nodes with a user's own tiny model and data."""

import numpy as np
import pytest
import torch

import fedhet
from fedhet.client import ClientSide
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower.grid import FIRST_NODE, LocalGrid
from fedhet.flower.messages import STOPPED
from fedhet.methods import registry
from fedhet.server import FederatedStrategy, federation

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def start(tmp_path, tiny, new_watch):
    """Starts a strategy on so many nodes; returns strategy, observer and Flower's result."""

    def start(name="FedAvg", clients=3, app=None, grid=None, arguments=None, **settings):
        watch = new_watch()
        settings = {"rounds": 2, "learning_rate": 0.1, "state_dir": str(tmp_path / "state"), **settings}
        strategy = getattr(fedhet, name)(observers=[watch], **settings)
        grid = grid or LocalGrid(app or tiny.app(), clients)
        result = strategy.start(grid, **(arguments or {}))
        return strategy, watch, result

    return start


def test_order_of_replies_does_not_matter(start, tiny):
    class Shuffled(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            return list(super().send_and_receive(messages, timeout=timeout))[::-1]

    app = tiny.app()
    one, rows, _ = start(clients=12)
    other, shuffled, _ = start(grid=Shuffled(app, 12), clients=12)
    for name, array in one.state.model.items():
        assert array.tobytes() == other.state.model[name].tobytes()
    assert rows.rows[1]["participants"] == [str(client) for client in range(12)]
    assert rows.repeatable == shuffled.repeatable


def test_of_two_equally_large_groups_that_of_the_first_client_is_admitted(start, tiny):
    class Renumbered(LocalGrid):
        def __init__(self, app, clients):
            super().__init__(app, clients)
            for (node, _), context in zip([*self._contexts.items()], [*self._contexts.values()][::-1], strict=True):
                context.node_id = node
                self._contexts[node] = context

    app = tiny.app(lambda client: torch.nn.Linear(4, 3, bias=client.partition_id % 2 == 0))
    for grid in (LocalGrid, Renumbered):  # the numbers of nodes are random on Ray
        _, watch, _ = start(grid=grid(app, 4), clients=4)
        assert watch.rows[1]["participants"] == ["0", "2"]
        assert {failure["client"] for failure in watch.rows[0]["failures"]} == {"1", "3"}


@pytest.mark.parametrize(("fraction", "expected"), [(0.01, 1), (0.25, 3), (1.0, 10)])
def test_number_of_participants(start, fraction, expected):
    _, watch, _ = start(clients=10, fraction_train=fraction, rounds=3)
    drawn = [row["participants"] for row in watch.rows[1:4]]
    assert [len(clients) for clients in drawn] == [expected] * 3
    assert expected == 10 or len({tuple(clients) for clients in drawn}) > 1


def test_absent_clients_are_not_replaced(start, tiny):
    class Leaving(LocalGrid):
        calls = 0

        def get_node_ids(self):
            self.calls += 1
            return [node for node in super().get_node_ids() if node != FIRST_NODE + 1 or self.calls <= 2]

    app = tiny.app()
    _, watch, _ = start(grid=Leaving(app, 3))
    assert watch.rows[1]["participants"] == ["0", "2"]
    assert watch.rows[1]["failures"] == [{"client": "1", "reason": "is absent"}]


def test_no_nodes_left(start, tiny):
    class Gone(LocalGrid):
        calls = 0

        def get_node_ids(self):
            self.calls += 1
            return super().get_node_ids() if self.calls <= 3 else []

    with pytest.raises(FedhetError, match="no client can take part:\n.*no nodes"):
        start(grid=Gone(tiny.app(), 2))


def test_chosen_number_of_clients(monkeypatch, tiny):
    monkeypatch.setattr(federation, "GRACE", 0.0)
    grid = LocalGrid(tiny.app(), 2)
    with pytest.raises(ConfigError, match="clients = 4, but 2 nodes are connected"):
        fedhet.FedAvg(clients=4).start(grid)


def test_no_client_can_serve(start, tiny):
    def data(client):
        raise FedhetError(f"the disk of {client.name} is full")

    with pytest.raises(FedhetError, match="client 0: the disk of 0 is full\n.*client 1: the disk of 1 is full"):
        start(clients=2, app=tiny.app(data=data))


def test_client_that_cannot_serve(start, tiny):
    def data(client):
        if client.name == "1":
            raise FedhetError("the disk is full")
        return tiny.data(client)

    _, watch, _ = start(app=tiny.app(data=data))
    assert watch.rows[0]["failures"] == [{"client": "1", "reason": "the disk is full"}]
    assert [row["participants"] for row in watch.rows[1:3]] == [["0", "2"]] * 2
    assert all(row["failures"] == [] for row in watch.rows[1:])


def test_first_weights_of_another_client(start, failing):
    strategy, watch, _ = start(app=failing((None, "first", "0")))
    assert watch.rows[0]["failures"][0]["client"] == "0"
    clean, _, _ = start()
    assert all(np.array_equal(array, clean.state.model[name]) for name, array in strategy.state.model.items())


def test_no_reply_in_the_first_round(start, failing):
    with pytest.raises(
        FedhetError,
        match="no client gave a valid reply in the first round; .*:\n  3 clients .*: the client failed: .*order",
    ):
        start(app=failing((None, "train", None)))


def test_round_with_too_few_replies(start, failing, caplog):
    strategy, watch, _ = start(app=failing((3, "train", "1"), (3, "train", "2")), rounds=3, min_clients=2)
    assert "the last round that counted is 2 of 3" in caplog.messages
    before, _, _ = start(rounds=2)
    model = strategy.state.model
    assert all(np.array_equal(array, model[name]) for name, array in before.state.model.items())
    assert [record.trained for record in strategy.state.clients.values()] == [2, 2, 2]
    assert [failure["client"] for failure in watch.rows[3]["failures"]] == ["1", "2"]


def test_a_round_in_which_ray_is_stopped_does_not_count(start, around):
    def before(where, message):
        if where == (2, "train", "1"):
            raise RuntimeError(STOPPED)

    with pytest.raises(FedhetError, match="Ray has ended, so this round does not count: resume the run"):
        start(app=around(before=before), rounds=3)


@pytest.mark.parametrize(("rounds", "last"), [(1, 0), (3, 1), (5, 2)])
def test_last_rounds_that_do_not_count(start, failing, rounds, last):
    places = [(number, "train", None) for number in range(last + 1, rounds + 1)]
    with pytest.raises(FedhetError, match=f"(all rounds after round {last} of|first round)(.|\n)*out of order"):
        start(app=failing(*places), rounds=rounds)
    if last and rounds > 2:  # one more that counts
        start(app=failing(*places[1:]), rounds=rounds)


def test_clients_without_test_examples(start, tiny, caplog):
    common = torch.ones(4, 4), torch.arange(4) % 3

    def without(*names):
        def data(client):
            train, (inputs, labels) = tiny.data(client)
            count = 0 if client.name in names else len(labels)
            return {"train": train, "test": (inputs[:count], labels[:count]), "common": common}

        return tiny.app(data=data)

    _, watch, _ = start(app=without("1", "2"))
    assert watch.rows[-1]["received"]["clients"] == 1
    start(app=without("0", "1", "2"))
    assert "no score, since no client evaluated what it received: give clients test examples" in caplog.text


def test_refused_client_changes_nothing(start, tiny):
    """The first clients' public dataset is too small: the run's is that of those who can take part."""

    def data(client):
        train, test = tiny.data(client)
        return {"train": train, "test": test, "public": torch.ones(4 if client.name < "2" else 16, 4)}

    settings = {"eta0": 0.1, "closing_epochs": 0, "fraction_train": 1.0}
    strategy, watch, _ = start("FedHeNN", clients=4, app=tiny.app(data=data), **settings)
    assert [failure["client"] for failure in watch.rows[0]["failures"]] == ["0", "1"]
    assert all("the public dataset has 4 examples" in failure["reason"] for failure in watch.rows[0]["failures"])
    assert watch.rows[1]["participants"] == ["2", "3"]
    assert strategy.state.public_size == 16


OF_ALL = {"method", "state_class", "copies"}
HOOKS = {
    *("common", "admit", "first_arrays", "first_model", "number_of_rounds", "participants"),
    *("payload_for", "configure_fit", "evaluation_payloads", "check_reply", "aggregate_fit", "size_of"),
    *("makes_global_model", "has_global_model", "global_arrays", "global_model"),
}


@pytest.mark.parametrize("name", registry.own_methods())
def test_methods_override_only_hooks(name):
    base = {name for each in FederatedStrategy.__mro__ for name in vars(each) if not name.startswith("__")}
    for each in registry.strategy(name).__mro__:
        if each is FederatedStrategy:
            break
        assert vars(each).keys() & base <= HOOKS | OF_ALL | {"_abc_impl", "_is_protocol"}


class Forgetful(ClientSide):
    def end(self, payload):
        self.client.memory = {"before": torch.ones(2)}
        return super().end(payload)


def test_memory_that_would_be_lost_is_refused(tmp_path):
    name = registry.name_of(fedhet.FedAvg.method.variant("forgetful", client=Forgetful))
    settings = {"preset": "", "clients": 2, "rounds": 1, "architectures": "mlp", "local-epochs": 1, "workers": 1}
    with pytest.raises(FedhetError, match="Forgetful sets client.memory, which would be lost: .* remembers = True"):
        fedhet.run({"method": name, **settings}, out=tmp_path / "run", progress=False)


class TestAggregateFit:
    """What a method's own `aggregate_fit` returns."""

    @pytest.fixture
    def returning(self, tiny, new_watch, tmp_path):
        def run(result):
            class Own(fedhet.FedAvg):
                def aggregate_fit(self, round, replies):
                    super().aggregate_fit(round, replies)
                    return result

            watch = new_watch()
            Own(observers=[watch], rounds=1, state_dir=str(tmp_path)).start(LocalGrid(tiny.app(), 2))
            return watch

        return run

    @pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), torch.tensor([0.5]), 0.5], ids=repr)
    def test_numbers_of_any_kind_are_recorded(self, returning, value):
        assert returning({"spread": value}).rows[1]["metrics"]["spread"] == 0.5

    @pytest.mark.parametrize(
        ("result", "reason"),
        [
            (None, "it returned None: return a dict of metrics by name"),
            ({1: 0.5}, "it returned {1: 0.5}: return a dict of metrics by name"),
            ({"spread": np.ones(2)}, r"its metric 'spread' is array\(\[1., 1.\]\): return a number"),
            ({"spread": "wide"}, "its metric 'spread' is 'wide': return a number"),
        ],
    )
    def test_other_values_are_refused_by_name(self, returning, result, reason):
        with pytest.raises(FedhetError, match=f"round 1: aggregate_fit of fedavg failed .*{reason}"):
            returning(result)
