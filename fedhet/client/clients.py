"""Creates the client for a message: its network, data and task, and the method's client side."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedhet.algorithms.graphs import PermutationGroups, Submodel
from fedhet.client.client import AnySide, Client
from fedhet.client.estimators import check_client, check_estimator, fit_to_data
from fedhet.client.job import Job
from fedhet.client.model_check import ModelCheck, check_model, notes_on_use
from fedhet.client.policy import NODE_KEYS, Policy
from fedhet.client.secret import NodeSecret, check_partition
from fedhet.client.state import ClientStore, check_order, only_describes, other_model, start
from fedhet.client.unchanged import check_unchanged
from fedhet.data import ClientData, Examples, resident, with_validation
from fedhet.data.examples import UNLABELLED
from fedhet.data.names import COLUMNS
from fedhet.data.reading import missing_allowed
from fedhet.errors import ConfigError, DataError, ModelError, Refused, nearest
from fedhet.messages import Payload, Request
from fedhet.messages.protocol import HANDSHAKE, names_in
from fedhet.methods import registry
from fedhet.methods.options import OWN, Config, fields_of, keys_about, keys_that, listed
from fedhet.models.copies import Start, described, load_state
from fedhet.models.estimators import Estimator
from fedhet.models.representation import POOLED, Representation, precision
from fedhet.setup import client_setup, user_functions
from fedhet.setup.client_setup import ClientInfo, ModelFunction
from fedhet.tasks import Task
from fedhet.training import Privacy
from fedhet.utils.files import expanded, state_folder
from fedhet.utils.inputs import for_each
from fedhet.utils.machine import cores, device_of, keep_freed_memory
from fedhet.utils.randomness import derive_seed
from fedhet.utils.text import log, log_once

ROOM = 2**28  # bytes of weights that a process keeps for later clients; at least 64 networks


@dataclass
class _Network:
    kind: tuple[object, ...]
    representation: Representation
    part: Submodel | None
    starts: Mapping[str, Start]

    @cached_property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.representation.model.state_dict().values())


class Clients:
    """Creates the client for each message, and caches networks and data between messages.

    `model` and `data` are the user's functions; without them, clients have the configured architectures and data set.
    If `task` has no name, the task is inferred from labels and outputs. The attribute `pool` has the user's examples if
    the configuration splits them among clients.
    """

    def __init__(self, model: ModelFunction | None, data: user_functions.DataFunction | None, task: Task) -> None:
        self._model, self._data, self._task = model, data, task
        self.pool = data.pool if isinstance(data, user_functions.Shares) else None
        self._free: list[_Network] = []
        self._groups: dict[object, PermutationGroups] = {}
        self._data_kept: dict[tuple[str, object, torch.device], ClientData] = {}
        self._checked: dict[str, ModelCheck] = {}
        self._described: dict[str, tuple[str, str]] = {}
        self._serving: object = None

    def set_name(self, node: dict[str, Any]) -> None:
        """Set the name in a node config that has none, as on Ray, if the user's examples name their clients."""
        names = self.pool.clients if self.pool else ()
        place = node.get("partition-id", 0)
        if node.get("num-partitions") == len(names) and 0 <= place < len(names):
            node.setdefault("name", names[place])

    def check_keys(self, node: Mapping[str, Any]) -> None:
        """Raise a ConfigError if a node config has a key that neither fedhet nor a function of the user can read."""
        unknown = sorted(node.keys() - NODE_KEYS)
        if unknown and self._model is None and self._data is None:
            raise ConfigError(f"{nearest('key in the node config', unknown[0], NODE_KEYS)}; rename or remove it")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the user functions and the task; each process keeps its own networks and data."""
        return type(self), (self._model, self._data, self._task)

    @contextmanager
    def job(
        self, info: ClientInfo, request: Request, policy: Policy, payload: Payload, *, placeholders: bool = False
    ) -> Iterator[Job]:
        """Context manager that creates the client for a message, and yields a `Job`: the message and its client.

        `info` has the client's identity and configuration, `policy` the rules of its node, and `payload` the arrays and
        values that the server sent. With `placeholders`, the data are not the client's, and do not have to fit its
        network. No other client uses the network until the context ends.
        """
        config = info.config
        describes = only_describes(config)
        self._serve(info, request)
        keep_freed_memory()
        # More threads than cores over all clients of a host slow every one of them down a hundredfold.
        if torch.get_num_threads() != (threads := min(config.threads_per_client, cores())):
            torch.set_num_threads(threads)
        device = device_of(config.device)
        if policy.deployed and (self._data is None or self.pool):
            check_partition(info, policy)
        secret = self._secret_of(info, alone=not policy.deployed) if policy.keeps_secret else None
        with missing_allowed(describes):
            data = self._data_of(info, device)
        if policy.deployed or policy.noise:
            data = self._without_common(info, data)
        if len(data.train) == 0:
            raise DataError("the client has no training examples: give it at least one, or leave it out of the run")
        if data.batch_size not in (None, info.node_config.get("batch-size", data.batch_size)):
            raise ConfigError(
                f"the client's own batch-size = {config.batch_size} has no effect with a DataLoader, which has its own "
                "batch_size: leave it out"
            )
        policy.check_examples(len(data.train), data.batch_size or config.batch_size)
        if policy.noise and not (self._task.name or data.dataset) and data.train.labels.is_floating_point():
            raise Refused(
                "this node trains with differential privacy (dp-noise), and one example's numbers could change the "
                "task that is inferred from labels: name it, as in make_client_app(..., task='regression')"
            )
        with self._network(info, data, device, policy) as network:
            transform = client_setup.transform_of(data.dataset, network.representation.precision)
            with missing_allowed(describes):
                checked = self._checked.get(info.name) or self._check(info, data, network.representation, placeholders)
            task = checked.task.measuring(config.metric, listed(config.metrics))
            policy.check_metrics(task)
            data = data.relabelled(task.outputs.labels)
            counting = policy.least > 1 and not policy.noise
            if counting and len(counted := task.counted(data.train.labels)) < len(data.train):
                # Others would hide from `min-examples` that few examples change the weights.
                log_once(
                    self,
                    f"client {info.name}: {len(data.train) - len(counted)} training examples are left out of training, "
                    "since the loss ignores all of their labels",
                )
                data = replace(data, train=data.train.subset(counted))
                policy.check_examples(len(data.train), data.batch_size or config.batch_size)
            whole = self._available(data)
            # A run on few of the node's examples must not have a larger delta.
            examples = max(len(data.train), whole // (info.num_partitions or 1))
            if secret and not policy.noise:
                data = secret.grouped(data, policy.least, checked.task.outputs)
            if policy.deployed and request.question == HANDSHAKE:
                spent = groups = ""
                if secret and policy.noise:
                    spent = f" ({secret.epsilon(policy.delta_of(examples)):.4g} is spent)"
                if data.train.groups:
                    groups = f" in {len(data.train.groups)} groups"
                count = len(data.train) if data.train.groups != () else 0
                used = f"{count} of {whole} examples{groups}"
                log.info("client %s: %s%s; trains on %s", info.name, policy, spent, used)
            data = data.aligned(names_in(request.names))  # after groups and splits, which the server must not change
            if self._model:
                architecture, description = self._described[info.name]
            else:
                architecture, description = client_setup.architecture_of(info), ""
            began = ""
            if info.config.start_from and request.question == HANDSHAKE:
                began = check_order(info, data.names)
                if self._model:
                    began = began or other_model(expanded(config.start_from), info.name, description)
            network.representation.places = checked.task.outputs.places
            client = Client(
                name=info.name,
                config=config,
                request=request,
                data=data,
                representation=network.representation,
                architecture=architecture,
                described=description,
                task=task,
                device=device,
                transform=transform,
                augment=data.dataset.augment if data.dataset and config.augment else data.augment,
                store=ClientStore(config.state_dir, request.run, request.called or info.name),
                least=policy.least,
                secret=secret.seed if secret else None,
                privacy=_privacy(info.name, secret, policy, checked.task, examples),
                outputs=checked.outputs,
                part=network.part,
                starts=network.starts,
            )
            side = registry.client_side(config.method_name)(client)
            policy.check_shared(side)
            fits = bool(client.estimator) or not side.trains_network
            if fits and data.train.groups == ():
                raise Refused(
                    f"no class of the client has {policy.least} training examples (min-examples in its node config), "
                    "and so there is nothing to fit: add examples, or leave the client out"
                )
            if client.privacy:
                _check_private(side)
            if client.estimator:
                client.estimator.seed(derive_seed(client.root, "estimator", info.name))
                client.estimator.columns = data.names.get(COLUMNS, ())
                check_client(client, placeholders=placeholders)
            build = partial(self._build, info, part=network.part)
            redraw = partial(self._redraw, info, client)
            job = Job(info, side, payload, policy, build, redraw, account=secret if policy.noise else None)
            if request.question == HANDSHAKE:
                for note in (checked.note, data.note, began, *notes_on_use(side)):
                    job.say(note)
            if info.name not in self._checked and self._data and request.question != HANDSHAKE:
                check_unchanged(job)
            self._checked[info.name] = checked
            yield job

    def _serve(self, info: ClientInfo, request: Request) -> None:
        """Clear the cached networks and data if the previous request had another run, method, data set or seed."""
        serving = (request.run, info.config.method_name, info.config.dataset, info.config.seed)
        if serving != self._serving:
            self._serving = serving
            caches: list[Any] = [self._free, self._groups, self._data_kept, self._checked, self._described]
            for cache in caches:
                cache.clear()
            resident.cache_clear()

    def _secret_of(self, info: ClientInfo, *, alone: bool = False) -> NodeSecret:
        """Return the secret seed of the client's node; raise `Refused` if the node's first run used other examples.

        If `alone`, as in a simulation, the client has a privacy account of its own.
        """
        config = info.config
        flat = info.config.flat()
        replaced = {key for key, spec in fields_of(Config).items() if self._data and spec.metadata["replaced_by"]}
        if self.pool:
            replaced = {key for key in replaced if "split" not in fields_of(Config)[key].metadata["replaced_by"]}
        about = {*keys_about("data")} - replaced - {*keys_that("path")}
        split = {"clients": info.num_partitions or config.clients, "split-seed": info.split_seed}
        common = config.public_samples > 0 or config.validation_on == "common" or config.test_split == "drawn"
        if common and (self._data is None or self.pool):
            split["seed"] = config.seed  # draws these examples, so that they are the same at all clients
        files = OWN if self._data else config.dataset.partition("-")[0]  # `cifar10-fedharm` has the files of `cifar10`
        # Flower's node id changes when a node is registered anew, and is no name for what must last.
        name = "node" if info.partition_id is None and "name" not in info.node_config else info.name
        secret = NodeSecret(state_folder(config.state_dir, name if alone else ""), name, files)
        secret.keep({key: flat[key] for key in sorted(about)} | split)
        return secret

    def _data_of(self, info: ClientInfo, device: torch.device) -> ClientData:
        config, seed = info.config, info.split_seed
        if self._data is None and device.type == "cpu":  # client_setup keeps these
            return client_setup.data_of(info)
        split = (config.test_split, config.test_share, config.validation, seed) if self._data else config.text
        key = (info.name, split, device)
        if key not in self._data_kept:
            data = user_functions.data_of(self._data, info)
            if self._data:
                labelled = registry.client_side(config.method_name).needs_labels
                data = with_validation(data, config.validation, seed, info.name, all_labelled=labelled)
            self._data_kept[key] = data.to(device)
        return self._data_kept[key]

    def _available(self, data: ClientData) -> int:
        """Return the number of examples that the client or, of a data set that is split, all clients could train on."""
        if data.dataset:
            return len(data.dataset.train)
        if self.pool:
            return len(self.pool.train)
        return len(data.train) + (len(data.validation) if data.validation else 0)

    def _without_common(self, info: ClientInfo, data: ClientData) -> ClientData:
        """Return a node's data without common parts that a run takes from examples that no other node has."""
        if not self.pool or (info.num_partitions or 1) > 1:
            return data
        public = data.public if "public-samples" in info.node_config else None
        if public is not data.public:
            log_once(
                self,
                f"client {info.name}: public-samples = {info.config.public_samples} of the run would make examples of "
                "this node public, so it has no public dataset: set public-samples in the node config if they are "
                "public",
            )
        return replace(data, public=public, common=None)

    def _check(self, info: ClientInfo, data: ClientData, network: Representation, placeholders: bool) -> ModelCheck:
        config, dataset = info.config, data.dataset
        if placeholders:
            if config.metric or config.metrics:
                raise ConfigError(
                    "metric and metrics have no effect with fedhet.wrap, whose argument `accuracy` names the score: "
                    "leave them out"
                )
            return ModelCheck(self._task, 0)
        if dataset and not self._model:
            return ModelCheck(dataset.task, dataset.classes)
        task = dataset.task if dataset else self._task
        transform = client_setup.transform_of(dataset, network.precision)
        if config.precision == "bf16" and network.precision == torch.float64:
            raise ModelError(
                f"client {info.name}: precision = bf16 is for networks in float32, but the client's "
                f"{network.model._get_name()} has float64 weights: leave precision out, or return a network in float32"
            )
        side = registry.client_side(config.method_name)
        # The last layers of a submodel can have equal widths by chance.
        guessed = bool(registry.traits(config).inside) and not (side.head_of(config) or side.parts)
        train = data.train
        below = bool((train.labels < UNLABELLED).any())  # numbers to predict, or wrong classes
        unlabelled = 0 if below else len(train) - len(train.labelled)
        if unlabelled and side.needs_labels and task.name != "regression":
            count = "its" if unlabelled == len(train) else f"{unlabelled} of its {len(train)}"
            raise DataError(
                f"client {info.name}: {count} training examples have no labels (or -1), from which "
                f"{config.method_name} learns: give them labels from 0 or leave them out, or choose a method that "
                "learns without labels, such as fedsimclr"
            )
        if unlabelled and not side.needs_labels:
            data = replace(data, train=Examples(train.inputs, train.labels.clamp(min=0)))
        return check_model(network, data, transform, task, self._model, guessed=guessed)

    @contextmanager
    def _network(self, info: ClientInfo, data: ClientData, device: torch.device, policy: Policy) -> Iterator[_Network]:
        """Context manager that yields a network for a client, from the cache if possible, with arbitrary weights.

        By the node's `policy`, no value of the network depends on the inputs of fewer than `min-examples` examples and,
        with `dp-noise`, of any.
        """
        config = info.config
        parts = registry.client_side(info.config.method_name).parts
        kind: tuple[object, ...] = (info.name, config.seed)
        if self._model is None:
            dataset = client_setup.dataset_of(config)
            kind = (client_setup.architecture_of(info), dataset.input_shape, dataset.classes)
        width = parts and client_setup.width_of(info)
        kind += (policy.noise > 0, policy.least, device, config.head, config.method_name, config.options, width)
        place = next((i for i in reversed(range(len(self._free))) if self._free[i].kind == kind), None)
        network = self._new(info, data, device, kind, policy) if place is None else self._free.pop(place)
        try:
            yield network
        finally:
            self._free.append(network)
            del self._free[: -max(64, ROOM // (1 + network.size))]

    def _new(
        self, info: ClientInfo, data: ClientData, device: torch.device, kind: tuple[object, ...], policy: Policy
    ) -> _Network:
        config = info.config
        side = registry.client_side(info.config.method_name)
        part = None
        model = self._build(info, client_setup.owner_of_weights(config, info.name)).to(device)
        transform = client_setup.transform_of(data.dataset, precision(model))
        if isinstance(model, Estimator):
            fit_to_data(model, data, self._task)
            return _Network(kind, Representation(model), None, {})
        if side.parts:
            if kind[:-1] not in self._groups:
                two = data.train.inputs[:2]
                two = transform(for_each(two, torch.zeros_like) if policy.noise else two)
                self._groups[kind[:-1]] = side.parts.groups_of(model, two)
            part = side.parts(kind[-1], self._groups[kind[:-1]])
            model = part.cut(model)
        what = config.representation
        if "head" in info.node_config and what not in POOLED:  # a server may name no other layer
            what = str(info.node_config.get("representation", ""))
        representation = Representation(model, side.head_of(config), what)

        def inputs() -> Tensor:
            source = data if self._model else client_setup.dataset_of(config)
            rows = source.train.inputs[: max(16, policy.least)].to(device)
            return transform(for_each(rows, torch.zeros_like) if policy.noise else rows)

        # The same for all clients and messages: this network's own weights depend on which client needed it first.
        starts = side.starts_of(lambda: self._build(info, "all").to(device), inputs)
        return _Network(kind, representation, part, starts)

    def _build(self, info: ClientInfo, owner: str, part: Submodel | None = None) -> nn.Module:
        """Return the client's whole network with the initial weights of client `owner`, or common ones if it is "all".

        With `part`, the client's submodel, the network has what submodels need, such as exits after its blocks.
        """
        side = registry.client_side(info.config.method_name)

        def adapt(model: nn.Module) -> nn.Module:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            # The name has the number of parameters, because unlike networks may be of one class.
            title = model.title if isinstance(model, Estimator) else f"{type(model).__name__}-{parameters}"
            self._described[info.name] = title, described(model)
            if isinstance(model, Estimator):
                check_estimator(model, info.name, info.config)
                return model
            model = start(model, info, owner) if info.config.start_from else side.adapt(model, info.config)
            return replace(part, width=1.0).cut(model) if part else model

        return client_setup.network_of(info, self._model, owner=owner, adapt=adapt)

    def _redraw(self, info: ClientInfo, client: Client, owner: str) -> None:
        if client.estimator:
            client.estimator.forget()
        built = self._build(info, owner, client.part)
        model = client.model
        part = client.part
        try:
            load_state(model, part.state(built) if part else built.state_dict())
        except RuntimeError as error:
            raise ModelError(
                f"the client's {model._get_name()} has other layers when it is built again: the model function must "
                "return the same layers in every call for a client, and forward must add none"
                f"{user_functions.origin(self._model)}"
            ) from error


def _privacy(name: str, secret: NodeSecret | None, policy: Policy, task: Task, examples: int) -> Privacy | None:
    if not policy.noise or secret is None:
        return None
    if task.outputs.joint:
        raise Refused(
            "this node trains with differential privacy (dp-noise), which needs a loss of each example by itself, and "
            f"the loss of a {task.name} task has none: choose another task"
        )
    if not task.plain:
        raise Refused(
            "this node trains with differential privacy (dp-noise), which supports neither class weights nor your "
            "own loss: leave them out"
        )
    delta = policy.delta_of(examples)

    def spend(noise: float, rate: float, steps: int) -> float:
        epsilon = secret.spend(noise, rate, steps, policy.budget, delta)
        log.info(
            "client %s: privacy: epsilon = %.4g at delta = %.4g over all runs of the node, for replacing one training "
            "example by a blank one; the number of examples is public",
            *(name, epsilon, delta),
        )
        return epsilon

    return Privacy(policy.noise, policy.clip, spend)


def _check_private(side: AnySide) -> None:
    """Raise `Refused` if a client under `dp-noise` trains nothing by DP-SGD, or one of its networks mixes examples."""
    client = side.client
    reason = "this node trains with differential privacy (dp-noise), but "
    if not side.trains_network:
        raise Refused(f"{reason}{client.config.method_name} fits a classifier without noise: choose another method")
    for layer, module in (*client.model.named_modules(), *side.network.named_modules()):
        if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats):
            raise Refused(
                f"{reason}{layer} ({module._get_name()}) normalises over the examples of a batch: use GroupNorm instead"
            )
