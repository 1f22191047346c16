"""The policy of a node: which messages it answers, and what the numbers that it sends may disclose."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedhet.client.client_side import AnySide
from fedhet.client.secret import BudgetSpent, ChangedExamples
from fedhet.client.state import LostState
from fedhet.errors import ConfigError, FedhetError, in_words, nearest
from fedhet.messages import Payload, Reply, WireError
from fedhet.messages.protocol import WHOLE, Measured
from fedhet.methods.method import METRICS, STRUCTURE, Traits
from fedhet.methods.options import listed
from fedhet.utils.statistics import Metric
from fedhet.utils.text import log

KINDS = ("weights", "statistics", "features", "posteriors", "prototypes", "descriptors", "hypernetwork", METRICS)
"""Kinds of what a node sends, in order: arrays of a network or their changes; classes, numbers of examples by class
and BatchNorm's statistics; representations of shared examples; class scores of shared examples, or means by class with
numbers of examples; mean representations and numbers of examples by class; descriptors of shared images; a
hypernetwork's parameters; metrics and losses. Numbers of examples are always sent, and so are facts about a network
(`STRUCTURE`), subject to `disclose-architecture`."""

LEAST = 10
"""Default of `min-examples` at a deployed node: how many examples must be behind every number that it sends."""

DP_KEYS = {"dp-noise": 0.0, "dp-clip": 0.0, "dp-epsilon": math.inf}
"""A node's settings of differentially private training, with their values if they are not set."""

DIGITS = 4
"""Significant digits of metrics that a deployed node sends."""


class Refused(FedhetError):
    """Raised if a node refuses to answer a message, for a reason that does not depend on private data."""


