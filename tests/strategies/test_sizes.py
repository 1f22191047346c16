"""Methods whose clients have parts of one network, against plain computations from their papers."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet import models
from fedhet.algorithms.graphs import architecture_graph, permutation_groups, widths_of
from fedhet.algorithms.matching import groups_to_json
from fedhet.client.submodel import Submodel
from fedhet.config import client_setup, configuration
from fedhet.errors import ConfigError, FedhetError
from fedhet.messages import Report, WireError, spec_of
from fedhet.methods.sharing import FIRST_UNITS
from fedhet.models.copies import kinds_of
from fedhet.server import average_shared
from fedhet.server.aggregation import cut_to_bound
from fedhet.server.submodel import check_part, cut, joined, parts_of, split
from fedhet.utils.randomness import torch_generator
from tests.small import SMALL
from tests.strategies.by_hand import THREE as SAME
from tests.strategies.by_hand import WHO, rounds_of

WIDTHS = {"0": 1.0, "1": 0.5, "2": 0.3}
UNITS = {"one": 8, "two": 6, "three": 10}
PIXELS = 4  # of each of the second convolution's maps


class Small(nn.Module):
    """Two convolutions, the first with BatchNorm, and two linear layers; of images of 8 x 8."""

    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(1, UNITS["one"], 3, padding=1, bias=False), nn.BatchNorm2d(UNITS["one"])
        self.two = nn.Conv2d(UNITS["one"], UNITS["two"], 3, padding=1)
        self.three, self.head = nn.Linear(UNITS["two"] * PIXELS, UNITS["three"]), nn.Linear(UNITS["three"], 10)

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
def sized(federate, float64_travels):
    """Runs a method with clients of unlike widths, all in float64; gives the run and the data of each client."""

    def sized(method, **settings):
        settings["wire_dtype"] = "float64"
        widths = {f"{method}.widths": ",".join(map(str, WIDTHS.values()))}
        done = federate(method, model=lambda client: Small().double(), **{**SAME, **widths, **settings})
        transform = client_setup.dataset_of(done.config).transform
        data = {client: client_setup.data_of(done.info(client)).train for client in WIDTHS}
        return done, {client: (transform(part.inputs[:]).double(), part.labels) for client, part in data.items()}

    return sized


def start(done):
    return {name: torch.from_numpy(array) for name, array in done.received[1, "0"]["model"].items()}


def compare(done, expected):
    for name, tensor in expected.items():
        np.testing.assert_allclose(done.state.model[name], tensor.numpy(), rtol=1e-9, atol=1e-9, err_msg=name)
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


def test_masked_loss_of_pixels(federate, float64_travels):
    """Of three classes one is at no pixel that counts; by hand, for one step."""
    inputs = torch.rand(6, 3, 2, 2, dtype=torch.float64)
    labels = (inputs[:, 0] > 0.5).long()
    labels[0] = -100
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
    settings = {"heterofl.widths": "1", "clients": 1, "rounds": 1, "local_epochs": 1, "momentum": 0.0}
    settings |= {"partition": "", "classes_per_client": "", "samples_per_client": "", "wire_dtype": "float64"}
    part = (inputs, labels)
    models = {"model": lambda client: model, "data": lambda client: (part, part)}
    done = federate("heterofl", **models, **{**SAME, **settings})
    before = {name: array.copy() for name, array in done.received[1, "0"]["model"].items()}
    model.load_state_dict({name: torch.from_numpy(array) for name, array in before.items()})
    kept = torch.tensor([1.0, 1.0, 0.0]).double()
    outputs = (model(inputs).movedim(1, -1) * kept).reshape(-1, 3)
    F.cross_entropy(outputs, labels.flatten(), ignore_index=-100).backward()
    for name, parameter in model.named_parameters():
        expected = parameter.detach() - SAME["learning_rate"] * parameter.grad
        np.testing.assert_allclose(done.state.model[name], expected.numpy(), rtol=1e-9, atol=1e-9)
    assert done.sent[1, "0"]["rows"]["2.weight"].tolist() == [0, 1]


NETWORKS = {"torchvision/resnet18": (3, 32, 32), "char-lstm": (80,), "vit": (1, 8, 8)}


def network(name):
    """One of these networks, with 80 classes, and two inputs."""
    model = SmallViT() if name == "vit" else models.build(name, NETWORKS[name], 80)
    return model, torch.zeros((2, *NETWORKS[name]), dtype=torch.long if name == "char-lstm" else torch.float)


@pytest.mark.parametrize("name", ["resnet8", "vit"])
def test_heterofl_of_whole_networks_is_fedavg(name, federate, monkeypatch):
    monkeypatch.setattr("fedhet.client_apps.heterofl.HeteroFL.absent", None)  # whatever classes a client lacks
    same = {"batch_norm": "aggregate", "samples_per_client": 16, "architectures": name}
    if name == "vit":
        part = torch.rand(16, 1, 8, 8), torch.arange(16) % 10
        same |= {"architectures": "", "samples_per_client": ""}
        same |= {"model": lambda client: network(name)[0], "data": lambda client: (part, part)}
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
    specs = {c: {key: (array.shape, "float64") for key, array in model.items()} for c, model in models.items()}
    weights = {"0": 3.0, "1": 2.0, "2": 5.0}
    pieces, kinds, places = split(models, specs, parts, before)
    found = joined(average_shared(pieces, weights, kinds, rule), places, before)

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
        spec = {c: {key: (array.shape, "float64") for key, array in model.items()} for c, model in sent.items()}
        expected = average_shared(sent, weights, spec, rule)
        np.testing.assert_allclose([found["w"][at] for at in entries], expected["w"], rtol=1e-12)
        if "b" in expected:
            np.testing.assert_allclose(found["b"], expected["b"], rtol=1e-12)


def test_clipping_of_a_part():
    """A client that returns its part as it was has not moved, wherever in the whole that lies."""
    before, part = {"w": np.arange(6.0)}, {"w": (np.array([4, 5]),)}
    models = {"0": {"w": before["w"] + 1}, "1": {"w": before["w"][4:]}, "2": {"w": before["w"] + 2}}
    made, cuts = cut_to_bound(models, {"0": before, "1": cut(before, part), "2": before}, 1.0)
    assert [each["client"] for each in cuts] == ["2"]
    np.testing.assert_allclose(made["1"]["w"], [4, 5])
    np.testing.assert_allclose(made["2"]["w"], before["w"] + 1)


def test_width_of_a_node(federate):
    config = configuration.resolve({"method": "heterofl", "heterofl.widths": "1,0.5", "clients": 4, "assign": "blocks"})
    infos = [client_setup.ClientInfo(str(n), n, 4, config) for n in range(4)]
    assert [client_setup.width_of(info) for info in infos] == [1.0, 1.0, 0.5, 0.5]
    own = client_setup.ClientInfo("0", 0, 4, config, {"width": "0.25"})
    assert client_setup.width_of(own) == 0.25
    with pytest.raises(ConfigError, match="the node's width: 2 is not a valid width"):
        client_setup.width_of(client_setup.ClientInfo("0", 0, 4, config, {"width": 2}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"heterofl.widths": "1,1.5"}, "widths: 1.5 is not a valid width"),
        ({"shared-init": False}, "initial weights of the whole"),
    ],
)
def test_wrong_widths(settings, words):
    with pytest.raises(ConfigError, match=words):
        configuration.resolve({"method": "heterofl", **settings})


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


class SmallViT(nn.Module):
    """One block of a vision transformer, as in torchvision's, on images of 8 x 8."""

    def __init__(self):
        super().__init__()
        self.patches, self.place = nn.Conv2d(1, 16, 4, stride=4), nn.Parameter(torch.zeros(1, 4, 16))
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, inputs):
        tokens = self.patches(inputs).flatten(2).transpose(1, 2) + self.place
        read = self.first(tokens)
        tokens = tokens + self.attention(read, read, read, need_weights=False)[0]
        tokens = tokens + self.down(F.gelu(self.up(self.second(tokens))))
        return self.head(tokens.mean(1))


