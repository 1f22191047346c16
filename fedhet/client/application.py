"""What a ClientApp does with messages, whichever method they are of, around the method's client side."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from flwr.app import Context, Message
from torch import nn

from fedhet import given, population, registry
from fedhet.client import jobs, node
from fedhet.client.jobs import Job
from fedhet.client.networks import Network, Networks
from fedhet.client.policy import Policy
from fedhet.client.side import Client, LostState
from fedhet.client.state import Keeping, Pools
from fedhet.client.trying import Tried, own_data, own_network, take_weights, try_out
from fedhet.data import ClientData, Examples, Pool, resident, with_validation
from fedhet.data.files import nothing_downloaded
from fedhet.data.own import as_input
from fedhet.errors import DataError, FedhetError, ModelError
from fedhet.flower import decode, mods, write_reply
from fedhet.machine import describe, device_of, keep_freed_memory
from fedhet.options import Config
from fedhet.population import ClientInfo, ModelFunction
from fedhet.randomness import derive_seed, seed_everything
from fedhet.task import Task
from fedhet.wire import Payload, Refusal, Reply, Report, Request, WireError, spec_of
from fedhet.wire.protocol import FIRST, GREET, JOIN, pool_in


class Application:
    """Handles messages; holds what outlives one: networks, data, pools."""

    def __init__(
        self,
        model: ModelFunction | None,
        data: given.DataFunction | None,
        task: Task | None,
        mods: bool = False,
        clipped: bool = False,
    ) -> None:
        self._model, self._data, self._task, self._mods, self._clipped = model, data, task, mods, clipped
        self._networks, self._pools = Networks(), Pools()
        self._data_kept: dict[tuple[str, object, torch.device], ClientData] = {}
        self._tried: dict[str, Tried] = {}
        self._serving: object = None

    def __reduce__(self) -> tuple[object, ...]:
        """Another process makes its own from the same: what is kept here, it keeps itself."""
        return Application, (self._model, self._data, self._task, self._mods, self._clipped)

    # ---- messages

    def query(self, message: Message, context: Context) -> Message:
        """The greeting, the first weights of all, and methods' own questions."""
        return self._handle(message, context, self._answer)

    def train(self, message: Message, context: Context) -> Message:
        """Training, with an evaluation before and after."""
        return self._handle(message, context, self._train)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Evaluation without training: the received model, then the client's own."""
        return self._handle(message, context, self._evaluate)

    def _answer(self, job: Job) -> Payload:
        side, question = job.side, job.client.request.question
        if question == FIRST:
            self._initialise(job, "all")
            return side.first()
        if question == JOIN:
            initial = partial(self._initialise, job, job.client.name)
            return jobs.join(job, scratch=initial, received=partial(self._restore, job))
        self._restore(job)
        if question != GREET:
            return side.answer(question, job.payload)
        if self._clipped:
            mods.check_clipped(side.client.config.prefix, side.traits, side.shared())
        job.keeping.make_room()
        self._take_pool(job)
        return side.handshake(job.payload)

    def _train(self, job: Job) -> Payload:
        self._restore(job)
        jobs.begin(job)
        jobs.train(job)
        return jobs.end(job)

    def _evaluate(self, job: Job) -> Payload:
        side, client = job.side, job.client
        self._restore(job)
        # What a client received is its own model until it has trained one.
        personal = side.traits.keeps == "model"
        trained = personal and client.request.expected >= 0 and not job.keeping.lost
        own = {name: tensor.clone() for name, tensor in client.tensors.items()} if trained else {}
        jobs.take_in(job)
        jobs.measure(job, "received")
        if personal:
            if trained:
                client.model.load_state_dict(own)
            jobs.measure(job, "trained")
        # What is shared may be a part only: then each client's network is its own, whatever it keeps.
        if client.request.final and (personal or not side.traits.whole):
            job.keeping.write_model(client.tensors)
        return side.finish(job.payload) if client.request.final else Payload()

    def _handle(self, message: Message, context: Context, work: Callable[[Job], Payload]) -> Message:
        name, policy = node.name_of(context), Policy()
        try:
            info, request, policy = node.opened(message, context)
            with (
                node.memory_limited(context),
                nothing_downloaded(policy.deployed),
                self._job(info, request, policy, message) as job,
            ):
                payload = policy.outgoing(work(job), job.side)
                client, trained = job.client, job.client.trained
                loss = trained.mean_loss if policy.tells_metrics else None
                reply = Reply(
                    name,
                    len(client.data.train),
                    payload,
                    self._report(job, context),
                    len(client.data.test),
                    None if loss is None else policy.rounded(loss),
                    job.measured,
                    len(client.data.validation) if client.data.validation else 0,
                    trained.work,
                )
                record = write_reply(reply, flower=client.request.flower or self._mods)
            if client.request.final:
                self._let_go(client)
            if client.device.type == "cuda":  # clients in other processes share the GPU
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

    @contextmanager
    def _job(self, info: ClientInfo, request: Request, policy: Policy, message: Message) -> Iterator[Job]:
        """What a message asks of its client, with a network that is its alone inside."""
        config = info.config
        self._serve(config, request.run)
        keep_freed_memory()
        # More threads than cores over all clients of a host slow every one of them down a hundredfold.
        if torch.get_num_threads() != config.threads_per_client:
            torch.set_num_threads(config.threads_per_client)
        device = device_of(config.device)
        data = self._data_of(info, device)
        if len(data.train) == 0:
            raise DataError("has no training examples")
        policy.check_examples(len(data.train))
        if self._data and config.test_on != "local" and not data.common:
            raise DataError(
                f"client {info.name}: test-on = {config.test_on} needs a common test set, which data of one's own "
                "bring along: have the data function return it as `common`, or set test-on = local"
            )
        keeping = Keeping(config.state_dir, request.run, info.name)
        dataset = population.dataset_of(config) if self._data is None else None
        with self._networks.lend(self._kind(info), lambda: self._network(info)) as network:
            network = network.to(device)
            own = partial(as_input, dtype=network.precision)
            transform = network.takes(dataset.transform) if dataset else own
            task = dataset.task if dataset else self._task
            if self._model or self._data:
                if info.name not in self._tried:
                    self._tried[info.name] = try_out(
                        network, data, transform, task, self._model, guessed=not config.head
                    )
                task = self._tried[info.name].task
            assert task is not None
            augment = dataset.augment if dataset and config.augment else data.augment
            client = Client(
                name=info.name,
                config=config,
                request=request,
                data=data,
                network=network,
                task=task,
                device=device,
                transform=transform,
                augment=augment,
                find_pool=lambda digest: _fitting(
                    self._pools.find(digest, keeping.pools, data.shared, info.name), data.train
                ),
                own_data=self._data is not None,
                least=policy.least,
            )
            side = registry.client_side(config.prefix)(client)
            policy.check_shared(side)
            yield Job(info, side, decode(message.content), keeping, policy)

    def _report(self, job: Job, context: Context) -> Report:
        """What a client says of itself, beside the method's reply."""
        client, lost = job.client, job.keeping.lost
        report = Report(client.name, lost_state=client.request.expected if lost else -1)
        if client.request.question == GREET:
            report.metric, report.own_data = client.task.metric, client.own_data
            report.labels = client.data.train.labels.shape[1] if client.task.metric in ("auc", "r2") else 1
            report.architecture = client.network.architecture if client.config.disclose_architecture else ""
            report.partition, report.device = node.partition_of(context), describe(client.device)
            if tried := self._tried.get(client.name):
                report.note, report.outputs = tried.note, tried.outputs
            else:
                report.outputs = population.dataset_of(client.config).classes
            if report.note and job.policy.deployed:  # it was found with examples of the client's own
                mods.tell(self, f"client {client.name}: {report.note}")
                report.note = ""
            if not job.policy.tells_metrics:
                report.note = "its node lets out no metrics (allow), so its accuracy is not known"
            report.spec = spec_of(job.side.shared())
            labelled, pool = job.side.traits.pool == "labelled", client.data.shared
            if pool is not None and not (labelled and pool.labels is None):
                pool = pool if labelled else pool.unlabelled
                report.pool, report.pool_size = pool.digest, len(pool)
        return report

    # ---- the client

    def _kind(self, info: ClientInfo) -> object:
        """Clients of one kind have networks that are built alike."""
        own: tuple[object, ...] = (info.name, info.config.seed)
        if self._model is None:
            dataset = population.dataset_of(info.config)
            own = (population.architecture_of(info), dataset.input_shape, dataset.classes)
        return (*own, info.config.head, info.config.prefix, info.config.parameters)

    def _network(self, info: ClientInfo) -> Network:
        try:
            model = self._build(info)
            name = type(model).__name__ if self._model else population.architecture_of(info)
            head = registry.client_side(info.config.prefix).head_of(info.config)
            return Network(model, head, name)
        except ValueError as error:
            raise ModelError(f"client {info.name}: {error}") from error

    def _build(self, info: ClientInfo) -> nn.Module:
        model = own_network(self._model, info) if self._model else population.model_of(info)
        return registry.client_side(info.config.prefix).adapt(model, info.config)

    def _data_of(self, info: ClientInfo, device: torch.device) -> ClientData:
        if self._data is None and device.type == "cpu":
            return population.data_of(info)
        validation, seed = info.config.validation, info.split_seed
        key = (info.name, info.config.text() if self._data is None else (validation, seed), device)
        if key not in self._data_kept:
            if self._data is None:
                data = population.data_of(info)
            else:
                data = with_validation(own_data(self._data, info), validation, seed, info.name)
            self._data_kept[key] = data.to(device)
        return self._data_kept[key]

    def _serve(self, config: Config, run: str) -> None:
        """Let go of what was kept for another run: networks, data on a device, pools."""
        serving = (run, config.prefix, config.dataset, config.seed)
        if serving != self._serving:
            self._serving = serving
            self._networks, self._pools = Networks(), Pools()
            self._data_kept.clear()
            resident.cache_clear()
            self._tried.clear()

    def _let_go(self, client: Client) -> None:
        """A run is at its end for this client: its data leave the GPU."""
        if client.device.type == "cuda":
            for key in [key for key in self._data_kept if key[0] == client.name]:
                del self._data_kept[key]

    # ---- state

    def _restore(self, job: Job) -> None:
        """Put the model and the method's memory into the state that the server expects."""
        client, side = job.client, job.side
        saved, own = job.keeping.restored(side), client.tensors
        sent = job.payload.arrays.get("model", {})
        known = {name for name, key in side.shared_names().items() if key in sent}
        known |= {name.removeprefix("model/") for name in saved}
        if not own.keys() <= known:
            together = client.config.shared_init and side.traits.together
            self._initialise(job, "all" if together else client.name)
        with torch.no_grad():
            for name, tensor in saved.items():
                group, _, key = name.partition("/")
                if group == "model":
                    own[key].copy_(tensor)
                else:
                    client.memory[key] = tensor.to(client.device, copy=True)

    def _initialise(self, job: Job, whose: str) -> None:
        """Fresh weights: the client's own, or those from which all clients of a run start."""
        seed_everything(derive_seed(job.client.config.seed, "initial weights", whose))
        take_weights(job.client.model, self._build(job.info), self._model)

    def _take_pool(self, job: Job) -> None:
        """The pool that the server sent is the client's from now on; without one, that of its own data."""
        pool = pool_in(job.payload)
        if pool is not None:
            self._pools.keep(pool, job.keeping.pools)
        elif pool := job.client.data.shared:
            pool = pool if job.side.traits.pool == "labelled" else pool.unlabelled
        if pool is not None:
            job.client.request = replace(job.client.request, pool=pool.digest)


def _fitting(pool: Pool, examples: Examples) -> Pool:
    """The pool, if its examples are like a client's own: of as many axes, features or channels.

    Raises:
        WireError: they are not.
    """
    own, shape = examples.inputs[:1].shape, pool.inputs.shape
    if len(shape) != len(own) or (len(own) != 3 and shape[1] != own[1]):
        raise WireError(
            f"the request's shared pool has examples of shape {list(shape[1:])}, and this client's are of "
            f"{list(own[1:])}"
        )
    return pool
