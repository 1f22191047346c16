"""The protocol between fedhet's server and its clients: what a request and a reply hold, as plain values.

A request is the method's payload, the run's settings and a `Request`. A reply is the method's payload, what the client
measured, and its `Report`; or a refusal with a reason. `fedhet.flower.messages` writes and reads the messages.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from fedhet.data import PublicDataset
from fedhet.errors import FedhetError
from fedhet.keys import kebab
from fedhet.machine import memory
from fedhet.rows import BY_CLASS, Work
from fedhet.task import LARGEST, Metric
from fedhet.toml import from_json
from fedhet.wire.arrays import DTYPES, Arrays, Payload, Spec, WireError, to_arrays, to_tensor
from fedhet.wire.fields import LONGEST, Fields, Name, shortened

HANDSHAKE, FIRST, JOIN = "handshake", "first", "join"
"""Questions that every client is asked: who it is, the weights from which all start, and, of one that comes after the
last round, what it achieves with what it receives."""

STARTS = ("received", "scratch")
"""Weights that such a client goes on from, the latter of its own; its metric after epoch 3 is `received-3`."""

PUBLIC = "public"
"""The group of arrays that is the public dataset, in a handshake."""

WHOLE = "whole"
"""The group of arrays that is a whole network's first weights, from a client that may have a part of it only."""

ROOM = 4
"""A handshake of more than this part of the machine's memory is refused before anything is made of that size."""
MOST_PARTITIONS = 100_000
"""As many as `clients` can be."""
MOST_ARRAYS = 2**15
"""Arrays that a client shares at most; a network of a thousand layers has some thousands."""


FURTHER, MOST_FURTHER = "own.", 64
"""Before the names of metrics that a user's own functions return, and how many of them a reply has at most."""

LONGEST_GROUPS = 2**20
"""Characters of a network's permutation groups as text; ResNet-152's are 200,000."""

Groups = Annotated[str, "permutation groups as text"]


