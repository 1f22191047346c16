"""Checks of a client's network and data before training, with error messages that name the cause."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedhet.client.client import AnySide
from fedhet.client.job import Job
from fedhet.data import ClientData, Examples, PublicDataset
from fedhet.data.names import CLASSES, shown
from fedhet.data.reading import LazyInputs, single
from fedhet.data.scales import LARGEST_RATIO, check_scales, scales_of
from fedhet.errors import DataError, FedhetError, ModelError
from fedhet.messages import WireError
from fedhet.models.copies import copied, entries
from fedhet.models.registry import before_calibration
from fedhet.models.representation import Captured, Representation, by_name, precision
from fedhet.setup import user_functions
from fedhet.setup.client_setup import ModelFunction
from fedhet.tasks import Task
from fedhet.tasks.outputs import zeros_and_ones
from fedhet.training.evaluation import forward
from fedhet.utils.inputs import Inputs, as_bytes, for_each, parts_of
from fedhet.utils.randomness import seeded, torch_generator

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module, such as its buffers

PARTS = {
    "train": "training examples",
    "test": "test examples",
    "validation": "validation examples",
    "common": "common test set",
}


class ModelCheck(NamedTuple):
    """The result of a check: a network's task, number of values in a prediction (2 for one logit), and a warning."""

    task: Task
    outputs: int
    note: str = ""


@torch.no_grad()
def check_model(
    representation: Representation,
    data: ClientData,
    transform: Callable[[Tensor], Tensor],
    task: Task,
    function: ModelFunction | None,
    *,
    guessed: bool,
) -> ModelCheck:
    """Check a client's network on some of the client's examples; return the task, the number of outputs and a warning.

    `representation` has the network, which is left in evaluation mode; `transform` maps raw inputs to its inputs. A
    `task` without a name is inferred from outputs and labels. `function` is the user's function that returned the
    network, and `guessed` says that the method uses a head that neither the user nor the method named.

    Raises a `ModelError` if the network cannot process the inputs, or does not return a row for each example, and a
    `DataError` if outputs or labels do not fit the task, or some parts are bytes and others floats beyond [0, 1].
    """
    model = representation.model.eval()
    origin = user_functions.origin(function)
    owner = f"the client's {model._get_name()}"
    parts = {name: part for name in PARTS if (part := getattr(data, name))}
    scales = {name: scales_of(part.inputs, data.names, task.targets(part.labels)) for name, part in parts.items()}
    unlike = check_scales({f"the {name}": values for name, values in scales.items()})
    first = {name: part.at(slice(8)) for name, part in parts.items()}
    labels = {name: _in_shape_of(first[name][1], part.labels) for name, part in parts.items()}
    rows = first.pop("train")[0]
    inputs = transform(rows)
    with representation.head_output() as head:
        outputs = outputs_of(model, inputs, "training inputs", function)
    if data.augment:
        augmented = data.augment(single(rows), torch_generator(0))
        outputs_of(model, transform(augmented), "augmented training inputs", function)
    returned = {"train": outputs}
    for part, (others, _) in first.items():
        returned[part] = outputs_of(model, transform(others), f"{part} inputs", function)
    if outputs.shape[:1] != (len(inputs),):
        raise ModelError(
            f"{owner} returned outputs of shape {tuple(outputs.shape)} for {len(inputs)} examples, but must return one "
            f"row for each example{origin}"
        )
    asked = task
    task = task.of(outputs, labels["train"])
    classes = data.names.get(CLASSES, ())
    for name in parts:
        if problem := task.problem(returned[name], task.outputs.labels(labels[name])):
            if classes:
                problem += f" (its classes, with or without examples, are {shown(classes)})"
            raise DataError(problem if name == "train" else f"{name}: {problem}")
    last = _last_function(model, inputs[:2])
    if last == "Sigmoid" and (task.name == "binary" or (task.name == "segmentation" and outputs.shape[1] == 1)):
        raise ModelError(
            f"{owner} returns probabilities, but the metric of {task.name} reads logits, which are above 0 for class "
            f"1: remove the final sigmoid, and use BCEWithLogitsLoss in place of BCELoss{origin}"
        )
    if function is not None and (problem := _unlike_in_training(model, inputs)):
        raise ModelError(f"{owner} returns {problem}{origin}")
    notes = [_note(representation, head if guessed else None, outputs, task, last), unlike]
    notes += _notes_on_data(data, rows, task, model, inferred=task is not asked)
    if function is not None and not _repeatable_outputs(model, inputs, outputs):
        notes.append(
            f"in evaluation mode, outputs of {owner} depend on chance or on the other examples of a batch, and so do "
            "its scores: use dropout in training only, as nn.Dropout or F.dropout(..., training=self.training)"
        )
    if function is not None and reads_padding(model, data.train, transform):
        notes.append(
            f"outputs of {owner} depend on the padding that the collate_fn adds to an example, so its scores "
            "depend on the other examples of a batch: mask the padding (by torch.nn.utils.rnn.pack_padded_sequence "
            "or an attention mask)"
        )
    if function is not None and unsaved_state(model, inputs[:2]):
        notes.append(
            f"{owner} keeps values from training that its state dict lacks, such as a counter: files and other "
            "processes lose them, so results depend on the number of workers; register them in __init__ as buffers, "
            "self.register_buffer('step', torch.zeros(()))"
        )
    notes.append(task.check_loss(outputs, task.outputs.labels(labels["train"])))
    return ModelCheck(task, task.outputs.scores(outputs).shape[-1], "; ".join(filter(None, notes)))


