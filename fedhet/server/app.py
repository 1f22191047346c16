"""The server side of a run: on any Flower Grid, or as a Flower ServerApp."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedhet.config import configuration
from fedhet.config.validation import effective
from fedhet.data import PublicDataset
from fedhet.data.examples import DataSet, Examples, relabelled, resident
from fedhet.data.own import as_public_dataset
from fedhet.errors import DataError
from fedhet.flower import ArrayRecord, Context, Grid, MetricRecord, ServerApp
from fedhet.flower.insides import simulated
from fedhet.messages.protocol import names_in
from fedhet.methods import registry
from fedhet.methods.method import Method
from fedhet.methods.options import OWN, Config, listed
from fedhet.models.representation import precision
from fedhet.results.observers import Observer
from fedhet.results.recorder import recorded
from fedhet.results.terminal import ProgressLine
from fedhet.server import EvaluateFunction, FederatedStrategy
from fedhet.server.reporter import VALIDATION
from fedhet.server.run import run_folder
from fedhet.setup import client_setup
from fedhet.setup.user_functions import UserFunctions
from fedhet.tasks import Score, Task, as_task
from fedhet.training import Evaluation
from fedhet.utils import text
from fedhet.utils.files import expanded, private_files
from fedhet.utils.machine import device_of
from fedhet.utils.randomness import derive_seed, seeded


def serve(
    config: Config,
    grid: Grid,
    folder: Path,
    *,
    engine: str,
    resume: bool = False,
    public: PublicDataset | None = None,
    model: Any = None,
    functions: UserFunctions = UserFunctions(),  # noqa: B008 - it is frozen
    evaluate_fn: EvaluateFunction | None = None,
    observers: Sequence[Observer] = (),
) -> None:
    """Run the server side of a method, and write the results to a run directory.

    Args:
        config: complete configuration, which names the method.
        grid: connection to the clients.
        folder: the run directory.
        engine: where clients run, for the record: "local", "ray" or a SuperLink connection.
        resume: whether to continue the run in `folder`.
        public: the public dataset, if the method uses one.
        model: the clients' models, by default `functions.model`; needed if the server builds networks of users' models.
        functions: models, data and task that a user passes in Python, in place of the configured ones.
        evaluate_fn: function that evaluates the global model; the default uses the common test set (see `test-on`).
        observers: objects that are notified of every round.
    """
    make: type[FederatedStrategy[Any, Any]] = registry.strategy(config.method_name)
    here = engine == "local" or simulated(grid)
    about_data: dict[str, Any] = {"supplied": functions.words, "replacing": functions.supplied}
    with recorded(folder, config, engine, resume=resume, simulated=here, **about_data) as recording:
        strategy = make(config, public=public, model=model or functions.model, observers=[*recording, *observers])
        strategy.state = recording[0].resumed(strategy.state)
        if config.test_on != "local":
            device = device_of(config.device if here else "cpu")
            strategy.on_common_test = _on_common_test(strategy, functions, device)
        strategy.start(grid, evaluate_fn=evaluate_fn)


def make_server_app(
    *,
    model: Any = None,
    public: Any = None,
    evaluate_fn: EvaluateFunction | None = None,
    methods: Sequence[Method | type[Any]] = (),
) -> ServerApp:
    """Return a Flower ServerApp that runs the method which the run config names.

    Args:
        model: function from a `ClientInfo` to the client's `nn.Module`, as for `make_client_app`; needed if the
            server builds networks, and clients do not have the configured architectures.
        public: the public dataset, or a function from the configuration to it: raw inputs (n, ...) or a pair (inputs,
            labels). By default, it comes with the clients' data (`dataset = own`) or is held out of the configured data
            set (`public-samples`).
        evaluate_fn: function that evaluates the global model; the default uses the common test set (see `test-on`).
        methods: your own methods, or their strategies, to register; raises a ConfigError if one's name is installed.
    """
    for method in methods:
        registry.register(method)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = configuration.resolve(context.run_config, origin="command")
        engine = config.engine if "engine" in config.chosen else "flwr"
        effective(config.replace(engine=engine), registry.traits(config))  # refuses local keys
        dataset = None
        if public is not None:
            with seeded(config.seed, "public dataset"):
                dataset = as_public_dataset(public(config) if callable(public) else public)
        elif config.dataset != OWN and registry.traits(config).public != "none":
            dataset = client_setup.public_dataset(config)
        folder = out.resolve() if (out := expanded(config.out)).is_absolute() else run_folder(config, grid)
        with private_files(not simulated(grid)):
            serve(
                config,
                grid,
                folder,
                engine=engine,
                resume=config.resume,
                public=dataset,
                model=model,
                evaluate_fn=evaluate_fn,
                observers=[ProgressLine(text.console(force_terminal=False), folder)],
            )

    return app


def _on_common_test(
    strategy: FederatedStrategy[Any, Any], functions: UserFunctions, device: torch.device
) -> EvaluateFunction:
    """Return a function that evaluates the global model on the common test set, which `functions` may provide."""
    test_set = cache(lambda: functions.common_test_set(strategy.config, names_in(strategy.state.names)))

    def evaluate_globally(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        run, config = strategy.run, strategy.config
        if run.own_data and (run.traits.scored == "received" or not run.model):  # clients evaluate it, or nobody can
            return None
        dataset = None if run.own_data else client_setup.dataset_of(config)
        common, task = (dataset.test, dataset.task) if dataset else (test_set(), as_task(functions.task))
        network = None if common is None else strategy.global_model()
        if common is None or network is None:
            return None
        score = scored(network, common, task, dataset, config, device)
        if score is None:
            return None
        metrics = _numbers(score)
        held_out = None if run.own_data else client_setup.common_validation(config)
        if held_out and (validated := scored(network, held_out, task, dataset, config, device)):
            metrics |= {f"{VALIDATION}{name}": value for name, value in _numbers(validated).items()}
        return MetricRecord(metrics)

    return evaluate_globally


def scored(
    network: nn.Module, examples: Examples, task: Task, dataset: DataSet | None, config: Config, device: torch.device
) -> Score | None:
    """Return the score of a network on raw examples of a data set (None: the user's own); None without examples.

    Raises a DataError if they do not fit the task, which is inferred if it has no name.
    """
    if not len(examples):
        return None
    test = resident(examples, device)
    prepare = client_setup.transform_of(dataset, precision(network.to(device)))
    with torch.no_grad():
        outputs = network.eval()(prepare(test.inputs[:2]))
    task = task.of(outputs, test.labels).measuring(config.metric, listed(config.metrics))
    test = relabelled(test, task.outputs.labels)
    # The server's own network has scores of two classes for the one logit of a binary task.
    two = task.name == "binary" and outputs.shape[1:] == (2,)
    if problem := task.problem(outputs.diff(dim=1) if two else outputs, test.labels):
        raise DataError(problem)
    return Evaluation(network, test, task, prepare, seed=derive_seed(config.seed, "evaluation", "server")).result()


def _numbers(score: Score) -> dict[str, Any]:
    """Return the metric that counts by its name, the loss, and others as `further/NAME`; undefined ones are NaN."""
    further = {f"further/{name}": metric.value for name, metric in score.metrics.items() if name != score.task.metric}
    return {score.task.metric: score.value, "loss": score.loss, **further}


app = make_server_app()  # the ServerApp that `flwr run` starts
