"""Build each client's data and model from the configuration keys, unless the user passes them in Python."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet import data, models
from fedhet.data import ClientData, DataSet, Examples, Part, PublicDataset
from fedhet.data.folder import SHAPE
from fedhet.data.names import CLASSES
from fedhet.data.own import as_input
from fedhet.data.pooled import Pooled, as_dataset
from fedhet.errors import ConfigError, DataError, FedhetError, ModelError
from fedhet.methods import registry
from fedhet.methods.method import Traits
from fedhet.methods.options import OWN, Config, keys_about, listed
from fedhet.methods.sharing import NetworkDescription
from fedhet.models.copies import without_memory
from fedhet.models.registry import spread
from fedhet.models.representation import Representation, in_precision
from fedhet.tasks import Task
from fedhet.utils.machine import memory
from fedhet.utils.randomness import numpy_generator, seeded


@dataclass(frozen=True)
class ClientInfo:
    """Identity and configuration of a client, which a user's model and data functions receive.

    Attributes:
        name: `name` or `partition-id` of the node config or, without them, Flower's node id.
        partition_id: the number of the client's partition, from 0; None if the node config has none.
        num_partitions: the number of partitions; without one in the node config, 1, or None for a part of the server's.
        config: the run's configuration, with this node's own settings.
        node_config: Flower's node config.
    """

    name: str
    partition_id: int | None
    num_partitions: int | None
    config: Config
    node_config: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def split_seed(self) -> int:
        """Seed for splitting the data set among clients: `split-seed` of the node config, or else the run's seed."""
        return int(self.node_config.get("split-seed", self.config.seed))


ModelFunction = Callable[[ClientInfo], nn.Module]
"""A function that returns a client's model."""


def dataset_of(config: Config) -> DataSet:
    """Return the data set named by the key `dataset`, with a random test set if `test-split = drawn`."""
    if config.dataset == OWN:
        raise ConfigError(
            f"dataset = {OWN} needs your own data and your own model: pass both, "
            "fedhet.run(..., model=my_model, data=my_data), or set dataset to a name from `fedhet list`"
        )
    dataset = data.load(config.dataset, config.data or None, input_size=config.input_size)
    if config.test_split == "given":
        return dataset
    return _with_drawn_test_set(dataset, config.seed, config.test_share)


_with_drawn_test_set = lru_cache(maxsize=2)(data.with_drawn_test_set)  # each is a copy of the data set