def _in_shape_of(first: Tensor, labels: Tensor) -> Tensor:
    """Return labels in the shape of their `first` ones, which a `collate_fn` may pad to another length."""
    if first.shape[1:] == labels.shape[1:] or first.ndim != labels.ndim:
        return labels
    values = labels.unique()
    missing = values[-1:].expand(-len(values) % first[0].numel())
    return torch.cat([first, torch.cat([values, missing]).view(-1, *first.shape[1:])])


def _notes_on_data(data: ClientData, rows: Tensor, task: Task, model: nn.Module, *, inferred: bool) -> Iterator[str]:
    """Yield what is unusual in a client's examples for task and network; `rows` are the first raw training inputs."""
    train = data.train
    if count := _repeated(train, data.test):
        yield (
            f"{count} of {len(data.test)} test examples have inputs and label of training examples: if they are the "
            "same examples, scores are too high"
        )
    if inferred and task.name == "multi-label" and bool((train.labels.sum(1) == 1).all()):
        yield (
            "each of the client's examples has exactly one of several labels: if these are classes, give their numbers "
            "as labels, labels.argmax(1)"
        )
    images = [part for part in parts_of(rows).values() if part.ndim == 4 and part.is_floating_point()]
    if any(LARGEST_RATIO < part.max() <= 255 for part in images):
        yield (
            "the client's images are floats up to 255, which are not scaled, as images of bytes are (to [0, 1]): "
            "convert them to torch.uint8, or divide all clients' images by 255"
        )
    if task.name == "survival" and zeros_and_ones(train.labels):
        yield (
            "all times of the client's labels are 0 or 1, as events are: the first column must have times, and the "
            "second one events"
        )
    if task.outputs.places == "tokens" and _counts_padding(train, task, model):
        yield "labels of padding count in loss and metrics: give padding the label -100, which is ignored"
    if task.name == "token-classification" and _labels_are_inputs(train):
        yield (
            "the client's labels are its inputs, token for token, which a network can copy: to predict the next token, "
            "give inputs[:, :-1] and labels[:, 1:]"
        )


def _counts_padding(examples: Examples, task: Task, model: nn.Module) -> bool:
    """Return whether labels of padding count, which a mask, an embedding or a `collate_fn` defines."""
    inputs, batch = examples.at(slice(8))
    parts = by_name((inputs,), {})
    mask = parts.get("attention_mask")
    padding = next((each.padding_idx for each in model.modules() if isinstance(each, nn.Embedding)), None)
    if mask is None and padding is not None:
        mask = parts.get("input_ids", next(iter(parts.values()))) != padding
    if mask is not None and mask.shape == batch.shape:
        read = mask >= 0 if (mask < 0).any() else mask.bool()  # it may be added to scores
        counted = ~read & ~task.left_out(batch)
        if (counted[:, 1:] & counted[:, :-1]).any():  # a single one may be the token that ends a text
            return True
    pairs = ((labels, examples.at(slice(row, row + 1))[1]) for row, labels in enumerate(batch))
    return any((~task.left_out(padded)).sum() > (~task.left_out(own)).sum() for padded, own in pairs)


