"""The protocol between server and clients: the contents of requests and replies, as dataclasses.

A request is the method's payload, the run's settings and a `Request`. A reply is the method's payload, the client's
measurements and its `Report`, or a refusal with a reason. `fedhet.flower.messages` writes and reads the messages.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from fedhet.config.toml import from_json
from fedhet.data import PublicDataset
from fedhet.data.examples import digest
from fedhet.data.names import Names
from fedhet.data.scales import Scales
from fedhet.errors import FedhetError
from fedhet.messages.payload import (
    DTYPES,
    LONGEST,
    Arrays,
    Fields,
    Name,
    Payload,
    Spec,
    Text,
    WireError,
    bytes_of,
    named_fields,
    shortened,
    to_arrays,
    to_tensor,
    written,
)
from fedhet.tasks import LARGEST, OUTPUTS
from fedhet.utils.inputs import from_parts, parts_of
from fedhet.utils.machine import memory
from fedhet.utils.statistics import Metric, Work

HANDSHAKE, FIRST, JOIN, DESCRIBE = "handshake", "first", "join", "describe"
"""Subjects of queries (see `Request.question`): a client's report before the first round, initial weights that all
clients receive, the training of a client that joins after the last round, or a description of a client's data."""


def further(evaluation: str, metric: str) -> str:
    """Return the name of an evaluation's value of a metric of the key `metrics`, such as `trained/f1`."""
    return f"{evaluation}/{metric}"


COUNT = "num-examples"
"""Name of the metric with the number of examples behind a reply, by default the client's weight, as in Flower."""

STARTS = ("received", "scratch")
"""Initial weights of a client that joins after the last round: `received` from the server, or random (`scratch`).
The client's evaluation after 3 epochs of training from the server's weights is named `received-3`."""

WHOLE = "whole"
"""Name of the group of arrays with a whole network's initial weights, if clients train parts of one network."""

MOST_PARTITIONS = 100_000
"""Largest number of partitions of the data, and so of simulated clients."""
LONGEST_NOTE = 2000  # largest number of characters of a client's remarks in a reply
MOST_ARRAYS = 2**15  # largest number of arrays that a client may share with the server
MOST_NAMES, MOST_LISTS = 2**20, 64  # largest numbers of characters and lists in the names of classes and columns
MOST_WEIGHT = 1e18  # largest accepted weight of a client's metric, such as a number of predictions

FURTHER, EVALUATED, MOST_FURTHER = "own.", "evaluated.", 1024
"""Prefixes of metrics that a user's train and evaluate functions return, and the largest number of metrics of each."""


@dataclass(frozen=True)
class Request:
    """A request of the server to a client, which is sent in addition to the method's payload.

    Attributes:
        round: number of the round, from 1; 0 for the handshake.
        expected: the round of the client's last training, whose state the client should have; -1 for none.
        epochs: number of epochs to train.
        closing: whether this is the closing round, after the configured rounds of training.
        evaluate: whether the client evaluates its model before and after training.
        final: whether this is the evaluation after the last round, when personal models are saved.
        question: what a query asks: `handshake`, `first` (initial weights) or `join` (joining after the last round).
        run: the run's identifier, which separates runs in the client's state folder.
        public: digest of the public dataset, if the method needs one.
        flower: whether arrays are sent in Flower's format, as Flower's strategy wrappers need.
        here: proof that the server is on the client's machine (`fedhet.utils.machine.proof` of Flower's run id
            and the settings).
        begun: whether a handshake is for a run that has begun, in which clients must keep task, model and data.
        called: the unique name that the server gave to a client whose own name is taken by another; empty otherwise.
        improvable, best: whether the client has a best model, and its validation metric (`keep-best`).
        names: the order of classes and columns in the run (see `names_in`).
    """

    round: int = 0
    expected: int = -1
    epochs: int = 0
    closing: bool = False
    evaluate: bool = False
    final: bool = False
    question: str = ""
    run: Name = ""
    public: Name = ""
    flower: bool = False
    here: str = ""
    begun: bool = False
    called: Name = ""
    improvable: bool = False
    best: float = 0.0
    names: Text = field(default="", metadata={"longest": MOST_NAMES})

    @classmethod
    @lru_cache(maxsize=16)  # the same text for all clients of a round
    def from_json(cls, text: str) -> "Request":
        """Return the request in a JSON object; raise a WireError if a field is invalid."""
        return cls(**Fields(from_json(text, "the request"), "the request").plain(cls))


