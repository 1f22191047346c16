"""The policy of a node: the messages that it serves, and how much the numbers that leave it may disclose."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedhet.client.client_side import AnySide
from fedhet.client.secret import ChangedExamples
from fedhet.client.state import LostState
from fedhet.errors import ConfigError, FedhetError, in_words, nearest
from fedhet.messages import Payload, Reply, WireError
from fedhet.messages.protocol import WHOLE, Measured
from fedhet.methods.method import METRICS, STRUCTURE, Traits
from fedhet.methods.options import listed
from fedhet.utils.statistics import Metric
from fedhet.utils.text import log

KINDS = ("weights", "statistics", "features", "posteriors", "prototypes", "descriptors", "hypernetwork", METRICS)
"""Kinds of what leaves a node: arrays of a network or their changes; classes, numbers of examples by class and
BatchNorm's statistics; representations of shared examples; class scores, of shared examples, or means by class and
numbers of examples by class; mean representations and numbers of examples by class; descriptors of shared images; a
hypernetwork's parameters; metrics and losses. Numbers of examples always leave, and so do facts about a network
(`STRUCTURE`), which follow `disclose-architecture`."""

LEAST = 10
"""Examples that are behind every number that leaves a deployed node, unless it says otherwise (`min-examples`)."""

DIGITS = 4
"""Significant digits of metrics that leave a deployed node."""


class Refused(FedhetError):
    """A node does not serve a message; the reason depends on nothing private."""


@dataclass(frozen=True)
class Policy:
    """The rules of one node: which methods it serves, before anything is loaded or computed, and what replies hold.

    Attributes:
        allowed: kinds (`KINDS`) that may leave; None for all.
        least: examples that must be behind every number that leaves.
        deployed: whether the server is on another machine, or another user's: then metrics are rounded, nothing is
            downloaded, which test examples are predicted right is not even written, and reasons of failures that could
            tell of data stay in the node's log.
    """

    allowed: frozenset[str] | None = None
    least: int = 1
    deployed: bool = False

    @classmethod
    def of(cls, node_config: Mapping[str, Any], *, deployed: bool) -> "Policy":
        """The policy that a node's config (`allow`, `min-examples`) states; a ConfigError for a wrong value."""
        allowed = None
        if "allow" in node_config:
            allowed = frozenset(listed(str(node_config["allow"])))
            if unknown := sorted(allowed - {*KINDS}):
                raise ConfigError(nearest("kind in the node's allow", unknown[0], KINDS))
        least = node_config.get("min-examples", LEAST if deployed else 1)
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ConfigError(f"the node's min-examples is {least!r}, must be a whole number of at least 1")
        return cls(allowed, least, deployed)

    @property
    def tells_metrics(self) -> bool:
        """Whether metrics and losses may leave."""
        return self.allowed is None or METRICS in self.allowed

    @property
    def keeps_secret(self) -> bool:
        """Whether the node's batches are its secret (`fedhet.client.secret`)."""
        return self.deployed and self.allowed is not None

    def check_method(self, method: str, traits: Traits) -> None:
        """Check, before anything is loaded, that all that a method sends, metrics apart, may leave; else `Refused`."""
        if self.allowed is not None:
            if not self.allowed:
                raise Refused("this node lets out only nothing (allow = ''), so it takes part in no run")
            self._check(method, traits.kinds)

    def check_shared(self, side: AnySide) -> None:
        """Check the kinds of a network's shared arrays before anything is computed; raises `Refused`."""
        if self.allowed is not None:
            kinds = {_kind_of("model", name, side) for name in side.shared()}
            self._check(side.client.config.method_name, kinds, way_out="; batch-norm = local keeps statistics")

    def check_examples(self, count: int, batch_size: int) -> None:
        """Check that a client trains on enough examples, and in each step; raises `Refused`.

        Weights, and all that is computed with them, may depend on the last step alone, such as by a weight decay that
        forgets the others.
        """
        if count < self.least:
            raise Refused(
                f"it has {count} training examples, and its node lets out no number that fewer than {self.least} are "
                "behind (min-examples)"
            )
        if batch_size < self.least and not self.keeps_secret:  # which trains on whole groups
            raise Refused(
                f"batch-size is {batch_size}, and its node trains on no fewer than {self.least} examples at a time "
                "(min-examples)"
            )

    def outgoing(self, payload: Payload, side: AnySide) -> Payload:
        """The payload as it may leave, metrics rounded or left out; `Refused` for a kind that may not leave."""
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
        """Return what a reply tells, in words for the node's log: kinds, with the bytes of their arrays."""
        bytes_of: Counter[str] = Counter()
        for group, arrays in reply.payload.arrays.items():
            for name, array in arrays.items():
                bytes_of[_kind_of(group, name, side)] += array.nbytes
        told = {side.traits.sends.get(name, STRUCTURE) for name in reply.payload.values}
        told |= {METRICS} if reply.measured or reply.further or reply.train_loss is not None else set()
        kinds = [f"{kind} ({size} bytes)" for kind, size in sorted(bytes_of.items())]
        return ", ".join([*kinds, *sorted(told - bytes_of.keys()), "numbers of examples"])

    def measured(
        self,
        metric: Metric,
        loss: float,
        *,
        examples: int,
        ranked: bool,
        behind: Sequence[int] | None = None,
    ) -> Measured:
        """An evaluation of so many examples as it may leave: rounded, without labels that too few have or lack.

        A `ranked` metric is an AUC, which weighs as many as there are pairs of examples. Of others, so many examples
        may be `behind` each value, where they are not all: then weights, numbers of pixels, are rounded, too.
        """
        values, weights = metric.values, metric.weights
        if behind is not None:
            pairs = zip(weights, behind, strict=True)
            weights = tuple(self.rounded(weight) if count >= self.least else 0.0 for weight, count in pairs)
        if ranked:  # n with the label and m without make n m pairs, the fewer the less even n and m are
            fewest = self.least * (examples - self.least) if examples >= 2 * self.least else math.inf
            weights = tuple(weight if weight >= fewest else 0.0 for weight in weights)
        weighed = zip(values, weights, strict=True)
        values = tuple(self.rounded(value) if weight > 0 else math.nan for value, weight in weighed)
        return Measured(Metric(values, weights), self.rounded(loss))

    def rounded(self, value: float) -> float:
        """A metric or a loss with as many digits as may leave."""
        return float(f"{value:.{DIGITS}g}") if self.deployed else value

    def reason(self, client: str, error: Exception) -> str:
        """Return the reason of a failure for the server; at a deployed node nothing that could disclose data."""
        if not self.deployed or isinstance(error, Refused | ChangedExamples | LostState | WireError):
            return in_words(error) if isinstance(error, OSError) else str(error)
        log.error("client %s failed", client, exc_info=error)
        return "it failed, and the reason stands in its node's log, since reasons can tell of data"

    def _check(self, method: str, kinds: Collection[str], *, way_out: str = "") -> None:
        """Raise `Refused` for a kind that may not leave; the way out is that of BatchNorm's statistics."""
        refused = sorted({*kinds} - {METRICS, STRUCTURE} - (self.allowed or frozenset()))
        if refused:
            way_out = way_out if refused == ["statistics"] else ""
            out = ", ".join(sorted(self.allowed or ())) or "nothing"
            raise Refused(f"this node lets out only {out} (allow), and {method} sends {', '.join(refused)}{way_out}")


def _kind_of(group: str, name: str, side: AnySide) -> str:
    kind = side.traits.sends.get(group, "weights" if group in ("model", WHOLE) else _undeclared(group))
    return "statistics" if kind == "weights" and side.kinds.get(name) == "statistic" else kind


def _undeclared(name: str) -> str:
    return f"a kind that it does not tell ({name})"
