"""The protocol between fedhet's server and its clients: what a request and a reply hold, written and read here alone.

A request is the method's payload, the run's settings and a `Request`. A reply is the method's payload, what the client
measured, and its `Report`; or a refusal with a reason.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedhet.data import Pool
from fedhet.errors import FedhetError
from fedhet.rows import Work
from fedhet.task import Metric
from fedhet.wire.arrays import Arrays, Encoder, Payload, WireError, decode, to_arrays, to_tensor
from fedhet.wire.specs import Spec

GREET, FIRST, JOIN = "greet", "first", "join"
"""Questions that every client is asked: who it is, the weights from which all start, and, of one that comes after the
last round, what it achieves with what it receives."""

STARTS = ("received", "scratch")
"""From what one that comes after the last round goes on: what it received, and its own initial weights. What it
measured after epoch 3 goes by `received-3`."""

NO_HANDLER = "function registered with name"
"""What Flower says of a ClientApp that has no handler for a message, as fedhet's has for each of its own."""

POOL = "pool"
"""The group of arrays that is the shared pool, in a greeting."""


@dataclass(frozen=True)
class Request:
    """What the server asks of a client, beside the method's payload.

    Attributes:
        round: the round, from 1; 0 while greeting.
        expected: the round whose state the server believes the client to have; -1 for none.
        epochs: local epochs of this round.
        closing: whether this is the closing round, after the last of the configured ones.
        evaluate: whether to evaluate before and after.
        final: whether this is the evaluation at the end, when personal models are saved.
        question: what is asked, in a query.
        run: the run's own name, where the client's state folder serves several runs.
        pool: digest of the shared pool, if the method needs one.
        flower: whether arrays travel in Flower's format, since a wrapper of Flower's may look into them.
    """

    round: int = 0
    expected: int = -1
    epochs: int = 0
    closing: bool = False
    evaluate: bool = False
    final: bool = False
    question: str = ""
    run: str = ""
    pool: str = ""
    flower: bool = False

    def write(self, record: RecordDict, settings: str, further: Mapping[str, Any] | None = None) -> None:
        """Put the request into a message's records.

        Args:
            record: the message's.
            settings: those of the run (`Config.text`).
            further: values that are not fedhet's, for Flower's mods around the clients.
        """
        record["request"] = ConfigRecord({**(further or {}), "settings": settings, "request": json.dumps(vars(self))})

    @classmethod
    def read(cls, record: RecordDict) -> tuple["Request", str]:
        """The request in a message's records, and the settings.

        Raises:
            WireError: the message is not one of fedhet's server.
        """
        if "request" not in record:
            raise WireError(
                "this ClientApp is fedhet's, and the strategy that asks it is not: start one of fedhet's in the "
                "ServerApp, such as fedhet.FedAvg, or fedhet.make_server_app()"
            )
        found = record["request"]
        return cls(**json.loads(str(found["request"]))), str(found["settings"])


@dataclass
class Report:
    """What a client says of itself, beside the method's reply; all but the name and what was lost only when greeted.

    Attributes:
        client: its name.
        lost_state: the round whose state was expected of it and is lost; -1 if none is.
        metric: name of its task's metric.
        architecture: the architecture's name, empty where it is not disclosed.
        partition: its partition id and the number of partitions, None where the node has none.
        own_data: whether its data are not the configured data set's.
        spec: names, shapes and dtypes of what is shared of its network.
        pool: digest of the pool that it has itself, empty without one.
        pool_size: examples in that pool.
        device: where it computes, in words.
        note: what is to be told of it once.
    """

    client: str
    lost_state: int = -1
    metric: str = ""
    architecture: str = ""
    partition: tuple[int, int] | None = None
    own_data: bool = False
    spec: Spec = field(default_factory=dict)
    pool: str = ""
    pool_size: int = 0
    device: str = ""
    note: str = ""

    def record(self) -> ConfigRecord:
        """As it travels: what is not said is left out."""
        said: dict[str, Any] = {"client": self.client}
        if self.lost_state >= 0:
            said["lost-state"] = self.lost_state
        if self.metric:
            said |= {"metric": self.metric, "own-data": self.own_data}
        if self.architecture:
            said["architecture"] = self.architecture
        if self.partition:
            said["partition"] = list(self.partition)
        if self.pool:
            said |= {"pool": self.pool, "pool-size": self.pool_size}
        said |= {key: value for key, value in (("device", self.device), ("note", self.note)) if value}
        for name, (shape, dtype) in self.spec.items():
            said[f"spec.{name}"] = ",".join([dtype, *map(str, shape)])
        return ConfigRecord(said)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Report":
        """What a record says."""
        spec: Spec = {}
        for key, value in said.items():
            if key.startswith("spec."):
                dtype, *shape = str(value).split(",")
                spec[key.removeprefix("spec.")] = (tuple(map(int, shape)), dtype)
        partition = said.get("partition")
        return cls(
            client=str(said["client"]),
            lost_state=int(said.get("lost-state", -1)),
            metric=str(said.get("metric", "")),
            architecture=str(said.get("architecture", "")),
            partition=(int(partition[0]), int(partition[1])) if partition else None,
            own_data=bool(said.get("own-data", False)),
            spec=spec,
            pool=str(said.get("pool", "")),
            pool_size=int(said.get("pool-size", 0)),
            device=str(said.get("device", "")),
            note=str(said.get("note", "")),
        )


