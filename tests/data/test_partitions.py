from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhet import data
from fedhet.data import DataSet, Examples
from fedhet.data.examples import Owners
from fedhet.errors import DataError
from fedhet.tasks import Task

OPTIONS: dict[str, dict[str, float]] = {"iid": {}, "classes": {"classes_per_client": 3}, "dirichlet": {"alpha": 0.5}}


def made(train: int = 1000, test: int = 300, classes: int = 10, seed: int = 0) -> DataSet:
    """Examples whose input is their own index."""
    generator = torch.Generator().manual_seed(seed)

    def examples(n: int) -> Examples:
        return Examples(torch.arange(n)[:, None], torch.randint(classes, (n,), generator=generator))

    return DataSet("made", examples(train), examples(test), classes, Task("classification"), (1,), torch.Tensor.float)


def label_sets(dataset: DataSet, part: data.Part) -> tuple[set[int], set[int]]:
    return set(dataset.train.labels[part.train].tolist()), set(dataset.test.labels[part.test].tolist())


@pytest.mark.parametrize("name", OPTIONS)
def test_parts_are_disjoint_and_seeded(name: str) -> None:
    dataset = made()

    def dealt(seed: int) -> list[data.Part]:
        return data.partition(dataset, name, clients=12, seed=seed, **OPTIONS[name])

    parts = dealt(3)
    assert len(parts) == 12
    for indices, n in (
        (np.concatenate([p.train for p in parts]), 1000),
        (np.concatenate([p.test for p in parts]), 300),
    ):
        assert sorted(indices) == list(range(n))
    again, other = dealt(3), dealt(4)
    assert all(
        np.array_equal(a, b) for one, two in zip(parts, again, strict=True) for a, b in zip(one, two, strict=True)
    )
    assert any(not np.array_equal(one.train, two.train) for one, two in zip(parts, other, strict=True))


@given(clients=st.integers(1, 40), k=st.integers(1, 10), seed=st.integers(0, 2**40))
@settings(max_examples=25, deadline=None)
def test_partition_by_classes(clients: int, k: int, seed: int) -> None:
    dataset = made(4000, 2000)
    parts = data.partition(dataset, "classes", clients=clients, seed=seed, classes_per_client=k)
    held = [label_sets(dataset, part) for part in parts]
    assert all(train == test and len(train) == k for train, test in held)
    holders = np.bincount([label for train, _ in held for label in train], minlength=10)
    assert holders.max() - holders.min() <= 1
    for label in np.flatnonzero(holders):
        sizes = [int((dataset.train.labels[p.train] == label).sum()) for p in parts]
        sizes = [size for size, (train, _) in zip(sizes, held, strict=True) if label in train]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == int((dataset.train.labels == label).sum())


