"""Changes of arrays as low-rank factors, which are smaller to send.

A change (rows, columns) is approximated by its k largest singular values as `left` (rows, k) times `right` (k,
columns). k is the smallest number for which the sum of the squared singular values reaches a given fraction of the
total (the energy). An array with more axes is treated as a matrix with a row for each entry of the first axis. Vectors,
and matrices whose factors would not be smaller, are sent whole; integers are sent as their new values.
"""

import math

import numpy as np
import torch

from fedhet.messages.payload import Arrays, Spec, check, check_finite
from fedhet.utils.machine import one_thread

LEFT, RIGHT = ":left", ":right"
"""Suffixes of an array's name in the names of its factors."""


def pack(after: Arrays, before: Arrays, energy: float) -> Arrays:
    """Return the changes from `before` to `after` as factors; an array that is missing in `before` was zero.

    `energy` is the fraction of each matrix's sum of squared singular values that is kept, up to 1.
    """
    packed: Arrays = {}
    for name, array in after.items():
        floating = array.dtype.kind == "f"
        packed[name] = change = np.asarray(array - before[name]) if floating and name in before else array
        if not floating or change.ndim < 2 or not change.size:
            continue
        matrix = torch.from_numpy(change.reshape(len(change), -1))
        with one_thread():
            left, values, right = torch.linalg.svd(matrix.to(torch.promote_types(matrix.dtype, torch.float32)), False)
        kept = values.double().square().cumsum(0)
        rank = min(1 + int((kept < energy * kept[-1]).sum()), len(values))
        if rank * sum(matrix.shape) < change.size:
            del packed[name]
            packed[f"{name}{LEFT}"] = left[:, :rank].numpy().astype(change.dtype)
            packed[f"{name}{RIGHT}"] = (values[:rank, None] * right[:rank]).numpy().astype(change.dtype)
    return packed


def unpack(packed: Arrays, before: Arrays, spec: Spec, group: str) -> Arrays:
    """Check received changes (`packed`), and return the arrays `before` with these changes.

    `spec` describes the arrays, and `group` names the changes in messages. Raises a WireError if a name, shape or dtype
    is wrong, or a number is not finite or too large.
    """
    expected: Spec = {}
    for name, (shape, dtype) in spec.items():
        if len(shape) > 1 and f"{name}{LEFT}" in packed:
            rows, columns = shape[0], math.prod(shape[1:])
            rank = min(sum(packed[f"{name}{LEFT}"].shape[1:2]), rows, columns)
            expected |= {f"{name}{LEFT}": ((rows, rank), dtype), f"{name}{RIGHT}": ((rank, columns), dtype)}
        else:
            expected[name] = shape, dtype
    check(packed, expected, group)
    after = apply(packed, before, spec)
    check_finite(after, group)
    return after


def apply(packed: Arrays, before: Arrays, spec: Spec) -> Arrays:
    """Add valid changes to the arrays `before`; on one machine, the result is reproducible bit by bit."""
    after: Arrays = {}
    for name, (shape, dtype) in spec.items():
        if (change := packed.get(name)) is None:
            left, right = (torch.from_numpy(packed[f"{name}{side}"]) for side in (LEFT, RIGHT))
            with one_thread():
                change = (left @ right).numpy().reshape(shape)
        added = change.dtype.kind == "f" and name in before
        after[name] = np.asarray(before[name] + change if added else change, dtype=dtype)
    return after
