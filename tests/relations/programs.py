"""Programs as users write them, drawn at random: tables with names, in many forms, for all tasks, networks and methods.

A program's data are `Rows`, whose columns and classes have names. `edits` change rows before a form of data is made of
them, so that a relation can, for example, reorder the columns of one part of one client.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.tree import DecisionTreeClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.datasets import DatasetFolder

from fedhet.methods import registry

COLUMNS = ("age", "bmi", "pressure", "pulse", "sugar", "weight")
CLASSES = ("ant", "bee", "cat")
PUBLIC = 24
MASK = (2, 3)
"""Height and width of the pictures of a segmentation, whose pixels are the columns."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rows:
    """Inputs (n, d) and labels (n, ...) of one part of a client's data, with names of the columns and classes."""

    inputs: Array
    labels: Array
    columns: tuple[str, ...] = COLUMNS
    classes: tuple[str, ...] = ()

    def take(self, rows: Any) -> "Rows":
        """Return the rows with these numbers."""
        return replace(self, inputs=self.inputs[rows].copy(), labels=self.labels[rows].copy())

    def reordered(self, order: Any) -> "Rows":
        """Return the same rows with the columns in another order."""
        return replace(self, inputs=self.inputs[:, order], columns=tuple(self.columns[place] for place in order))

    def renumbered(self, order: Any) -> "Rows":
        """Return the same rows with the classes numbered, or the columns of labels, in another order."""
        labels = self.labels[:, order] if self.labels.ndim == 2 else np.argsort(order)[self.labels]
        return replace(self, labels=labels, classes=tuple(self.classes[number] for number in order))


Edit = Callable[[int, str, Rows], Rows]
"""A function of a client's number, the name of a part and its rows, that returns other rows."""


@dataclass(frozen=True)
class Program:
    """A user's program: everything that `fedhet.run` needs.

    Attributes:
        method: name of the method.
        task: name of the task.
        form: name of the form in which parts are given (see `FORMS`).
        network: name of the network (see `NETWORKS`).
        double: whether networks have float64 weights.
        clients: number of clients.
        sizes: `equal`, `unequal` numbers of examples, or `lacking` (client 1 has no example of the last class).
        settings: settings beside those that follow from the attributes.
        edits: changes of the rows, in order.
        absent: clients whose data function raises an exception.
        offset: constant that the network adds to its outputs.
    """

    method: str = "fedavg"
    task: str = "classification"
    form: str = "tensors"
    network: str = "mlp"
    double: bool = True
    clients: int = 3
    sizes: str = "equal"
    settings: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    absent: tuple[int, ...] = ()
    offset: float = 0.0

    def __str__(self) -> str:
        shown = [self.method, self.task, self.form, self.network, "float64" if self.double else "float32", self.sizes]
        return f"{', '.join(shown)}, {self.clients} clients, {dict(self.settings)}"

    def having(self, **settings: Any) -> "Program":
        """Return the program with further settings, whose names have `_` in place of `-`."""
        return replace(self, settings={**self.settings, **{k.replace("_", "-"): v for k, v in settings.items()}})

    def edited(self, edit: Edit) -> "Program":
        """Return the program with a further change of its rows."""
        return replace(self, edits=(*self.edits, edit))

    @property
    def outputs(self) -> int:
        """The number of outputs of the networks."""
        return 1 if self.task in ("binary", "regression", "survival") else len(CLASSES)

    @property
    def all_settings(self) -> dict[str, Any]:
        """The settings that are passed to `fedhet.run`."""
        rounds = {} if SETTINGS_OF.get(self.method, {}).get("rounds", 1) == "" else {"rounds": 2}
        given = {"method": self.method, "clients": self.clients, **rounds, "report": False, "workers": 1}
        if self.method not in CONTROLS:
            given |= {"local-epochs": 2, "batch-size": 7, "learning-rate": 0.05}
        own = {key: value for key, value in SETTINGS_OF.get(self.method, {}).items() if value != ""}
        return {**given, **own, **self.settings}

    def rows(self, client: int, part: str) -> Rows:
        """Return the rows of a part of a client's data, after all edits."""
        public = part in ("public", "common")
        rng = np.random.default_rng([99 if public else client, len(part)])
        size = {"train": 21, "test": 14}.get(part, PUBLIC)
        if self.sizes == "unequal" and not public:
            size += 9 * client
        inputs = rng.normal(size=(size, len(COLUMNS))).astype(np.float32)
        score = inputs[:, :3] + 0.3 * rng.normal(size=(size, 3))
        if self.task == "classification":
            labels = score.argmax(1)
            labels[:3] = range(3)
            if self.sizes == "lacking" and client == 1 and not public:
                labels = labels % 2
            rows = Rows(inputs, labels, classes=CLASSES)
        elif self.task == "binary":
            labels = (score[:, 0] > 0).astype(np.int64)
            labels[:2] = range(2)
            rows = Rows(inputs, labels)
        elif self.task == "multi-label":
            labels = (score > 0).astype(np.int64)
            labels[:2] = [[0, 1, 0], [1, 0, 1]]
            rows = Rows(inputs, labels, classes=CLASSES if self.form == "frame" else ())
        elif self.task == "survival":
            events = rng.random(size) < 0.7
            rows = Rows(inputs, np.stack([np.exp(-score[:, 0]), events], 1).astype(np.float64))
        elif self.task == "segmentation":
            labels = (np.digitize(inputs + 0.3 * rng.normal(size=inputs.shape), [-0.4, 0.4])).reshape(-1, *MASK)
            labels[0] = np.arange(6).reshape(MASK) % 3
            lacks = self.sizes == "lacking" and client == 1 and not public
            rows = Rows(inputs, labels % 2 if lacks else labels, classes=CLASSES)
        else:
            rows = Rows(inputs, score[:, :1].astype(np.float64))
        for edit in self.edits:
            rows = edit(client, part, rows)
        return rows

    def data(self, client: Any) -> dict[str, Any]:
        """Return a client's data in the program's form."""
        number = client.partition_id
        if number in self.absent:
            raise ValueError(f"the table of client {number} is lost")
        parts = {part: FORMS[self.form](self.rows(number, part), self) for part in ("train", "test")}
        form = self.form if self.form in (*NAMED_COLUMNS, *NAMED_CLASSES) else "tensors"
        parts["public"] = FORMS[form](self.rows(0, "public"), self)
        return parts

    def model(self, client: Any) -> Any:
        """Return a client's network, or its scikit-learn estimator."""
        name = "pixels" if self.task == "segmentation" else self.network
        network = (NETWORKS | {"pixels": of_pixels})[name](client.partition_id, self)
        if not isinstance(network, nn.Module):
            return network
        network = Shifted(network, self.offset) if self.offset else network
        return network.double() if self.double else network

    def arguments(self) -> dict[str, Any]:
        """Return the functions and the task that are passed to `fedhet.run`."""
        return {"model": self.model, "data": self.data, "task": self.task}


