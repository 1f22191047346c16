"""Run a user's own ClientApp under fedhet's strategies, with its train and evaluate functions unchanged."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fedhet.client.app import Answers
from fedhet.client.clients import Clients
from fedhet.client.guard import Guarded
from fedhet.client.job import Job
from fedhet.client.policy import Policy, limiting_keys
from fedhet.client.work import enough
from fedhet.config.flower_names import OURS
from fedhet.data import ClientData, Examples
from fedhet.errors import ConfigError, FedhetError, ModelError, Refused
from fedhet.flower import ClientApp, Context, Message, MessageType
from fedhet.flower.insides import mods_of
from fedhet.flower.messages import ask_app
from fedhet.flower.privacy import check_mods, noise_multiplier
from fedhet.messages import WireError, check, load_into, spec_of, to_arrays
from fedhet.messages.protocol import COUNT
from fedhet.methods import registry
from fedhet.methods.options import Config, kebab
from fedhet.setup import user_functions
from fedhet.setup.client_setup import ClientInfo
from fedhet.tasks import LARGEST, Task
from fedhet.tasks.outputs import OUTPUTS, direction
from fedhet.training import Backend, Evaluation, Scored, Trained, Training, attempt
from fedhet.utils.randomness import derive_seed, splitting_alike
from fedhet.utils.statistics import Metric
from fedhet.utils.text import log, traceback_in_file


def wrap(
    app: ClientApp, model: Any, *, accuracy: str = "eval_acc", loss: str = "eval_loss", train_loss: str = "train_loss"
) -> ClientApp:
    """Return a ClientApp that serves fedhet's strategies with the train and evaluate functions of your own ClientApp.

    These functions receive what Flower's own strategies send: `arrays`, the network's state dict, and `config` with
    `server-round`, `lr`, `local-epochs`, `batch-size`, the keys that only the run's method has, and, with precedence,
    the strategy's `train_config` or `evaluate_config`. They return what Flower's strategies expect: arrays from
    training, and metrics with `num-examples` from both. The run's history has all metrics by name (a list as
    `NAME.0`, `NAME.1`); a name that fedhet or both functions use gets the prefix `train_` or `evaluate_`. Arrays that
    the method does not share stay on the client. Methods that need fedhet's training loop are refused. Messages that
    are not from a strategy of fedhet go to your ClientApp, at a node with a policy as `fedhet.guard` describes.

    Before each call of `train`, torch's global random generator is seeded for the client and the round, and before each
    call of `evaluate` for the client. Until a `DataLoader` shuffles or an optimiser takes its first step, what is drawn
    for a split is the same in all calls: permutations (`torch.randperm`, `random_split`), and NumPy's and Python's
    global generators. Seed other generators yourself.

    Args:
        app: your ClientApp, with `@app.train()` and `@app.evaluate()`.
        model: the model, as for `fedhet.make_client_app`; the functions receive and return its state dict's arrays.
        accuracy: name of the metric from `evaluate` that is used as the score, from 0 to 1. Results call it by this
            name if it is a metric of fedhet, such as `auc` or `eval_f1`, and else `accuracy`.
        loss: name of the metric from `evaluate` with the mean loss.
        train_loss: name of the metric from `train` with the mean loss; `train` may leave it out.

    Raises:
        ModelError: `model` is None.
        ConfigError: `app` is not a ClientApp, a mod cannot be used, or lower values of `accuracy` are better.
    """
    if not isinstance(app, ClientApp):
        raise ConfigError(
            f"app must be a flwr.clientapp.ClientApp with @app.train() and @app.evaluate(), not {type(app).__name__}"
        )
    guarded = app if isinstance(app, Guarded) else Guarded(app, {})
    check_mods(mods := mods_of(guarded.own))
    if (function := user_functions.model_function(model)) is None:
        raise ModelError("fedhet.wrap needs the model that the app's functions train: call fedhet.wrap(app, Net)")

    def backend(config: Config, message: Message, context: Context) -> Callable[[Job], Backend]:
        _check_settings(config)
        return partial(_OwnApp, guarded.own, message, context, accuracy, loss, train_loss)

    clients = Clients(function, _placeholders, _task_of(accuracy))
    answers = Answers(clients, noise=noise_multiplier(mods), backend=backend).app()
    return Guarded(guarded.own, guarded.kinds, answers)


def _check_settings(config: Config) -> None:
    what = "validation" if config.validation else "unseen-clients" if config.unseen_clients else ""
    remedy = f"leave {what} unset"
    if not registry.client_side(config.method_name).takes_any_loop:
        able = [name for name in registry.own_methods() if registry.client_side(name).takes_any_loop]
        what = config.method_name
        remedy = f"choose one of {', '.join(able)}"
    if what:
        raise ConfigError(
            f"this client's app trains with its own loop (fedhet.wrap), but {what} needs fedhet's training loop: "
            f"create the app with fedhet.make_client_app, or {remedy}"
        )


def _placeholders(client: ClientInfo) -> ClientData:
    """Return training and test sets of `min-examples` empty examples, for an app that reads its own data."""
    least = Policy.of(client.node_config, deployed=True).least
    part = Examples(torch.zeros(least, 0), torch.zeros(least).long())
    return ClientData(part, part)


@dataclass(frozen=True)
class _Score:
    """The score by the metrics of an app's evaluate function."""

    metrics: dict[str, Metric]
    loss: float


