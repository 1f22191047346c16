"""Privacy accounting: epsilon and delta of a run under Flower's wrappers and mods for differential privacy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyAccountant,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from flwr.serverapp.strategy.dp_adaptive_clipping import DifferentialPrivacyAdaptiveBase

from fedhet.method import METRICS, STRUCTURE, Traits
from fedhet.text import log
from fedhet.wire import Arrays, Reply

FIXED = DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyClientSideFixedClipping
"""Wrappers whose noise is the same in all rounds."""

DELTA = 1e-5
"""The delta at which epsilon is reported; it should be well below one over the number of clients."""

ROUNDING = 0.01
"""The greatest error of single precision, as a part of the clipping norm."""

NO_MEAN = (
    "the server does not take the mean of clients' models, weighted by examples (aggregation = mean, no clip-norm)"
)


LEAST_NOISE = 0.01
"""Noise multipliers below it count as no noise: epsilon would be in the thousands."""


class PrivacyLedger(ABC):
    """Adds up what the rounds of a run cost in privacy, or says why that is not known.

    A round is a Gaussian mechanism of some noise multiplier: the standard deviation of the noise over the greatest norm
    that one client's update can have in what is sent. Rounds are composed by Flower's `RdpAccountant`, without
    amplification by sampling. Two runs are neighbours if all updates of one client are zero in one of them: who takes
    part, and with how many examples, counts as known.

    Attributes:
        unknown: why epsilon is not known; empty if it is.
        name: of the wrapper or mod that adds the noise.
        mechanism: what is protected from whom, in words.
    """

    name: str
    mechanism: ClassVar[str]

    def __init__(self, traits: Traits, unknown: str = "") -> None:
        self._whole = traits.whole
        self.unknown = unknown or _beside(traits)
        self._accountant: PrivacyAccountant | None = None
        if not self.unknown:
            neighbours, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
            try:
                self._accountant = RdpAccountant(PrivacyConfig(DELTA, 1, neighbours, sampling))
            except ImportError:
                self.unknown = "the package dp-accounting computes it, and is missing: pip install 'fedhet[dp]'"
        if self.unknown:
            self._log()

    @abstractmethod
    def noise_multiplier(self, replies: Mapping[str, Reply], before: Arrays, after: Arrays) -> float | str:
        """Return that of a round, or why it is not known."""

    def spend(self, replies: Mapping[str, Reply], before: Arrays, after: Arrays) -> None:
        """Add a round, and log the total.

        Args:
            replies: of the clients that trained the model `before`.
            before: the shared model that clients received, without parts of it that they do not share.
            after: the shared model that the server aggregated, without the server's noise.
        """
        if self.unknown or self._accountant is None:
            return
        noise = self.noise_multiplier(replies, before, after)
        if isinstance(noise, str):
            self.unknown = noise
        else:
            self._accountant.compose(GaussianPrivacyEvent(noise, 1, 1))  # without amplification, sizes do not count
        self._log()

    def spent(self) -> dict[str, Any]:
        """Return the `wrapper`, `epsilon` (None if it is not known), `delta`, `rounds`, and a `note` in words."""
        words = "the model" if self._whole else "the shared part of the model"
        note = f"for all examples of a client{self.mechanism}; covers {words}, not metrics or numbers of examples"
        spent = self._accountant.get_privacy_spent() if self._accountant and not self.unknown else None
        return {
            "wrapper": self.name,
            "epsilon": spent.epsilon if spent else None,
            "delta": DELTA,
            "rounds": spent.num_releases if spent else None,
            "note": self.unknown or note,
        }

    def _log(self) -> None:
        if self.unknown:
            log.warning("privacy: no epsilon is known: %s", self.unknown)
        else:
            spent = self.spent()
            log.info("privacy: epsilon = %.4g at delta = %g (rounds: %d)", spent["epsilon"], DELTA, spent["rounds"])


class WrapperLedger(PrivacyLedger):
    """Privacy under a wrapper of Flower's around the strategy, from all who see the server's model.

    In a weighted mean of updates of norm at most C, a client with the share s of all examples moves the mean by s C at
    most, and Flower adds noise of standard deviation z C / n with n = `num_sampled_clients`. So the noise multiplier is
    z / (n s), with the greatest share s; with equal shares it is z. (McMahan et al. 2018,
    https://arxiv.org/abs/1710.06963.)

    Args:
        wrapper: a wrapper of Flower's for differential privacy, around the strategy.
        traits: the method's.
        mean: whether the configured rule of aggregation is the mean, without clipping.
    """

    mechanism = ""

    def __init__(self, wrapper: Strategy, traits: Traits, *, mean: bool) -> None:
        self.wrapper, self.name = wrapper, type(wrapper).__name__
        super().__init__(traits, _unknown(wrapper, mean=mean))

    def noise_multiplier(self, replies: Mapping[str, Reply], before: Arrays, after: Arrays) -> float | str:
        """Return that of the client with most examples, if all updates are clipped and their mean is taken."""
        wrapper = self.wrapper
        assert isinstance(wrapper, FIXED)
        models = {client: reply.arrays["model"] for client, reply in replies.items()}
        shares = np.array([reply.examples for reply in replies.values()]) / sum(r.examples for r in replies.values())
        norms = {client: _distance(model, before) for client, model in models.items()}
        client = max(norms, key=norms.__getitem__)
        mean = {key: np.tensordot(shares, [model[key] for model in models.values()], 1) for key in before}
        if norms[client] > (1 + ROUNDING) * wrapper.clipping_norm:
            return (
                f"the update of client {client} has norm {norms[client]:.3g}, above clipping_norm = "
                f"{wrapper.clipping_norm:g}: make the ClientApp with mods=[fixedclipping_mod]"
            )
        if _distance(mean, after) > ROUNDING * wrapper.clipping_norm:
            return NO_MEAN
        return float(wrapper.noise_multiplier / (wrapper.num_sampled_clients * shares.max()))


class LocalLedger(PrivacyLedger):
    """Privacy under `LocalDpMod` at the clients, of the one with the least noise, from the server and all others.

    The mod clips an update to `clipping_norm` and adds noise, whose standard deviation over that norm the client
    reports in the handshake. A client that missed rounds has spent less.

    Args:
        noise: the clients' noise multipliers by name, 0 of those without the mod; later clients may be added.
        traits: the method's.
        rounds: rounds that an earlier part of this run had.
    """

    name, mechanism = LocalDpMod.__name__, ", from the server, too"

    def __init__(self, noise: Mapping[str, float], traits: Traits, rounds: int) -> None:
        self._noise = noise
        super().__init__(traits)
        for _ in range(rounds):
            self.spend({}, {}, {})

    def noise_multiplier(self, replies: Mapping[str, Reply], before: Arrays, after: Arrays) -> float | str:
        """Return the least of all clients, if all have one."""
        without = [client for client, noise in self._noise.items() if noise < LEAST_NOISE]
        if without:
            return f"client {without[0]} adds no noise: make its ClientApp with mods=[LocalDpMod(...)]"
        return min(self._noise.values())


def ledger_of(wrapper: Strategy | None, traits: Traits, *, mean: bool) -> PrivacyLedger | None:
    """Return the ledger of a run under a wrapper of Flower's for differential privacy; None under another, or none."""
    private = (*FIXED, DifferentialPrivacyAdaptiveBase)
    return WrapperLedger(wrapper, traits, mean=mean) if isinstance(wrapper, private) else None


def _unknown(wrapper: Strategy, *, mean: bool) -> str:
    """Return why a wrapper's epsilon cannot be known; empty if it can."""
    if not isinstance(wrapper, FIXED):
        return "the noise of adaptive clipping depends on a norm that clients' updates determine; use fixed clipping"
    if not wrapper.noise_multiplier:
        return "noise_multiplier is 0"
    return "" if mean else NO_MEAN


def _beside(traits: Traits) -> str:
    """Return what clients send beside the model, in words; empty if nothing."""
    others = [name for name, kind in traits.sends.items() if name != "model" and kind not in (METRICS, STRUCTURE)]
    return f"clients also send {', '.join(others)}, which gets no noise" if others else ""


def _distance(one: Mapping[str, Any], other: Arrays) -> float:
    moved = (np.asarray(array, np.float64) - other[name] for name, array in one.items())
    return float(np.sqrt(sum(float(np.vdot(each, each)) for each in moved)))