def transform_of(dataset: DataSet | None, dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """Return a function that converts a batch of raw inputs to a network's inputs.

    `dataset` defines the conversion; it is None for a user's data. Floating-point inputs become `dtype`, if given.
    """
    if dataset is None:
        return partial(as_input, dtype=dtype)
    return lambda inputs: in_precision(dataset.transform(inputs), dtype)


def architecture_of(client: ClientInfo) -> str:
    """Return a client's architecture: the node config's or, by default, one that the key `assign` gives it."""
    if chosen := client.node_config.get("architecture"):
        return models.expand(str(chosen))[0]
    number, clients = _place(client, turn=True)
    return architectures(client.config, clients)[number]


def width_of(client: ClientInfo) -> float:
    """Return the width, depth or rank of a client's submodel, as a fraction of the whole network's.

    It is the entry `width`, `depth` or `rank` of the client's node config. Clients without it get the values in the
    method's key `widths`, `depths` or `ranks`: in turn, in blocks or at random, as the key `assign` says.
    """
    options = client.config.options
    if (width := options.width_at(client.node_config)) is not None:
        return float(width)
    number, clients = _place(client, turn=True)
    return spread(options.all_widths, client.config.assign, clients, client.config.seed)[number]


def architectures(config: Config, clients: int) -> tuple[str, ...]:
    """Return one of the configured `architectures` per client: in turn, in blocks or at random (the key `assign`)."""
    return models.deal(config.architectures, config.assign, clients, config.seed)


def owner_of_weights(config: Config, client: str) -> str:
    """Return the name by which initial weights are seeded: `client`, or "all" if they are equal for all clients."""
    return "all" if config.shared_init and registry.traits(config).common_init else client


def model_of(client: ClientInfo) -> nn.Module:
    """Build the model of a client's architecture; torch's global generator draws the initial weights."""
    dataset = dataset_of(client.config)
    return models.build(architecture_of(client), dataset.input_shape, dataset.classes)


def model_of_images(client: ClientInfo, classes: int) -> nn.Module:
    """Build the model of a client's architecture for `dataset = folder`, whose images may be on other machines."""
    channels, *sides = SHAPE
    height, width = [client.config.input_size] * 2 if client.config.input_size else sides
    return models.build(architecture_of(client), (channels, height, width), classes)


def network_of(
    client: ClientInfo,
    model: ModelFunction | None = None,
    *,
    owner: str = "",
    adapt: Callable[[nn.Module], nn.Module] = lambda network: network,
) -> nn.Module:
    """Return a client's new network by the user's `model` function or, by default, of the client's architecture.

    Its initial weights are those of `owner`, by default as in the run (see `owner_of_weights`). `adapt` converts the
    network, and may draw further initial weights.
    """
    owner = owner or owner_of_weights(client.config, client.name)
    with seeded(client.config.seed, "initial weights", owner):
        return adapt(model(client) if model else model_of(client))


def data_of(client: ClientInfo) -> ClientData:
    """Return a client's training, validation and test examples of the configured data set; the result is cached."""
    number, clients = _place(client)
    return _client(dataset_of(client.config), _data_keys(client.config), clients, number, client.split_seed)


def share_of(pool: Pooled, client: ClientInfo) -> ClientData:
    """Return a client's share of a user's examples, which the configuration splits like those of a data set."""
    number, clients = _place(client)
    dataset = pooled_dataset(pool, client.config)
    keys = _data_keys(client.config)
    if pool.clients:
        keys = replace(keys, partition="natural")
        if clients != len(pool.clients):
            raise DataError(
                f"the data have {len(pool.clients)} clients by name, but the run has {clients}: set clients"
            )
    split = _split(dataset, keys, clients, client.split_seed)
    part = split.parts[number]
    public = split.public
    if public is not None and public.labels is not None:
        public = replace(PublicDataset.of(public.inputs, public.labels), names=pool.names)
    train, test = dataset.train.subset(part.train), dataset.test.subset(part.test)
    # Test examples of others, which may be unusable, are read only if they count.
    common = dataset.test if client.config.test_on != "local" else None
    parts = (train, test, public, common, split.validation)
    return ClientData(*parts, classes=dataset.classes, names=pool.names, note=pool.note)


def pooled_dataset(pool: Pooled, config: Config) -> DataSet:
    """Return a user's examples as a data set, with its test examples as `test-split` and `test-share` say."""
    return as_dataset(pool, config.seed if config.test_split == "drawn" else None, config.test_share)


def public_dataset(config: Config) -> PublicDataset | None:
    """Return the public dataset, held out of the training examples, or None if the key `public-samples` is 0.

    If the method's keys say so (`Options.public_union`), it has the training inputs of all clients, without labels.
    """
    if config.options.public_union:
        return _union(dataset_of(config), _data_keys(config), config.clients, config.seed)
    return _configured(config).public if config.public_samples else None


def common_validation(config: Config) -> Examples | None:
    """Return the server's validation examples for the global model, or None without `validation-on = common`."""
    if not config.validation or (config.test_on, config.validation_on) != ("global", "common"):
        return None
    return _configured(config).validation


def check(config: Config, *, own_model: bool = False, own_data: bool = False, pool: Pooled | None = None) -> None:
    """Check before a run that the configured data and models fit the method; raise a FedhetError otherwise.

    `own_model` and `own_data` say whether the user passes models or data in Python; clients check these later. `pool`
    has the user's examples if the configuration splits them.
    """
    traits = registry.traits(config)
    brought = own_data and pool is None
    if traits.public != "none" and not (config.public_samples or config.options.public_union or brought):
        raise ConfigError(f"{config.method_name} needs a public dataset: set, for example, public-samples = 500")
    task = Task()
    if not (own_data and own_model):
        dataset = dataset_of(config)  # raises an error if its files are missing
        task = task if own_data else dataset.task
    task.measuring(config.metric, listed(config.metrics))
    if pool is not None:
        _split(pooled_dataset(pool, config), _data_keys(config), config.clients, config.seed)
    if own_data:
        return
    try:
        _configured(config)
        if not own_model:
            _check_models(config, traits)
    except FedhetError as error:
        note = f"\nsettings that you did not give are from the preset {config.preset}" if config.preset else ""
        raise type(error)(f"{error}{note}") from error


def _check_models(config: Config, traits: Traits) -> None:
    dataset = dataset_of(config)
    dealt = sorted(set(architectures(config, config.clients)))
    for name in dealt:
        size = sum(size for _, size in _arrays(name, dataset.input_shape, dataset.classes).values())
        if 3 * size > memory():  # weights, their gradients, and what is sent of them
            raise ConfigError(
                f"architectures: for inputs of shape {list(dataset.input_shape)}, {name} has {size / 1e9:.3g} GB of "
                "weights, and training needs three times as much memory, but this machine has "
                f"{memory() / 1e9:.3g} GB: choose a smaller architecture"
            )
    if must_be_equal(config):
        alike = "one architecture in any widths" if traits.networks == "widths" else "equal architectures"
        raise ConfigError(f"{config.method_name} needs {alike}, not {', '.join(dealt)}: set architectures to one name")
    batch = dataset.transform(dataset.train.inputs[:2])
    shared: dict[str, tuple[str, list[int]]] = {}  # by key: the first architecture that has it, and its shape
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name in dealt:
            model = models.build(name, dataset.input_shape, dataset.classes).eval()
            try:
                representation = Representation(model, config.head)
                representation(in_precision(batch, representation.precision))
            except Exception as error:  # whatever a registered model raises
                reason = str(error)
                if not isinstance(error, ValueError):
                    given = f"inputs of shape {dataset.input_shape} and {batch.dtype}"
                    reason = f"{given} raise {type(error).__name__}: {error}"
                raise ModelError(f"model {name!r}: {reason}; choose another in architectures") from error
            if config.options.changes_heads or traits.networks == "widths" or not traits.shares.averaged:
                continue
            network = NetworkDescription(model, representation.head, name)
            tensors = model.state_dict()
            for array, key in traits.shares.names(network, tensors, statistics=True).items():
                here = list(tensors[array].shape)
                owner, shape = shared.setdefault(key, (name, here))
                if here != shape:
                    raise ConfigError(
                        f"{config.method_name} averages {key} over clients, but its shape is {here} in {name} and "
                        f"{shape} in {owner}: choose architectures in which these shapes are equal"
                    )


def must_be_equal(config: Config) -> bool:
    """Return whether clients need one architecture, as the configured ones differ more than the method allows."""
    networks = registry.traits(config).networks
    dealt = sorted(set(architectures(config, config.clients)))
    if networks == "any" or len(dealt) == 1:
        return False
    if networks in ("equal", "parts"):
        return True
    dataset = dataset_of(config)
    arrays = [_arrays(name, dataset.input_shape, dataset.classes) for name in dealt]
    # One graph in several widths has arrays of the same names and numbers of axes.
    return len({tuple((key, axes) for key, (axes, _) in spec.items()) for spec in arrays}) > 1


@lru_cache(maxsize=256)  # a comparison checks all its runs
def _arrays(name: str, input_shape: tuple[int, ...], classes: int) -> dict[str, tuple[int, int]]:
    with torch.random.fork_rng(devices=[]):
        tensors = without_memory(partial(models.build, name, input_shape, classes)).state_dict()
    return {key: (tensor.ndim, tensor.nbytes) for key, tensor in tensors.items()}


def _place(client: ClientInfo, *, turn: bool = False) -> tuple[int, int]:
    clients = client.num_partitions or client.config.clients
    if turn and clients == 1:  # the client does not share its examples, but is one of several
        clients = client.config.clients
    return (client.partition_id or 0) % clients, clients


@lru_cache(maxsize=256)
def _data_keys(config: Config) -> Config:
    kept = [key.replace("-", "_") for key in (*keys_about("data"), "seed") if key != "clients"]
    return Config(**{key: getattr(config, key) for key in kept})


@dataclass(frozen=True, eq=False)
class _Split:
    parts: list[Part]
    public: PublicDataset | None
    validation: Examples | None


def _configured(config: Config) -> _Split:
    return _split(dataset_of(config), _data_keys(config), config.clients, config.seed)


@lru_cache(maxsize=4)
def _split(dataset: DataSet, keys: Config, clients: int, seed: int) -> _Split:
    public = None
    common = None
    held_out, available = data.hold_out(dataset, keys.public_samples, keys.seed)
    if keys.public_samples:
        held = dataset.train.subset(held_out)
        public = PublicDataset(held.inputs[:], held.labels)
    if keys.validation and keys.validation_on == "common":
        kept = min(clients * keys.samples_per_client or len(available), len(available))
        rng = numpy_generator(keys.seed, "common validation")
        size = max(1, round(keys.validation * kept))
        chosen = available[data.proportional_sample(dataset.train.labels[available], size, rng)]
        common = dataset.train.subset(chosen)
        available = np.setdiff1d(available, chosen)
    names = ("classes_per_client", "alpha", "samples_per_client", "halved_clients", "test_share")
    options = {name: getattr(keys, name) for name in names}
    parts = data.partition(dataset, keys.partition, clients=clients, seed=seed, available=available, **options)
    return _Split(parts, public, common)


@lru_cache(maxsize=1)
def _union(dataset: DataSet, keys: Config, clients: int, seed: int) -> PublicDataset:
    parts = [_client(dataset, keys, clients, number, seed).train for number in range(clients)]
    return PublicDataset(torch.cat([part.inputs[:] for part in parts]))


def _chosen(examples: Examples, rows: NDArray[np.int64]) -> Examples:
    """Return the examples at `rows`, without a copy if these are all: a node's images can take much of its memory."""
    return examples if np.array_equal(rows, np.arange(len(examples))) else examples.subset(rows)


@lru_cache(maxsize=2048)
def _client(dataset: DataSet, keys: Config, clients: int, number: int, seed: int) -> ClientData:
    split = _split(dataset, keys, clients, seed)
    part = split.parts[number]
    train, test = _chosen(dataset.train, part.train), _chosen(dataset.test, part.test)
    names = {CLASSES: dataset.class_names} if dataset.class_names else {}
    client_data = ClientData(train, test, validation=split.validation, dataset=dataset, names=names)
    together = dataset.together
    owners = together.train[part.train] if together else None
    return data.with_validation(client_data, keys.validation, seed, str(number), owners=owners)
