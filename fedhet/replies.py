"""What clients send back: opened, checked, averaged."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Message

from fedhet.errors import FedhetError
from fedhet.exchange import Spec
from fedhet.wire import Arrays, Payload, WireError, as_read, decode


@dataclass
class Reply:
    """What a client sent back, decoded and checked.

    Attributes:
        client: its name.
        examples: number of its training examples.
        payload: the method's arrays and values.
        metrics: what it measured.
    """

    client: str
    examples: int
    payload: Payload
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, Arrays]:
        """The groups of arrays."""
        return self.payload.arrays


class LostReply(FedhetError):
    """A client says that it lost what the server sent it."""


def open_reply(message: Message) -> tuple[Reply, dict[str, Any]]:
    """A reply's parts.

    Raises:
        FedhetError: it carries an error or a refusal, or is no reply of fedhet's client app.
    """
    if message.has_error():
        raise FedhetError(f"failed: {message.error.reason or f'error code {message.error.code}'}")
    records = message.content
    if "report" not in records:
        raise WireError("its reply is not that of fedhet's client app: make it with fedhet.make_client_app")
    report: dict[str, Any] = dict(records["report"])
    if "refusal" in report:
        raise (LostReply if report.get("lost") else FedhetError)(str(report["refusal"]))
    metrics: dict[str, Any] = dict(records["metrics"]) if "metrics" in records else {}
    examples = metrics.get("num-examples", 0)
    if "client" not in report or not 1 <= examples < math.inf:
        raise WireError(f"its reply is damaged: it names {examples} training examples")
    return Reply(str(report["client"]), int(examples), decode(records), metrics), report


def name_in(message: Message) -> str:
    """The name that a client gave in its reply, refusing or not; empty where there is none."""
    if not message.has_content() or "report" not in message.content:
        return ""
    return str(message.content["report"].get("client", ""))


def spec_in(report: Mapping[str, Any]) -> Spec:
    """Names, shapes and dtypes of what travels of a client's model, as it said in its greeting."""
    spec: Spec = {}
    for key, value in report.items():
        if key.startswith("spec."):
            dtype, *shape = str(value).split(",")
            spec[key.removeprefix("spec.")] = (tuple(map(int, shape)), dtype)
    return spec


def difference(spec: Spec, other: Spec) -> str:
    """The first thing in which two models differ, in words."""
    for name in [*spec, *other]:
        if spec.get(name) != other.get(name):
            own = f"has shape {list(spec[name][0])}" if name in spec else "is missing"
            return f"{name} {own},"
    return "order of arrays is"


def weighted_average(groups: Sequence[Arrays], weights: Sequence[float], spec: Spec) -> Arrays:
    """The weighted mean of equal groups of arrays, summed in the order given.

    Args:
        groups: one group of arrays a client, with the same names and shapes.
        weights: one weight a client; they are divided by their sum.
        spec: shapes and dtypes of the result. float32 and float64 are summed in their own precision, narrower floats in
            float32, integers (BatchNorm's counters) in float64 and rounded.
    """
    total = float(sum(weights))
    average: Arrays = {}
    for name, (shape, dtype) in spec.items():
        whole = np.dtype(dtype).kind != "f"
        mean = torch.zeros(shape, dtype=torch.float64 if whole or dtype == "float64" else torch.float32)
        for group, weight in zip(groups, weights, strict=True):
            mean.add_(as_read(group[name]), alpha=weight / total)
        if whole:
            mean.round_()
        average[name] = mean.numpy().astype(dtype, copy=False)
    return average
