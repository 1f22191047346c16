"""A person never reads Python's own words: whatever is wrong, one sentence says what, where, and what to do."""

import errno
import functools
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pandas
import pytest
import scipy.sparse
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import fedhet
from fedhet.comparing import Tuning
from fedhet.errors import FedhetError
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.setup.client_setup import ClientInfo


def data(client: ClientInfo) -> Any:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(client.partition_id or 0))
    return (inputs, torch.arange(16) % 2), (inputs[:4], torch.arange(4) % 2)


def many(client: ClientInfo) -> Any:
    return ((torch.ones(9, 4), torch.arange(9)),) * 2


def broken(client: ClientInfo) -> Any:
    return Path("nofile").read_bytes() if client.partition_id == 1 else data(client)


with pytest.raises(RuntimeError) as _unfit:
    nn.Linear(4, 5)(torch.ones(3, 6))
UNFIT = str(_unfit.value)
"""PyTorch's words for inputs that do not fit a layer, which differ from version to version."""


def model(client: ClientInfo) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def unreadable(client: ClientInfo) -> Any:
    raise OSError("no disk")


def sent(function: Any) -> Any:
    """Return a function as another process gets it from cloudpickle, without its file."""
    return type(function)(function.__code__.replace(co_filename="<dynamic-code>"), globals())


def reshaped(change: Callable[[Tensor], Any]) -> Callable[[ClientInfo], Any]:
    """Return a data function whose inputs are changed to another form."""
    return lambda client: tuple((change(inputs), labels) for inputs, labels in data(client))


def images(*shape: int) -> Callable[[ClientInfo], Any]:
    return reshaped(lambda inputs: torch.zeros(len(inputs), *shape))


def convolution(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))


class Strange(nn.Linear):
    def forward(self, inputs: Tensor) -> Any:
        return "outputs", super().forward(inputs)


def varied(**parts: Any) -> Callable[[ClientInfo], Any]:
    """Return a data function with further or other parts, which are values or functions of a client."""

    def function(client: ClientInfo) -> Any:
        train, test = data(client)
        of_client = {name: part(client) if name == "common" else part for name, part in parts.items()}
        return {"train": train, "test": test} | of_client

    return function


class Head(nn.Module):
    """A network whose forward reads the weight of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs).relu()) + 0 * self.head.weight.sum()


class Extra(Head):
    def get_extra_state(self) -> Any:
        return {"steps": 3}


class Checkpointed(Head):
    def forward(self, inputs: Tensor) -> Tensor:
        body = nn.Sequential(self.body, nn.ReLU())
        return checkpoint(self.head, checkpoint(body, inputs, use_reentrant=False), use_reentrant=False)  # type: ignore


class Unused(Head):
    """A network whose last module is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(5, 2)


class Several(Head):
    """A network whose outputs are computed by two layers, the last of which is that of a class."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs).relu()
        return torch.cat([self.one(hidden), self.head(hidden)], 1)


class Detached(Head):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).detach()


class Repeated(nn.Module):
    """A network that has one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.inner = nn.Linear(4, 5), nn.Linear(5, 5)
        self.again, self.head = self.inner, nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.again(self.inner(self.body(inputs).relu()).relu()))


class Ordered(Head):
    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs[:, self.order]).relu())


class Partial(nn.Linear):
    """Saves its bias only."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"bias": super().state_dict(*args, **kwargs)["bias"]}


class Frozen(Head):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)


class Failing(Head):
    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("in training")
        return super().forward(inputs)


class NoText:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def endless() -> dict[str, Any]:
    settings: dict[str, Any] = {}
    settings["rounds"] = settings
    return settings


def empty() -> nn.Module:
    network = Head()
    network.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    return network


def hooked(kind: str) -> nn.Module:
    """Return a network with a hook on a parameter."""
    network = nn.Linear(4, 2)
    getattr(network.weight, kind)(lambda gradient: None)
    return network


def normalised(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, **options), nn.Linear(5, 2))


class Table:
    """A table as pandas has it."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.numpy()

    def __len__(self) -> int:
        return len(self._values)

    def to_numpy(self) -> Any:
        return self._values.astype(object)


