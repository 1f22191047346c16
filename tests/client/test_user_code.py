"""Users' functions and networks behave the same in every process, and share nothing with other clients."""

import random
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import weight_norm
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

import fedhet
from fedhet.algorithms.graphs.graph import UnsupportedArchitecture
from fedhet.algorithms.graphs.resize import resize
from fedhet.client.app import make_client_app
from fedhet.client.model_check import unsaved_state
from fedhet.client.unchanged import ROWS
from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.errors import FedhetError, ModelError
from fedhet.models.copies import copied, separated
from fedhet.results.history import read_clients
from fedhet.setup.client_setup import ClientInfo

pytestmark = [pytest.mark.usefixtures("home", "no_report"), pytest.mark.filterwarnings("ignore:`torch.nn.utils")]

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS[:, :3].argmax(1)


def draw() -> float:
    """Draw from every global generator."""
    return torch.rand(()).item() + np.random.rand() + random.random()


def data(client: ClientInfo) -> Any:
    return (INPUTS[:40], LABELS[:40]), (INPUTS[40:], LABELS[40:])


def model(client: ClientInfo | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., dict[str, Tensor]]:
    """Runs two clients, by default of `local`, and returns all tensors that they saved."""
    numbers = iter(range(100))

    def trained(model: Any = model, data: Any = data, *, afresh: bool = False, **settings: Any) -> dict[str, Tensor]:
        """With `afresh` each message is handled as if by a new process, whose generators are in another state."""
        base = {"method": "local", "rounds": 2, "clients": 2, "workers": 1, "test-on": "local"}
        settings = base | {"client-batching": "off"} | settings
        folder = tmp_path / str(next(numbers))

        def answer(message: Any, context: Any) -> Any:
            for seed in (torch.manual_seed, np.random.seed, random.seed):
                seed(random.SystemRandom().randrange(2**32))
            return make_client_app(model, data)(message, context)

        app: Any = answer if afresh else make_client_app(model, data)
        run_locally(configuration.resolve(settings), folder, app=app)
        files = sorted((folder / "models").iterdir())
        return {f"{file.stem}.{name}": tensor for file in files for name, tensor in load_file(file).items()}

    return trained


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# ---- global generators


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows with noise; `seen` has each draw by row."""

    def __init__(self, draw: Callable[[], float], start: int, end: int) -> None:
        self.draw, self.rows, self.seen = draw, range(start, end), dict[int, list[float]]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = self.draw()
        self.seen.setdefault(index, []).append(noise)
        return INPUTS[self.rows[index]] + noise, LABELS[self.rows[index]]


@pytest.mark.parametrize("where", ["data", "augment", "rows", "collate", "weights", "forward"])
def test_global_generators(where: str, trained: Callable[..., dict[str, Tensor]]) -> None:
    class Noisy(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs + draw() * self.training)

    def noisy(rows: Any) -> Tensor:
        return torch.stack([row[0] for row in rows]) + draw()

    def of_client(client: ClientInfo) -> nn.Module:
        network = Noisy(*model()) if where == "forward" else model()
        if where == "weights":
            nn.init.constant_(network[0].weight, draw())
        return network

    def of_data(client: ClientInfo) -> Any:
        train, test = data(client)
        if where == "data":
            train = train[0] + draw(), train[1]
        elif where == "rows":
            train = Rows(draw, 0, 40)
        elif where == "collate":
            pairs = list(zip(*train, strict=True))
            train = DataLoader(pairs, 8, collate_fn=lambda rows: (noisy(rows), [row[1] for row in rows]))  # type: ignore
        return {"train": train, "test": test} | ({"augment": lambda x: x + draw()} if where == "augment" else {})

    alone = trained(of_client, of_data)
    assert same(alone, trained(of_client, of_data, afresh=True))
    torch.testing.assert_close(trained(of_client, of_data, **{"client-batching": "2"}), alone, rtol=1e-4, atol=1e-6)


GENERATORS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch's": (None, lambda generator: torch.randperm(60)),
    "NumPy's, new in each call": (None, lambda generator: np.random.default_rng().permutation(60)),
    "own, torch": (torch.Generator(), lambda generator: torch.randperm(60, generator=generator)),
    "own, NumPy": (np.random.default_rng(1), lambda generator: generator.permutation(60)),
    "own, NumPy's older": (np.random.RandomState(1), lambda generator: generator.permutation(60)),
    "own, Python": (random.Random(1), lambda generator: generator.sample(range(60), 60)),
    "an attribute": (SimpleNamespace(own=random.Random(1)), lambda splitter: splitter.own.sample(range(60), 60)),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_random_split(kind: str, trained: Callable[..., dict[str, Tensor]]) -> None:
    splits: dict[str, set[tuple[int, ...]]] = {}
    generator, permutation = GENERATORS[kind]

    def split(client: ClientInfo) -> Any:
        order = torch.tensor(list(permutation(generator)))
        splits.setdefault(f"{client.config.seed} {client.name}", set()).add(tuple(order.tolist()))
        return [(INPUTS[rows], LABELS[rows]) for rows in (order[:40], order[40:])]

    for method in ("local", "fedavg"):
        trained(data=split, afresh=True, method=method)
    assert [len(each) for each in splits.values()] == [1, 1]
    trained(data=split, seed=1)
    assert len({next(iter(each)) for each in splits.values()}) == 4  # each client's own, and each seed's


def test_a_split_that_changes(trained: Callable[..., dict[str, Tensor]]) -> None:
    calls = count()

    def rotated(client: ClientInfo) -> Any:
        first = next(calls)
        rows = [*range(first, 60), *range(first)]
        return [(INPUTS[part], LABELS[part]) for part in (rows[:40], rows[40:])]

    with pytest.raises(FedhetError, match=r"training examples, test examples changed .*: draw from the global"):
        trained(data=rotated, afresh=True)


def test_random_rows(trained: Callable[..., dict[str, Tensor]]) -> None:
    made: list[tuple[Rows, Rows]] = []

    def rows(client: ClientInfo) -> Any:
        made.append((Rows(np.random.rand, 0, 40), Rows(random.random, 40, 60)))
        return made[-1]

    trained(data=rows, clients=1, **{"local-epochs": 3})
    ((train, test),) = made
    assert all(len(set(draws)) >= 6 for draws in train.seen.values())
    later = [draws for row, draws in test.seen.items() if row >= 40 + ROWS]  # the first ones tell whether data changed
    assert all(len(set(draws[1:])) <= 2 for draws in later)  # labels, evaluations, the examples' digests


@pytest.mark.parametrize("where", ["rows", "augment"])
def test_rows_with_a_state(where: str, tmp_path: Path) -> None:
    own = random.Random(1)

    def of_data(client: ClientInfo) -> Any:
        train, test = data(client)
        if where == "rows":
            return Rows(own.random, 0, 40), test
        return {"train": train, "test": test, "augment": lambda x: x + own.random()}

    settings = {"method": "local", "rounds": 1, "clients": 2, "workers": 1}
    done = fedhet.run(settings, model=model, data=of_data, out=tmp_path / "run", progress=False)
    phrase = "gives other values each time, although torch, NumPy and Python are seeded"
    # Unless its rows have a state, the second client's remarks also say that its examples are those of the first.
    assert [phrase in warning for warning in done.summary["warnings"]] == [True] * (1 if where == "rows" else 2)


# ---- networks


def test_shared_modules(trained: Callable[..., dict[str, Tensor]]) -> None:
    backbone, vectors = nn.Linear(4, 6), torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    before, kept = copied(backbone), vectors.clone()

    def shared(client: ClientInfo) -> nn.Module:
        head = nn.Linear(6, 3)
        head.weight = nn.Parameter(vectors)
        return nn.Sequential(backbone, nn.ReLU(), head)

    saved = trained(shared)
    assert torch.equal(vectors, kept)
    assert same(backbone.state_dict(), before.state_dict())
    assert not torch.equal(saved["0.0.weight"], saved["1.0.weight"])
    assert same(saved, trained(lambda client: copied(shared(client)), afresh=True))


class Caching(nn.Module):
    """Keeps its last features, and its hook refers to itself if that is asked for."""

    def __init__(self, *, closure: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.features = nn.Linear(4, 6), nn.Linear(6, 3), [torch.zeros(())]
        if closure:
            self.body.register_forward_hook(lambda module, inputs, outputs: self.features.append(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        self.features.append(self.body(inputs))
        return self.head(self.features[-1].relu())


def test_networks_that_deepcopy_refuses() -> None:
    for network in (nn.Sequential(weight_norm(nn.Linear(4, 3))), Caching()):
        outputs = network(INPUTS)
        assert torch.equal(copied(network)(INPUTS), outputs)


def test_networks_with_closures() -> None:
    network = Caching(closure=True)
    assert separated(network) is network
    with pytest.raises(ModelError, match="other networks need copies of its modules, but it cannot be copied"):
        separated(nn.Sequential(network))
    patched, forward = (each := model()), each.forward
    patched.forward = lambda inputs: 2 * forward(inputs)  # type: ignore[method-assign]
    assert separated(patched) is patched
    PATCHED.forward = call_patched  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="call_patched of module '' refers to the original"):  # that of any client
        separated(PATCHED)


def reading(network: nn.Sequential, form: str) -> Any:
    """Return a function that calls the network's first layer, or reads its weight, in one of several ways."""
    layer = cast(nn.Linear, network[0])
    weight, bias = layer.weight, layer.bias
    holder = SimpleNamespace(layers=[{"first": layer}])
    linear = partial(functional.linear, weight=weight, bias=bias)

    def with_default(inputs: Tensor, layer: nn.Module = layer) -> Any:
        return layer(inputs)

    def with_attribute(inputs: Tensor) -> Any:
        return with_attribute.layer(inputs)  # type: ignore[attr-defined]

    with_attribute.layer = layer  # type: ignore[attr-defined]
    return {
        "an object": lambda inputs: holder.layers[0]["first"](inputs),
        "a default": with_default,
        "an attribute": with_attribute,
        "a cache": lru_cache(lambda inputs: layer(inputs)),
        "a weight": lambda inputs: functional.linear(inputs, weight, bias),
        "a partial with a weight": lambda inputs: linear(inputs),
    }[form]


