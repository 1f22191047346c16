"""Flower's mods and wrappers, mostly for differential privacy: checks, and the accounting of epsilon and delta."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod
from flwr.serverapp.strategy.dp_fixed_clipping import DifferentialPrivacyFixedClippingBase

from fedhet.errors import ConfigError
from fedhet.flower.insides import PrivateWrapper
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.messages import Arrays, Reply, Spec
from fedhet.methods.method import METRICS, STRUCTURE, Traits
from fedhet.utils.text import log

DELTA = 1e-5  # at which epsilon is reported; it should be well below one over the number of clients
ROUNDING = 0.01  # greatest rounding error in single precision, relative to the clipping norm
NO_MEAN = "the server does not take the mean of models, weighted by examples (aggregation = mean, no clip-norm)"

NoiseMultiplier = Callable[[Mapping[str, Reply], Arrays, Arrays], float | str]
"""A function of a round's replies and the model before and after it: the noise multiplier, or why it is unknown."""


def check_mods(mods: object) -> None:
    """Check that `mods` is a list of Flower mods, and none is for secure aggregation; else raise a ConfigError."""
    if not isinstance(mods, list | tuple) or not all(callable(mod) for mod in mods):
        raise ConfigError(f"mods must be a list of Flower mods, such as [fixedclipping_mod], not {mods!r:.80}")
    if secure := [mod.__name__ for mod in mods if getattr(mod, "__name__", "") in ("secagg_mod", "secaggplus_mod")]:
        raise ConfigError(
            f"mod {secure[0]} needs the workflow of Flower's older API, which fedhet's strategies cannot run: leave "
            "it out, or use LocalDpMod, which adds noise at the client"
        )


def clips(mod: object) -> bool:
    """Return whether a mod is one of Flower's mods that clip a client's update after training."""
    return isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod)


def noise_multiplier(mods: Sequence[object]) -> float:
    """Return the greatest noise multiplier (standard deviation / clipping norm) of any `LocalDpMod` in `mods`, or 0."""

    def of(mod: LocalDpMod) -> float:
        return mod.sensitivity * math.sqrt(2 * max(0, math.log(1.25 / mod.delta))) / mod.epsilon / mod.clipping_norm

    return max((of(mod) for mod in mods if isinstance(mod, LocalDpMod) and mod.epsilon and mod.delta), default=0.0)