@dataclass
class Report:
    """A client's description of itself; after the handshake, only its name, `lost_state` and `note` are sent.

    Attributes:
        client: the client's name.
        lost_state: the round whose state was expected and is lost; -1 if no state is lost.
        task: name of the task, such as `classification`.
        metric: name of the metric, such as `accuracy`.
        labels: number of labels of an example, each with its own value of the metric; 1 for a single value.
        further: numbers of values of the metrics in the key `metrics`, separated by commas.
        architecture: the architecture's name; empty if it is not disclosed.
        partition_id, partitions: the client's partition, from 0, and their number; -1 and 0 if the node has none.
        own_data: whether the client's data come from a user's function, not from the configured data set.
        own_split: whether this function, and not the configuration, splits the data among clients.
        common_test: whether the client has the common test set.
        common: digest of the common test set that the user's function returned, if it is used; empty otherwise.
        normalised: whether its network has running statistics, as BatchNorm does.
        spec: names, shapes and dtypes of its network's shared arrays.
        public, public_size: digest and number of examples of the client's own public dataset; empty and 0 without one.
        device: description of the device on which it trains.
        note: a remark for the server's log, which may be shortened.
        outputs: number of values in a prediction.
        noise: noise multiplier of Flower's `LocalDpMod` on the client; 0 without it.
        groups: if clients train parts of one network, the description of the whole network, as JSON.
        wrapped: whether the user's own functions train (`fedhet.wrap`), whose numbers of examples may change.
        fitted: whether the client has an estimator in place of a network.
        hides_work: whether its node does not tell the steps and examples of its training.
        names: names of classes and columns that must agree with other clients' (see `names_in`).
        free: kinds of `names`, separated by commas, that need not agree, but have one order if clients have the same.
        classes: in a simulation, its numbers of training examples by class (each a list of one number, see `names_in`).
        scales: the scale of its training inputs (see `scales_in`).
        alike: in a simulation, what clients whose networks may be trained as one batch have in common.
    """

    client: Name
    lost_state: int = -1
    task: str = "classification"
    metric: str = ""
    further: str = ""
    labels: int = field(default=1, metadata={"at_least": 1, "at_most": 2**16})
    architecture: str = ""
    partition_id: int = -1
    partitions: int = field(default=0, metadata={"at_most": MOST_PARTITIONS})
    own_data: bool = False
    own_split: bool = False
    common_test: bool = True
    common: Name = ""
    normalised: bool = True
    spec: Spec = field(default_factory=dict)
    public: Name = ""
    public_size: int = field(default=0, metadata={"at_most": 10**8})
    device: str = ""
    note: str = field(default="", metadata={"longest": LONGEST_NOTE})
    outputs: int = field(default=0, metadata={"at_most": 2**31})
    noise: float = 0.0
    groups: Text = field(default="", metadata={"longest": 2**20})  # ResNet-152 has 200,000 characters
    wrapped: bool = False
    fitted: bool = False
    hides_work: bool = False
    names: Text = field(default="", metadata={"longest": MOST_NAMES // 2})  # leaves room for others' in a request
    free: Name = ""
    classes: Text = field(default="", metadata={"longest": 2**16})
    scales: Text = field(default="", metadata={"longest": 2**16})
    alike: Name = ""

    @property
    def partition(self) -> tuple[int, int] | None:
        """The partition id and the number of partitions; None if the client's node has none."""
        return (self.partition_id, self.partitions) if self.partition_id >= 0 else None

    def fields(self) -> dict[str, Any]:
        """Return the report as a dict of plain values to send; fields with default values are left out."""
        spec = {f"spec.{name}": ",".join([dtype, *map(str, shape)]) for name, (shape, dtype) in self.spec.items()}
        return written(replace(self, note=self.note[:LONGEST_NOTE])) | spec

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Report":
        """Return the report in a received dict (see `fields`); raise a WireError if a field is invalid."""
        report = cls(**Fields(record).plain(cls), spec=_spec(record))
        names_in(report.names)
        counts_in(report.classes)
        scales_in(report.scales)
        if report.task not in OUTPUTS or (report.metric and report.metric not in OUTPUTS[report.task].metrics):
            raise WireError(
                f"the client's task {shortened(report.task)} or its metric {shortened(report.metric)} is unknown: use "
                "the server's version of fedhet"
            )
        if report.partition_id >= report.partitions:
            raise WireError(
                f"the client's reply is damaged: partition-id is {report.partition_id}, but must be "
                f"below num-partitions = {report.partitions}: correct the node config"
            )
        return report


def _spec(record: Mapping[str, Any]) -> Spec:
    """Return shapes and dtypes in a report's entries, such as `spec.fc.weight = "float32,2,3"`; check them."""
    keys = [key for key in record if key.startswith("spec.")]
    if len(keys) > MOST_ARRAYS:
        raise WireError(f"the client shares {len(keys)} arrays, but the limit is {MOST_ARRAYS}: use a smaller model")
    spec: Spec = {}
    for key in keys:
        name = key.removeprefix("spec.")
        text = Fields(record).text(key)
        dtype, *lengths = text.split(",")
        shaped = all(length.isdecimal() and length.isascii() and int(length) for length in lengths[:32])
        named = name.isprintable() and 0 < len(name) <= 10 * LONGEST
        if dtype not in DTYPES or not shaped or len(lengths) > 32 or not named:
            raise WireError(
                f"the client's reply is damaged: {shortened(key)} is {shortened(text)}, but must be an array's dtype "
                "and shape, such as float32,2,3, under a printable name; use the server's version of fedhet"
            )
        spec[name] = (tuple(map(int, lengths)), dtype)
    check_room(bytes_of(spec), "the server needs memory for the client's shared arrays:")
    return spec


def names_text(names: Mapping[str, Sequence[str]]) -> str:
    """Return names of classes and columns as text to send, which has only the digest of a list that is too long."""
    short = {kind: sum(map(len, listed)) + len(listed) < MOST_NAMES / 4 for kind, listed in names.items()}
    lists = {k: n if short[k] else [f"{len(n)} names: {digest(*n)}"] for k, n in names.items()}
    return "\n".join("\t".join([kind, *listed]) for kind, listed in lists.items())


@lru_cache(maxsize=16)
def names_in(text: str) -> Names:
    """Return the names in a text that `names_text` wrote; raise a WireError if it did not write the text."""
    lines = text.split("\n") if text else []
    lists = [line.split("\t") for line in lines[: MOST_LISTS + 1]]
    long = len(lines) > MOST_LISTS or any(len(line) > MOST_NAMES / 4 + LONGEST for line in lines)
    if long or not all(name.isprintable() for listed in lists for name in listed):
        raise WireError("the client's names of classes and columns are too many or not printable: rename them")
    return {kind: tuple(listed) for kind, *listed in lists}


def counts_in(text: str) -> dict[str, int]:
    """Return the numbers of examples by class in `Report.classes`; raise a WireError if they are invalid."""
    counts = names_in(text)
    if not all(len(number) == 1 and number[0].isdecimal() and len(number[0]) < 20 for number in counts.values()):
        raise WireError("the client's numbers of examples by class are damaged: use the server's version of fedhet")
    return {name: int(number) for name, (number,) in counts.items()}


def scales_in(text: str) -> Scales:
    """Return the scales of inputs in a report, written by `names_text`; raise a WireError for another text."""
    lines = text.split("\n") if text else []
    try:
        scales = {name: (kind, float(size)) for name, kind, size in (line.split("\t") for line in lines)}
        if not all(0 <= size < math.inf and (name + kind).isprintable() for name, (kind, size) in scales.items()):
            raise ValueError
        return scales
    except ValueError as error:
        raise WireError("the scales of the client's inputs are damaged: use the server's version of fedhet") from error


def check_room(size: int, needed: str) -> None:
    """Raise a WireError if `size` bytes exceed a quarter of this machine's memory; `needed` begins its message."""
    if size > (most := memory() / 4):
        raise WireError(f"use a smaller model: {needed} {size / 1e9:.3g} GB; a client may take {most / 1e9:.3g} GB")


@dataclass
class Measured:
    """The result of an evaluation: the metric, with one value per label if there are several, and the mean loss.

    `weight` is the loss's weight in means over clients, or 0 for the number of examples.
    """

    metric: Metric
    loss: float
    weight: float = 0.0


@dataclass
class Reply:
    """A client's reply: numbers of examples, measurements and the method's `payload`.

    Attributes:
        examples: number of training examples, unless a user's own train function returns another.
        report: the client's description of itself.
        test_examples, validation_examples: numbers of the client's own test and validation examples.
        train_loss: mean of the loss over the round's training steps; None without a step.
        train_weight: its weight in means over clients, or 0 for `weight`.
        measured: evaluations by name: of the `received` and the `trained` model on the client's test part, and with the
            prefix `common-` or `validation-` on the common test set or its validation part. Metrics of the key
            `metrics` are entries of their own (see `further`).
        work: numbers of steps and examples in its training.
        further: metrics that a user's own train function returns, by name (see `fedhet.wrap`).
        evaluated: metrics that a user's own evaluate function returns, by name.
        given_weight: the weight that a user's own train function returns; 0 if `examples` is the weight.
        weighted_by: the name under which it is sent, so that hooks of a user's strategy can read and set it.
    """

    examples: int = field(metadata={"key": COUNT, "at_least": 1})
    payload: Payload
    report: Report
    test_examples: int = 0
    train_loss: float | None = None
    measured: dict[str, Measured] = field(default_factory=dict)
    validation_examples: int = 0
    work: Work = field(default_factory=Work)
    further: dict[str, float] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    given_weight: float = field(default=0.0, metadata={"key": "weight"})
    train_weight: float = 0.0
    weighted_by: str | None = None

    @property
    def client(self) -> str:
        """The client's name."""
        return self.report.client

    @property
    def weight(self) -> float:
        """The client's weight in averages over clients, by default its number of training examples."""
        return self.given_weight if self.given_weight > 0 else float(self.examples)

    @property
    def counted(self) -> float:
        """The fraction of the client's examples that count in averages: below 1 if the server limits its claim."""
        return self.weight / self.examples

    @property
    def arrays(self) -> dict[str, Arrays]:
        """The arrays in the client's payload, by group and by name in the group."""
        return self.payload.arrays

    @property
    def values(self) -> Fields:
        """The plain values in the client's payload, which are checked when they are read."""
        return Fields(self.payload.values)

    def metrics(self) -> dict[str, Any]:
        """Return the client's measurements as a dict to send: numbers and lists of numbers by name."""
        metrics = written(self) | written(self.work)
        for name, measured in self.measured.items():
            metrics[f"{name}-metric"] = list(measured.metric.values)
            metrics[f"{name}-weight"] = [float(weight) for weight in measured.metric.weights]
            metrics[f"{name}-loss"] = measured.loss
            metrics |= {f"{name}-loss-weight": measured.weight} if measured.weight else {}
        name = self.weighted_by or "weight"
        # Names with another meaning keep it.
        if name == COUNT or not (name in READ or name in metrics or name.endswith("-metric")):
            weight = metrics.pop("weight")
            metrics[name] = int(weight) if weight.is_integer() else weight
        numbers = self.further | self.evaluated  # without a prefix, for hooks that a user's strategy overrides
        metrics = {n: v for n, v in numbers.items() if n not in READ and not n.endswith("-metric")} | metrics
        metrics |= {f"{FURTHER}{name}": value for name, value in self.further.items()}
        return metrics | {f"{EVALUATED}{name}": value for name, value in self.evaluated.items()}

    @classmethod
    def of(cls, payload: Payload, metrics: Mapping[str, Any], report: Report, weighted_by: str = COUNT) -> "Reply":
        """Return the reply with received `metrics` (see `Reply.metrics`); raise a WireError if a metric is invalid."""
        metrics = _with_weight(metrics, weighted_by)
        numbers = Fields(metrics)
        keys = [key for key in metrics if key.endswith("-metric") and not key.startswith((FURTHER, EVALUATED))]
        measured = {key.removesuffix("-metric"): _measured(metrics, key) for key in keys}
        own: dict[str, Any] = {"further": _own(metrics, FURTHER), "evaluated": _own(metrics, EVALUATED)}
        work = Work(**numbers.plain(Work))
        return cls(payload=payload, report=report, measured=measured, work=work, **own, **numbers.plain(cls))


READ = {key for dataclass in (Reply, Work) for _, key in named_fields(dataclass)}
"""Keys of a reply's metrics for fields of `Reply` and `Work`; a user's metrics of these names get a prefix."""


def _with_weight(metrics: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return metrics of which the metric `name`, if it is no number of examples, is the `weight`, if they have none."""
    fraction = name == COUNT and isinstance(metrics.get(name), float)
    if name not in metrics or metrics.get("weight") or (name in READ and not fraction):
        return metrics
    weight = Fields(metrics).number(name)
    if weight <= 0:
        raise WireError(f"error in the client's reply: its weight {name} is {weight:g}, but must be above 0")
    count = {COUNT: max(1, int(weight))} if name == COUNT else {}
    return {**metrics, "weight": weight, **count}


def _own(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    names = [key.removeprefix(prefix) for key in metrics if key.startswith(prefix)]
    if len(names) > MOST_FURTHER or not all(name.isprintable() and 0 < len(name) <= LONGEST for name in names):
        raise WireError(
            f"the client's functions return {len(names)} metrics, such as {shortened(names[:1])}: at most "
            f"{MOST_FURTHER} are accepted, with printable names of up to {LONGEST} characters"
        )
    return {name: Fields(metrics).number(f"{prefix}{name}") for name in names}


def _measured(metrics: Mapping[str, Any], key: str) -> Measured:
    numbers = Fields(metrics)
    name = key.removesuffix("-metric")
    values = metrics[key]
    weights: Any = metrics.get(f"{name}-weight")
    if not (
        len(name) <= LONGEST
        and isinstance(values, list)
        and isinstance(weights, list)
        and len(values) == len(weights)
        and all(0 <= weight <= MOST_WEIGHT for weight in weights)
        and all(weight == 0 or abs(value) <= LARGEST for value, weight in zip(values, weights, strict=True))
    ):
        raise WireError(
            f"the client's reply is damaged: {key[:LONGEST]} is {shortened(values)} with weights {shortened(weights)}, "
            f"but must be equally long lists of values and of weights from 0 to {MOST_WEIGHT:.0e}: correct the metric"
        )
    loss = numbers.number(f"{name}-loss")
    weight = numbers.number(f"{name}-loss-weight", 0.0)
    return Measured(Metric(tuple(values), tuple(weights)), loss, max(weight, 0.0))


class LostState(FedhetError):
    """Raised if a client has lost its saved state or data of the handshake; the server then repeats the handshake."""


def with_public_dataset(public: PublicDataset) -> Payload:
    """Return a handshake's payload whose arrays `public` are the inputs and, if any, labels of the public dataset."""
    labels = {} if public.labels is None else {"labels": public.labels}
    return Payload({"public": to_arrays({**parts_of(public.inputs), **labels})})


def public_dataset_in(payload: Payload) -> PublicDataset | None:
    """Return the public dataset in a handshake's payload, or None; raise a WireError if it is invalid."""
    if (sent := payload.arrays.get("public")) is None:
        return None
    names = [name for name in sent if name == "labels" or name.partition(".")[0] == "inputs"]
    tensors = {name: to_tensor(sent[name]) for name in names}
    counts = {len(part) if part.ndim else 0 for part in tensors.values()}
    if names in ([], ["labels"]) or len(counts) > 1 or 0 in counts:
        raise WireError("the server's public dataset must have inputs and as many labels, or only inputs: pass another")
    labels = tensors.pop("labels", None)
    return PublicDataset(from_parts(tensors), labels)
