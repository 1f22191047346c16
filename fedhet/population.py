"""The configured population: which data and which architecture each client has, where a user gives no functions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fedhet import data, models, registry
from fedhet.data import ClientData, DataSet, Examples, PublicDataset, Split
from fedhet.errors import ConfigError, FedhetError, ModelError
from fedhet.machine import memory
from fedhet.method import Traits
from fedhet.options import OWN, Config, keys_about
from fedhet.representations import Representation
from fedhet.sharing import NetworkDescription


@dataclass(frozen=True)
class ClientInfo:
    """Who is asking: handed to a user's model and data functions.

    Attributes:
        name: the client's own name, which is its partition id where there is one.
        partition_id: index of the client's part of the data; None where the node has none.
        num_partitions: number of parts; None where the node does not say.
        config: the run's configuration, with this node's own settings.
        node_config: what the node was started with.
    """

    name: str
    partition_id: int | None
    num_partitions: int | None
    config: Config
    node_config: dict[str, Any] = field(default_factory=dict)

    @property
    def split_seed(self) -> int:
        """The seed by which its data are split: its node's own (`split-seed`), or the run's."""
        return int(self.node_config.get("split-seed", self.config.seed))


ModelFunction = Callable[[ClientInfo], nn.Module]
"""A user's models: from who asks to any network."""


def dataset_of(config: Config) -> DataSet:
    """Return the configured data set, loaded once in a process, with a test set drawn by the seed if configured.

    Raises:
        ConfigError: the data set is a user's own, and their data or model are not here.
        DataError: as `fedhet.data.load`.
    """
    if config.dataset == OWN:
        raise ConfigError(
            f"dataset = {OWN}: data of your own need a model of your own, since the architectures of `fedhet list` are "
            "made for its data sets: give both, fedhet.run(..., model=my_model, data=my_data), or name a data set of "
            "`fedhet list`"
        )
    dataset = data.load(config.dataset, config.data or None, input_size=config.input_size)
    if config.test_split == "given":
        return dataset
    return _with_drawn_test_set(dataset, config.seed, config.test_share)


_with_drawn_test_set = lru_cache(maxsize=2)(data.with_drawn_test_set)  # each is another copy of the data set


def architecture_of(client: ClientInfo) -> str:
    """Return the configured architecture of a client; a node can set its own (`architecture` in its node config)."""
    if chosen := client.node_config.get("architecture"):
        return models.expand(str(chosen))[0]
    number, clients = _place(client)
    return architectures(client.config, clients)[number]


def width_of(client: ClientInfo) -> float:
    """Return the share of each hidden layer's units that a client has, for methods with parts of one network.

    A node can set its own (`width` in its node config); else `widths`, a key of the method, is dealt as architectures
    are, round-robin where these are dealt one by one. A ConfigError for a width that is not above 0 and at most 1.
    """
    parameters = client.config.parameters
    if (width := parameters.width_at(client.node_config)) is not None:
        return float(width)
    number, clients = _place(client)
    widths = parameters.all_widths
    return models.spread(widths, client.config.assign, clients, client.config.seed)[number]


def architectures(config: Config, clients: int) -> tuple[str, ...]:
    """The architecture of each of so many clients; see `fedhet.models.deal`."""
    return models.deal(config.architectures, config.assign, clients, config.seed)


def owner_of_weights(config: Config, client: str) -> str:
    """Return the client whose initial weights a client has: itself, or `all` if they are common to all clients."""
    return "all" if config.shared_init and registry.traits(config).common_init else client


def model_of(client: ClientInfo) -> nn.Module:
    """The configured model of one client, initialised from torch's global generator."""
    dataset = dataset_of(client.config)
    return models.build(architecture_of(client), dataset.input_shape, dataset.classes)


def data_of(client: ClientInfo) -> ClientData:
    """The configured data of one client; the same object again in the same process."""
    number, clients = _place(client)
    return _client(_data_keys(client.config), clients, number, client.split_seed)