@pytest.mark.parametrize("form", ["an object", "a default", "an attribute", "a cache"])
def test_functions_that_reach_a_module_by_other_objects(form: str) -> None:
    """A copy's function would call the original's module, which is not trained."""
    network = model()
    network.read = reading(network, form)
    assert separated(network) is network
    with pytest.raises(ModelError, match="of module '' refers to the original"):
        separated(network)


@pytest.mark.parametrize("form", ["a weight", "a partial with a weight"])
def test_functions_that_read_weights_are_refused(form: str) -> None:
    """In a batch of clients, each has its own weights."""
    network = model()
    network.read = reading(network, form)
    with pytest.raises(ModelError, match="<lambda> of module '' refers to the original"):
        separated(network)


class Closed(nn.Module):
    """A network whose forward calls a function that refers to it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.read = lambda inputs: self.body(inputs).relu()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.read(inputs))


@pytest.mark.parametrize("method", ["perfcl", "fens"])
def test_a_method_that_needs_copies_refuses_a_network_of_closures(method: str, tmp_path: Path) -> None:
    settings = {"method": method, "clients": 2, "workers": 1}
    with pytest.raises(FedhetError, match="other networks need copies of its modules, but it cannot be copied"):
        fedhet.run(settings, model=Closed, data=data, out=tmp_path / "run", progress=False)


class Sharing(nn.Module):
    """A network with a second tensor in the memory of a layer's weight."""

    def __init__(self, form: str = "parameter") -> None:
        super().__init__()
        self.form, self.body, self.other, self.head = form, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        if form == "parameter":
            self.other.weight.data = self.body.weight.data
        elif form == "buffer":
            self.register_buffer("view", self.body.weight.detach())
        elif form == "rows":
            self.views = [self.body.weight.data[:3]]
        elif form == "again":
            self.views = [self.body.weight]

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.other(self.body(inputs).relu())
        if self.form == "buffer":
            outputs = outputs + functional.linear(inputs, self.view)  # type: ignore[arg-type]
        elif self.form in ("rows", "again"):
            outputs = outputs + functional.linear(inputs, self.views[0]).mean(1, keepdim=True)
        return self.head(outputs)