# ---- forms of data


def tensors(rows: Rows, program: Program) -> Any:
    return torch.tensor(rows.inputs), torch.tensor(rows.labels)


def arrays(rows: Rows, program: Program) -> Any:
    return rows.inputs, rows.labels


def lists(rows: Rows, program: Program) -> Any:
    return rows.inputs.tolist(), rows.labels.tolist()


def frame(rows: Rows, program: Program) -> Any:
    """Return a table and a column of classes with names, or a table of labels."""
    import pandas

    table = pandas.DataFrame(rows.inputs, columns=list(rows.columns))
    if rows.labels.ndim == 2 and rows.classes:
        return table, pandas.DataFrame(rows.labels, columns=list(rows.classes))
    if rows.classes:
        return table, pandas.Series(pandas.Categorical.from_codes(rows.labels, categories=list(rows.classes)))
    return table, pandas.Series(rows.labels) if rows.labels.ndim == 1 else pandas.DataFrame(rows.labels)


def texts(rows: Rows, program: Program) -> Any:
    """Return a table and the names of the rows' classes, which are numbered in alphabetical order."""
    table, labels = frame(rows, program)
    return table, np.array(labels) if rows.classes and rows.labels.ndim == 1 else labels


def columns(rows: Rows, program: Program) -> Any:
    return {"x": torch.tensor(rows.inputs), "label": torch.tensor(rows.labels)}


def dataset(rows: Rows, program: Program) -> Any:
    return TensorDataset(*tensors(rows, program))


def subset(rows: Rows, program: Program) -> Any:
    """Return the rows as a subset of twice as many."""
    order = np.random.default_rng(0).permutation(2 * len(rows.inputs))
    inputs = np.concatenate([rows.inputs, rows.inputs + 1])[np.argsort(order)]
    labels = np.concatenate([rows.labels, rows.labels])[np.argsort(order)]
    return Subset(TensorDataset(torch.tensor(inputs), torch.tensor(labels)), order[: len(rows.inputs)].tolist())


