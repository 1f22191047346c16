"""Runs a user's own ClientApp under fedhet's strategies, with its train and evaluate functions unchanged."""

from collections.abc import Callable
from typing import Any

import torch

from fedhet.client.app import Answers
from fedhet.client.clients import Clients
from fedhet.client.job import Job
from fedhet.client.policy import Policy
from fedhet.config import user_functions
from fedhet.config.client_setup import ClientInfo
from fedhet.config.flower_names import OURS
from fedhet.data import ClientData, Examples
from fedhet.data.reading import LazyInputs
from fedhet.errors import ConfigError, DataError, FedhetError, ModelError
from fedhet.flower import AppError, ClientApp, Context, Message, MessageType, ask_app, is_request
from fedhet.flower.insides import failure, mods_of
from fedhet.flower.privacy import check_mods, noise_multiplier
from fedhet.messages import check, load_into, spec_of, to_arrays
from fedhet.methods import registry
from fedhet.methods.keys import kebab
from fedhet.methods.options import Config
from fedhet.tasks import LARGEST, as_task
from fedhet.training import Trained
from fedhet.utils.randomness import derive_seed, splitting_alike
from fedhet.utils.statistics import Metric
from fedhet.utils.text import log, traceback_in_file

COUNT = "num-examples"
"""Name of the metric with the number of examples, as for Flower's strategies."""


def wrap(
    app: ClientApp,
    model: Any,
    examples: Callable[..., tuple[int, int]] | None = None,
    *,
    accuracy: str = "eval_acc",
    loss: str = "eval_loss",
    train_loss: str = "train_loss",
) -> ClientApp:
    """Return a ClientApp that serves fedhet's strategies with the train and evaluate functions of your own ClientApp.

    These functions receive what Flower's own strategies send: `arrays`, the network's state dict, and `config` with
    `server-round`, `lr`, `local-epochs`, `batch-size`, the method's own keys, and all entries of `train_config` or
    `evaluate_config`, which take precedence. They return what Flower's strategies expect: arrays from training, and
    metrics with `num-examples` from training and evaluation. The run's history has all metrics by name (a list as
    `NAME.0`, `NAME.1`); a name that fedhet or both functions use gets the prefix `train_` or `evaluate_`. Arrays that
    the method does not share stay on the client. Methods that need fedhet's training loop are refused. Messages that
    are not from a strategy of fedhet go to your ClientApp, unless the node has a policy (`allow`).

    Before each call of `train` and `evaluate`, the global random generators of torch, NumPy and Python are seeded for
    the client. Random numbers that are drawn before a `DataLoader` shuffles or an optimiser takes its first step, such
    as for a split, are therefore the same in all calls. Seed other generators yourself.

    Args:
        app: your ClientApp, with `@app.train()` and `@app.evaluate()`.
        model: the model, in any form that `fedhet.make_client_app` accepts; its state dict has the arrays that the
            functions receive and return.
        examples: a function that returns a client's numbers of training and test examples, needed only if the app's
            functions return no `num-examples`; its argument is, for example, the client's `partition_id`.
        accuracy: name of the metric from `evaluate` that is used as the score, from 0 to 1.
        loss: name of the metric from `evaluate` with the mean loss.
        train_loss: name of the metric from `train` with the mean loss; `train` may leave it out.

    Raises:
        ModelError: `model` is None.
        ConfigError: `app` is not a ClientApp, a mod cannot be used, or `examples` is not a function of a client.
    """
    if not isinstance(app, ClientApp):
        raise ConfigError(
            f"app must be a flwr.clientapp.ClientApp with @app.train() and @app.evaluate(), not {type(app).__name__}"
        )
    check_mods(mods := mods_of(app))
    if (function := user_functions.model_function(model)) is None:
        raise ModelError("fedhet.wrap needs the model whose arrays the app's functions receive: fedhet.wrap(app, Net)")
    if examples is not None and not callable(examples):
        raise ConfigError(
            f"examples must be a function, such as lambda partition_id: (60, 20), not {examples!r:.80}; leave it out "
            "if the app's functions return num-examples"
        )

    def loop(config: Config, message: Message, context: Context) -> _Loop:
        _check_method(config)
        return _Loop(app, message, context, (accuracy, loss, train_loss), counted=examples is not None)

    def uncounted(client: ClientInfo) -> tuple[int, int]:  # until the app's functions return `num-examples`
        least = Policy.of(client.node_config, deployed=True).least
        return least, least

    counts = user_functions.of_client("examples", examples or uncounted, _unread)
    answers = Answers(Clients(function, counts, as_task(None)), noise=noise_multiplier(mods), loop=loop).app()
    return _Both(answers, app)


