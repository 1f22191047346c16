"""Worker processes for the local engine, each of which trains one client or batch of clients at a time.

A run begins in one process. After clients have trained for some seconds, workers are started, and they take over as
soon as they are ready, so short runs never wait for them. A client's results do not depend on the process: random
generators are seeded for each message, and states are on disk.
"""

import logging
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedhet import data
from fedhet.engines import children
from fedhet.engines.children import Child, ChildError
from fedhet.flower import ClientApp, Message, MessageType
from fedhet.flower.grid import LocalGrid, answer
from fedhet.flower.insides import be_server, colour_terminals_only, failure
from fedhet.methods import registry
from fedhet.utils.text import log


@dataclass(eq=False)
class _Worker:
    """A worker process, whether it has started, and the messages that it must answer before a time (`deadline`)."""

    child: Child
    ready: bool = False
    batch: list[Message] = field(default_factory=list)
    given: float = 0.0
    deadline: float = math.inf


class WorkerGrid(LocalGrid):
    """A Flower Grid that answers messages by calling a ClientApp in worker processes.

    It is a context manager that ends the workers. A worker prefers nodes whose messages it has handled before, then
    slow nodes. If a worker dies or exceeds `timeout` seconds, its client fails, and the worker is replaced.

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
        self._workers: list[_Worker] = []
        self._arguments: tuple[Any, ...] = ()  # of worker processes
        self._took_over = False
        self._spent = 0.0
        self._seconds: dict[int, float] = {}  # the longest time that a node's messages took
        self._had_by: dict[int, _Worker] = {}  # node by node

    def __enter__(self) -> "WorkerGrid":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.child.end()
        self._folder.close()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Yield replies as they arrive; `timeout` is ignored, as the grid has a timeout for each message."""
        keys = dict.fromkeys(self.push_messages(messages))
        while keys:
            wanted = list(islice(keys, 256))  # all would take long
            if not any(key in self._done for key in wanted):
                self._go_on(wanted)
            for key in [key for key in wanted if key in self._done]:
                del keys[key]
                yield self._done.pop(key)

    def _go_on(self, wanted: Sequence[str]) -> None:
        """Wait for a reply of a worker or, without workers, handle a batch of messages in this process."""
        self._start_when_due()
        if self._workers and (self._took_over or not self.patience):
            self._give(wanted)
            self._hear(min(worker.deadline for worker in self._workers) - time.monotonic())
            self._give(wanted)
            return
        began = time.monotonic()
        batch = self._taken(next(key for key in wanted if key in self._waiting))
        self._handle(batch)
        self._note(batch, began)
        self._hear(0.0)

    def _note(self, batch: Sequence[Message], started: float) -> None:
        seconds = time.monotonic() - started
        if batch[0].metadata.message_type == MessageType.TRAIN:
            self._spent += seconds
        for node in (message.metadata.dst_node_id for message in batch):
            self._seconds[node] = max(seconds, self._seconds.get(node, 0.0))

    def _start_when_due(self) -> None:
        """Start workers once training in this process has taken `patience` seconds."""
        due = not self._workers and self._number >= self.least and math.isfinite(self.patience)
        if due and not self._seconds:  # with the first message
            children.prepare()
        if due and self._spent >= self.patience:
            self._start()

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
        self._arguments = recipe, dict(os.environ), logging.getLogger("flwr").level
        try:
            torch.save(content, recipe, pickle_module=children, pickle_protocol=5)
            self._workers = [self._worker() for _ in range(self._number)]
        except Exception as error:  # whatever a user's functions hold
            self._alone(f"the client app cannot be copied to worker processes ({error})")
            return
        self.doing(f"starting {self._number} worker processes" if self._number > 1 else "starting a worker process")

    def _worker(self) -> _Worker:
        return _Worker(Child(_work, *self._arguments, name="fedhet worker"))

    def _alone(self, reason: str) -> None:
        self._took_over = False
        self.patience = math.inf
        log.warning("clients are trained one after the other: %s", reason)

    def _give(self, wanted: Sequence[str]) -> None:
        """Send batches of messages with ids in `wanted` to workers that have none."""
        for worker in [worker for worker in self._workers if worker.ready and not worker.batch]:
            keys = [key for key in wanted if key in self._waiting]
            if not keys:
                return
            batch = self._taken(max(keys, key=lambda key: self._preference(worker, self._waiting[key][0])))
            nodes = [message.metadata.dst_node_id for message in batch]
            self._had_by |= dict.fromkeys(nodes, worker)
            worker.batch, worker.given = batch, time.monotonic()
            worker.deadline = worker.given + self._timeout * len(batch)
            worker.child.send([(message, self._contexts[node]) for message, node in zip(batch, nodes, strict=True)])

    def _preference(self, worker: _Worker, message: Message) -> tuple[bool, float]:
        node = message.metadata.dst_node_id
        return self._had_by.get(node, worker) is worker, self._seconds.get(node, math.inf)

    def _hear(self, seconds: float) -> None:
        """Wait at most `seconds` for workers to start or reply; replace those that end or exceed their deadline."""
        busy = {worker.child.connection: worker for worker in self._workers if worker.batch or not worker.ready}
        heard = wait(list(busy), max(seconds, 0.0) if math.isfinite(seconds) else None)
        for connection, worker in busy.items():
            try:
                if connection in heard:
                    self._receive(worker)
                elif time.monotonic() > worker.deadline:
                    limit = f"{self._timeout * len(worker.batch):g}"
                    raise ChildError(f"no reply within {limit} s from the client's process: increase timeout")
            except Exception as error:  # whatever a reply's content raises
                self._replace(worker, str(error))

    def _receive(self, worker: _Worker) -> None:
        content = worker.child.receive()
        if worker.ready:
            replies, contexts = content
            self._contexts.update((context.node_id, context) for context in contexts)
            self._note(worker.batch, worker.given)
            self._complete(worker.batch, replies)
            worker.batch = []
            worker.deadline = math.inf
        elif not self._took_over:
            self._took_over = True
            self.doing("")
        worker.ready = True

    def _replace(self, worker: _Worker, reason: str) -> None:
        """End a worker, and start another one unless it could not start; a message that it had alone has failed."""
        worker.child.end()
        self._workers.remove(worker)
        if len(worker.batch) == 1:
            self._complete(worker.batch, [failure(worker.batch[0], reason)])
        else:  # one of them is the cause
            self._waiting |= {message.metadata.message_id: [message] for message in worker.batch}
        if worker.ready:
            with suppress(OSError):  # such as of a machine without memory
                self._workers.append(self._worker())
        if not self._workers:
            self._alone(f"worker processes cannot start ({reason})")


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