def _labels_are_inputs(examples: Examples) -> bool:
    """Return whether the labels of the first examples are their inputs, apart from tokens whose label is ignored."""
    inputs, labels = examples.at(slice(8))
    counted = labels >= 0
    alike = (part for part in parts_of(inputs).values() if part.shape == labels.shape)
    return bool(counted.any()) and any(torch.equal(part[counted], labels[counted]) for part in alike)


def _repeated(train: Examples, test: Examples) -> int:
    """Return the number of test examples in memory that are training examples, if they are more than half, or 0."""
    hashes: list[list[int]] = []
    kinds = {part.inputs.dtype for part in (train, test) if isinstance(part.inputs, Tensor)}
    for part in (train, test):
        if type(part.inputs) is not Tensor or not part.inputs.numel():
            return 0
        # Values of one part in float32 and of the other in float64 are compared in float32.
        rows = (part.inputs if len(kinds) == 1 else single(part.inputs)).reshape(len(part), -1)
        pairs = zip(as_bytes(rows).view(len(rows), -1).numpy(), part.labels.tolist(), strict=True)
        hashes.append([hash((row.tobytes(), str(label))) for row, label in pairs])
    known = {*hashes[0]}
    count = sum(row in known for row in hashes[1])
    return count if count > len(test) / 2 else 0


def _repeatable_outputs(model: nn.Module, inputs: Tensor, outputs: Tensor) -> bool:
    """Return whether a network gives the first of `inputs` the same `outputs` again, and without the others."""
    again = forward(model, inputs[:2].clone(), learns=False)[0]
    if again.shape[1:] != outputs.shape[1:]:  # of tokens, which may be padded on either side
        return True
    change = again - outputs[:2]
    return not bool((change.abs() > 1e-3 + 0.02 * outputs.abs().max()).any())  # more than bfloat16 rounds


def notes_on_use(side: AnySide) -> Iterator[str]:
    """Yield what a run leaves unused or unsaved, and whether a network that its method adds reads padding."""
    client = side.client
    data = client.data
    if (client.estimator or not side.trains_network) and (client.config.keep_best or client.config.save_every):
        yield "keep-best and save-every save no file of an estimator: fit it again to the client's examples"
    if client.own_data and data.validation and not client.config.validation:
        yield "its validation examples are unused: set validation to a fraction, which is not drawn then"
    # Exits of submodels differ between the modes.
    whole = client.described and client.least == 1 and not (side.parts or client.estimator or client.privacy)
    if whole and (layers := _untrained(client.model, client.transform(data.train.inputs[:2]))):
        yield (
            f"in training mode, outputs of the client's {client.model._get_name()} do not depend on {layers}, as they "
            "do in evaluation mode: these layers are not trained, so return the same outputs in both modes"
        )
    if side.network is not client.model and reads_padding(side.network, data.train, client.transform):
        yield (
            f"the network that {client.config.method_name} adds reads the padding of the collate_fn: return an "
            "attention_mask, or name the token that pads in the network's config (pad_token_id)"
        )


