"""FedProto, server half: prototypes of classes are averaged, no weights (Tan et al., AAAI 2022)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedhet.config import option
from fedhet.errors import ModelError
from fedhet.replies import Reply
from fedhet.server import FederatedStrategy
from fedhet.wire import Payload, WireError, check

MOST_CLASSES = 2**16
"""Class numbers from here on are refused: clients make room for all classes below the highest."""


@dataclass(frozen=True)
class Parameters:
    """FedProto's own keys."""

    weight: float = option(1.0, "lambda: weight of the distance to the global prototypes", at_least=0)
    width: int = option(
        0,
        "width to which Phi is projected by a linear layer of the client's own; 0: as it is, equal for all",
        at_least=0,
    )
    predict: str = option(
        "prototype",
        "prediction by the nearest global prototype (the paper) or by the head",
        choices=("prototype", "head"),
    )


class FedProto(FederatedStrategy):
    """Averages the clients' prototypes of each class, weighted by their numbers of examples of it (equation 6)."""

    name = "fedproto"
    Parameters = Parameters

    def received_by_all(self) -> Payload:
        """The global prototypes: (classes known, d) and the classes' numbers."""
        prototypes = self.state.arrays.get("prototypes")
        return Payload({"prototypes": prototypes} if prototypes else {})

    def welcome(self, client: str, reply: Reply) -> None:
        """Representations must be equally wide, or there is no mean of prototypes."""
        width = self.state.values.setdefault("width", reply.payload.values["width"])
        if reply.payload.values["width"] != width:
            raise ModelError(
                f"its representation has width {reply.payload.values['width']}, the first client's {width}: set "
                f"fedproto.width, to which all are then projected"
            )

    def check_reply(self, reply: Reply) -> None:
        """Prototypes are (k, d), with k classes and k numbers of examples."""
        own = reply.arrays.get("prototypes", {})
        k = own["classes"].size if "classes" in own else 0
        means = ((k, self.state.values["width"]), "float32")
        check(own, {"means": means, "classes": ((k,), "int64"), "counts": ((k,), "int64")}, "its prototypes")
        classes = own["classes"]
        if k and (
            classes.min() < 0 or classes.max() >= MOST_CLASSES or own["counts"].min() < 1 or len(set(classes)) < k
        ):
            raise WireError("its prototypes have classes or numbers of examples that cannot be")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """C_j = sum_i n_ij C_ij / sum_i n_ij; a class that nobody of this round holds keeps its prototype."""
        sent = [reply.arrays["prototypes"] for reply in replies.values()]
        classes, of = np.unique(np.concatenate([own["classes"] for own in sent]), return_inverse=True)
        counts = np.concatenate([own["counts"] for own in sent]).astype(np.float64)
        sums = np.zeros((len(classes), self.state.values["width"]))
        np.add.at(sums, of, np.concatenate([own["means"] for own in sent]) * counts[:, None])
        means = sums / np.bincount(of, counts)[:, None]
        known = self.state.arrays.get("prototypes")
        if known:
            kept = ~np.isin(known["classes"], classes)
            classes = np.concatenate([classes, known["classes"][kept]])
            means = np.concatenate([means, known["means"][kept]])
        order = np.argsort(classes)
        self.state.arrays["prototypes"] = {"classes": classes[order], "means": means[order].astype(np.float32)}
        return {}
