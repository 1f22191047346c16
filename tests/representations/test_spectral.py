"""The spectral target: what it must not depend on, what it finds, how many columns, and what Byzantine clients do."""

import pytest
import torch
from torch import Tensor

from fedhet.algorithms.alignment.targets import check_posteriors, cluster_rows, pack, unpack

LABELS = torch.arange(200) % 6


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def client(seed: int, classes: list[list[int]], sure: float = 3.0) -> Tensor:
    """Posteriors (200, classes) of a client whose classes are groups of the planted clusters; others are guessed."""
    logits = torch.randn(200, len(classes), generator=drawn(seed))
    for column, members in enumerate(classes):
        logits[torch.isin(LABELS, torch.tensor(members)), column] += sure
    return logits.softmax(1)


def everyone(clients: int = 8, clusters: int = 6) -> list[Tensor]:
    return [client(seed, [[label] for label in range(clusters)]) for seed in range(clients)]


def target(told: list[Tensor]) -> Tensor:
    rows = cluster_rows(told, generator=drawn(7))
    return rows @ rows.T


def like(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_order_of_clients_and_classes() -> None:
    told = everyone()
    like(target([told[i] for i in (3, 0, 7, 1, 6, 2, 5, 4)]), target(told))
    like(target([told[0][:, [4, 2, 0, 1, 5, 3]], *told[1:]]), target(told))


def test_planted_clusters() -> None:
    groupings = [[[0, 1], [2, 3]], [[0, 2], [1, 4], [3, 5]], [[4], [5], [0], [1, 2]], [[3], [0, 5], [1], [2], [4]]]
    told = [client(seed, grouping) for seed, grouping in enumerate(groupings * 4)]
    kernel = target(told)
    same = LABELS[:, None] == LABELS[None, :]
    assert kernel[same].mean() > 0.8
    assert kernel[~same].mean() < 0.1
    torch.testing.assert_close(kernel.diagonal(), torch.ones(200))


@pytest.mark.parametrize("planted", [6, 4])
def test_number_of_clusters(planted: int) -> None:
    groups = [[label] for label in range(planted - 1)] + [list(range(planted - 1, 6))]
    pairs = [[groups[i], [m for g in groups[:i] + groups[i + 1 :] for m in g]] for i in range(planted)]
    for told in ([client(seed, groups) for seed in range(8)], [client(s, p) for s, p in enumerate(pairs * 4)]):
        rows = cluster_rows(told, generator=drawn())
        assert rows.shape[1] in (planted - 1, planted)  # centred, clusters span one direction less


def test_target_after_packing() -> None:
    told = everyone()
    sent = [unpack(pack(own)) for own in told]
    for own in sent:
        check_posteriors(own)
    rows = cluster_rows(sent, generator=drawn(7))
    assert rows.shape[1] == 6
    back = unpack(pack(rows))
    assert (back @ back.T - target(told)).abs().max() < 0.01


def test_constant_posteriors() -> None:
    told = everyone()
    for constant in (torch.full((200, 6), 1 / 6), torch.eye(6)[:1].expand(200, 6)):
        like(target([constant, *told]), target(told))
    nothing = cluster_rows([torch.full((200, 6), 1 / 6)], generator=drawn())
    assert nothing.shape == (200, 1)
    assert not nothing.any()


@pytest.mark.parametrize(
    "wrong", [torch.full((5, 2), 0.4), torch.tensor([[1.5, -0.5]] * 5), torch.full((5, 2), torch.nan), torch.ones(5)]
)
def test_wrong_posteriors(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"posteriors (must|exceed)|of shape"):
        check_posteriors(wrong)