def loader(rows: Rows, program: Program) -> Any:
    return DataLoader(dataset(rows, program), batch_size=program.all_settings.get("batch-size", 7), shuffle=True)


class Lazy(Dataset[Any]):
    """Rows that are read on demand, with `classes` and `class_to_idx` as torchvision's data sets have them."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        if rows.classes:
            self.classes = list(rows.classes)
            self.class_to_idx = {name: number for number, name in enumerate(rows.classes)}

    def __len__(self) -> int:
        return len(self.rows.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        label = self.rows.labels[index]
        return torch.tensor(self.rows.inputs[index]), label.item() if label.ndim == 0 else torch.tensor(label)


def lazy(rows: Rows, program: Program) -> Any:
    return Lazy(rows)


class Named(Dataset[Any]):
    """Rows as dicts, and names of classes where Hugging Face's data sets have them."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        label = type("ClassLabel", (), {"names": list(rows.classes)}) if rows.classes else object()
        self.features = {"x": object(), "label": label}

    def __len__(self) -> int:
        return len(self.rows.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = self.rows.labels[index]
        return {"x": self.rows.inputs[index], "label": label.item() if label.ndim == 0 else label}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def named(rows: Rows, program: Program) -> Any:
    return Named(rows)


def dicts(rows: Rows, program: Program) -> Any:
    return [Named(rows)[index] for index in range(len(rows.inputs))]


def collated(rows: Rows, program: Program) -> Any:
    """Return a loader whose `collate_fn` makes a dict of a batch."""
    size = program.all_settings.get("batch-size", 7)
    return DataLoader(Named(rows), batch_size=size, shuffle=True, collate_fn=joined)


def joined(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the rows of a batch in one dict."""
    return {name: torch.tensor(np.array([row[name] for row in batch])) for name in batch[0]}


class Read(Dataset[Any]):
    """Rows of a table that is an attribute, as users' own data sets read them."""

    def __init__(self, rows: Rows) -> None:
        self.table, self.labels = frame(replace(rows, classes=()), Program())[0], rows.labels

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.table.iloc[index].to_numpy(np.float32)), torch.tensor(self.labels[index])


def read(rows: Rows, program: Program) -> Any:
    return Read(rows)


class Wrapped(Dataset[Any]):
    """The rows of another data set, which has the names of classes."""

    def __init__(self, rows: Rows) -> None:
        self.source = Lazy(rows)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.source[index]


def wrapped(rows: Rows, program: Program) -> Any:
    return Wrapped(rows)


FOLDERS: list[Path] = []
"""The folder in which `files` writes its files; a test appends one of its own."""


def files(rows: Rows, program: Program) -> Any:
    """Return a `DatasetFolder` of one file for each row, in a folder for each class."""
    content = rows.inputs.tobytes() + rows.labels.tobytes() + repr(rows.classes).encode()
    root = FOLDERS[-1] / hashlib.sha256(content).hexdigest()
    if not root.is_dir():
        partial_root = Path(f"{root}-{os.getpid()}")
        for name in rows.classes:
            (partial_root / name).mkdir(parents=True)
        for number, (inputs, label) in enumerate(zip(rows.inputs, rows.labels, strict=True)):
            np.save(partial_root / rows.classes[label] / f"{number:03}.npy", inputs)
        partial_root.rename(root)
    return DatasetFolder(str(root), np.load, (".npy",), transform=torch.from_numpy, allow_empty=True)


FORMS: dict[str, Callable[[Rows, Program], Any]] = {
    **{"tensors": tensors, "arrays": arrays, "lists": lists, "frame": frame, "dataset": dataset, "subset": subset},
    **{"loader": loader, "lazy": lazy, "named": named, "files": files},
    **{"columns": columns, "dicts": dicts, "collated": collated, "texts": texts},
    **{"read": read, "wrapped": wrapped},
}
NAMED_COLUMNS = ("frame", "frame", "read")
NAMED_CLASSES = ("frame", "lazy", "named", "collated", "texts", "wrapped")
"""Forms whose classes have names in any order; the folders of `files` have theirs in alphabetical order."""

IN_ORDER = tuple(form for form in FORMS if form != "files")
"""Forms that keep the order of rows."""


# ---- networks


class Shifted(nn.Module):
    """A network that adds a constant to another one's outputs."""

    def __init__(self, network: nn.Module, offset: float) -> None:
        super().__init__()
        self.network, self.offset = network, offset

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs) + self.offset