def in_flowers_format(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Convert a message's arrays to Flower's format for the next mods, and return the reply; this is a Flower mod."""
    for name, group in message.content.array_records.items():
        message.content[name] = encode_arrays(decode_arrays(group), flower=True)
    return call_next(message, context)


def check_one_model(name: str, method: str, traits: Traits, specs: Sequence[Spec]) -> None:
    """Check that clients share one averaged float model, as the mod or wrapper `name` needs; else raise a ConfigError.

    `traits` are the properties of the `method`; `specs` have shape and dtype of each client's shared arrays by name.
    """
    others = traits.networks in ("widths", "parts") or traits.public != "none" or traits.other_arrays
    if not traits.shares.averaged or others or not all(specs):
        raise ConfigError(
            f"method {method} has no model that all clients share and the server averages, which {name} needs: "
            "use fedavg, fedprox, fedrep or lg-fedavg"
        )
    if any(list(spec) != list(specs[0]) for spec in specs):
        raise ConfigError(
            f"with {method}, clients share arrays of different names or shapes, but {name} needs equal ones: "
            "give all clients the same architecture"
        )
    for key, (_, dtype) in specs[0].items():
        if dtype not in ("float32", "float64"):
            raise ConfigError(
                f"{name} clips only float32 and float64, but the clients' array {key} is {dtype}: convert it, or, if "
                "it is BatchNorm's counter, set batch-norm = local"
            )


def check_wrapper(name: str, method: str, traits: Traits, specs: Sequence[Spec], arrays: ArrayRecord) -> None:
    """Check that the wrapper `name` for differential privacy can process clients' arrays; else raise a ConfigError.

    The wrapper compares the arrays of each reply by position with `arrays`, the strategy's initial arrays. `traits` are
    the properties of the `method`; `specs` have shape and dtype of each client's shared arrays by name.
    """
    shared = list(specs[0])
    check_one_model(name, method, traits, specs)
    if list(arrays) != shared:
        further = ", ".join([key for key in arrays if key not in shared][:2])
        raise ConfigError(
            f"initial_arrays must be the arrays that clients of {method} share, in their order, since {name} compares "
            f"arrays by position: {', '.join(shared[:2])}, ... ({len(shared)} arrays)"
            f"{'; leave out ' * bool(further)}{further}"
        )


class PrivacyLedger:
    """The privacy budget (epsilon) that all runs of a strategy have spent, or the reason why it is `unknown`.

    A round is a Gaussian mechanism. Its noise multiplier is the standard deviation of the noise, divided by the
    greatest change that one client's update can make. Two runs are neighbours if all updates of one client are zero in
    one of them, so participation and numbers of examples count as public. `name` is the wrapper or mod that adds the
    noise, `traits` are the properties of the method, and `earlier` is the ledger of the strategy's earlier runs. `whom`
    is a phrase such as ", from the server, too", to say from whom the budget protects clients.
    """

    def __init__(
        self,
        name: str,
        traits: Traits,
        noise_multiplier: NoiseMultiplier,
        *,
        whom: str = "",
        earlier: "PrivacyLedger | None" = None,
    ) -> None:
        self.name, self._noise_multiplier = name, noise_multiplier
        self._multipliers: list[float] = [*earlier._multipliers] if earlier else []
        shared = "the model" if traits.whole else "the shared part of the model"
        self._note = f"for all examples of a client{whom}; covers {shared}, not metrics or numbers of examples"
        self.unknown: str = earlier.unknown if earlier else ""
        others = [key for key, kind in traits.sends.items() if key != "model" and kind not in (METRICS, STRUCTURE)]
        if others and not self.unknown:
            self.unknown = f"clients also send {', '.join(others)}, which gets no noise"
        if not self.unknown and find_spec("dp_accounting") is None:
            self.unknown = "the package dp-accounting computes it, and is missing: pip install 'fedhet[dp]'"
        if self.unknown:
            self._log()

    def spend(self, replies: Mapping[str, Reply], before: Arrays, after: Arrays) -> None:
        """Add the cost of a round with these `replies` and the shared model `before` and `after` it; log the total."""
        if not self.unknown:
            noise = self._noise_multiplier(replies, before, after)
            if isinstance(noise, str):
                self.unknown = noise
            else:
                self._multipliers.append(noise)
            self._log()

    def spent(self) -> dict[str, Any]:
        """Return a dict: `wrapper` (name), `epsilon` (None if unknown), `delta`, `rounds`, `note` (what is covered)."""
        return {
            "wrapper": self.name,
            "epsilon": None if self.unknown else _epsilon((*self._multipliers,)),
            "delta": DELTA,
            "rounds": None if self.unknown else len(self._multipliers),
            "note": self.unknown or self._note,
        }

    def _log(self) -> None:
        if self.unknown:
            log.warning("privacy: no epsilon is known: %s", self.unknown)
        else:
            spent = self.spent()
            log.info("privacy: epsilon = %.4g at delta = %g (rounds: %d)", spent["epsilon"], DELTA, spent["rounds"])


@lru_cache(maxsize=8)  # a round asks for it several times
def _epsilon(multipliers: tuple[float, ...]) -> float:
    neighbours, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    accountant = RdpAccountant(PrivacyConfig(DELTA, 1, neighbours, sampling))
    for multiplier in multipliers:
        accountant.compose(GaussianPrivacyEvent(multiplier, 1, 1))  # sizes do not count without amplification
    return accountant.get_privacy_spent().epsilon


def wrapper_ledger(
    wrapper: PrivateWrapper, traits: Traits, *, mean: bool, earlier: PrivacyLedger | None = None
) -> PrivacyLedger:
    """Return the ledger of a run under one of Flower's wrappers for differential privacy.

    Let C be the norm to which updates are clipped, z the wrapper's `noise_multiplier`, n its `num_sampled_clients`, and
    s the greatest share of one client in all examples. A client changes the weighted mean by s C at most, and Flower
    adds noise of standard deviation z C / n, so a round has the noise multiplier z / (n s) (McMahan et al. 2018, arXiv
    1710.06963). `mean` is True if the server takes the weighted mean, without further clipping; if False, no epsilon is
    known. `traits` are the properties of the method, and `earlier` is the ledger of earlier runs.
    """

    def noise_multiplier(replies: Mapping[str, Reply], before: Arrays, after: Arrays) -> float | str:
        if not isinstance(wrapper, DifferentialPrivacyFixedClippingBase):
            return "the noise of adaptive clipping depends on a norm that updates determine: use fixed clipping"
        if not wrapper.noise_multiplier:
            return "noise_multiplier is 0"
        norm = wrapper.clipping_norm
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        for client, model in models.items():
            if (moved := _distance(model, before)) > (1 + ROUNDING) * norm:
                return (
                    f"the update of client {client} has norm {moved:.3g}, above clipping_norm = {norm:g}: make the "
                    "ClientApp with mods=[fixedclipping_mod]"
                )
        shares = np.array([reply.weight for reply in replies.values()]) / sum(r.weight for r in replies.values())
        average = {key: np.tensordot(shares, [model[key] for model in models.values()], 1) for key in before}
        if not mean or _distance(average, after) > ROUNDING * norm:
            return NO_MEAN
        return float(wrapper.noise_multiplier / (wrapper.num_sampled_clients * shares.max()))

    return PrivacyLedger(type(wrapper).__name__, traits, noise_multiplier, earlier=earlier)


def mod_ledger(
    noise: Mapping[str, float], traits: Traits, rounds: int, earlier: PrivacyLedger | None = None
) -> PrivacyLedger:
    """Return the ledger of a run whose clients use Flower's `LocalDpMod`, for the client with the least noise.

    `noise` is a dict, updated as clients are admitted, with each client's noise multiplier (0 without the mod).
    `traits` are the properties of the method, `rounds` is the number of rounds before the run was resumed, and
    `earlier` is the ledger of earlier runs.
    """

    def noise_multiplier(*_: object) -> float | str:
        without = [client for client, multiplier in noise.items() if multiplier < 0.01]  # epsilon in the thousands
        if without:
            return f"client {without[0]} adds no noise: make its ClientApp with mods=[LocalDpMod(...)]"
        return min(noise.values())

    ledger = PrivacyLedger("LocalDpMod", traits, noise_multiplier, whom=", from the server, too", earlier=earlier)
    for _ in range(rounds):
        ledger.spend({}, {}, {})
    return ledger


def _distance(one: Mapping[str, Any], other: Arrays) -> float:
    moved = (np.asarray(array, np.float64) - other[name] for name, array in one.items())
    return float(np.sqrt(sum(float(np.vdot(difference, difference)) for difference in moved)))
