"""Configuration keys: fields of `Config` are keys that all methods have, fields of `Options` those of one method."""

import dataclasses
import json
import math
import operator
import unicodedata
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from fedhet.errors import ConfigError, shown

Value = bool | int | float | str
About = Literal["data", "training", "optimiser", "server", "node", "place", "output"]

KeyRow = tuple[str, Value, str, str]
"""A configuration key, its default, its accepted values and its description."""

OwnPart = Literal["data", "split", "model", "loader", "augmentation"]
"""What a user passes in Python and that replaces keys: data, their split (by a data function), a model, a DataLoader or
an augmentation."""

_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool], str]] = {
    "at_least": (">=", operator.ge, "at least"),
    "above": (">", operator.gt, "above"),
    "at_most": ("<=", operator.le, "at most"),
    "below": ("<", operator.lt, "below"),
}


def option(
    default: Value,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    or_zero: bool = False,
    about: About = "training",
    at_node: bool = False,
    resumable: bool = False,
    path: bool = False,
    needs: Mapping[str, tuple[Value, ...] | Mapping[str, float]] | None = None,
    trait: str = "",
    replaced_by: tuple[OwnPart, ...] = (),
    at_need: Value | None = None,
) -> Any:
    """Return a dataclass field that is a configuration key; its type is a `Literal` if only few values are accepted.

    Args:
        default: the default value.
        help: a description in one line.
        at_least: smallest accepted number.
        above: exclusive lower limit.
        at_most: largest accepted number.
        below: exclusive upper limit.
        or_zero: whether 0 is accepted as well, whatever the limits.
        about: the subject: the clients' data (`data`), training (`training`, `optimiser`), how long the server waits
            for clients (`server`), computation on a client's machine (`node`), the place of a run (`place`), or its
            measurements and files (`output`). A comparison sets keys about data, place and output for all variants.
        at_node: whether a node may set the key for itself, in its node config.
        resumable: whether the value may change when a run is resumed.
        path: whether the value is a path, which must be set on the machine where it is used.
        needs: other keys, each with the values at which this key has an effect: a tuple of values, or limits such as
            `{"below": 1}`. An empty tuple stands for all values except 0 and "".
        trait: name of an attribute of `Traits`: the key has an effect if it is true or, as a tuple, contains the value.
        replaced_by: the key has no effect if the user passes all of these (see `OwnPart`).
        at_need: value that `fedhet recommend` tries if the method cannot be used with the default.
    """
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below, "or_zero": or_zero}
    kind = {"about": about, "at_node": at_node, "resumable": resumable, "path": path, "at_need": at_need}
    effect = {"needs": needs or {}, "trait": trait, "replaced_by": replaced_by}
    return field(default=default, metadata={"help": help, **limits, **kind, **effect})


def default_of(key: Field[Value]) -> Value:
    """Return the default of a key, given as its dataclass field."""
    assert key.default is not MISSING, f"option {key.name} needs a default"
    return key.default


def takes(key: Field[Any]) -> str:
    """Return a description of the values that a key accepts: all choices, or type and limits such as `number, > 0`."""
    if choices := get_args(key.type):
        return " | ".join(choices)
    kind = {bool: "true | false", int: "whole number", float: "number", str: "text"}[type(default_of(key))]
    limits = ((sign, key.metadata[name]) for name, (sign, _, _) in _LIMITS.items())
    accepted = [kind, *(f"{sign} {bound:g}" for sign, bound in limits if bound is not None)]
    return ", ".join([*accepted, "or 0"] if key.metadata["or_zero"] else accepted)


def unmet(key: str, value: Value, wanted: tuple[Value, ...] | Mapping[str, float]) -> str:
    """Return "" if `wanted` allows the `value` of `key`, or else a remedy such as `set alpha below 1`.

    `wanted` has the allowed values (if empty, all but 0 and ""), or limits such as `{"at_least": 0, "below": 1}`.
    """
    if isinstance(wanted, Mapping):
        met = all(_LIMITS[limit][1](value, bound) for limit, bound in wanted.items())
        words = " and".join(f" {_LIMITS[limit][2]} {bound:g}" for limit, bound in wanted.items())
    else:
        met = value in wanted if wanted else bool(value)
        words = f" = {' or '.join(map(str, wanted))}" if wanted else ""
    return "" if met else f"set {key}{words}"


