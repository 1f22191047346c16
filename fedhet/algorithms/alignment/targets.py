"""Targets that clients align their representations with.

FedHeNN's target (Makhija et al., ICML 2022, algorithm 2) is the mean kernel of n clients. For linear kernels it is 1/n
sum_j A_j A_j^T = B B^T with B = 1/sqrt(n) [A_1, A_2, ...], where A_j are the centred features (L, d_j) of client j. No
L x L matrix is needed: B is rotated to the eigenvectors of the mean kernel and truncated to a lower rank.

The spectral target, which fedhet introduces, shows how all clients together cluster unlabelled public examples. Each
client sends class probabilities P_i `(L, C_i)` of L examples. They are centred and concatenated along classes, as in
cluster ensembles (Strehl and Ghosh, 2002; Fred and Jain, 2005). As in spectral clustering (Ng, Jordan and Weiss, 2001),
the k leading left singular vectors are the columns of Z, whose rows are scaled to length one. Clients are aligned with
the kernel Z Z^T. They need no common label space, because Z does not depend on the order of classes.

FedHARM (Kastellos et al., 2024) aligns descriptors of public images with their mean. The descriptor of image j consists
of the k activations F_j^b of each block b with the largest |d p_c / d F_j^b|, where c is the image's class and p_c its
predicted probability (equation 1). Here the log-odds of c are differentiated instead of p_c: the order of activations
is the same, and gradients do not vanish once the network fits the image.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.algorithms.alignment.cka import centred, check_features, debiased_linear_cka
from fedhet.errors import ModelError
from fedhet.models.representation import Output
from fedhet.utils.inputs import for_each

ERROR = 0.01  # largest error of a kernel matrix that `compress` may cause, relative to the kernel's Frobenius norm
LARGEST = 1e6  # largest accepted magnitude of features: CKA squares their inner products, which could overflow float32


def check_finite_features(features: Tensor, name: str) -> None:
    """Raise a ModelError, which calls `features` (n, d) `name`, unless they are finite and at most 1e6 in magnitude."""
    largest = float(check_features(features, name).abs().max())
    if not largest <= LARGEST:
        raise ModelError(f"{name} exceed {LARGEST:.0e} ({largest:.1e}): training diverged, lower learning-rate")


def compress(features: Tensor) -> Tensor:
    """Return a matrix B (L, r) so that B B^T approximates the linear kernel K of the centred `features` (L, d).

    r is the smallest rank for which the best approximation K_r of this rank has an error ||K - K_r|| <= `ERROR` ||K||.
    If r is not smaller than d, B is the centred features. Raises a ModelError unless features are finite.
    """
    check_finite_features(features, "features")
    values = centred(features)
    weights, vectors = spectrum(values.double())
    if len(weights) == 0:
        return values[:, :1]
    tails = weights.square().flip(0).cumsum(0).flip(0).sqrt()  # ||K - K_r|| for each rank r from 0
    rank = max(1, int((tails > ERROR * tails[0]).sum()))
    if rank >= features.shape[1]:
        return values
    return (vectors[:, :rank] * weights[:rank].sqrt()).to(features.dtype)


def spectrum(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return positive eigenvalues (w,), largest first, and eigenvectors (L, w) of V V^T for `values` V (L, d)."""
    narrow = values.shape[1] <= len(values)
    weights, vectors = torch.linalg.eigh(values.T @ values if narrow else values @ values.T)
    weights, vectors = weights.flip(0), vectors.flip(1)
    positive = weights > weights[0] * len(weights) * torch.finfo(weights.dtype).eps
    weights = weights[positive]
    vectors = vectors[:, positive]
    return weights, (values @ vectors) * weights.rsqrt() if narrow else vectors


def mean_target(features: Sequence[Tensor]) -> Tensor:
    """Return a matrix B (L, r) so that B B^T approximates the mean of clients' linear kernels (FedHeNN, algorithm 2).

    `features` has each client's features (L, d_j) of the same L examples, and r is the rank that `compress` chooses.
    """
    return compress(torch.cat([(1 / len(features)) ** 0.5 * centred(peer) for peer in features], 1))


_LEAST = 1e-6  # smaller eigenvalues, relative to the largest, are rounding errors of posteriors sent in float16


def check_posteriors(values: Tensor) -> None:
    """Check that `values` `(L, C)` are class probabilities, whose rows sum to about 1; raise a ValueError otherwise."""
    check_finite_features(values, "posteriors")
    if bool((values < 0).any()) or bool((values.sum(1) - 1).abs().max() > 0.01):
        raise ValueError("posteriors must be non-negative with rows that sum to 1: apply a softmax to logits")


def cluster_rows(sent: Sequence[Tensor], *, generator: torch.Generator) -> Tensor:
    """Return Z `(L, k)`: the k leading left singular vectors of clients' class probabilities, with rows of length 1.

    `sent` has the probabilities `(L, C_i)` of each client for the same L examples; `count_clusters` chooses k with
    random numbers from `generator`. A row of Z is zero if all clients predict their mean probabilities for the example.
    """
    parts = [centred(posteriors.double()) * (1 / len(sent)) ** 0.5 for posteriors in sent]
    eigenvalues, vectors = spectrum(torch.cat(parts, 1))
    if not len(eigenvalues):
        return torch.zeros_like(sent[0][:, :1])
    rows = vectors[:, : count_clusters(eigenvalues, parts, generator)]
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return torch.where(lengths > 1e-9, rows / lengths.clamp_min(1e-9), 0.0).to(sent[0].dtype)


