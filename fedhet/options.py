"""Options: the keys of a configuration as dataclass fields, and a whole configuration as a value.

A key has a default, a meaning and the values that it takes; a method's own keys are the fields of its `Parameters`.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from fedhet.errors import ConfigError
from fedhet.keys import About, kebab
from fedhet.keys import Value as Value
from fedhet.keys import option as option

AGGREGATIONS = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "norm-clipped")
"""How what clients send may be averaged."""

OWN = "own"
"""The value of `dataset` where clients have data of a user's own."""

_split = partial(option, about="data", at_node=True)
_files = partial(_split, replaced_by=("data", "model"))  # without models, these are made for the data set's examples
_dealt = partial(_split, replaced_by=("data",))
_public = partial(option, about="data", replaced_by=("data",))
_optimiser = partial(option, about="optimiser")
_output = partial(option, about="output")
_server = partial(option, about="server", resumable=True)
_node = partial(option, about="node", at_node=True)
_place = partial(option, about="place", resumable=True)


@dataclass(frozen=True)
class Parameters:
    """A method's own keys: subclasses add fields made with `option`, each with the paper's value."""

    widths = "1"
    size_name = "width"
    """The setting of a node by which it says its client's size, where clients have parts of one network."""
    uses: ClassVar[Collection[str]] = ()
    """Common keys that the method uses even if the user's data or models replace them (`option(replaced_by=...)`)."""
    without: ClassVar[Collection[str]] = ()
    """Common keys that have no effect under the method."""

    @property
    def sizes(self) -> tuple[float, ...]:
        """The sizes that clients may have, as a node says them, the largest first."""
        return tuple(sorted({*self.all_widths}, reverse=True))

    @property
    def all_widths(self) -> tuple[float, ...]:
        """The widths to assign to clients that have parts of one network; raises a ConfigError for a wrong one."""
        return tuple(width(each, "widths") for each in listed(self.widths)) or (1.0,)

    def width_at(self, node_config: Mapping[str, Any]) -> float | None:
        """Return the width that a node's config sets, None without one; raises a ConfigError if it is wrong."""
        chosen = node_config.get("width")
        return None if chosen is None else width(chosen, "the node's width")

    @property
    def changes_heads(self) -> bool:
        """Whether clients' networks get other heads, so that only the handshake tells what they share."""
        return False

    @property
    def makes_public_dataset(self) -> bool:
        """Whether the method takes its public dataset from elsewhere than `public-samples`."""
        return False

    def suited(self, *, own_models: bool, unlabelled: bool) -> dict[str, tuple[Value, str]]:
        """Return keys that take another value than the default or a preset's for what a user supplies.

        Args:
            own_models: whether the clients have models of the user's own.
            unlabelled: whether the public examples have no labels.

        Returns:
            By the method's own key, or else by a common one, the value and the reason in words.
        """
        return {}

    def check(self, config: "Config") -> None:
        """Check the method's keys against the common ones; raises a ConfigError if they do not fit."""


