"""Conversion of requests, replies and payloads (arrays and values) to the records of Flower messages and back.

Nothing is pickled. Each group of arrays is an `ArrayRecord`, and a payload's plain values are a `ConfigRecord`.
Arrays are sent as raw bytes with dtype and shape, which takes a fifth of the time of Flower's own `stype`, and are
checked on arrival. They are in Flower's format where Flower, its mods or a user's code read them.
"""

import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedhet.errors import FedhetError, WriteError
from fedhet.flower.insides import LEGACY, NORM_BIT, array_of, filled, no_handler, to_bytes
from fedhet.messages import DTYPES, Arrays, Fields, LostState, Payload, Reply, Report, Request, WireError, by_position
from fedhet.messages.protocol import COUNT
from fedhet.utils.files import plain_name

OURS = ("settings", "request")  # keys of a request's record that fedhet's server writes; others are the user's

NOT_OURS = (
    "its ClientApp is not fedhet's: add the line app = fedhet.wrap(app, model) below its functions @app.train() and "
    "@app.evaluate(), or create it with fedhet.make_client_app"
)

# Prefixes of the user's keys in a request's record; keys of `train_config` have one only if a name is taken.
PREFIXES = TRAIN, EVALUATE, NAMES = "train_config.", "evaluate_config.", "names."


