"""FedHeNN's proximal term on the client: which RAD rows a step uses, and 1 - CKA to the peers' target on them."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedhet.machine import brought
from fedhet.representations.cka import (
    centred_unit,
    check_debiased,
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

Kernel = Literal["linear", "rbf", "procrustes"]
Rows = Tensor | slice


class Alignment:
    """The distance between a client's representation and its target (FedHeNN, Makhija et al., ICML 2022, equation 6).

        rows = alignment.rows()
        loss = task_loss + eta * alignment.distance(representation(rad[rows]), rows)

    On the whole RAD the distance is 1 - CKA as in the paper; on mini-batches CKA is the debiased estimate.

    Args:
        kernel: `"linear"`, `"rbf"`, or `"procrustes"` for equal widths.
        target: for `"linear"` a factor B `(L, r)` of the target kernel B B^T, or the target's features; for
            `"procrustes"` the target's features `(L, d)`; for `"rbf"` the diagonal blocks of the target kernel, in
            order of their rows.
        batch: RAD rows a step, 0 for all. For `"rbf"` a step's rows are one of the blocks; `"procrustes"` takes
            all, for there is no unbiased estimate of it on a few.
        generator: the CPU generator that draws the rows.

    Raises:
        ValueError: the target does not fit the kernel, or a batch is too small for the debiased estimate.
    """

    def __init__(
        self, kernel: Kernel, target: Tensor | Sequence[Tensor], *, batch: int = 128, generator: torch.Generator
    ) -> None:
        if isinstance(target, Tensor) == (kernel == "rbf"):
            raise ValueError(f"the target of kernel {kernel!r} must be {'blocks' if kernel == 'rbf' else 'a tensor'}")
        if not len(target):
            raise ValueError("the target has no blocks")
        self._kernel, self._dtype = kernel, (target if isinstance(target, Tensor) else target[0]).dtype
        self._generator = generator
        self._queue: list[slice] = []
        if isinstance(target, Tensor):
            self._target = check_features(target.detach(), "target")
            self._count = len(target)
            self._batch = batch if kernel == "linear" and 0 < batch < self._count else 0
            if self._batch:
                check_debiased(self._batch)
            if not self._batch and kernel == "linear":
                unit = centred_unit(self._target)
                self._target, self._target_self = unit, self_inner(unit)
            return
        self._blocks: dict[int, tuple[slice, Tensor, Tensor]] = {}
        start, debiased = 0, len(target) > 1
        for block in target:
            if block.ndim != 2 or block.shape[0] != block.shape[1]:
                raise ValueError(f"the target's blocks must be square, got {tuple(block.shape)}")
            if debiased:
                check_debiased(len(block))
            rows = slice(start, start + len(block))
            self._blocks[start] = (rows, *unit_kernel(block.detach(), debiased=debiased))
            start = rows.stop

    def rows(self) -> Rows:
        """The RAD rows of the next step: distinct indices `(batch,)` int64, on the target's device, or a slice."""
        if self._kernel == "rbf":
            if not self._queue:
                slices = [rows for rows, _, _ in self._blocks.values()]
                order = torch.randperm(len(slices), generator=self._generator).tolist()
                self._queue = [slices[index] for index in order]
            return self._queue.pop()
        if not self._batch:
            return slice(0, self._count)
        return brought(torch.randperm(self._count, generator=self._generator)[: self._batch], self._target.device)

    def distance(self, features: Tensor, rows: Rows) -> Tensor:
        """The distance of the features Phi `(b, d)`, on the rows that `rows()` gave, to the target: a scalar.

        Phi of a network of several dtypes may be of another one than the target.
        """
        features = features.to(self._dtype)
        if self._kernel == "rbf":
            return self._rbf_distance(features, rows)
        target = self._target[rows]
        if self._kernel == "procrustes":
            return procrustes_distance(features, target)
        if self._batch:
            return 1 - debiased_linear_cka(features, target)
        check_pair(features, target)
        unit = centred_unit(features)
        return 1 - ratio(inner(unit, target), self_inner(unit), self._target_self)

    def _rbf_distance(self, features: Tensor, rows: Rows) -> Tensor:
        if not isinstance(rows, slice) or rows.start not in self._blocks:
            raise ValueError("an RBF alignment has a target for the rows that rows() gives and no others")
        expected, target, target_self = self._blocks[rows.start]
        if rows != expected or len(features) != len(target):
            raise ValueError(f"features of {len(features)} rows do not fit the target's block of {len(target)}")
        kernel, kernel_self = unit_kernel(rbf_kernel(features), debiased=len(self._blocks) > 1)
        return 1 - ratio((kernel * target).sum(), kernel_self, target_self)
