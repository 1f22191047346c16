"""FedMD, server side: the mean of clients' class scores on some public examples (Li and Wang, 2019, algorithm 1).

A round takes one exchange: in round t, a client learns the mean scores on the public examples X(t), trains on its own
examples, and returns its scores on X(t+1). As in the paper, the mean of round t - 1 is learnt at the start of round t.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedhet.algorithms.alignment.packing import pack, unpack
from fedhet.messages import Arrays, Payload, Reply, WireError
from fedhet.methods.included.distillation import FedMDOptions, ScoresOptions, fedmd
from fedhet.server import Common, FederatedStrategy, State
from fedhet.utils.randomness import numpy_generator

from ._common import mean_distance, packed_rows, public_rows, tokens_of  # noqa: TID251 - this folder is fedhet.strategies


@dataclass
class ScoresState(State):
    """The class scores that clients learn, and the public examples that the scores belong to.

    Attributes:
        mean: the packed scores; in FedMD the mean of the clients' scores.
        mean_round: the round whose public examples the scores belong to; 0 if there are no scores.
        classes: number of classes.
        tokens: number of tokens of a public example; if above 1, a row of scores belongs to one token.
    """

    mean: Arrays = field(default_factory=dict)
    mean_round: int = 0
    classes: int = 0
    tokens: int = 0


Q = TypeVar("Q", bound=ScoresOptions)
T = TypeVar("T", bound=ScoresState)


class Scores(FederatedStrategy[Q, T]):
    """Receives each client's class scores on some public examples, and sends scores to learn in the next round."""

    def common(self, reply: Reply) -> Mapping[str, Common]:
        """Return the numbers of classes and of tokens in an example, which must be the same for all clients."""
        classes = reply.values.count("classes", at_least=1, at_most=2**20)
        return {
            "number of classes": Common(classes, "all clients need the same classes"),
            "number of tokens per example": Common(tokens_of(reply), "all clients need the same number"),
        }

    def admit(self, reply: Reply) -> None:
        """Keep the number of classes and the number of tokens in an example."""
        classes, tokens = (each.value for each in self.common(reply).values())
        self.state.classes, self.state.tokens = int(classes), int(tokens)

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        """Return the scores to learn, if any, with their public examples, and the public examples to score next."""
        state, common = self.state, Payload()
        if state.mean_round:
            common.arrays["rows"] = {"rows": self.rows(state.mean_round)}
            common.arrays["mean"] = state.mean
        if self._sent_in(round):
            common.arrays["next-rows"] = {"rows": self.rows(round + 1)}
        return dict.fromkeys(clients, common)

    def check_reply(self, reply: Reply) -> None:
        """Check that the reply has the class scores of all requested public examples."""
        reply.values.number("distance", 0.0)
        if not self._sent_in(self.state.round + 1):
            return
        scores = packed_rows(reply, "scores")
        expected = (len(self.rows(1)), self.state.classes)
        if scores.shape != expected:
            raise WireError(f"the client's scores have shape {list(scores.shape)}, expected {list(expected)}")

    def rows(self, round: int) -> np.ndarray[Any, Any]:
        """Return the row numbers of X(t) in the public dataset, (L,), drawn from the seed."""
        generator = numpy_generator(self.config.seed, "subset", round)
        return public_rows(generator, self.state.public_size, self.state.tokens, self.options.subset)

    def _sent_in(self, round: int) -> bool:
        """Return whether clients send scores in a round; by default they do in every round."""
        return True

    def mean(self, replies: Mapping[str, Reply]) -> Tensor:
        """Return the mean of the clients' scores of this round's public examples, (n, C)."""
        return torch.stack([unpack(reply.arrays["scores"]) for reply in replies.values()]).double().mean(0).float()

    def teach(self, round: int, scores: Tensor) -> None:
        """Keep the scores of a round's public examples, so that clients learn them in the next round."""
        self.state.mean, self.state.mean_round = pack(scores), round + 1

    def distance(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Return the metric `distance`, the clients' mean distance to the scores that they learn, if available."""
        distance = mean_distance(replies.values())
        return {} if distance is None else {"distance": distance}


class FedMD(Scores[FedMDOptions, ScoresState]):
    """Sends clients the consensus f~(x) = 1/m sum_k f_k(x), the mean of their class scores."""

    method = fedmd
    state_class = ScoresState

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average the clients' scores, which clients learn in the next round."""
        if self._sent_in(round):
            self.teach(round, self.mean(replies))
        return self.distance(replies)

    def _sent_in(self, round: int) -> bool:
        """Return True except in the last round, whose scores would not be used."""
        return round != self.run.last_round
