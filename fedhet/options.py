"""Options: the keys of a configuration as dataclass fields, and a whole configuration as a value.

A key has a default, a meaning and the values that it takes; a method's own keys are the fields of its `Parameters`.
"""

import dataclasses
import json
import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

from fedhet.errors import ConfigError
from fedhet.toml import Value as Value

AGGREGATIONS = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "norm-clipped")
"""How what clients send may be averaged."""


def option(
    default: Value,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field that is a configuration key: its default, what it means and which values it takes."""
    limits = {"choices": choices, "at_least": at_least, "above": above, "at_most": at_most, "below": below}
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class Parameters:
    """A method's own keys: subclasses add fields made with `option`, each with the paper's value."""

    @property
    def makes_pool(self) -> bool:
        """Whether the method takes its shared pool from elsewhere than `public-samples`."""
        return False

    def check(self, config: "Config") -> None:
        """Check the method's keys against those that all methods share.

        Raises:
            ConfigError: what does not go together.
        """

    def idle(self, config: "Config") -> dict[str, str]:
        """Keys that have no effect whatever their values, each with the key that is the reason (`method`, if none)."""
        return {}

    def set_in_vain(self, method: str, reasons: Mapping[str, Iterable[str]]) -> dict[str, str]:
        """For `idle`: the fields that each of the method's keys leaves without effect, as keys."""
        return {
            f"{method}.{kebab(name)}": f"{method}.{kebab(reason)}"
            for reason, names in reasons.items()
            for name in names
        }


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete, valid configuration. Fields are the keys with `_` for `-`; see `fedhet keys` for a table."""

    method: str = option("fedhenn", "federated method; `fedhet list` names them, package.module:name is one of yours")
    dataset: str = option("digits", "data set; `fedhet list` names them")
    data: str = option("", "folder with the data set's files; empty: the data set's own place, or a download")
    partition: str = option("iid", "how examples are dealt to clients: iid, classes, dirichlet, natural")
    classes_per_client: int = option(2, "partition=classes: classes that each client holds", at_least=1)
    alpha: float = option(0.5, "partition=dirichlet: concentration", above=0)
    samples_per_client: int = option(0, "training examples that a client keeps; 0: all of its part", at_least=0)
    clients: int = option(10, "clients to simulate", at_least=1, at_most=100_000)
    architectures: str = option("cnn", "a model, a comma-separated list of models, or a family of models")
    assign: str = option(
        "round-robin",
        "how architectures are dealt to clients: round-robin, blocks (each to as many neighbours), random, "
        "one-of-each, or a list with one a client",
    )
    rounds: int = option(20, "rounds of training", at_least=0)
    fraction_train: float = option(1.0, "part of the clients that trains in a round", above=0, at_most=1)
    local_epochs: int = option(1, "epochs that a client trains in a round", at_least=0)
    batch_size: int = option(32, "examples in a mini-batch", at_least=1)
    optimizer: str = option("sgd", "optimiser of the clients", choices=("sgd", "adam", "adamw"))
    learning_rate: float = option(0.01, "learning rate", above=0)
    lr_schedule: str = option(
        "constant",
        "learning rate over the run: by round, or by step as one-cycle is (lr/25 to lr at .3, down to lr/100)",
        choices=("constant", "cosine", "linear", "one-cycle"),
    )
    momentum: float = option(0.0, "momentum of SGD", at_least=0, below=1)
    weight_decay: float = option(0.0, "weight decay on weights (biases and normalisation have none)", at_least=0)
    augment: bool = option(False, "augment training batches as the data set defines it")
    input_size: int = option(0, "resize images to this many pixels a side; 0: as they are", at_least=0, at_most=2048)
    public_samples: int = option(
        0, "examples held out of every client's training data for the methods' shared pool", at_least=0
    )
    public_dataset: str = option(
        "",
        "another data set whose training images are the shared pool, resized, coloured and scaled like the clients' "
        "own; they have labels where it has as many classes; empty: the clients' data set",
    )
    public_data: str = option("", "folder with the files of public-dataset, as data is for dataset")
    validation: float = option(
        0.0,
        "share of each client's training examples that it is evaluated on and never trained on, each class in its "
        "share; at least one example of two",
        at_least=0,
        below=1,
    )
    early_stopping: int = option(
        0,
        "end training after so many evaluations without a better validation accuracy; 0: never. What is reported is "
        "the state in which it ended",
        at_least=0,
    )
    shared_init: bool = option(True, "what is exchanged starts from one initialisation (of the first client)")
    closing_epochs: int = option(0, "epochs of a closing round in which all clients train; 0: none", at_least=0)
    unseen_clients: int = option(
        0,
        "how many of the clients, the last ones, train in no round: they come after the last, receive what the method "
        "has for them, and go on alone; beside it, the same from their own initial weights",
        at_least=0,
    )
    unseen_epochs: int = option(10, "epochs that unseen clients train alone", at_least=0)
    unseen_learning_rate: float = option(0.0, "learning rate of it; 0: learning-rate, constant", at_least=0)
    unseen_scratch_rate: float = option(
        0.0, "learning rate of their training from scratch, for comparison; 0: unseen-learning-rate", at_least=0
    )
    evaluate_every: int = option(1, "evaluate all clients every so many rounds (and at the end)", at_least=1)
    test_on: str = option(
        "local", "a client's own test part, the common test set, or both", choices=("local", "global", "both")
    )
    batch_norm: str = option(
        "aggregate",
        "BatchNorm statistics travel, stay, or stay and are taken anew from a client's images after every average",
        choices=("aggregate", "local", "re-estimate"),
    )
    aggregation: str = option(
        "mean",
        "how what clients send is averaged: by examples, or by a rule that Byzantine clients cannot carry away, by "
        "which all clients count the same",
        choices=AGGREGATIONS,
    )
    byzantine: float = option(
        0.2, "share of Byzantine clients that trimmed-mean, krum and multi-krum are to stand", above=0, below=0.5
    )
    clip_norm: float = option(
        0.0,
        "cut a client's update to so many times the median norm of the round's; 0: none (norm-clipped: 1)",
        at_least=0,
    )
    wire_dtype: str = option("float32", "dtype of weights on the wire", choices=("float32", "float16"))
    timeout: float = option(3600.0, "seconds to wait for a round's replies", above=0)
    min_clients: int = option(1, "clients that must be there to start, and must reply for a round to count", at_least=1)
    wait_for_clients: float = option(0.0, "seconds to wait for clients to come before the first round", at_least=0)
    disclose_architecture: bool = option(
        True,
        "clients tell the name of their architecture, and its graph or blocks where a method draws them",
    )
    head: str = option("", "module whose input is the representation; empty: the last nn.Linear")
    device: str = option("auto", "where clients train: auto (a GPU if there is one), cpu, cuda, cuda:1, mps")
    precision: str = option(
        "float32",
        "of networks' passes in training: float32, or bf16 (mixed: weights, losses and what is sent stay float32)",
        choices=("float32", "bf16"),
    )
    num_gpus: float = option(0.0, "share of a GPU for each client in a simulation on Ray", at_least=0)
    threads_per_client: int = option(
        1, "CPU threads of a client; more than one costs repeatability", at_least=1, at_most=1024
    )
    workers: int = option(
        0,
        "processes of the local engine in which clients train; 0: as many as cores, as a GPU has room for, 1 on MPS",
        at_least=0,
    )
    client_batching: str = option(
        "off",
        "clients of the local engine that train side by side, those with equal networks as one batch of networks: off, "
        "a number, auto (16, where it is measured to be faster), or gpu (auto on a GPU, off on a CPU). Results agree "
        "with `off` up to rounding",
    )
    state_dir: str = option("", "folder for the clients' own state; empty: in the run directory, or ~/.fedhet/state")
    log: str = option("", "where rounds are logged to as well: tensorboard, wandb, mlflow, several with commas")
    report: bool = option(True, "a run ends with its report.html; else `fedhet report FOLDER` draws it")
    engine: str = option("local", "where the clients are: local, ray, or a SuperLink connection of Flower's config")
    resume: bool = option(False, "go on with the run in `out` after its last complete round")
    seed: int = option(0, "seed of everything", at_least=0)
    out: str = option("", "run directory; empty: a new folder under runs/")

    parameters: Any = None  # the method's own keys, an instance of its `Parameters`
    prefix: str = ""  # the method's own name
    family: str = ""  # the method under whose name its keys stand: itself, or the one that it is a variant of
    chosen: frozenset[str] = frozenset()  # keys that the user set, as against presets and defaults
    idle: tuple[tuple[str, str], ...] = ()  # keys put back to their defaults since they have no effect, and why

    def __hash__(self) -> int:
        """Computed once: configurations are keys of caches that every message looks into."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def flat(self) -> dict[str, Value]:
        """Every key and value, the method's own under its name: what `fedhet.config.resolve` takes."""
        own = {f"{self.family}.{kebab(f.name)}": getattr(self.parameters, f.name) for f in fields(self.parameters)}
        return {kebab(f.name): getattr(self, f.name) for f in common_fields()} | own

    def text(self) -> str:
        """`flat` as one line of JSON, the method by its own name: how the server tells its clients."""
        return self._text

    @cached_property
    def _text(self) -> str:
        return json.dumps(self.flat() | {"method": self.prefix})

    def but(self, **changes: Any) -> "Config":
        """The same configuration with some fields changed."""
        return dataclasses.replace(self, **changes)


@cache
def common_fields() -> tuple[dataclasses.Field[Any], ...]:
    """The keys that all methods share."""
    return tuple(f for f in fields(Config) if f.metadata)


def default_of(field: dataclasses.Field[Value]) -> Value:
    """The default of a key."""
    assert field.default is not dataclasses.MISSING, f"option {field.name} needs a default"
    return field.default


def takes(field: dataclasses.Field[Any]) -> str:
    """The values that a key takes, in words: its choices, or its kind and limits."""
    limits = field.metadata
    if limits["choices"]:
        return " | ".join(limits["choices"])
    kind = {bool: "true | false", int: "whole number", float: "number", str: "text"}[type(default_of(field))]
    bounds = [("at_least", ">="), ("above", ">"), ("at_most", "<="), ("below", "<")]
    return ", ".join([kind, *(f"{sign} {limits[name]:g}" for name, sign in bounds if limits[name] is not None)])


def listed(value: str) -> list[str]:
    """The parts of a value that is a list separated by commas; spaces do not count."""
    return [part for part in value.replace(" ", "").split(",") if part]


def kebab(name: str) -> str:
    """A field's name as a key."""
    return name.replace("_", "-")


def fits(number: int) -> bool:
    """Whether a whole number is one of TOML's, of 64 bits."""
    return -(2**63) <= number < 2**63


def checked(key: str, value: Any, spec: dataclasses.Field[Any]) -> Value:
    """A key's value in the type of its default, if it is one that the key takes.

    Raises:
        ConfigError: it is not; with the key, and what would be right.
    """
    wanted = type(default_of(spec))
    if type(value) is int and not fits(value):
        raise ConfigError(f"{key}: is a whole number of {value.bit_length()} bits, must be of 64 at most")
    if wanted is float and type(value) is int:
        value = float(value)
    if wanted is str and type(value) in (int, float):
        value = str(value)
    if type(value) is not wanted:
        kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        raise ConfigError(f"{key} = {value!r}: must be {kinds[wanted]}")
    if isinstance(value, str) and any(unicodedata.category(each) in ("Cc", "Cs") for each in value):
        raise ConfigError(f"{key} = {value!r}: must be text without control characters")
    limits = spec.metadata
    if limits["choices"] and value not in limits["choices"]:
        raise ConfigError(f"{key} = {value!r}: must be one of {', '.join(limits['choices'])}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} = {value!r}: must be finite")
    for limit, holds, words in (
        ("at_least", lambda bound: value >= bound, "at least"),
        ("above", lambda bound: value > bound, "above"),
        ("at_most", lambda bound: value <= bound, "at most"),
        ("below", lambda bound: value < bound, "below"),
    ):
        if limits[limit] is not None and not holds(limits[limit]):
            raise ConfigError(f"{key} = {value!r}: must be {words} {limits[limit]:g}")
    return value
