"""Worker processes for the local engine: as many clients train at once as there are cores.

A run begins in one process; once clients have taken some seconds, workers are forked and take over as soon as they are
ready, so a short run never waits for them. While a worker trains one client, the next client's message waits in its
process already. A client's results do not depend on its process: it is seeded for each message, its state is on disk.
"""

import heapq
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
from fedhet.learning import ClientBatching
from fedhet.text import log

AHEAD = 2
"""Replies for each worker that may wait to be fetched one by one: they may be large."""


class WorkerGrid(LocalGrid):
    """A Grid whose nodes are calls of ClientApps in worker processes, a few at a time; a context that ends them.

    A worker rather takes nodes that it had before, and those first that took longest. One that dies, or takes longer
    than the timeout, is the failure of the client that it works on, and another takes its place; batched clients are
    then tried one by one, to find out whose failure it is.

    Args:
        client_app: as of `LocalGrid`, like `clients` and `batching`; workers get it by cloudpickle.
        clients: number of nodes.
        workers: processes.
        timeout: seconds that a message may take in a worker, or those of batched clients together.
        at_once: whether the first message waits for workers: what happens in this process cannot be timed out.
        batching: handles several messages of a worker side by side.
        datasets: names of those that workers have from this process, where it has loaded them.
        room: number of workers that a GPU has room for, asked once clients have trained here; None: for all. There are
            then no more workers than batches that all clients make.
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
        batching: ClientBatching | None = None,
        datasets: Collection[str] = (),
        room: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(client_app, clients, batching)
        self._number, self._timeout, self._room, self._datasets = workers, timeout, room, datasets
        if at_once:
            self.patience = 0.0
        self._recipe: SharedMessage | None = None
        self._team: list[Worker] = []
        self._took_over = False
        self._pushed = 0
        self._suspects: set[str] = set()  # of batched clients that failed
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

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take in messages; workers share them evenly."""
        keys = list(super().push_messages(messages))
        self._pushed = len(keys)
        return keys

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
            return self._here(wanted[: self._side_by_side])
        if not any(key in self._done for key in wanted):
            self._hand_out(wanted)
            self._take_in()
            self._hand_out(wanted)  # before the replies are looked at
        return [self._done.pop(key) for key in wanted if key in self._done]

    def _knows(self, key: str) -> bool:
        return key in self._waiting or key in self._done or any(worker.has(key) for worker in self._team)

    def _here(self, keys: Sequence[str]) -> list[Message]:
        """Handle messages in this process."""
        messages, started = [self._waiting.pop(key) for key in keys], time.monotonic()
        replies = self._handle_all(messages)
        self._note(messages, started)
        return replies

    def _note(self, messages: Collection[Message], started: float) -> None:
        """Note the time that messages took; an evaluation does not make a node a quick one."""
        seconds = time.monotonic() - started
        if any(message.metadata.message_type == MessageType.TRAIN for message in messages):
            self._spent += seconds
        for message in messages:
            node = message.metadata.dst_node_id
            self._seconds[node] = max(seconds / len(messages), 0.5 * self._seconds.get(node, 0.0))

    # ---- workers

    def _takes_over(self) -> bool:
        """Whether there are workers, which are started here once training has taken long enough."""
        due = not self._team and self._number > 1 and math.isfinite(self.patience)
        if due and not self._seconds:  # with the first message
            children.prepare()
        if due and self._spent >= self.patience:
            if self._room:
                self._number = min(self._number, self._room(), math.ceil(len(self._contexts) / self._side_by_side))
            if self._number < 2:
                log.info("clients go on in one process: they have no room, or no use, for several on the GPU")
                return False
            try:
                self._recipe = recipe(self._client_app, self._datasets)
            except Exception as error:  # whatever a user's functions hold
                self._alone(f"the client app cannot be copied ({error})")
            else:
                self._team = [Worker(self._recipe, self._batching) for _ in range(self._number)]
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
        under_way = sum(len(group) for worker in self._team for group in worker.groups)
        room = AHEAD * self._number - len(self._done) - under_way
        for waiting in range(1 if self._batching else 2):
            for worker in self._team:
                asked = [key for key in wanted if key in self._waiting]
                keys = asked or (list(self._waiting) if room > 0 else [])
                few = waiting and len(keys) <= self._number  # the last ones go to whoever is free first
                if keys and not few and worker.ready and len(worker.groups) == waiting:
                    room -= self._give(worker, keys)

    def _give(self, worker: "Worker", keys: Sequence[str]) -> int:
        """Give a worker the message of these that suits it best, or a batch of them; how many it got."""
        most = min(self._side_by_side, math.ceil(self._pushed / self._number))
        best = heapq.nlargest(most, keys, key=lambda key: self._preference(worker, self._waiting[key]))
        best = [key for key in best if key in self._suspects][:1] or best
        messages = {key: self._waiting.pop(key) for key in best}
        nodes = [message.metadata.dst_node_id for message in messages.values()]
        self._had_by.update(dict.fromkeys(nodes, worker))
        worker.take(messages, [self._contexts[node] for node in nodes])
        return len(messages)

    def _preference(self, worker: "Worker", message: Message) -> tuple[bool, float]:
        node = message.metadata.dst_node_id
        return self._had_by.get(node, worker) is worker, self._seconds.get(node, float("inf"))

    def _take_in(self) -> None:
        """Wait for workers a second at most, and take in replies; a worker that is overdue is replaced."""
        busy = [worker for worker in self._team if worker.groups]
        soonest = min((worker.since + self._timeout for worker in busy), default=float("inf"))
        listening = [
            worker.child.connection for worker in self._team if worker.groups or not (worker.ready or worker.failed)
        ]
        answered = wait(listening, timeout=min(1.0, max(0.0, soonest - time.monotonic())))
        for worker in busy:
            messages, late = worker.groups[0], time.monotonic() - worker.since >= self._timeout
            if worker.child.connection in answered:
                try:
                    answers: list[tuple[Message, Context]] = worker.child.receive()
                except ChildError as error:
                    self._replace(worker, str(error))
                    continue
                self._note(messages.values(), worker.since)
                worker.groups.popleft()
                worker.since = time.monotonic()
                self._contexts.update((context.node_id, context) for _, context in answers)
                self._keep(messages, [reply for reply, _ in answers])
            elif late:
                worker.child.end()
                self._replace(worker, f"no reply within {self._timeout:g} s")

    def _replace(self, worker: "Worker", reason: str) -> None:
        """Restart a worker; its message has failed, and the one that waited there is queued again."""
        messages, *others = worker.groups
        if len(messages) > 1:
            self._suspects.update(messages)
            others.append(messages)
        else:
            self._keep(messages, [failure(message, reason) for message in messages.values()])
        self._waiting = {key: message for group in others for key, message in group.items()} | self._waiting
        worker.groups.clear()
        worker.start()

    def _keep(self, messages: Iterable[str], replies: Sequence[Message]) -> None:
        for reply in replies:
            identify(reply, self._ids)
        self._done.update(zip(messages, replies, strict=True))
