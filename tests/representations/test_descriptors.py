"""FedHARM's descriptors, against plain loops and against what they must be."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedhet import models
from fedhet.algorithms.alignment.targets import describe, distance_to_target, strongest, target_of
from fedhet.algorithms.graphs import blocks
from fedhet.models.representation import Output

SLOTS = (16, 32, 64, 96)


def identity(batch: Tensor) -> Tensor:
    return batch


def network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With BatchNorm statistics and biases that are not those of a fresh network."""
    torch.manual_seed(3)
    model = models.build(name, (1, 16, 16), 10)
    model(torch.randn(64, 1, 16, 16))
    return model.to(dtype).eval()


def images(count: int = 70) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (count, 1, 16, 16)
    return torch.randn(shape, generator=generator, dtype=torch.float64), torch.randint(
        10, (count,), generator=generator
    )


def by_a_loop(model: nn.Module, names: Sequence[str], image: Tensor, label: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Block by block the activations and |d CE / d F| of one image."""
    with ExitStack() as stack:
        captured = [stack.enter_context(Output(model, name).capture()) for name in names]
        loss = F.cross_entropy(model(image[None]), label[None])
    features = [each() for each in captured]
    gradients = torch.autograd.grad(loss, features)
    return [(f.detach().flatten(), g.abs().flatten()) for f, g in zip(features, gradients, strict=True)]


@pytest.mark.parametrize(("name", "labelled"), [("small-resnet-a", True), ("small-mobilenet-a", False)])
def test_descriptor_equals_a_plain_loop(name: str, labelled: bool) -> None:
    model, (inputs, labels) = network(name), images()
    names = blocks(model, inputs[:2])
    values, places = describe(model, names, inputs, labels if labelled else None, SLOTS, identity)
    if not labelled:
        labels = model(inputs).argmax(1)
    for row in range(len(inputs)):
        for block, (activations, scores) in enumerate(by_a_loop(model, names, inputs[row], labels[row])):
            # NumPy's own stable sort: ties to the lowest index; rounding is not to be taken for an order.
            order = np.argsort(-scores.numpy().round(13), kind="stable")[: SLOTS[block]]
            mine = places[block][row].long()
            ties = scores[mine] - scores[torch.from_numpy(order)]
            assert ties.abs().max() < 1e-12
            assert mine.tolist() == order.tolist()
            torch.testing.assert_close(values[block][row], activations[mine], rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=9, max_size=9), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_scores(rows: list[list[int]], k: int, dtype: torch.dtype) -> None:
    scores = torch.tensor(rows, dtype=dtype) / 7
    expected = [sorted(range(9), key=lambda place, row=row: (-row[place], place))[:k] for row in rows]
    assert strongest(scores, k).tolist() == expected


def test_wrong_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with torch.no_grad():
        model[1].weight.fill_(torch.nan)
    with pytest.raises(
        ValueError, match="gradients of block '0' are not finite: training diverged, lower learning-rate"
    ):
        describe(model, ["0"], torch.randn(3, 4), None, [2], identity)
    with pytest.raises(ValueError, match=r"logits \(3, classes >= 2\), not \(3, 1\)"):
        describe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), ["0"], torch.randn(3, 4), None, [2], identity)


# ---- of several clients


def clients(count: int = 3, widths: Sequence[Sequence[int]] = ((4, 6), (4, 8), (3, 8))) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(12, width, generator=generator) for width in widths[i % len(widths)]] for i in range(count)]


def test_mean_descriptor() -> None:
    described = clients()
    mean = target_of("cosine", described, generator=torch.Generator())
    assert [tuple(block.shape) for block in mean] == [(12, 4), (12, 8)]
    for block in range(2):
        for slot in range(mean[block].shape[1]):
            having = [own[block][:, slot] for own in described if own[block].shape[1] > slot]
            torch.testing.assert_close(mean[block][:, slot], torch.stack(having).mean(0))


def test_cosine_over_common_slots() -> None:
    own, other = clients(2)
    expected = F.cosine_similarity(torch.cat(own, 1), torch.cat([other[0], other[1][:, :6]], 1))
    torch.testing.assert_close(distance_to_target("cosine", own, other), 1 - expected.mean())
    assert float(distance_to_target("cosine", own, [3 * block for block in own])) == pytest.approx(0, abs=1e-6)
