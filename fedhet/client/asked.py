"""Who is asked, for what, with which settings, and where it computes: what a message and its node say."""

import logging
from functools import cache, lru_cache
from typing import Any

import torch
from flwr.app import Context, Message

from fedhet import config as configuration
from fedhet.data import Examples
from fedhet.options import Config
from fedhet.population import ClientInfo
from fedhet.wire import Request

log = logging.getLogger("flwr").getChild("fedhet")

NODE_KEYS = ("data", "device", "state-dir", "disclose-architecture")
"""Settings that a node may make for itself, in its node config."""


@cache
def tell(reason: str) -> None:
    """Log what is wrong, once a process."""
    log.error("%s", reason)


def name_of(context: Context) -> str:
    """The client's own name: its `name`, or else its partition id, which it keeps when its node comes back."""
    node = context.node_config
    return str(node.get("name", node.get("partition-id", context.node_id)))


def partition_of(context: Context) -> tuple[int, int] | None:
    """The node's partition and how many there are; None where it does not say."""
    node = context.node_config
    known = "partition-id" in node and "num-partitions" in node
    return (int(node["partition-id"]), int(node["num-partitions"])) if known else None


def opened(message: Message, context: Context) -> tuple[ClientInfo, Request]:
    """Who is asked, with the configuration that came and the node's own settings; and what."""
    request, settings = Request.read(message.content)
    node = dict(context.node_config)
    place, partitions = node.get("partition-id"), node.get("num-partitions")
    info = ClientInfo(
        name=name_of(context),
        partition_id=None if place is None else int(place),
        num_partitions=None if partitions is None else int(partitions),
        config=_settings(settings, tuple((key, node[key]) for key in NODE_KEYS if key in node)),
        node_config=node,
    )
    return info, request


@lru_cache(maxsize=256)
def _settings(text: str, own: tuple[tuple[str, Any], ...]) -> Config:
    config = configuration.parse(text)
    return configuration.resolve({**config.flat(), **dict(own)}, strict=False, trusted=False) if own else config


def examples_to(examples: Examples | None, device: torch.device) -> Examples | None:
    """The examples on a device."""
    return None if examples is None else Examples(examples.inputs.to(device), examples.labels.to(device))