@pytest.mark.parametrize("form", ["parameter", "buffer", "rows", "again"])
def test_memory_that_tensors_share_is_shared_in_copies_and_in_batches(form: str, tmp_path: Path) -> None:
    """Training is that of a plain loop, and scores are those of each client's own network, also in a batch."""

    def built() -> Sharing:
        torch.manual_seed(0)
        return Sharing(form)

    settings = {"batch-size": 100, "momentum": 0.0, "learning-rate": 0.1, "local-epochs": 2, "clients": 3}
    common = {"method": "local", "rounds": 2, "workers": 1, "client-batching": "10", **settings}

    def own(client: ClientInfo) -> Any:
        rows = slice(client.partition_id, None, 3)
        return (INPUTS[rows], LABELS[rows]), (INPUTS[rows], LABELS[rows])

    done = fedhet.run(common, model=built(), data=own, out=tmp_path / "run", progress=False)
    for row in read_clients(done.folder)[-3:]:
        plain = built()
        examples, _ = own(SimpleNamespace(partition_id=int(row.client)))  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            functional.cross_entropy(plain(examples[0]), examples[1]).backward()
            optimizer.step()
        assert torch.equal(plain.other.weight, plain.body.weight) == (form == "parameter")
        saved = load_file(done.folder / f"models/{row.client}.safetensors")
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=1e-6)
        assert row.loss == pytest.approx(functional.cross_entropy(plain(examples[0]), examples[1]).item(), rel=1e-4)


