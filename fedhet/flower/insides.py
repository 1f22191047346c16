"""Access to undocumented parts of Flower; each has a test, which fails if a new version of Flower changes it."""

import gc
import json
import math
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.common.constant import ErrorCode
from flwr.common.logger import update_console_handler
from flwr.server.strategy.aggregate import aggregate_krum, aggregate_median, aggregate_trimmed_avg
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedhet.errors import ConfigError

R = TypeVar("R", ArrayRecord, MetricRecord, ConfigRecord)

RUN_ID = 1
SERVER_ID = 1

_NO_HANDLER = "function registered with name"


def array_of(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    """Create a Flower `Array` without its constructor, which takes ten times as long."""
    array = Array.__new__(Array)
    array.__dict__.update(dtype=dtype, shape=shape, stype=stype, data=data)
    return array


def filled(record: R, values: Mapping[str, object]) -> R:
    """Put values into a new Flower record and return it, without the checks and copies that Flower makes."""
    record.__dict__["_data"].update(values.items())
    return record


def identify(message: Message, ids: Iterator[int]) -> str:
    """Set a message's id, as a SuperLink does, and return the id."""
    key = str(next(ids))
    message.metadata.__dict__["_message_id"] = key
    return key


def colour_terminals_only() -> None:
    """Turn off colours in Flower's log unless the log goes to a terminal."""
    update_console_handler(colored=sys.stderr.isatty())


def be_server() -> None:
    """Make Flower treat messages of this process as messages from the server of a run."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, SERVER_ID


def only_run() -> Run:
    """Return Flower's description of a run (`Run`) of which only the run id is set."""
    return Run.create_empty(RUN_ID)


def failure(message: Message, reason: str) -> Message:
    """Return the error reply that Flower's runtime sends for a ClientApp that raised."""
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def no_handler(reason: str) -> bool:
    """Return whether a ClientApp failed for lack of a handler for the message, which every ClientApp of fedhet has."""
    return _NO_HANDLER in reason


def wrapper_of(strategy: Strategy) -> Strategy | None:
    """Return the Flower strategy that wraps this one, such as one for differential privacy, or None.

    Raises a ConfigError if several strategies wrap it, since only one of them can be running.
    """
    # Flower's wrappers hold the strategy in their attribute `strategy`, and do not tell it.
    attributes = [each for each in gc.get_referrers(strategy) if isinstance(each, dict)]
    holders = gc.get_referrers(strategy, *attributes)
    wrappers = [each for each in holders if isinstance(each, Strategy) and getattr(each, "strategy", None) is strategy]
    if len(wrappers) > 1:
        names = ", ".join(sorted({type(each).__name__ for each in wrappers}))
        raise ConfigError(f"{len(wrappers)} wrappers ({names}) contain one strategy object: create a strategy for each")
    return wrappers[0] if wrappers else None


def simulated(grid: Grid | None) -> bool:
    """Return whether Flower simulates the clients of a grid on this machine."""
    return type(grid).__name__ == "InMemoryGrid"


def cluster_machine() -> str:
    """Return this machine's name if it simulates clients in a Ray cluster of several machines, else an empty string."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return ""
    return platform.node() if sum(node["Alive"] for node in ray.nodes()) > 1 else ""


def started_run(output: str) -> str | None:
    """Return the id of the run from the output of `flwr run`, or None if no run has started yet."""
    line = re.search(r"Successfully started run (\d+)", output)
    return line[1] if line else None


def status_of_run(output: str) -> tuple[str, str]:
    """Return a run's status and the details of the status, from the output of `flwr list --format json`."""
    try:
        row = json.loads(output)["runs"][0]
        return str(row["status"]), str(row.get("status-details") or "")
    except (ValueError, LookupError, TypeError):
        return "unknown", ""


def robust(clients: list[list[np.ndarray[Any, Any]]], rule: str, share: float) -> list[np.ndarray[Any, Any]]:
    """Aggregate the clients' arrays by a rule that tolerates Byzantine clients; all clients have the same weight.

    Args:
        clients: the arrays of each client, with equal shapes for all clients.
        rule: `median` or `trimmed-mean` of each entry (Yin et al., ICML 2018); `krum` or `multi-krum`, which select
            whole clients (Blanchard et al., NeurIPS 2017).
        share: fraction of Byzantine clients to tolerate; the median ignores it.
    """
    count, weighted = len(clients), [(arrays, 1) for arrays in clients]
    # At least one if any are expected, but fewer than half, since no rule tolerates more.
    byzantine = min(math.ceil(share * count), (count - 1) // 2)
    if rule == "median":
        return aggregate_median(weighted)
    if rule == "trimmed-mean":
        return aggregate_trimmed_avg(weighted, (byzantine + 0.1) / count)
    return aggregate_krum(weighted, byzantine, 0 if rule == "krum" else count - byzantine)
