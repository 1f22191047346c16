"""Flower's mods around a client: what they read is in Flower's format, and those that clip need one shared model."""

import logging
from collections.abc import Mapping
from functools import lru_cache

from flwr.app import Context, Message
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from fedhet.errors import FedhetError
from fedhet.flower.records import decode_arrays, encode_arrays
from fedhet.method import Traits

log = logging.getLogger("flwr").getChild("fedhet")


@lru_cache(maxsize=8)
def tell(app: object, reason: str) -> None:
    """Log what is wrong with who asks, once for an app."""
    log.error("%s", reason)


def clips(mod: object) -> bool:
    """Whether it is one of Flower's mods that clip what a client trained, and so go around training alone."""
    return isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod)


def in_flowers_format(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The mod in front of others: they read arrays in Flower's format only."""
    for name, group in message.content.array_records.items():
        message.content[name] = encode_arrays(decode_arrays(group), flower=True)
    return call_next(message, context)


def check_clipped(method: str, traits: Traits, shared: Mapping[str, Tensor]) -> None:
    """Find out in the handshake whether a clipping mod can do its work: on one shared model and nothing beside it.

    Raises:
        FedhetError: it cannot, why, and what would do.
    """
    if traits.public != "none" or not traits.shares.averaged or not shared:
        raise FedhetError(
            f"a mod of Flower's clips the one model that a client gets and sends, and under {method} it sends other "
            "things: use fedavg, fedprox, fedrep or lg-fedavg with it, or leave it out"
        )
    if traits.networks == "widths":
        raise FedhetError(f"a mod of Flower's clips arrays of one shape, and {method} changes them: leave it out")
    if whole := [name for name, tensor in shared.items() if not tensor.is_floating_point()]:
        raise FedhetError(
            f"a mod of Flower's cannot clip {whole[0]}, which holds whole numbers: set batch-norm = local"
        )