def test_attributes_of_parameters_are_copied() -> None:
    network = model()
    weight = cast(nn.Linear, network[0]).weight
    weight.gain = [2.0]  # type: ignore[attr-defined]
    copy = cast(nn.Linear, copied(network)[0]).weight  # type: ignore[index]
    assert copy.gain == [2.0]  # type: ignore[attr-defined]
    assert copy.gain is not weight.gain  # type: ignore[attr-defined]


def test_views_of_arrays_are_refused_where_widths_change() -> None:
    network = Sharing("rows")
    with pytest.raises(
        UnsupportedArchitecture, match="has arrays of its layers, or views of them, in other attributes"
    ):
        resize(network, network.state_dict())


class Named(dict[str, Any]):
    """A mapping whose values are also attributes, and which has no others, not even special ones."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__deepcopy__", "__reduce_ex__", "__setstate__"):
            raise AttributeError(name)
        return self[name]


@pytest.mark.parametrize("held", ["settings", "schedule", "sparse tensor", "sparse buffer"])
def test_attributes_that_read_no_array_change_nothing(held: str, trained: Callable[..., dict[str, Tensor]]) -> None:
    """Networks that hold settings, an optimiser with a schedule or sparse tensors are copied, trained and resized."""

    def network() -> nn.Sequential:
        result = model()
        if held == "settings":
            result.held = Named(width=6)  # type: ignore[assignment]
        elif held == "schedule":
            result.optimizer = torch.optim.SGD(result.parameters(), lr=0.1)  # type: ignore[assignment]
            result.schedule = torch.optim.lr_scheduler.StepLR(result.optimizer, 1)  # type: ignore
        elif held == "sparse tensor":
            result.graph = torch.eye(4).to_sparse()
        else:
            result.register_buffer("graph", torch.eye(4).to_sparse(), persistent=False)
        return result

    first = network()
    assert separated(first) is not first
    assert same(resize(first, first.state_dict()).state_dict(), first.state_dict())
    assert same(trained(network), trained())


@pytest.mark.parametrize("persistent", [True, False])
def test_sparse_buffers_are_not_sent(persistent: bool, tmp_path: Path) -> None:
    def network() -> nn.Sequential:
        result = model()
        result.register_buffer("graph", torch.eye(4).to_sparse(), persistent=persistent)
        return result

    settings = {"method": "local", "clients": 2, "rounds": 1, "workers": 1, "client-batching": "10"}
    run = partial(fedhet.run, settings, model=network, data=data, out=tmp_path / "run", progress=False)
    if persistent:
        with pytest.raises(FedhetError, match="graph cannot be sent, as it is sparse: register it with persistent="):
            run()
    else:
        assert not run().summary["failures"]


PATCHED = model()


def call_patched(inputs: Tensor) -> Tensor:
    return body_of_patched(inputs)


def body_of_patched(inputs: Tensor) -> Tensor:
    return PATCHED[2](PATCHED[0](inputs).relu())


class Averaging(nn.Sequential):
    """Changes its buffer in each mode; the buffer `drawn` is drawn at random and not saved."""

    mean: Tensor
    drawn: Tensor

    def __init__(self) -> None:
        super().__init__(*model())
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("drawn", torch.randn(4), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = self.mean / 2 + inputs.mean(0) / 2
        return super().forward(inputs * self.drawn - self.mean)


def test_evaluations_change_no_network(trained: Callable[..., dict[str, Tensor]]) -> None:
    """However often it is evaluated, a network that changes in evaluation mode is trained to the same bytes."""
    every = trained(Averaging, rounds=3)
    assert bool(every["0.mean"].any())
    assert same(every, trained(Averaging, rounds=3, **{"evaluate-every": 3}))


def wrappers() -> Iterator[Callable[[nn.Module], nn.Module]]:
    yield from (nn.DataParallel, AveragedModel, lambda network: torch.compile(network, backend="eager"))  # type: ignore


@pytest.mark.parametrize("wrap", [*wrappers()], ids=["parallel", "averaged", "compiled"])
def test_wrapped_networks(wrap: Callable[[nn.Module], nn.Module], trained: Callable[..., dict[str, Tensor]]) -> None:
    def whole_or_part(client: ClientInfo) -> nn.Module:
        network = model()
        if client.partition_id:
            network[0] = wrap(network[0])
        return network if client.partition_id else wrap(network)

    assert same(trained(whole_or_part, method="lg-fedavg"), trained(method="lg-fedavg"))


def test_compiled_networks_of_a_users_class_are_copied() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layers(inputs)

    assert type(separated(torch.compile(Own(), backend="eager"))) is Own  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["fedhenn", "fedgen"])
@pytest.mark.parametrize(("body", "head"), [(torch.bfloat16, torch.float32)])
def test_networks_of_two_dtypes(
    method: str, body: torch.dtype, head: torch.dtype, trained: Callable[..., dict[str, Tensor]]
) -> None:
    class Mixed(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            return self[2](self[1](self[0](inputs.to(body))).to(head))

    def mixed(client: ClientInfo) -> nn.Module:
        network = model()
        return Mixed(network[0].to(body), network[1], network[2].to(head))

    def with_public(client: ClientInfo) -> Any:
        return dict(zip(("train", "test"), data(client), strict=True)) | {"public": INPUTS[:20]}

    saved = trained(mixed, with_public, method=method, **{"min-clients": 2})
    assert {tensor.dtype for tensor in saved.values()} == {body, head}


def test_mixed_precision_of_a_network_in_float64(tmp_path: Path) -> None:
    """Its parts would be computed in bfloat16 and float64."""
    settings = {"method": "fedsimclr", "clients": 2, "rounds": 1, "precision": "bf16"}
    with pytest.raises(FedhetError, match="precision = bf16 is for networks in float32, but the client's Sequential"):
        fedhet.run(settings, model=lambda client: model().double(), data=data, out=tmp_path / "run")


def test_state_outside_the_state_dict() -> None:
    class Counting(nn.Linear):
        steps = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.steps += self.training
            return super().forward(inputs) * self.steps

    class Scaling(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("scale", torch.zeros(()), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            self.scale = self.scale + self.training
            return super().forward(inputs) * self.scale

    class Later(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("mean", None)

        def forward(self, inputs: Tensor) -> Tensor:
            self.mean = inputs.mean(0) if self.training else self.mean
            return super().forward(inputs)

    class WarmingUp(nn.Linear):
        """Computes the same in the first hundred steps."""

        def __init__(self, steps: Any) -> None:
            super().__init__(4, 3)
            self.steps = steps

        def forward(self, inputs: Tensor) -> Tensor:
            if isinstance(self.steps, dict):
                self.steps["done"] += 1
            elif isinstance(self.steps, SimpleNamespace):
                self.steps.done += 1
            else:
                self.steps = self.steps + 1
            return super().forward(inputs)

    class Measuring(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            self.examples, self.largest = len(inputs), inputs.max()
            return super().forward(inputs)

    assert all(unsaved_state(WarmingUp(x), INPUTS) for x in (0, torch.zeros(()), {"done": 0}, SimpleNamespace(done=0)))
    assert not unsaved_state(Measuring(4, 3), INPUTS)
    normal = nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.BatchNorm1d(3), nn.Dropout())
    assert all(unsaved_state(each, INPUTS) for each in (nn.Sequential(Counting(4, 3)), Scaling(), Later()))
    assert not any(unsaved_state(each, INPUTS) for each in (normal, model(), Caching()))


def test_columns_that_numpy_added_have_no_stride(tmp_path: Path) -> None:
    """`values[:, None]` has the stride 0 along its new axis, with which PyTorch reads no bytes."""
    values = np.linspace(0, 1, 40, dtype=np.float32)

    def column(client: ClientInfo) -> Any:
        return {"train": (values[:, None], values[:, None]), "test": (values[:1, None], values[:1, None])}

    run = fedhet.run(
        {"method": "local", "clients": 2, "rounds": 1},
        model=lambda client: nn.Linear(1, 1),
        data=column,
        out=tmp_path / "run",
        progress=False,
    )
    assert run.summary["status"] == "completed"


def test_each_of_many_small_networks_is_built_once(tmp_path: Path) -> None:
    """With more than 64 clients, all were built again in every round: half of the run's time."""
    calls = []
    inputs, labels = torch.randn(12, 4), torch.arange(12) % 2

    def model(client: ClientInfo) -> nn.Module:
        calls.append(client.name)
        return nn.Linear(4, 2)

    built = []
    for rounds in (1, 2):
        calls.clear()
        settings = {"method": "local", "clients": 66, "rounds": rounds, "local-epochs": 1, "workers": 1}
        settings["report"] = False
        out = tmp_path / str(rounds)
        fedhet.run(settings, model=model, data=lambda client: ((inputs, labels),) * 2, out=out, progress=False)
        built.append(len(calls))
    assert built[0] == built[1]
