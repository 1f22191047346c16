"""What travels: arrays in records, their names and shapes, and the protocol of requests and replies."""

from fedhet.wire.arrays import (
    LARGEST,
    STYPE,
    Arrays,
    Encoder,
    Payload,
    WireError,
    as_read,
    cast,
    check,
    check_finite,
    decode,
    decode_arrays,
    encode_arrays,
    to_arrays,
    to_tensor,
)
from fedhet.wire.protocol import LostReply, Refusal, Reply, Request
from fedhet.wire.report import Report
from fedhet.wire.specs import Spec, difference, load_into, narrowed, spec_of, without_widths
from fedhet.wire.told import Told

__all__ = [
    "LARGEST",
    "STYPE",
    "Arrays",
    "Encoder",
    "LostReply",
    "Payload",
    "Refusal",
    "Reply",
    "Report",
    "Request",
    "Spec",
    "Told",
    "WireError",
    "as_read",
    "cast",
    "check",
    "check_finite",
    "decode",
    "decode_arrays",
    "difference",
    "encode_arrays",
    "load_into",
    "narrowed",
    "spec_of",
    "to_arrays",
    "to_tensor",
    "without_widths",
]
