"""Checks of a client's network and data before training, with error messages that name the cause."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedhet.client.client import Client
from fedhet.client.job import Job
from fedhet.config import user_functions
from fedhet.config.client_setup import ModelFunction
from fedhet.data import ClientData, Examples
from fedhet.data.examples import digest
from fedhet.data.own import check_scale
from fedhet.data.reading import LazyInputs, not_finite
from fedhet.errors import DataError, FedhetError, ModelError, Refused
from fedhet.messages import WireError
from fedhet.messages.protocol import HANDSHAKE
from fedhet.models.copies import unsaved_state
from fedhet.models.representation import Captured, Representation
from fedhet.tasks import Task
from fedhet.training.evaluation import forward
from fedhet.utils.inputs import Inputs, parts_of
from fedhet.utils.randomness import seeded

ROWS = 4
"""Number of first examples of each part whose inputs must not change within a run."""

PARTS = {
    "train": "training examples",
    "test": "test examples",
    "validation": "validation examples",
    "common": "common test set",
}


class ModelCheck(NamedTuple):
    """The result of checking a client's network on its data.

    `outputs` is the number of values in a prediction (2 for a single logit), `note` a warning about the network for the
    log, and `tokens` the number of tokens in an example if each has a prediction, otherwise 1.
    """

    task: Task
    outputs: int
    note: str = ""
    tokens: int = 1


# ---- can the network be used with the data?


@torch.no_grad()
def check_model(
    representation: Representation,
    data: ClientData,
    transform: Callable[[Tensor], Tensor],
    task: Task,
    function: ModelFunction | None,
    *,
    guessed: bool,
    again: Callable[[], nn.Module] | None = None,
) -> ModelCheck:
    """Check a client's network on some of the client's examples; leaves the network in evaluation mode.

    A task without a name is inferred from outputs and labels. `function` is the user's function that returned the
    network, and `guessed` says that neither the user nor the method named the head. `again` builds the network with
    other random numbers, to detect state outside of the state dict; None skips this check.

    Raises a `ModelError` if the network cannot process the inputs, or does not return a row of finite numbers for each
    example, and a `DataError` if outputs or labels do not fit the task, or training and test inputs differ in scale.
    """
    model, origin = representation.model.eval(), user_functions.origin(function)
    name, parts = model._get_name(), {name: getattr(data, name) for name in PARTS if getattr(data, name)}
    check_scale(raw := {part: examples.inputs[:8] for part, examples in parts.items()})
    inputs = transform(raw["train"])
    with representation.head_output() as captured:
        outputs = _outputs(representation, inputs, "inputs", function, inputs)
    for part in [part for part in raw if part != "train"]:
        _outputs(representation, transform(raw[part]), f"{part} inputs", function, inputs)
    if outputs.ndim < 1 or len(outputs) != len(inputs):
        shape = f"outputs of shape {tuple(outputs.shape)}" if outputs.ndim else "a single number"
        raise ModelError(
            f"the client's {name} returned {shape} for {len(inputs)} examples, but must return one row for each "
            f"example{origin}"
        )
    if function is not None and (found := not_finite(outputs)) is not None:
        raise ModelError(
            f"the client's {name} returned {found[1]} for row {found[0]} of its training inputs before any training, "
            f"although the inputs are finite: check its layers and initial weights{origin}"
        )
    asked, task = task, task.of(outputs, data.train.labels)
    for part, examples in parts.items():
        if problem := task.problem(outputs, task.outputs.labels(examples.labels)):
            raise DataError(problem if part == "train" else f"{part}: {problem}")
    task.check_loss(outputs, task.outputs.labels(data.train.labels[: len(outputs)]))
    one_logit = task.name == "binary" or (task.name == "segmentation" and outputs.shape[1] == 1)
    if one_logit and _from_sigmoid(model, inputs):
        raise ModelError(
            f"the client's {name} returns probabilities, but the metric of {task.name} reads logits, which are above 0 "
            f"for class 1: remove the final sigmoid, and use BCEWithLogitsLoss in place of BCELoss{origin}"
        )
    note = _note(representation, captured if guessed else None, outputs, task, origin)
    if not note and task is not asked and task.name == "multi-label" and bool((data.train.labels.sum(1) == 1).all()):
        note = (
            "each of the client's examples has exactly one of several labels: if these are classes, give their numbers "
            "as labels, labels.argmax(1)"
        )
    unsaved = "" if function is None or again is None else unsaved_state(model, inputs[:2], again)
    scores = task.outputs.scores(outputs)
    tokens = scores.shape[1] if task.outputs.places == "tokens" and scores.ndim == 3 else 1
    return ModelCheck(task, scores.shape[-1], "; ".join(filter(None, (note, unsaved))), tokens)


def _outputs(
    representation: Representation, inputs: Tensor, words: str, function: ModelFunction | None, like: Tensor
) -> Tensor:
    """Return a network's outputs for `inputs`; raise a `ModelError` if it cannot process them.

    The message describes the inputs by `words`, and names the shape of the training inputs `like` if it differs.
    """
    model = representation.model
    try:
        return forward(model, inputs, learns=False)[0]
    except FedhetError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's network raises, it cannot take these inputs
        described = f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}"
        reason = _remedy(model, inputs) or f"{type(error).__name__}: {error}"
        if like.shape[1:] != inputs.shape[1:]:
            reason = f"training inputs have shape {tuple(like.shape)}"
        if function is None:
            reason = "the configured architectures fit only the configured data set: pass a network of your own (model)"
        origin = user_functions.origin(function)
        raise ModelError(
            f"the client's {model._get_name()} cannot take its {words}, {described}: {reason}{origin}"
        ) from error


def _note(representation: Representation, head: Captured | None, outputs: Tensor, task: Task, origin: str) -> str:
    """Return a warning if the head or the outputs of a network seem wrong for its task, or an empty string."""
    model = representation.model
    if head is not None and not _makes(head, outputs):
        kind = "nn.Linear" if isinstance(model.get_submodule(representation.head), nn.Linear) else "convolution"
        return (
            f"the head was guessed to be {representation.head!r}, the last {kind}, but the client's network has other "
            "outputs than this layer: name the right layer, head = '...'"
        )
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if head is not None and linear[-2:-1] and linear[-1] == representation.head:
        before, last = model.get_submodule(linear[-2]), model.get_submodule(linear[-1])
        if before.out_features == last.in_features == last.out_features:
            return (
                f"the head was guessed to be {linear[-1]!r}, the last nn.Linear, whose inputs may be scores: if "
                f"{linear[-2]!r} is the classifier, set head = {linear[-2]!r}"
            )
    if _probabilities(model, task, outputs):
        return (
            f"the client's {model._get_name()} returns probabilities, but the loss of {task.name} expects logits: "
            f"remove the final softmax or sigmoid, with which the network learns more slowly{origin}"
        )
    return ""


def _remedy(model: nn.Module, inputs: Tensor) -> str:
    """Return advice on the axes of images if they do not fit the network's first convolution, or an empty string."""
    first = next((each for each in model.modules() if isinstance(each, nn.Conv2d)), None)
    if first is None or inputs.ndim not in (3, 4):
        return ""
    if inputs.ndim == 4 and inputs.shape[1] != first.in_channels == inputs.shape[3]:
        return "their channels come last: give images as (n, channels, height, width), inputs.permute(0, 3, 1, 2)"
    if inputs.ndim == 3 and first.in_channels == 1:
        return "they have no axis of channels: give images as (n, 1, height, width), inputs.unsqueeze(1)"
    return ""


