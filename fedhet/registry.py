"""Public functions that look up methods, models, data sets and partitions by name."""

from fedhet.data import names as datasets
from fedhet.data import partitions as partitions
from fedhet.methods.registry import *  # noqa: F403
from fedhet.models import names as models

__all__ = ["datasets", "models", "partitions"]