@dataclass(frozen=True)
class Policy:
    """The rules of one node: which kinds of values it sends, and from how many examples.

    Attributes:
        allowed: kinds of values (`KINDS`) that may be sent; None allows all.
        least: minimum number of examples behind every number that is sent.
        deployed: whether the server runs on another machine or as another user. Then metrics are rounded, nothing is
            downloaded, and failure reasons that could disclose data stay in the node's log.
        noise: noise of differentially private training, as a multiple of `clip`; 0 for ordinary training.
        clip: largest norm of an example's gradient in differentially private training.
        budget: epsilon at which the node stops taking part in runs.
    """

    allowed: frozenset[str] | None = None
    least: int = 1
    deployed: bool = False
    noise: float = 0.0
    clip: float = 0.0
    budget: float = math.inf

    @classmethod
    def of(cls, node_config: Mapping[str, Any], *, deployed: bool) -> "Policy":
        """Return the policy that a node config sets; raises a ConfigError if a setting is invalid."""
        allowed = None
        if "allow" in node_config:
            allowed = frozenset(listed(str(node_config["allow"])))
            if unknown := sorted(allowed - {*KINDS}):
                raise ConfigError(nearest("kind in the node's allow", unknown[0], KINDS))
        least = node_config.get("min-examples", LEAST if deployed else 1)
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ConfigError(f"the node's min-examples is {least!r}, but must be a whole number of at least 1")
        noise, clip, budget = (node_config.get(key, unset) for key, unset in DP_KEYS.items())
        if any(
            isinstance(each, bool) or not isinstance(each, int | float) or not each >= 0
            for each in (noise, clip, budget)
        ):
            raise ConfigError("the node's dp-noise, dp-clip and dp-epsilon must be numbers above 0")
        if (noise > 0) != (clip > 0) or (budget < math.inf and not noise):
            raise ConfigError(
                "the node needs both dp-noise and dp-clip (dp-epsilon limits their epsilon): set both, or none"
            )
        return cls(allowed, least, deployed, noise, clip, budget)

    @property
    def tells_metrics(self) -> bool:
        """Whether metrics and losses may be sent."""
        return self.allowed is None or METRICS in self.allowed

    @property
    def keeps_secret(self) -> bool:
        """Whether the node draws its batches from a secret seed (`fedhet.client.secret`)."""
        return self.noise > 0 or (self.deployed and self.allowed is not None)

    def check_method(self, method: str, traits: Traits) -> None:
        """Raise `Refused` if a method sends a kind of values, other than metrics, that the node does not allow."""
        if self.allowed is not None:
            if not self.allowed:
                raise Refused(
                    "this node allows nothing to be sent (allow = ''), so it cannot take part in a run: add the "
                    "kinds of values that it may send"
                )
            self._check(method, traits.kinds)
        public = {"weights", "hypernetwork", "features", "descriptors", "posteriors", METRICS, STRUCTURE}
        if self.noise and (method == "fd" or not traits.kinds <= public):
            raise Refused(
                f"this node trains with differential privacy (dp-noise), but {method} also sends means or numbers of "
                "the client's examples: choose another method, such as fedavg, fedrep or fedhenn"
            )

    def check_shared(self, side: AnySide) -> None:
        """Raise `Refused` if the network's shared arrays are of a kind that the node does not allow."""
        if self.allowed is not None:
            kinds = {_kind_of("model", name, side) for name in side.shared()}
            self._check(side.client.config.method_name, kinds, way_out="; set batch-norm = local to send no statistics")

    def check_examples(self, count: int, batch_size: int) -> None:
        """Raise `Refused` if a client has too few training examples, or trains on too few in a step.

        Weights can depend on the last step alone, for example if a large weight decay erases the earlier steps.
        """
        if count < self.least:
            raise Refused(
                f"the client has {count} training examples, but its node requires at least {self.least} examples "
                "behind every number that it sends (min-examples)"
            )
        if batch_size < self.least and not self.keeps_secret:  # which trains on whole groups
            raise Refused(
                f"batch-size is {batch_size}, but the client's node requires at least {self.least} examples in every "
                "training step (min-examples): increase batch-size"
            )

    def outgoing(self, payload: Payload, side: AnySide) -> Payload:
        """Return the payload with metrics rounded or left out; raises `Refused` for kinds that are not allowed."""
        if self.allowed is not None:
            kinds = {_kind_of(group, name, side) for group, arrays in payload.arrays.items() for name in arrays}
            kinds |= {side.traits.sends.get(name, _undeclared(name)) for name in payload.values}
            self._check(side.client.config.method_name, kinds)
        values = {}
        for name, value in payload.values.items():
            if side.traits.sends.get(name) != METRICS:
                values[name] = value
            elif self.tells_metrics:
                values[name] = self.rounded(value)
        return Payload(payload.arrays, values)

    def account(self, reply: Reply, side: AnySide) -> str:
        """Describe a reply for the node's log: its kinds of values, and the size of their arrays in bytes."""
        bytes_of: Counter[str] = Counter()
        for group, arrays in reply.payload.arrays.items():
            for name, array in arrays.items():
                bytes_of[_kind_of(group, name, side)] += array.nbytes
        told = {side.traits.sends.get(name, STRUCTURE) for name in reply.payload.values}
        told |= {METRICS} if reply.measured or reply.further or reply.train_loss is not None else set()
        kinds = [f"{kind} ({size} bytes)" for kind, size in sorted(bytes_of.items())]
        return ", ".join([*kinds, *sorted(told - bytes_of.keys()), "numbers of examples"])

    def measured(
        self, metric: Metric, loss: float, *, examples: int, ranked: bool, behind: Sequence[int] | None = None
    ) -> Measured:
        """Return an evaluation in the form that may be sent: rounded, without values from too few examples.

        `ranked` says that the metric is an AUC, whose weights are numbers of pairs of examples. `behind` is the number
        of examples behind each value, None for all examples; if given, weights are rounded, too.
        """
        values, weights = metric.values, metric.weights
        if behind is not None:
            pairs = zip(weights, behind, strict=True)
            weights = tuple(self.rounded(weight) if count >= self.least else 0.0 for weight, count in pairs)
        if ranked:  # n with the label and m without make n m pairs, fewer the less even n and m are
            fewest = self.least * (examples - self.least) if examples >= 2 * self.least else math.inf
            weights = tuple(weight if weight >= fewest else 0.0 for weight in weights)
        weighed = zip(values, weights, strict=True)
        values = tuple(self.rounded(value) if weight > 0 else math.nan for value, weight in weighed)
        return Measured(Metric(values, weights), self.rounded(loss))

    def rounded(self, value: float) -> float:
        """Return a metric or a loss; a deployed node rounds it to the digits that it may send."""
        return float(f"{value:.{DIGITS}g}") if self.deployed else value

    def reason(self, client: str, error: Exception) -> str:
        """Return the reason of a failure for the server; a deployed node withholds reasons that could disclose data."""
        if not self.deployed or isinstance(error, Refused | ChangedExamples | BudgetSpent | LostState | WireError):
            return in_words(error) if isinstance(error, OSError) else str(error)
        log.error("client %s failed", client, exc_info=error)
        return "the client failed; the reason is in its node's log, since it could disclose data"

    def _check(self, method: str, kinds: Collection[str], *, way_out: str = "") -> None:
        refused = sorted({*kinds} - {METRICS, STRUCTURE} - (self.allowed or frozenset()))
        if refused:
            way_out = way_out if refused == ["statistics"] else ""
            out = ", ".join(sorted(self.allowed or ()))
            raise Refused(f"this node allows only {out} (allow), but {method} sends {', '.join(refused)}{way_out}")


def _kind_of(group: str, name: str, side: AnySide) -> str:
    kind = side.traits.sends.get(group, "weights" if group in ("model", WHOLE) else _undeclared(group))
    return "statistics" if kind == "weights" and side.kinds.get(name) == "statistic" else kind


def _undeclared(name: str) -> str:
    return f"an undeclared kind ({name})"
