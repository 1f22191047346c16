"""Methods whose clients have parts of one network, against plain computations from their papers."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet import FedAvg, HeteroFL
from fedhet.algorithms.graphs import Submodel, architecture_graph
from fedhet.algorithms.graphs.permutations import permutation_groups
from fedhet.config import configuration
from fedhet.errors import ConfigError, FedhetError
from fedhet.server import average_shared
from fedhet.setup import client_setup
from fedhet.strategies.families.submodels import cut
from fedhet.utils.randomness import torch_generator
from tests.small import SMALL
from tests.strategies.by_hand import THREE as SAME
from tests.strategies.by_hand import WHO, assert_equal, rounds_of

WIDTHS = {"0": 1.0, "1": 0.5, "2": 0.3}
UNITS = {"one": 8, "two": 6, "three": 10}
PIXELS = 4  # of each of the second convolution's maps


class Small(nn.Module):
    """Two convolutions, the first with BatchNorm, and two linear layers; of images of 8 x 8."""

    def __init__(self, three=UNITS["three"]):
        super().__init__()
        self.one, self.norm = nn.Conv2d(1, UNITS["one"], 3, padding=1, bias=False), nn.BatchNorm2d(UNITS["one"])
        self.two = nn.Conv2d(UNITS["one"], UNITS["two"], 3, padding=1)
        self.three, self.head = nn.Linear(UNITS["two"] * PIXELS, three), nn.Linear(three, 10)

    def forward(self, inputs):
        maps = F.max_pool2d(F.relu(self.norm(self.one(inputs))), 2)
        maps = F.max_pool2d(F.relu(self.two(maps)), 2)
        return self.head(F.relu(self.three(maps.flatten(1))))


def plain(state, inputs, divisor=1.0):
    """`Small` in training, whatever its widths."""
    maps = F.conv2d(inputs, state["one.weight"], padding=1) / divisor
    maps = F.batch_norm(maps, None, None, state["norm.weight"], state["norm.bias"], training=True)
    maps = F.max_pool2d(F.relu(maps), 2)
    maps = F.max_pool2d(F.relu(F.conv2d(maps, state["two.weight"], state["two.bias"], padding=1) / divisor), 2)
    hidden = F.relu(F.linear(maps.flatten(1), state["three.weight"], state["three.bias"]) / divisor)
    return F.linear(hidden, state["head.weight"], state["head.bias"])


def entries(window, width):
    """The entries of each axis of each array, from the units of each layer by hand."""
    one, two, three = (window(math.ceil(width * whole), whole) for whole in UNITS.values())
    flat = [unit * PIXELS + pixel for unit in two for pixel in range(PIXELS)]
    places = {"one.weight": (one,), "norm.weight": (one,), "norm.bias": (one,), "two.weight": (two, one)}
    places |= {"two.bias": (two,), "three.weight": (three, flat), "three.bias": (three,)}
    return places | {"head.weight": (range(10), three), "head.bias": (range(10),)}


def part_of(state, places):
    """A client's part."""
    return {name: state[name][np.ix_(*axes)] for name, axes in places.items()}


def trained(state, loss, momentum=SAME["momentum"]):
    """A state after three steps of SGD with momentum."""
    state = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    optimizer = torch.optim.SGD(state.values(), lr=SAME["learning_rate"], momentum=momentum)
    for _ in range(SAME["local_epochs"]):
        optimizer.zero_grad()
        loss(state).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in state.items()}


def averaged(before, sent, weights):
    """The mean of each entry over those who have it, entry by entry."""
    after = {}
    for name, whole in before.items():
        total, weight = torch.zeros_like(whole), torch.zeros_like(whole)
        for client, (state, places) in sent.items():
            at = np.ix_(*places[name])
            total[at] += weights[client] * state[name]
            weight[at] += weights[client]
        after[name] = torch.where(weight > 0, total / weight.clamp(min=1), whole)
    return after


def first(own, whole):
    return range(own)