def test_halved_clients() -> None:
    dataset, options = made(4000, 2000), {"clients": 10, "seed": 3, "classes_per_client": 2}
    whole = data.partition(dataset, "classes", **options)
    halved: set[int] = set()
    for share, count in ((0.3, 3), (0.6, 6)):
        parts = data.partition(dataset, "classes", **options, halved_clients=share)
        smaller = {client for client, part in enumerate(parts) if len(part.train) < len(whole[client].train)}
        assert len(smaller) == count
        assert halved <= smaller, "those of a smaller share are among them"
        halved = smaller
        for mine, before in zip(parts, whole, strict=True):
            assert set(mine.train) <= set(before.train)
            assert np.array_equal(mine.test, before.test)
            assert len(mine.train) in (len(before.train), len(before.train) // 2)
            assert label_sets(dataset, mine) == label_sets(dataset, before)


def test_dirichlet_follows_alpha() -> None:
    dataset = made(20_000, 20_000)

    def shares(examples: Examples, parts: list[np.ndarray]) -> np.ndarray:
        """Share of each class that each client has."""
        counts = np.stack([torch.bincount(examples.labels[part], minlength=10).numpy() for part in parts])
        return counts / counts.sum(0)

    spread = {}
    for alpha in (0.1, 1000.0):
        parts = data.partition(dataset, "dirichlet", clients=5, seed=0, alpha=alpha)
        train = shares(dataset.train, [part.train for part in parts])
        test = shares(dataset.test, [part.test for part in parts])
        assert np.abs(train - test).max() < 1e-3
        spread[alpha] = train[:, :5].std()
    assert spread[0.1] > 10 * spread[1000.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("classes", {"classes_per_client": 11}, "classes-per-client = 11: must be from 1 to 10"),
        ("classes", {"classes_per_client": 0}, "classes-per-client = 0: must be from 1 to 10"),
        ("dirichlet", {"alpha": 0.0}, "alpha 0 gives each of 20 clients at least 10"),
        ("dirichlet", {"alpha": float("nan")}, "alpha nan gives each of"),
        ("dirichlet", {"alpha": 1e-6}, "alpha 1e-06 gives each of 20 clients at least 10"),
        ("dirichlet", {"clients": 101}, "at least 10 of 1000"),
        ("natural", {}, "no natural clients"),
        ("irid", {}, "unknown partition 'irid'; did you mean 'iid'"),
        ("iid", {"clients": 301}, "leaves client 300 of 301 without any of made's 300 test examples"),
        (
            "classes",
            {"classes_per_client": 1, "clients": 290},
            "leaves client .* of 290 without any of made's 300 test examples",
        ),
    ],
)
def test_impossible_partitions(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        data.partition(made(), name, **{"clients": 20, "seed": 0, **options})


def test_several_labels_cannot_be_partitioned_by_class() -> None:
    examples = Examples(torch.zeros(40, 1), torch.randint(2, (40, 3)))
    dataset = DataSet("many", examples, examples, 3, Task("multi-label"), (1,), torch.Tensor.float)
    with pytest.raises(DataError, match="many has examples without exactly one class each"):
        data.partition(dataset, "dirichlet", clients=2, seed=0)
    parts = data.partition(dataset, "iid", clients=2, seed=0, samples_per_client=5)
    assert [len(part.train) for part in parts] == [5, 5]
    assert data.hold_out(dataset, 10, seed=0)[0].shape == (10,)


class TestNatural:
    def dataset(self) -> DataSet:
        owner = np.arange(1000) % 8
        # The last one has nothing to be tested on.
        return replace(made(), groups=Owners(owner, np.arange(300) % 7))

    def test_every_client_is_one_owner(self) -> None:
        parts = data.partition(self.dataset(), "natural", clients=7, seed=0)
        assert [set(part.train % 8) for part in parts] == [{owner} for owner in range(7)]
        assert [set(part.test % 7) for part in parts] == [{owner} for owner in range(7)]
        assert all(len(part.train) == 125 for part in parts)

    def test_fewer_clients_are_a_seeded_choice(self) -> None:
        chosen = {
            seed: [part.train[0] % 8 for part in data.partition(self.dataset(), "natural", clients=3, seed=seed)]
            for seed in range(6)
        }
        assert all(len(set(owners)) == 3 for owners in chosen.values())
        assert len({tuple(owners) for owners in chosen.values()}) > 1

    def test_more_clients_than_owners(self) -> None:
        with pytest.raises(DataError, match="7 natural clients, not 8"):
            data.partition(self.dataset(), "natural", clients=8, seed=0)


def test_samples_per_client() -> None:
    dataset = made(5000, 300)
    whole = data.partition(dataset, "dirichlet", clients=6, seed=0)
    small = data.partition(dataset, "dirichlet", clients=6, seed=0, samples_per_client=60)
    for all_of_it, part in zip(whole, small, strict=True):
        assert len(part.train) == 60
        assert set(part.train) <= set(all_of_it.train)
        assert np.array_equal(part.test, all_of_it.test)
        before, after = (torch.bincount(dataset.train.labels[p.train], minlength=10).numpy() for p in (all_of_it, part))
        assert np.abs(after - 60 * before / before.sum()).max() <= 1.5
    generous = data.partition(dataset, "dirichlet", clients=6, seed=0, samples_per_client=5000)
    assert all(np.array_equal(a.train, b.train) for a, b in zip(whole, generous, strict=True))


def test_a_held_out_public_dataset() -> None:
    dataset = made()
    (held_out, available), (other, _) = (data.hold_out(dataset, 200, seed=seed) for seed in (1, 2))
    assert not np.array_equal(held_out, other)
    counts, all_counts = (torch.bincount(dataset.train.labels[i]).numpy() for i in (held_out, np.arange(1000)))
    assert np.abs(counts - all_counts / 5).max() <= 1, "each class has its share"
    for name, clients in (("iid", 4), ("classes", 9)):
        parts = data.partition(dataset, name, clients=clients, seed=1, available=available)
        owned = np.concatenate([part.train for part in parts])
        assert set(owned) | set(held_out) == set(range(1000))
        assert len(owned) + len(held_out) == 1000
    with pytest.raises(DataError, match="public-samples = 1000 must be less than the 1000"):
        data.hold_out(dataset, 1000, seed=0)
