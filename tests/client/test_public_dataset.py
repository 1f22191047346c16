"""The public dataset at clients: sent by the server or brought along, with labels where the method needs them."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fedhet.client import ClientSide
from fedhet.config import configuration
from fedhet.data import PublicDataset
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower.grid import LocalGrid
from fedhet.methods import registry
from fedhet.methods.method import Method, Traits
from fedhet.server import FederatedStrategy

PUBLIC = PublicDataset(torch.arange(40.0).view(10, 4), torch.arange(10) % 3)
SEEN = []


class Seeing(ClientSide):
    """Notes the public dataset that it is given."""

    def begin(self, payload):
        public = self.client.public
        SEEN.append((self.client.name, public.digest, public.labels is not None, len(public)))


@pytest.fixture(autouse=True)
def _methods(monkeypatch, home):
    """Two methods that need a public dataset, and what clients saw of it; state goes to a home of the test's own."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "client_side", lambda name: Seeing)
    for need in ("inputs", "labelled"):
        registry.register(Method(need, Traits(public=need)))
    SEEN.clear()
    yield
    configuration.parse.cache_clear()


def start(method, app, watch, shared=None, clients=2):
    config = configuration.resolve({"method": method, "rounds": 1})
    strategy = FederatedStrategy(config, public=shared, observers=[watch])
    strategy.start(LocalGrid(app, clients))
    return strategy


def bringing(tiny, shared):
    """Data that bring this public dataset along."""

    def data(client):
        train, test = tiny.data(client)
        return {"train": train, "test": test, "public": shared(client) if callable(shared) else shared}

    return tiny.app(data=data)


@pytest.mark.parametrize(("method", "expected"), [("labelled", PUBLIC), ("inputs", PUBLIC.unlabelled)])
def test_server_public_dataset(method, expected, tiny, watch):
    strategy = start(method, tiny.app(), watch, PUBLIC)
    assert {seen[1:] for seen in SEEN} == {(expected.digest, method == "labelled", 10)}
    assert (strategy.state.public, strategy.state.public_size) == (expected.digest, 10)
    size = 10 * 4 * 4 + (method == "labelled") * 10 * 8
    assert [row.bytes_down for row in watch.clients if row.round == 0] == [size, size]


@pytest.mark.parametrize(("method", "expected"), [("labelled", PUBLIC), ("inputs", PUBLIC.unlabelled)])
def test_client_public_dataset(method, expected, tiny, watch):
    strategy = start(method, bringing(tiny, (PUBLIC.inputs, PUBLIC.labels)), watch)
    assert {seen[1:] for seen in SEEN} == {(expected.digest, method == "labelled", 10)}
    assert (strategy.state.public, strategy.state.public_size) == (expected.digest, 10)
    assert [row.bytes_down for row in watch.clients if row.round == 0] == [0, 0]


def test_missing_labels(tiny, watch):
    with pytest.raises(ConfigError, match="labelled needs labels of the public dataset, which has only inputs"):
        start("labelled", tiny.app(), watch, PUBLIC.unlabelled)
    with pytest.raises(FedhetError, match="clients .0, 1.: there is no labelled public dataset, but"):
        start("labelled", bringing(tiny, PUBLIC.inputs), watch)


def test_missing_public_dataset(tiny, watch):
    with pytest.raises(FedhetError, match="there is no public dataset, but the method needs it: have the clients"):
        start("inputs", tiny.app(), watch)


@pytest.mark.parametrize(
    ("method", "odd", "other", "why"),
    [
        ("inputs", "0", PUBLIC.inputs + 1, "the same examples in the same order"),
        ("inputs", "1", PUBLIC.inputs + 1, "the same examples in the same order"),
        ("inputs", "1", None, "there is no public dataset, but the method needs it"),
        ("labelled", "1", (PUBLIC.inputs, PUBLIC.labels.roll(1)), "the same examples in the same order"),
    ],
)
def test_one_client_with_another_public_dataset_is_refused(method, odd, other, why, tiny, watch):
    ordinary = PUBLIC.inputs if method == "inputs" else (PUBLIC.inputs, PUBLIC.labels)
    start(method, bringing(tiny, lambda client: other if client.name == odd else ordinary), watch, clients=3)
    (failure,) = watch.rows[0]["failures"]
    assert failure["client"] == odd
    assert why in failure["reason"]


def test_a_collate_fn_that_pads_no_texts_does_not_excuse_other_inputs(tiny, watch):
    def data(client):
        return tuple(
            DataLoader(TensorDataset(*part), batch_size=8, collate_fn=lambda rows: default_collate(rows))
            for part in tiny.data(client)
        )

    with pytest.raises(FedhetError, match="the server's public dataset has inputs of shape"):
        start("inputs", tiny.app(data=data), watch, PublicDataset(torch.zeros(10, 5)))


def test_a_refused_public_dataset_is_not_stored(tiny, watch, home):
    public = PublicDataset(torch.zeros(10, 5), PUBLIC.labels)
    with pytest.raises(FedhetError, match="the server's public dataset has inputs of shape"):
        start("labelled", tiny.app(), watch, public)
    assert not [*home.rglob("public/*")]
    start("labelled", tiny.app(), watch, PUBLIC)
    assert [*home.rglob("public/*")]
