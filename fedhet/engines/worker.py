"""A worker process that handles clients' messages: its handle in the run's process, and its own loop."""

import logging
import os
import signal
from collections.abc import Collection, Mapping
from multiprocessing.connection import Connection

import torch

from fedhet import data
from fedhet.engines.children import Child, ChildError
from fedhet.engines.messages import SHARES, SharedMessage, receive, send
from fedhet.flower import ClientApp, Context, Message
from fedhet.flower.grid import handled
from fedhet.flower.insides import be_server, colour_terminals_only
from fedhet.methods import registry


class Worker:
    """A process that handles messages, started from a recipe (`recipe`); it can be restarted after a failure."""

    def __init__(self, recipe: SharedMessage) -> None:
        self._recipe = recipe
        self.start()

    def start(self) -> None:
        """Start the process and send it the recipe."""
        level = logging.getLogger("flwr").level
        self.child = Child(_work, dict(os.environ), level, name="fedhet worker")
        self.child.send(self._recipe)

    def wait(self) -> bool:
        """Wait until the process can begin; return False if it ended as it started."""
        try:
            return bool(self.child.receive())
        except ChildError:
            return False

    def handle(self, message: Message, context: Context, timeout: float) -> tuple[Message, Context]:
        """Return the reply and the node's new context; raises a ChildError if the process ends or is too late."""
        self.child.send((message, context))
        reply: tuple[Message, Context] = self.child.receive(timeout)
        return reply


def recipe(app: ClientApp, datasets: Collection[str]) -> SharedMessage:
    """Return the message that sets up workers: the app, a user's methods and default dtype, and loaded data sets."""
    loaded = {key: dataset for key, dataset in data.LOADED.items() if SHARES and key[0] in datasets}
    return SharedMessage((app, registry.given(), loaded, torch.get_default_dtype()))


def _work(connection: Connection, environment: Mapping[str, str], level: int) -> None:
    """Handle the messages of clients until the run's process ends."""
    os.environ.update(environment)  # the fork server may have started before these were set
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run's process, which ends this one
    logging.getLogger("flwr").setLevel(level)
    colour_terminals_only()
    app, methods, datasets, dtype = receive(connection)
    torch.set_default_dtype(dtype)
    for method in methods:
        registry.give(method)
    data.LOADED.update(datasets)
    be_server()
    logged: set[str] = set()
    send(connection, True)
    while True:
        message, context = receive(connection)
        send(connection, (handled(app, message, context, logged), context))
