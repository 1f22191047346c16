"""FedHARM's descriptors of images (Kastellos et al., 2024, equation 1).

The descriptor of image j consists of the k activations F_j^b of each block b with the largest |d p_c / d F_j^b|, where
c is the image's class and p_c its predicted probability. The activation with the m-th largest gradient is slot m. This
module differentiates the log-odds of c instead of p_c: the order is the same, and the gradients do not vanish once the
network fits the image.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.errors import ModelError
from fedhet.models.representation import Output
from fedhet.utils.inputs import for_each

BATCH = 64
"""Number of images in a forward pass."""


def log_odds(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the log-odds log(p_c / (1 - p_c)) (n,) from logits (n, C) and each image's class c (n,)."""
    chosen = logits.gather(1, classes[:, None])
    others = logits.scatter(1, classes[:, None], -torch.inf)
    return chosen[:, 0] - others.logsumexp(1)


def strongest(scores: Tensor, k: int) -> Tensor:
    """Return the indices (n, k) of the k largest scores in each row of non-negative scores (n, units).

    Among equal scores, which are common before global average pooling, the lower index comes first.
    """
    ordered = scores.float().view(torch.int32).long() << 32  # the bits of non-negative floats are ordered as they are
    return (ordered - torch.arange(scores.shape[1], device=scores.device)).topk(k, 1).indices


def describe(
    model: nn.Module,
    blocks: Sequence[str],
    inputs: Tensor,
    labels: Tensor | None,
    slots: Sequence[int],
    transform: Callable[[Tensor], Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return FedHARM's descriptors of images and the indices of their activations, both (n, k_b) for each block b.

    `blocks` names the last modules of blocks, from shallow to deep. `slots` has the numbers k_b of activations, at most
    the size of the block's output; indices are positions in the flattened output. `labels` (n,) are by default the
    predicted classes; `transform` converts raw images (n, ...) to the model's inputs. The model is left in evaluation
    mode. Raises a ModelError if the model does not return logits (n, C) for C >= 2 classes, or gradients are not
    finite.
    """
    captures = [Output(model, name) for name in blocks]
    values: list[list[Tensor]] = [[] for _ in blocks]
    places: list[list[Tensor]] = [[] for _ in blocks]
    model.eval()
    for start in range(0, len(inputs), BATCH):
        rows = slice(start, start + BATCH)
        batch = for_each(transform(inputs[rows]), _differentiable)
        with ExitStack() as stack, torch.enable_grad():
            captured = [stack.enter_context(each.capture()) for each in captures]
            logits = model(batch)
            if logits.ndim != 2 or logits.shape[1] < 2:
                got = tuple(logits.shape)
                raise ModelError(f"descriptors need outputs of shape ({len(batch)}, classes >= 2), got {got}")
            score = log_odds(logits, logits.argmax(1) if labels is None else labels[rows]).sum()
            outputs = [each() for each in captured]
        for block, gradient in enumerate(torch.autograd.grad(score, outputs)):
            scores = gradient.flatten(1).abs_()
            if not scores.isfinite().all():
                raise ModelError(
                    f"gradients of block {blocks[block]!r} are not finite: training diverged, lower the learning-rate"
                )
            best = strongest(scores, min(slots[block], scores.shape[1]))
            values[block].append(gathered(outputs[block].detach(), best))
            places[block].append(best.int())
    return [torch.cat(parts) for parts in values], [torch.cat(parts) for parts in places]


def _differentiable(inputs: Tensor) -> Tensor:
    return inputs.detach().requires_grad_() if inputs.is_floating_point() else inputs  # also if a block is frozen


def gathered(features: Tensor, places: Tensor) -> Tensor:
    """Return the activations (n, k) at indices `places` (n, k) of a block's output (n, ...), differentiably."""
    return features.flatten(1).gather(1, places.long())


def cosine(descriptors: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the cosine similarities (n,) of two descriptors, (n, k_b) for each block b, over their common columns."""
    blocks = zip(descriptors, others, strict=True)
    pairs = [(one[:, : other.shape[1]], other[:, : one.shape[1]]) for one, other in blocks]
    return F.cosine_similarity(torch.cat([one for one, _ in pairs], 1), torch.cat([other for _, other in pairs], 1))


def mean_descriptor(clients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the mean descriptors, (n, K_b) for each block b; each column is the mean over the clients that sent it."""
    means = []
    for block in zip(*clients, strict=True):
        width = max(each.shape[1] for each in block)
        sums = torch.zeros(len(block[0]), width, dtype=torch.float64)
        counts = torch.zeros(width, dtype=torch.float64)
        for each in block:
            sums[:, : each.shape[1]] += each
            counts[: each.shape[1]] += 1
        means.append((sums / counts).to(block[0].dtype))
    return means
