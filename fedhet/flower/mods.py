"""Checks for Flower's mods around a client and wrappers around a strategy, such as those for differential privacy."""

import math
from collections.abc import Sequence

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable

from fedhet.errors import ConfigError
from fedhet.flower.records import decode_arrays, encode_arrays
from fedhet.messages import Spec
from fedhet.methods.method import Traits


def check_mods(mods: object, argument: str = "mods") -> None:
    """Raise a ConfigError unless `mods` are a list of functions that work with Message-API strategies."""
    if not isinstance(mods, list | tuple) or not all(callable(mod) for mod in mods):
        raise ConfigError(f"{argument} must be a list of Flower mods, such as [fixedclipping_mod], not {mods!r:.80}")
    if secure := [mod.__name__ for mod in mods if getattr(mod, "__name__", "") in ("secagg_mod", "secaggplus_mod")]:
        raise ConfigError(
            f"{secure[0]} needs the workflow of Flower's older API, which fedhet's strategies cannot run: leave it "
            "out; LocalDpMod adds noise before anything is sent"
        )


def clips(mod: object) -> bool:
    """Return whether a mod is one of Flower's mods that clip updates, which apply to training messages only."""
    return isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod)


def noise_multiplier(mods: Sequence[object]) -> float:
    """Return the greatest noise multiplier (standard deviation / clipping norm) of all `LocalDpMod`s, or 0."""

    def of(mod: LocalDpMod) -> float:
        return mod.sensitivity * math.sqrt(2 * max(0, math.log(1.25 / mod.delta))) / mod.epsilon / mod.clipping_norm

    return max((of(mod) for mod in mods if isinstance(mod, LocalDpMod) and mod.epsilon and mod.delta), default=0.0)


def in_flowers_format(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Convert a message's arrays to Flower's format, for the mods that follow this one."""
    for name, group in message.content.array_records.items():
        message.content[name] = encode_arrays(decode_arrays(group), flower=True)
    return call_next(message, context)


def check_one_model(name: str, method: str, traits: Traits, specs: Sequence[Spec]) -> None:
    """Check that clients share one averaged model of floating-point arrays, since nothing else can be clipped.

    Otherwise, raises a ConfigError that names the mod or wrapper `name`; `specs` describe each client's shared arrays.
    """
    others = traits.alike in ("widths", "parts") or traits.public != "none" or traits.other_arrays
    if not traits.shares.averaged or others or not all(specs):
        raise ConfigError(
            f"{name} needs one model that all clients share and the server averages, which {method} does not have: "
            "use fedavg, fedprox, fedrep or lg-fedavg with it"
        )
    if any(list(spec) != list(specs[0]) for spec in specs):
        raise ConfigError(
            f"{name} needs shared arrays of equal names and shapes, which differ under {method}: "
            "give all clients the same architecture"
        )
    if whole := [key for key, (_, dtype) in specs[0].items() if not dtype.startswith("float")]:
        raise ConfigError(f"{name} cannot clip the array {whole[0]}, which holds integers: set batch-norm = local")


def check_wrapper(name: str, method: str, traits: Traits, specs: Sequence[Spec], arrays: ArrayRecord) -> None:
    """Check before training that a wrapper for differential privacy, `name`, can process the arrays that clients send.

    The wrapper compares the arrays of each reply by position with `arrays`, which the strategy starts from. A
    ConfigError is raised unless clients share one model of these arrays, and receive nothing else.
    """
    shared = list(specs[0])
    check_one_model(name, method, traits, specs)
    if list(arrays) != shared:
        further = ", ".join([key for key in arrays if key not in shared][:2])
        raise ConfigError(
            f"{name} compares arrays with initial_arrays by position: initial_arrays must be the arrays that clients "
            f"of {method} share, in their order: {', '.join(shared[:2])}, ... ({len(shared)} arrays)"
            + (f"; leave out {further}" if further else "")
        )
