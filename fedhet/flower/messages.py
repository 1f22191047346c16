"""Convert requests, replies and refusals to the records of Flower messages and back."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedhet.errors import FedhetError
from fedhet.flower.insides import filled, no_handler
from fedhet.flower.records import Encoder, decode, decode_arrays
from fedhet.messages import Arrays, Fields, LostReply, Payload, Refusal, Reply, Report, Request, WireError
from fedhet.utils.files import plain_name

LONGEST_REASON = 2000
"""Number of characters of a refusal that are kept."""

OURS = ("settings", "request")
"""Entries of a request's record that fedhet's server writes; other entries are for mods and a user's own app."""

NOT_OURS = "its ClientApp is not fedhet's: create the ClientApp with fedhet.make_client_app"


def write_request(
    record: RecordDict, request: Request, settings: str, further: Mapping[str, Any] | None = None
) -> None:
    """Put a request and a run's settings (`Config.text`) into the records of a message.

    `further` are additional values for Flower mods of the clients.
    """
    record["request"] = ConfigRecord({**(further or {}), "settings": settings, "request": request.to_json()})


def read_request(record: RecordDict) -> tuple[Request, str]:
    """Return the request and the settings in the records of a message.

    Raises a WireError if the message is not from a fedhet server, or if it has a name that is not a valid file name.
    """
    request = record.get("request")
    if not isinstance(request, ConfigRecord):
        raise WireError(
            "this ClientApp is fedhet's, but the message is from another strategy: start a fedhet strategy in the "
            "ServerApp, such as fedhet.FedAvg, or fedhet.make_server_app()"
        )
    said = Fields(request, "the request")
    settings = said.text("settings", longest=2**20)
    return Request.from_json(said.text("request", longest=2**16)), settings


def write_reply(reply: Reply | Refusal, *, flower: bool = False) -> RecordDict:
    """Return the records of a reply, with arrays as raw bytes or in Flower's format."""
    if isinstance(reply, Refusal):
        said: dict[str, Any] = {"client": reply.client, "refusal": reply.reason}
        said |= {"lost": reply.lost, "again": reply.again}
        return RecordDict({"report": ConfigRecord(said)})
    record = Encoder(flower=flower)(reply.payload)
    record["metrics"] = filled(MetricRecord(), reply.metrics())
    record["report"] = filled(ConfigRecord(), reply.report.fields())
    return record


def read_reply(message: Message) -> Reply:
    """Return the reply in a message.

    Raises a FedhetError if the message is an error, a refusal, or the reply of a ClientApp that is not fedhet's.
    """
    if message.has_error():
        reason = message.error.reason or f"error code {message.error.code}"
        raise WireError(NOT_OURS) if no_handler(reason) else FedhetError(f"failed: {reason}")
    records = message.content
    report, metrics = records.get("report"), records.get("metrics")
    if not isinstance(report, ConfigRecord):
        raise WireError(NOT_OURS)
    if "refusal" in report:
        reason = str(report["refusal"])
        refusal = (LostReply if report.get("lost") is True else FedhetError)(reason[:LONGEST_REASON])
        refusal.may_pass = report.get("again") is True
        raise refusal
    if not isinstance(metrics, MetricRecord):
        raise WireError("its reply is damaged: the record of metrics is missing")
    return Reply.of(decode(records), metrics, Report.of(report))


def ask_app(
    app: ClientApp, action: str, message: Message, context: Context, sent: Payload, settings: Mapping[str, Any]
) -> tuple[Arrays, dict[str, float]]:
    """Call a user's own ClientApp with a message like Flower's strategies send, and return its arrays and metrics.

    Args:
        app: the user's ClientApp, with functions for `train` and `evaluate`.
        action: `train` or `evaluate`.
        message: the message that the node received; its content is restored afterwards.
        context: the node's context.
        sent: the payload that the client received, with the model in the group `arrays`.
        settings: values for the `config` record, in addition to those from Flower's wrappers or `train_config`.

    Raises:
        WireError: the app has no such function, or its reply has no arrays or metrics.
    """
    content, kind = message.content, message.metadata.message_type
    further = {key: value for key, value in content.config_records["request"].items() if key not in OURS}
    record = Encoder(flower=True)(sent)
    record["config"] = ConfigRecord({**further, **settings})
    message.content, message.metadata.message_type = record, action
    try:
        reply = app(message, context)
    except ValueError as error:
        if no_handler(str(error)):
            raise WireError(f"your ClientApp has no function for {action}: add one with @app.{action}()") from error
        raise
    finally:
        message.content, message.metadata.message_type = content, kind
    arrays = next(iter(reply.content.array_records.values()), None)
    metrics = next(iter(reply.content.metric_records.values()), None)
    if metrics is None or (arrays is None and action == "train"):
        missing = "MetricRecord" if metrics is None else "ArrayRecord"
        raise WireError(f"the {action} function of your ClientApp returned no {missing}: add them to its reply")
    numbers = {str(name): float(value) for name, value in metrics.items() if not isinstance(value, list)}
    return decode_arrays(arrays) if arrays is not None and action == "train" else {}, numbers


def name_in(message: Message) -> str:
    """Return the client's name in a reply or refusal, or an empty string if it is missing or invalid."""
    report = message.content.get("report") if message.has_content() else None
    name = report.get("client") if isinstance(report, ConfigRecord) else None
    return name if isinstance(name, str) and plain_name(name) else ""
