"""Worker processes for the local engine: as many clients train at once as there are cores.

A run begins in one process; once clients have taken some seconds, workers are forked and take over as soon as they are
ready, so a short run never waits for them. While a worker trains one client, the next client's message waits in its
process already. A client's results do not depend on its process: it is seeded for each message, its state is on disk.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from multiprocessing.connection import wait

from fedhet.engines import children
from fedhet.engines.children import ChildError
from fedhet.engines.messages import SharedMessage
from fedhet.engines.worker import Worker, recipe
from fedhet.flower import ClientApp, Context, Message, MessageType
from fedhet.flower.grid import LocalGrid
from fedhet.flower.insides import failure, identify
from fedhet.text import log

AHEAD = 2
"""Replies for each worker that may wait to be fetched one by one: they may be large."""


class WorkerGrid(LocalGrid):
    """A Grid whose nodes are calls of ClientApps in worker processes, a few at a time; a context that ends them.

    A worker rather takes nodes that it had before, and those first that took longest. One that dies, or takes longer
    than the timeout, is the failure of the client that it works on, and another takes its place.

    Args:
        client_app: as of `LocalGrid`, like `clients`; workers get it by cloudpickle.
        clients: number of nodes.
        workers: processes.
        timeout: seconds that a message may take in a worker.
        at_once: whether the first message waits for workers: what happens in this process cannot be timed out.
        datasets: names of those that workers have from this process, where it has loaded them.
        room: number of workers that a GPU has room for, asked once clients have trained here; None: for all. There are
            then no more workers than clients.
    """

    answers = True
    """Every message is answered, if only by an error that it took too long."""

    patience = 5.0
    """Seconds that clients take in this process before workers are started; 0: the first one waits; infinite: never."""

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        *,
        workers: int,
        timeout: float,
        at_once: bool = False,
        datasets: Collection[str] = (),
        room: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(client_app, clients)
        self._number, self._timeout, self._room, self._datasets = workers, timeout, room, datasets
        if at_once:
            self.patience = 0.0
        self._recipe: SharedMessage | None = None
        self._team: list[Worker] = []
        self._took_over = False
        self._spent = 0.0
        self._seconds: dict[int, float] = {}  # that each node's last messages took
        self._had_by: dict[int, Worker] = {}  # node by node
        self._done: dict[str, Message] = {}

    def __enter__(self) -> "WorkerGrid":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._team:
            worker.child.end()
        self._team = []
        if self._recipe:
            self._recipe.close()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Have the messages handled, each within the grid's own timeout; replies come while others are computed."""
        keys = list(self.push_messages(messages))
        missing = len(keys)
        while missing:
            for reply in self.pull_messages(keys):
                missing -= 1
                yield reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that are there, each once; waits a second for one."""
        wanted = [key for key in message_ids if self._knows(key)]
        if not wanted:
            return []
        if not self._takes_over():
            return [self._here(wanted[0])]
        if not any(key in self._done for key in wanted):
            self._hand_out(wanted)
            self._take_in()
            self._hand_out(wanted)  # before the replies are looked at
        return [self._done.pop(key) for key in wanted if key in self._done]

    def _knows(self, key: str) -> bool:
        return key in self._waiting or key in self._done or any(worker.has(key) for worker in self._team)

    def _here(self, key: str) -> Message:
        """Handle a message in this process."""
        message, started = self._waiting.pop(key), time.monotonic()
        reply = self._handle(message)
        self._note(message, started)
        return reply

    def _note(self, message: Message, started: float) -> None:
        """Note the time that a message took; an evaluation does not make a node a quick one."""
        seconds, node = time.monotonic() - started, message.metadata.dst_node_id
        if message.metadata.message_type == MessageType.TRAIN:
            self._spent += seconds
        self._seconds[node] = max(seconds, 0.5 * self._seconds.get(node, 0.0))

    # ---- workers

    def _takes_over(self) -> bool:
        """Whether there are workers, which are started here once training has taken long enough."""
        due = not self._team and self._number > 1 and math.isfinite(self.patience)
        if due and not self._seconds:  # with the first message
            children.prepare()
        if due and self._spent >= self.patience:
            if self._room:
                self._number = min(self._number, self._room(), len(self._contexts))
            if self._number < 2:
                log.info("clients go on in one process: they have no room, or no use, for several on the GPU")
                return False
            try:
                self._recipe = recipe(self._client_app, self._datasets)
            except Exception as error:  # whatever a user's functions hold
                self._alone(f"the client app cannot be copied ({error})")
            else:
                self._team = [Worker(self._recipe) for _ in range(self._number)]
                for worker in self._team if not self.patience else ():
                    worker.wait()
        if self._team and all(worker.failed for worker in self._team):
            self._alone(f"worker processes end as they start, with exit code {self._team[0].child.process.exitcode}")
        self._took_over = self._took_over or any(worker.ready for worker in self._team)
        return self._took_over

    def _alone(self, reason: str) -> None:
        self._number, self._team, self._took_over = 1, [], False
        log.warning("clients go on one after the other: %s", reason)

    def _hand_out(self, wanted: Sequence[str]) -> None:
        """Send messages to free workers, and one more that waits at each; those whose replies are awaited go first."""
        under_way = sum(len(worker.messages) for worker in self._team)
        room = AHEAD * self._number - len(self._done) - under_way
        for waiting in range(2):
            for worker in self._team:
                asked = [key for key in wanted if key in self._waiting]
                keys = asked or (list(self._waiting) if room > 0 else [])
                few = waiting and len(keys) <= self._number  # the last ones go to whoever is free first
                if keys and not few and worker.ready and len(worker.messages) == waiting:
                    self._give(worker, keys)
                    room -= 1

    def _give(self, worker: "Worker", keys: Sequence[str]) -> None:
        """Give a worker the message of these that suits it best."""
        best = max(keys, key=lambda key: self._preference(worker, self._waiting[key]))
        message = self._waiting.pop(best)
        node = message.metadata.dst_node_id
        self._had_by[node] = worker
        worker.take(best, message, self._contexts[node])

    def _preference(self, worker: "Worker", message: Message) -> tuple[bool, float]:
        node = message.metadata.dst_node_id
        return self._had_by.get(node, worker) is worker, self._seconds.get(node, float("inf"))

    def _take_in(self) -> None:
        """Wait for workers a second at most, and take in replies; a worker that is overdue is replaced."""
        busy = [worker for worker in self._team if worker.messages]
        soonest = min((worker.since + self._timeout for worker in busy), default=float("inf"))
        listening = [
            worker.child.connection for worker in self._team if worker.messages or not (worker.ready or worker.failed)
        ]
        answered = wait(listening, timeout=min(1.0, max(0.0, soonest - time.monotonic())))
        for worker in busy:
            (key, message), late = worker.messages[0], time.monotonic() - worker.since >= self._timeout
            if worker.child.connection in answered:
                try:
                    answer: tuple[Message, Context] = worker.child.receive()
                except ChildError as error:
                    self._replace(worker, str(error))
                    continue
                self._note(message, worker.since)
                worker.messages.popleft()
                worker.since = time.monotonic()
                reply, context = answer
                self._contexts[context.node_id] = context
                self._keep(key, reply)
            elif late:
                worker.child.end()
                self._replace(worker, f"no reply within {self._timeout:g} s")

    def _replace(self, worker: "Worker", reason: str) -> None:
        """Restart a worker; its message has failed, and the one that waited there is queued again."""
        (key, message), *others = worker.messages
        self._keep(key, failure(message, reason))
        self._waiting = dict(others) | self._waiting
        worker.messages.clear()
        worker.start()

    def _keep(self, key: str, reply: Message) -> None:
        identify(reply, self._ids)
        self._done[key] = reply
