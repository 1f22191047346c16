"""The ClientApp's functions: from a message to the reply, whichever method they are of."""

from collections.abc import Callable
from dataclasses import replace

import torch

from fedhet import population
from fedhet.client import jobs, node
from fedhet.client.clients import Clients
from fedhet.client.jobs import Job
from fedhet.client.policy import Policy
from fedhet.client.side import LostState
from fedhet.data import PublicDataset
from fedhet.data.files import nothing_downloaded
from fedhet.errors import FedhetError
from fedhet.flower import Context, Message, decode, mods, write_reply
from fedhet.machine import describe
from fedhet.wire import Payload, Refusal, Reply, Report, spec_of
from fedhet.wire.protocol import FIRST, HANDSHAKE, JOIN, public_dataset_in


class Application:
    """Answers messages.

    Args:
        clients: makes the client that a message is for.
        mods: whether Flower's mods stand around messages: then arrays travel in Flower's format.
        clipped: whether some of them clip what a client trained.
    """

    def __init__(self, clients: Clients, *, mods: bool = False, clipped: bool = False) -> None:
        self._clients, self._mods, self._clipped = clients, mods, clipped

    def query(self, message: Message, context: Context) -> Message:
        """Answer the handshake, a question for the first weights of all, or a method's own question."""
        return self._answer(message, context, self._question)

    def train(self, message: Message, context: Context) -> Message:
        """Train, with an evaluation before and after."""
        return self._answer(message, context, jobs.train)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Evaluate without training: the received model, then the client's own."""
        return self._answer(message, context, jobs.evaluate)

    def _answer(self, message: Message, context: Context, work: Callable[[Job], Payload]) -> Message:
        name, policy = node.name_of(context), Policy()
        try:
            info, request, policy = node.opened(message, context)
            with (
                node.memory_limited(context),
                nothing_downloaded(policy.deployed),
                self._clients.job(info, request, policy, decode(message.content)) as job,
            ):
                payload = policy.outgoing(work(job), job.side)
                reply = self._reply(job, payload, self._report(job, context))
                record = write_reply(reply, flower=request.flower or self._mods)
            if request.final:
                self._clients.let_go(job.client)
            if job.client.device.type == "cuda":  # clients in other processes share the GPU
                torch.cuda.empty_cache()
        except Exception as error:  # elsewhere Flower would tell the server what was raised
            if not isinstance(error, FedhetError) and not policy.deployed:
                raise
            if "request" not in message.content:  # there is nobody who reads a refusal
                mods.tell(self, str(error))
            reason = policy.reason(name, error)
            reason = reason.removeprefix(f"client {name}: ")  # the server knows who it is, and counts alike ones
            record = write_reply(Refusal(name, reason, lost=isinstance(error, LostState)))
        return Message(record, reply_to=message)

    def _question(self, job: Job) -> Payload:
        side, question = job.side, job.client.request.question
        if question == FIRST:
            jobs.initialise(job, "all")
            return side.share()
        if question == JOIN:
            return jobs.join(job)
        jobs.restore(job)
        if question != HANDSHAKE:
            return side.answer(question, job.payload)
        if self._clipped:
            mods.check_clipped(side.client.config.method_name, side.traits, side.shared())
        job.keeping.make_room()
        self._take_public_dataset(job)
        return side.handshake(job.payload)

    def _take_public_dataset(self, job: Job) -> None:
        """The public dataset that the server sent is the client's from now on; without one, that of its own data."""
        if (public := public_dataset_in(job.payload)) is not None:
            self._clients.public_datasets.keep(public, job.keeping.public_datasets)
        if (public := public if public is not None else _own_public_dataset(job)) is not None:
            job.client.request = replace(job.client.request, public=public.digest)

    @staticmethod
    def _reply(job: Job, payload: Payload, report: Report) -> Reply:
        data, trained, policy = job.client.data, job.client.trained, job.policy
        loss = trained.mean_loss if policy.tells_metrics else None
        return Reply(
            client=job.client.name,
            examples=len(data.train),
            payload=payload,
            report=report,
            test_examples=len(data.test),
            train_loss=None if loss is None else policy.rounded(loss),
            measured=job.measured,
            validation_examples=len(data.validation) if data.validation else 0,
            work=trained.work,
        )

    def _report(self, job: Job, context: Context) -> Report:
        """Return the client report, which goes beside the method's reply."""
        client = job.client
        report = Report(client.name, lost_state=client.request.expected if job.keeping.lost else -1)
        if client.request.question != HANDSHAKE:
            return report
        report.metric, report.own_data = client.task.metric, client.own_data
        report.common_test = not client.own_data or bool(client.data.common)
        report.labels = client.data.train.labels.shape[1] if client.task.metric in ("auc", "r2") else 1
        report.architecture = client.network.architecture if client.config.disclose_architecture else ""
        report.partition, report.device = node.partition_of(context), describe(client.device)
        if job.tried:
            report.note, report.outputs = job.tried.note, job.tried.outputs
        else:
            report.outputs = population.dataset_of(client.config).classes
        if report.note and job.policy.deployed:  # it was found with examples of the client's own
            mods.tell(self, f"client {client.name}: {report.note}")
            report.note = ""
        if not job.policy.tells_metrics:
            report.note = "its node lets out no metrics (allow), so its accuracy is not known"
        report.spec = spec_of(job.side.shared())
        public = _own_public_dataset(job)
        if public is not None and not (job.side.traits.public == "labelled" and public.labels is None):
            report.public, report.public_size = public.digest, len(public)
        return report


def _own_public_dataset(job: Job) -> PublicDataset | None:
    """The public dataset that the client's own data bring, with labels where the method needs them."""
    public = job.client.data.public
    return public if public is None or job.side.traits.public == "labelled" else public.unlabelled
