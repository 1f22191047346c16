"""Everything that touches Flower: records and messages, settings, wrappers and mods, and what of its insides we use."""

from fedhet.flower.messages import name_in, read_reply, read_request, write_reply, write_request
from fedhet.flower.records import STYPE, Encoder, decode, decode_arrays, encode_arrays

__all__ = [
    "STYPE",
    "Encoder",
    "decode",
    "decode_arrays",
    "encode_arrays",
    "name_in",
    "read_reply",
    "read_request",
    "write_reply",
    "write_request",
]
