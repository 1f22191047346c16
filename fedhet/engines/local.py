"""The local engine: ServerApp strategy and ClientApp in one process, for a debugger, or with workers, for speed.

Flower has no plug-in point for another backend, but a strategy only needs a `Grid`; this one calls the ClientApp
itself. It must do what Flower's runtime does around a ClientApp: identity, message ids, one context a node, and an
error reply for a client that raises.
"""

import itertools
import logging
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedhet import population
from fedhet.client.app import make_client_app
from fedhet.machine import cores
from fedhet.observing import Observer
from fedhet.options import Config
from fedhet.serving import serve

RUN_ID = 1
SERVER_ID = 1
FIRST_NODE = 100

_log = logging.getLogger("flwr").getChild("fedhet")


class LocalGrid(Grid):
    """A Grid whose nodes are calls of a ClientApp.

    Args:
        client_app: handles every message, one after the other.
        clients: number of nodes; node i has partition id i.
    """

    def __init__(self, client_app: ClientApp, clients: int) -> None:
        be_server()
        self._client_app = client_app
        self._contexts = {
            FIRST_NODE + index: Context(
                run_id=RUN_ID,
                node_id=FIRST_NODE + index,
                node_config={"partition-id": index, "num-partitions": clients},
                state=RecordDict(),
                run_config={},
            )
            for index in range(clients)
        }
        self._ids = itertools.count(1)
        self._waiting: dict[str, Message] = {}

    @property
    def run(self) -> Run:
        """Information on the run: only its number."""
        return Run.create_empty(RUN_ID)

    def set_run(self, run: Run) -> None:
        """There is one run."""

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes; none ever leaves."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take in messages; each is handled when its reply is asked for."""
        ids = []
        for message in messages:
            ids.append(identify(message, self._ids))
            message.content = _own(message.content)
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies, each once, their messages handled now, one after the other."""
        return [self._handle(self._waiting.pop(key)) for key in message_ids if key in self._waiting]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Have the messages handled; a call cannot be timed out."""
        return self.pull_messages(self.push_messages(messages))

    def _handle(self, message: Message) -> Message:
        reply = handled(self._client_app, message, self._contexts[message.metadata.dst_node_id])
        identify(reply, self._ids)
        return reply


def be_server() -> None:
    """Tell Flower whose the messages are that this process makes."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, SERVER_ID


def handled(app: ClientApp, message: Message, context: Context) -> Message:
    """A client's reply; one that raises fails alone: the run goes on, as in Flower's runtime."""
    try:
        return app(message, context)
    except Exception as error:
        _log.exception("client at node %d failed", context.node_id)
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def identify(message: Message, ids: Iterator[int]) -> str:
    """Give a message its id, as a SuperLink does."""
    key = str(next(ids))
    message.metadata.__dict__["_message_id"] = key
    return key


def _own(content: RecordDict) -> RecordDict:
    """A message's records for one client alone: one that changed what it was sent would change it for all.

    The bytes of the arrays are shared, since they cannot be written.
    """
    own = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            private = ArrayRecord()
            private.__dict__["_data"].update(record.items())  # was checked when it was made
            record = private
        own[name] = record
    return own


def server_context(run_config: dict[str, bool | float | int | str] | None = None) -> Context:
    """The context that a ServerApp is called with on a `LocalGrid`."""
    return Context(
        run_id=RUN_ID, node_id=SERVER_ID, node_config={}, state=RecordDict(), run_config=dict(run_config or {})
    )


def run_locally(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    app: ClientApp | None = None,
) -> None:
    """Run a configuration on this machine.

    Args:
        config: the complete configuration.
        folder: the run directory.
        resume: go on with the run in the folder.
        observers: told of every round.
        app: the ClientApp; fedhet's own by default.

    Raises:
        FedhetError: as the strategy's `start`.
    """
    if not config.state_dir:
        config = config.but(state_dir=str(folder / "state"))
    app = app or make_client_app()
    gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    workers = config.workers or (1 if gpu else cores())
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))  # clients seed torch's global generator, the caller's
        if workers > 1 and not multiprocessing.current_process().daemon:  # one of several runs has its core already
            from fedhet.engines.workers import WorkerGrid

            grid: LocalGrid = stack.enter_context(
                WorkerGrid(app, config.clients, workers=workers, timeout=config.timeout)
            )
        else:
            grid = LocalGrid(app, config.clients)
        serve(
            config,
            grid,
            folder,
            engine="local",
            resume=resume,
            shared=population.shared_pool(config),
            observers=observers,
        )
