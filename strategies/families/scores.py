"""Methods whose clients exchange class scores of public examples, and checks of what they send about such examples."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.algorithms.alignment.targets import check_finite_features, check_posteriors, pack, unpack
from fedhet.errors import ModelError
from fedhet.server import Arrays, Common, FederatedStrategy, Options, Payload, Reply, State, WireError
from fedhet.utils.randomness import numpy_generator

from .by_class import outputs_of


class ScoresKeys(Options):
    """Keys of methods that train on scores of public examples: at most `subset` a round, `public_batch` in a batch."""

    public_batch: int
    subset: ClassVar[int] = 5000


@dataclass
class ScoresState(State):
    """The state of a method that exchanges scores of public examples; `classes` is the number of classes.

    `mean` has the scores for clients to learn in round `mean_round` (0: none yet), in the format of `pack`.
    """

    mean: Arrays = field(default_factory=dict)
    mean_round: int = 0
    classes: int = 0


Q = TypeVar("Q", bound=ScoresKeys)
T = TypeVar("T", bound=ScoresState)


class Scores(FederatedStrategy[Q, T]):
    """Base class of strategies that receive class scores of public examples, and send scores for clients to learn."""

    def common(self, reply: Reply) -> Mapping[str, Common]:
        remedy = "all clients need the same classes; an estimator has those of the labels or of a pandas.Categorical"
        return {"number of classes": Common(outputs_of(reply), remedy)}

    def admit(self, reply: Reply) -> None:
        self.state.classes = outputs_of(reply)

    def configure_fit(self, round: int, clients: Sequence[str]) -> dict[str, Payload]:
        state = self.state
        common = Payload()
        if state.mean_round:
            common.arrays["rows"] = {"rows": self.rows(state.mean_round)}
            common.arrays["mean"] = state.mean
        if self.sent_in(round):
            common.arrays["next-rows"] = {"rows": self.rows(round + 1)}
        return dict.fromkeys(clients, common)

    def check_reply(self, reply: Reply) -> None:
        reply.values.number("distance", 0.0)
        if self.sent_in(self.state.round + 1):
            packed_rows(reply, "scores", len(self.rows(1)), self.state.classes)

    def rows(self, round: int) -> NDArray[np.int32]:
        """Return the indices of the public examples of a round, drawn at random from the seed."""
        return public_rows(self.config.seed, "subset", round, self.state.public_size, self.options.subset)

    def sent_in(self, round: int) -> bool:
        """Return whether clients send scores in a round; by default in all."""
        return True

    def mean(self, replies: Mapping[str, Reply]) -> Tensor:
        """Return the mean of the clients' scores, (n, C) for n public examples and C classes."""
        return torch.stack([unpack(reply.arrays["scores"]) for reply in replies.values()]).double().mean(0).float()

    def teach(self, round: int, scores: Tensor) -> None:
        """Store class scores (n, C) of the n public examples of round `round + 1`, in which clients learn them."""
        self.state.mean = pack(scores)
        self.state.mean_round = round + 1


def public_rows(seed: int, purpose: str, round: int, size: int, count: int) -> NDArray[np.int32]:
    """Return up to `count` random indices below `size`; they depend on `seed`, `purpose` (a name) and `round`."""
    return numpy_generator(seed, purpose, round).permutation(size)[:count].astype(np.int32)


def packed_rows(reply: Reply, name: str, rows: int, columns: int | str | None = None) -> Tensor:
    """Return the matrix `name` of a reply, with a row for each of `rows` public examples.

    Raises a WireError if it is missing, has another number of rows or `columns`, or is not what its name says:
    `posteriors` must be probabilities, and `features` at most 1e6 in magnitude.
    """
    if name not in reply.arrays:
        raise WireError(f"the client's reply has no array {name!r}: use the server's version of fedhet")
    try:
        values = unpack(reply.arrays[name])
        if len(values) != rows or columns not in (None, values.shape[1]):
            raise ValueError(
                f"it has shape {list(values.shape)}, expected {[rows, columns or values.shape[1]]}: use the server's "
                "public dataset and version of fedhet"
            )
        if name == "posteriors":
            check_posteriors(values)
        elif name == "features":
            check_finite_features(values, name)
    except (ValueError, ModelError) as error:
        raise WireError(f"the client's array {name} cannot be used: {error}; check the client's mods") from error
    return values


def distance_metric(replies: Iterable[Reply], name: Literal["distance", "alignment"]) -> dict[str, float]:
    """Return {`name`: mean distance in the replies}, or 1 - mean if `name` is alignment; {} without distances."""
    distances = [reply.payload.values["distance"] for reply in replies if "distance" in reply.payload.values]
    if not distances:
        return {}
    distance = float(np.mean(distances))
    return {name: 1 - distance if name == "alignment" else distance}
