"""Makes the client for a message: its network, data and task, and the method's side.

A user's network and data are tried out before training, so that errors about them are plain sentences.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fedhet import population, registry, supplied
from fedhet.client.client import Client
from fedhet.client.jobs import Job, Tried, step_memory
from fedhet.client.policy import Policy, Refused
from fedhet.client.secret import NodeSecret
from fedhet.client.size import Size
from fedhet.client.state import ClientStore
from fedhet.client.trial import try_out
from fedhet.client.unsaved_state import unsaved_state
from fedhet.data import ClientData, DataSet, resident, with_drawn_test_part, with_validation
from fedhet.data.own import as_input
from fedhet.errors import DataError, ModelError
from fedhet.files import state_folder
from fedhet.graphs import PermutationGroups
from fedhet.machine import cores, data_in_use, device_of, keep_freed_memory, out_of_memory
from fedhet.options import OWN, Config, fields_of, keys_about, keys_that
from fedhet.population import ClientInfo, ModelFunction
from fedhet.randomness import seeded
from fedhet.representations import Representation
from fedhet.representations.features import fitted, precision
from fedhet.task import Task
from fedhet.wire import Payload, Request

KEPT = 64
"""Number of networks that a process keeps for later clients."""


class Clients:
    """Makes a client for each message, and keeps networks and data between messages.

    Without a user's functions, clients have the configured architectures and data set. A task without a name is
    inferred.
    """

    def __init__(self, model: ModelFunction | None, data: supplied.DataFunction | None, task: Task) -> None:
        self._model, self._data, self._task = model, data, task
        self._free: list[tuple[object, Representation, Size | None]] = []
        self._groups: dict[object, PermutationGroups] = {}
        self._data_kept: dict[tuple[str, object, torch.device], ClientData] = {}
        self._tried: dict[str, Tried] = {}
        self._named: dict[str, str] = {}
        self._serving: object = None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the functions and the task only; another process keeps its own networks and data."""
        return type(self), (self._model, self._data, self._task)

    @contextmanager
    def job(self, info: ClientInfo, request: Request, policy: Policy, payload: Payload) -> Iterator[Job]:
        """Make a client for a message; within the context no other client uses its network.

        Raises a FedhetError if the node's policy refuses, or if the client's model or data cannot be used.
        """
        config = info.config
        self._serve(info, request)
        keep_freed_memory()
        # More threads than cores over all clients of a host slow every one of them down a hundredfold.
        if torch.get_num_threads() != (threads := min(config.threads_per_client, cores())):
            torch.set_num_threads(threads)
        device, secret = device_of(config.device), self._secret_of(info) if policy.keeps_secret else None
        data = self._data_of(info, device)
        if len(data.train) == 0:
            raise DataError("has no training examples")
        policy.check_examples(len(data.train), data.batch_size or config.batch_size)
        dataset = population.dataset_of(config) if self._data is None else None
        with self._network(info, data, device) as (representation, size):
            transform = _transform(representation.precision, dataset)
            if (tried := self._tried.get(info.name)) is None:
                tried = self._tried[info.name] = self._try(representation, data, transform, dataset, config)
            data = self._relabelled(data, tried.task)
            if secret:
                data = secret.grouped(data, policy.least, tried.task.outputs)
            representation.places = tried.task.outputs.places
            client = Client(
                name=info.name,
                config=config,
                request=request,
                data=data,
                representation=representation,
                architecture=self._named[info.name] if self._model else population.architecture_of(info),
                task=tried.task,
                tokens=tried.tokens,
                device=device,
                transform=transform,
                augment=dataset.augment if dataset and config.augment else data.augment,
                store=ClientStore(config.state_dir, request.run, info.name),
                own_data=self._data is not None,
                least=policy.least,
                secret=secret.seed if secret else None,
                outputs=tried.outputs,
                size=size,
            )
            side = registry.client_side(config.method_name)(client)
            policy.check_shared(side)
            build, redraw = partial(self._build, info, size=size), partial(self._redraw, info, size)
            with seeded(client.root, "message", info.name, request.round, request.question):
                yield Job(side, payload, policy, build, redraw, tried)

    def largest(self, info: ClientInfo, request: Request, policy: Policy, payload: Payload, most: int) -> ClientInfo:
        """Return the client with the largest size of its method's with which it trains within so many bytes of memory.

        Counted are those of the process, of a step of training or an evaluation, which are measured, and of three
        copies of the whole network, which is built before it is cut. Raises `Refused` if the smallest size needs more.
        """
        keys, largest = info.config.parameters, info
        for size in reversed(keys.sizes):  # so that a trial leaves little behind for the next one
            sized = replace(info, node_config={**info.node_config, keys.size_name: size})
            try:
                with self.job(sized, request, policy, payload) as job:
                    room = most - data_in_use() - 3 * _bytes_of_whole(job.client)
                    fits = room > 0 and step_memory(job) <= room
            except Exception as error:  # of whichever library runs out of memory
                if not out_of_memory(error):
                    raise
                fits = False
            self._free.clear()
            if not fits:
                break
            largest = sized
        if largest is info:
            raise Refused(
                f"its smallest {keys.size_name}, {keys.sizes[-1]:g}, needs more memory to train than its node allows "
                f"(memory-limit = {most / 1e9:g} GB)"
            )
        return largest

    def _try(
        self,
        representation: Representation,
        data: ClientData,
        transform: Callable[[Tensor], Tensor],
        dataset: DataSet | None,
        config: Config,
    ) -> Tried:
        """Try a client's network on its data; nothing is tried if both are configured."""
        if dataset and not self._model:
            return Tried(dataset.task, dataset.classes)
        task = dataset.task if dataset else self._task
        named = registry.client_side(config.method_name).head_of(config)
        tried = try_out(representation, data, transform, task, self._model, guessed=not named)
        note = unsaved_state(representation.model, transform(data.train.inputs[:2])) if self._model else ""
        return tried._replace(note="; ".join(filter(None, (tried.note, note))))

    def _secret_of(self, info: ClientInfo) -> NodeSecret:
        """Return the node's secret; raises `ChangedExamples` if the run would choose other ones than its first run."""
        config, flat = info.config, info.config.flat()
        replaced = {key for key, spec in fields_of(Config).items() if self._data and spec.metadata["replaced_by"]}
        about = {*keys_about("data")} - replaced - {"dataset", *keys_that("path")}
        split = {"clients": info.num_partitions or config.clients, "split-seed": info.split_seed}
        secret = NodeSecret(state_folder(config.state_dir, ""), info.name, OWN if self._data else config.dataset)
        secret.keep({key: flat[key] for key in sorted(about)} | split)
        return secret

    def let_go(self, client: Client) -> None:
        """Free a client's data on the GPU, at the end of a run."""
        if client.device.type == "cuda":
            for key in [key for key in self._data_kept if key[0] == client.name]:
                del self._data_kept[key]

    def _serve(self, info: ClientInfo, request: Request) -> None:
        """Drop what was kept for another run."""
        serving = (request.run, info.config.method_name, info.config.dataset, info.config.seed)
        if serving != self._serving:
            self._serving = serving
            self._free.clear()
            self._groups.clear()
            self._data_kept.clear()
            self._tried.clear()
            self._named.clear()
            resident.cache_clear()

    @contextmanager
    def _network(
        self, info: ClientInfo, data: ClientData, device: torch.device
    ) -> Iterator[tuple[Representation, Size | None]]:
        """Context with a network in any state, if possible reused from another client.

        With it comes its size, if clients may have parts of the configured network.
        """
        config = info.config
        alike: tuple[object, ...] = (info.name, config.seed)
        if self._model is None:
            dataset = population.dataset_of(config)
            alike = (population.architecture_of(info), dataset.input_shape, dataset.classes)
        parts = registry.traits(config).shares.units is not None
        width = population.width_of(info) if parts else 1.0
        alike = (*alike, device, config.head, config.method_name, config.parameters, width)
        place = next((i for i in reversed(range(len(self._free))) if self._free[i][0] == alike), None)
        if place is not None:
            _, representation, size = self._free.pop(place)
        else:
            model, size = self._build(info, population.owner_of_weights(config, info.name)).to(device), None
            side = registry.client_side(config.method_name)
            if parts:
                known = population.dataset_of(config) if self._data is None else None
                if alike[:-1] not in self._groups:
                    example = _transform(precision(model), known)(data.train.inputs[:2])
                    self._groups[alike[:-1]] = side.groups_of(model, example)
                size = Size(width, self._groups[alike[:-1]])
                if not size.groups:
                    raise ModelError(f"no hidden layer of {model._get_name()} can be cut to a width")
                model = side.cut(model, size)
            representation = Representation(model, side.head_of(config))
            if odd := next((name for name, tensor in model.state_dict().items() if tensor.is_complex()), None):
                name = model._get_name()
                raise ModelError(f"{name}'s {odd} holds complex numbers, which no method shares or saves")
        try:
            yield representation, size
        finally:
            self._free.append((alike, representation, size))
            del self._free[:-KEPT]

    def _build(self, info: ClientInfo, owner: str, size: Size | None = None) -> nn.Module:
        """Build a whole network with the initial weights of `owner`; a size is given once its groups are known."""
        side = registry.client_side(info.config.method_name)
        with seeded(info.config.seed, "initial weights", owner):
            model = self._model(info) if self._model else population.model_of(info)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            self._named[info.name] = f"{type(model).__name__}-{parameters}"  # unlike networks may be of one class
            model = side.adapt(model, info.config)
            return side.cut(model, size.whole) if size else model

    def _redraw(self, info: ClientInfo, size: Size | None, model: nn.Module, owner: str) -> None:
        """Load the weights of a newly built network, which must have the same structure, into a client's network."""
        built = self._build(info, owner, size)
        try:
            model.load_state_dict(size.state(built) if size else built.state_dict())
        except RuntimeError as error:
            raise ModelError(
                f"its {model._get_name()} was built again as another network, and must be the same for a client "
                f"every time: let nothing random decide its layers{supplied.origin(self._model)}"
            ) from error

    def _relabelled(self, data: ClientData, task: Task) -> ClientData:
        """Return and keep data whose labels have the form that methods use."""
        changed = data.relabelled(task.outputs.labels)
        if changed is not data:
            self._data_kept = {key: changed if kept is data else kept for key, kept in self._data_kept.items()}
        return changed

    def _data_of(self, info: ClientInfo, device: torch.device) -> ClientData:
        config, seed = info.config, info.split_seed
        if self._data is None and device.type == "cpu":  # which the population keeps
            return population.data_of(info)
        split = (config.test_split, config.test_share, config.validation, seed) if self._data else config.text
        key = (info.name, split, device)
        if key not in self._data_kept:
            if self._data is None:
                data = population.data_of(info)
            else:
                data = self._data(info)
                if config.test_split == "drawn":
                    data = with_drawn_test_part(data, seed, info.name, config.test_share)
                data = with_validation(data, config.validation, seed, info.name)
            self._data_kept[key] = data.to(device)
        return self._data_kept[key]


def _bytes_of_whole(client: Client) -> int:
    """Return the bytes of the network of which a client has a part."""
    assert client.size is not None
    groups = client.size.groups
    return sum(map(math.prod, groups.shapes(groups.widths).values())) * next(iter(client.tensors.values())).itemsize


def _transform(dtype: torch.dtype | None, dataset: DataSet | None) -> Callable[[Tensor], Tensor]:
    """Return the transform from raw inputs to a network's of a dtype, for the configured data set or a user's data."""
    return fitted(dataset.transform, dtype) if dataset else partial(as_input, dtype=dtype)
