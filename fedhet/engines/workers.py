"""Worker processes for the local engine, each of which trains one client at a time.

A run begins in one process. After clients have trained for some seconds, workers are started, and they take over as
soon as they are ready, so short runs never wait for them. Each worker is served by a thread of the main process. A
client's results do not depend on the process: random generators are seeded for each message, and states are on disk.
"""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from multiprocessing.connection import Connection

import torch

from fedhet import data
from fedhet.engines.batches import ONE_BY_ONE, Batching, BatchingGrid, answer
from fedhet.engines.children import SHARES, Child, ChildError, SharedMessage, prepare, receive, send
from fedhet.flower import ClientApp, Context, Message, MessageType
from fedhet.flower.insides import be_server, colour_terminals_only, failure, identify
from fedhet.methods import registry
from fedhet.utils.text import log

WINDOW = 256
"""Number of the earliest messages without reply that are awaited at a time; looking at all takes long for many."""

AHEAD = 2
"""Number of replies per worker that may wait until they are fetched, since replies may be large."""


class WorkerGrid(BatchingGrid):
    """A Flower Grid that answers messages by calling a ClientApp in worker processes.

    It is a context manager that ends the workers. A worker prefers nodes whose messages it has handled before, then
    slow nodes. If a worker dies or takes longer than `timeout` seconds, its current client fails, and it is restarted.

    Workers receive the ClientApp by cloudpickle, and the loaded data sets named in `datasets`. With `at_once`, they
    start before the first message, so that the timeout applies to every message. `room` returns the number
    of workers that fit in the GPU's memory.
    """

    patience = 5.0
    """Seconds of training in this process before workers are started; 0: the first message waits; infinite: never."""

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        batching: Batching = ONE_BY_ONE,
        *,
        workers: int,
        timeout: float,
        at_once: bool = False,
        datasets: Collection[str] = (),
        room: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(client_app, clients, batching)
        self._number, self._timeout, self._room, self._datasets = workers, timeout, room, datasets
        if at_once:
            self.patience = 0.0
        self._recipe: SharedMessage | None = None
        self._team: list[tuple[Worker, threading.Thread]] = []
        self._took_over = self._closed = False
        self._failed = 0  # workers that ended as they started
        self._spent = 0.0
        self._seconds: dict[int, float] = {}  # time of each node's last messages
        self._had_by: dict[int, Worker] = {}  # node by node
        self._changed = threading.Condition()  # guards what follows, and the messages that wait
        self._wanted: Sequence[str] = ()
        self._under_way: dict[str, Message] = {}

    def __enter__(self) -> "WorkerGrid":
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker, thread in self._team:
            worker.child.process.kill()
            thread.join()
            worker.child.end()
        self._team = []
        if self._recipe:
            self._recipe.close()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages until a worker is free or this process pulls their replies; return their ids."""
        with self._changed:
            return super().push_messages(messages)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Yield replies to messages as they arrive; the grid's own timeout applies to each message, not `timeout`."""
        keys = dict.fromkeys(self.push_messages(messages))
        while keys:
            for reply in self.pull_messages(list(islice(keys, WINDOW))):
                del keys[reply.metadata.reply_to_message_id]
                yield reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the available replies to messages with these ids, after waiting at most a second for the first one."""
        self._start_when_due()
        with self._changed:
            known = self._waiting, self._under_way, self._done
            wanted = [key for key in message_ids if any(key in each for each in known)]
            here = None if self._took_over else next((key for key in wanted if key in self._waiting), None)
            if here is None:
                self._wanted = wanted
                self._changed.notify_all()
                self._changed.wait_for(lambda: not wanted or any(key in self._done for key in wanted), timeout=1.0)
                return [self._done.pop(key) for key in wanted if key in self._done]
            messages, started = self._taken(here), time.monotonic()
        self._handle_batch(messages)
        self._note(messages.values(), started)
        return [self._done.pop(key) for key in wanted if key in messages]

    def _note(self, messages: Collection[Message], started: float) -> None:
        """Record the time that nodes took for messages; a new value is at least half of the recorded one."""
        seconds = time.monotonic() - started
        for message in messages:
            if message.metadata.message_type == MessageType.TRAIN:
                self._spent += seconds / len(messages)
            node = message.metadata.dst_node_id
            self._seconds[node] = max(seconds, 0.5 * self._seconds.get(node, 0.0))

    # ---- workers

    def _start_when_due(self) -> None:
        """Start workers when training in this process has exceeded the time set in `patience`."""
        due = not self._team and self._number > 1 and math.isfinite(self.patience)
        if due and not self._seconds:  # with the first message
            prepare()
        if due and self._spent >= self.patience:
            self._start()
        if self._team and self._failed == len(self._team):
            exit_code = self._team[0][0].child.process.exitcode
            self._alone(f"worker processes end at their start, with exit code {exit_code}")

    def _start(self) -> None:
        if self._room:
            self._number = min(self._number, self._room(), len(self._contexts))
        if self._number < 2:
            log.info("clients stay in one process: the GPU has no room, or no use, for several")
            return
        try:
            self._recipe = recipe(self._client_app, self._datasets)
        except Exception as error:  # whatever a user's functions hold
            self._alone(f"the client app cannot be copied ({error})")
            return
        workers = [Worker(self._recipe) for _ in range(self._number)]
        self._team = [(each, threading.Thread(target=self._serve, args=(each,), daemon=True)) for each in workers]
        for _, thread in self._team:
            thread.start()
        if not self.patience:  # the first message waits
            with self._changed:
                self._changed.wait_for(lambda: self._took_over or self._failed == len(workers))

    def _alone(self, reason: str) -> None:
        self._number, self._team, self._took_over = 1, [], False
        log.warning("clients run one after the other: %s", reason)

    def _serve(self, worker: "Worker") -> None:
        """Pass messages to a worker, one after the other, until the grid is closed; restart the worker if it fails."""
        while not self._closed:
            ready = worker.wait()
            with self._changed:
                self._took_over |= ready
                self._failed += not ready
                self._changed.notify_all()
            if not ready:
                return
            while (keys := self._next(worker)) and self._handled_by(worker, keys):
                pass
            if not self._closed:
                worker.start()

    def _handled_by(self, worker: "Worker", keys: Sequence[str]) -> bool:
        """Pass the messages with the ids `keys` to a worker; return False if its process ends.

        In this case, a single message gets an error as its reply, and several messages wait again, one by one.
        """
        messages, started = [self._under_way[key] for key in keys], time.monotonic()
        nodes, replies, lives = [message.metadata.dst_node_id for message in messages], list[Message](), True
        try:
            pairs = [(message, self._contexts[node]) for message, node in zip(messages, nodes, strict=True)]
            replies, contexts = worker.handle(pairs, self._timeout * len(messages))
            self._contexts.update(zip(nodes, contexts, strict=True))
            self._note(messages, started)
        except Exception as error:  # another one than a ChildError would end this thread, and the run would wait
            replies, lives = [failure(messages[0], str(error))] if len(messages) == 1 else [], False
            worker.child.end()
        for reply in replies:
            identify(reply, self._ids)
        with self._changed:
            under_way = {key: self._under_way.pop(key) for key in keys}
            self._done.update(zip(keys, replies, strict=False))
            if not replies:
                self._waiting |= under_way
                self._batch_of |= {key: (key,) for key in keys}
            self._changed.notify_all()
        return lives

    def _next(self, worker: "Worker") -> list[str]:
        """Wait for messages that a worker should handle together, and return their ids; empty if the grid is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._candidates())
            if self._closed:
                return []
            key = max(self._candidates(), key=lambda key: self._preference(worker, self._waiting[key]))
            messages = self._taken(key)
            self._under_way |= messages
            self._had_by |= {message.metadata.dst_node_id: worker for message in messages.values()}
            return [*messages]

    def _candidates(self) -> list[str]:
        """Return ids of unsent messages: the awaited ones or, if none and few are done or under way, all."""
        room = AHEAD * self._number - len(self._done) - len(self._under_way)
        return [key for key in self._wanted if key in self._waiting] or (list(self._waiting) if room > 0 else [])

    def _preference(self, worker: "Worker", message: Message) -> tuple[bool, float]:
        node = message.metadata.dst_node_id
        return self._had_by.get(node, worker) is worker, self._seconds.get(node, float("inf"))