def public_dataset(config: Config) -> PublicDataset | None:
    """`public-samples` raw examples, held out with their labels or from another data set; None without them."""
    if not config.public_samples:
        return None
    keys = _data_keys(config)
    return _elsewhere(keys) if config.public_dataset else _split(keys, config.clients, config.seed).public


def public_dataset_for(method: str, need: str, public: PublicDataset | None) -> PublicDataset | None:
    """Return the public dataset that a method needs (`Traits.public`), or None; raises a ConfigError without labels."""
    if public is None or need == "none":
        return None
    if need == "labelled" and public.labels is None:
        raise ConfigError(f"{method} needs a labelled public dataset, and the public dataset has no labels: give both")
    return public if need == "labelled" else public.unlabelled


def common_validation(config: Config) -> Examples | None:
    """Return the validation examples that a global model is scored on as on the common test set; None for none."""
    if not config.validation or (config.test_on, config.validation_on) != ("global", "common"):
        return None
    return _split(_data_keys(config), config.clients, config.seed).validation


def training_union(config: Config) -> PublicDataset:
    """The inputs of all the clients' training parts together, in order of the clients."""
    keys, clients = _data_keys(config), range(config.clients)
    parts = [_client(keys, config.clients, number, config.seed).train for number in clients]
    return PublicDataset(torch.cat([part.inputs[:] for part in parts]))


def check(config: Config, *, own_model: bool = False, own_data: bool = False) -> None:
    """Check before a run that data and models can be had as configured, a FedhetError with all that is wrong if not.

    A user's own are tried in the handshake.
    """
    traits = registry.traits(config)
    if traits.public != "none" and not (config.public_samples or config.parameters.makes_public_dataset or own_data):
        raise ConfigError(
            f"{config.method_name} aligns clients on a public dataset: set public-samples, such as public-samples = 500"
        )
    if not (own_data and own_model):
        dataset_of(config)  # whose files may not be there
    if own_data:
        return
    problems: list[FedhetError] = []
    for check_part in [_check_data] if own_model else [_check_data, _check_models]:
        try:
            check_part(config, traits)
        except FedhetError as error:
            problems.append(error)
    if problems:
        note = [f"what you did not set comes from the preset {config.preset}"] if config.preset else []
        raise type(problems[0])("\n".join([*map(str, problems), *note])) from problems[0]


def _check_data(config: Config, traits: Traits) -> None:
    _split(_data_keys(config), config.clients, config.seed)
    public_dataset_for(config.method_name, traits.public, public_dataset(config))


def _check_models(config: Config, traits: Traits) -> None:
    dataset, dealt = dataset_of(config), sorted(set(architectures(config, config.clients)))
    for name in dealt:
        size = sum(size for _, size in _arrays(name, dataset.input_shape, dataset.classes).values())
        if 3 * size > memory():  # weights, their gradients, and what is sent of them
            raise ConfigError(
                f"architectures: {name} has {size / 1e9:.3g} GB of weights for inputs of {list(dataset.input_shape)}, "
                f"which must be there three times to be trained, and this machine has {memory() / 1e9:.3g} GB of memory"
            )
    if must_be_equal(config):
        why = "averages weights position by position and needs equal architectures"
        if traits.networks == "widths":
            why = "matches the units of one architecture, whose widths may differ"
        raise ConfigError(f"{config.method_name} {why}, not {', '.join(dealt)}: set architectures to one of them")
    batch = dataset.transform(dataset.train.inputs[:2])
    shared: dict[str, tuple[str, list[int]]] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name in dealt:
            model = models.build(name, dataset.input_shape, dataset.classes).eval()
            try:
                representation = Representation(model, config.head)
                representation(batch)
            except Exception as error:  # whatever a registered model raises, it cannot take these inputs
                taken = f"inputs of shape {dataset.input_shape} and {batch.dtype} raise {type(error).__name__}: "
                raise ModelError(f"model {name!r}: {taken * (not isinstance(error, ValueError))}{error}") from error
            if not config.parameters.changes_heads:
                network = NetworkDescription(model, representation.head, name)
                _check_shared(config.method_name, traits, network, shared)