class Recurrent(nn.Module):
    """A GRU over the columns."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(1, 5, batch_first=True), nn.Linear(5, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(inputs[..., None])[0][:, -1])


class Words(nn.Module):
    """A network that reads numbers as words, of which the first one pads."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 6, padding_idx=0)
        self.head = nn.Linear(6, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        words: Tensor = self.words((2 * inputs).round().clamp(-2, 2).long() + 2)
        return self.head(words.sum(1).tanh())


class Tied(nn.Module):
    """A network whose two hidden layers have one weight, and whose first layer is frozen."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.first.requires_grad_(False)
        self.head = nn.Linear(6, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.first(inputs).relu()).relu()).relu())


class HeadTied(nn.Module):
    """A network whose head has the weight of its first layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.back, self.head = nn.Linear(6, outputs), nn.Linear(outputs, 6), nn.Linear(6, outputs)
        self.head.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head((inputs + self.back(self.first(inputs).tanh())).relu())


class HeadInside(nn.Module):
    """A network whose head is its first module, before a learned scale, with buffers that training changes or not."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(8, outputs)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(outputs))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("shift", torch.full((6,), 0.1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return self.head(self.body(inputs - self.mean + self.shift)) * self.scale


class Repeated(nn.Module):
    """A network of two equal blocks, as `inclusivefl` needs them."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
        self.head = nn.Linear(8, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(self.first(inputs)))


def perceptron(client: int, program: Program, *between: Callable[[int], nn.Module], width: int = 8) -> nn.Module:
    layers = [layer(width) for layer in between]
    second = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, program.outputs)]
    return nn.Sequential(nn.Linear(6, width), *layers, nn.ReLU(), *second)


def of_widths(client: int, program: Program) -> nn.Module:
    return perceptron(client, program, width=6 + 2 * (client % 2))


def calibrated(client: int, program: Program) -> nn.Module:
    return nn.Sequential(*perceptron(client, program), nn.Linear(program.outputs, program.outputs))


def with_frozen_head(client: int, program: Program) -> nn.Module:
    network = perceptron(client, program)
    network[-1].requires_grad_(False)
    return network


def convolutional(client: int, program: Program) -> nn.Module:
    first = [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*first, nn.Flatten(1), nn.Linear(24, program.outputs))


def starting_at(client: int, program: Program) -> nn.Module:
    """Return a network with the same initial weights in every process."""
    return with_given_weights(perceptron(client, program))


def of_pixels(client: int, program: Program) -> nn.Module:
    """Return a network of class scores for each pixel, with the same initial weights in every process."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, program.outputs, 1)]
    return with_given_weights(nn.Sequential(nn.Unflatten(1, (1, *MASK)), *layers))


def by_columns(client: int, program: Program) -> nn.Module:
    """Return `convolutional` with weights of its layers whose last axis is not the one that is contiguous."""
    network = convolutional(client, program)
    for parameter in network.parameters():
        parameter.data = parameter.data.movedim(-1, 0).contiguous().movedim(0, -1)
    return network


def with_given_weights(network: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return network


def beside_trees(client: int, program: Program) -> Any:
    """Return a network for client 0, and scikit-learn's estimators for the others."""
    if client == 0:
        return perceptron(client, program)
    if program.task == "regression":
        return (LinearRegression(), RandomForestRegressor(3))[client % 2]
    return (LogisticRegression(), RandomForestClassifier(3), DecisionTreeClassifier(max_depth=2))[client % 3]


NETWORKS: dict[str, Callable[[int, Program], Any]] = {
    "mlp": perceptron,
    "widths": of_widths,
    "dropout": lambda client, program: perceptron(client, program, nn.LayerNorm, lambda _: nn.Dropout(0.3)),
    "batch-norm": lambda client, program: perceptron(client, program, nn.BatchNorm1d),
    "convolutional": convolutional,
    "by columns": by_columns,
    "recurrent": lambda client, program: Recurrent(program.outputs),
    "tied": lambda client, program: Tied(program.outputs),
    "words": lambda client, program: Words(program.outputs),
    "start": starting_at,
    "repeated": lambda client, program: Repeated(program.outputs),
    "beside trees": beside_trees,
    "head tied": lambda client, program: HeadTied(program.outputs),
    "head inside": lambda client, program: HeadInside(program.outputs),
    "calibrated": calibrated,
    "frozen head": with_frozen_head,
}
HEADS = {"head inside": "head", "calibrated": "4"}
"""The heads of networks whose last `nn.Linear` is another layer."""
NETWORK_OF = {"inclusivefl": "repeated"}
"""The network that a method needs, if most are refused."""


