"""Privacy accounting: epsilon and delta of a run under Flower's wrappers and mods for differential privacy."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod
from flwr.serverapp.strategy.dp_fixed_clipping import DifferentialPrivacyFixedClippingBase

from fedhet.flower.insides import PrivateWrapper
from fedhet.messages import Arrays, Reply
from fedhet.methods.method import METRICS, STRUCTURE, Traits
from fedhet.utils.text import log

DELTA = 1e-5
"""The delta at which epsilon is reported; it should be well below one over the number of clients."""

ROUNDING = 0.01
"""The greatest rounding error in single precision, relative to the clipping norm."""

LEAST_NOISE = 0.01
"""Noise multipliers below this count as no noise: epsilon would be in the thousands."""

NO_MEAN = "the server does not take the mean of models, weighted by examples (aggregation = mean, no clip-norm)"

NoiseMultiplier = Callable[[Mapping[str, Reply], Arrays, Arrays], float | str]
"""Takes the replies of a round and the shared model before and after it; returns the noise multiplier, or why not."""


class PrivacyLedger:
    """The privacy budget (epsilon) that a strategy's runs have spent, or the reason why it is `unknown`.

    A round is a Gaussian mechanism. Its noise multiplier is the standard deviation of the noise, divided by the
    greatest change that one client's update can make. Two runs are neighbours if all updates of one client are zero in
    one of them, so participation and numbers of examples count as public. `name` is the name of the wrapper or mod that
    adds the noise, `against` a clause of the note that says from whom it protects, `before` the ledger of earlier runs.
    """

    def __init__(
        self,
        name: str,
        traits: Traits,
        noise_multiplier: NoiseMultiplier,
        *,
        unknown: str = "",
        against: str = "",
        before: "PrivacyLedger | None" = None,
    ) -> None:
        self.name = name
        others = [key for key, kind in traits.sends.items() if key != "model" and kind not in (METRICS, STRUCTURE)]
        unprotected = f"clients also send {', '.join(others)}, which gets no noise" if others else ""
        self.unknown: str = (before.unknown if before else "") or unknown or unprotected
        self._multipliers: list[float] = [*before._multipliers] if before else []
        shared = "the model" if traits.whole else "the shared part of the model"
        self._note = f"for all examples of a client{against}; covers {shared}, not metrics or numbers of examples"
        self._noise_multiplier = noise_multiplier
        self._accountant: RdpAccountant | None = None
        if not self.unknown:
            neighbours, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
            try:
                self._accountant = RdpAccountant(PrivacyConfig(DELTA, 1, neighbours, sampling))
                for multiplier in self._multipliers:
                    self._accountant.compose(GaussianPrivacyEvent(multiplier, 1, 1))
            except ImportError:
                self.unknown = "the package dp-accounting computes it, and is missing: pip install 'fedhet[dp]'"
        if self.unknown:
            self._log()

    def spend(self, replies: Mapping[str, Reply], before: Arrays, after: Arrays) -> None:
        """Add the privacy cost of a round, in which clients trained the shared model `before`, and log the total.

        `after` is the aggregated model, to which the server adds its own noise later.
        """
        if self.unknown or self._accountant is None:
            return
        noise = self._noise_multiplier(replies, before, after)
        if isinstance(noise, str):
            self.unknown = noise
        else:
            self._accountant.compose(GaussianPrivacyEvent(noise, 1, 1))  # sizes do not count without amplification
            self._multipliers.append(noise)
        self._log()

    def spent(self) -> dict[str, Any]:
        """Return a dictionary with `wrapper`, `epsilon` (None if unknown), `delta`, `rounds` and a `note`."""
        spent = self._accountant.get_privacy_spent() if self._accountant and not self.unknown else None
        return {
            "wrapper": self.name,
            "epsilon": spent.epsilon if spent else None,
            "delta": DELTA,
            "rounds": spent.num_releases if spent else None,
            "note": self.unknown or self._note,
        }

    def _log(self) -> None:
        if self.unknown:
            log.warning("privacy: no epsilon is known: %s", self.unknown)
        else:
            spent = self.spent()
            log.info("privacy: epsilon = %.4g at delta = %g (rounds: %d)", spent["epsilon"], DELTA, spent["rounds"])


def wrapper_ledger(
    wrapper: PrivateWrapper, traits: Traits, *, mean: bool, before: PrivacyLedger | None = None
) -> PrivacyLedger:
    """Return the ledger of a run under one of Flower's wrappers for differential privacy.

    In a weighted mean of updates of norm at most C, a client with the share s of all examples moves the mean by s C at
    most, and Flower adds noise of standard deviation z C / n with n = `num_sampled_clients`. So the noise multiplier is
    z / (n s), with the greatest share s; with equal shares it is z. (McMahan et al. 2018,
    https://arxiv.org/abs/1710.06963.) `mean` says whether the server aggregates by the mean, without clipping.
    """
    name = type(wrapper).__name__
    if not isinstance(wrapper, DifferentialPrivacyFixedClippingBase):
        unknown = "the noise of adaptive clipping depends on a norm that clients' updates determine; use fixed clipping"
        return PrivacyLedger(name, traits, lambda *_: unknown, unknown=unknown)
    z, norm, sampled = wrapper.noise_multiplier, wrapper.clipping_norm, wrapper.num_sampled_clients

    def noise_multiplier(replies: Mapping[str, Reply], before: Arrays, after: Arrays) -> float | str:
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        shares = np.array([reply.weight for reply in replies.values()]) / sum(r.weight for r in replies.values())
        for client, model in models.items():
            if (moved := _distance(model, before)) > (1 + ROUNDING) * norm:
                return (
                    f"the update of client {client} has norm {moved:.3g}, above clipping_norm = {norm:g}: make the "
                    "ClientApp with mods=[fixedclipping_mod]"
                )
        mean = {key: np.tensordot(shares, [model[key] for model in models.values()], 1) for key in before}
        if _distance(mean, after) > ROUNDING * norm:
            return NO_MEAN
        return float(z / (sampled * shares.max()))

    unknown = "noise_multiplier is 0" if not z else "" if mean else NO_MEAN
    return PrivacyLedger(name, traits, noise_multiplier, unknown=unknown, before=before)


def mod_ledger(
    noise: Mapping[str, float], traits: Traits, rounds: int, before: PrivacyLedger | None = None
) -> PrivacyLedger:
    """Return the ledger of a run whose clients use Flower's `LocalDpMod`, for the client with the least noise.

    The mod clips an update to `clipping_norm` and adds noise before sending, so epsilon holds against the server, too.
    A client that missed rounds has spent less. `noise` has each client's noise multiplier, 0 without the mod, and can
    be extended later; `rounds` is the number of rounds before the run was resumed.
    """

    def noise_multiplier(*_: object) -> float | str:
        without = [client for client, multiplier in noise.items() if multiplier < LEAST_NOISE]
        if without:
            return f"client {without[0]} adds no noise: make its ClientApp with mods=[LocalDpMod(...)]"
        return min(noise.values())

    ledger = PrivacyLedger("LocalDpMod", traits, noise_multiplier, against=", from the server, too", before=before)
    for _ in range(rounds):
        ledger.spend({}, {}, {})
    return ledger


def _distance(one: Mapping[str, Any], other: Arrays) -> float:
    """Return the Euclidean distance between the arrays of two models."""
    moved = (np.asarray(array, np.float64) - other[name] for name, array in one.items())
    return float(np.sqrt(sum(float(np.vdot(each, each)) for each in moved)))