@pytest.fixture
def sized(federate):
    """Runs a method with clients of unlike widths, all in float64; gives the run and the data of each client."""

    def sized(method, **settings):
        widths = {f"{method}.widths": ",".join(map(str, WIDTHS.values()))}
        done = federate(method, model=lambda client: Small().double(), **{**SAME, **widths, **settings})
        transform = client_setup.dataset_of(done.config).transform
        data = {client: client_setup.data_of(done.info(client)).train for client in WIDTHS}
        return done, {client: (transform(part.inputs[:]).double(), part.labels) for client, part in data.items()}

    return sized


def start(done):
    return {name: torch.from_numpy(array) for name, array in done.received[1, "0"]["model"].items()}


def compare(done, expected):
    assert_equal(done.state.model, expected)
    assert done.state.model.keys() == expected.keys()
    assert done.failures == []


def of_heterofl(done, data, windows):
    """HeteroFL's rounds (and FedRolex's, of other windows) from its paper."""
    state = start(done)
    for window, present in zip(windows, rounds_of(done), strict=True):
        sent, weights = {}, {}
        for client in present:
            width = WIDTHS[client]
            (inputs, labels), places = data[client], entries(window, width)
            absent = torch.ones(10, dtype=torch.bool)
            absent[labels.unique()] = False

            def loss(own, inputs=inputs, labels=labels, absent=absent, width=width):
                outputs = plain(own, inputs, width).masked_fill(absent, 0.0)
                return F.cross_entropy(outputs, labels)

            own = trained(part_of(state, places), loss)
            rows = torch.nonzero(~absent).flatten().tolist()
            own |= {name: own[name][rows] for name in ("head.weight", "head.bias")}
            places |= {name: (rows, *places[name][1:]) for name in ("head.weight", "head.bias")}
            sent[client], weights[client] = (own, places), len(labels)
        state = averaged(state, sent, weights)
    return state


@pytest.mark.parametrize("who", ["all", "two"])
def test_heterofl_follows_its_paper(sized, who):
    done, data = sized("heterofl", **WHO[who])
    assert len(data["0"][1].unique()) < 10
    compare(done, of_heterofl(done, data, [first] * 3))


def test_heterofl_of_whole_networks_is_fedavg(federate, monkeypatch):
    monkeypatch.setattr("fedhet.client_apps.heterofl.HeteroFL.absent", None)  # whatever classes a client lacks
    same = {"batch_norm": "aggregate", "samples_per_client": 16, "architectures": "resnet8"}
    one = federate("fedavg", "fedavg", **same)
    other = federate("heterofl", "heterofl", **same, **{"heterofl.widths": "1"})
    assert one.failures == other.failures == []
    saved = "models/global.safetensors"
    assert (one.folder / saved).read_bytes() == (other.folder / saved).read_bytes()


@pytest.mark.parametrize("who", ["all"])
def test_fedrolex_follows_its_paper(sized, who):
    done, data = sized("fedrolex", **WHO[who])

    def rolled(round):
        return lambda own, whole: [(unit + round) % whole for unit in range(own)]

    compare(done, of_heterofl(done, data, [rolled(0), rolled(1), rolled(2)]))


@pytest.mark.parametrize(("distil", "who"), [(True, "two"), (False, "all")])
def test_fjord_follows_its_paper(sized, distil, who):
    done, data = sized("fjord", **{"fjord.distil": distil, **WHO[who]})
    state = start(done)
    for round, present in enumerate(rounds_of(done), 1):
        sent, weights = {}, {}
        for client in present:
            width = WIDTHS[client]
            (inputs, labels), generator = data[client], torch_generator(done.config.seed, "widths", client, round)
            narrower = sorted(each for each in WIDTHS.values() if each <= width)

            def loss(own, inputs=inputs, labels=labels, width=width, generator=generator, narrower=narrower):
                drawn = narrower[int(torch.randint(len(narrower), (), generator=generator))]
                inner = {name: own[name][np.ix_(*at)] for name, at in entries(first, drawn).items()}
                outputs = plain(inner, inputs)
                if not distil:
                    return F.cross_entropy(outputs, labels)
                widest = plain(own, inputs)
                teacher = widest.detach().softmax(1)
                divergence = (teacher * (teacher.log() - outputs.log_softmax(1))).sum(1).mean()
                return F.cross_entropy(widest, labels) + divergence

            places = entries(first, width)
            sent[client], weights[client] = (trained(part_of(state, places), loss), places), len(labels)
        state = averaged(state, sent, weights)
    compare(done, state)