def test_wrong_parts():
    example = torch.zeros(2, 1, 8, 8)

    def told(width=1.0, **changes):
        size = Submodel(width, permutation_groups(architecture_graph(Small(), example)))
        kinds = kinds_of(Small())
        spec = spec_of({name: tensor for name, tensor in size.state(Small()).items() if kinds[name] != "statistic"})
        return Report("1", **{"spec": spec, "groups": groups_to_json(size.groups), **changes})

    check_part(told(0.5))
    whole = told()
    wide = {name: (tuple(2 * size for size in shape), dtype) for name, (shape, dtype) in whole.spec.items()}
    for spec in (wide, whole.spec | {"three.bias": ((3,), "float32")}, {"body": ((2,), "float32")}):
        with pytest.raises(WireError, match="not a part of the network that it describes"):
            check_part(told(spec=spec))
    for groups in ("", "{}", '{"groups": [], "axes": {}, "fixed": [], "tied": {}}'):
        with pytest.raises(WireError, match="not a part of the network that it describes"):
            check_part(told(groups=groups))
    shapes = {name: shape for name, (shape, _) in told(0.5).spec.items()}
    widths = widths_of(shapes, permutation_groups(architecture_graph(Small(), example)))
    found = parts_of(whole.groups, FIRST_UNITS.units, widths, 1)
    for name, (rows, *columns) in entries(first, 0.5).items():
        if name != "head.bias":
            own = [None if at is None else at.tolist() for at in found[name]][: 1 + len(columns)]
            assert own == [None if name.startswith("head") else list(rows), *map(list, columns)]
    assert "head.bias" not in found


def test_part_of_another_network(federate):
    """The majority decides, and all others are refused."""

    def model(client):
        network = Small()
        if client.name == "0":
            network.three, network.head = nn.Linear(24, 7), nn.Linear(7, 10)
        return network

    done = federate("heterofl", model=model, rounds=1, **{"heterofl.widths": "1,0.5"})
    ((_, client, reason),) = done.failures
    assert client == "0"
    assert "need one architecture, of which each may have a part (width)" in reason


def test_validation_of_the_global_model(federate):
    """On common validation examples, and not as the mean over clients' parts of it."""
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
