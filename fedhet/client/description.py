"""The description of a client's data for `fedhet describe`: numbers, classes, missing values, range and shape."""

import math

import torch

from fedhet.client.job import Job
from fedhet.data.names import CLASSES, LABEL_COLUMNS
from fedhet.errors import Refused
from fedhet.messages import Arrays, to_arrays
from fedhet.utils.inputs import parts_of
from fedhet.utils.statistics import Metric

ROWS = 1024  # number of examples that are read at a time


def describe(job: Job) -> Arrays:
    """Return statistics of the training examples of a job's client as arrays, within the node's policy.

    `numbers` has the numbers of training, validation and test examples, of training examples with missing values (NaN;
    -1 if these or the others are too few to be told), and of the values of their inputs, with mean and standard
    deviation. `range` has the smallest and the largest value, if the policy allows numbers of single examples. `shape`
    is that of an example's inputs, and `classes` has the number of examples with each class or label.

    Raises `Refused` if few examples have values.
    """
    data = job.client.data
    policy = job.policy
    count = entries = missing = empty = 0
    mean = squares = 0.0
    low = math.inf
    high = -math.inf
    shape: list[int] = []
    for raw, _ in data.train.batches(ROWS):
        parts = [part.double() for part in parts_of(raw, "inputs").values()]
        shape = [*parts[0].shape[1:]]
        lacks = torch.cat([part.isnan().reshape(len(part), -1) for part in parts], dim=1)
        missing += int(lacks.any(1).sum())
        empty += int(lacks.all(1).sum())
        entries += sum(part.numel() for part in parts)
        values = torch.cat([part[~part.isnan()] for part in parts])
        if not len(values):
            continue
        # The mean and the sum of squares about it are joined (Chan et al., 1979), since sums of squares lose digits.
        change = float(values.mean()) - mean
        squares += float((values - values.mean()).square().sum())
        squares += change**2 * count * len(values) / (count + len(values))
        count += len(values)
        mean += change * len(values) / count
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    if 0 < len(data.train) - empty < policy.least:  # mean and standard deviation would be of few examples
        raise Refused(
            f"fewer than {policy.least} of the client's training examples (min-examples) have values: replace those "
            "that are missing, or leave the client out"
        )
    others = len(data.train) - missing
    disclosed = all(number == 0 or number >= policy.least for number in (missing, others))
    validation = len(data.validation) if data.validation else 0
    std = math.sqrt(squares / count) if count else 0.0
    # The number of values tells how many are missing.
    numbers: list[float] = [len(data.train), validation, len(data.test)]
    numbers += [missing, count] if disclosed else [-1, entries]
    numbers += [policy.rounded(mean), policy.rounded(std)]
    arrays = {"numbers": torch.tensor(numbers, dtype=torch.float64), "shape": torch.tensor(shape, dtype=torch.int64)}
    if policy.least == 1 and count:
        arrays["range"] = torch.tensor([low, high], dtype=torch.float64)
    if (classes := by_class(job)) is not None:
        arrays["classes"] = classes
    return to_arrays(arrays)


def by_name(job: Job) -> dict[str, int]:
    """Return the number of training examples by the name of a class or label, which is its number if it has none.

    Outputs beyond the client's names, which are for classes of others, are left out if no example has them.
    """
    counts = by_class(job)
    if counts is None:
        return {}
    names = job.client.data.names.get(CLASSES, job.client.data.names.get(LABEL_COLUMNS, ()))
    others = {str(k): int(counts[k]) for k in range(len(names), len(counts)) if counts[k] or not names}
    return dict(zip(names, map(int, counts), strict=False)) | others


def by_class(job: Job) -> torch.Tensor | None:
    """Return the number of training examples (of tokens or pixels) by class or label; -1 if too few to be told."""
    client = job.client
    labels = client.data.train.labels
    outputs = client.task.outputs
    if outputs.meaning == "numbers":
        return None
    if outputs.meaning == "labels":
        having = labels.long().sum(0)
    else:
        having = labels[labels >= 0].long().flatten().bincount(minlength=client.outputs)  # not IGNORED, UNLABELLED
    if not having.any():
        return None
    counts = tuple(map(float, having.tolist()))
    behind = tuple(map(int, counts))
    if outputs.meaning == "labels":  # the number of examples without a label is known as well
        behind = tuple(min(number, len(labels) - number) or number for number in behind)
    if labels.ndim > 1 and outputs.meaning == "classes":  # of an example, many tokens or pixels can have a class
        behind = tuple(int((labels == k).flatten(1).any(1).sum()) for k in range(len(counts)))
    metric = Metric(counts, counts, behind)
    sent = job.policy.metric(metric, by_class=outputs.meaning == "classes")
    return torch.tensor([kept or (-1.0 if number else 0.0) for kept, number in zip(sent.weights, counts, strict=True)])
