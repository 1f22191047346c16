"""A node: what its config says of it, and how far what the server sends counts there.

What would become a path counts only from a server on the same machine (a simulation); elsewhere it is the node that
says where its data and its state lie.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

from flwr.app import Context, Message

from fedhet import config as configuration
from fedhet.client.leaving import KINDS
from fedhet.errors import ConfigError, FedhetError, nearest
from fedhet.files import plain_name
from fedhet.machine import proof
from fedhet.options import Config, listed
from fedhet.population import ClientInfo
from fedhet.wire import Request

NODE_KEYS = ("data", "device", "state-dir", "disclose-architecture", "threads-per-client")
"""Settings that a node may make for itself, in its node config."""

PATHS = ("data", "shared-data", "state-dir", "out")
"""Settings that become paths."""


def name_of(context: Context) -> str:
    """The client's own name: its `name`, or else its partition id, which it keeps when its node comes back."""
    config = context.node_config
    return str(config.get("name", config.get("partition-id", context.node_id)))


def partition_of(context: Context) -> tuple[int, int] | None:
    """Its partition id and the number of partitions; None where the node config has none."""
    config = context.node_config
    known = "partition-id" in config and "num-partitions" in config
    return (int(config["partition-id"]), int(config["num-partitions"])) if known else None


def allowed(context: Context) -> frozenset[str] | None:
    """The kinds of what may leave this node (`allow` in its node config, separated by commas); None for all.

    Raises:
        ConfigError: there is no such kind.
    """
    if "allow" not in context.node_config:
        return None
    kinds = frozenset(listed(str(context.node_config["allow"])))
    if unknown := sorted(kinds - {*KINDS}):
        raise ConfigError(nearest("kind in the node's allow", unknown[0], KINDS))
    return kinds


@contextmanager
def memory_limited(context: Context) -> Iterator[None]:
    """Within it this process has no more memory than `memory-limit` in the node config says, in GB; on Linux.

    It is the process's data, all that it has loaded and imported included, that is limited (`RLIMIT_DATA`).

    Raises:
        ConfigError: the limit is no number above 0.
        FedhetError: more was needed.
    """
    if "memory-limit" not in context.node_config:
        yield
        return
    import resource  # which not every system has

    told = context.node_config["memory-limit"]
    try:
        most = int(float(told) * 1e9)
    except (ValueError, OverflowError):
        most = 0
    if most <= 0:
        raise ConfigError(f"the node's memory-limit is {told!r}, must be a number of GB above 0")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch has no MemoryError for the CPU
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise FedhetError(f"it needs more memory than its node allows (memory-limit = {told} GB)") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def opened(message: Message, context: Context) -> tuple[ClientInfo, Request]:
    """Who is asked, with the configuration that came and the node's own settings; and what.

    Raises:
        WireError: the message is not that of fedhet's server.
        ConfigError: the node's name cannot be that of a file, or its own settings are none.
    """
    request, settings = Request.read(message.content)
    here = bool(request.here) and request.here == proof(settings)
    if not here and not request.run:  # a server elsewhere that relies on a folder of its own choice
        request = replace(request, run=hashlib.sha256(settings.encode()).hexdigest()[:12])
    node, name = dict(context.node_config), name_of(context)
    if not plain_name(name):
        raise ConfigError(f"this node's name {name!r} cannot be that of a file: give it another one")
    place, partitions = node.get("partition-id"), node.get("num-partitions")
    info = ClientInfo(
        name=name,
        partition_id=None if place is None else int(place),
        num_partitions=None if partitions is None else int(partitions),
        config=_settings(settings, here, tuple((key, node[key]) for key in NODE_KEYS if key in node)),
        node_config=node,
    )
    return info, request


@lru_cache(maxsize=256)
def _settings(text: str, here: bool, own: tuple[tuple[str, Any], ...]) -> Config:
    config = configuration.parse(text)
    elsewhere = {} if here else dict.fromkeys(PATHS, "")
    if not own and all(config.flat()[key] == "" for key in elsewhere):
        return config
    return configuration.resolve({**config.flat(), **elsewhere, **dict(own)}, strict=False, trusted=False)
