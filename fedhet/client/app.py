"""The Flower ClientApp that serves every method: it answers each message with a reply or a refusal."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.algorithms.matching import groups_to_json
from fedhet.client import audit, work
from fedhet.client.client import Client
from fedhet.client.clients import Clients
from fedhet.client.description import by_name, describe
from fedhet.client.job import Group, Job
from fedhet.client.model_check import PARTS, check_public_dataset
from fedhet.client.policy import Policy, limiting_keys, memory_limited, opened
from fedhet.client.state import CACHE
from fedhet.client.unchanged import check_unchanged
from fedhet.data import PublicDataset
from fedhet.data.files import cache_folder, nothing_downloaded
from fedhet.data.names import CLASSES, LABEL_COLUMNS
from fedhet.data.reading import missing_allowed
from fedhet.data.scales import scales_of
from fedhet.errors import FedhetError, UserCodeError, WriteError
from fedhet.flower import ClientApp, Context, Message, MessageType, RecordDict
from fedhet.flower.grid import ANSWER_ALL
from fedhet.flower.insides import failure, filled, from_bytes, to_bytes
from fedhet.flower.messages import decode, identity, name_of, write_refusal, write_reply
from fedhet.flower.privacy import check_mods, check_one_model, clips, in_flowers_format, noise_multiplier
from fedhet.messages import LostState, Payload, Reply, Report, WireError, spec_of
from fedhet.messages.protocol import DESCRIBE, FIRST, HANDSHAKE, JOIN, MOST_LISTS, names_text, public_dataset_in
from fedhet.methods import registry
from fedhet.methods.method import Method
from fedhet.methods.options import Config
from fedhet.models.copies import kinds_of
from fedhet.setup.client_setup import ClientInfo
from fedhet.setup.user_functions import UserFunctions
from fedhet.tasks import Task, as_task
from fedhet.training import BATCH, Backend, attempt, multiply_adds
from fedhet.utils.files import private_files, state_folder
from fedhet.utils.machine import cluster_machine, in_ray
from fedhet.utils.machine import describe as describe_device
from fedhet.utils.process import standard_settings
from fedhet.utils.randomness import seeded
from fedhet.utils.text import log, log_once, traceback_in_file

SMALL = 20_000_000  # largest number of multiply-adds in a training step for which batches are faster on a CPU

Answer = Callable[[Group], None]
"""A handler of messages: a function that does the work of a group of clients, and sets the `reply` of their jobs."""

OwnBackend = Callable[[Config, Message, Context], Callable[[Job], Backend]]
"""A function of a message that checks its configuration, and returns the function that makes a client's backend."""


def make_client_app(
    model: Any = None,
    data: Any = None,
    *,
    task: str | Task | None = None,
    client_settings: Any = None,
    methods: Sequence[Method | type[Any]] = (),
    mods: list[Any] | None = None,
) -> ClientApp:
    """Return a Flower ClientApp that serves every method of fedhet; each message names its method.

    Args:
        model: a function from a `ClientInfo` to an `nn.Module`, a network class, or a network whose weights all clients
            start from; by default the configured architecture. The network returns a tensor, or an object with
            `.logits`. Torch's, NumPy's and Python's global generators are seeded before each call of the function.
        data: a function from a `ClientInfo` to the client's data: a `ClientData`, a pair (train, test), or a mapping
            with `train`, `test` and optionally `public` (the public dataset: inputs, or inputs and labels), `common`
            (the common test set), `validation` and `augment` (a function from a training batch, and optionally a
            generator, to the augmented batch). A part can be a pair (inputs, labels), a `Dataset`, a `DataLoader` or
            another form (see `fedhet.data.own`). Inputs are passed to the model unchanged, except that bytes are scaled
            to [0, 1]. All clients' examples in place of a function, such as `fedhet.by_column(...)`, are split by keys
            such as `partition`. By default, the client has its part of the configured data set.
        task: a `fedhet.Task` or the name of one, for your own data; by default inferred from labels and outputs.
        client_settings: a function from a `ClientInfo` to a dict with the client's own `local-epochs` (up to
            `max-local-epochs`), `learning-rate`, `batch-size` or `device`; a node can set them in its node config.
        methods: your own methods, or their strategies, if no installed package registers them.
        mods: Flower mods to apply to every message. Flower's mods that clip and add noise (`LocalDpMod`,
            `fixedclipping_mod`, `adaptiveclipping_mod`) are applied to training messages only.

    Raises:
        FedhetError: two methods have the same name, the task does not exist, or `model` or `data` cannot be used.
    """
    for method in methods:
        registry.register(method)
    check_mods([] if mods is None else mods)
    clipping = [mod for mod in mods or () if clips(mod)]
    others = [in_flowers_format, *(mod for mod in mods if mod not in clipping)] if mods else None
    functions = UserFunctions(model, data, task, client_settings)
    clients = Clients(functions.model_of, functions.data_of, as_task(task))
    return Answers(clients, flower=bool(mods), clipping=clipping, settings=functions.settings_of).app(others)