def width(value: object, name: str) -> float:
    """Read a share of units, above 0 and at most 1; raises a ConfigError that names the setting."""
    try:
        share = float(str(value))
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"{name}: {value} is no share of a layer's units: a width is above 0 and at most 1")
    return share


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete, valid configuration. Fields are the keys with `_` for `-`; see `fedhet keys` for a table."""

    method: str = option("fedhenn", "federated method; `fedhet list` names them, package.module:name is one of yours")
    dataset: str = _files("digits", "data set; `fedhet list` names them; own: what the data function gives")
    data: str = _files(
        "", "folder with the data set's files; empty: its own place, or a download", resumable=True, path=True
    )
    partition: str = _dealt("iid", "how examples are dealt to clients: iid, classes, dirichlet, natural")
    classes_per_client: int = _dealt(2, "classes that each client holds", at_least=1, needs={"partition": ("classes",)})
    alpha: float = _dealt(
        0.5,
        "concentration of partition = dirichlet; the smaller, the more clients differ",
        above=0,
        needs={"partition": ("dirichlet",)},
    )
    samples_per_client: int = _dealt(0, "training examples that a client keeps; 0: all of its part", at_least=0)
    halved_clients: float = _dealt(
        0.0, "share of the clients, drawn by the seed, that keep half of their training examples", at_least=0, at_most=1
    )
    clients: int = option(10, "clients to simulate", about="data", at_least=1, at_most=100_000)
    architectures: str = option(
        "cnn", "a model, a comma-separated list of models, or a family of models", replaced_by=("model",)
    )
    assign: str = option(
        "round-robin",
        "how architectures are assigned to clients: round-robin, blocks (each to neighbours) or random",
        replaced_by=("model",),
    )
    rounds: int = option(20, "rounds of training", at_least=0, resumable=True)
    fraction_train: float = option(1.0, "part of the clients that trains in a round", above=0, at_most=1)
    local_epochs: int = option(1, "epochs that a client trains in a round", at_least=0)
    batch_size: int = option(32, "examples in a mini-batch", at_least=1, replaced_by=("loader",))
    optimizer: str = _optimiser("sgd", "optimiser of the clients", choices=("sgd", "adam", "amsgrad", "adamw"))
    learning_rate: float = _optimiser(0.01, "learning rate", above=0)
    lr_schedule: str = _optimiser(
        "constant",
        "learning rate over the run: by round, or by step as one-cycle is (lr/25 to lr at .3, down to lr/100)",
        choices=("constant", "cosine", "linear", "one-cycle"),
    )
    momentum: float = _optimiser(0.0, "momentum of SGD", at_least=0, below=1, needs={"optimizer": ("sgd",)})
    weight_decay: float = _optimiser(0.0, "weight decay on weights (biases and normalisation have none)", at_least=0)
    clip_gradients: float = _optimiser(0.0, "largest norm of a step's gradient, scaled down to it; 0: any", at_least=0)
    augment: bool = option(False, "augment training batches as the data set defines it", replaced_by=("data",))
    input_size: int = _files(0, "resize images to this many pixels a side; 0: as they are", at_least=0, at_most=2048)
    public_samples: int = _dealt(
        0, "examples held out of every client's training data for the methods' public dataset", at_least=0
    )
    public_dataset: str = _public(
        "",
        "another data set whose training images are the public dataset, resized, coloured and scaled like theirs; "
        "they have labels where it has as many classes; empty: the clients' data set",
        needs={"public-samples": ()},
    )
    public_data: str = _public(
        "",
        "folder with the files of public-dataset, as data is for dataset",
        resumable=True,
        path=True,
        needs={"public-dataset": ()},
    )
    test_split: str = _split(
        "given",
        "test examples: those of the data set or data function, or as many drawn by the seed from all its examples",
        choices=("given", "drawn"),
    )
    test_share: float = _split(
        0.0,
        "share of all examples that is drawn for testing, a client's test part as of what it keeps; 0: as many as the "
        "data set has",
        at_least=0,
        below=1,
        needs={"test-split": ("drawn",)},
    )
    validation: float = _split(
        0.0,
        "share of each client's training examples, and of each class, that it is evaluated on and never trained on",
        at_least=0,
        below=1,
    )
    validation_on: str = _dealt(
        "own",
        "validation examples: each client's own, with its labels, or as many of the data set, the same for all clients",
        choices=("own", "common"),
        needs={"validation": ()},
    )
    shared_init: bool = option(True, "what is exchanged starts from one initialisation (of the first client)")
    closing_epochs: int = option(0, "epochs of a closing round in which all clients train; 0: none", at_least=0)
    unseen_clients: int = option(
        0,
        "how many of the clients, the last ones, come after the last round, receive what the method has for them, and "
        "go on alone; beside it, the same from their own initial weights",
        at_least=0,
    )
    unseen_epochs: int = option(10, "epochs that unseen clients train alone", at_least=0, needs={"unseen-clients": ()})
    unseen_learning_rate: float = option(
        0.0,
        "constant learning rate of it; 0: learning-rate, at which those beside it train from scratch",
        at_least=0,
        needs={"unseen-clients": ()},
    )
    evaluate_every: int = _output(1, "evaluate all clients every so many rounds (and at the end)", at_least=1)
    test_on: str = _output(
        "local", "a client's own test part, the common test set, or both", choices=("local", "global", "both")
    )
    batch_norm: str = option(
        "aggregate",
        "BatchNorm statistics travel, stay, or stay and are taken anew from a client's images after every average",
        trait="communicates",
        choices=("aggregate", "local", "re-estimate"),
    )
    aggregation: str = option(
        "mean",
        "how what clients send is averaged: by examples, or by a Byzantine-robust rule, by which all count the same",
        choices=AGGREGATIONS,
        trait="aggregations",
    )
    byzantine: float = option(
        0.2,
        "share of Byzantine clients that trimmed-mean, krum and multi-krum are to stand",
        above=0,
        below=0.5,
        needs={"aggregation": ("trimmed-mean", "krum", "multi-krum")},
    )
    clip_norm: float = option(
        0.0,
        "cut a client's update to so many times the median norm of the round's; 0: none (norm-clipped: 1)",
        at_least=0,
        trait="bounded",
    )
    wire_dtype: str = option(
        "float32", "dtype of weights on the wire", choices=("float32", "float16"), trait="communicates"
    )
    timeout: float = _server(3600.0, "seconds to wait for a round's replies", above=0)
    min_clients: int = _server(
        1, "clients that must be there to start, and must reply for a round to count", at_least=1
    )
    wait_for_clients: float = _server(0.0, "seconds to wait for clients to come before the first round", at_least=0)
    disclose_architecture: bool = _node(
        True, "clients tell the name of their architecture; of a user's own network its class and number of parameters"
    )
    head: str = option("", "module whose input is the representation; empty: the last nn.Linear", at_node=True)
    device: str = _node(
        "auto", "where clients train: auto (a GPU if there is one), cpu, cuda, cuda:1, mps", resumable=True
    )
    threads_per_client: int = _node(
        1,
        "CPU threads of a client, at most its node's cores; more than one costs repeatability",
        at_least=1,
        at_most=1024,
    )
    workers: int = _place(
        0,
        "processes of the local engine in which clients train; 0: as many as cores, as a GPU has room for, 1 on MPS",
        at_least=0,
        needs={"engine": ("local",)},
    )
    state_dir: str = _place(
        "",
        "folder for the clients' own state; empty: in the run directory, or ~/.fedhet/state",
        at_node=True,
        path=True,
    )
    log: str = _output("", "where rounds are logged to as well: tensorboard, wandb, mlflow, several with commas")
    report: bool = _place(True, "a run ends with its report.html; else `fedhet report FOLDER` draws it")
    engine: str = _place("local", "where the clients are: local, ray, or a SuperLink connection of Flower's config")
    resume: bool = option(
        False, "go on with the run in `out` after its last complete round", about="place", needs={"out": ()}
    )
    seed: int = option(0, "seed of everything", at_least=0)
    out: str = option("", "run directory; empty: a new folder under runs/", about="place", path=True)

    parameters: Any = None  # the method's own keys, an instance of its `Parameters`
    method_name: str = ""  # its own name, where `method` is package.module:name
    family: str = ""  # the method under whose name its keys stand: itself, or the one that it is a variant of
    preset: str = dataclasses.field(default="", compare=False)  # whose values count where the user set none
    chosen: frozenset[str] = frozenset()  # keys that the user set, as against presets and defaults
    remarks: tuple[tuple[str, str], ...] = ()  # keys with another value than was set, and why

    def specs(self) -> dict[str, dataclasses.Field[Any]]:
        """Return the field of every key, the method's fields under its name."""
        of_method = {f"{self.family}.{key}": f for key, f in fields_of(self.parameters.__class__).items()}
        return {**fields_of(Config), **of_method}

    def flat(self) -> dict[str, Value]:
        """Every key and value, the method's own under its name: what `fedhet.config.resolve` takes."""
        return {key: getattr(self.parameters if "." in key else self, f.name) for key, f in self.specs().items()}

    @cached_property
    def text(self) -> str:
        """`flat` as one line of JSON, the method by its own name: how the server tells its clients."""
        return json.dumps(self.flat() | {"method": self.method_name})

    def on_own_test_parts(self) -> "Config":
        """Return the configuration for data without a common test set, if the user did not set `test-on`."""
        why = "clients are scored on their own test examples (test-on = local), since the data have no common test set"
        return self.but(test_on="local", remarks=(*self.remarks, ("test-on", why)))

    def but(self, **changes: Any) -> "Config":
        """The same configuration with some fields changed."""
        return dataclasses.replace(self, **changes)


@cache
def fields_of(options: Any) -> Mapping[str, dataclasses.Field[Any]]:
    """The options of a dataclass by key: of `Config` those that all methods share, of `Parameters` a method's own."""
    return MappingProxyType({kebab(f.name): f for f in fields(options) if f.metadata})


def listed(value: str) -> list[str]:
    """The parts of a value that is a list separated by commas; spaces do not count."""
    return [part for part in value.replace(" ", "").split(",") if part]


@cache
def keys_about(*about: About) -> tuple[str, ...]:
    """The keys that all methods share and that are about one of these."""
    return tuple(key for key, field in fields_of(Config).items() if field.metadata["about"] in about)


@cache
def keys_that(may: Literal["at_node", "resumable", "path"]) -> tuple[str, ...]:
    """The keys that a node may set (`at_node`), that a resumed run may change, or that become paths; see `option`."""
    return tuple(key for key, field in fields_of(Config).items() if field.metadata[may])