@torch.no_grad()
def reads_padding(model: nn.Module, examples: Examples, transform: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a network's outputs depend on the padding that a user's `collate_fn` adds in a batch.

    `transform` maps raw inputs to the network's inputs. The network is left in evaluation mode.
    """
    inputs = examples.inputs
    if not isinstance(inputs, LazyInputs) or inputs.collate is None:
        return False
    batch = inputs[:8]
    whole = parts_of(batch)
    for row in range(len(batch)):
        alone = inputs[row : row + 1]
        if any(part.shape[1:] != whole[name].shape[1:] for name, part in parts_of(alone).items()):
            outputs = forward(model.eval(), transform(batch), learns=False)[0]
            return not _repeatable_outputs(model, transform(alone), outputs[row : row + 1])
    return False


def _unlike_in_training(model: nn.Module, inputs: Tensor) -> str:
    """Return a message if a network returns other shapes for `inputs` in training mode, or an empty string."""
    network = copied(model)
    tensors = list[int]()  # numbers of tensors that the network returns, and shapes of its outputs
    shapes = list[list[int]]()

    def count(_module: nn.Module, _args: object, value: Any) -> None:
        leaves = tree_leaves(getattr(value, "__dict__", None) or value)
        tensors.append(sum(isinstance(leaf, Tensor) for leaf in leaves))

    network.register_forward_hook(count, prepend=True)  # before the hook that returns `logits`
    for mode in (True, False):
        with seeded(0, "training mode"):
            shapes.append([*forward(network.train(mode), inputs.clone(), learns=False)[0].shape])
    if tensors[0] > tensors[1]:
        return (
            "auxiliary outputs in training mode, which fedhet does not train: build the network without them, such as "
            "with aux_logits=False, or return one tensor from its forward"
        )
    if shapes[0] != shapes[1]:
        return f"shape {shapes[0]} in training mode, but {shapes[1]} in evaluation mode: return the same in both"
    return ""


def _untrained(model: nn.Module, inputs: Tensor) -> str:
    """Return the names of modules whose parameters change outputs in evaluation mode, but not in training mode."""
    network = copied(model)
    parameters = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}

    def reached(mode: bool, number: int) -> set[str]:
        with torch.enable_grad(), seeded(number, "training mode"):
            outputs = forward(network.train(mode), inputs.clone())[0]
            gradients = torch.autograd.grad(outputs.sum(), [*parameters.values()], allow_unused=True)
        return {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}

    with suppress(Exception):  # whatever a user's network raises, such as in a mode without gradients
        lacking = reached(False, 0)
        for number in range(32):  # layers that training leaves out at random are trained in other steps
            lacking = lacking and lacking - reached(True, number)
        return ", ".join(sorted({name.rpartition(".")[0] or name for name in lacking}))
    return ""


def unsaved_state(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether training on `inputs` (n, ...) changes values of a network that its state dict lacks."""
    used, fresh = copied(model).train(), copied(model).train()

    def outputs(network: nn.Module) -> Tensor:
        with seeded(0, "unsaved state"):
            return forward(network, inputs.clone(), learns=False)[0]

    with suppress(Exception):  # whatever a user's network raises; training itself will tell
        outputs(used)
        once = _numbers(used)
        outputs(used)
        if _numbers(used) != once or used.state_dict().keys() != fresh.state_dict().keys():
            return True
        fresh.load_state_dict(used.state_dict())
        return any(
            not torch.allclose(outputs(used.train(mode)), outputs(fresh.train(mode)), equal_nan=True)
            for mode in (True, False)
        )
    return False


def _numbers(model: nn.Module) -> str:
    """Return a text with the numbers in attributes of a network's modules, and in containers and objects in these."""
    held = [value for module in model.modules() for name, value in vars(module).items() if name not in _OF_TORCH]
    values = [each for value in held for each in entries(getattr(value, "__dict__", None) or value)]
    numbers = [
        each for each in values if isinstance(each, int | float) or (isinstance(each, Tensor) and each.numel() == 1)
    ]
    return str([float(each) for each in numbers])


def _note(representation: Representation, head: Captured | None, outputs: Tensor, task: Task, last: str) -> str:
    model = representation.model
    if head is not None and not _is_head_of(head, outputs):
        kind = "nn.Linear" if isinstance(model.get_submodule(representation.head), nn.Linear) else "convolution"
        return (
            f"the head was guessed to be {representation.head!r}, the last {kind}, but the client's network has other "
            "outputs than this layer: name the right layer, head = '...'"
        )
    if head is not None and (classifier := before_calibration(model, representation.head, outputs.shape[-1])):
        return (
            f"the head is taken to be {representation.head!r}, the last nn.Linear: if it only calibrates the scores "
            f"of {classifier!r}, set head = {classifier!r}"
        )
    if last in ("Sigmoid", "Softmax") and task.own_loss is None and task.outputs.meaning != "numbers":
        return (
            f"the client's {model._get_name()} returns probabilities, but the loss of {task.name} expects logits: "
            "remove the final softmax or sigmoid, with which the network learns more slowly"
        )
    return ""


def outputs_of(model: nn.Module, inputs: Tensor, words: str, function: ModelFunction | None) -> Tensor:
    """Return a network's outputs for `inputs`, which `words` name, in its current mode.

    Raises a `ModelError` that says what to do if the network cannot process them; `function` is the user's function
    that returned the network, or None for a configured architecture.
    """
    try:
        return forward(model, inputs, learns=False)[0]
    except FedhetError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's network raises, it cannot take these inputs
        described = f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}"
        reason = f"{type(error).__name__}: {error}"
        remedy = _remedy(model, inputs)
        if function is None and not remedy:
            reason, remedy = "the configured architectures fit only the configured data set", "pass your own `model`"
        raise ModelError(
            f"the client's {model._get_name()} cannot process {words}, {described}: {reason}; "
            f"{remedy or 'change the network or the data'}{user_functions.origin(function)}"
        ) from error


