"""Clients with estimators, such as scikit-learn's, in place of networks: checks, fits, and what is saved of them.

An estimator is fitted anew in each round. Of a fit, the client saves only which examples besides its own it was made
of. With these, an equal fit is made again: no file contains the estimator.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.client.client import Client
from fedhet.data import ClientData
from fedhet.errors import ConfigError, DataError, ModelError, Refused
from fedhet.methods import registry
from fedhet.methods.options import Config
from fedhet.models.estimators import Estimator
from fedhet.tasks import Task
from fedhet.training import Phase, Trained
from fedhet.utils.inputs import Inputs
from fedhet.utils.randomness import seeded

TASKS = ("", "classification", "binary", "regression")
"""Names of tasks for which estimators predict; empty for a task that is inferred."""

FIT = "estimator"
"""Prefix of the names in `client.memory` of the examples to which the estimator was fitted."""


def check_estimator(model: Estimator, client: str, config: Config) -> None:
    """Raise an error if a client's configuration cannot be honoured with an estimator."""
    if not registry.client_side(config.method_name).takes_estimators:
        raise ModelError(
            f"client {client}: {config.method_name} trains networks, but the model function returned the estimator "
            f"{model.title}: return a network, or choose local, fedmd or, for classes, feddf or a method with a "
            "classifier of its own"
        )
    if config.start_from:
        raise ConfigError(
            f"client {client}: start-from has no model of {model.title}, which no run saves: leave it out"
        )


def check_client(client: Client, *, placeholders: bool) -> None:
    """Raise an error if a client with an estimator has a loss of its own, or trains with noise or the user's loop."""
    assert client.estimator is not None
    title = client.estimator.title
    if client.privacy:
        raise Refused(f"this node trains with differential privacy (dp-noise), but {title} does not: return a network")
    if placeholders:
        raise ModelError("fedhet.wrap needs a network, not an estimator: use fedhet.make_client_app")
    if client.augment or not client.task.plain:
        what = "augmented examples" if client.augment else "class weights and a loss of your own"
        raise ConfigError(
            f"client {client.name}: {title} is fitted without {what}: leave them out, or return a network"
        )


def fit_to_data(model: Estimator, data: ClientData, task: Task) -> None:
    """Set what an estimator predicts: as many classes as a client's data and their names have, or numbers."""
    parts = [part for part in (data.train, data.test, data.validation, data.common, data.public) if part is not None]
    labels = [part.labels for part in parts if part.labels is not None and len(part.labels)]
    kinds = {(part.ndim, part.is_floating_point()) for part in labels}
    if isinstance(data.train.inputs[:1], Inputs):
        raise DataError(f"{model.title} takes one tensor of inputs for each example, not several: join their columns")
    if kinds not in ({(1, False)}, {(2, True)}) or task.name not in TASKS:
        raise DataError(
            f"{model.title} predicts one class or numbers for each example, not other labels: return a network"
        )
    numbers = data.train.labels.is_floating_point() or task.name == "regression"
    model.meaning = "numbers" if numbers else "classes"
    model.outputs = data.train.labels[:1].numel()
    if numbers:  # the prediction that needs no inputs
        model.start = data.train.labels.double().reshape(-1, model.outputs).nanmean(0).nan_to_num()
    else:
        classes = max(data.dataset.classes if data.dataset else data.classes, len(data.names.get("classes", ())))
        model.outputs = max(classes, 2, *(int(part.max()) + 1 for part in labels))
        if task.name == "binary":
            model.meaning, model.outputs = "logit", 2


def fit(client: Client, phases: Sequence[Phase]) -> str:
    """Fit the client's estimator to the examples of all training phases together, in place of training in them.

    Class scores, on which a phase trains without the task's loss, become probabilities; predicted numbers are labels.
    Return a remark if the estimator's own predictions are other ones than those that are scored, else "".
    """
    assert client.estimator is not None
    private = any(phase.examples is None for phase in phases)
    client.memory = {name: tensor for name, tensor in client.memory.items() if not name.startswith(FIT)}
    client.memory[FIT] = torch.tensor([int(private)], dtype=torch.uint8)
    for number, phase in enumerate(phases):
        if phase.examples is not None:
            inputs, targets = phase.examples.at(slice(None))
            client.memory[f"{FIT}/{number}/inputs"] = inputs
            client.memory[f"{FIT}/{number}/{'labels' if phase.task_weight else 'scores'}"] = targets
    fit_again(client)
    inputs, labels = _labelled(client)
    features = client.transform(inputs)
    client.trained = Trained(float(client.task.loss(client.model(features), labels)), epochs=1)
    if not client.estimator.undecided(features):
        return ""
    return (
        f"predict of {client.estimator.title} does not choose the most probable class for some training examples, as "
        "with a threshold of its own: metrics are those of the most probable class"
    )


def _labelled(client: Client) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of the client's training examples that have a label."""
    examples = client.data.train
    return examples.subset(examples.labelled).at(slice(None))


def fit_again(client: Client) -> None:
    """Fit the client's estimator as `client.memory` says, or forget its fit if there has been none."""
    estimator = client.estimator
    assert estimator is not None
    if FIT not in client.memory:
        estimator.forget()
        return
    hard: list[tuple[Tensor, Tensor]] = [_labelled(client)] if int(client.memory[FIT]) else []
    soft: list[tuple[Tensor, Tensor]] = []
    for name, inputs in client.memory.items():
        place, _, kind = name.rpartition("/")
        if kind == "inputs" and f"{place}/labels" in client.memory:
            hard.append((inputs, client.memory[f"{place}/labels"]))
        elif kind == "inputs" and estimator.meaning == "numbers":
            hard.append((inputs, client.memory[f"{place}/scores"]))
        elif kind == "inputs":
            soft.append((inputs, client.memory[f"{place}/scores"].float().softmax(1)))
    inputs, labels = (torch.cat(parts) for parts in zip(*hard, strict=True))
    pairs = [torch.cat(parts) for parts in zip(*soft, strict=True)]
    taught = (client.transform(pairs[0]), pairs[1]) if pairs else None
    with seeded(client.root, FIT, client.name):
        estimator.fit(client.transform(inputs), labels, taught, threads=client.config.threads_per_client)
