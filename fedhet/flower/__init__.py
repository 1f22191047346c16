"""The interface to Flower; other packages of fedhet import Flower's public classes from here."""

import re

from flwr import __version__
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from fedhet.utils import text

__all__ = ["Array", "ArrayRecord", "ConfigRecord", "Context", "Error", "Message", "MessageType", "MetricRecord"]
__all__ += ["ClientApp", "Grid", "RecordDict", "Result", "ServerApp", "Strategy", "__version__", "newer_than_tested"]

NEWEST = 43
"""The newest minor version 1.x of Flower that the tests pass with."""


def newer_than_tested(version: str = __version__) -> str:
    """Return a warning for a version of Flower that this version of fedhet is not tested with, or an empty string."""
    major, minor = (int(number) for number in re.findall(r"\d+", version)[:2])
    if (major, minor) <= (1, NEWEST):
        return ""
    return (
        f"Flower {version} is newer than 1.{NEWEST}, the newest version that fedhet {text.__version__} is tested with: "
        f'use a newer fedhet, or pip install "flwr<1.{NEWEST + 1}" if something fails'
    )
