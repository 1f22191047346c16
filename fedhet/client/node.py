"""A node's config, and the run's configuration on the node.

Paths in a server's request are used only if the server runs on the same machine or cluster (a simulation). Otherwise,
the node config names the folders for data and state.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedhet.client.policy import Policy, Refused
from fedhet.config import configuration
from fedhet.config.client_setup import ClientInfo
from fedhet.errors import ConfigError
from fedhet.flower import ConfigRecord, Context, Message, read_request
from fedhet.messages import Request
from fedhet.methods import registry
from fedhet.methods.options import Config, keys_about, keys_that
from fedhet.utils.files import plain_name, state_folder
from fedhet.utils.machine import proof

SIZE = "fedhet.size"
"""Record of a node's context with the measured size of its client (`fedhet.client.submodel`)."""

PINNED = "fedhet.split"
"""Record of a node's context with the settings by which its data are split in this run."""


def name_of(context: Context) -> str:
    """Return the client's name: `name` or else `partition-id` of the node config, or else Flower's node id."""
    config = context.node_config
    return str(config.get("name", config.get("partition-id", context.node_id)))


def opened(
    message: Message,
    context: Context,
    *,
    in_cluster: bool = False,
    settings: Callable[[ClientInfo], dict[str, Any]] | None = None,
) -> tuple[ClientInfo, Request, Policy]:
    """Read a message: return the client's identity and configuration, the server's request, and the node's policy.

    Nothing is loaded or computed for a message that the policy refuses. `in_cluster` says whether this process
    simulates clients on a Ray cluster of several machines.

    Raises:
        WireError: the message is not from fedhet's server.
        ConfigError: the node config is invalid, or a cluster's machine lacks the folder for the clients' state.
        Refused: the policy refuses the method, or the request splits the node's data differently than the run so far.
    """
    request, text = read_request(message.content)
    proven = bool(request.here) and hmac.compare_digest(request.here.encode(), proof(text).encode())
    here = proven or in_cluster  # the server has started this process
    policy = Policy.of(context.node_config, deployed=not here)
    if not here and not request.run:  # a server elsewhere that relies on a folder of its own choice
        request = replace(request, run=hashlib.sha256(text.encode()).hexdigest()[:12])
    node, name = _with_data(context.node_config), name_of(context)
    node |= dict(context.state.config_records.get(SIZE, {}))
    if not plain_name(name):
        raise ConfigError(f"this node's name {name!r} is not a valid file name: set another name in the node config")
    place = _whole(node, "partition-id"), _whole(node, "num-partitions")
    info = ClientInfo(name, *place, _configured(text, node, here=here), node)
    if settings is not None:
        node |= settings(info)
        info = replace(info, config=_configured(text, node, here=here))
    config = info.config
    if request.epochs and not request.closing and config.local_epochs != configuration.parse(text).local_epochs:
        request = replace(request, epochs=config.local_epochs)
    if in_cluster and not (folder := state_folder(config.state_dir, request.run)).is_dir():
        raise ConfigError(
            f"the folder {folder} for the clients' state does not exist on this machine: a simulation on several "
            "machines needs a run directory (--out) that all of them share"
        )
    policy.check_method(config.method_name, registry.traits(config))
    if policy.deployed:
        _pin(context, {key: value for key, value in config.flat().items() if key in (*keys_about("data"), "seed")})
    return info, request, policy


def _configured(text: str, node: Mapping[str, Any], *, here: bool) -> Config:
    """Return the configuration in `text` with a node's settings; raises a ConfigError for too many `local-epochs`."""
    chosen = tuple((key, node[key]) for key in keys_that("at_node") if key in node)
    config, server = configuration.at_node(text, chosen, here=here), configuration.parse(text)
    if config.local_epochs > (most := max(server.local_epochs, server.max_local_epochs)):
        raise ConfigError(
            f"this node's local-epochs = {config.local_epochs} is above the server's bound of {most}: set fewer, or "
            "ask for a run with a larger max-local-epochs"
        )
    return config


def _whole(node: Mapping[str, Any], name: str) -> int | None:
    """Return a number from the node config, or None if it is not set; raises a ConfigError if it is not whole."""
    value = node.get(name)
    if value is not None and not str(value).isdecimal():
        raise ConfigError(f"the node's {name} must be a whole number of at least 0, not {value!r}")
    return None if value is None else int(value)


def _with_data(node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node config with its data folder under both `data` and Flower's usual name `data-path`."""
    places = [node_config[name] for name in ("data", "data-path") if name in node_config]
    if len({*places}) > 1:
        raise ConfigError("the node config has different folders for data and data-path: set only one of them")
    return {**node_config, **{name: path for path in places for name in ("data", "data-path")}}


def _pin(context: Context, now: dict[str, Any]) -> None:
    """Store how a run splits the node's data, and refuse another split, since two could disclose single examples."""
    if PINNED not in context.state:
        context.state[PINNED] = ConfigRecord(now)
    kept = context.state.config_records[PINNED]
    if changed := [key for key, value in now.items() if kept[key] != value]:
        raise Refused(
            f"the split of the node's data is fixed within a run, but the request has another {', '.join(changed)}: "
            "start another run"
        )
