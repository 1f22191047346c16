"""What FedMA's and PFNM's server halves share: how to match, what all clients' networks look like, and the results."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from fedhet.architectures import PermutationGroups, resize
from fedhet.config import option
from fedhet.errors import FedhetError
from fedhet.matching.groups import Matching, understand
from fedhet.server import FederatedStrategy, Reply
from fedhet.wire import WireError, check, to_tensor


@dataclass(frozen=True)
class MatchingParameters:
    """The keys of matching, with FedMA's values."""

    gamma: float = option(7.0, "mass of the beta process: larger opens more global units (LSTMs: 0.001)", above=0)
    sigma2: float = option(1.0, "variance of local units around global ones", above=0)
    sigma0_2: float = option(1.0, "variance of global units around the prior mean", above=0)
    sweeps: int = option(5, "how often each client is matched again", at_least=0)
    average: str = option(
        "map",
        "global weights: posterior mean (the authors' code) or plain mean (the paper); embeddings and LSTMs are always "
        "averaged plainly",
        choices=("map", "mean"),
    )
    variances: str = option(
        "fixed", "sigma2 and sigma0-2: as given, or estimated for each layer", choices=("fixed", "estimated")
    )
    max_growth: float = option(
        0.0,
        "widest that a global layer may become, in widths of the clients' layer (at least 1); 0: no limit",
        at_least=0,
    )
    solver: str = option("scipy", "assignment solver", choices=("scipy", "lapsolver", "lapx"))
    reference_prior: bool = option(
        False, "put the bias's prior mean on column 0 after the first layer, as the authors' code does"
    )

    def matching(self) -> Matching:
        """What the matching takes."""
        return Matching(**{name: getattr(self, name) for name in MatchingParameters.__dataclass_fields__})


class MatchedStrategy(FederatedStrategy):
    """A global model whose layers are wider than the clients', made of units that were matched."""

    equal_architectures = True
    global_model = True

    def welcome(self, client: str, reply: Reply) -> None:
        """All clients must have the same permutation groups, which each finds in its own model."""
        told = reply.payload.values.get("groups")
        if told is None or self.state.values.setdefault("groups", told) != told:
            raise FedhetError(f"{self.name} needs equal architectures, and this one's layers are connected otherwise")

    @cached_property
    def groups(self) -> PermutationGroups:
        """The permutation groups of the clients' architecture."""
        return understand(self.state.values["groups"])

    def check_reply(self, reply: Reply) -> None:
        """Class counts, where they are sent: one a class, none negative."""
        if "classes" not in reply.arrays:
            return
        classes = self.specs[reply.client][self.groups.fixed[-1]][0][0]
        check(reply.arrays["classes"], {"counts": ((classes,), "int64")}, "its class counts")
        if (reply.arrays["classes"]["counts"] < 0).any():
            raise WireError("its class counts are negative")

    def class_counts(self, replies: Mapping[str, Reply]) -> "list[np.ndarray[Any, Any]] | None":
        """(J, C), how many examples of each class clients have; None where labels are no classes."""
        if not all("classes" in reply.arrays for reply in replies.values()):
            return None
        return [reply.arrays["classes"]["counts"] for reply in replies.values()]

    def keep_assignments(self, client: str, assignments: "Mapping[int, np.ndarray[Any, Any]]") -> None:
        """Remember where a client's units went, by group: int32, as they travel."""
        kept = {str(index): assignment.astype(np.int32) for index, assignment in assignments.items()}
        self.state.arrays[f"assignments-{client}"] = kept

    # ---- results

    def global_network(self) -> nn.Module | None:
        """The global model in its own widths, None before the first pass is complete."""
        if "model" not in self.state.arrays:
            return None
        model = self.network_of(self.in_order(self.state.clients)[0])
        return resize(model, {name: to_tensor(array) for name, array in self.state.arrays["model"].items()})
