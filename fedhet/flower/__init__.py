"""Everything that touches Flower, and its public classes, which the other rooms have from here."""

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from fedhet.flower.messages import name_in, read_reply, read_request, write_reply, write_request
from fedhet.flower.records import STYPE, Encoder, decode, decode_arrays, encode_arrays

__all__ = [
    "STYPE",
    "Array",
    "ArrayRecord",
    "ClientApp",
    "ConfigRecord",
    "Context",
    "Encoder",
    "Error",
    "Grid",
    "Message",
    "MessageType",
    "MetricRecord",
    "RecordDict",
    "Result",
    "ServerApp",
    "Strategy",
    "decode",
    "decode_arrays",
    "encode_arrays",
    "name_in",
    "read_reply",
    "read_request",
    "write_reply",
    "write_request",
]