class _Both(ClientApp):
    """Passes messages of fedhet's strategies to `answers`, and all others to the user's own ClientApp."""

    def __init__(self, answers: ClientApp, own: ClientApp) -> None:
        super().__init__()
        self._answers, self._own = answers, own

    def __call__(self, message: Message, context: Context) -> Message:
        if is_request(message):
            return self._answers(message, context)
        if policy := [key for key in ("allow", "min-examples", "dp-noise") if key in context.node_config]:
            return failure(message, f"this node has a policy ({policy[0]}): it answers only strategies of fedhet")
        return self._own(message, context)


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
            "them: set batch-norm = local, and leave validation unset"
        )


def _unread(client: str, counts: Any) -> ClientData:
    """Return client data with placeholders for `counts` = (training, test) examples; raise a DataError if invalid."""
    try:
        train, test = (int(count) for count in counts)
    except (TypeError, ValueError):
        train, test = -1, -1
    if train < 1 or test < 0:
        raise DataError(
            f"client {client}: examples() must return the numbers of training and test examples, at least "
            f"(1, 0), but returned {counts!r}"
        )
    unread = (LazyInputs(_Unread(), None, torch.arange(count)) for count in (train, test))
    own_train, own_test = (Examples(part, torch.zeros(len(part), dtype=torch.int64)) for part in unread)
    return ClientData(own_train, own_test)


