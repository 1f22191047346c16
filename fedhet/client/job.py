"""The clients that answer messages together: a `Job` is a message and its client, and a `Group` has several jobs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fedhet.client.client import AnySide, Client
from fedhet.client.policy import Policy
from fedhet.client.secret import NodeSecret
from fedhet.messages import Payload, Reply, Report
from fedhet.setup.client_setup import ClientInfo
from fedhet.training import Backend, Batches, attempt
from fedhet.utils.randomness import SecretStream, derive_seed, seed_everything

R = TypeVar("R")
V = TypeVar("V")


class Streams(NamedTuple):
    """Random streams of a client's training.

    Attributes:
        batches: the random generator for the order of examples and augmentation.
        order: the secret stream for the order of examples, if the node has a secret; else None.
        dropout: the seed of dropout.
    """

    batches: torch.Generator
    order: SecretStream | None
    dropout: int


@dataclass(eq=False)
class Job:
    """A message, and the client that answers it by the method's client side (`side`).

    Attributes:
        info: the client's identity and configuration.
        side: the method's client side, with the client as its attribute `client`.
        payload: the arrays and values that the server sent.
        policy: the rules of the client's node.
        build: function that builds the whole network with the initial weights of a client (its name), or `all` clients.
        redraw: function that loads such initial weights into the client's network.
        backend: computes trainings and evaluations.
        error: the exception that ended the client's work.
        scored: the fine-tuned personal model's tensors at the run's last evaluation; empty without fine-tuning.
        records: records by name that the user's own train function adds to its reply, for hooks of a user's strategy.
        remarks: messages for the server's log.
        account: the node's secret, whose privacy account training is charged to; None without `dp-noise`.
        reply: the reply, before the node's policy decides what is sent.
        streams: the random streams of training.
    """

    info: ClientInfo
    side: AnySide
    payload: Payload
    policy: Policy
    build: Callable[[str], nn.Module]
    redraw: Callable[[str], None]
    backend: Backend = field(default_factory=Batches)
    error: BaseException | None = None
    scored: dict[str, Tensor] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    account: NodeSecret | None = None
    reply: Reply = field(init=False)
    streams: Streams = field(init=False)

    def __post_init__(self) -> None:
        client: Client = self.side.client
        data = client.data
        self.client = client
        self.reply = Reply(len(data.train), Payload(), Report(client.name), len(data.test))
        self.reply.validation_examples = len(data.validation) if data.validation else 0
        self.streams = Streams(client.generator("batches"), client.order("batches"), client.seed("dropout"))

    def say(self, remark: str) -> None:
        """Add a remark for the server's log, unless it was added before."""
        if remark and remark not in self.remarks:
            self.remarks.append(remark)

    def seed(self) -> None:
        """Seed the global random generators for the message."""
        client = self.client
        request = client.request
        seed_everything(derive_seed(client.root, "message", client.name, request.round, request.question))


@dataclass
class Group:
    """Clients whose messages are answered together, stage by stage; they have the same backend."""

    jobs: Sequence[Job]

    @property
    def backend(self) -> Backend:
        """The backend of the group's clients."""
        return self.jobs[0].backend

    def run(self, stage: Callable[[Job], R], jobs: Iterable[Job] | None = None) -> dict[Job, R]:
        """Return the result of `stage` for each of `jobs` (default: all); an exception becomes the job's `error`.

        Jobs that have failed are left out.
        """
        results: dict[Job, R] = {}
        for job in self.jobs if jobs is None else jobs:
            if job.error is not None:
                continue
            result = attempt(stage, job)
            if isinstance(result, BaseException):
                job.error = result
            else:
                results[job] = result
        return results

    def compute(
        self,
        compute: Callable[[Sequence[V]], Sequence[R | BaseException]],
        values: Mapping[Job, V],
        use: Callable[[Job, V, R], None],
    ) -> None:
        """Let a backend `compute` trainings or evaluations, and call `use` with each job, its value and the result."""
        live = {job: value for job, value in values.items() if job.error is None}
        results = dict(zip(live, compute([*live.values()]), strict=True))

        def finish(job: Job) -> None:
            result = results[job]
            if isinstance(result, BaseException):
                raise result
            use(job, live[job], result)

        self.run(finish, live)