@pytest.mark.parametrize("rule", ["mean", "median", "krum"])
def test_rules_by_entry(rule):
    """As if those who have it were all there are, of all entries that the same clients have."""
    rng = np.random.default_rng(0)
    before = {"w": rng.normal(size=(4, 6)), "b": rng.normal(size=3)}
    axes = {"0": (None, None), "1": (np.array([2, 0]), np.array([1, 4, 3])), "2": (np.array([0]), np.array([4, 0]))}
    parts = {client: {"w": part} for client, part in axes.items() if client != "0"}
    models = {
        client: cut({"w": rng.normal(size=(4, 6)), "b": rng.normal(size=3)}, parts.get(client, {})) for client in axes
    }
    weights = {"0": 3.0, "1": 2.0, "2": 5.0}
    strategy = HeteroFL(aggregation=rule)
    strategy.state.model = before
    found = strategy.average_entries(models, weights, parts)

    blocks: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for at in np.ndindex(4, 6):
        owners = (
            c for c, part in axes.items() if all(own is None or i in own for own, i in zip(part, at, strict=True))
        )
        blocks.setdefault(tuple(owners), []).append(at)
    assert blocks.keys() == {("0",), ("0", "1"), ("0", "2"), ("0", "1", "2")}
    for owners, entries in blocks.items():
        sent = {}
        for client in owners:
            own = [
                range(size) if part is None else part.tolist() for part, size in zip(axes[client], (4, 6), strict=True)
            ]
            values = [models[client]["w"][own[0].index(i), own[1].index(j)] for i, j in entries]
            sent[client] = {"w": np.array(values)} | ({"b": models[client]["b"]} if len(owners) == 3 else {})
        expected = average_shared(sent, weights, rule, 0.2)
        np.testing.assert_allclose([found["w"][at] for at in entries], expected["w"], rtol=1e-12)
        if "b" in expected:
            np.testing.assert_allclose(found["b"], expected["b"], rtol=1e-12)


def test_clipping_of_a_part():
    """A client that returns its part as it was has not moved, wherever in the whole that lies."""
    before, part = {"w": np.arange(6.0)}, {"w": (np.array([4, 5]),)}
    models = {"0": {"w": before["w"] + 1}, "1": {"w": before["w"][4:]}, "2": {"w": before["w"] + 2}}
    aggregator = FedAvg(clip_norm=1.0).aggregator
    made = aggregator.clipped(models, {"0": before, "1": cut(before, part), "2": before})
    assert [each["client"] for each in aggregator.run.round.cuts] == ["2"]
    np.testing.assert_allclose(made["1"]["w"], [4, 5])
    np.testing.assert_allclose(made["2"]["w"], before["w"] + 1)


def test_bfloat16(federate):
    """They travel as float32, in which every value of bfloat16 is one."""
    model, inputs = Small().bfloat16(), torch.rand(2, 1, 8, 8, dtype=torch.bfloat16)
    part = Submodel(0.5, permutation_groups(architecture_graph(model, inputs))).cut(model)
    for name, axes in entries(first, 0.5).items():
        assert torch.equal(part.state_dict()[name], model.state_dict()[name][np.ix_(*axes)])
    done = federate("heterofl", model=lambda client: Small().bfloat16(), rounds=1, **{"heterofl.widths": "1,0.5"})
    assert done.failures == []


DEPTHS = SMALL["depthfl"] | {"depthfl.blocks": "blocks.0"}


