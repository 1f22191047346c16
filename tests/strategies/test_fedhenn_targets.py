"""FedHeNN's targets: the presets' own images, the kernel, and the spectral target."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhet import make_client_app
from fedhet.algorithms.alignment.cka import info_nce
from fedhet.algorithms.alignment.targets import pack, unpack
from fedhet.client_apps.families.scores import public_examples
from fedhet.client_apps.fedhenn import FedHeNN
from fedhet.config.configuration import resolve
from fedhet.engines.running import run_locally
from fedhet.messages import Payload
from fedhet.models.representation import Representation
from fedhet.results.history import read_history
from fedhet.setup import client_setup
from fedhet.training import read

OWN = {"fedhenn.target": "kernel", "fedhenn.eta0": 0.3, "fedhenn.schedule": "constant"}
SPECTRAL = {**OWN, "fedhenn.target": "spectral"}
PRESETS = [
    *("fedhenn/digits", "fedhenn/sentiment140_heterogeneous", "fedhenn/cifar10_figure1"),
    pytest.param("fedhenn/cifar10_2cls_homogeneous_rbf", marks=pytest.mark.slow),
    pytest.param("fedhenn/cifar10_2cls_homogeneous_procrustes", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("preset", PRESETS)
def test_frozen_network_has_distance_0(preset: str, stand_ins: str, tmp_path: Path) -> None:
    config = resolve({"preset": preset})
    frozen = {
        **{"clients": 1, "fraction-train": 1.0, "rounds": 2, "local-epochs": 1, "closing-epochs": 0},
        **{"samples-per-client": 40, "learning-rate": 1e-12, "fedhenn.rad-size": 64},
        **{"fedhenn.target": "kernel"},
        **({} if config.dataset == "digits" else {"data": stand_ins}),
        **({} if config.options.kernel == "procrustes" else {"fedhenn.rad-batch": 32}),
    }
    changed = resolve({"preset": preset, **frozen})
    run_locally(changed, tmp_path, app=make_client_app())
    rows = read_history(tmp_path)
    assert not any(row["failures"] for row in rows)
    assert rows[2]["metrics"]["alignment"] == pytest.approx(1, abs=1e-3)


def test_augmented_rad(stand_ins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[Tensor]] = {}

    def spying(client: Any, arrays: Any, round: int) -> Any:
        rad = public_examples(client, arrays, round)
        rows = torch.from_numpy(np.array(arrays["rows"])).long()
        seen.setdefault(round, []).append(rad)
        assert (rad != client.public.inputs[rows]).float().mean() > 0.2
        return rad

    monkeypatch.setattr("fedhet.client_apps.fedhenn.public_examples", spying)
    cifar = {"dataset": "cifar10-fedhenn", "data": stand_ins, "augment": True, "fedhenn.rad-source": "train-union"}
    small = {"clients": 2, "rounds": 3, "samples-per-client": 16, "closing-epochs": 0, "architectures": "mlp"}
    config = resolve({"method": "fedhenn", "local-epochs": 1, "fraction-train": 1.0, **small, **cifar, **OWN})
    run_locally(config, tmp_path, app=make_client_app())
    # Two clients each, at the end of a round and in the next.
    assert {round: len(inputs) for round, inputs in seen.items()} == {2: 4, 3: 4}
    for inputs in seen.values():
        assert all(torch.equal(inputs[0], other) for other in inputs[1:])


def _rad(done: Any, round: int, client: str = "0") -> Tensor:
    return _rad_of(done, done.received[round, client]["rad"])


def _rad_of(done: Any, arrays: Any) -> Tensor:
    public = client_setup.public_dataset(done.config)
    assert public is not None
    inputs: Tensor = public.inputs[torch.from_numpy(np.array(arrays["rows"])).long()]
    return inputs


@pytest.mark.parametrize(
    ("target", "eta0", "schedule"),
    [("spectral", 3.0, "constant"), ("kernel", 0.001, "sqrt"), ("contrast", 1.0, "constant")],
)
def test_defaults_by_target(target: str, eta0: float, schedule: str) -> None:
    own = resolve({"method": "fedhenn", "fedhenn.target": target}).options
    assert (own.eta0, own.schedule) == (eta0, schedule)
    chosen = resolve({"method": "fedhenn", "fedhenn.target": target, "fedhenn.eta0": 0.5, "fedhenn.schedule": "linear"})
    assert (chosen.options.eta0, chosen.options.schedule) == (0.5, "linear")
    assert resolve(chosen.flat()).flat() == chosen.flat()


# ---- contrast


def test_info_nce_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    own, one, other = (torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(3))
    peers = [peer / peer.norm(dim=1, keepdim=True) for peer in (one, other)]
    found = own.clone().requires_grad_()
    expected = own.clone().requires_grad_()
    value = info_nce(found, torch.cat(peers, 1), temperature=0.2)
    value.backward()
    losses = []
    for peer in peers:
        for k in range(5):
            z = expected[k] / expected[k].square().sum().sqrt()
            similar = [(z @ peer[place] / 0.2).exp() for place in range(5)]
            losses.append(-(similar[k] / sum(similar)).log())
    mean = torch.stack(losses).mean()
    mean.backward()
    torch.testing.assert_close(value, mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)


def test_contrast_exchange(federate: Callable[..., Any]) -> None:
    own = {"fedhenn.target": "contrast", "fedhenn.eta0": 0.3}
    done = federate("fedhenn", architectures="mlp-20", public_samples=40, rounds=3, fraction_train=0.6, seed=7, **own)
    assert done.failures == []
    sent = {client: unpack(done.sent[2, client]["features"]) for client in "012" if (2, client) in done.sent}
    assert len(sent) == 2
    for client, values in sent.items():
        rad = _rad_of(done, done.received[2, client]["next-rad"])
        transform = client_setup.dataset_of(done.config).transform
        model = done.network(client, done.kept(client, 2))
        phi = read(model, rad, transform, until=Representation(model))
        torch.testing.assert_close(values, phi / phi.norm(dim=1, keepdim=True), rtol=0, atol=1e-3)
    present = [client for client in "012" if (3, client) in done.received]
    for client in present:
        peers = torch.cat([values for name, values in sent.items() if name != client], 1)
        torch.testing.assert_close(unpack(done.received[3, client]["target"]), peers, rtol=0, atol=1e-3)
    assert {len(unpack(done.received[3, client]["target"])[0]) for client in present} == {20, 40}


def test_contrast_needs_one_width(federate: Callable[..., Any]) -> None:
    own = {"fedhenn.target": "contrast", "rounds": 1}
    done = federate("fedhenn", architectures="mlp-20,mlp-30", public_samples=40, **own)
    ((_, client, reason),) = {failure for failure in done.failures if failure[0] == 0}
    assert client == "1"
    assert "representation width is 30, and the other clients have 20: set fedhenn.width" in reason
    assert (
        federate("fedhenn", "one", architectures="mlp-20,mlp-30", public_samples=40, fedhenn__width=8, **own).failures
        == []
    )


# ---- spectral


def test_spectral_exchange(federate: Callable[..., Any]) -> None:
    settings = {"architectures": "mlp,cnn", "public_samples": 96, "rounds": 3}
    done = federate("fedhenn", **settings, **SPECTRAL)
    assert done.failures == []
    for client in "012":
        assert set(done.sent[2, client]) == {"posteriors"}
        assert unpack(done.sent[2, client]["posteriors"]).shape == (96, 10)
        assert done.sent[2, client]["posteriors"]["values"].dtype == np.float16
    rows = unpack(done.received[3, "0"]["target"])
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(96), rtol=0, atol=2e-3)
    assert done.rows[3]["metrics"]["alignment"] > done.rows[2]["metrics"]["alignment"]
    told = unpack(done.sent[2, "1"]["posteriors"])
    assert told.sum(1).sub(1).abs().max() < 5e-3


def test_posteriors_after_training(federate: Callable[..., Any]) -> None:
    done = federate("fedhenn", public_samples=96, rounds=1, closing_epochs=1, learning_rate=1e-12, **SPECTRAL)
    expected = read(done.network("0"), _rad(done, 2), client_setup.dataset_of(done.config).transform).softmax(1)
    torch.testing.assert_close(unpack(done.sent[1, "0"]["posteriors"]), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("closing", [0, 1])
@pytest.mark.parametrize("own", [OWN, SPECTRAL], ids=["kernel", "spectral"])
def test_nothing_sent_in_the_last_round(own: dict[str, Any], closing: int, federate: Callable[..., Any]) -> None:
    done = federate("fedhenn", public_samples=96, rounds=2, closing_epochs=closing, **own)
    asked = [round for round in (1, 2, 3) if "next-rad" in done.received.get((round, "0"), {})]
    assert asked == [1, 2][: 1 + closing]
    assert [round for round in (1, 2, 3) if done.sent.get((round, "0"))] == asked


@pytest.mark.parametrize(("compiles", "width"), [(False, 5), ("auto", 5), (True, 8)])
def test_only_where_steps_are_compiled_targets_get_columns_of_zeros(compiles: bool | str, width: int) -> None:
    config = resolve({"method": "fedhenn", "rounds": 9, "fedhenn.target": "kernel", "compile": compiles})
    client: Any = SimpleNamespace(config=config, to_device=lambda tensor: tensor)
    factor = torch.randn(20, 5)
    payload = Payload({"target": pack(factor)})
    target = FedHeNN(client).target(payload, torch.empty(0))
    assert target.shape == (20, width)
    torch.testing.assert_close(target @ target.T, factor @ factor.T, rtol=0, atol=0.05)