@dataclass
class _Exchange:
    """A message and what its reply needs.

    Attributes:
        contexts: context managers that end with the reply.
        policy: the node's policy.
        state_dir: the folder of the client's state, as it is configured.
        asked, entry: what the message asks, for the node's log and for its audit file.
        job: the client's job, or the exception that prevented it.
        number: identifies the message in the node's privacy account.
        sent: the reply that the same message got before, as bytes; None for a new message.
    """

    message: Message
    context: Context
    contexts: ExitStack
    policy: Policy = field(default_factory=Policy)
    job: Job | BaseException = field(init=False)
    number: str = ""
    sent: bytes | None = None

    def __post_init__(self) -> None:
        self.name = name_of(self.context)
        self.state_dir = str(self.context.node_config.get("state-dir", ""))
        self.asked = self.message.metadata.message_type
        self.entry: dict[str, Any] = {"client": self.name, "asked": self.asked, "run": ""}

    @property
    def home(self) -> Path:
        """The folder with the node's audit file."""
        return state_folder(self.state_dir, "")


class Answers:
    """The handlers of a ClientApp: each creates the client for a message, does the client's work and returns its reply.

    With `flower`, arrays are sent in Flower's format, as Flower's mods expect. `clipping` has the user's mods that
    clip and add noise, and `noise` is their noise multiplier. `backend` makes the backend for the user's own training,
    and `settings` a function that returns a client's own settings.
    """

    def __init__(
        self,
        clients: Clients,
        *,
        flower: bool = False,
        clipping: Sequence[Any] = (),
        noise: float = 0.0,
        backend: OwnBackend | None = None,
        settings: Callable[[ClientInfo], dict[str, Any]] | None = None,
    ) -> None:
        self._clients = clients
        self._flower = flower
        self._clipping = clipping
        self._noise = noise or noise_multiplier(clipping)
        self._backend = backend
        self._settings = settings
        self._owners: dict[tuple[str, str], str] = {}  # the first client with these training examples in a run

    def app(self, mods: list[Any] | None = None) -> ClientApp:
        """Return a Flower ClientApp that answers the messages of fedhet's server, which first pass through `mods`."""
        app = ClientApp(mods=mods)
        app.query()(partial(self, self.question))
        app.train(mods=[_for_models(mod) for mod in self._clipping])(partial(self, work.train))
        app.evaluate()(partial(self, work.evaluate))
        if not (mods or self._clipping or self._backend):
            answers = {MessageType.TRAIN: work.train, MessageType.EVALUATE: work.evaluate}
            setattr(app, ANSWER_ALL, {kind: partial(self.answer_all, answer) for kind, answer in answers.items()})
        return app

    def __call__(self, answer: Answer, message: Message, context: Context) -> Message:
        """Return the reply to a message, which the handler `answer` computes, or a refusal."""
        reply = self.answer_all(answer, [(message, context)])[0]
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def answer_all(self, answer: Answer, messages: Sequence[tuple[Message, Context]]) -> list[Message | BaseException]:
        """Return, for each message in order, the reply that `answer` computes, or the exception that it raises."""
        # `seeded` restores the global generators.
        with standard_settings(), seeded(0, "messages"), ExitStack() as contexts:
            for _, context in messages:
                self._clients.set_name(context.node_config)
            exchanges = [
                _Exchange(message, context, contexts.enter_context(ExitStack())) for message, context in messages
            ]
            for exchange in exchanges:
                exchange.job = attempt(self._open, exchange)
            jobs = [exchange.job for exchange in exchanges if isinstance(exchange.job, Job) and exchange.sent is None]
            if jobs:
                answer(Group(jobs))
            return [attempt(self._close, exchange) for exchange in exchanges]

    def _open(self, exchange: _Exchange) -> Job:
        """Read a message, and return the job of its client."""
        message = exchange.message
        context = exchange.context
        machine = bool(cluster_machine())
        info, request, policy = opened(message, context, in_cluster=machine, settings=self._settings)
        asked = f"{exchange.asked} {request.question}".strip()
        run = f"run {request.run}, " if request.run else ""
        if self._settings is None:
            self._clients.check_keys(context.node_config)
        exchange.policy = policy
        exchange.entry |= {"asked": asked, "run": request.run}
        exchange.asked = f"{asked} ({info.config.method_name}, {run}round {request.round})"
        exchange.state_dir = info.config.state_dir
        images = cache_folder() if machine else None
        if policy.deployed:
            images = exchange.home / CACHE
        backend = self._backend(info.config, message, context) if self._backend else None
        payload = decode(message.content)
        contexts = exchange.contexts
        contexts.enter_context(private_files(policy.deployed))
        contexts.enter_context(memory_limited(context))
        contexts.enter_context(nothing_downloaded(images))
        job = contexts.enter_context(self._clients.job(info, request, policy, payload, placeholders=bool(backend)))
        if backend:
            job.backend = backend(job)
        if self._clipping:
            check_one_model("a mod of Flower's", info.config.method_name, job.side.traits, [spec_of(job.side.shared())])
        if message.metadata.message_type != MessageType.TRAIN:
            job.account = None
        if job.account and job.client.privacy:
            exchange.number = identity(message.content, context.node_config)
            contexts.enter_context(job.account.alone())
            job.client.privacy.stream, exchange.sent = job.account.begin(exchange.number)
        return job

    def _close(self, exchange: _Exchange) -> Message:
        """Return the reply of a client, or a refusal."""
        message = exchange.message
        policy = exchange.policy
        try:
            with exchange.contexts:
                job, record, sizes = self._record(exchange)
            if policy.audits:
                policy.check_size(sizes)
                epsilon = job.client.privacy.epsilon if job.client.privacy else 0.0
                entry = exchange.entry | {"sent": sizes, "epsilon": epsilon}
                origin = audit.keep(exchange.home, message, check=policy.check_rate, **entry)
                log.info("client %s: %s: sent %s%s", exchange.name, exchange.asked, audit.in_words(sizes), origin)
            if job.client.device.type == "cuda":
                torch.cuda.empty_cache()  # clients in other processes share the GPU
            return Message(record, reply_to=message)
        except Exception as raised:  # elsewhere Flower would tell the server what was raised
            return self._refusal(exchange, raised)

    def _record(self, exchange: _Exchange) -> tuple[Job, RecordDict, dict[str, int]]:
        """Return a job, the content of its reply, and the bytes by kind, if they are noted; raise the work's error."""
        job = exchange.job
        if not isinstance(job, Job):
            raise job
        if job.error is not None:
            raise job.error
        if exchange.sent is not None:
            return job, from_bytes(exchange.sent), {"the reply to the same message again": len(exchange.sent)}
        reply = self._reply(job)
        record = write_reply(reply, flower=job.client.request.flower or self._flower)
        filled(record, {name: records for name, records in job.records.items() if name not in record})
        if job.account:
            job.account.answer(exchange.number, to_bytes(record))
        return job, record, audit.sizes_of(reply, record, job.side) if job.policy.audits else {}

    def _refusal(self, exchange: _Exchange, raised: Exception) -> Message:
        """Return the message that says why a client failed; raise what only Flower can report."""
        message = exchange.message
        policy = exchange.policy
        name = exchange.name
        if in_ray() and not policy.deployed and not isinstance(raised, FedhetError | OSError):
            # Flower and Ray print the traceback of every client several times.
            return failure(message, traceback_in_file(raised, f"client {name}: {exchange.asked}"))
        error = UserCodeError.within(raised)
        if not isinstance(error, FedhetError | OSError) and not policy.deployed:
            raise raised
        # The server knows the name, and counts equal reasons.
        reason = policy.reason(name, error).removeprefix(f"client {name}: ")
        machine = cluster_machine()
        reason = f"on machine {machine}: {reason}" if machine else reason
        again = not isinstance(error, FedhetError) or error.may_pass
        flags = {"lost": isinstance(error, LostState), "unwritten": isinstance(error, WriteError)}
        origin = ""
        if policy.deployed or limiting_keys(exchange.context.node_config):
            told, origin = audit.refuse(exchange.home, message, reason, check=policy.check_rate, **exchange.entry)
            if told != reason:  # the refusal is that of a message which did not fail
                reason, again, flags = told, False, {}
        log.info("client %s: %s: refused: %s%s", name, exchange.asked, reason, origin)
        if "request" not in message.content:  # a strategy of Flower's would read a refusal as arrays and metrics
            log_once(self, reason)
            return failure(message, reason)
        return Message(write_refusal(name, reason, again=again, **flags), reply_to=message)

    def question(self, group: Group) -> None:
        """Answer queries: report in a handshake, send initial weights, or, as an unseen client, train after the run."""
        group.run(self._answer_query)
        work.join(group, [job for job in group.jobs if job.client.request.question == JOIN])

    def _answer_query(self, job: Job) -> None:
        client = job.client
        side = job.side
        question = client.request.question
        if question == JOIN:
            return
        if question == FIRST:
            job.reply.payload = work.first(job)
            return
        if question == DESCRIBE:
            # Refused before anything is computed.
            job.policy.check_kinds("fedhet describe", {"statistics"}, remedy="others are described")
            with missing_allowed(True):
                job.reply.payload = Payload({DESCRIBE: describe(job)})
            # Numbers of examples are added by these names.
            names = {kind: listed for kind, listed in client.data.names.items() if kind in (CLASSES, LABEL_COLUMNS)}
            job.reply.report.names = names_text(names)
            return
        if question != HANDSHAKE:
            raise WireError(f"unknown query {question[:100]!r}: install the server's version of fedhet on this node")
        job.seed()
        work.restore(job)
        client.store.make_room()
        check_unchanged(job, None if self._backend else self._owners)
        shared = public_dataset_in(job.payload)
        if shared is not None:
            client.check_size("public inputs", shared.inputs, lambda: client.data.train.inputs[:BATCH], least=1.0)
        public = _own_public_dataset(job) if shared is None else shared
        if public is not None:
            if side.traits.public != "none":
                check_public_dataset(job, client.prepared(public), labelled=side.traits.public == "labelled")
            client.request = replace(client.request, public=public.digest)  # from now on
        if shared is not None:
            client.store.keep(shared)  # in a file of the node; `client.public` reads it in every round
        job.reply.payload = side.handshake(job.payload)

    def _reply(self, job: Job) -> Reply:
        """Return a job's reply with what the node's policy allows."""
        client = job.client
        policy = job.policy
        reply = job.reply
        report = reply.report
        reply.payload = policy.outgoing(reply.payload, job.side)
        if client.request.question == HANDSHAKE:
            self._introduce(job, report)
        report.note = "; ".join(job.remarks)
        if report.note and (policy.deployed or policy.noise):  # it was found with the client's examples
            log_once(self, f"client {client.name}: {report.note}")
            report.note = ""
        if client.request.question == HANDSHAKE and not policy.tells_metrics:
            report.note = "its node sends no metrics (key allow of its node config), so its accuracy is not known"
        report.hides_work = client.secret is not None  # steps depend on the classes
        reply.work = reply.work if report.hides_work else client.trained.work
        if not policy.tells_metrics:
            return replace(reply, measured={}, further={}, evaluated={})
        loss = client.trained.mean_loss if client.privacy is None else None
        if loss is not None:
            reply.train_loss = policy.rounded(loss)
            reply.train_weight = policy.loss_weight(client.task, client.data.train.labels)
        reply.further = {name: policy.rounded(value) for name, value in reply.further.items()}
        reply.evaluated = {name: policy.rounded(value) for name, value in reply.evaluated.items()}
        return reply

    def _introduce(self, job: Job, report: Report) -> None:
        info = job.info
        client = job.client
        task = client.task
        report.task = task.name
        report.metric = task.metric
        report.own_data = client.own_data
        report.own_split = client.own_data and not self._clients.pool
        report.common_test = not client.own_data or bool(client.data.common)
        evaluates = job.policy.tells_metrics and not job.policy.noise
        if client.own_data and client.data.common and client.config.test_on != "local" and evaluates:
            report.common = client.store.first("digests", {})[PARTS["common"]]
        if client.config.batch_norm != "aggregate":
            report.normalised = "statistic" in {*kinds_of(client.model).values(), *job.side.kinds.values()}
        numbers = [task.outputs.numbers(name, client.data.train.labels, client.outputs) for name in task.metrics]
        report.labels = 1 if self._backend else numbers[0]
        report.further = ",".join(map(str, numbers[1:]))
        report.architecture = client.architecture if client.config.disclose_architecture else ""
        if not job.side.trains_network:
            report.architecture = client.config.method_name
        if info.partition_id is not None and info.num_partitions is not None and "num-partitions" in info.node_config:
            report.partition_id = info.partition_id
            report.partitions = info.num_partitions
        report.device = describe_device(client.device)
        report.outputs = client.outputs
        report.spec = spec_of(job.side.shared())
        # A shared layer of a network with one layer has both inputs and classes.
        all_kinds = bool(report.common) or 0 < len(job.side.shared_names()) == len(client.names)
        compared = [kind for kind in client.data.names if all_kinds or job.side.traits.compares(kind)]
        numbered = (CLASSES, LABEL_COLUMNS) if task.by_number else ()
        free = [kind for kind in numbered if kind in client.data.names and kind not in compared]
        report.names = names_text({kind: client.data.names[kind] for kind in (*compared, *free)})
        report.free = ",".join(free)
        report.noise = self._noise
        report.wrapped = self._backend is not None
        report.fitted = client.estimator is not None
        report.groups = groups_to_json(client.part.groups) if client.part else ""
        private = job.policy.deployed or client.privacy or self._backend
        if not private and 1 < len(counts := by_name(job)) <= MOST_LISTS:
            report.classes = names_text({name: [str(count)] for name, count in counts.items()})
        if client.own_data and evaluates and job.policy.allowed is None and not self._backend:
            train = client.data.train
            scales = scales_of(train.inputs, client.data.names, task.targets(train.labels), least=job.policy.least)
            report.scales = names_text({name: (kind, f"{size:.1g}") for name, (kind, size) in scales.items()})
        # Only the local engine makes batches. Under `dp-noise`, two nodes of one name would wait for each other in one.
        report.alike = "" if private or in_ray() else _alike(client)
        public = _own_public_dataset(job)
        if public is not None and not (job.side.traits.public == "labelled" and public.labels is None):
            report.public = public.digest
            report.public_size = len(public)