def kebab(name: str) -> str:
    """Convert a field's name to a key: `local_epochs` to `local-epochs`."""
    return name.replace("_", "-")


def fits(number: int) -> bool:
    """Return whether a whole number has at most 64 bits, as TOML requires."""
    return -(2**63) <= number < 2**63


def checked(key: str, value: Any, spec: Field[Any]) -> Value:
    """Return `value` in the type of the key's dataclass field `spec`; raise a ConfigError if it is not accepted."""
    wanted = type(default_of(spec))
    if type(value) is int and not fits(value):
        raise ConfigError(f"{key}: must be a whole number of at most 64 bits, but has {value.bit_length()} bits")
    if (wanted is float and type(value) is int) or (wanted is str and type(value) in (int, float)):
        value = wanted(value)
    if type(value) is bool and get_args(spec.type):
        value = str(value).lower()
    if must_be := _must_be(value, spec):
        raise ConfigError(f"{key} = {shown(value)}: must be {must_be}")
    return value


def _must_be(value: Any, spec: Field[Any]) -> str:
    wanted = type(default_of(spec))
    if type(value) is not wanted:
        text = f"text, such as {','.join(map(str, value))!r}" if isinstance(value, list | tuple) else "text"
        return {bool: "true or false", int: "a whole number", float: "a number", str: text}[wanted]
    if isinstance(value, str) and any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        return "text without control characters"
    if (choices := get_args(spec.type)) and value not in choices:
        return f"one of {', '.join(choices)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    or_zero = spec.metadata["or_zero"]
    for limit, (_, holds, words) in _LIMITS.items():
        bound = spec.metadata[limit]
        if bound is not None and not holds(value, bound) and not (or_zero and value == 0):
            return f"{words} {bound:g}{', or 0' if or_zero else ''}"
    return ""


# ---- the keys


Aggregation = Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "norm-clipped"]
"""Values of the key `aggregation`, the server's rule for combining clients' arrays: weighted mean; median or trimmed
mean of each entry; (multi-)Krum (Blanchard et al., NeurIPS 2017); or weighted mean after clipping updates' norms."""
LEAST_SHARE = 0.001  # the smallest fraction of a GPU that Ray can assign to a client

Origin = Literal["preset", "run", "file", "command", "code", "node"]
"""Where a value that is no default was set: a preset, a run's settings, a file, a command, Python, or a node config."""

OWN = "own"
"""Value of `dataset` for the user's own data; name of the preset for the user's own data and models."""

_split = partial(option, about="data", at_node=True)
_files = partial(_split, replaced_by=("data", "model"))  # without models, these are made for the data set's examples
_dealt = partial(_split, replaced_by=("split",))
_optimiser = partial(option, about="optimiser")
_output = partial(option, about="output")
_server = partial(option, about="server", resumable=True)
_node = partial(option, about="node", at_node=True)
_inside = partial(option, "", at_node=True)
_place = partial(option, about="place", resumable=True)
_local = partial(_place, needs={"engine": ("local",)})