class ResNet(nn.Module):
    """A user's own: an input layer, and two residual blocks with BatchNorm."""

    def __init__(self, width=4):
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, width, 3, padding=1), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)) for _ in range(2)
        )

    def forward(self, inputs):
        maps = F.max_pool2d(self.stem(inputs), 4)
        for block in self.blocks:
            maps = F.relu(maps + block(maps))
        return self.head(maps.mean((2, 3)))


@pytest.mark.parametrize("method", ["heterofl", "inclusivefl"])
def test_statistics_of_all_sizes(method, federate):
    by_depth = {f"{method}.depths": "2,1", f"{method}.blocks": "blocks.0"}
    settings = {f"{method}.widths": "1,0.5"} if method == "heterofl" else by_depth
    done = federate(method, model=lambda client: ResNet(), rounds=1, batch_norm="aggregate", **settings)
    assert done.failures == []
    assert {client for _, client in done.sent} == {"0", "1", "2"}
    assert {row.architecture.partition("-")[0] for row in done.clients} == {"ResNet"}
    counters = [done.state.model[f"blocks.{number}.1.num_batches_tracked"] for number in range(2)]
    assert [(each.shape, int(each)) for each in counters] == [((), 4)] * 2  # two epochs of two batches


def test_class_name_with_exits(federate):
    widths = iter(range(4, 99))
    with pytest.raises(FedhetError, match="the client's ResNet has other layers when it is built again"):
        federate("depthfl", model=lambda client: ResNet(next(widths)), **DEPTHS)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda: Small(three=7), "must train parts of one architecture"),
        (lambda: Small().double(), "shared arrays must have equal dtypes"),
    ],
)
def test_majority_decides(odd, words, federate):
    model = lambda client: odd() if client.name == "0" else Small()  # noqa: E731
    done = federate("heterofl", model=model, rounds=1, **{"heterofl.widths": "1,0.5"})
    ((_, client, reason),) = done.failures
    assert (client, words in reason) == ("0", True)


@pytest.mark.parametrize(
    ("method", "key", "value", "node", "right", "wrong", "never"),
    [
        ("heterofl", "widths", "1,0.5", "width", {"0.25": 0.25, 0.75: 0.75}, 2, "1.5"),
        ("depthfl", "depths", "4,2", "depth", {3: 0.75}, 5, "0"),
        ("lora", "ranks", "16,8", "rank", {"4": 0.25, 16: 1.0}, 0.5, "2.5"),
    ],
)
def test_part_of_a_node(method, key, value, node, right, wrong, never):
    settings = {"method": method, f"{method}.{key}": value, "clients": 2}
    config = configuration.resolve(settings)

    def width(number=0, **own):
        return client_setup.width_of(client_setup.ClientInfo(str(number), number, 2, config, own))

    assert [width(0), width(1)] == [1.0, 0.5]
    assert [width(**{node: each}) for each in right] == [*right.values()]
    with pytest.raises(ConfigError, match=f"the node's {node}: {wrong} is not a valid {node}"):
        width(**{node: wrong})
    with pytest.raises(ConfigError, match=f"{key}: .*{never}.* is not a valid {node}"):
        configuration.resolve(settings | {f"{method}.{key}": f"1,{never}"})
    with pytest.raises(ConfigError, match="start from parts of one network"):
        configuration.resolve({"method": method, "shared-init": False})


def test_validation_of_the_global_model(federate):
    settings = {"test_on": "global", "validation": 0.2, "validation_on": "common", "heterofl.widths": "1,0.5"}
    done = federate("heterofl", **settings)
    examples = client_setup.common_validation(done.config)
    network, transform = done.global_model.eval(), client_setup.dataset_of(done.config).transform
    with torch.no_grad():
        right = network(transform(examples.inputs[:])).argmax(1) == examples.labels
    found = done.rows[-1]["validation"]["received"]["accuracy"]
    assert found == pytest.approx(right.double().mean().item())
    assert done.summary["validation_accuracy"]["weighted"] == found
    assert set(done.rows[-1]["common"]["received"]) == {"accuracy", "loss"}
    assert client_setup.common_validation(done.config.replace(test_on="both")) is None