def count_clusters(eigenvalues: Tensor, parts: Sequence[Tensor], generator: torch.Generator) -> int:
    """Return k, the number of leading singular vectors on which clients agree more than by chance.

    `parts` are the clients' centred class probabilities `(L, C_i)`; `eigenvalues`, largest first, are those of P P^T,
    where P concatenates them. Parallel analysis (Horn, 1965) counts the eigenvalues that exceed the largest eigenvalue
    after `generator` shuffles clients' rows. k is at least the median number of classes, and at most half of P's rank.
    """
    rank = int((eigenvalues > _LEAST * eigenvalues[:1]).sum())
    if len(parts) == 1:
        return max(rank, 1)
    # An order for drawing that does not depend on the order of the clients.
    ordered = sorted(parts, key=lambda part: float(torch.linalg.vector_norm(part)))
    shuffled = [part[torch.randperm(len(part), generator=generator)] for part in ordered]
    by_chance, _ = spectrum(torch.cat(shuffled, 1))
    agreed = int((eigenvalues > by_chance[:1]).sum())
    classes = int(statistics.median(part.shape[1] for part in parts))
    return max(min(max(agreed, classes), rank // 2), 1)


BATCH = 64  # number of images in a forward pass of `describe`


def strongest(scores: Tensor, k: int) -> Tensor:
    """Return the indices (n, k) of the k largest `scores` (n, m), all >= 0, in each row; ties go to the first."""
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
    """Return FedHARM's descriptors of n images, and the positions of their values, both (n, k_b) for each block b.

    A descriptor has the k_b values in the output of block b with the largest gradients, in magnitude, of the log-odds
    of the image's class; positions are indices in the flattened output. `blocks` has the names of the blocks' last
    modules, `slots` the numbers k_b, and `labels` (n,) the classes, or None for predicted ones. `transform` converts
    raw images `inputs` (n, ...) to the model's inputs. The model is left in evaluation mode. Raises a ModelError unless
    the model returns logits (n, C >= 2) with finite gradients.
    """
    captures = [Output(model, name) for name in blocks]
    values: list[list[Tensor]] = [[] for _ in blocks]
    places: list[list[Tensor]] = [[] for _ in blocks]
    model.eval()
    for start in range(0, len(inputs), BATCH):
        rows = slice(start, start + BATCH)
        # Gradients reach the blocks from the inputs, too, also if a block is frozen.
        batch = for_each(transform(inputs[rows]), lambda x: x.detach().requires_grad_(x.is_floating_point()))
        with ExitStack() as stack, torch.enable_grad():
            captured = [stack.enter_context(capture.capture()) for capture in captures]
            logits = model(batch)
            if logits.ndim != 2 or logits.shape[1] < 2:
                got = tuple(logits.shape)
                raise ModelError(f"the model's forward must return logits ({len(batch)}, classes >= 2), not {got}")
            classes = (logits.argmax(1) if labels is None else labels[rows])[:, None]
            others = logits.scatter(1, classes, -torch.inf).logsumexp(1)
            score = (logits.gather(1, classes)[:, 0] - others).sum()  # the log-odds log(p_c / (1 - p_c))
            outputs = [output() for output in captured]
        for block, gradient in enumerate(torch.autograd.grad(score, outputs)):
            scores = gradient.flatten(1).abs_()
            if not scores.isfinite().all():
                raise ModelError(
                    f"gradients of block {blocks[block]!r} are not finite: training diverged, lower learning-rate"
                )
            best = strongest(scores, min(slots[block], scores.shape[1]))
            values[block].append(gathered(outputs[block].detach(), best))
            places[block].append(best.int())
    return [torch.cat(parts) for parts in values], [torch.cat(parts) for parts in places]


def gathered(features: Tensor, places: Tensor) -> Tensor:
    """Return the activations (n, k) at the positions `places` (n, k) of a block's flattened `features` (n, ...)."""
    return features.flatten(1).gather(1, places.long())


Kind = Literal["cosine", "spectral"]

LEAST_ROWS = 4  # least number of images for an estimate of CKA; the distance of a smaller batch is 0


def target_of(kind: Kind, clients: Sequence[Sequence[Tensor]], *, generator: torch.Generator) -> list[Tensor]:
    """Return the target of FedHARM's alignment from the tensors that each of the `clients` sent for the same n images.

    For `kind` `cosine`, clients send a descriptor (n, width) of each block. The target has their mean for each block;
    if widths differ, a column's mean is over the clients that have the column. For `spectral`, each client sends class
    probabilities (n, C), and the target is the result of `cluster_rows`, which uses `generator`.
    """
    if kind == "spectral":
        return [cluster_rows([posteriors for (posteriors,) in clients], generator=generator)]
    means = []
    for block in zip(*clients, strict=True):
        width = max(descriptors.shape[1] for descriptors in block)
        sums = torch.zeros(len(block[0]), width, dtype=torch.float64)
        counts = torch.zeros(width, dtype=torch.float64)
        for descriptors in block:
            sums[:, : descriptors.shape[1]] += descriptors
            counts[: descriptors.shape[1]] += 1
        means.append((sums / counts).to(block[0].dtype))
    return means


def distance_to_target(
    kind: Kind, parts: Sequence[Tensor], target: Sequence[Tensor], mean: Callable[[Tensor], Tensor] = torch.mean
) -> Tensor:
    """Return the distance, a scalar, of a client's tensors `parts` from FedHARM's `target` for the same images.

    For `kind` `cosine`, both have descriptors (n, width) by block, cut to the narrower of each pair; the distance
    is the mean of 1 - cosine. For `spectral`, both have one tensor of representations (n, d); the distance is 1 - CKA.
    `mean` computes means over images.
    """
    if kind == "cosine":
        pairs = [(one[:, : other.shape[1]], other[:, : one.shape[1]]) for one, other in zip(parts, target, strict=True)]
        ours, theirs = (torch.cat(columns, 1) for columns in zip(*pairs, strict=True))
        return 1 - mean(F.cosine_similarity(ours, theirs))
    (features,), (rows,) = parts, target
    return features.new_zeros(()) if len(features) < LEAST_ROWS else 1 - debiased_linear_cka(features, rows)


def check_sent(kind: Kind, parts: Sequence[Tensor], images: int, slots: Sequence[int]) -> None:
    """Check that the tensors `parts` that a client sent to FedHARM's server are valid; raise a ValueError otherwise.

    For `kind` `spectral`, they are class probabilities of `images` public images; for `cosine`, a descriptor of each
    block, with one row for each image and at most as many columns as `slots` has for the block.
    """
    for number, part in enumerate(parts):
        most = slots[number] if kind == "cosine" else part.shape[1]
        if len(part) != images or part.shape[1] > most:
            name = "class probabilities" if kind == "spectral" else f"descriptors of block {number + 1}"
            size = f"{images} rows (public images) and at most {most} columns, not {len(part)} and {part.shape[1]}"
            raise ValueError(f"the client's {name} must have {size}: use the server's public dataset and settings")
    if kind == "spectral":
        check_posteriors(parts[0])


DTYPES = {"values": "float16", "exponent": "int16"}
"""Keys of the arrays that `pack` returns, and their dtypes."""

Packed = dict[str, np.ndarray[Any, Any]]

EXPONENTS = (-163, 113)  # `exponent` that `pack` returns for the smallest and the largest float32 numbers


def pack(tensor: Tensor) -> Packed:
    """Return arrays `values` (float16) and `exponent` (int16, a scalar): the tensor is about values * 2^exponent."""
    array = tensor.detach().cpu().float().numpy()
    largest = float(np.abs(array).max(initial=0.0))
    exponent = int(np.frexp(largest)[1]) - 15 if largest > 0 else 0  # which uses the range of float16 best
    return {"values": np.ldexp(array, -exponent).astype(DTYPES["values"]), "exponent": np.array(exponent, np.int16)}


def unpack(packed: Packed) -> Tensor:
    """Return the float32 tensor that `pack` packed; raise a ValueError or ModelError if the arrays are not valid."""
    if (dtypes := {name: array.dtype.name for name, array in packed.items()}) != DTYPES:
        raise ValueError(f"each sent tensor must have arrays {DTYPES}, not {str(dtypes)[:200]}: use one fedhet version")
    values = packed["values"]
    exponent = packed["exponent"]
    least, most = EXPONENTS
    if exponent.shape != () or not least <= int(exponent) <= most:
        got = f"{str(exponent)[:50]}: use one version of fedhet on the server and all clients"
        raise ValueError(f"the array 'exponent' of a sent tensor must be one integer from {least} to {most}, got {got}")
    with np.errstate(over="ignore"):  # infinities are refused below
        unpacked = torch.from_numpy(np.asarray(np.ldexp(values.astype(np.float32), int(exponent))))
    check_finite_features(unpacked, "a sent tensor")
    return unpacked


def pack_all(parts: Sequence[Tensor]) -> Packed:
    """Return several tensors, packed by `pack`, in one dict; keys start with the index of the tensor (`0/values`)."""
    return {f"{place}/{key}": array for place, part in enumerate(parts) for key, array in pack(part).items()}


def unpack_all(group: Packed, count: int) -> list[Tensor]:
    """Return the `count` tensors that `pack_all` packed in `group`; raise a ValueError or ModelError if invalid."""
    parts: dict[str, Packed] = {str(place): {} for place in range(count)}
    for name, array in group.items():
        place, _, key = name.partition("/")
        if place not in parts:
            names = f"0/... to {count - 1}/..., not {name[:50]!r}"
            raise ValueError(f"the arrays of {count} sent tensors must be named {names}: use one version of fedhet")
        parts[place][key] = array
    return [unpack(part) for part in parts.values()]
