"""Runs a user's own ClientApp under fedhet's strategies, with its train and evaluate functions unchanged."""

from collections.abc import Callable
from typing import Any

import torch

from fedhet.client.app import Answers
from fedhet.client.clients import Clients
from fedhet.client.work import Job
from fedhet.config import user_functions
from fedhet.data import ClientData, Examples
from fedhet.data.reading import LazyInputs
from fedhet.errors import ConfigError, DataError, FedhetError, ModelError
from fedhet.flower import ClientApp, Context, Message, ask_app
from fedhet.flower.settings import OURS
from fedhet.messages import Payload, check, load_into, spec_of, to_arrays
from fedhet.methods import registry
from fedhet.methods.keys import kebab
from fedhet.methods.options import Config
from fedhet.tasks import as_task
from fedhet.training import Trained
from fedhet.utils.statistics import Metric
from fedhet.utils.text import log


def wrap(
    app: ClientApp,
    model: Any,
    examples: Callable[..., tuple[int, int]],
    *,
    accuracy: str = "eval_acc",
    loss: str = "eval_loss",
    train_loss: str = "train_loss",
) -> ClientApp:
    """Return a ClientApp that serves fedhet's strategies with the train and evaluate functions of your own ClientApp.

    These functions receive what Flower's own strategies send: `arrays`, the network's state dict, and `config` with
    `server-round`, `lr`, `local-epochs`, `batch-size` and the method's own keys. They return what Flower's strategies
    expect: arrays from training, and metrics from training and evaluation. The run's history lists all metrics by name;
    a training metric gets the prefix `train_` if evaluation returns a metric of the same name. Arrays that the method
    does not share stay on the client. Methods that need fedhet's training loop are refused.

    Args:
        app: your ClientApp, with `@app.train()` and `@app.evaluate()`.
        model: the model, in any form that `fedhet.make_client_app` accepts; its state dict has the arrays that the
            functions receive and return.
        examples: a function that returns a client's numbers of training and test examples, which must not change
            within a run; its argument is, for example, the client's `partition_id`.
        accuracy: name of the metric from `evaluate` that is used as the score, from 0 to 1.
        loss: name of the metric from `evaluate` with the mean loss.
        train_loss: name of the metric from `train` with the mean loss; `train` may leave it out.

    Raises:
        ModelError: `model` is None.
        ConfigError: `app` is not a ClientApp, or `examples` has arguments for which fedhet has no value.
    """
    if not isinstance(app, ClientApp):
        raise ConfigError(f"app must be a flwr.clientapp.ClientApp, not {type(app).__name__}")
    if (function := user_functions.model_function(model)) is None:
        raise ModelError("fedhet.wrap needs the model whose arrays the app's functions receive: fedhet.wrap(app, Net)")

    def loop(config: Config, message: Message, context: Context) -> _Loop:
        _check_method(config)
        return _Loop(app, message, context, (accuracy, loss, train_loss))

    return Answers(Clients(function, user_functions.counts_function(examples, _unread), as_task(None)), loop=loop).app()


def _check_method(config: Config) -> None:
    if not registry.client_side(config.method_name).takes_any_loop:
        able = [name for name in registry.own_methods() if registry.client_side(name).takes_any_loop]
        raise ConfigError(
            f"{config.method_name} needs fedhet's training loop, but this client's app trains with its own "
            f"(fedhet.wrap): create the app with fedhet.make_client_app, or choose one of {', '.join(able)}"
        )
    if config.validation or config.unseen_clients:
        key = "validation" if config.validation else "unseen-clients"
        raise ConfigError(
            f"{key} needs fedhet's training loop, but this client's app trains with its own (fedhet.wrap): create the "
            f"app with fedhet.make_client_app, or leave {key} unset"
        )


class _Unread:
    """Placeholder for examples that only the app's own functions can read."""

    def __getitem__(self, row: int) -> Any:
        raise DataError(
            "only the app's own functions can read the client's examples (fedhet.wrap), but a setting of the run needs "
            "them: set batch-norm = local, and no validation part"
        )


