"""A node's config, and the run's configuration at the node.

Paths are taken from a server on the same machine or cluster only (a simulation); elsewhere the node names the places of
data and state.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedhet.client.policy import Policy, Refused
from fedhet.config import configuration
from fedhet.config.client_setup import ClientInfo
from fedhet.errors import ConfigError
from fedhet.flower import ConfigRecord, Context, Message, read_request
from fedhet.messages import Request
from fedhet.methods import registry
from fedhet.methods.options import keys_about, keys_that
from fedhet.utils.files import plain_name, state_folder
from fedhet.utils.machine import proof

SIZE = "fedhet.size"
"""Record of a node's context with the measured size of its client (`fedhet.client.submodel`)."""

PINNED = "fedhet.split"
"""Record of a node's context with the settings by which its data are split in this run."""


def name_of(context: Context) -> str:
    """Return the client's name: its `name`, or else its partition id, which it keeps when its node comes back."""
    config = context.node_config
    return str(config.get("name", config.get("partition-id", context.node_id)))


def opened(message: Message, context: Context, *, in_cluster: bool = False) -> tuple[ClientInfo, Request, Policy]:
    """Return the client with its configuration, the request, and the node's policy.

    Nothing is loaded or computed for a message that the policy refuses.

    Args:
        message: the received message.
        context: the node's context.
        in_cluster: whether this process simulates clients on a Ray cluster of several machines.

    Raises:
        WireError: the message is not from fedhet's server.
        ConfigError: the node's name cannot be a file name, or its settings are invalid; this machine of a cluster lacks
            the folder of the clients' state.
        Refused: the policy refuses the method, or the run would split the node's data in another way than before.
    """
    request, settings = read_request(message.content)
    proven = bool(request.here) and hmac.compare_digest(request.here.encode(), proof(settings).encode())
    here = proven or in_cluster  # the server has started this process
    policy = Policy.of(context.node_config, deployed=not here)
    if not here and not request.run:  # a server elsewhere that relies on a folder of its own choice
        request = replace(request, run=hashlib.sha256(settings.encode()).hexdigest()[:12])
    node, name = _with_data(context.node_config), name_of(context)
    node |= dict(context.state.config_records.get(SIZE, {}))
    if not plain_name(name):
        raise ConfigError(f"this node's name {name!r} cannot be that of a file: give it another one")
    config = configuration.at_node(
        settings, tuple((key, node[key]) for key in keys_that("at_node") if key in node), here=here
    )
    if in_cluster and not (folder := state_folder(config.state_dir, request.run)).is_dir():
        raise ConfigError(
            f"there is no folder {folder}, where clients keep their state: a simulation on several machines needs a "
            "run directory (--out) that all of them share"
        )
    policy.check_method(config.method_name, registry.traits(config))
    if policy.deployed:
        _pin(context, {key: value for key, value in config.flat().items() if key in (*keys_about("data"), "seed")})
    info = ClientInfo(
        name=name,
        partition_id=_whole(node, "partition-id"),
        num_partitions=_whole(node, "num-partitions"),
        config=config,
        node_config=node,
    )
    return info, request, policy


def _whole(node: Mapping[str, Any], name: str) -> int | None:
    """Return a number of the node's config, or None; raises a ConfigError if it is not a whole number."""
    value = node.get(name)
    if value is not None and not str(value).isdecimal():
        raise ConfigError(f"the node's {name} must be a whole number, from 0")
    return None if value is None else int(value)


def _with_data(node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's config with its data folder under both names, `data` and Flower's usual `data-path`.

    Raises:
        ConfigError: they name different folders.
    """
    places = [node_config[name] for name in ("data", "data-path") if name in node_config]
    if len({*places}) > 1:
        raise ConfigError("the node's config has a data-path, and other data: give one of them")
    return {**node_config, **{name: path for path in places for name in ("data", "data-path")}}


def _pin(context: Context, now: dict[str, Any]) -> None:
    """Store a run's split of the node's data, and refuse another one: two splits would disclose single examples."""
    if PINNED not in context.state:
        context.state[PINNED] = ConfigRecord(now)
    kept = context.state.config_records[PINNED]
    if changed := [key for key, value in now.items() if kept[key] != value]:
        raise Refused(
            f"its data are split as at the beginning of the run until the run ends, and the request has another "
            f"{', '.join(changed)}: start another run"
        )