def _probabilities(model: nn.Module, task: Task, outputs: Tensor) -> bool:
    """Return whether a network seems to return probabilities although the task's loss expects logits."""
    if task.own_loss is not None or task.outputs.meaning == "numbers":
        return False
    if task.name == "multi-label":
        return isinstance([*model.modules()][-1], nn.Sigmoid)
    scores = task.outputs.scores(outputs)
    sums = scores.sum(-1)
    return bool((scores >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-2)


def _from_sigmoid(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether a network's outputs come from a sigmoid, possibly reshaped or cast."""
    with torch.enable_grad():
        node: Any = forward(model, inputs[:2])[0].grad_fn
    moving = ("View", "Squeeze", "Unsqueeze", "Select", "Slice", "Permute", "Transpose", "Clone", "ToCopy", "Clamp")
    while type(node).__name__.startswith(moving):
        node = node.next_functions[0][0]
    return type(node).__name__.startswith("Sigmoid")


def _makes(head: Captured, outputs: Tensor) -> bool:
    """Return whether a network's outputs seem to be its head's, judged by their shape and the ranking of classes."""
    try:
        scores = head()
    except ModelError:  # it did not run
        return False
    if scores.ndim > outputs.ndim == 2 and scores.shape[-1] != outputs.shape[-1]:  # a convolution, pooled afterwards
        return scores.shape[:2] == outputs.shape
    if scores.ndim == outputs.ndim + 1 == 3:  # for each token, of which the network uses one
        return bool(torch.isclose(scores, outputs[:, None]).all(-1).any(1).all())
    if scores.shape != outputs.shape:
        return scores.numel() == outputs.numel()
    return bool((scores.argsort(-1) == outputs.argsort(-1)).all())


def check_public_dataset(client: Client, *, labelled: bool) -> None:
    """Raise an error if the client's network cannot process the public dataset or, if `labelled`, learn its labels."""
    public, example = client.public, client.data.train.inputs[:1]
    expected, shape = example.shape, public.inputs.shape
    if parts_of(example).keys() != parts_of(public.inputs).keys():
        raise WireError(
            f"the server's public dataset has {', '.join(parts_of(public.inputs))}, but this client's examples "
            f"have {', '.join(parts_of(example))}: choose a public dataset with the same inputs"
        )
    padded = isinstance(example, Inputs)  # to the longest text
    if len(shape) != len(expected) or (len(expected) != 3 and shape[1] != expected[1] and not padded):
        raise WireError(
            f"the server's public dataset has examples of shape {list(shape[1:])}, but this client's examples "
            f"have shape {list(expected[1:])}: choose a public dataset with inputs of this shape"
        )
    labels = public.labels if labelled else None
    if labels is not None and (problem := client.task.problem(client.read(public.inputs[:2]), labels)):
        raise DataError(f"the client cannot learn from the public dataset: {problem}")


# ---- are task, network and data those with which the run began?


def check_unchanged(job: Job) -> None:
    """Raise `Refused` if the client's task, network or examples changed since the run's first handshake.

    That handshake saves their digests (hashes) in the client's files; they are never sent. After the handshake, only
    examples are checked, which another process may have split differently.
    """
    store, request = job.client.store, job.client.request
    begins = request.question == HANDSHAKE and not request.begun
    then = {} if begins else store.beginning()
    with seeded(job.client.config.seed, "beginning", job.client.name):
        now = _digests_of_examples(job)
        if request.question == HANDSHAKE:
            now |= _digests(job)
        else:
            then = {name: value for name, value in then.items() if name in PARTS.values()}
    if begins or not then:
        store.note_beginning(now)
    elif changed := [name for name in then | now if then.get(name, now.get(name)) != now.get(name)]:
        remedy = "restore the same task, model and data, or start another run"
        if request.question != HANDSHAKE:
            remedy = "draw from the global generators of torch, NumPy and Python, which are seeded for each client"
        raise Refused(f"the client's {', '.join(changed)} changed since this run began: {remedy}")


def _digests_of_examples(job: Job) -> dict[str, str]:
    client, found = job.client, dict[str, str]()
    for name, words in PARTS.items():
        part: Examples | None = getattr(client.data, name)
        if part is not None:
            rows: list[Tensor] = []
            if len(part) and job.loop is None:  # a user's own loop reads its examples itself
                rows = [part.inputs[:ROWS]]
                if isinstance(part.inputs, LazyInputs) and not torch.equal(rows[0], part.inputs[:ROWS]):
                    rows = _seeded(job, f"reading its {words}", partial(part.inputs.__getitem__, slice(ROWS)))
            found[words] = digest(len(part), part.labels, *rows)
    return found


def _digests(job: Job) -> dict[str, str]:
    """Return the digests (hashes) of task, network structure, public dataset, augmentation and settings, by name."""
    client, found = job.client, dict[str, str]()
    config, augmented = client.config, list[Tensor]()
    if (augment := client.augment) and client.own_data and len(client.data.train) and job.loop is None:
        batch = client.data.train.inputs[:ROWS]
        augmented = _seeded(job, "its augment function", lambda: augment(batch, torch.Generator().manual_seed(0)))
    if (public := client.data.public) is not None and job.side.traits.public != "none":
        found["public dataset"] = public.digest
    found["augmentation"] = digest(client.own_data and augment is not None, *augmented)
    found["settings"] = digest(config.local_epochs, config.learning_rate, config.batch_size, client.data.batch_size)
    structure = _structure(client.model, sized=client.part is not None)
    return {"task": digest(_task(job)), "network": digest(structure, client.config.head), **found}


def _seeded(job: Job, doing: str, read: Callable[[], Tensor]) -> list[Tensor]:
    """Call the user's function `read` with seeded random generators, and return a list with its tensor.

    If a second call returns another tensor, the list is empty, and a remark about `doing` is sent to the server's log.
    """
    values = []
    for _ in range(2):
        with seeded(0, "repeats"):
            values.append(read())
    if torch.equal(*values):
        return values[:1]
    job.say(
        f"{doing} gives other values each time, although torch, NumPy and Python are seeded: it has a state or a "
        "generator of its own, so results depend on the number of workers; draw from the global generators instead"
    )
    return []


def _task(job: Job) -> str:
    """Describe the task as text; a user's own loss is described by its value for arbitrary outputs and labels."""
    client, text = job.client, str(job.client.task)
    if client.task.own_loss is None:
        return text
    outputs, labels = client.read(client.data.train.inputs[:ROWS]), client.data.train.labels[:ROWS]
    classes = client.task.outputs.scores(outputs).shape[-1] if client.task.outputs.meaning == "classes" else 2
    arbitrary = torch.rand(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
    arbitrary_labels = (torch.arange(labels.numel()) % classes).reshape(labels.shape).to(labels)
    with suppress(Exception):  # a loss may take no such outputs
        text += f" {client.task.evaluate(arbitrary, arbitrary_labels).loss:.4g}"
    return text


def _structure(model: nn.Module, *, sized: bool) -> str:
    lines = [f"{name} {type(m).__name__} {'' if sized else m.extra_repr()}" for name, m in model.named_modules()]
    arrays = {} if sized else model.state_dict(keep_vars=True)
    lines += [f"{name} {each.dtype} {list(each.shape)} {each.requires_grad}" for name, each in arrays.items()]
    return "\n".join(lines)