BCE = fedhet.Task("binary", loss=nn.BCELoss())


def run(model: Any = model, data: Any = data, task: Any = None, **settings: Any) -> fedhet.RunResult:
    common = {"clients": 2, "workers": 1, "report": False, "method": "fedavg", "rounds": 1}
    if settings.get("method") == "nearest-neighbour":
        del common["rounds"]
    return fedhet.run(common | settings, model=model, data=data, task=task, progress=False)


BYTES = torch.full((9, 4), 200).byte(), torch.arange(9) % 2

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a state-dir that is a file": (lambda: run(**{"state-dir": __file__}), "cannot be written to ("),
    "method ..": (lambda: run(method=".."), "unknown method '..'"),
    "method .x:y": (lambda: run(method=".x:y"), "method = '.x:y': cannot be imported"),
    "methods as one text": (lambda: fedhet.compare("fedhenn"), "methods = 'fedhenn': must be a list of texts, such as"),
    "methods that are no list": (lambda: fedhet.compare(3), "methods = 3: must be a list of texts, such as"),  # type: ignore[arg-type]
    "seeds that are no list": (lambda: fedhet.compare(["local"], seeds=3), "seeds = 3: must be a list of whole"),  # type: ignore[arg-type]
    "seeds of texts": (lambda: fedhet.recommend(seeds=["a"]), "seeds = ['a']: must be a list of whole"),  # type: ignore[list-item]
    "settings of a run": (lambda: fedhet.run(3), "config = 3: must be"),  # type: ignore[arg-type]
    "settings of a comparison": (lambda: fedhet.compare(["local"], 3), "config = 3: must be a dict"),  # type: ignore[arg-type]
    "settings of a recommendation": (lambda: fedhet.recommend(3), "config = 3: must be a dict"),  # type: ignore[arg-type]
    "a folder of another kind": (lambda: fedhet.run("fedavg", out=3), "out = 3: must be a text"),  # type: ignore[arg-type]
    "an engine of another kind": (lambda: fedhet.run("fedavg", engine=3), "engine = 3: must be a text"),  # type: ignore[arg-type]
    "a budget without a unit": (lambda: fedhet.recommend(budget="x"), "budget = x: write a number above 0"),
    "a preset that is none": (lambda: fedhet.run("nosuch/preset"), "unknown method or preset 'nosuch/preset'"),
    "resnet18": (lambda: fedhet.run({"architectures": "resnet18"}), "torchvision/resnet18 is torchvision's"),
    "a model that is a name": (lambda: run("mlp"), "model must be a network, an estimator, a class of networks"),
    "labels beyond outputs": (lambda: run(data=many), "its network has 2 outputs, for classes 0 to 1"),
    "a tuple without a tensor": (lambda: run(lambda client: Strange(4, 2)), "Strange returned a tuple: a network must"),
    "data alone": (lambda: run(None), "inputs, float32 of shape (8, 4): the configured architectures fit only"),
    "data alone, own": (lambda: run(None, dataset="own"), "needs your own data and your own model"),
    "no labels": (
        lambda: run(data=lambda client: ((torch.ones(8, 4), None),) * 2),
        "client 0: its training examples have no labels (or -1), from which fedavg learns",
    ),
    "no rows": (lambda: run(data=lambda client: (None, None)), "client 0: train: rows of None cannot be read"),
    "a sparse tensor": (
        lambda: run(data=reshaped(Tensor.to_sparse)),
        "the inputs (type Tensor) are sparse, nested, masked or on the meta device",
    ),
    "a sparse matrix": (
        lambda: run(data=reshaped(lambda inputs: scipy.sparse.csr_matrix(inputs.numpy()))),
        "client 0: train: the inputs (type csr_matrix) are sparse, nested, masked or on the meta device: give dense",
    ),
    "rows of unlike lengths": (
        lambda: run(data=reshaped(lambda inputs: [[1.0] * (3 + (row == 2)) for row in range(len(inputs))])),
        "client 0: train: the inputs cannot be converted to a tensor (",
    ),
    "one table": (lambda: run(data=lambda client: (Table(torch.ones(4, 3)),) * 2), "in one table: give a pair"),
    "channels last": (lambda: run(lambda client: convolution(3), images(8, 8, 3)), "expected input[8, 8, 8, 3] to"),
    "a number of jobs": (lambda: fedhet.compare(["local"], jobs="a"), "jobs = 'a': must be a whole number"),  # type: ignore[arg-type]
    "observers": (lambda: fedhet.run("fedavg", observers=3), "observers = 3: must be a list"),  # type: ignore[arg-type]
    "observers of another kind": (lambda: fedhet.run("fedavg", observers=[3]), "observers = [3]: must be a list"),  # type: ignore[list-item]
    "a task of another kind": (lambda: fedhet.run("fedavg", task=3), "task = 3: must be a text"),  # type: ignore[arg-type]
    "a list as the grid": (lambda: Tuning([{"learning-rate": 0.1}]), "grid = [{'learning-rate': 0.1}]: must be a dict"),  # type: ignore[arg-type]
    "no grid": (lambda: Tuning(None), "grid = None: must be a dict"),  # type: ignore[arg-type]
    "no run to evaluate": (lambda: fedhet.evaluate(None), "run = None: must be a text or a path"),
    "a number as the label": (
        lambda: fedhet.by_column(pandas.DataFrame({"ward": [1, 1], "bmi": [0.1, 0.2]}), "ward", label=5),  # type: ignore[arg-type]
        "label = 5: must be a list of values, such as ['systolic', 'diastolic']",
    ),
    "a grid of one number": (
        lambda: Tuning({"learning-rate": 0.1}),
        "grid: learning-rate = 0.1: must be a list of values",
    ),  # type: ignore[dict-item]
    "tuning of another kind": (lambda: fedhet.compare(["local"], tuning=3), "tuning = 3: must be a Tuning"),  # type: ignore[arg-type]
    "a folder with NUL": (
        lambda: fedhet.run("fedavg", out="a\0b"),
        "out = 'a\\x00b': must not contain the character NUL",
    ),
    "settings that hold themselves": (lambda: fedhet.run(endless()), "config is nested too deeply at 'rounds'"),
    "a key in two spellings": (
        lambda: fedhet.run({"local_epochs": 2, "local-epochs": 3}),
        "local-epochs is set twice, to 2 and to 3: set it once",
    ),
    "a batch size beside a loader": (
        lambda: fedhet.run(
            {"clients": 1, "method": "local"},
            model=model,
            data=lambda client: tuple(DataLoader(TensorDataset(*part), 8) for part in data(client)),
            client_settings=lambda client: {"batch-size": 4},
        ),
        "the client's own batch-size = 4 has no effect with a DataLoader",
    ),
    "a key that is no text": (lambda: fedhet.run({3: 4}), "config has the key 3: keys must be text"),  # type: ignore[dict-item]
    "augment = false": (
        lambda: run(data=varied(augment=lambda inputs: inputs), augment=False),
        "augment has no effect with an augment function of your own, which the data function returns: leave it out",
    ),
    "augment returns nothing": (
        lambda: run(data=varied(augment=lambda inputs: None)),
        "client 0: the augment function returned no tensor for a batch of torch.float32",
    ),
    "no statistics": (lambda: run(**{"batch-norm": "local"}), "batch-norm has no effect: no client's network has"),
    "common test sets": (
        lambda: run(data=varied(common=lambda client: data(client)[1]), **{"test-on": "global"}),
        "return the same examples as `common` for all clients, or leave it out",
    ),
    "labels of the common test set": (
        lambda: run(data=varied(common=lambda client: (torch.ones(3, 4), torch.arange(3) + 5))),
        "client 0: common: its labels go from 5 to 7",
    ),
    "a test part of another shape": (
        lambda: run(data=varied(test=(torch.ones(3, 6), torch.arange(3) % 2))),
        f"cannot process test inputs, float32 of shape (3, 6): RuntimeError: {UNFIT}",
    ),
    "bytes and floats": (
        lambda: run(data=varied(test=(torch.full((3, 4), 7).byte(), torch.arange(3) % 2))),
        "the test inputs are bytes, which are scaled to [0, 1], but the train inputs are values",
    ),
    "bytes and floats in a later row": (
        lambda: run(data=varied(train=BYTES, test=(torch.arange(9.0)[:, None].expand(9, 4) / 7, BYTES[1]))),
        "the train inputs are bytes, which are scaled to [0, 1], but the test inputs are values",
    ),
    "bytes and a public dataset of floats": (
        lambda: run(data=varied(train=BYTES, test=BYTES, public=torch.full((9, 4), 7.0)), method="fedmd"),
        "the train inputs are bytes, which are scaled to [0, 1], but the public inputs are values",
    ),
    "an empty public dataset": (
        lambda: run(data=varied(public=torch.ones(0, 4)), method="fedmd"),
        "client 0: public: it has no examples: add some, or leave it out",
    ),
    "one example without statistics": (
        lambda: run(lambda client: normalised(track_running_stats=False), varied(test=(torch.ones(1, 4), [0]))),
        "BatchNorm cannot normalise one example by its own statistics: set batch-size to at least 2",
    ),
    "a model without values": (
        lambda: run(lambda client: model(client).to("meta")),
        "whose 0.weight has no values yet",
    ),
    "lazy statistics": (
        lambda: run(lambda client: nn.Sequential(nn.Linear(4, 2), nn.LazyBatchNorm1d(affine=False))),
        "whose 1.running_mean has no values yet",
    ),
    "state that is no tensor": (
        lambda: run(lambda client: Extra()),
        "whose _extra_state cannot be sent",
    ),
    "an empty parameter": (lambda: run(lambda client: empty()), "whose nothing cannot be sent"),
    "a head that is read": (
        lambda: run(lambda client: Head(), method="fedproto"),
        "reads weight of its last layer, which the method extends: call the last layer instead, or set METHOD.width",
    ),
    "a head that a method replaces": (
        lambda: run(lambda client: Head(), method="perfcl"),
        "perfcl replaces the head, here 'head', which must be the last layer, but without it the network fails with",
    ),
    "no gradients": (
        lambda: run(lambda client: Detached()),
        "outputs have no gradients: leave torch.no_grad and detach",
    ),
    "an unused head": (lambda: run(lambda client: Unused(), method="fedrep"), "and set head to the last layer"),
    "no public data": (lambda: run(method="feddf"), "or pass it as public=... to the strategy or to make_server_app"),
    "a function sent to another process": (
        lambda: run(data=sent(unreadable)),
        "OSError: no disk (the function unreadable, line",
    ),
    "outputs of several layers": (
        lambda: run(lambda client: Several(), method="fedma", rounds=0),
        "serves only some classes: compute the scores of all classes by one linear layer",
    ),
    "a checkpoint": (
        lambda: run(lambda client: Checkpointed(), method="depthfl"),
        "leave the checkpoint out of forward",
    ),
    "a tiny budget": (
        lambda: fedhet.recommend({"clients": 2}, methods=["local"], budget=0.01, jobs=1),
        "the budget of 0.0 s is too short to compare methods",
    ),
    "a run that is no run": (lambda: fedhet.load_model("nowhere", 0), "nowhere has no config.toml: give the directory"),
    "a run of another kind": (lambda: fedhet.load_model(3, 0), "run = 3: must be a text or a path"),
    "a client that was not there": (
        lambda: fedhet.load_model(run(method="fedavg"), 7, model=model),
        "has no client 7: give a name from its clients.csv",
    ),
    "a date": (lambda: fedhet.run({"rounds": date(2020, 1, 2)}), "rounds = datetime.date(2020, 1, 2): must be a whole"),
    "a class of a strategy": (
        lambda: fedhet.run({"method": fedhet.FedAvg}),
        "method must be a string: give a name (fedhet list) or, of a class, 'FILE.py:FedAvg'",
    ),
    "a file that is not there": (lambda: fedhet.run("my.yaml"), "a run from my.yaml, not an existing file: give a"),
    "a folder": (lambda: fedhet.run(Path(".")), "from ., a folder (to continue the run there, use resume"),
    "no jobs": (lambda: fedhet.compare(["local"], jobs=0), "jobs = 0: must be at least 1"),
    "a method to recommend": (lambda: fedhet.recommend(methods=["foo"], budget=1), "unknown method 'foo'"),
    "settings of no kind": (
        lambda: fedhet.run({"method": "fedavg", "clients": 2, "workers": 1}, client_settings=lambda client: None),
        "client 0: client_settings returned None, but must return a dict",
    ),
    "a sigmoid": (
        lambda: run(lambda client: nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0)), task=BCE),
        "returns probabilities, but the metric of binary reads logits",
    ),
    "a mask from a sigmoid": (
        lambda: run(
            lambda client: nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sigmoid()),
            lambda client: ((torch.rand(8, 1, 2, 2), torch.ones(8, 2, 2)),) * 2,
            task=fedhet.Task("segmentation", loss=nn.BCELoss()),
        ),
        "returns probabilities, but the metric of segmentation reads logits",
    ),
    "class weights in two axes": (lambda: fedhet.Task(class_weights=torch.ones(2, 2)), "must be a list of positive"),  # type: ignore[arg-type]
    "a value without a text": (lambda: run(rounds=NoText()), "rounds = <NoText instance at "),
    "train() without self": (lambda: run(Frozen), "whose train() or eval() returns nothing: return self"),
    "sparse gradients": (
        lambda: run(lambda client: nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 2))),
        "whose 0 has sparse gradients",
    ),
    "a state dict without a weight": (
        lambda: run(lambda client: Partial(4, 2)),
        "whose state_dict() lacks weight, or changes it: return every parameter that requires gradients",
    ),
    "a hook on a gradient": (
        lambda: run(lambda client: hooked("register_hook")),
        "whose weight has a hook on its gradient, which copies of the network lose",
    ),
    "a hook on an accumulated gradient": (
        lambda: run(lambda client: hooked("register_post_accumulate_grad_hook")),
        "whose weight has a hook on its gradient, which copies of the network lose",
    ),
    "an example as a label": (
        lambda: run(data=varied(train=[*enumerate(zip(torch.ones(8, 4), [0, 1] * 4, strict=True))])),
        "client 0: train: the labels cannot be converted to a tensor",
    ),
    "a forward that fails in training": (
        lambda: run(Failing),
        "the client's forward raised RuntimeError: in training (test_sentences.py, line",
    ),
    "data that raise": (lambda: run(data=lambda c: 1 / 0), "client 0: the data function raised ZeroDivisionError"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_sentence_says_what_is_wrong(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.chdir(tmp_path)
    attempt, words = WRONG[what]
    with pytest.raises(FedhetError) as raised:
        attempt()
    text = str(raised.value).replace("2 clients (0, 1): ", "client 0: ")
    assert words in text
    assert not any(word in str(raised.value) for word in ("Traceback", "NoneType", "failed: "))


@functools.cache
def cached(client: ClientInfo) -> Any:
    return data(client)


class Off(list[Any]):
    """Rows that switch gradients off, as the data function `off` does."""

    def __getitem__(self, row: Any) -> Any:
        torch.set_grad_enabled(False)
        return super().__getitem__(row)


def off(client: ClientInfo) -> Any:
    torch.set_grad_enabled(False)
    return tuple(Off(zip(*part, strict=True)) for part in data(client))


RIGHT: dict[str, dict[str, Any]] = {
    "a cached data function": {"data": cached},
    "gradients off": {"data": off},
    "a module twice, lora": {"model": lambda client: Repeated(), "method": "lora"},
    "a module twice, flha-ghn": {"model": lambda client: Repeated(), "method": "flha-ghn"},
    "an integer parameter": {"model": lambda client: Ordered(), "method": "depthfl"},
    "an unused module behind the head": {"model": lambda client: Unused(), "method": "fedrep", "head": "head"},
    "public data of the clients": {"data": varied(public=(torch.ones(9, 4), None)), "method": "feddf"},
    "1,025 examples": {
        "model": lambda client: normalised(track_running_stats=False),
        "data": varied(test=(torch.rand(1025, 4), torch.arange(1025) % 2)),
        "method": "fml",
    },
}


@pytest.mark.parametrize("what", RIGHT)
def test_programs_that_work(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(**RIGHT[what])
    assert (done.summary["status"], done.summary["failures"]) == ("completed", 0)
    assert torch.is_grad_enabled()


def test_pfnm_without_layers_to_match_adds_no_units() -> None:
    assert run(lambda client: nn.Linear(4, 2), method="pfnm").history[1]["metrics"] == {"units": 0.0, "growth": 1.0}


def test_a_client_whose_data_function_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (failure,) = run(data=broken, clients=3).history[0]["failures"]
    assert failure["client"] == "1"
    assert "the data function raised FileNotFoundError" in failure["reason"]
    assert "(test_sentences.py, line " in failure["reason"]


def test_a_client_with_unreadable_data_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    share = tmp_path / "share"

    class Mounted(Observer):
        def round(self, run: RunInfo, report: RoundReport) -> None:
            share.touch()

    def on_a_share(client: ClientInfo) -> Any:
        if client.partition_id == 1:
            share.read_bytes()
        return data(client)

    settings = {"method": "fedavg", "clients": 2, "workers": 1, "report": False, "rounds": 2}
    done = fedhet.run(settings, model=model, data=on_a_share, observers=[Mounted()], progress=False)
    failed = [[failure["client"] for failure in row["failures"]] for row in done.history]
    assert failed == [["1"], [], [], []]


def test_tables_of_inputs_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = run(data=lambda client: tuple((Table(inputs), Table(labels)) for inputs, labels in data(client)))
    assert tables.summary["failures"] == 0
    assert tables.history[-1]["received"] == run().history[-1]["received"]


def test_a_comparison_tells_its_runs_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"clients": 2, "report": False, "rounds": 1}
    network = nn.Sequential(nn.Linear(4, 2), nn.Softmax(1))
    done = fedhet.compare(["fedavg", "local"], settings, seeds=[0, 1], model=network, data=data, out=tmp_path / "out")
    page = (done.folder / "comparison.md").read_text()
    assert (
        page.count("fedavg, local: 2 clients (0, 1): the client's Sequential returns probabilities, but the loss of")
        == 1
    )


def test_a_full_disk_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = Path.write_bytes

    def full(path: Path, content: bytes) -> None:
        if path.name.startswith(".2."):
            path.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(path, content)

    settings = {"method": "fedavg", "clients": 2, "workers": 1, "report": False, "rounds": 3, "local-epochs": 1}
    monkeypatch.setattr(Path, "write_bytes", full)
    folder = tmp_path / "here"
    with pytest.raises(FedhetError) as raised:
        fedhet.run(settings, out=folder, progress=False)
    assert f"{folder}/checkpoint/2.safetensors cannot be written or read: No space left on device" in str(raised.value)
    assert str(raised.value).endswith(f"continue with fedhet run --resume {folder}")
    assert [path.name for path in (folder / "checkpoint").iterdir()] == ["1.safetensors"]
    monkeypatch.undo()
    assert fedhet.run(resume=folder, progress=False).summary["rounds"] == 3


def test_control_c_says_how_to_go_on(tmp_path: Path) -> None:
    class Stopping(Observer):
        def round(self, run: RunInfo, report: RoundReport) -> None:
            raise KeyboardInterrupt

    folder, settings = tmp_path / "here", {"method": "fedavg", "clients": 2, "workers": 1, "report": False, "rounds": 1}
    with pytest.raises(KeyboardInterrupt) as stopped:
        fedhet.run(settings, model=model, data=data, out=folder, observers=[Stopping()], progress=False)
    (note,) = stopped.value.__notes__
    assert note == f"stopped; continue with: fedhet.run(resume={str(folder)!r}, model=..., data=...)"
    assert fedhet.run(resume=folder, model=model, data=data, progress=False).summary["rounds"] == 1
