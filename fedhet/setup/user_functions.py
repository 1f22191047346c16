"""Models, data, task and client settings that a user passes in Python, converted to functions of a client."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import Parameter
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from fedhet.config.toml import toml_value
from fedhet.config.validation import effective
from fedhet.data import ClientData, Examples, PublicDataset, with_drawn_test_set
from fedhet.data.names import Names
from fedhet.data.own import as_client_data, open_parameters
from fedhet.data.pooled import Pooled, as_pooled
from fedhet.errors import ConfigError, DataError, FedhetError, ModelError, UserCodeError, shown
from fedhet.methods import registry
from fedhet.methods.options import Config, OwnPart, kebab
from fedhet.models.copies import held_by, in_use, separated, unusable
from fedhet.models.estimators import Estimator, is_estimator
from fedhet.models.representation import by_name
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo, ModelFunction, public_dataset
from fedhet.tasks import Task, as_task
from fedhet.utils.inputs import Inputs, together
from fedhet.utils.process import settings_restored, standard_settings
from fedhet.utils.randomness import reseeded, seeded

DataFunction = Callable[[ClientInfo], ClientData]

CLIENT_KEYS = ("local-epochs", "learning-rate", "batch-size", "device")
"""Configuration keys that a user's `client_settings` function may return for a simulated client."""

_FACTS: dict[str, Callable[[ClientInfo], Any]] = {  # arguments that a user's function may have, and their values
    "client": lambda client: client,
    "partition_id": attrgetter("partition_id"),
    "num_partitions": attrgetter("num_partitions"),
    "batch_size": attrgetter("config.batch_size"),
}

_RETURNED = {"model": "network", "data": "train, test", "client_settings": '{"local-epochs": 2}'}

_CLIENT_NAMES = {"cid", "client_id", "id", "idx", "index", "node_id", "number", "partition", "rank"}
"""Names of optional parameters of a user's model function that are rejected, since they could mean the client."""


