"""Makes the client that a message is for: its network, data, task and public dataset, and the method's side."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from fedhet import given, population, registry
from fedhet.client.jobs import Job
from fedhet.client.networks import Network, Networks
from fedhet.client.policy import Policy
from fedhet.client.side import Client
from fedhet.client.state import Keeping, PublicDatasets
from fedhet.client.trying import Tried, own_data, own_network, take_weights, try_out
from fedhet.data import ClientData, Examples, PublicDataset, resident, with_validation
from fedhet.data.own import as_input
from fedhet.errors import DataError
from fedhet.machine import device_of, keep_freed_memory
from fedhet.population import ClientInfo, ModelFunction
from fedhet.task import Task
from fedhet.wire import Payload, Request, WireError


class Clients:
    """Makes clients, one for each message; holds what outlives a message: networks, data, public datasets.

    Args:
        model: the user's function of a client; None for the configured architectures.
        data: the user's function of a client; None for the configured data set.
        task: of the user's data; None to infer it.
    """

    def __init__(self, model: ModelFunction | None, data: given.DataFunction | None, task: Task | None) -> None:
        self._model, self._data, self._task = model, data, task
        self._networks, self.public_datasets = Networks(), PublicDatasets()
        self._data_kept: dict[tuple[str, object, torch.device], ClientData] = {}
        self._tried: dict[str, Tried] = {}
        self._serving: object = None

    def __reduce__(self) -> tuple[object, ...]:
        """Another process makes its own from the same: what is kept here, it keeps itself."""
        return Clients, (self._model, self._data, self._task)

    @contextmanager
    def job(self, info: ClientInfo, request: Request, policy: Policy, payload: Payload) -> Iterator[Job]:
        """Make a client for a message; inside the context it has a network to itself.

        Raises:
            FedhetError: the node's policy refuses, or the client's model or data cannot be used.
        """
        config = info.config
        self._serve(info, request)
        keep_freed_memory()
        # More threads than cores over all clients of a host slow every one of them down a hundredfold.
        if torch.get_num_threads() != config.threads_per_client:
            torch.set_num_threads(config.threads_per_client)
        device = device_of(config.device)
        data = self._data_of(info, device)
        if len(data.train) == 0:
            raise DataError("has no training examples")
        policy.check_examples(len(data.train))
        keeping = Keeping(config.state_dir, request.run, info.name)
        dataset = population.dataset_of(config) if self._data is None else None
        with self._networks.lend(self._kind(info), partial(self._network, info)) as network:
            network = network.to(device)
            transform = network.takes(dataset.transform) if dataset else partial(as_input, dtype=network.precision)
            task = dataset.task if dataset else self._task
            if self._model or self._data:
                if info.name not in self._tried:
                    self._tried[info.name] = try_out(
                        network, data, transform, task, self._model, guessed=not config.head
                    )
                task = self._tried[info.name].task
            assert task is not None
            client = Client(
                name=info.name,
                config=config,
                request=request,
                data=data,
                network=network,
                task=task,
                device=device,
                transform=transform,
                augment=dataset.augment if dataset and config.augment else data.augment,
                find_public=lambda digest: _fitting(
                    self.public_datasets.find(digest, keeping.public_datasets, data.public, info.name), data.train
                ),
                own_data=self._data is not None,
                least=policy.least,
            )
            side = registry.client_side(config.method_name)(client)
            policy.check_shared(side)
            redraw = partial(self._redraw, info)
            yield Job(info, side, payload, keeping, redraw, policy, self._tried.get(info.name))

    def let_go(self, client: Client) -> None:
        """Take a client's data off the GPU, at the end of a run."""
        if client.device.type == "cuda":
            for key in [key for key in self._data_kept if key[0] == client.name]:
                del self._data_kept[key]

    def _serve(self, info: ClientInfo, request: Request) -> None:
        """Let go of what was kept for another run."""
        serving = (request.run, info.config.method_name, info.config.dataset, info.config.seed)
        if serving != self._serving:
            self._serving = serving
            self._networks, self.public_datasets = Networks(), PublicDatasets()
            self._data_kept.clear()
            resident.cache_clear()
            self._tried.clear()

    def _kind(self, info: ClientInfo) -> object:
        """Clients of one kind have networks that are built alike."""
        own: tuple[object, ...] = (info.name, info.config.seed)
        if self._model is None:
            dataset = population.dataset_of(info.config)
            own = (population.architecture_of(info), dataset.input_shape, dataset.classes)
        return (*own, info.config.head, info.config.method_name, info.config.parameters)

    def _network(self, info: ClientInfo) -> Network:
        model = self._build(info)
        name = type(model).__name__ if self._model else population.architecture_of(info)
        return Network(model, registry.client_side(info.config.method_name).head_of(info.config), name)

    def _build(self, info: ClientInfo) -> nn.Module:
        model = own_network(self._model, info) if self._model else population.model_of(info)
        return registry.client_side(info.config.method_name).adapt(model, info.config)

    def _redraw(self, info: ClientInfo, model: nn.Module) -> None:
        """Give a client's network fresh weights."""
        take_weights(model, self._build(info), self._model)

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


def _fitting(public: PublicDataset, examples: Examples) -> PublicDataset:
    """The public dataset, if its examples are like a client's own: of as many axes, features or channels.

    Raises:
        WireError: they are not.
    """
    own, shape = examples.inputs[:1].shape, public.inputs.shape
    if len(shape) != len(own) or (len(own) != 3 and shape[1] != own[1]):
        raise WireError(
            f"the request's public dataset has examples of shape {list(shape[1:])}, and this client's are of "
            f"{list(own[1:])}"
        )
    return public
