"""FedHARM: what travels, and what is trained on when."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.algorithms.alignment import targets
from fedhet.algorithms.alignment.targets import describe, pack_all, target_of, unpack_all
from fedhet.algorithms.graphs import blocks
from fedhet.setup import client_setup

# Networks without BatchNorm, whose blocks are named by hand: fast, and alike in training and in evaluation.
BLOCKS = "body.1,body.2; body.2,body.4"
SLOTS = (24, 12)
OWN = {
    "architectures": "cnn-1-1,mlp",
    "public_samples": 40,
    "learning_rate": 0.01,
    "fedharm.blocks": BLOCKS,
    "fedharm.slots": ",".join(map(str, SLOTS)),
}

Federate = Callable[..., Any]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(targets.DTYPES, "values", "float32")


def harm(federate: Federate, name: str = "run", **settings: Any) -> Any:
    settings = OWN | {"closing_epochs": 2} | settings
    if settings.get("fedharm.align") == "spectral":  # Phi and posteriors have no blocks
        del settings["fedharm.blocks"], settings["fedharm.slots"]
    return federate("fedharm", name, **settings)


def told(done: Any, round: int, client: str, parts: int = 2) -> list[Tensor]:
    return unpack_all(done.sent[round, client]["sent"], parts)


def target(done: Any, round: int, client: str, parts: int = 2) -> list[Tensor]:
    return unpack_all(done.received[round, client]["target"], parts)


def test_exchange_of_descriptors(federate: Federate) -> None:
    done = harm(federate, rounds=3)
    assert done.failures == []
    assert {key: set(arrays) for key, arrays in done.received.items() if key[1] == "1"} == {
        (1, "1"): set(),
        **{(round, "1"): {"target"} for round in (2, 3, 4)},
    }
    assert {key: set(arrays) for key, arrays in done.sent.items() if key[1] == "1"} == {
        **{(round, "1"): {"sent"} for round in (1, 2, 3)},
        (4, "1"): set(),  # the closing round, after which there is nothing to make a target for
    }
    for round in (2, 4):
        mean = target_of("cosine", [told(done, round - 1, client) for client in "012"], generator=torch.Generator())
        for client in "012":
            for mine, expected in zip(target(done, round, client), mean, strict=True):
                assert mine.shape == (40, expected.shape[1])
                torch.testing.assert_close(mine, expected)


def test_descriptors_after_training(federate: Federate) -> None:
    done = harm(federate, rounds=1, closing_epochs=1, learning_rate=1e-12)
    public = client_setup.public_dataset(done.config)
    assert public is not None
    transform = client_setup.dataset_of(done.config).transform
    for client in "01":
        model = done.network(client)
        names = blocks(model, transform(public.inputs[:2]), chosen=BLOCKS, count=2)
        values, _ = describe(model, names, public.inputs, public.labels, SLOTS, transform)
        for mine, expected in zip(told(done, 1, client), values, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_order_of_phases(federate: Federate, phases: Any) -> None:
    settings = {"clients": 1, "rounds": 2, "fedharm.alpha": 0.25, "fedharm.public-steps": 3}
    done = harm(federate, **settings)
    trained = [phase for phase, _, _ in phases]
    shared = [phase.examples is not None for phase in trained]
    assert shared == [False, True, False, True]
    assert [phase.task_weight for phase in trained] == [1, 0.25, 1, 0.25]
    assert [(phase.epochs, phase.steps) for phase in trained if phase.examples is not None] == [(2, 3), (2, 3)]
    assert all(phase.continues for phase in trained)
    public = client_setup.public_dataset(done.config)
    assert public is not None
    assert torch.equal(trained[1].examples.labels, public.labels)
    # One cycle over the run, in the paper's order: private, shared, private, shared.
    rates = [(phase.optimisation.schedule(0.0), phase.optimisation.schedule(1.0)) for phase in trained]
    for (_, end), (start, _) in pairwise(rates):
        assert start == pytest.approx(end)
    assert rates[0][0] == pytest.approx(0.01 / 25)
    assert rates[-1][1] == pytest.approx(0.01 / 100)
    work = [row["work"] for row in done.rows]
    assert [each["steps"] - each["private_steps"] for each in work] == [0, 0, 3, 3, 0]


@pytest.mark.parametrize("divide", [False, True])
def test_loss_on_the_public_dataset(divide: bool, federate: Federate) -> None:
    """Alpha CE + (1 - alpha) (1 - cosine), of networks that stand still and all images in one batch."""
    settings = {"fedharm.divide": divide, "fedharm.alpha": 0.2, "batch_size": 40}
    done = harm(federate, rounds=1, closing_epochs=1, learning_rate=1e-12, **settings)
    public = client_setup.public_dataset(done.config)
    assert public is not None
    images, losses, cosines = client_setup.dataset_of(done.config).transform(public.inputs), [], []
    for client in "012":
        pairs = list(zip(told(done, 1, client), target(done, 2, client), strict=True))
        pairs = [(own, mean[:, : own.shape[1]]) for own, mean in pairs]
        pairs = [(torch.cat([own for own, _ in pairs], 1), torch.cat([mean for _, mean in pairs], 1))]
        cosines.append(torch.stack([F.cosine_similarity(own, mean).mean() for own, mean in pairs]).mean())
        entropy = F.cross_entropy(done.network(client)(images), public.labels).detach()
        losses.append((0.2 * entropy + 0.8 * (1 - cosines[-1])) / (0.2 if divide else 1))
    closing = done.rows[2]
    assert closing["metrics"]["alignment"] == pytest.approx(float(torch.stack(cosines).mean()), abs=1e-5)
    assert closing["train_loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)


@pytest.mark.parametrize("method", ["fedharm", "fedmd"])
def test_no_augmentation_of_the_public_dataset(method: str, federate: Federate) -> None:
    """One client, whose network stands still, is as far from its own target as rounding, although it augments."""
    images, labels = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    augmented: list[Tensor] = []

    def augment(inputs: Tensor) -> Tensor:
        augmented.append(inputs)
        return inputs.flip(-1)

    def data() -> Any:
        parts = {"train": slice(0, 30), "test": slice(30, 40), "public": slice(40, 60)}
        return {part: (images[rows], labels[rows]) for part, rows in parts.items()} | {"augment": augment}

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    own = {
        "fedharm": {"fedharm.blocks": "0,1", "fedharm.slots": "24,12", "closing_epochs": 1},
        "fedmd": {"fedmd.public-epochs": 0, "fedmd.private-epochs": 0},
    }[method]
    done = federate(method, model=model, data=data, clients=1, public_samples=0, learning_rate=1e-12, **own)
    metrics = done.rows[2]["metrics"]
    assert metrics.get("distance", 1 - metrics.get("alignment", 1)) == pytest.approx(0, abs=1e-6)
    assert torch.cat(augmented).unique(dim=0).shape == (30, 1, 8, 8), "training images are, and no others"


def test_descriptors_of_absent_clients(federate: Federate) -> None:
    done = harm(federate, rounds=4, fraction_train=0.67)
    absent = [(row["round"], client) for row in done.rows[2:4] for client in "012" if client not in row["participants"]]
    round, client = absent[0]
    last = max(number for number in range(1, round) if (number, client) in done.sent)
    newest = {peer: told(done, round, peer) for peer in "012" if (round, peer) in done.sent}
    newest[client] = told(done, last, client)
    receiver = next(peer for peer in "012" if (round + 1, peer) in done.received)
    expected = target_of("cosine", [newest[peer] for peer in "012"], generator=torch.Generator())
    for mine, mean in zip(target(done, round + 1, receiver), expected, strict=True):
        torch.testing.assert_close(mine, mean)


def test_no_labels(federate: Federate, phases: Any) -> None:
    done = harm(federate, **{"fedharm.alpha": 0.0})
    assert done.failures == []
    shared = [phase for phase, _, _ in phases if phase.examples is not None]
    assert {phase.task_weight for phase in shared} == {0}
    assert not any(phase.examples.labels.any() for phase in shared)
    assert done.state.public == client_setup.public_dataset(done.config).unlabelled.digest


def test_fewer_slots_and_batch_norm(federate: Federate, caplog: pytest.LogCaptureFixture) -> None:
    settings = {
        **{"architectures": "small-resnet-a,small-mobilenet-a", "public_samples": 40, "learning_rate": 0.01},
        **{"clients": 2, "batch_norm": "re-estimate", "fedharm.slots": "16,32,64,64", "closing_epochs": 1},
    }
    done = federate("fedharm", **settings, rounds=2)
    assert done.failures == []
    widths = {client: [part.shape[1] for part in told(done, 1, client, 4)] for client in "01"}
    assert widths["0"] == [16, 32, 64, 24]  # one pixel by 24 channels
    widest = [max(pair) for pair in zip(*widths.values(), strict=True)]
    assert [part.shape[1] for part in target(done, 2, "0", 4)] == widest
    with torch.no_grad():
        model, part = done.network("0"), client_setup.public_dataset(done.config)
        assert part is not None
        seen: list[Tensor] = []
        first = next(m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d))
        handle = first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(client_setup.dataset_of(done.config).transform(part.inputs))
        handle.remove()
    torch.testing.assert_close(first.running_mean, seen[0].mean((0, 2, 3)), rtol=1e-3, atol=1e-4)


def test_bytes_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.randn(5000, k) for k in (128, 256, 512, 1024)]
    monkeypatch.undo()  # as they travel, in float16
    assert sum(array.nbytes for array in pack_all(parts).values()) / 1e6 <= 19.3
