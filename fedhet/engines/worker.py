"""A worker: a process that handles clients' messages, as the run's process sees it, and what is done there."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch

from fedhet import data, registry
from fedhet.engines.children import Child, ChildError
from fedhet.engines.messages import SHARES, SharedMessage, receive, send
from fedhet.flower import ClientApp, Context, Message
from fedhet.flower.grid import handled
from fedhet.flower.insides import be_server, colour_terminals_only


class Worker:
    """A process that handles messages.

    Attributes:
        messages: the messages that it has, with their keys: the one that it works on, then one that waits there.
        since: when it began with the first.
        failed: whether it ended before it was ready.
    """

    def __init__(self, recipe: SharedMessage) -> None:
        self.messages: deque[tuple[str, Message]] = deque()
        self.since, self._recipe = 0.0, recipe
        self.start()

    def start(self) -> None:
        """Start the process and send it the recipe."""
        level = logging.getLogger("flwr").level
        self.child = Child(_work, dict(os.environ), level, name="fedhet worker")
        self._ready = self.failed = False
        self.child.send(self._recipe)

    @property
    def ready(self) -> bool:
        """Whether it has said that it can begin."""
        if not self._ready and not self.failed and self.child.connection.poll():
            self.wait()
        return self._ready

    def wait(self) -> None:
        """Wait until it can begin, or has failed."""
        try:
            self._ready = bool(self.child.receive())
        except ChildError:
            self.failed = True

    def take(self, key: str, message: Message, context: Context) -> None:
        """Give it a message."""
        if not self.messages:
            self.since = time.monotonic()
        self.messages.append((key, message))
        self.child.send((message, context))

    def has(self, key: str) -> bool:
        """Whether it has that message."""
        return any(key == mine for mine, _ in self.messages)


def recipe(app: ClientApp, datasets: Collection[str]) -> SharedMessage:
    """Return the message that makes workers: the app, a user's methods and default dtype, and data sets loaded here."""
    loaded = {key: dataset for key, dataset in data.LOADED.items() if SHARES and key[0] in datasets}
    return SharedMessage((app, registry.given(), loaded, torch.get_default_dtype()))


def _work(connection: Connection, environment: Mapping[str, str], level: int) -> None:
    """Handle the messages of clients until the run's process ends."""
    os.environ.update(environment)  # it is forked from a process that may be older than a change of it
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
    waiting: SimpleQueue[tuple[Message, Context]] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, waiting), daemon=True).start()
    while True:
        message, context = waiting.get()
        send(connection, (handled(app, message, context, logged), context))


def _receive(connection: Connection, waiting: "SimpleQueue[tuple[Message, Context]]") -> None:
    """Read messages while the worker works, so that their sender need not wait; end the process with the connection."""
    with contextlib.suppress(Exception):
        while True:
            waiting.put(receive(connection))
    os._exit(1)
