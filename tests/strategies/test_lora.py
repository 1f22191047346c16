"""Low-rank adapters, against a plain computation from the papers of the three ways in which they become one."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.config import configuration
from fedhet.errors import FedhetError, ModelError
from fedhet.methods import registry
from fedhet.utils.randomness import torch_generator
from tests.strategies.by_hand import WHO, assert_equal, examples_of, rounds_of

RANKS = {"0": 4, "1": 3, "2": 1}
LAYERS = ("1", "3")

SAME = {
    "rounds": 3,
    "local_epochs": 3,
    "batch_size": 1000,  # one batch an epoch, so that the order of examples is nobody's
    "momentum": 0.5,
    "partition": "dirichlet",
    "alpha": 1.0,
    "samples_per_client": 0,
    "lora.ranks": ",".join(map(str, RANKS.values())),
}


def network(client=None, seed=0):
    """A network of tanh layers, of the same weights for all clients."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 12), nn.Tanh(), nn.Linear(12, 10)
        return nn.Sequential(nn.Flatten(), *layers).double()


def outputs(weights, adapters, inputs):
    hidden = inputs.flatten(1)
    for layer in LAYERS:
        a, b = adapters[layer]
        hidden = torch.tanh(F.linear(hidden, weights[f"{layer}.weight"] + b @ a, weights[f"{layer}.bias"]))
    return F.linear(hidden, weights["5.weight"], weights["5.bias"])


def trained(weights, adapters, inputs, labels):
    """Adapters and head after three steps of SGD with momentum, from W and (A, B) of each layer."""
    head = {name: weights[name].clone().requires_grad_() for name in ("5.weight", "5.bias")}
    adapters = {layer: [each.clone().requires_grad_() for each in pair] for layer, pair in adapters.items()}
    optimizer = torch.optim.SGD([*head.values(), *(x for pair in adapters.values() for x in pair)], 0.1, 0.5)
    for _ in range(SAME["local_epochs"]):
        optimizer.zero_grad()
        F.cross_entropy(outputs(weights | head, adapters, inputs), labels).backward()
        optimizer.step()
    return {n: x.detach() for n, x in head.items()}, {n: [x.detach() for x in pair] for n, pair in adapters.items()}


def drawn(shape, seed, client, round):
    """The new A of each layer in a round."""
    generator = torch_generator(seed, "adapters", client, round)
    return {n: (2 * torch.rand(s, generator=generator) - 1).double() / math.sqrt(s[1]) for n, s in shape.items()}


def first_of(pair, rank):
    return pair[0][:rank], pair[1][:, :rank]


def filled(pair, rank):
    """A pair of factors with zeros up to a rank."""
    return F.pad(pair[0], (0, 0, 0, rank - len(pair[0]))), F.pad(pair[1], (0, rank - len(pair[0])))


def factored(product, rank):
    u, s, v = np.linalg.svd(product.numpy(), full_matrices=False)
    return torch.from_numpy(v[:rank]), torch.from_numpy(u[:, :rank] * s[:rank])


@pytest.mark.parametrize(
    ("aggregate", "who"), [("truncate", "all"), ("truncate", "two"), ("svd", "all"), ("stack", "two")]
)
def test_rounds_follow_the_papers(federate, aggregate, who):
    keys = {"lora.aggregate": aggregate, "lora.train-head": True}
    done = federate("lora", model=network, **SAME, **keys, **WHO[who])
    assert done.failures == []
    seed = done.config.seed
    state = {name: tensor.detach() for name, tensor in network().state_dict().items()}
    one = {}  # A and B of each layer, of the largest rank
    if aggregate != "stack":
        received = done.received[1, "0"]["model"]
        one = {n: [torch.from_numpy(received[f"{n}.lora_{x}"]) for x in "ab"] for n in LAYERS}
        assert all(a.abs().max() <= 1 / math.sqrt(a.shape[1]) and not b.any() for a, b in one.values())
    for round, present in enumerate(rounds_of(done), 1):
        heads, pairs, examples = {}, {}, {}
        for client in present:
            rank = RANKS[client]
            inputs, labels = examples_of(done, client)
            if aggregate == "stack":
                new = drawn({n: (rank, state[f"{n}.weight"].shape[1]) for n in LAYERS}, seed, client, round)
                start = {n: (a, a.new_zeros(len(state[f"{n}.bias"]), rank)) for n, a in new.items()}
            else:
                start = {n: first_of(pair, rank) for n, pair in one.items()}
            heads[client], pairs[client] = trained(state, start, inputs, labels)
            examples[client] = float(len(labels))
        assert len(set(examples.values())) == len(present), "otherwise weights would not matter"
        products = {c: {n: b @ a for n, (a, b) in pair.items()} for c, pair in pairs.items()}
        shares = {client: count / sum(examples.values()) for client, count in examples.items()}
        state |= {name: sum(shares[c] * heads[c][name] for c in present) for name in heads[present[0]]}
        for n in LAYERS:
            mean = sum(shares[c] * products[c][n] for c in present)
            if aggregate == "truncate":
                most = max(RANKS[c] for c in present)
                padded = {c: filled(pairs[c][n], most) for c in present}
                a, b = (sum(shares[c] * padded[c][which] for c in present) for which in (0, 1))
                one[n] = [torch.cat([a, one[n][0][most:]]), torch.cat([b, one[n][1][:, most:]], 1)]
            elif aggregate == "svd":
                one[n] = factored(mean, max(RANKS.values()))
            else:
                state[f"{n}.weight"] = state[f"{n}.weight"] + mean
    for client, rank in RANKS.items():
        whole = dict(state)
        for n, (a, b) in ((n, first_of(pair, rank)) for n, pair in one.items()):
            whole[f"{n}.weight"] = state[f"{n}.weight"] + b @ a
        saved = done.saved(client)
        assert saved.keys() == whole.keys(), "a network without adapters, as the user's"
        assert_equal(saved, whole)
    if aggregate == "stack":
        assert sorted(done.state.products) == ["1.", "3."]