@dataclass
class _OwnApp:
    """The backend that trains and evaluates a client's network by the functions of a user's own ClientApp.

    `accuracy`, `loss` and `train_loss` are names of the app's metrics. `metrics` has the latest metrics of the app's
    functions `train` and `evaluate`, by name; `left_out` has names of metrics that were not finite or too large.
    """

    app: ClientApp
    message: Message
    context: Context
    accuracy: str
    loss: str
    train_loss: str
    job: Job
    metrics: dict[str, dict[str, float]] = field(default_factory=lambda: {"train": {}, "evaluate": {}})
    left_out: set[str] = field(default_factory=set)

    def train(self, trainings: Sequence[Training]) -> list[Trained | BaseException]:
        """Call the app's train function in the round's first phase (see `Backend.train`)."""
        return [attempt(self._train, training) for training in trainings]

    def evaluate(self, evaluations: Sequence[Evaluation]) -> list[Scored | BaseException | None]:
        """Call the app's evaluate function; its score is None if a metric is missing (see `Backend.evaluate`)."""
        return [attempt(self._evaluate, evaluation.name) for evaluation in evaluations]

    def _train(self, training: Training) -> Trained:
        job = self.job
        client = job.client
        # The train function does all phases of the method at once.
        reply = job.reply
        if reply.given_weight:
            return training.before
        if client.privacy:
            raise Refused(
                "this node trains with differential privacy (dp-noise), but this app trains with its own loop: choose "
                "an app without fedhet.wrap"
            )
        if client.config.batch_norm == "re-estimate" and "statistic" in job.side.kinds.values():
            raise ConfigError("fedhet.wrap does not support batch-norm = re-estimate: set batch-norm = local")
        arrays, metrics, weight, records = self._ask("train", client.request.round)
        limits = limiting_keys(self.context.node_config)
        if not limits:
            job.records = records
        elif records:
            job.say(f"its node sets {limits[0]}, so the ConfigRecords of its train function are not sent")
        self.metrics["train"] = metrics
        count = _count("train", metrics)
        reply.examples = max(1, int(count))
        job.policy.check_examples(reply.examples, max(client.config.batch_size, job.policy.least))
        reply.weighted_by = weight
        reply.given_weight = metrics.pop(weight, 0.0 if weight != COUNT else count)
        if not reply.given_weight > 0:
            raise ModelError(
                f"your train function must return the metric {weight!r} (weighted_by_key), the client's weight, above 0"
            )
        self._load(arrays)
        self._report()
        if self.train_loss not in metrics:
            return training.before
        return Trained(loss=metrics[self.train_loss], epochs=1)

    def _load(self, arrays: dict[str, Any]) -> None:
        tensors = self.job.client.tensors
        try:
            check(arrays, spec_of(tensors), "the arrays that the app's train function returned")
        except WireError as error:  # which a node with a policy would tell the server
            if arrays.keys() == tensors.keys():
                raise ModelError(str(error)) from error
            local = "which batch-norm = local keeps at the clients"
            if self.job.client.config.batch_norm != "local":
                local = "and set batch-norm = local to keep them at the clients"
            raise ModelError(
                f"{error}. Return the whole state dict of the model that fedhet.wrap got, also BatchNorm's statistics, "
                f"{local}. To share only some arrays, such as adapters, pass fedhet.wrap a module that has only these"
            ) from error
        load_into(tensors, arrays)

    def _evaluate(self, when: str) -> _Score | None:
        job = self.job
        request = job.client.request
        aggregated = request.flower and self.message.metadata.message_type == MessageType.EVALUATE
        earlier = request.final or (when == "received" and not aggregated)
        try:
            _, metrics, weight, _ = self._ask("evaluate", request.round - earlier)
        except FedhetError as error:
            job.say(f"{error}; its metrics are missing")
            return None
        except Exception as error:  # as for Flower's strategies, the training counts
            if job.policy.deployed:  # a node writes only to its state-dir and its log
                log.error("client %s: its evaluate function failed", job.client.name, exc_info=error)
                return None
            line = traceback_in_file(error, f"client {job.client.name}: evaluate (round {request.round})")
            job.say(f"its evaluate function raised {line}; its metrics are missing")
            return None
        count = _count("evaluate", metrics)
        if not enough(job, max(1, int(count)), when):
            return None
        job.reply.test_examples = max(1, int(count))
        # Until the train function has returned its number of examples, this one is the weight.
        if not job.reply.given_weight:
            job.reply.examples = job.reply.test_examples
        share = max(0.0, metrics.pop(weight, count))
        missing = [name for name in (self.accuracy, self.loss) if name not in {*metrics, *self.left_out}]
        if missing:
            job.say(
                f"its evaluate function returned no metric {missing[0]!r}, so there is no score; it returned "
                f"{', '.join(sorted(metrics)) or 'none'}: pass the names of its accuracy and loss, "
                "fedhet.wrap(..., accuracy='...', loss='...')"
            )
        accuracy = metrics.get(self.accuracy)
        loss = metrics.get(self.loss)
        score = None
        if accuracy is not None and not 0 <= accuracy <= 1:
            job.say(f"the metric {self.accuracy} is {accuracy!r}, but must be from 0 to 1, and is left out")
            del metrics[self.accuracy]
        elif accuracy is not None and loss is not None:
            metric = job.client.task.metric
            if metric == "accuracy" and "acc" not in self.accuracy.lower():
                job.say(f"its score is the metric {self.accuracy}, which results call accuracy")
            score = _Score({metric: Metric((accuracy,), (share,))}, loss)
        if when == job.side.traits.scored:
            self.metrics["evaluate"] = metrics
            self._report()
        return score

    def _report(self) -> None:
        evaluated = self.metrics["evaluate"]
        # Also if no evaluation says which names the evaluate function uses.
        taken = {self.accuracy, self.loss, "accuracy", self.job.client.task.metric, *evaluated}
        train = {f"train_{n}" if _ours(n) else n: value for n, value in self.metrics["train"].items()}
        renamed = {f"train_{name}": value for name, value in train.items() if name in taken}
        # The server needs both names of a metric, since `train_NAME` can be another metric of the user's.
        kept = {name: value for name, value in train.items() if name not in taken or name in evaluated}
        self.job.reply.further = renamed | kept
        self.job.reply.evaluated = {f"evaluate_{n}" if _ours(n) else n: value for n, value in evaluated.items()}

    def _ask(self, action: str, round: int) -> tuple[dict[str, Any], dict[str, float], str, Any]:
        """Call the app's `action`; return arrays, metrics, the weight metric's name, and ConfigRecords by name."""
        job = self.job
        client = job.client
        config = client.config
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
        split_seed = int(self.context.node_config.get("split-seed", config.seed))
        then = client.seed("dropout") if action == "train" else derive_seed(client.root, "evaluation", client.name)
        with splitting_alike(derive_seed(split_seed, "data", client.name), then):
            arrays, record, weight, records = ask_app(self.app, action, self.message, self.context, model, settings)
        metrics: dict[str, float] = {}
        if weight != COUNT and not job.policy.tells_metrics:
            raise Refused(
                "this node sends no metrics (allow in its node config), and so no weight but num-examples: leave out "
                f"weighted_by_key = {weight!r}, or let its owner allow metrics"
            )
        for name, value in record.items():
            entries = enumerate(value) if isinstance(value, list) else ()
            metrics |= {f"{name}.{place}": float(entry) for place, entry in entries} or {name: float(value)}
        if weight != COUNT and weight in metrics:
            metrics[weight] = job.policy.rounded(metrics[weight])
        left_out = [name for name, value in metrics.items() if not abs(value) <= LARGEST]
        if left_out:
            self.left_out |= {*left_out}
            limit = f"not a finite number up to {LARGEST:.0e}"
            job.say(f"{', '.join(left_out)} of its {action} function is {limit}, and is left out")
        return arrays, {name: value for name, value in metrics.items() if name not in left_out}, weight, records


def _task_of(name: str) -> Task:
    """Return a task with the metric that an evaluate function calls `name`; accuracy if fedhet has no such metric."""
    metric = re.sub("^(eval|evaluate|test|val|valid|validation)-", "", name.lower().replace("_", "-"))
    if direction(metric) < 0:
        raise ConfigError(
            f"accuracy = {name!r}: the score is a metric of which higher values are better, from 0 to 1: name another"
        )
    for kind in OUTPUTS.values():
        if metric in kind.metrics and kind.metrics[metric].limits == (0.0, 1.0):
            return Task(kind.name).measuring(metric, ())
    return Task("classification")


def _count(action: str, metrics: dict[str, float]) -> float:
    if not (count := metrics.get(COUNT, 0)) > 0:
        limits = f"above 0 and at most {LARGEST:.0f}"
        raise ModelError(f"your {action} function must return the metric {COUNT!r}, its number of examples, {limits}")
    return count


def _ours(name: str) -> bool:
    return name == "train-loss" or name.startswith(("received-", "trained-"))