@dataclass(frozen=True)
class Options:
    """Base class of the keys that only one method has: fields made with `option`, by default with the paper's values.

    Of the keys that all methods have, those in `without` have no effect with this method. Those in `uses` have one
    even if the user passes models or data in their place, or if they need a property that the method does not have.
    With `changes_heads`, heads are replaced, so that shared arrays are known only after the handshake. With
    `public_at_server`, the server needs the public dataset's inputs as well; `least_public` is the smallest number of
    public examples. With `planned`, what happens in a round depends on the total number of rounds. `public_union` is
    the setting, such as "rad-source = train-union", by which the public dataset has the training inputs of all clients.
    `first_epochs` is the number of epochs in a client's first round, if not `local-epochs`.
    """

    uses: ClassVar[Collection[str]] = ()
    without: ClassVar[Collection[str]] = ()
    changes_heads: ClassVar[bool] = False
    public_at_server: ClassVar[bool] = False
    least_public: ClassVar[int] = 1
    public_union: ClassVar[str] = ""
    planned: ClassVar[bool] = False
    first_epochs: ClassVar[int] = 0

    def suited(self) -> dict[str, tuple[Value, str]]:
        """Return defaults for a user's own models as {key: (value, reason)}; users see the reason, a phrase."""
        return {}

    def check(self, config: "Config") -> None:
        """Check the values of these fields together with all others in `config`; raise a ConfigError on a conflict."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete, valid configuration. Fields are named as keys, with `_` in place of `-`; `fedhet keys` lists them.

    `options` has the method's own keys, and `family` is their prefix. `method_name` is a name even if `method` is a
    file. `preset` is the preset that was used, or empty. `origins` has the origin of each key that is not a default.
    `remarks` has a pair for each key whose value was changed automatically: the key and the reason.
    """

    method: str = option("fedhenn", "federated method: a name (`fedhet list`), package.module:name or FILE.py:NAME")
    dataset: str = _files("digits", "data set: a name (`fedhet list`), or own for the data function's")
    data: str = _files("", "folder with the data set's files; empty: included or downloaded", resumable=True, path=True)
    partition: str = _dealt("iid", "how examples are distributed among clients: iid, classes, dirichlet or natural")
    classes_per_client: int = _dealt(2, "number of classes per client", at_least=1, needs={"partition": ("classes",)})
    alpha: float = _dealt(
        0.5,
        "concentration of the Dirichlet distribution; smaller values make clients differ more",
        above=0,
        needs={"partition": ("dirichlet",)},
    )
    samples_per_client: int = _dealt(0, "maximum number of training examples per client; 0: no limit", at_least=0)
    halved_clients: float = _dealt(0.0, "fraction of clients with half of their examples", at_least=0, at_most=1)
    clients: int = option(10, "number of simulated clients", about="data", at_least=1, at_most=100_000)
    architectures: str = option(
        "cnn", "a model, models separated by commas, or a family of models (`fedhet list`)", replaced_by=("model",)
    )
    assign: Literal["round-robin", "blocks", "random"] = option(
        "round-robin",
        "how architectures are assigned to clients: in turn, in blocks of neighbours, or at random",
        replaced_by=("model",),
    )
    rounds: int = option(20, "number of training rounds", at_least=0, resumable=True)
    fraction_train: float = option(1.0, "fraction of clients that train in a round", above=0, at_most=1)
    local_epochs: int = option(1, "number of epochs that a client trains per round", at_least=0, at_node=True)
    max_local_epochs: int = option(0, "largest local-epochs that a node may set; 0: local-epochs", at_least=0)
    batch_size: int = option(32, "number of examples per mini-batch", at_least=1, at_node=True, replaced_by=("loader",))
    optimizer: Literal["sgd", "adam", "amsgrad", "adamw"] = _optimiser("sgd", "optimizer of the clients")
    learning_rate: float = _optimiser(0.01, "learning rate", above=0, at_node=True)
    lr_schedule: Literal["constant", "cosine", "linear", "one-cycle"] = _optimiser(
        "constant", "learning rate over the run; one-cycle changes it after every step, the others after every round"
    )
    momentum: float = _optimiser(0.0, "momentum of SGD", at_least=0, below=1, needs={"optimizer": ("sgd",)})
    weight_decay: float = _optimiser(0.0, "weight decay, except for biases and normalisation layers", at_least=0)
    clip_gradients: float = _optimiser(0.0, "maximum norm of the gradient of a step; 0: no limit", at_least=0)
    augment: bool = option(False, "augment training batches as the data set defines", replaced_by=("data",))
    input_size: int = _files(0, "width and height of resized images; 0: unchanged", at_least=0, at_most=2048)
    public_samples: int = _dealt(0, "number of training examples held out as the public dataset", at_least=0)
    test_split: Literal["given", "drawn"] = _split("given", "test examples: the data's own, or drawn at random")
    test_share: float = _split(
        0.0,
        "fraction of all examples drawn for testing; 0: as many as the data set has",
        at_least=0,
        below=1,
        needs={"test-split": ("drawn",)},
    )
    validation: float = _split(0.0, "fraction of each client's training examples for validation", at_least=0, below=1)
    validation_on: Literal["own", "common"] = _dealt(
        "own", "validation examples: each client's own, or common ones of the data set", needs={"validation": ()}
    )
    keep_best: bool = _output(
        False, "save the models of the round with the best validation metric in models/best", needs={"validation": ()}
    )
    patience: int = option(
        0,
        "number of evaluations without a better validation metric after which training ends; 0: no limit",
        at_least=0,
        needs={"validation": ()},
    )
    shared_init: bool = option(True, "what clients share is initialized equally at all clients", trait="common_init")
    start_from: str = option(
        "", "run whose models clients start from: their own (models/CLIENT), or models/global", at_node=True, path=True
    )
    closing_epochs: int = option(0, "number of epochs of a final round with all clients; 0: no such round", at_least=0)
    unseen_clients: int = option(0, "number of clients held out, which join after the last round", at_least=0)
    unseen_epochs: int = option(10, "number of epochs of unseen clients", at_least=0, needs={"unseen-clients": ()})
    unseen_learning_rate: float = option(
        0.0, "constant learning rate of unseen clients; 0: learning-rate", at_least=0, needs={"unseen-clients": ()}
    )
    evaluate_every: int = _output(1, "number of rounds between evaluations; always after the last", at_least=1)
    test_on: Literal["local", "global", "both"] = _output("local", "test examples: clients' own, common ones, or both")
    metric: str = _output("", "metric by which models are compared and chosen, such as auc; empty: the task's default")
    metrics: str = _output("", "further metrics to record, separated by commas")
    batch_norm: Literal["aggregate", "local", "re-estimate"] = option(
        "aggregate",
        "BatchNorm statistics: averaged, kept by each client, or re-estimated by it after each average",
        trait="exchanges_weights",
    )
    aggregation: Aggregation = option(  # noqa: RUF009 - a field
        "mean",
        "aggregation rule: the mean weighted by examples, or a Byzantine-robust rule without weights",
        trait="aggregations",
    )
    byzantine: float = option(
        0.2,
        "fraction of Byzantine clients to tolerate",
        above=0,
        below=0.5,
        needs={"aggregation": ("trimmed-mean", "krum", "multi-krum")},
    )
    clip_norm: float = option(
        0.0,
        "maximum norm of a client's update as a multiple of the round's median; 0: only absurd updates are cut",
        at_least=0,
        trait="bounded",
    )
    timeout: float = _server(3600.0, "seconds to wait for the replies of a round", above=0)
    min_clients: int = _server(1, "minimum number of clients to start a run and to complete a round", at_least=1)
    max_examples: int = _server(0, "maximum number of examples that a client may claim; 0: no limit", at_least=0)
    wait_for_clients: float = _server(0.0, "seconds to wait for clients before the first round", at_least=0)
    disclose_architecture: bool = _node(True, "tell the server the architecture, or a custom network's class and size")
    head: str = _inside("module whose input is the representation; empty: the last nn.Linear", trait="inside")
    representation: str = _inside(
        "representation of texts: last (token), mean, or a module's output; empty: the head's input", trait="uses_phi"
    )
    device: str = _node("auto", "device of the clients: auto (a GPU if available), cpu, cuda:1 or mps", resumable=True)
    precision: Literal["float32", "bf16"] = option(
        "float32",
        "precision of forward passes in training: float32, or bf16 (mixed precision: weights and losses stay float32)",
    )
    threads_per_client: int = _node(
        1, "number of CPU threads per client; results can be reproduced exactly only with 1", at_least=1, at_most=1024
    )
    workers: int = _local(
        0, "number of worker processes of the local engine; 0: as many as the machine allows", at_least=0
    )
    client_resources: str = _place(
        "0,0",
        "CPUs and share of a GPU per client on Ray; 0: what cores, GPUs and memory allow",
        needs={"engine": ("ray",)},
    )
    client_batching: str = _local("auto", "clients with equal networks in a batch: auto, off, or the maximum number")
    compile: Literal["true", "false", "auto"] = _local(
        "false", "compile batches of clients; auto: in runs of at least 2000 epochs, rounds times local-epochs"
    )
    state_dir: str = _place(
        "", "folder for the clients' state; empty: in the run directory, or ~/.fedhet/state", at_node=True, path=True
    )
    log: str = _output("", "further loggers, separated by commas: tensorboard, wandb, mlflow")
    report: bool = _place(True, "write report.html at the end of the run")
    save_every: int = _output(0, "number of rounds between saved models/round-N; 0: only the last", at_least=0)
    engine: str = _place("local", "where clients run: local, ray, or a SuperLink connection of Flower's configuration")
    resume: bool = option(False, "resume the run in `out` after its last round", about="place", needs={"out": ()})
    seed: int = option(0, "random seed", at_least=0)
    out: str = option("", "run directory; empty: a new folder in runs/", about="place", path=True)

    options: Any = None
    method_name: str = ""
    family: str = ""
    preset: str = field(default="", compare=False)
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)
    remarks: tuple[tuple[str, str], ...] = ()

    def specs(self) -> dict[str, Field[Any]]:
        """Return the dataclass field of each configuration key, by key such as `rounds` or `fedhenn.eta0`."""
        of_method = {f"{self.family}.{key}": f for key, f in fields_of(self.options.__class__).items()}
        return {**fields_of(Config), **of_method}

    def flat(self) -> dict[str, Value]:
        """Return the values of all keys by key, as `fedhet.config.configuration.resolve` accepts them."""
        return {key: getattr(self.options if "." in key else self, f.name) for key, f in self.specs().items()}

    @cached_property
    def chosen(self) -> frozenset[str]:
        """The keys that the user set, or that are from the settings of an earlier run; without a preset's."""
        return frozenset(key for key, origin in self.origins.items() if origin != "preset")

    @cached_property
    def text(self) -> str:
        """All keys with their values as JSON for messages to clients; `method` is the method's name, never a file."""
        return json.dumps(self.flat() | {"method": self.method_name})

    @property
    def compiles(self) -> bool:
        """Whether batches of clients are compiled; `auto` compiles them in long runs, in which it saves time."""
        return self.compile == "true" or (self.compile == "auto" and self.rounds * self.local_epochs >= 2000)

    @property
    def resources(self) -> tuple[int, float]:
        """Numbers of CPUs and GPUs per client on Ray, where 0 is automatic; raises a ConfigError if one is invalid."""
        try:
            cpus, gpus = listed(self.client_resources)
            resources = int(cpus), float(gpus)
        except ValueError:
            resources = -1, 0.0
        if not (0 <= resources[0] <= 1024 and (resources[1] == 0 or LEAST_SHARE <= resources[1] <= 1)):
            raise ConfigError(
                f"client-resources = {self.client_resources!r}: write a client's number of CPUs and its share of a GPU "
                f"({LEAST_SHARE} to 1), such as 2,0.25, or 0 for one or both, to choose them by cores, GPUs and memory"
            )
        return resources

    def further_metrics(self, metric: str) -> list[str]:
        """Return each metric of the key `metrics` once, without `metric`, which counts and which the key may name."""
        return [name for name in dict.fromkeys(listed(self.metrics)) if name != metric]

    def on_own_test_parts(self) -> "Config":
        """Return a copy with `test-on = local`, for data without a common test set, and a remark that says so."""
        reason = "clients are scored on their own test examples (test-on = local): the data have no common test set"
        return self.replace(test_on="local", remarks=(*self.remarks, ("test-on", reason)))

    def replace(self, **changes: Any) -> "Config":
        """Return a copy with the fields in `changes` replaced."""
        return dataclasses.replace(self, **changes)


