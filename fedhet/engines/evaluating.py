"""Evaluation of a run's saved models on test data, without training: a table of models by clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
from torch import nn

from fedhet.client.model_check import outputs_of
from fedhet.client.state import GLOBAL, load_model
from fedhet.config import configuration
from fedhet.config.toml import load
from fedhet.data import ClientData, Examples
from fedhet.data.examples import relabelled
from fedhet.data.names import CLASSES, Names, alike, plain, renumbering, shown
from fedhet.data.pooled import Pooled, as_pooled
from fedhet.data.scales import Scales, check_scales, scales_of
from fedhet.errors import ConfigError, DataError, FedhetError, check_kind, check_kinds
from fedhet.methods import registry
from fedhet.methods.options import Config, keys_about
from fedhet.models.representation import precision
from fedhet.results.history import names_of_model, read_history, read_run, run_of
from fedhet.results.report import Section, table, write_page
from fedhet.results.terminal import TerminalTable, format_value
from fedhet.server.app import scored
from fedhet.setup.client_setup import ClientInfo, transform_of
from fedhet.setup.user_functions import UserFunctions, as_called, data_of
from fedhet.tasks import Score, Task, as_task
from fedhet.utils.files import csv_lines, expanded, file_name, write_text
from fedhet.utils.machine import device_of
from fedhet.utils.process import alone, standard_settings
from fedhet.utils.statistics import Metric, in_order
from fedhet.utils.text import log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANGEABLE = {*keys_about("data", "node"), "metric", "metrics"}
"""Keys that an evaluation may change."""


@dataclass(frozen=True)
class Reported:
    """A score that a client reported to the server, which has neither its loss nor its number of predictions."""

    metrics: dict[str, Metric]
    loss: float | None = None
    count: int | None = None

    @property
    def value(self) -> float:
        """The metric as one number."""
        return next(iter(self.metrics.values())).value


@dataclass(frozen=True)
class ModelsByClients:
    """The result of `fedhet.evaluate`: the score of each saved model at each client that can hold it.

    Attributes:
        folder: the folder with `evaluation.csv`, `evaluation.png` and `evaluation.html`.
        scores: scores by model (`global` or a client's name) and client.
        refused: the reason why a model was not evaluated at a client, by model and client.
        warnings: what makes scores doubtful, such as inputs in other units than in the run.
    """

    folder: Path
    scores: dict[str, dict[str, Score | Reported]] = field(default_factory=dict, repr=False)
    refused: dict[tuple[str, str], str] = field(default_factory=dict, repr=False)
    warnings: list[str] = field(default_factory=list, repr=False)

    @property
    def metric(self) -> str:
        """The name of the metric that counts."""
        return next(metric for row in self.scores.values() for score in row.values() for metric in score.metrics)

    def value(self, model: str | int, client: str | int) -> float | None:
        """Return the metric of a model at a client; None if it was not evaluated."""
        score = self.scores.get(str(model), {}).get(str(client))
        return None if score is None else score.value

    @property
    def clients(self) -> list[str]:
        """The names of the clients, in order."""
        return in_order({client for row in self.scores.values() for client in row})

    @property
    def table(self) -> list[list[str]]:
        """The table as rows of text, headings first: a row for each model, a column for each client, and their mean."""
        lines = [["model", *self.clients, "weighted"]]
        for model, row in self.scores.items():
            total = Metric.total(score.metrics[self.metric] for score in row.values()).value
            values = [format_value(self.value(model, client)) for client in self.clients]
            lines.append([model, *values, format_value(total)])
        return lines

    def plot(self) -> "Figure":
        """Return a figure of the table as a matrix."""
        from fedhet.results.figures import matrix_figure

        values = [[self.value(model, client) for client in self.clients] for model in self.scores]
        return matrix_figure([*self.scores], self.clients, values, self.metric)

    def __str__(self) -> str:
        return f"{TerminalTable(self.table)}{self.folder}"

    def _repr_html_(self) -> str:
        return table(self.table)


@alone()
def evaluate(
    run: Any,
    config: Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    data: Any = None,
    task: str | Task | None = None,
    out: str | Path | None = None,
) -> ModelsByClients:
    """Evaluate the saved models of a run on test data, and write a table, a figure and a page.

        fedhet.evaluate("runs/try", model=my_model, data=new_data)

    Each personal model is evaluated at each client whose inputs and labels fit it, and the global model at all clients.

    Args:
        run: the run directory, the result of `fedhet.run`, or a folder of models in it, such as `models/best`.
        config: changes of settings about data and metrics, such as `data`, `clients`, `partition` or `metric`.
        model: the clients' networks as they were passed to the run.
        data: as for `fedhet.run`: a function that returns a client's data, of which `test` alone is enough, or the same
            examples as for the run, of which each client's test part is evaluated. `{"test": examples}` has new
            examples, all of which are evaluated: those of a `fedhet.by_column` at their client, others at each client.
            By default, the test examples of the configured data set.
        task: the task of `data`, as for `fedhet.run`; by default the run's.
        out: folder for `evaluation.csv`, `.png` and `.html`; by default `run`.

    Raises:
        ConfigError: the folder has no models, or an argument is missing or cannot be changed.
    """
    place = getattr(run, "folder", run)
    check_kind("run", place, (str, Path))
    check_kinds(config=(config, (Mapping,)), out=(out, (str, Path)))
    place = expanded(place)
    folder, complete = _configured(place, config or {})
    noted = load(folder / "config.toml").get("own", {})
    known = read_run(folder).summary.get("task")
    if data is not None and task is None and noted.get("task") in (None, known):
        task = known  # new labels alone, such as those of few examples, may fit another task
    given = {"model": model, "data": data, "task": task}
    if lacking := [f"{name}=..." for name in noted if name in given and given[name] is None]:
        raise ConfigError(f"the run in {folder} used arguments of your own: pass {', '.join(lacking)}, too, in Python")
    clients: Sequence[str] = ()
    if isinstance(data, Mapping) and data.keys() == {"test"}:
        pool = as_pooled(data["test"])
        pool.check_finite()
        clients = pool.clients
        data = partial(_tested, pool)
    functions = UserFunctions(model, _with_training_part(data) if callable(data) else data, task)
    clients = clients or functions.clients or [str(place) for place in range(complete.clients)]
    models = place / "models" if (place / "models").is_dir() else place
    result = ModelsByClients(expanded(out or place))
    with standard_settings():
        _fill(result, complete, models, functions, clients)
    if not result.scores:
        by_reason: dict[str, str] = {}
        for text in result.refused.values():
            by_reason.setdefault(text.partition(": ")[2], text)
        none = "there are no models, which a run saves at its end, or with save-every; of an estimator, it saves none"
        reasons = "\n".join(by_reason.values()) or none
        raise FedhetError(f"no model in {models} could be evaluated:\n{reasons}")
    _write(result)
    return result


def evaluation_only(run: str | Path, config: Mapping[str, Any]) -> Config:
    """Return the configuration of a run on any engine that evaluates the models of `run`, without training.

    At the nodes of a SuperLink, the global model is that of `run` on the server's machine; a node's own model is that
    in `start-from` of its node config. `config` has changes as for `evaluate`, and the engine.
    """
    place = expanded(run).resolve()
    changes = {"rounds": 0, "start-from": str(place), "closing-epochs": 0, "unseen-clients": 0}
    kept = {"keep-best": False, "patience": 0, "out": ""}
    engine = {"engine": config.get("engine", "local")}
    _, complete = _configured(place, {key: value for key, value in config.items() if key != "engine"})
    traits = registry.traits(complete)
    if traits.common_init and not traits.whole:
        changes["shared-init"] = False  # each client starts from its own model
    return configuration.changed(complete, {**changes, **kept, **engine}, "command")


def reported(folder: Path, config: Config) -> ModelsByClients | None:
    """Write, and return, the table of a run of `evaluation_only`; None if its results are on another machine."""
    if not (folder / "summary.json").is_file():
        return None
    result = ModelsByClients(folder)
    traits = registry.traits(config)
    common = traits.whole and traits.networks == "equal"  # else each client has a model or a part
    metric = read_run(folder).metric
    scores = read_history(folder)[-1]["scores"]
    for client, (values, weights) in scores.get("received", {}).items():
        score = Reported({metric: Metric(tuple(values), tuple(weights))})
        result.scores.setdefault(GLOBAL if common else client, {})[client] = score
    if not result.scores:
        return None
    _write(result)
    return result


def _configured(place: Path, changes: Mapping[str, Any]) -> tuple[Path, Config]:
    """Return the directory and the changed configuration of the run to which `place` belongs."""
    folder = run_of(place)
    if folder is None:
        raise ConfigError(f"{place} has no config.toml: give the directory of a run, or the result of fedhet.run")
    if refused := sorted(changes.keys() - CHANGEABLE):
        raise ConfigError(f"{', '.join(refused)} cannot be changed in an evaluation: leave it out")
    return folder, configuration.of_run(folder, ("model", "data", "task", "client_settings"), changes)


def _tested(pool: Pooled, client: ClientInfo) -> ClientData:
    """Return a client's new examples, all of which are tested."""
    examples = pool.train
    if pool.owners is not None:
        examples = examples.subset(np.flatnonzero(pool.owners == client.partition_id))
    return ClientData(examples, examples, names=pool.names)


def _with_training_part(data: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function so that test examples alone are enough."""

    @wraps(data)
    def parts(*args: Any, **kwargs: Any) -> Any:
        given = data(*args, **kwargs)
        return {"train": given["test"], **given} if isinstance(given, Mapping) and "test" in given else given

    return parts


def _fill(
    result: ModelsByClients, config: Config, models: Path, functions: UserFunctions, clients: Sequence[str]
) -> None:
    """Evaluate all models in the folder `models` at the `clients`, and add the results to `result`."""
    personal = [unquote(path.stem) for path in models.glob("*.safetensors") if path.stem != GLOBAL]
    run = read_run(run_of(models) or models)
    scales: dict[str, Scales] = run.summary.get("scales", {})
    whole = next(iter(scales.values()), {})
    traits = registry.traits(config)
    shared = (models / f"{GLOBAL}.safetensors").is_file()
    known = [*map(str, range(config.clients)), *(row.client for row in run.clients)]
    absent = dict.fromkeys(row.client for row in run.clients if row.client not in personal)
    if personal and absent and not shared:
        warning = f"no row for {', '.join(absent)}: there is no file of an estimator, or of a client without a round"
        log.warning("%s", warning)
        result.warnings.append(warning)

    @cache
    def network_of(owner: str) -> nn.Module:
        network = load_model(models, owner, model=functions.model, data=functions.data)
        return as_called(network) if functions.model else network  # it may take several inputs, or return `.logits`

    for place, client in enumerate(clients):
        info = ClientInfo(client, place, len(clients), config)
        data = data_of(functions.data_of, info)
        for name in [*in_order(personal), *[GLOBAL] * shared]:
            if name == GLOBAL and (client in personal or not traits.whole):
                of_client = "the client's own model is its part of it, or has statistics of its own"
                of_server = "it is a network of the server, which fedhet.load_model does not build"
                reason = of_client if traits.whole else of_server
                result.refused[name, client] = f"model {name} at client {client}: {reason}"
                continue
            # Others have that of a client without its own.
            owner = client if name == GLOBAL else name
            if name == GLOBAL and owner not in known and traits.networks == "equal":  # such as a new hospital's
                owner = next((other for other in known if other not in personal), owner)
            try:
                network = network_of(owner)
                names = names_of_model(models / f"{file_name(name)}.safetensors")
                test = _aligned(data, names)
                task = data.dataset.task if data.dataset else as_task(functions.task)
                if len(test):
                    inputs = transform_of(data.dataset, precision(network))(test.inputs[:2])
                    outputs_of(network.eval(), inputs, "test inputs", functions.model_of)
                ours = scales_of(test.inputs, names, task.targets(test.labels))
                both = {f"client {client}'s": ours, "the run's": scales.get(owner, whole)}
                lacking = [kind for kind in names if plain(data.names.get(kind, ())) and not plain(names[kind])]
                ask = f"client {client}: give names to the {{}}, or check that their order is {{}}"
                warnings = [ask.format(kind, shown(names[kind])) for kind in lacking]
                for warning in filter(None, [check_scales(both), *warnings]):
                    if warning not in result.warnings:
                        log.warning("%s", warning)
                        result.warnings.append(warning)
                score = scored(network, test, task, data.dataset, config, device_of(config.device))
            except Exception as error:  # whatever a network raises for inputs that do not fit it
                kind = "" if isinstance(error, FedhetError) else f"{type(error).__name__}: "
                result.refused[name, client] = f"model {name} at client {client}: {kind}{error}"
                continue
            if score is not None:
                result.scores.setdefault(name, {})[client] = score


def _aligned(data: ClientData, names: Names) -> Examples:
    """Return a client's test examples with columns and classes as in `names`; raise a DataError if they have others."""
    data = data.aligned(names)
    test = data.test
    for kind, ours in data.names.items():
        theirs = names.get(kind, ours)
        if alike(kind, ours, theirs):
            continue
        if kind != CLASSES or not {*ours} <= {*theirs}:
            differ = f"the data's {kind} are {shown(ours, theirs)}, but the network's are {shown(theirs, ours)}"
            raise DataError(f"{differ}: give the data the names that they had in the network's run")
        test = relabelled(test, renumbering(ours, theirs))
    return test


def _write(result: ModelsByClients) -> None:
    """Write the table as csv, figure and page, and a row for each model, client and metric."""
    from fedhet.results.figures import save_figure

    metrics = [*next(iter(next(iter(result.scores.values())).values())).metrics]
    rows = [
        [model, client, score.count, *(score.metrics[name].value for name in metrics), score.loss]
        for model, row in result.scores.items()
        for client, score in row.items()
    ]
    write_text(
        result.folder / "evaluation.csv", csv_lines([["model", "client", "predictions", *metrics, "loss"], *rows])
    )
    figure = result.plot()
    save_figure(figure, result.folder / "evaluation.png")
    notes = [f"{result.metric} of each saved model (row) on each client's test examples (column)."]
    notes += result.warnings
    refused = Section("Not evaluated", notes=[*result.refused.values()])
    sections = [Section("Models by clients", [result.table], notes, kind="numbers"), *[refused] * bool(result.refused)]
    write_page(result.folder / "evaluation.html", "Evaluation of saved models", sections, {"evaluation": figure})