def sent_along(train: Mapping[str, Any], evaluate: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a user's configs for `train` and `evaluate`, and Flower's options, as one dict to send with a request.

    The keys of `names` (Flower's options, such as `arrayrecord_key`) get the prefix `names.`, those of `evaluate` get
    `evaluate_config.`, and those of `train` that fedhet uses or that start with such a prefix get `train_config.`.
    """
    prefixed = {f"{TRAIN}{key}" if key in OURS or key.startswith(PREFIXES) else key: v for key, v in train.items()}
    prefixed |= {f"{EVALUATE}{key}": value for key, value in evaluate.items()}
    return prefixed | {f"{NAMES}{key}": value for key, value in names.items()}


def write_request(record: RecordDict, request: Request, settings: str, entries: Mapping[str, Any] = {}) -> None:
    """Write a request, the run's settings as JSON, and the user's own config (`entries`) to a message's content."""
    ours = {"settings": settings, "request": json.dumps(vars(request))}
    filled(record, {"request": filled(ConfigRecord({**entries}), ours)})


def is_request(message: Message) -> bool:
    """Return whether a message is from a strategy of fedhet."""
    return message.has_content() and OURS[0] in message.content.config_records.get("request", {})


def read_request(record: RecordDict) -> tuple[Request, str]:
    """Return a message's request, and the run's settings as JSON; raise a WireError if fedhet did not write them."""
    request = record.get("request")
    if not isinstance(request, ConfigRecord):
        raise WireError(
            "this ClientApp is fedhet's, but the message is from another strategy: start a fedhet strategy in the "
            "ServerApp, such as fedhet.FedAvg, or fedhet.make_server_app()"
        )
    said = Fields(dict(request), "the request")
    settings = said.text("settings", longest=2**20)
    return Request.from_json(said.text("request", longest=2**22)), settings


def identity(content: RecordDict, node_config: Mapping[str, Any]) -> str:
    """Return a digest (hash) of a message's content, the same if a server that was restarted sends it again.

    It also depends on the node config, since another node, or other data, must not get the noise of the same message.
    """
    request, _ = read_request(content)
    said = {**content.config_records["request"], "request": repr(replace(request, here=""))}
    others = {name: record for name, record in content.items() if name != "request"}
    words = repr([sorted(said.items()), sorted(node_config.items())])
    return hashlib.blake2b(words.encode() + to_bytes(RecordDict(others))).hexdigest()


def write_refusal(client: str, reason: str, **flags: bool) -> RecordDict:
    """Return the content of a reply in which `client` refuses a request for a `reason`.

    Flags that may be true: `lost` (the client has lost its state and needs a new handshake), `again` (it can be asked
    again), `unwritten` (a file cannot be written).
    """
    return RecordDict({"report": ConfigRecord({"client": client, "refusal": reason, **flags})})


def check_simulated(message: Message) -> None:
    """Raise an error if a simulated client's reply ends the run: a file cannot be written, or Ray has ended."""
    if message.has_error() and STOPPED in in_one_line(message.error.reason or ""):
        raise FedhetError("Ray has ended, so this round does not count: resume the run")
    report = message.content.get("report") if message.has_content() else None
    if isinstance(report, ConfigRecord) and report.get("unwritten") is True:
        client, reason = str(report.get("client")), str(report.get("refusal"))
        raise WriteError(f"client {client}: {reason}")


def write_reply(reply: Reply, *, flower: bool = False) -> RecordDict:
    """Return the content of a message with a reply; arrays are in Flower's format if `flower`, else raw bytes."""
    record = Encoder(flower=flower)(reply.payload)
    bit = {NORM_BIT: reply.further.pop(NORM_BIT)} if NORM_BIT in reply.further else {}  # for Flower's wrapper
    metrics = filled(MetricRecord(), {**reply.metrics(), **bit})
    return filled(record, {"metrics": metrics, "report": filled(ConfigRecord(), reply.report.fields())})


def in_one_line(reason: str) -> str:
    """Return a reason that a client gives in one line of at most `LONGEST_REASON` characters."""
    return " ".join(reason[:LONGEST_REASON].split())


def read_reply(message: Message, weighted_by: str = COUNT) -> Reply:
    """Return the reply in a message; raise a FedhetError if it is an error, a refusal, or not from fedhet.

    `weighted_by` is the name of the metric that is the client's weight.
    """
    if message.has_error():
        reason = in_one_line(message.error.reason or f"error code {message.error.code}")
        if "Invalid message type: query" in reason:
            raise WireError(LEGACY)
        if no_handler(reason):
            raise WireError(NOT_OURS)
        raise FedhetError(f"the client failed: {reason}; see the client's log")
    if not message.has_content():
        raise WireError("the client's reply has neither content nor an error: check the client's mods")
    records = message.content
    report, metrics = records.get("report"), records.get("metrics")
    if not isinstance(report, ConfigRecord):
        raise WireError(NOT_OURS)
    if "refusal" in report:
        refusal = (LostState if report.get("lost") is True else FedhetError)(in_one_line(str(report["refusal"])))
        refusal.may_pass = report.get("again") is True
        raise refusal
    if not isinstance(metrics, MetricRecord):
        raise WireError("the client's reply is damaged, since it has no MetricRecord: check the client's mods")
    return Reply.of(decode(records), dict(metrics), Report.of(dict(report)), weighted_by)


def ask_app(
    app: ClientApp, action: str, message: Message, context: Context, model: Arrays, settings: Mapping[str, Any]
) -> tuple[Arrays, dict[str, Any], str, dict[str, ConfigRecord]]:
    """Call the `train` or `evaluate` function (`action`) of a user's own ClientApp, as Flower's strategies do.

    The function receives the arrays of `model`, and `settings` updated by the user's config in the request `message`.
    Returns the arrays and metrics of its reply, the name of the metric that is the client's weight, and the reply's
    ConfigRecords. Raises a FedhetError if the reply is an error or lacks the records that Flower's strategies need.
    """
    content = message.content
    kind = message.metadata.message_type
    along: dict[str, Any] = {k: v for k, v in content.config_records["request"].items() if k not in OURS}
    names = {key.removeprefix(NAMES): value for key, value in along.items() if key.startswith(NAMES)}
    evaluation = {key.removeprefix(EVALUATE): value for key, value in along.items() if key.startswith(EVALUATE)}
    training = {k.removeprefix(TRAIN): v for k, v in along.items() if not k.startswith((EVALUATE, NAMES))}
    entries = evaluation if action == "evaluate" else training
    record = RecordDict({names.get("arrayrecord_key", "arrays"): encode_arrays(model, flower=True)})
    round = settings["server-round"]
    record[names.get("configrecord_key", "config")] = ConfigRecord({**settings, **entries, "server-round": round})
    message.content, message.metadata.message_type = record, action
    try:
        reply = app(message, context)
    except ValueError as error:
        if no_handler(str(error)):
            raise FedhetError(f"your ClientApp has no function for {action}: add one with @app.{action}()") from error
        raise
    finally:
        message.content, message.metadata.message_type = content, kind
    if not isinstance(reply, Message):
        got = type(reply).__name__
        raise WireError(f"your {action} function returned {got}: end it with return Message(content, reply_to=msg)")
    if reply.has_error():
        raise FedhetError(f"the {action} function of your ClientApp failed: {reply.error.reason}")
    arrays, metrics = [*reply.content.array_records.values()], [*reply.content.metric_records.values()]
    if len(metrics) != 1 or (action == "train" and len(arrays) != 1):
        missing, count = ("MetricRecord", len(metrics)) if len(metrics) != 1 else ("ArrayRecord", len(arrays))
        raise WireError(f"the {action} function of your ClientApp returned {count} {missing}s: return exactly one")
    weight = names.get("weighted_by_key", COUNT)
    sent = decode_arrays(arrays[0]) if action == "train" else {}
    return by_position(sent, model), dict(metrics[0]), weight, dict(reply.content.config_records)


def name_of(context: Context) -> str:
    """Return the client's name: `name` or `partition-id` of the node config, by default Flower's node id."""
    config = context.node_config
    return str(config.get("name", config.get("partition-id", context.node_id)))


def name_in(message: Message) -> str:
    """Return the client's name in a reply or refusal, or an empty string if it is missing or invalid."""
    report = message.content.get("report") if message.has_content() else None
    name = report.get("client") if isinstance(report, ConfigRecord) else None
    return name if isinstance(name, str) and plain_name(name) else ""


STYPE = "fedhet.raw"
LONGEST_REASON = 2000  # largest number of characters of a failure's reason, in messages and logs
STOPPED = "The actor is dead because its owner has died"  # Ray's words if a simulation is stopped while a client works
LONGEST_AXIS = 2**24  # largest length of an axis of an array without values
_name_of: Callable[[np.dtype[Any]], str] = cache(str)  # NumPy formats a dtype's name anew for every array
RESERVED = frozenset({"values", "request", "metrics", "report"})  # names of records that groups of arrays cannot have


class Encoder:
    """A converter of payloads to Flower records; a group of arrays that several clients receive is encoded once."""

    def __init__(self, *, flower: bool = False) -> None:
        self._flower = flower
        self._done: dict[int, tuple[Arrays, ArrayRecord]] = {}

    def __call__(self, payload: Payload) -> RecordDict:
        """Return the record of a payload (arrays and values); raises a ValueError for a reserved name of arrays."""
        if taken := RESERVED & payload.arrays.keys():
            raise ValueError(f"rename the arrays {', '.join(sorted(taken))}: fedhet's own records have these names")
        record: dict[str, Any] = {name: self._record(name, group) for name, group in payload.arrays.items()}
        if payload.values:
            record["values"] = ConfigRecord(payload.values)
        return filled(RecordDict(), record)

    def _record(self, name: str, group: Arrays) -> ArrayRecord:
        # The group is kept, so that no other object gets its id.
        if id(group) not in self._done:
            if not isinstance(group, Mapping) or not all(
                isinstance(array, np.ndarray | np.generic) for array in group.values()
            ):
                raise FedhetError(f"arrays[{name!r}] of a payload must be a dict of NumPy arrays by name")
            self._done[id(group)] = (group, encode_arrays(group, flower=self._flower))
        return self._done[id(group)][1]


class Received(dict[str, Any]):
    """Entries of a message by name; a name that is missing raises a WireError instead of a KeyError."""

    def __missing__(self, name: str) -> Any:
        raise WireError(f"the message lacks {name!r}: use one version of fedhet at the server and at all nodes")


def decode(record: RecordDict) -> Payload:
    """Return the payload in a record, with arrays as read-only views; raise a WireError if the record is damaged."""
    arrays = Received(
        {name: Received(decode_arrays(group)) for name, group in record.items() if isinstance(group, ArrayRecord)}
    )
    values = record["values"] if "values" in record else ConfigRecord()
    if RESERVED & arrays.keys() or not isinstance(values, ConfigRecord):
        raise WireError("the message's records have wrong types: send values in a ConfigRecord, arrays in ArrayRecords")
    return Payload(arrays, Received(values))


def decode_arrays(record: ArrayRecord) -> Arrays:
    """Return the arrays of a record, from raw bytes or Flower's format; raises a WireError if they cannot be read."""
    arrays = {}
    for name, array in record.items():
        try:
            arrays[name] = _decode(array)
        except (ValueError, TypeError, EOFError, OverflowError, SyntaxError) as error:
            raise WireError(f"array {name[:100]!r} cannot be read: {error}; use flwr.app.Array(values)") from error
    return arrays


def encode_arrays(arrays: Arrays, *, flower: bool = False) -> ArrayRecord:
    """Return a record of arrays by name, in Flower's format if `flower`, else as raw bytes."""
    if flower:
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
    raw = {name: array_of(_name_of(each.dtype), each.shape, STYPE, each.tobytes()) for name, each in arrays.items()}
    return filled(ArrayRecord(), raw)


def _decode(array: Array) -> np.ndarray[Any, Any]:
    dtype = DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(f"its dtype is {array.dtype[:50]!r}, but must be one of {', '.join(DTYPES)}")
    if array.stype != STYPE:
        return _from_flower(array, dtype)
    _check_size(array.shape, dtype, len(array.data))
    if not array.data:  # frombuffer refuses an empty buffer
        return np.empty(array.shape, dtype)
    return np.frombuffer(array.data, dtype).reshape(array.shape)


def _from_flower(array: Array, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    source = io.BytesIO(array.data)
    version = np.lib.format.read_magic(source)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, actual = read(source)
    if (shape, actual) != (array.shape, dtype):
        raise ValueError(f"its data are {actual}{list(shape)}, but its dtype and shape say {dtype}{list(array.shape)}")
    _check_size(shape, dtype, len(array.data) - source.tell())
    # Flower keeps the order of arrays in memory, which raw bytes do not, and by which products round differently.
    return np.asarray(array.numpy(), order="C")


def _check_size(shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> None:
    # Memory could be allocated for a long axis of an array without values.
    wrong = len(shape) > 32 or any(not 0 <= length <= max(size, LONGEST_AXIS) for length in shape)
    if wrong or math.prod(shape) * dtype.itemsize != size:
        needed = math.prod(shape[:32]) * dtype.itemsize
        raise ValueError(f"its data have {size} bytes, but {dtype}{list(shape[:32])} (up to 32 axes) has {needed}")
