"""FedHeNN's proximal term, the distance of a client's representation of the public dataset (RAD) to its target."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedhet.algorithms.alignment.cka import (
    centred_unit,
    check_features,
    check_pair,
    debiased_linear_cka,
    inner,
    procrustes_distance,
    ratio,
    rbf_kernel,
    self_inner,
    unit_kernel,
)
from fedhet.utils.machine import brought

Kernel = Literal["linear", "rbf", "procrustes"]
Rows = Tensor | slice


class Alignment:
    """The distance between a client's representation and its target (FedHeNN, Makhija et al., ICML 2022, equation 6).

        rows = alignment.rows()
        loss = task_loss + eta * alignment.distance(representation(rad[rows]), rows)

    `rad` has the alignment examples (RAD). On all of them the distance is 1 - CKA; on mini-batches of `batch` examples
    (0 for all) it uses the debiased estimate of CKA.

    The `target` is a factor B `(L, r)` of the target kernel B B^T for the kernel `"linear"`, and features `(L, d)` for
    `"procrustes"`, which always uses all examples, since no unbiased estimate on a mini-batch is known. For `"rbf"` it
    is the diagonal blocks of the target kernel, of which a step uses one.
    """

    def __init__(
        self, kernel: Kernel, target: Tensor | Sequence[Tensor], *, batch: int = 128, generator: torch.Generator
    ) -> None:
        self._kernel, self._generator = kernel, generator
        self._target_self: Tensor | None = None
        self._batch, self._queue, self._blocks = 0, list[slice](), dict[int, tuple[slice, Tensor, Tensor]]()
        if isinstance(target, Tensor):
            self._target = check_features(target.detach(), "target")
            if kernel == "linear" and 0 < batch < len(target):
                self._batch = batch
            elif kernel == "linear":
                self._target = centred_unit(self._target)
                self._target_self = self_inner(self._target)
            return
        start = 0
        for block in target:
            rows = slice(start, start + len(block))
            self._blocks[start] = (rows, *unit_kernel(block.detach(), debiased=len(target) > 1))
            start = rows.stop

    def rows(self) -> Rows:
        """Draw the examples of the next step: distinct indices `(batch,)` on the target's device, or a slice."""
        if self._blocks:
            if not self._queue:
                slices = [rows for rows, _, _ in self._blocks.values()]
                order = torch.randperm(len(slices), generator=self._generator).tolist()
                self._queue = [slices[index] for index in order]
            return self._queue.pop()
        count = len(self._target)
        if not self._batch:
            return slice(0, count)
        return brought(torch.randperm(count, generator=self._generator)[: self._batch], self._target.device)

    def distance(self, features: Tensor, rows: Rows) -> Tensor:
        """Return the distance, a scalar, of the representation `(b, d)` of the examples `rows` from the target."""
        return distance_to(features, *self.target(rows), kind=self.kind)

    def target(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return the part of the target for the examples `rows`, as `distance_to` expects it."""
        if isinstance(rows, slice) and self._blocks:
            return self._blocks[rows.start][1:]
        return self._target[rows], *(() if self._target_self is None else (self._target_self,))

    @property
    def kind(self) -> tuple[Kernel, bool]:
        """Pair of the kernel and whether CKA is debiased."""
        return self._kernel, self._batch > 0 or len(self._blocks) > 1


def distance_to(
    features: Tensor, target: Tensor, target_self: Tensor | None = None, *, kind: tuple[Kernel, bool]
) -> Tensor:
    """Return the distance, a scalar, of a representation `(b, d)` from a target, as a pure function of tensors.

    `target`, `target_self` and `kind` are the results of `Alignment.target` and `Alignment.kind`.
    """
    (kernel, debiased), features = kind, features.to(target.dtype)  # Phi may be computed in another dtype
    if kernel == "rbf":
        assert target_self is not None
        matrix, matrix_self = unit_kernel(rbf_kernel(features), debiased=debiased)
        return 1 - ratio((matrix * target).sum(), matrix_self, target_self)
    if kernel == "procrustes":
        return procrustes_distance(features, target)
    if target_self is None:
        return 1 - debiased_linear_cka(features, target)
    check_pair(features, target)
    unit = centred_unit(features)
    return 1 - ratio(inner(unit, target), self_inner(unit), target_self)