def _remedy(model: nn.Module, inputs: Tensor) -> str:
    """Return what changes `inputs` so that a network can process them, or an empty string."""
    if inputs.is_complex():
        return "give real numbers, such as inputs.abs()"
    dtype = precision(model)
    images = "give images as (n, channels, height, width), such as"
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "give it floats, such as inputs.float() or table.astype(float), in all parts of the data": (
            lambda part: part.to(dtype or part.dtype)
        ),
        f"the last axis looks like the channels: {images} inputs.permute(0, 3, 1, 2)": (
            lambda part: part.permute(0, 3, 1, 2)
        ),
        "two axes look swapped: give inputs.permute(0, 2, 1)": lambda part: part.permute(0, 2, 1),
        f"the axis of channels is missing: {images} inputs[:, None]": lambda part: part[:, None],
    }
    for remedy, change in changes.items():
        with suppress(Exception, SystemExit):  # whatever it raises for other inputs, too
            forward(model, for_each(inputs, change), learns=False)
            return remedy
    return ""


def _last_function(model: nn.Module, inputs: Tensor) -> str:
    """Return the name of a network's last function, such as `Softmax`, apart from reshaping and type conversions."""
    with torch.enable_grad():
        node: Any = forward(model, inputs)[0].grad_fn
    moving = ("View", "Squeeze", "Unsqueeze", "Select", "Slice", "Permute", "Transpose", "Clone", "ToCopy", "Clamp")
    while type(node).__name__.startswith(moving):
        node = node.next_functions[0][0]
    return type(node).__name__.partition("Backward")[0]


def _is_head_of(head: Captured, outputs: Tensor) -> bool:
    try:
        scores = head()
    except ModelError:  # it did not run
        return False
    if scores.shape == outputs.shape:
        return bool((scores.argsort(-1) == outputs.argsort(-1)).all())
    pooled = scores.ndim > outputs.ndim == 2 and outputs.shape in (scores.shape[:2], scores.shape[::2])
    return pooled or scores.numel() == outputs.numel()  # pooled over pixels, or one of several tokens


def check_public_dataset(job: Job, public: PublicDataset, *, labelled: bool) -> None:
    """Raise an error if the inputs or, with `labelled`, the labels of a public dataset do not fit a job's client."""
    client = job.client
    example = client.data.train.inputs[:1]
    expected = example.shape
    shape = public.inputs.shape
    alike = parts_of(example).keys() == parts_of(public.inputs).keys() and len(shape) == len(expected)
    own = client.data.train.inputs
    padded = isinstance(own, LazyInputs) and own.collate is not None and len(expected) == 2
    # Sequences, and texts padded to the longest one.
    free = len(expected) == 3 or isinstance(example, Inputs) or (padded and not example.is_floating_point())
    if not alike or (shape[1] != expected[1] and not free):
        raise WireError(
            f"the server's public dataset has {_shapes(public.inputs)}, but this client's examples have "
            f"{_shapes(example)}: choose one with the same inputs, or set dataset = own if the clients have it"
        )
    if client.privacy is None:  # a refusal would depend on examples without noise
        names = client.data.names
        scales = {"the train": scales_of(own, names), "the public": scales_of(public.inputs, names)}
        job.say(check_scales(scales))
    labels = public.labels if labelled else None
    if labels is not None and (problem := client.task.problem(client.read(public.inputs[:2]), labels)):
        raise DataError(f"the client cannot learn from the public dataset: {problem}")


def _shapes(inputs: Tensor) -> str:
    return ", ".join(f"{name} of shape {list(part.shape[1:])}" for name, part in parts_of(inputs).items())