@dataclass(frozen=True)
class UserFunctions:
    """Models, data, task and client settings that a user passes in Python; by default, the configuration is used.

    Attributes:
        model: a network, a class of networks, or a function of a client that returns a network.
        data: a function of a client that returns its data, or examples that the configuration splits among clients.
        task: the task of the user's data, or its name; None infers it from labels and outputs.
        client_settings: a function of a simulated client that returns the client's own values of configuration keys.
        _known: results of `_brings` (facts about client 0's data), by number of clients and batch size.
    """

    model: Any = None
    data: Any = None
    task: str | Task | None = None
    client_settings: Any = None
    _known: dict[tuple[int, int], tuple[bool, int | None, bool]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        _ = self.model_of, self.data_of, as_task(self.task), self.settings_of
        if self.task is not None and self.data is None:
            raise ConfigError("task is for your own data, but the configured data set has its own task: pass data, too")

    def __bool__(self) -> bool:
        return any(function is not None for function in (self.model, self.data, self.client_settings))

    @cached_property
    def model_of(self) -> ModelFunction | None:
        """A function that returns a client's model, or None if the user passes no model."""
        return model_function(self.model)

    @cached_property
    def settings_of(self) -> Callable[[ClientInfo], dict[str, Any]] | None:
        """A function that returns a simulated client's own settings, or None if the user passes none."""
        function = self.client_settings
        return None if function is None else Function("client_settings", function, _as_settings)

    @cached_property
    def data_of(self) -> DataFunction | None:
        """A function that returns a client's data, or None if the user passes no data."""
        return data_function(self.data)

    @property
    def pool(self) -> Pooled | None:
        """The user's examples that the configuration splits among clients, or None."""
        return self.data_of.pool if isinstance(self.data_of, Shares) else None

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names, if the user's examples name them."""
        return self.pool.clients if self.pool else ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The attributes as keyword arguments for `fedhet.run` and `fedhet.make_client_app`."""
        return {name: getattr(self, name) for name in ("model", "data", "task", "client_settings")}

    @property
    def words(self) -> dict[str, str]:
        """A text for each attribute that was passed, such as `package.make_model`, for the files of a run."""
        said = {name: described(function) for name, function in self.arguments.items() if function is not None}
        return said | ({"task": str(as_task(self.task))} if self.task else {})

    @property
    def supplied(self) -> set[str]:
        """The names of the arguments that the user passes, and `split` if the configuration does not split the data."""
        return {*self.words} | ({"split"} if self.data is not None and self.pool is None else set())

    def check(self, config: Config) -> None:
        """Check a configuration before a run as far as no client is needed; raise a FedhetError otherwise."""
        own_model, own_data = self.model is not None, self.data is not None
        client_setup.check(config, own_model=own_model, own_data=own_data, pool=self.pool)

    def replacing(self, config: Config) -> frozenset[OwnPart]:
        """Return what the user passes in Python that leaves configuration keys without effect, such as `model`.

        It also has `loader` if the user set `batch-size`, but the data are in DataLoaders of another batch size, and
        `augmentation` if the user set `augment`, but the data have their own augmentation function.
        """
        parts: set[OwnPart] = {"model"} if self.model is not None else set()
        if self.data is not None:
            parts |= {"data"} if self.pool else {"data", "split"}
            by_hand = {key for key in config.chosen if config.origins[key] != "run"}
            if "batch-size" in by_hand and self._brings(config)[1] not in (None, config.batch_size):
                parts.add("loader")
            if "augment" in by_hand and self._brings(config)[2]:
                parts.add("augmentation")
        return frozenset(parts)

    def adapted(self, config: Config, *, strict: bool = True) -> Config:
        """Return the configuration with defaults that suit the user's models and data.

        If models and data are passed, `dataset` becomes `own`. Without a common test set, `test-on` becomes `local`
        unless the user set it. The method can change further defaults (`Options.suited`). With `strict`, raises a
        ConfigError if the user set a key that has no effect.
        """
        if not self:
            return config
        if self.clients:
            config = _by_clients(config, len(self.clients))
        if self.data is not None and config.test_on != "local" and "test-on" not in config.chosen:
            config = config if self._brings(config)[0] else config.on_own_test_parts()
        suited = {} if self.model is None else config.options.suited()
        specs = config.specs()
        for name, (value, reason) in suited.items():
            of_method = f"{config.family}.{name}"
            key = of_method if of_method in specs else name
            if key in config.chosen:
                continue
            changed: dict[str, Any] = {specs[key].name: value}
            if key == of_method:
                changed = {"options": replace(config.options, **changed)}
            remark = (key, f"{key} = {toml_value(value)}, {reason}")
            config = config.replace(**changed, remarks=(*config.remarks, remark))
        return effective(config, registry.traits(config), self.replacing(config), strict=strict)

    def common_test_set(self, config: Config, names: Names) -> Examples | None:
        """Return the common test set that the user's data function returns for client 0, if any, aligned to `names`."""
        return None if self.data_of is None else self.data_of(_first(config)).aligned(names).common

    def public_dataset(self, config: Config) -> PublicDataset | None:
        """Return the configured public dataset or, for a user's data, client 0's (None if the server needs none)."""
        if self.data_of is None:
            return public_dataset(config)
        return self.data_of(_first(config)).public if config.options.public_at_server else None

    def _brings(self, config: Config) -> tuple[bool, int | None, bool]:
        """Return whether client 0's data have a common test set, their batch size, and whether they are augmented."""
        if (key := (config.clients, config.batch_size)) not in self._known:
            assert self.data_of is not None
            try:
                data = self.data_of(_first(config))
                self._known[key] = data.common is not None, data.batch_size, data.augment is not None
            except Exception:  # the client reports it
                self._known[key] = True, None, False
        return self._known[key]


def _by_clients(config: Config, clients: int) -> Config:
    """Return the configuration for data of `clients` named clients; raise a ConfigError if it has another number."""
    wanted = {"clients": clients, "partition": "natural"}
    for key, value in wanted.items():
        if key in config.chosen and config.flat()[key] != value:
            raise ConfigError(
                f"{key} = {config.flat()[key]}: the data have {clients} clients by name (by_column), which determine "
                f"{key}: leave it out"
            )
    return config.replace(**wanted)


def _first(config: Config) -> ClientInfo:
    return ClientInfo("0", 0, config.clients, config)


class Function:
    """A callable that takes a client, calls a user's function with it, and checks and converts the result.

    For each call, random generators that `given` uses and, for data and settings, the global ones are seeded, so that
    a client has equal data in all processes. Raises a ConfigError if no parameter of `given` is clearly the client.

    Args:
        argument: the argument of `fedhet.run` by which the user passed `given`: `model`, `data` or `client_settings`.
        given: the user's function, network or class of networks.
        accept: a function of the client's name and the returned value that checks and converts the value.
    """

    def __init__(self, argument: str, given: Any, accept: Callable[[str, Any], Any]) -> None:
        self.argument = argument
        self.given = given
        self._accept = accept
        networks = argument == "model"
        estimator = networks and is_estimator(given)
        if not (callable(given) or estimator) or (isinstance(given, type) and not networks):
            kind = given.__name__ if isinstance(given, type) else f"a {type(given).__name__}"
            wanted = "a network, an estimator, a class of networks or a function" if networks else "a function"
            raise ConfigError(
                f"{argument} must be {wanted} of a client, not {kind}; for example: def {argument}(client): "
                f"return {_RETURNED[argument]}"
            )
        if estimator or (networks and isinstance(given, nn.Module)):
            if not estimator:
                in_use(given)  # by the user; clients get copies
            self.call: Callable[[ClientInfo], Any] = lambda client: given
        else:
            self.call = _taking_client(given, argument)

    def __call__(self, client: ClientInfo) -> Any:
        """Call the user's function and return the converted value; raises a `UserCodeError` if the function fails."""
        seeds = nullcontext() if self.argument == "model" else seeded(client.split_seed, self.argument, client.name)
        doing = f"client {client.name}: the {self.argument} function"
        try:
            with standard_settings(), seeds, reseeded(held_by(self.given)):
                with settings_restored():
                    value = self.call(client)
                doing = f"client {client.name}: reading what the {self.argument} function returned"
                return self._accept(client.name, value)
        except (ModelError, DataError, UserCodeError) as error:
            raise type(error)(f"{error}{origin(self)}") from error
        except FedhetError:
            raise
        except (Exception, SystemExit) as error:
            raise UserCodeError.of(error, doing, origin(self)) from error


class Shares:
    """A function of a client that returns its share of a user's examples, which the configuration splits."""

    def __init__(self, pool: Pooled) -> None:
        self.pool = pool

    def __call__(self, client: ClientInfo) -> ClientData:
        """Return the client's data; raise a `DataError` that names the client if they cannot be used."""
        try:
            return as_client_data(client.name, client_setup.share_of(self.pool, client))
        except DataError:
            for owner in (client.partition_id, None):  # the public dataset has rows of others
                self.pool.check_finite(owner)  # names the row as the user knows it
            raise


def model_function(model: Any) -> ModelFunction | None:
    """Convert the argument `model` of `fedhet.run` to a function that returns a client's network; None stays None."""
    return None if model is None else Function("model", model, _as_network)


def data_function(data: Any) -> DataFunction | None:
    """Convert the argument `data` of `fedhet.run` to a function that returns a client's data; None stays None."""
    if data is None or callable(data):
        return None if data is None else Function("data", data, as_client_data)
    try:
        return Shares(as_pooled(data))
    except DataError as error:
        raise DataError(f"data (a function of a client, or examples to split among clients): {error}") from error


def data_of(function: DataFunction | None, client: ClientInfo) -> ClientData:
    """Return a client's data by a user's function (None: those configured), with a test set drawn if it is to be."""
    if function is None:
        return client_setup.data_of(client)
    data = function(client)
    if client.config.test_split == "drawn" and not isinstance(function, Shares):
        config = client.config
        labelled = registry.client_side(config.method_name).needs_labels
        return with_drawn_test_set(
            data, client.split_seed, config.test_share, client=client.name, all_labelled=labelled
        )
    return data


def _as_settings(client: str, value: Any) -> dict[str, Any]:
    settings = (
        {kebab(str(key)): setting for key, setting in value.items()} if isinstance(value, Mapping) else {"": value}
    )
    if not settings.keys() <= {*CLIENT_KEYS}:
        raise ConfigError(
            f"client {client}: client_settings returned {shown(value)}, but must return a dict with some of "
            f"{', '.join(CLIENT_KEYS)}"
        )
    return settings


def origin(function: Callable[..., Any] | None) -> str:
    """Return the end of a message: ` (model = NAME)` if `function` calls a user's function, named NAME; else ""."""
    return f" ({function.argument} = {described(function.given)})" if isinstance(function, Function) else ""


def described(function: Any) -> str:
    """Return the name of a user's function or object, for messages and the files of a run."""
    function = getattr(function, "func", function)  # a functools.partial
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def _taking_client(function: Callable[..., Any], argument: str) -> Callable[[ClientInfo], Any]:
    """Return a function of a client that calls a user's `function` with the facts about the client that it accepts.

    Its parameters may be `client`, `partition_id`, `num_partitions` and `batch_size`. A single required parameter with
    another name gets the `ClientInfo`, as `client` does. Errors name `argument`: `model`, `data` or `client_settings`.
    """
    taken, needed = open_parameters(function)
    named = {p.name for p in taken if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    wanted = named & _FACTS.keys()
    is_class = isinstance(function, type)
    unclear = [p.name for p in needed if p.name not in wanted]
    if not unclear and not wanted & {"client", "partition_id"}:
        unclear = [p.name for p in taken if p.name not in wanted]
        if argument == "model":  # options with defaults, such as numbers of units, are usual
            unclear = [] if is_class else [parameter for parameter in unclear if parameter in _CLIENT_NAMES]
    if not unclear:
        return lambda client: function(**{name: _FACTS[name](client) for name in wanted})
    only = needed[0] if len(needed) == 1 and not is_class else None
    # Flower's context has other attributes than a client.
    if only and unclear == [only.name] and only.kind is not Parameter.KEYWORD_ONLY and only.name != "context":
        return lambda client: function(client)
    name = getattr(function, "__name__", type(function).__name__)
    raise ConfigError(
        f"{argument} function {name}: it is unclear which of its arguments ({', '.join(unclear)}) is the client: "
        f"rename one to client or partition_id, or pass {argument}=lambda client: {name}(...)"
    )


def _as_network(client: str, model: Any) -> nn.Module:
    """Return a copy of the client's `model` with hooks that copy its inputs and return the `logits` of its outputs.

    An estimator, such as scikit-learn's, is returned as an `Estimator`.
    """
    if is_estimator(model):
        return Estimator(model)
    name = "None" if model is None else f"a {type(model).__name__}"
    if problem := unusable(model):
        raise ModelError(f"client {client}: the model function returned {name}{problem}")
    try:
        model = separated(model)
    except ModelError as error:
        raise ModelError(f"client {client}: the model function returned {name} that cannot be used: {error}") from error
    if model.eval() is not model or model.train() is not model:
        raise ModelError(
            f"client {client}: the model function returned {name} whose train() or eval() returns nothing: return self"
        )
    return as_called(model)


def as_called(model: nn.Module) -> nn.Module:
    """Return a user's network after adding, in place, the forward hooks that `as_given` removes."""
    if _gathered not in model._forward_pre_hooks.values():  # which `as_given` adds to a module that contains a network
        model.register_forward_pre_hook(_copied, with_kwargs=True)
        model.register_forward_hook(_plain)
    return model


def as_given(model: nn.Module) -> nn.Module:
    """Return a user's network after removing, in place, the forward hooks that fedhet added to it."""
    if _plain not in model._forward_hooks.values():  # a module that contains it takes the same arguments
        model.register_forward_pre_hook(_gathered, with_kwargs=True)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_copied, _plain)]:
            del hooks[key]
    return model


def _gathered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Forward pre-hook that passes several inputs on as one `Inputs`."""
    return ((together(by_name(args, kwargs)),), {}) if kwargs or len(args) > 1 else None


def _copied(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Forward pre-hook that returns copies of the inputs, since the network could change the user's data in place."""
    if len(args) == 1 and isinstance(args[0], Inputs):
        args, kwargs = args[0].arguments
    args = tuple(argument.clone() if isinstance(argument, Tensor) else argument for argument in args)
    return args, {
        name: argument.clone() if isinstance(argument, Tensor) else argument for name, argument in kwargs.items()
    }


def _plain(module: nn.Module, inputs: object, outputs: Any) -> Tensor | None:
    """Forward hook that returns the `logits` of an output that is not a tensor; raises a ModelError if it has none."""
    if isinstance(outputs, Tensor):
        return None
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        mode = " in training mode" if module.training else ""
        raise ModelError(
            f"{type(module).__name__} returned a {type(outputs).__name__}{mode}: a "
            "network must return a tensor, or an object whose attribute logits is a tensor; wrap the network in a "
            "module that does so"
        )
    return logits
