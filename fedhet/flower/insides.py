"""Access to undocumented parts of Flower; each has a test, which fails if a new version of Flower changes it."""

import _thread
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from click import ClickException
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import parse_config_args
from flwr.common.constant import ErrorCode
from flwr.common.logger import update_console_handler
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.server.strategy.aggregate import aggregate_krum as aggregate_krum
from flwr.server.strategy.aggregate import aggregate_median as aggregate_median
from flwr.server.strategy.aggregate import aggregate_trimmed_avg as aggregate_trimmed_avg
from flwr.serverapp import Grid
from flwr.serverapp.strategy.dp_adaptive_clipping import DifferentialPrivacyAdaptiveBase
from flwr.serverapp.strategy.dp_fixed_clipping import DifferentialPrivacyFixedClippingBase
from flwr.supercore.differential_privacy import KEY_NORM_BIT
from flwr.supercore.task_identity import TaskIdentity

from fedhet.errors import ConfigError
from fedhet.utils.text import log

R = TypeVar("R", ArrayRecord, MetricRecord, ConfigRecord, RecordDict)

RUN_ID = SERVER_ID = 1

ANSWERED = 10.0  # seconds in which a Ray cluster must answer

NORM_BIT = KEY_NORM_BIT
"""Name of a metric of `adaptiveclipping_mod` that Flower's wrapper reads: whether a client's update was clipped."""

LEGACY = (
    "its ClientApp is made from a client_fn (Client, NumPyClient): move fit and evaluate into functions @app.train() "
    "and @app.evaluate() of a ClientApp(), and add the line app = fedhet.wrap(app, model)"
)

PrivateWrapper = DifferentialPrivacyAdaptiveBase | DifferentialPrivacyFixedClippingBase
"""A Flower strategy for differential privacy, which wraps another strategy."""


def array_of(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """Create a Flower `Array` from bytes in the format `stype` without its constructor, which is ten times slower."""
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return array


def filled(record: R, values: Mapping[str, object]) -> R:
    """Put values by key into a Flower record and return it, without the checks and copies that Flower makes."""
    record.__dict__["_data"].update(values.items())
    return record


def to_bytes(content: RecordDict) -> bytes:
    """Return the bytes of a message's content; equal contents have equal bytes."""
    return recorddict_to_proto(content).SerializeToString(deterministic=True)


def from_bytes(content: bytes) -> RecordDict:
    """Return a message's content from its bytes (see `to_bytes`)."""
    return recorddict_from_proto(ProtoRecordDict.FromString(content))


def identify(message: Message, ids: Iterator[int]) -> str:
    """Set a message's id to the next number of `ids`, as a SuperLink does, and return the id."""
    key = str(next(ids))
    message.metadata.__dict__["_message_id"] = key
    return key


def colour_terminals_only() -> None:
    """Turn off colours in Flower's log unless the log goes to a terminal."""
    update_console_handler(colored=sys.stderr is not None and sys.stderr.isatty())


def be_server() -> None:
    """Make Flower treat messages of this process as messages from the server of a run."""
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = RUN_ID
    TaskIdentity.node_id = SERVER_ID


def failure(message: Message, reason: str) -> Message:
    """Return an error reply with `reason`, as Flower's runtime sends it if a ClientApp raises an exception."""
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def hash_of_app() -> str:
    """Return a hash (SHA-256) of the files of the app that Flower has loaded in this process, or `installed`.

    Flower adds the folder of an app, in FLWR_HOME/apps, to the search path. A ClientApp cannot see the bundle's hash.
    """
    app = next((path for path in map(Path, sys.path) if path.parent.name == "apps"), None)
    if app is None:
        return "installed"
    files = [path for path in sorted(app.rglob("*")) if path.is_file() and path.parent.name != "__pycache__"]
    parts = [f"{path.relative_to(app).as_posix()}:{sha256(path.read_bytes()).hexdigest()}" for path in files]
    return sha256("\n".join(parts).encode()).hexdigest()


def no_handler(reason: str) -> bool:
    """Return whether the `reason` of an error is that the ClientApp has no function for the message."""
    return "function registered with name" in reason


def mods_of(app: ClientApp) -> list[Any]:
    """Return the mods around a ClientApp's train function; raises a ConfigError for an app from a `client_fn`."""
    if app._call is not None:
        raise ConfigError(LEGACY)
    function: Any = app._registered_funcs.get("train.default")
    mods = []
    while getattr(function, "__qualname__", "") == "make_ffn.<locals>.wrap_ffn.<locals>.new_ffn":
        inner = inspect.getclosurevars(function).nonlocals
        mods.append(inner["_mod"])
        function = inner["_ffn"]
    return mods or [*app._mods]


def private_wrapper_of(strategy: object) -> PrivateWrapper | None:
    """Return the differential privacy wrapper that is calling a method of `strategy`, or None.

    A wrapper passes nothing to these methods that shows its noise and norm, which the accounting needs, so it is looked
    up in the frames of the call.
    """
    frame = inspect.currentframe()
    while frame:
        caller = frame.f_locals.get("self")
        if isinstance(caller, PrivateWrapper) and caller.strategy is strategy:
            return caller
        frame = frame.f_back
    return None


def simulated(grid: Grid | None) -> bool:
    """Return whether a grid belongs to a simulation of Flower's runtime."""
    return type(grid).__name__ == "InMemoryGrid"


def check_cluster_of(grid: Grid) -> None:
    """If `grid` belongs to a simulation whose Ray cluster does not answer, log that, end the simulation and raise."""
    if not simulated(grid):
        return
    try:
        check_cluster()
    except ConfigError as error:
        log.error("%s", error)
        _thread.interrupt_main()  # the main thread waits for Ray
        raise


def check_cluster() -> None:
    """Raise a ConfigError if no Ray cluster answers at the address in `RAY_ADDRESS`; Ray waits ten minutes for it."""
    import grpc  # type: ignore[import-untyped]

    address = given = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local") or os.environ.get("RAY_USE_TLS"):
        return
    if address == "auto":
        from ray._private.services import find_gcs_addresses

        address = next(iter(find_gcs_addresses()), "auto")
    with grpc.insecure_channel(address.removeprefix("ray://")) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWERED)
        except grpc.FutureTimeoutError as error:
            raise ConfigError(
                f"no Ray cluster answers at RAY_ADDRESS = {given}: start it (ray start --head) and set its HOST:PORT, "
                "or unset RAY_ADDRESS to simulate on this machine"
            ) from error


def node_config(text: str) -> dict[str, Any]:
    """Parse a node config as `flower-supernode` does; raise a ConfigError for what it refuses or ignores."""
    # This is Flower's own pattern. Flower ignores text that does not match, such as `min-examples = 20`.
    ignored = "" if text.endswith(".toml") else re.sub(r"\S+?=('[^']*'|\"[^\"]*\"|\S+)", "", text).strip()
    try:
        if not ignored:
            return dict(parse_config_args([text]))
        reason = f"Flower would ignore {ignored!r}"
    except (ClickException, OSError, ValueError):
        reason = "Flower cannot read it"
    raise ConfigError(f"the node config cannot be used: {reason}; write KEY='TEXT' KEY=NUMBER, with spaces between")