@cache
def fields_of(options: Any) -> Mapping[str, Field[Any]]:
    """Return the dataclass fields of a class, `Config` or a subclass of `Options`, by key such as `local-epochs`."""
    for key in fields(options):
        if isinstance(key.type, str):  # in a module with `from __future__ import annotations`
            key.type = get_type_hints(options)[key.name]
    return MappingProxyType({kebab(f.name): f for f in fields(options) if f.metadata})


def rows_about(options: Any, prefix: str = "") -> list[KeyRow]:
    """Return a row about each key in a class, `Config` or a subclass of `Options`, with `prefix` before its name."""
    keys = fields_of(options).items()
    return [(prefix + key, default_of(field), takes(field), field.metadata["help"]) for key, field in keys]


def listed(value: str) -> list[str]:
    """Split a comma-separated text into a list without spaces and empty items."""
    return [part for part in value.replace(" ", "").split(",") if part]


@cache
def keys_about(*about: About) -> tuple[str, ...]:
    """Return the keys, among those that all methods have, that are about one of the given subjects, such as `data`."""
    return tuple(key for key, field in fields_of(Config).items() if field.metadata["about"] in about)


@cache
def keys_that(may: Literal["at_node", "resumable", "path"]) -> tuple[str, ...]:
    """Return the keys that a node may set (`at_node`), a resumed run may change (`resumable`), or that are paths."""
    return tuple(key for key, field in fields_of(Config).items() if field.metadata[may])


OF_NETWORKS = (
    *(*keys_about("optimiser"), "head", "representation"),
    *("batch-size", "augment", "precision", "local-epochs", "max-local-epochs", "closing-epochs"),
)
"""Keys that have no effect where an estimator or a classifier is fitted in place of a network."""
