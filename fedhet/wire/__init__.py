"""The contents of messages as plain values: arrays, their names and shapes, requests and replies."""

from fedhet.wire.arrays import (
    DTYPES,
    Arrays,
    Payload,
    Spec,
    WireError,
    cast,
    check,
    check_finite,
    difference,
    load_into,
    narrowed,
    spec_of,
    to_arrays,
    to_tensor,
    without_widths,
)
from fedhet.wire.fields import Fields
from fedhet.wire.protocol import LostReply, Refusal, Reply, Report, Request

__all__ = [
    "DTYPES",
    "Arrays",
    "Fields",
    "LostReply",
    "Payload",
    "Refusal",
    "Reply",
    "Report",
    "Request",
    "Spec",
    "WireError",
    "cast",
    "check",
    "check_finite",
    "difference",
    "load_into",
    "narrowed",
    "spec_of",
    "to_arrays",
    "to_tensor",
    "without_widths",
]
