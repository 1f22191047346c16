"""Strategies of Flower's that go around another one, such as those for differential privacy."""

from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedhet.errors import ConfigError
from fedhet.flower.insides import wrapper_of
from fedhet.method import Traits
from fedhet.options import Config
from fedhet.wire import Payload, Spec


def check_hooks(
    strategy: Strategy,
    method: str,
    traits: Traits,
    specs: Iterable[Spec],
    arrays: ArrayRecord,
    config: Config,
    payloads: Mapping[str, Payload],
) -> None:
    """Check before anything is trained that a wrapper around a strategy, if there is one, can work on what is sent.

    To be called by a hook of the strategy's. A wrapper compares what a client sends with the arrays that it was given
    itself, one by one: so there must be one shared model, averaged, of floating arrays, and nothing beside it.

    Raises:
        ConfigError: it cannot, why, and what would do.
    """
    if (wrapper := wrapper_of(strategy)) is None:
        return
    name, kinds = type(wrapper).__name__, list(specs)
    if not traits.shares.averaged or traits.networks == "widths" or traits.public != "none" or not all(kinds):
        raise ConfigError(
            f"{name} works on one model that all clients share and the server averages, and {method} has none: "
            "use fedavg, fedprox, fedrep or lg-fedavg under it"
        )
    if any(list(spec) != list(kinds[0]) for spec in kinds):
        raise ConfigError(f"{name} needs the same arrays of all clients, and under {method} theirs differ")
    if config.wire_dtype != "float32":
        raise ConfigError(f"{name} needs wire-dtype = float32, not {config.wire_dtype}")
    if whole := [key for key, (_, dtype) in kinds[0].items() if not dtype.startswith("float")]:
        raise ConfigError(f"{name} cannot clip {whole[0]}, which holds whole numbers: set batch-norm = local")
    if list(arrays) != list(kinds[0]):
        further = ", ".join([key for key in arrays if key not in kinds[0]][:2])
        raise ConfigError(
            f"{name} compares with initial_arrays one by one, so they must be what {method}'s clients share, in its "
            f"order: {', '.join(list(kinds[0])[:2])}, ... ({len(kinds[0])} arrays)"
            + (f"; leave out {further}" if further else "")
        )
    if any(set(payload.arrays) != {"model"} or payload.values for payload in payloads.values()):
        raise ConfigError(f"{name} works on the shared model alone, and {method} sends its clients more")
