"""BatchNorm's statistics, taken anew: averaged weights give other activations than those that they were taken of."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.data.reading import LazyInputs
from fedhet.learning.batching import Forward
from fedhet.learning.evaluation import BATCH


def reestimate(
    model: nn.Module,
    inputs: Tensor | LazyInputs,
    transform: Callable[[Tensor], Tensor],
    chosen: Callable[[str], bool] = lambda name: True,
) -> None:
    """Take BatchNorm's statistics anew, as the mean over batches of examples.

    A unit that does not vary here (one that a client never had, whose inputs are still zeros) counts as of variance 1.

    Args:
        model: left in evaluation mode, if it has such layers.
        inputs: (n, ...) raw examples; with fewer than two nothing is done.
        transform: from raw inputs to the model's.
        chosen: the layers whose statistics are taken, by the names of their weights.
    """
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats and chosen(f"{name}.weight")
    ]
    if not layers or len(inputs) < 2:
        return
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    batches = 0
    try:
        for batch in inputs.split(BATCH):
            if len(batch) < 2:
                continue
            batches += 1
            for layer in layers:
                layer.momentum = 1 / batches  # the mean over all batches
            Forward(model, transform(batch), learns=False, updates=True).run()
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.eval()
            layer.momentum = momentum
    for layer in layers:
        variance = layer.running_var
        assert variance is not None
        variance[variance == 0] = 1