def must_be_equal(config: Config) -> bool:
    """Whether the clients' architectures differ further than the configured method's networks may."""
    networks = registry.traits(config).networks
    dealt = sorted(set(architectures(config, config.clients)))
    if networks == "any" or len(dealt) == 1:
        return False
    if networks == "equal":
        return True
    dataset = dataset_of(config)  # one graph in several widths has arrays of the same names and numbers of axes
    arrays = [_arrays(name, dataset.input_shape, dataset.classes) for name in dealt]
    return len({tuple((key, axes) for key, (axes, _) in each.items()) for each in arrays}) > 1


@lru_cache(maxsize=256)  # a comparison checks each of its runs
def _arrays(name: str, input_shape: tuple[int, ...], classes: int) -> dict[str, tuple[int, int]]:
    """Number of axes and of bytes of each of an architecture's arrays, by name."""
    try:
        with torch.device("meta"):
            tensors = models.build(name, input_shape, classes).state_dict()
    except (NotImplementedError, RuntimeError):  # it computes while it is built
        with torch.random.fork_rng(devices=[]):
            tensors = models.build(name, input_shape, classes).state_dict()
    return {key: (tensor.ndim, tensor.nbytes) for key, tensor in tensors.items()}


def _check_shared(
    method: str, traits: Traits, network: NetworkDescription, known: dict[str, tuple[str, list[int]]]
) -> None:
    """Check that averaged arrays are alike in all architectures; `known` has each key's first owner and shape."""
    if traits.networks == "widths" or not traits.shares.averaged:
        return
    tensors = network.model.state_dict()
    for name, key in traits.shares.names(network, tensors, statistics=True).items():
        here = list(tensors[name].shape)
        owner, shape = known.setdefault(key, (network.architecture, here))
        if here != shape:
            raise ConfigError(
                f"{method} averages {key} over clients, and {network.architecture} has {here} where "
                f"{owner} has {shape}: choose architectures in which it is alike"
            )


def _place(client: ClientInfo) -> tuple[int, int]:
    clients = client.num_partitions or client.config.clients
    return (client.partition_id or 0) % clients, clients


@lru_cache(maxsize=256)
def _data_keys(config: Config) -> Config:
    """A configuration that is the same for all that deal the same data: the key of the caches below."""
    kept = [key.replace("-", "_") for key in (*keys_about("data"), "seed") if key != "clients"]
    return Config(**{key: getattr(config, key) for key in kept})


@lru_cache(maxsize=4)
def _split(keys: Config, clients: int, seed: int) -> Split:
    """The data set shared out; the public dataset is held out by the run's seed, the rest is dealt by `seed`."""
    return data.split(
        dataset_of(keys),
        keys.partition,
        clients=clients,
        seed=keys.seed,
        partition_seed=seed,
        public_samples=0 if keys.public_dataset else keys.public_samples,
        validation=keys.validation if keys.validation_on == "common" else 0.0,
        classes_per_client=keys.classes_per_client,
        shards_per_client=keys.shards_per_client,
        alpha=keys.alpha,
        samples_per_client=keys.samples_per_client,
        halved_clients=keys.halved_clients,
        test_share=keys.test_share,
    )


@lru_cache(maxsize=4)
def _elsewhere(keys: Config) -> PublicDataset:
    other = data.load(keys.public_dataset, keys.public_data or None)
    return data.public_dataset_of(other, dataset_of(keys), keys.public_samples, keys.seed)


@lru_cache(maxsize=2048)
def _client(keys: Config, clients: int, number: int, seed: int) -> ClientData:
    split = _split(keys, clients, seed)
    part = split.parts[number]
    train, test = split.dataset.train.subset(part.train), split.dataset.test.subset(part.test)
    client_data = ClientData(train, test, validation=split.validation)
    together = split.dataset.together
    owners = together.train[part.train] if together else None
    return data.with_validation(client_data, keys.validation, seed, str(number), owners=owners)
