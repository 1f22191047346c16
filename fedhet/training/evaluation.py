"""Forward passes, evaluation of metrics, and re-estimation of BatchNorm's statistics."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedhet.data import Examples
from fedhet.data.reading import LazyInputs, spans
from fedhet.errors import ModelError
from fedhet.models.copies import in_evaluation_mode, kinds_of
from fedhet.models.representation import Capturing, RandomStream, Representation, isolated
from fedhet.tasks import Score, Task
from fedhet.utils.randomness import seed_everything, seeded

Transform = Callable[[Tensor], Tensor]
BATCH = 1024
"""Maximum number of examples in a batch of an evaluation."""

FEW = 64  # maximum number of examples for which an evaluation uses `BATCH` without an estimate of memory
MEMORY = 2**29  # maximum memory of a batch's activations in an evaluation, in bytes, as `rows_at_once` estimates it
_measured: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def forward(
    model: nn.Module,
    inputs: Tensor,
    captures: Mapping[str, Capturing] | None = None,
    *,
    until: Representation | None = None,
    learns: bool = True,
    stream: RandomStream | None = None,
    bf16: bool = False,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Pass a batch through a network in its current mode; return the outputs and the captured values by name.

    Args:
        model: the network.
        inputs: (n, ...) transformed examples.
        captures: by name, values to capture inside the network, such as the output of a layer.
        until: if given, stop at the head and return this representation (n, d) instead of outputs.
        learns: whether to build an autograd graph.
        stream: if given, dropout draws from this random stream, and the pass leaves the network's buffers unchanged.
        bf16: whether to compute in bfloat16 where `torch.autocast` does so; results are float32.

    Raises:
        ModelError: BatchNorm would have to normalise a single example by its own statistics.
    """
    try:
        with ExitStack() as stack:
            if stream:
                stack.enter_context(isolated(model, stream))
            if not learns:
                stack.enter_context(torch.no_grad())
            if bf16:
                stack.enter_context(torch.autocast(inputs.device.type, torch.bfloat16))
            sites = {name: stack.enter_context(site.capture()) for name, site in (captures or {}).items()}
            outputs = (until or model)(inputs)
    except ValueError as error:
        if len(inputs) > 1 or not uses_batch_statistics(model):
            raise
        raise ModelError(
            "BatchNorm cannot normalise one example by its own statistics: set batch-size to at least 2 and give each "
            "client at least 2 examples for training and for testing, or replace BatchNorm by GroupNorm"
        ) from error
    captured = {name: site() for name, site in sites.items()}
    if not bf16:
        return outputs, captured
    return outputs.float(), {name: value.float() for name, value in captured.items()}


def uses_batch_statistics(model: nn.Module) -> bool:
    """Return whether a network has a BatchNorm layer that, in its current mode, uses the statistics of a batch."""
    layers = (layer for layer in model.modules() if isinstance(layer, _BatchNorm))
    return any(layer.training or layer.running_mean is None for layer in layers)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """An evaluation of a client's network, which a backend computes.

    Attributes:
        predict: the network, or a function from transformed inputs to outputs.
        examples: the examples to evaluate.
        task: the task, which defines metric and loss.
        transform: function from raw inputs to the network's inputs.
        model: the network that the function `predict` calls; its memory determines the batch size. It is left in
            evaluation mode, as is `predict` itself if it is a network.
        seed: seed of torch's global generator; None if evaluation draws no random numbers.
        name: the name of the evaluation, such as `received`.
    """

    predict: Transform
    examples: Examples
    task: Task
    transform: Transform
    model: nn.Module | None = None
    seed: int | None = None
    name: str = ""

    def result(self) -> Score | None:
        """Evaluate, and return the score; None if there are no examples."""
        if self.seed is not None:
            seed_everything(self.seed)
        total = None
        predict = self.predict
        network = predict if isinstance(predict, nn.Module) else self.model
        if network is not None:
            network.eval()
        for raw, labels in self.examples.batches(rows_at_once(network, self.examples.inputs, self.transform)):
            inputs = self.transform(raw)
            outputs = forward(predict, inputs, learns=False)[0] if isinstance(predict, nn.Module) else predict(inputs)
            score = self.task.evaluate(outputs.detach(), labels)
            total = score if total is None else total + score
        return total