class _Loop:
    """Trains and evaluates with a user's app; `names` are its metrics, `counted` says whether `wrap` has `examples`."""

    def __init__(
        self, app: ClientApp, message: Message, context: Context, names: tuple[str, str, str], *, counted: bool
    ) -> None:
        self._app, self._message, self._context, self._names = app, message, context, names
        self._counted, self._left_out = counted, set[str]()
        self._metrics: dict[str, dict[str, float]] = {"train": {}, "evaluate": {}}

    def train(self, job: Job) -> None:
        """Train the client's network with the app's train function."""
        client, train_loss = job.client, self._names[2]
        arrays, metrics, weight = self._ask("train", job, client.request.round)
        count = self._count(job, "train", metrics, len(client.data.train))
        job.examples = max(1, int(count))
        job.policy.check_examples(job.examples, max(client.config.batch_size, job.policy.least))
        job.weight = metrics.pop(weight, 0.0 if weight != COUNT else count)
        if not job.weight > 0:
            raise ModelError(
                f"the app's train function returned no {weight!r} above 0 (weighted_by_key): add it to its MetricRecord"
            )
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
        """Evaluate the client's network on its test examples; `when` is `received` or `trained`."""
        accuracy, loss, _ = self._names
        known, request = len(job.client.data.test), job.client.request
        aggregated = request.flower and self._message.metadata.message_type == MessageType.EVALUATE
        try:
            if _few(job, known):
                return
            earlier = request.final or (when == "received" and not aggregated)
            _, metrics, weight = self._ask("evaluate", job, request.round - earlier)
        except AppError as error:
            return job.say(f"{error}; its metrics are missing")
        except FedhetError:
            raise
        except Exception as error:  # as for Flower's strategies, the training counts
            line = traceback_in_file(error, f"client {job.client.name}: evaluate (round {job.client.request.round})")
            return job.say(f"its evaluate function raised {line}; its metrics are missing")
        count = self._count(job, "evaluate", metrics, known)
        if _few(job, max(1, int(count))):
            return
        job.test_examples, share = max(1, int(count)), max(0.0, metrics.pop(weight, count))
        job.examples = job.examples or job.test_examples
        if missing := next((n for n in (accuracy, loss) if n not in metrics and n not in self._left_out), None):
            job.say(
                f"its evaluate function returned no metric {missing!r}, so there is no score; it returned "
                f"{', '.join(sorted(metrics)) or 'none'}: pass the names of its accuracy and loss, "
                "fedhet.wrap(..., accuracy='...', loss='...')"
            )
        if not 0 <= metrics.get(accuracy, 0.0) <= 1:
            job.say(f"the metric {accuracy} is {metrics[accuracy]!r}, must be from 0 to 1, and is left out")
            del metrics[accuracy]
        if accuracy in metrics and loss in metrics:
            metric = Metric((metrics[accuracy],), (share,))
            job.measured[when] = job.policy.measured(metric, metrics[loss], examples=job.test_examples, ranked=False)
        if when == job.side.traits.scored:
            self._metrics["evaluate"] = metrics
            self._report(job)

    def _count(self, job: Job, action: str, metrics: dict[str, float], given: int) -> float:
        """Return the number of examples in the `metrics` of the app's function `action`, by default `given`."""
        count = metrics.get(COUNT, given if self._counted else 0)
        if not count > 0:
            raise ModelError(
                f"the app's {action} function returned no {COUNT!r} above 0: add it to its MetricRecord, or pass "
                "fedhet.wrap(..., examples=...)"
            )
        if self._counted and count != given:
            job.say(f"its {action} function returned {COUNT} = {count:g}, which counts, but examples returned {given}")
        return count

    def _report(self, job: Job) -> None:
        """Store metrics for the reply, with a prefix for names that fedhet or both of the app's functions use."""
        (accuracy, loss, _), evaluated = self._names, self._metrics["evaluate"]
        taken = {accuracy, loss, *evaluated}
        job.further = {f"train_{n}" if n in taken or _ours(n) else n: v for n, v in self._metrics["train"].items()}
        job.evaluated = {f"evaluate_{n}" if _ours(n) else n: value for n, value in evaluated.items()}

    def _ask(self, action: str, job: Job, round: int) -> tuple[dict[str, Any], dict[str, float], str]:
        """Call the app's `train` or `evaluate` (`action`); return arrays, metrics and the name of the weight metric."""
        client, config = job.client, job.client.config
        settings = {kebab(name): value for name, value in vars(config.options).items()}
        family = f"{config.family}."
        settings |= {name: settings[key.removeprefix(family)] for name, key in OURS.items() if key.startswith(family)}
        settings |= {
            "server-round": round,
            "lr": client.optimisation().learning_rate,
            "local-epochs": client.request.epochs,
            "batch-size": config.batch_size,
        }
        model = to_arrays(client.tensors)
        split_seed = int(self._context.node_config.get("split-seed", config.seed))
        then = client.seed("dropout") if action == "train" else derive_seed(client.root, "evaluation", client.name)
        with splitting_alike(derive_seed(split_seed, "data", client.name), then):
            arrays, record, weight = ask_app(self._app, action, self._message, self._context, model, settings)
        metrics: dict[str, float] = {}
        for name, value in record.items():
            entries = enumerate(value) if isinstance(value, list) else ()
            metrics |= {f"{name}.{place}": float(each) for place, each in entries} or {name: float(value)}
        if left_out := [name for name, value in metrics.items() if not abs(value) <= LARGEST]:
            self._left_out |= {*left_out}
            job.say(f"{', '.join(left_out)} of its {action} function is not a finite number, and is left out")
        return arrays, {name: value for name, value in metrics.items() if name not in left_out}, weight


def _few(job: Job, count: int) -> bool:
    """Return whether `count` test examples are too few for a metric; log a warning if so."""
    if few := count < max(job.policy.least, 1):
        log.warning("client %s has %d test examples, too few for a metric (min-examples)", job.client.name, count)
    return few


def _ours(name: str) -> bool:
    """Return whether fedhet records a metric with this name in every round."""
    return name == "train-loss" or name.startswith(("received-", "trained-"))