@dataclass
class Measured:
    """An evaluation: the metric by label, and the mean loss."""

    metric: Metric
    loss: float


@dataclass
class Reply:
    """What a client sent back, decoded.

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

    @property
    def arrays(self) -> dict[str, Arrays]:
        """The groups of arrays."""
        return self.payload.arrays

    def record(self, *, flower: bool = False) -> RecordDict:
        """As it travels; arrays as raw bytes, or in Flower's format."""
        record = Encoder(flower=flower)(self.payload)
        metrics: dict[str, Any] = {"num-examples": self.examples, "test-examples": self.test_examples}
        for name, measured in self.measured.items():
            metrics[f"{name}-metric"] = list(measured.metric.values)
            metrics[f"{name}-weight"] = [float(weight) for weight in measured.metric.weights]
            metrics[f"{name}-loss"] = measured.loss
        if self.train_loss is not None:
            metrics["train-loss"] = self.train_loss
        if self.validation_examples:
            metrics["validation-examples"] = self.validation_examples
        if self.work.steps:
            metrics |= {_kebab(name): count for name, count in vars(self.work).items()}
        record["metrics"], record["report"] = MetricRecord(metrics), self.report.record()
        return record

    @classmethod
    def open(cls, message: Message) -> "Reply":
        """The reply in a message.

        Raises:
            FedhetError: it carries an error or a refusal, or is no reply of fedhet's client app.
        """
        reason = message.error.reason or f"error code {message.error.code}" if message.has_error() else ""
        if NO_HANDLER in reason or (not reason and "report" not in message.content):
            raise WireError("its ClientApp is not fedhet's: make it with fedhet.make_client_app")
        if reason:
            raise FedhetError(f"failed: {reason}")
        records = message.content
        said: dict[str, Any] = dict(records["report"])
        if "refusal" in said:
            raise (LostReply if said.get("lost") else FedhetError)(str(said["refusal"]))
        metrics: dict[str, Any] = dict(records["metrics"]) if "metrics" in records else {}
        examples = metrics.get("num-examples", 0)
        if "client" not in said or not 1 <= examples < math.inf:
            raise WireError(f"its reply is damaged: it names {examples} training examples")
        return cls(
            client=str(said["client"]),
            examples=int(examples),
            payload=decode(records),
            report=Report.of(said),
            test_examples=int(metrics.get("test-examples", 0)),
            train_loss=metrics.get("train-loss"),
            measured=_measured(metrics),
            validation_examples=_count(metrics, "validation-examples"),
            work=Work(**{each.name: _count(metrics, _kebab(each.name)) for each in fields(Work)}),
        )


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _count(metrics: Mapping[str, Any], key: str) -> int:
    count = metrics.get(key, 0)
    if not isinstance(count, int) or count < 0:
        raise WireError(f"its reply is damaged: {key} is {count}")
    return count


def _measured(metrics: Mapping[str, Any]) -> dict[str, Measured]:
    found = {}
    for key, values in metrics.items():
        name, _, what = key.rpartition("-")
        if what == "metric":
            weights = metrics.get(f"{name}-weight")
            if not isinstance(values, list) or not isinstance(weights, list) or len(values) != len(weights):
                raise WireError(f"its reply is damaged: {key} is {values} with weights {weights}")
            found[name] = Measured(Metric(tuple(values), tuple(weights)), float(metrics.get(f"{name}-loss", math.nan)))
    return found


class LostReply(FedhetError):
    """A client says that it lost what the server sent it."""


@dataclass(frozen=True)
class Refusal:
    """A client's answer that it cannot do what it was asked; `lost`: for want of what the server sent it before."""

    client: str
    reason: str
    lost: bool = False

    def record(self) -> RecordDict:
        """As it travels."""
        said = ConfigRecord({"client": self.client, "refusal": self.reason, "lost": self.lost})
        return RecordDict({"report": said})


def with_pool(pool: Pool) -> Payload:
    """A greeting with the shared pool in it."""
    labels = {} if pool.labels is None else {"labels": pool.labels}
    return Payload({POOL: to_arrays({"inputs": pool.inputs, **labels})})


def pool_in(payload: Payload) -> Pool | None:
    """The pool in a greeting, None where there is none.

    Raises:
        KeyError: there are labels without inputs.
    """
    sent = payload.arrays.get(POOL)
    if sent is None:
        return None
    return Pool(to_tensor(sent["inputs"]), to_tensor(sent["labels"]) if "labels" in sent else None)


def name_in(message: Message) -> str:
    """The name that a client gave in its reply, refusing or not; empty where there is none."""
    if not message.has_content() or "report" not in message.content:
        return ""
    return str(message.content["report"].get("client", ""))