@dataclass(frozen=True)
class Request:
    """A request of the server to a client, beside the method's payload.

    Attributes:
        round: the round, from 1; 0 for the handshake.
        expected: the round whose state the server believes the client to have; -1 for none.
        epochs: local epochs of this round.
        closing: whether this is the closing round, after the last of the configured ones.
        evaluate: whether to evaluate before and after.
        final: whether this is the evaluation at the end, when personal models are saved.
        question: what is asked, in a query.
        run: the run's own name, where the client's state folder serves several runs.
        public: digest of the public dataset, if the method needs one.
        flower: whether arrays travel in Flower's format, since a wrapper of Flower's may look into them.
        here: what only a server on the client's own machine can know (`fedhet.machine.proof` of the settings).
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

    def to_json(self) -> str:
        """The request as one line of text."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """The request that a text holds, or a WireError for a field that is not what it must be."""
        return cls(**Fields(from_json(text, "the request"), "the request").plain(cls))


@dataclass
class Report:
    """A client's description of itself; all but its name and `lost_state` travel in the handshake only.

    Attributes:
        client: its name.
        lost_state: the round whose state was expected of it and is lost; -1 if none is.
        metric: name of its task's metric.
        labels: how many numbers its metric has: one, or one for each of several labels.
        architecture: the architecture's name, empty where it is not disclosed.
        partition: its partition id and the number of partitions, None where the node has none.
        own_data: whether its data are not the configured data set's.
        common_test: whether it has the common test set.
        spec: names, shapes and dtypes of what is shared of its network.
        public: digest of the public dataset that it has itself, empty without one.
        public_size: examples in that public dataset.
        device: where it computes, in words.
        note: what is to be told of it once, shortened on the way.
        outputs: how many outputs a prediction of its network has; 0 where it does not say.
        groups: where clients have parts of one network, the permutation groups of the whole (`fedhet.matching`).
    """

    client: Name
    lost_state: int = -1
    metric: str = ""
    labels: int = field(default=1, metadata={"at_least": 1, "at_most": 2**16})
    architecture: str = ""
    partition: tuple[int, int] | None = None
    own_data: bool = False
    common_test: bool = True
    spec: Spec = field(default_factory=dict)
    public: Name = ""
    public_size: int = 0
    device: str = ""
    note: str = ""
    outputs: int = field(default=0, metadata={"at_most": 2**31})
    groups: Groups = ""

    def fields(self) -> dict[str, Any]:
        """Return the fields as they travel; those that are as by default are left out."""
        own = vars(self) | {"partition": list(self.partition or ()), "note": self.note[:LONGEST]}
        specified = {f"spec.{name}": ",".join([dtype, *map(str, shape)]) for name, (shape, dtype) in self.spec.items()}
        plain = [each for each in fields(self) if each.name != "spec" and own[each.name] not in (each.default, [])]
        return {kebab(each.name): own[each.name] for each in plain} | specified

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Report":
        """Return the report that a record holds, or raise a WireError for a field that is not what it must be."""
        report = Fields(record)
        pair = None
        if "partition" in report:
            partition = report.counts("partition")
            if not (len(partition) == 2 and partition[0] < partition[1] <= MOST_PARTITIONS):
                raise WireError(
                    f"its reply is damaged: partition is {partition[:3]}, must be an id and a larger number up to "
                    f"{MOST_PARTITIONS}"
                )
            pair = partition[0], partition[1]
        groups = report.text("groups", "", longest=LONGEST_GROUPS)
        return cls(**report.plain(cls), partition=pair, spec=_spec(record), groups=groups)


def _spec(record: Mapping[str, Any]) -> Spec:
    """The shared arrays, each written as `"float32,2,3"`; a WireError for empty ones, or more than have room here."""
    keys = [key for key in record if key.startswith("spec.")]
    if len(keys) > MOST_ARRAYS:
        raise WireError(f"it shares {len(keys)} arrays, and the server takes up to {MOST_ARRAYS} of a client")
    spec: Spec = {}
    for key in keys:
        dtype, *lengths = Fields(record).text(key).split(",")
        name, damaged = key.removeprefix("spec."), f"its reply is damaged: {shortened(key)}"
        if dtype not in DTYPES or len(lengths) > 32:
            raise WireError(f"{damaged} is {dtype!r} of {len(lengths)} axes")
        if not name.isprintable() or not 0 < len(name) <= 10 * LONGEST:
            raise WireError(f"{damaged} is no name of an array")
        if not all(length.isdecimal() and length.isascii() and int(length) for length in lengths):
            raise WireError(f"{damaged} has no shape {','.join(lengths)!r}: what is shared has axes of at least 1")
        spec[name] = (tuple(map(int, lengths)), dtype)
    size, most = sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in spec.values()), memory() / ROOM
    if size > most:
        raise WireError(f"it shares {size / 1e9:.3g} GB, and the server has room for {most / 1e9:.3g} GB a client")
    return spec


@dataclass
class Measured:
    """An evaluation: the metric by label, the mean loss, and those of `BY_CLASS` that are defined, by name."""

    metric: Metric
    loss: float
    by_class: dict[str, float] = field(default_factory=dict)


@dataclass
class Reply:
    """A client's reply.

    Attributes:
        client: its name.
        examples: number of its training examples.
        payload: the method's arrays and values.
        report: what it says of itself.
        test_examples: number of its own test examples.
        train_loss: mean of the loss over the round's steps; None without a step.
        measured: its evaluations by what was evaluated: `received`, `trained`, `common-trained`,
            `validation-trained`.
        validation_examples: number of its validation examples.
        work: what its training took.
        further: metrics of a user's own train and evaluate functions, by name (`fedhet.wrap`).
    """

    client: str
    examples: int
    payload: Payload
    report: Report = field(default_factory=lambda: Report(""))
    test_examples: int = 0
    train_loss: float | None = None
    measured: dict[str, Measured] = field(default_factory=dict)
    validation_examples: int = 0
    work: Work = field(default_factory=Work)
    further: dict[str, float] = field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, Arrays]:
        """The groups of arrays."""
        return self.payload.arrays

    @property
    def values(self) -> Fields:
        """The method's values, checked as they are read."""
        return Fields(self.payload.values)

    def metrics(self) -> dict[str, Any]:
        """Return the client's measurements: numbers and lists of numbers by name."""
        metrics: dict[str, Any] = {"num-examples": self.examples, "test-examples": self.test_examples}
        for name, measured in self.measured.items():
            metrics[f"{name}-metric"] = list(measured.metric.values)
            metrics[f"{name}-weight"] = [float(weight) for weight in measured.metric.weights]
            metrics[f"{name}-loss"] = measured.loss
            metrics |= {f"{name}-{kebab(which)}": value for which, value in measured.by_class.items()}
        if self.train_loss is not None:
            metrics["train-loss"] = self.train_loss
        if self.validation_examples:
            metrics["validation-examples"] = self.validation_examples
        if self.work.steps:
            metrics |= {kebab(name): count for name, count in vars(self.work).items()}
        return metrics | {f"{FURTHER}{name}": value for name, value in self.further.items()}

    @classmethod
    def of(cls, payload: Payload, metrics: Mapping[str, Any], report: Report) -> "Reply":
        """The reply of these parts, or a WireError for a metric that is not what it must be."""
        numbers = Fields(metrics)
        return cls(
            client=report.client,
            examples=numbers.count("num-examples", at_least=1),
            payload=payload,
            report=report,
            test_examples=numbers.count("test-examples", 0),
            train_loss=numbers.number("train-loss") if "train-loss" in numbers else None,
            measured={
                key.removesuffix("-metric"): _measured(metrics, key)
                for key in metrics
                if key.endswith("-metric") and not key.startswith(FURTHER)
            },
            validation_examples=numbers.count("validation-examples", 0),
            work=Work(**numbers.plain(Work)),
            further=_further(metrics),
        )


