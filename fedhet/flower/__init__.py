"""The interface to Flower; other packages of fedhet import Flower's public classes from here."""

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

__all__ = ["Array", "ArrayRecord", "ConfigRecord", "Context", "Error", "Message", "MessageType", "MetricRecord"]
__all__ += ["ClientApp", "Grid", "RecordDict", "Result", "ServerApp", "Strategy"]