def read(
    model: nn.Module,
    inputs: Tensor | LazyInputs,
    transform: Transform,
    *,
    until: Representation | None = None,
    rows: int = BATCH,
) -> Tensor:
    """Return a model's outputs (n, ...), or the representation `until` (n, d), in batches of at most `rows` inputs.

    `inputs` (n, ...) are raw, and `transform` maps them to the model's inputs. The model is left in evaluation mode.
    """
    model.eval()
    rows = min(rows, rows_at_once(model, inputs, transform))
    values = []
    for span in spans(len(inputs), rows):
        values.append(forward(model, transform(inputs[span]), until=until, learns=False)[0])
    return torch.cat(values)


def rows_at_once(model: object, inputs: Tensor | LazyInputs, transform: Transform) -> int:
    """Return the batch size for an evaluation: `BATCH`, or less if activations would need more than `MEMORY` bytes.

    The estimate of memory is three times the largest output of a module in a forward pass of two examples of `inputs`,
    to which `transform` is applied. If `model` is not a network, the result is `BATCH`.
    """
    if not isinstance(model, nn.Module) or len(inputs) <= FEW:
        return BATCH
    if model in _measured:
        return min(BATCH, _measured[model])
    sizes = [1]

    def measure(_module: nn.Module, _args: object, value: object) -> None:
        for each in value if isinstance(value, tuple | list) else (value,):
            sizes.append(each.nbytes if isinstance(each, Tensor) else 0)

    with ExitStack() as hooks, seeded(0, "memory"):  # transforms may draw random numbers
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(measure))
        forward(model, transform(inputs[:2]), learns=False, stream=RandomStream(0))
    _measured[model] = max(2, 2 * MEMORY // (3 * max(sizes)))
    return min(BATCH, _measured[model])


def multiply_adds(model: nn.Module, inputs: Tensor) -> float:
    """Return about how many multiply-adds a forward pass of transformed `inputs` (n, ...) needs for one example.

    Counted are products of outputs with the matrices and kernels of the module that computes them.
    """
    work: list[float] = []

    def count(module: nn.Module, _args: object, outputs: object) -> None:
        values = outputs[0] if isinstance(outputs, tuple) else outputs
        if isinstance(values, Tensor) and not isinstance(module, nn.Embedding):
            matrices = [array for array in module._parameters.values() if array is not None and array.ndim > 1]
            work.extend(values.numel() / len(array) * array.numel() for array in matrices)

    with ExitStack() as hooks, in_evaluation_mode(model), seeded(0, "work"):
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(count))
        forward(model, inputs, learns=False, stream=RandomStream(0))
    return sum(work) / len(inputs)


def reestimate(
    model: nn.Module,
    inputs: Tensor | LazyInputs,
    transform: Transform,
    chosen: Callable[[str], bool] = lambda name: True,
) -> None:
    """Re-estimate running statistics of BatchNorm and InstanceNorm as means over batches, weighted by batch size.

    After weights are averaged over clients, activations no longer match the clients' running statistics. A unit whose
    activation is constant gets variance 1.

    Args:
        model: the network; it is left in evaluation mode if it has such layers.
        inputs: (n, ...) raw examples; with fewer than two examples nothing changes.
        transform: function from raw inputs to the model's inputs.
        chosen: function that returns whether to re-estimate the layer whose running mean has the given name.
    """
    kinds = kinds_of(model)
    layers: list[_NormBase] = []
    for prefix, module in model.named_modules():
        name = f"{prefix}.running_mean".removeprefix(".")
        if isinstance(module, _NormBase) and kinds.get(name) == "statistic" and chosen(name):
            layers.append(module)
    if not layers or len(inputs) < 2:
        return
    momenta = [layer.momentum for layer in layers]
    model.eval()
    size = max(2, rows_at_once(model, inputs, transform))
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    try:
        seen = 0
        for span in spans(len(inputs), size):
            batch = transform(inputs[span])
            seen += len(batch)
            for layer in layers:
                layer.momentum = len(batch) / seen  # the mean over all examples
            forward(model, batch, learns=False)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.eval()
            layer.momentum = momentum
    for layer in layers:
        assert layer.running_var is not None
        layer.running_var[layer.running_var == 0] = 1