def _unread(client: str, counts: Any) -> ClientData:
    """Return client data with `counts` unreadable examples; raises a DataError if `counts` are not valid numbers."""
    try:
        train, test = (int(count) for count in counts)
    except (TypeError, ValueError):
        train, test = -1, -1
    if train < 1 or test < 0:
        raise DataError(
            f"client {client}: the function examples must return the numbers of training and test examples, at least "
            f"(1, 0), but returned {counts!r}"
        )
    unread = (LazyInputs(_Unread(), None, torch.arange(count)) for count in (train, test))
    own_train, own_test = (Examples(part, torch.zeros(len(part), dtype=torch.int64)) for part in unread)
    return ClientData(own_train, own_test)


class _Loop:
    """Trains and evaluates with the functions of a user's app; `names` name accuracy, loss and training loss."""

    def __init__(self, app: ClientApp, message: Message, context: Context, names: tuple[str, str, str]) -> None:
        self._app, self._message, self._context, self._names = app, message, context, names
        self._metrics: dict[str, dict[str, float]] = {"train": {}, "evaluate": {}}

    def train(self, job: Job) -> None:
        """Train the client's network with the app's train function."""
        client, train_loss = job.client, self._names[2]
        arrays, metrics = self._ask("train", job)
        try:
            check(arrays, spec_of(client.tensors), "the arrays that the app's train function returned")
        except FedhetError as error:
            raise ModelError(f"{error} (fedhet.wrap)") from error
        load_into(client.tensors, arrays)
        if train_loss in metrics:
            client.trained = Trained(loss=metrics[train_loss], epochs=1)
        self._metrics["train"] = metrics
        self._report(job)

    def measure(self, job: Job, when: str) -> None:
        """Evaluate the client's network on its test examples, as `received` or as `trained` (`when`)."""
        count, (accuracy, loss, _) = len(job.client.data.test), self._names
        if count < max(job.policy.least, 1):
            log.warning("client %s has %d test examples, too few for a metric (min-examples)", job.client.name, count)
            return
        metrics = self._ask("evaluate", job)[1]
        if missing := next((name for name in (accuracy, loss) if name not in metrics), None):
            raise ModelError(
                f"the app's evaluate function returned no metric {missing!r}; it returned "
                f"{', '.join(sorted(metrics)) or 'none'}: pass the names of its accuracy and loss, "
                "fedhet.wrap(..., accuracy='...', loss='...')"
            )
        metric = Metric((metrics[accuracy],), (float(count),))
        job.measured[when] = job.policy.measured(metric, metrics[loss], examples=count, ranked=False)
        if when == job.side.traits.scored:
            self._metrics["evaluate"] = metrics
            self._report(job)

    def _report(self, job: Job) -> None:
        (accuracy, loss, _), evaluated = self._names, self._metrics["evaluate"]
        taken = {accuracy, loss, *evaluated}
        trained = {f"train_{name}" if name in taken else name: v for name, v in self._metrics["train"].items()}
        job.further = trained | evaluated

    def _ask(self, action: str, job: Job) -> tuple[dict[str, Any], dict[str, float]]:
        """Call the app's `train` or `evaluate` function (`action`); return the arrays and metrics of its reply."""
        client, config = job.client, job.client.config
        settings = {kebab(name): value for name, value in vars(config.options).items()}
        family = f"{config.family}."
        settings |= {name: settings[key.removeprefix(family)] for name, key in OURS.items() if key.startswith(family)}
        settings |= {
            "server-round": client.request.round,
            "lr": client.optimisation().learning_rate,
            "local-epochs": client.request.epochs,
            "batch-size": config.batch_size,
        }
        sent = Payload({"arrays": to_arrays(client.tensors)})
        return ask_app(self._app, action, self._message, self._context, sent, settings)
