"""Worker processes for the local engine, each of which trains one client at a time.

A run begins in one process. After clients have trained for some seconds, workers are started, and they take over as
soon as they are ready, so short runs never wait for them. Each worker is served by a thread of the main process. A
client's results do not depend on the process: random generators are seeded for each message, and states are on disk.
"""

import logging
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from multiprocessing.connection import Connection
from threading import Condition, Thread
from typing import Any

import torch

from fedhet import data
from fedhet.engines import children
from fedhet.engines.children import Child
from fedhet.flower import ClientApp, Message, MessageType
from fedhet.flower.grid import LocalGrid, answer
from fedhet.flower.insides import be_server, colour_terminals_only, failure
from fedhet.methods import registry
from fedhet.utils.text import log


class WorkerGrid(LocalGrid):
    """A Flower Grid that answers messages by calling a ClientApp in worker processes.

    It is a context manager that ends the workers. A worker prefers nodes whose messages it has handled before, then
    slow nodes. If a worker dies or exceeds `timeout` seconds, its client fails, and the worker is restarted.

    Workers receive the ClientApp by cloudpickle, and the loaded data sets named in `datasets`. `room` is a function
    that returns how many workers fit in the GPU's memory. Other arguments are explained in `LocalGrid`.
    """

    patience = 5.0  # seconds of training in this process before workers are started (0: before training; inf: never)
    least = 2  # smallest number of workers that are started
    doing: Callable[[str], object] = staticmethod(
        lambda what: None
    )  # called as workers start and, with "", when one has

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        *,
        batch_size: int = 1,
        least_batches: int = 1,
        workers: int,
        timeout: float,
        datasets: Collection[str] = (),
        room: Callable[[], int] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(client_app, clients, batch_size=batch_size, least_batches=least_batches, names=names)
        self._number, self._timeout, self._room, self._datasets = workers, timeout, room, datasets
        self._folder = ExitStack()  # is removed at the end
        self._threads: list[Thread] = []  # one for each worker
        self._children: list[Child] = []
        self._took_over = self._closed = False
        self._failed: list[str] = []  # why workers did not start
        self._spent = 0.0
        self._seconds: dict[int, float] = {}  # the longest time that a node's messages took
        self._had_by: dict[int, Child] = {}  # node by node
        self._changed = Condition()  # guards what follows, and the messages that wait
        self._wanted: Sequence[str] = ()
        self._under_way: set[str] = set()

    def __enter__(self) -> "WorkerGrid":
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for child in [*self._children]:
            child.process.kill()
        for thread in self._threads:
            thread.join()
        self._folder.close()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Yield replies as they arrive; `timeout` is ignored, as the grid has a timeout for each message."""
        with self._changed:
            keys = dict.fromkeys(self.push_messages(messages))
        while keys:
            self._start_when_due()
            wanted, batch, started = list(islice(keys, 256)), list[Message](), time.monotonic()  # all would take long
            with self._changed:
                if not self._took_over and (here := next((key for key in wanted if key in self._waiting), None)):
                    batch = self._taken(here)
                else:
                    self._wanted = wanted
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: any(key in self._done for key in wanted), timeout=1.0)  # noqa: B023
            if batch:
                self._handle(batch)
                self._note(batch, started)
            for key in [key for key in wanted if key in self._done]:
                del keys[key]
                yield self._done.pop(key)

    def _note(self, batch: Sequence[Message], started: float) -> None:
        seconds = time.monotonic() - started
        if batch[0].metadata.message_type == MessageType.TRAIN:
            self._spent += seconds
        for node in (message.metadata.dst_node_id for message in batch):
            self._seconds[node] = max(seconds, self._seconds.get(node, 0.0))

    def _start_when_due(self) -> None:
        """Start workers once training in this process has taken `patience` seconds."""
        due = not self._threads and self._number >= self.least and math.isfinite(self.patience)
        if due and not self._seconds:  # with the first message
            children.prepare()
        if due and self._spent >= self.patience:
            self._start()
        if self._threads and len(self._failed) == len(self._threads):
            self._alone(f"worker processes cannot start ({self._failed[0]})")

    def _start(self) -> None:
        if self._room:
            self._number = min(self._number, self._room(), len(self._contexts))
        if self._number < self.least:
            log.info("clients are trained in one process: there is one client, or GPU memory for one process only")
            return
        loaded = {key: dataset for key, dataset in data.LOADED.items() if key[0] in self._datasets}
        content = self._client_app, registry.registered(), loaded
        folder = tempfile.TemporaryDirectory(prefix="fedhet-", ignore_cleanup_errors=True)
        recipe = f"{self._folder.enter_context(folder)}/recipe"  # a file, so that workers share its tensors in memory
        arguments = recipe, dict(os.environ), logging.getLogger("flwr").level
        try:
            torch.save(content, recipe, pickle_module=children, pickle_protocol=5)
            self._children = [Child(_work, *arguments, name="fedhet worker") for _ in range(self._number)]
        except Exception as error:  # whatever a user's functions hold
            self._alone(f"the client app cannot be copied to worker processes ({error})")
            return
        self.doing(f"starting {self._number} worker processes" if self._number > 1 else "starting a worker process")
        self._threads = [Thread(target=self._serve, args=(child, *arguments), daemon=True) for child in self._children]
        for thread in self._threads:
            thread.start()
        if not self.patience:  # the first message waits
            with self._changed:
                self._changed.wait_for(lambda: self._took_over or len(self._failed) == len(self._threads))

    def _alone(self, reason: str) -> None:
        self._threads, self._took_over, self.patience = [], False, math.inf
        log.warning("clients are trained one after the other: %s", reason)

    def _serve(self, child: Child, *arguments: Any) -> None:
        """Pass messages to the worker `child` until the grid is closed; if it dies, start another with `arguments`."""
        try:
            while not self._closed:
                child.receive()  # that it is ready
                if not self._took_over:
                    self.doing("")
                with self._changed:
                    self._took_over = True
                    self._changed.notify_all()
                while (batch := self._next(child)) and self._handled_by(child, batch):
                    pass
                child.end()
                if not self._closed:
                    child = Child(_work, *arguments, name="fedhet worker")
                    self._children.append(child)
        except Exception as error:  # else the run would wait for this thread
            with self._changed:
                self._failed.append(str(error))
                self._changed.notify_all()
        finally:
            child.end()

    def _handled_by(self, child: Child, batch: Sequence[Message]) -> bool:
        """Pass a batch of messages to the worker `child`; return False if its process ends or exceeds the timeout.

        A single message then gets an error as its reply; several messages will be handled again, one by one.
        """
        started, replies = time.monotonic(), list[Message]()
        nodes = [message.metadata.dst_node_id for message in batch]
        try:
            child.send([(message, self._contexts[node]) for message, node in zip(batch, nodes, strict=True)])
            replies, contexts = child.receive(self._timeout * len(batch))
            lives = True
            self._contexts.update(zip(nodes, contexts, strict=True))
            self._note(batch, started)
        except Exception as error:  # another one than a ChildError would end this thread, and the run would wait
            lives = False
            if len(batch) == 1:
                replies = [failure(batch[0], str(error))]
        with self._changed:
            keys = [message.metadata.message_id for message in batch]
            self._under_way.difference_update(keys)
            if replies:
                self._complete(batch, replies)
            else:
                self._waiting |= {key: [message] for key, message in zip(keys, batch, strict=True)}
            self._changed.notify_all()
        return lives

    def _next(self, child: Child) -> list[Message]:
        """Wait for a batch of messages for the worker `child` and return it; return [] if the grid is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._candidates())
            if self._closed:
                return []
            batch = self._taken(max(self._candidates(), key=lambda key: self._preference(child, self._waiting[key][0])))
            self._under_way.update(message.metadata.message_id for message in batch)
            self._had_by |= {message.metadata.dst_node_id: child for message in batch}
            return batch

    def _candidates(self) -> list[str]:
        """Return the ids of stored messages that a worker may handle next, [] if too many replies are unread."""
        room = 2 * self._number - len(self._done) - len(self._under_way)  # replies that wait may be large
        return [key for key in self._wanted if key in self._waiting] or (list(self._waiting) if room > 0 else [])

    def _preference(self, child: Child, message: Message) -> tuple[bool, float]:
        node = message.metadata.dst_node_id
        return self._had_by.get(node, child) is child, self._seconds.get(node, float("inf"))


def _work(connection: Connection, recipe: str, environment: Mapping[str, str], level: int) -> None:
    os.environ.update(environment)  # the fork server may have started before these were set
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run's process, which ends this one
    logging.getLogger("flwr").setLevel(level)
    colour_terminals_only()
    app, methods, datasets = torch.load(recipe, mmap=True, weights_only=False)
    for method in methods:
        registry.register(method)
    data.LOADED.update(datasets)
    be_server()
    logged: set[str] = set()
    children.send(connection, True)
    while True:
        messages = children.receive(connection)
        children.send(connection, (answer(app, messages, logged), [context for _, context in messages]))