# ---- methods

CONTROLS = ("nearest-neighbour", "logistic-regression", "label-spreading", "gradient-boosting")
SETTINGS_OF: dict[str, dict[str, Any]] = {
    "depthfl": {"depthfl.depths": "2,1", "depthfl.blocks": "2"},
    "ensemble": {"rounds": ""},
    "fedca": {"fedca.probe-epochs": 5},
    "feddf": {"feddf.server-steps": 5, "feddf.teach": True},
    "fedgen": {"fedgen.server-steps": 2},
    "fedgh": {"fedgh.width": 5},
    "fedharm": {"fedharm.blocks": "0,2,4", "fedharm.slots": "3,3,3"},
    "fedma": {"rounds": ""},
    "fedmd": {"fedmd.public-epochs": 0, "fedmd.private-epochs": 0, "fedmd.public-batch": 8},
    "fedproto": {"fedproto.width": 5},
    "fedre": {"fedre.width": 5},
    "fedrep": {"local-epochs": 3},
    "fedrolex": {"fedrolex.widths": "1,0.5"},
    "fedsimclr": {"fedsimclr.probe-epochs": 5},
    "fedsimsiam": {"fedsimsiam.probe-epochs": 5},
    "fedtgp": {"fedtgp.width": 5},
    "flha-ghn": {"optimizer": "adam", "learning-rate": 0.005},
    "heterofl": {"heterofl.widths": "1,0.5"},
    "inclusivefl": {"inclusivefl.depths": "2,1", "inclusivefl.blocks": "layers.0"},
    "pfnm": {"rounds": ""},
    "scalefl": {"scalefl.depths": "2,1", "scalefl.widths": "1,0.5", "scalefl.blocks": "2"},
}
OF_ESTIMATORS = ("local", "fedmd", "feddf")
"""Methods in which scikit-learn's estimators take part."""

SYMMETRIC = ("local", "fedavg", "fedprox", "fedrep", "lg-fedavg", "layer-average", "fedproto", "fd", "fedgh")
"""Methods that treat clients alike, and draw no random number if networks have given weights and batches are full."""


@st.composite
def programs(draw: st.DrawFn, **fixed: Any) -> Program:
    """Draw a program; `fixed` are values of its attributes, or tuples to draw from."""
    names = {
        "method": tuple(name for name in registry.own_methods()),
        "task": (*["classification"] * 2, "binary", "regression", "multi-label", "survival", "segmentation"),
        "form": tuple(FORMS),
        "network": tuple(NETWORKS),
        "double": (True, False),
        "clients": (2, 3, 4),
        "sizes": ("equal", "unequal", "lacking"),
        "settings": ({}, {}, {}, {"validation": 0.3, "keep-best": True}, {"fraction-train": 0.5}),
    }
    values: dict[str, Any] = {}
    for name, choices in names.items():
        given = fixed.get(name, choices)
        values[name] = draw(st.sampled_from(given)) if isinstance(given, tuple) else given
    values["network"] = NETWORK_OF.get(values["method"], values["network"])
    if values["method"] not in OF_ESTIMATORS and values["network"] == "beside trees":
        values["network"] = "mlp"
    if values["method"] in CONTROLS:
        values["settings"] = {}
    elif values["network"] in HEADS and draw(st.booleans()):
        values["settings"] = {**values["settings"], "head": HEADS[values["network"]]}
    if values["form"] in (*NAMED_COLUMNS, "texts") and values["task"] == "segmentation":
        values["task"] = "classification"
    if values["form"] == "files" and values["task"] != "classification":
        values["form"] = "lazy"
    return Program(**values)


def client_edit(
    client: int, parts: tuple[str, ...], change: Callable[[Rows], Rows], at: int, part: str, rows: Rows
) -> Rows:
    return change(rows) if at == client and part in parts else rows


def at(client: int, parts: tuple[str, ...], change: Callable[[Rows], Rows]) -> Edit:
    """Return an edit of some parts of one client."""
    return partial(client_edit, client, parts, change)


def everywhere(parts: tuple[str, ...], change: Callable[[Rows], Rows]) -> Edit:
    """Return an edit of some parts of all clients."""
    return lambda client, part, rows: change(rows) if part in parts else rows