def test_only_adapters_are_sent(federate):
    done = federate("lora", model=network, **SAME)
    for travelled in (done.received, done.sent):
        for (_, client), arrays in travelled.items():
            r = RANKS[client]
            shapes = {"1.lora_a": (r, 64), "1.lora_b": (40, r), "3.lora_a": (r, 40), "3.lora_b": (12, r)}
            assert {name: array.shape for name, array in arrays["model"].items()} == shapes


# ---- layers


class Attending(nn.Module):
    """A network with attention, and a layer that is never called."""

    def __init__(self):
        super().__init__()
        self.first, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 10)

    def forward(self, inputs):
        rows = self.first(inputs.flatten(1).unflatten(1, (8, 8)))
        return self.head(self.attention(rows, rows, rows)[0].mean(1))


def adapted(model, **settings):
    """Names of the layers that get an adapter."""
    config = configuration.resolve({"method": "lora", **settings})
    model = registry.client_side("lora").adapt(model, config)
    return [name.removesuffix(".lora_a") for name, _ in model.named_parameters() if name.endswith("lora_a")]


def test_choice_of_layers():
    assert adapted(network()) == ["1", "3"]
    assert adapted(network(), **{"lora.layers": "[13]"}) == ["1", "3"]
    assert adapted(network(), **{"lora.layers": "3,5"}) == ["3", "5"]
    assert adapted(Attending()) == ["first", "unused"]
    assert adapted(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), *network()[1:])) == ["1", "3"]
    with pytest.raises(
        ModelError, match=r"no nn.Linear that matches attention\.\*; adapters can be added to first, unused, head"
    ):
        adapted(Attending(), **{"lora.layers": "first,attention.*"})
    with pytest.raises(ModelError, match="returned one network twice"):
        adapted(model := network()), adapted(model)


def test_tied_layers_share_an_adapter():
    model = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(8, 8), nn.ReLU())][:-1])
    model[2].weight, model[4].weight = model[0].weight, model[6].weight  # and the head's stays tied
    assert adapted(model) == ["0"]
    assert model[2].lora_b is model[0].lora_b


def test_unused_layer(federate):
    message = r"an adapter of unused has no effect on the outputs of Attending, .* set lora\.layers = 'first'"
    with pytest.raises(FedhetError, match=message):
        federate("lora", model=lambda client: Attending())
    assert federate("lora", "first", model=lambda client: Attending(), **{"lora.layers": "first"}).failures == []


class Direct(nn.Module):
    """Layers that are called, and others of which only the weight is used, as in BEiT."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(64, 64), "up": nn.Linear(64, 64)}) for _ in "12")
        self.head = nn.Linear(64, 10)

    def forward(self, inputs):
        rows = inputs.flatten(1)
        for block in self.blocks:
            rows = block["up"](nn.functional.linear(rows, block["qkv"].weight))
        return self.head(rows)


def test_layer_that_is_not_called(federate):
    message = r"adapter of blocks\.0\.qkv has no effect .*may use its weight.* set lora\.layers = 'blocks\.\*\.up'"
    with pytest.raises(FedhetError, match=message):
        federate("lora", model=lambda client: Direct())
    assert federate("lora", model=lambda client: Direct(), **{"lora.layers": "blocks.*.up"}).failures == []


def test_other_frozen_network(federate):
    done = federate("lora", model=lambda client: network(seed=int(client.name == "1")), rounds=1)
    (where, client, reason), *_ = done.failures
    assert (where, client) == (0, "1")
    assert reason.startswith("the client's frozen network is ")
    assert "all clients need the same frozen layers and weights" in reason