def _for_models(mod: Any) -> Any:
    """Wrap a Flower mod so that replies without arrays, such as refusals, are returned unchanged."""

    def applied(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        reply = call_next(message, context)
        return mod(message, context, lambda *_: reply) if reply.has_content() and reply.content.array_records else reply

    return applied


def _alike(client: Client) -> str:
    """Return a text that is equal for clients that may be trained in one batch; "" if it never pays (see `SMALL`)."""
    chosen = client.config.client_batching
    if chosen == "off" or client.estimator or type(client.data.train.inputs) is not Tensor:
        return ""
    if chosen == "auto" and client.device.type == "cpu":
        most = SMALL / min(client.optimisation().batch_size, len(client.data.train))
        modules = [module for module in client.model.modules() if not isinstance(module, nn.Embedding)]
        # Each parameter is used at least once for an example, so large networks need not be run.
        if sum(array.numel() for module in modules for array in module.parameters(recurse=False)) > most:
            return ""
        work = attempt(multiply_adds, client.model, client.transform(client.data.train.inputs[:2]))
        if isinstance(work, BaseException) or work > most:
            return ""
    shapes = [tuple(tensor.shape) for tensor in client.tensors.values()]
    return hashlib.blake2b(f"{type(client.model)} {shapes}".encode(), digest_size=8).hexdigest()


def _own_public_dataset(job: Job) -> PublicDataset | None:
    public = job.client.data.public
    return public if public is None or job.side.traits.public == "labelled" else public.unlabelled


app = make_client_app()
"""The ClientApp that `flwr run` uses."""
