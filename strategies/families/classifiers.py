"""Methods whose clients fit a classifier of scikit-learn to their own examples, as baselines."""

from collections.abc import Callable
from dataclasses import dataclass

from fedhet.methods.method import T
from fedhet.methods.options import OF_NETWORKS, Options
from fedhet.server import FederatedStrategy, State, Traits, method


@dataclass(frozen=True)
class Keys(Options):
    without = (*OF_NETWORKS, "start-from")


TRAITS = Traits(keeps="model", predicts="a classifier of scikit-learn", inside="")


class Classifiers(FederatedStrategy[Keys, State]):
    """Base class of strategies whose clients fit a classifier and send nothing."""


def classifier(name: str, client: str, traits: Traits = TRAITS) -> Callable[[T], T]:
    """Return a decorator that declares the method `name`, which has one round; `client` is `"package.module:Class"`."""
    return method(name, traits, Keys, client=client, common={"rounds": 1}, own={"rounds": 1})