def _further(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a user's own, or a WireError: they are few, finite, and have names that can be shown."""
    names = [key.removeprefix(FURTHER) for key in metrics if key.startswith(FURTHER)]
    if len(names) > MOST_FURTHER or not all(name.isprintable() and 0 < len(name) <= LONGEST for name in names):
        raise WireError(
            f"it has {len(names)} metrics of its own, such as {shortened(names[:1])}: at most {MOST_FURTHER} are "
            f"taken, with printable names of up to {LONGEST} characters"
        )
    return {name: Fields(metrics).number(f"{FURTHER}{name}") for name in names}


def _measured(metrics: Mapping[str, Any], key: str) -> Measured:
    """An evaluation, or a WireError: a metric is at most 1 where it weighs anything, and a loss finite."""
    numbers = Fields(metrics)
    name, values = key.removesuffix("-metric"), metrics[key]
    weights: Any = metrics.get(f"{name}-weight")
    if not (
        len(name) <= LONGEST
        and isinstance(values, list)
        and isinstance(weights, list)
        and len(values) == len(weights)
        and all(0 <= weight < math.inf for weight in weights)
        and all(weight == 0 or -LARGEST <= value <= 1 for value, weight in zip(values, weights, strict=True))
    ):
        raise WireError(
            f"its reply is damaged: {key[:LONGEST]} is {shortened(values)} with weights {shortened(weights)}"
        )
    by_class = {each: f"{name}-{kebab(each)}" for each in BY_CLASS if f"{name}-{kebab(each)}" in numbers}
    shares = {each: numbers.number(field) for each, field in by_class.items()}
    if odd := next((each for each, share in shares.items() if not 0 <= share <= 1), None):
        raise WireError(f"its reply is damaged: {by_class[odd]} is {shortened(shares[odd])}, must be from 0 to 1")
    return Measured(Metric(tuple(values), tuple(weights)), numbers.number(f"{name}-loss"), shares)


class LostReply(FedhetError):
    """A client says that it lost what the server sent it."""


@dataclass(frozen=True)
class Refusal:
    """A client's answer that it cannot do what it was asked; `lost`: for want of what the server sent it before."""

    client: str
    reason: str
    lost: bool = False


def with_public_dataset(public: PublicDataset) -> Payload:
    """A handshake with the public dataset in it."""
    labels = {} if public.labels is None else {"labels": public.labels}
    return Payload({PUBLIC: to_arrays({"inputs": public.inputs, **labels})})


def public_dataset_in(payload: Payload) -> PublicDataset | None:
    """The public dataset in a handshake, if there is one; a WireError if it lacks inputs, or as many labels."""
    sent = payload.arrays.get(PUBLIC)
    if sent is None:
        return None
    inputs, labels = sent.get("inputs"), sent.get("labels")
    if inputs is None or inputs.ndim < 2 or not inputs.size:
        raise WireError("the request's public dataset has no inputs")
    if labels is not None and labels.shape[:1] != inputs.shape[:1]:
        raise WireError(
            f"the request's public dataset has {len(inputs)} inputs and labels of shape {list(labels.shape)}"
        )
    return PublicDataset(to_tensor(inputs), None if labels is None else to_tensor(labels))