class Worker:
    """A child process that handles clients' messages; its first message is the `recipe`. It can be restarted."""

    def __init__(self, recipe: SharedMessage) -> None:
        self._recipe = recipe
        self.start()

    def start(self) -> None:
        """Start the process and send it the recipe."""
        level = logging.getLogger("flwr").level
        self.child = Child(_work, dict(os.environ), level, name="fedhet worker")
        self.child.send(self._recipe)

    def wait(self) -> bool:
        """Wait until the process is ready; return False if it ended instead."""
        try:
            return bool(self.child.receive())
        except ChildError:
            return False

    def handle(
        self, messages: Sequence[tuple[Message, Context]], timeout: float
    ) -> tuple[list[Message], list[Context]]:
        """Return replies and the nodes' new contexts; raise a ChildError after `timeout` s or if the process ends."""
        self.child.send(messages)
        replies: tuple[list[Message], list[Context]] = self.child.receive(timeout)
        return replies


def recipe(app: ClientApp, datasets: Collection[str]) -> SharedMessage:
    """Return the workers' first message: ClientApp, registered methods, loaded data sets and torch's default dtype."""
    loaded = {key: dataset for key, dataset in data.LOADED.items() if SHARES and key[0] in datasets}
    return SharedMessage((app, registry.registered(), loaded, torch.get_default_dtype()))


def _work(connection: Connection, environment: Mapping[str, str], level: int) -> None:
    """Handle messages to clients until the parent process ends."""
    os.environ.update(environment)  # the fork server may have started before these were set
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run's process, which ends this one
    logging.getLogger("flwr").setLevel(level)
    colour_terminals_only()
    app, methods, datasets, dtype = receive(connection)
    torch.set_default_dtype(dtype)
    for method in methods:
        registry.register(method)
    data.LOADED.update(datasets)
    be_server()
    logged: set[str] = set()
    send(connection, True)
    while True:
        messages = receive(connection)
        send(connection, (answer(app, messages, logged), [context for _, context in messages]))
