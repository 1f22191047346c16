"""The controls of the studies in run_configs: each is run, and controls what its name says."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhet import models
from fedhet.algorithms.alignment import linear_cka, targets
from fedhet.algorithms.alignment.packing import unpack_all
from fedhet.algorithms.graphs import layer_graph
from fedhet.config import client_setup, configuration
from fedhet.models.representation import Representation
from fedhet.training import read

FROZEN = 1e-12
"""A learning rate at which nobody learns, so that a network stays at no distance from itself."""


def control(method: str, name: str) -> str:
    return f"{configuration.run_configs() / method / 'controls.py'}:{name}"


# ---- FedHeNN

KERNEL = {"fedhenn.target": "kernel", "fedhenn.eta0": 0.3, "fedhenn.probe": 0, "fedhenn.schedule": "constant"}
SPECTRAL = {**KERNEL, "fedhenn.target": "spectral"}


def rad_of(done: Any, round: int, client: str = "0") -> Tensor:
    public = client_setup.public_dataset(done.config)
    assert public is not None
    rows = torch.from_numpy(np.array(done.received[round, client]["rad"]["rows"])).long()
    inputs: Tensor = public.inputs[rows]
    return inputs


def test_kernel_of_the_inputs(federate: Any) -> None:
    settings = {"public_samples": 96, "rounds": 4, "fedhenn.probe": 0, "fedhenn.eta0": 3.0}
    done = federate(control("fedhenn", "inputs"), "on", **settings)
    off = federate("local", "off", rounds=4, public_samples=96)
    assert set(done.received[2, "0"]) == {"rad"}
    assert not any(arrays for arrays in done.sent.values())
    transform, rad = client_setup.dataset_of(done.config).transform, rad_of(done, 4)

    def alike(run: Any) -> float:
        features = read(run.network("0"), rad, transform, until=Representation(run.network("0")))
        return float(linear_cka(features, transform(rad).flatten(1)))

    assert alike(done) > alike(off) + 0.02
    assert done.rows[4]["metrics"]["alignment"] > done.rows[2]["metrics"]["alignment"]


@pytest.mark.parametrize("target", [KERNEL, SPECTRAL], ids=["kernel", "spectral"])
def test_own_target(target: dict[str, Any], federate: Any) -> None:
    settings = {"public_samples": 96, "rounds": 2, "learning_rate": FROZEN, **target, "fedhenn.rad-batch": 0}
    done = federate(control("fedhenn", "own"), **settings)
    assert set(done.received[2, "0"]) == {"rad"}
    assert not any(arrays for arrays in done.sent.values())
    alignment = done.rows[2]["metrics"]["alignment"]
    assert alignment == pytest.approx(1, abs=1e-4) if target is KERNEL else 0 < alignment < 1


# ---- FedMA


def test_pfnm_without_matching(federate: Any) -> None:
    settings = {"rounds": 1, "architectures": "mlp", "local_epochs": 8, "shared_init": False}
    matched = federate("pfnm", "matched", **settings)
    plain = federate(control("fedma", "pfnm_identity"), "plain", **settings)
    assert plain.state.model["head.weight"].shape == (10, 200) != matched.state.model["head.weight"].shape
    accuracy = [done.summary["personal_accuracy"]["weighted"] for done in (plain, matched)]
    assert accuracy[0] < accuracy[1]


# ---- FedHARM

HARM = {
    **{"architectures": "cnn-1-1,mlp", "public_samples": 40, "closing_epochs": 2, "fedharm.alpha": 0.5},
    **{"fedharm.blocks": "body.1,body.2; body.2,body.4", "fedharm.slots": "24,12"},
}
SPECTRAL_HARM = {"architectures": "cnn-1-1,mlp", "public_samples": 40, "closing_epochs": 2, "fedharm.align": "spectral"}


def target_of(done: Any, client: str, parts: int) -> list[Tensor]:
    return unpack_all(done.received[2, client]["target"], parts)


@pytest.mark.parametrize("align", ["cosine", "cka"])
def test_own_descriptors(align: str, federate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "ERROR", 0.0)
    settings = {**HARM, "fedharm.align": align, "learning_rate": FROZEN, "batch_size": 40}
    done = federate(control("fedharm", "own"), **settings)
    assert not any(done.received.values())
    assert not any(done.sent.values())
    assert done.rows[2]["metrics"]["alignment"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("align", "parts"), [("cosine", 2), ("spectral", 1), ("cka", 2)])
def test_shuffled_target(align: str, parts: int, federate: Any) -> None:
    settings = (SPECTRAL_HARM if align == "spectral" else {**HARM, "fedharm.align": align}) | {"learning_rate": FROZEN}
    right = federate("fedharm", "right", **settings)
    wrong = federate(control("fedharm", "shuffled"), "wrong", **settings)
    for one, other in zip(target_of(right, "0", parts), target_of(wrong, "0", parts), strict=True):
        assert not torch.equal(one, other)
        assert torch.cdist(one.double(), other.double()).amin(1).max() < 1e-3  # every row is there, elsewhere
    assert wrong.rows[2]["metrics"]["alignment"] < right.rows[2]["metrics"]["alignment"]


# ---- FLHA-GHN


@pytest.mark.parametrize("name", ["none", "shuffled"])
def test_shuffled_and_no_messages(name: str, federate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedhet.algorithms.hypernets.hypernetwork import GraphHypernetwork

    seen, read_graphs = [], GraphHypernetwork.read

    def spying(made: Any, *graphs: Any) -> Any:
        seen.append(read_graphs(made, *graphs))
        return seen[-1]

    monkeypatch.setattr(GraphHypernetwork, "read", spying)
    networks = {"architectures": "flha-small-1,flha-small-cnn-4", "clients": 2, "rounds": 1}
    done = federate(control("flha-ghn", name), **networks)
    assert done.failures == []
    models = [client_setup.model_of(done.info(client)) for client in "01"]
    own = [[list(edge) for edge in layer_graph(model, torch.zeros(2, 1, 8, 8)).edges] for model in models]
    assert len(own[0]) != len(own[1])
    found = [reading.tensors["edges"] for reading in seen]
    if name == "none":
        assert not any(edges.numel() for edges in found)
        return
    assert {edges.shape[1] for edges in found} == {len(edges) for edges in own}
    assert all(edges.T.tolist() not in own for edges in found)


# ---- HeteroFL


DEEP = {"architectures": "cnn-3-2", "depthfl.depths": "2,1", "depthfl.blocks": "body.5"}


@pytest.mark.parametrize(
    ("folder", "name", "keys"),
    [
        ("heterofl", "large_only", {"heterofl.widths": "1,0.5"}),
        ("depthfl", "exits_large_only", DEEP),
        ("depthfl", "large_only", {key.replace("depthfl", "inclusivefl"): value for key, value in DEEP.items()}),
    ],
)
def test_large_clients_only(folder: str, name: str, keys: Mapping[str, Any], federate: Any) -> None:
    """Of three clients the second has a part: the model is the mean of the others, also in a second round."""
    done = federate(control(folder, name), rounds=2, **keys)
    assert done.failures == []
    sent = {client: done.sent[2, client]["model"] for client in "012"}
    share = done.examples["0"] / (done.examples["0"] + done.examples["2"])
    for key, array in done.state.model.items():
        expected = share * np.asarray(sent["0"][key]) + (1 - share) * np.asarray(sent["2"][key])
        np.testing.assert_allclose(array, expected, atol=1e-6)
    assert any(sent["1"].get(key, np.empty(0)).shape != array.shape for key, array in done.state.model.items())


# ---- FML


def test_shared_network_alone(federate: Any) -> None:
    settings = {"rounds": 2, "architectures": "cnn-1-1,cnn", "fml.shared-model": "mlp"}
    done = federate(control("fml", "shared_alone"), **settings)
    assert done.failures == []
    dataset = client_setup.dataset_of(done.config)
    network = models.build("mlp", dataset.input_shape, dataset.classes)
    network.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in done.state.model.items()})
    right = total = 0
    for client in "012":
        test = client_setup.data_of(done.info(client)).test
        scores = read(network, test.inputs, dataset.transform)
        right, total = right + int((scores.argmax(1) == test.labels).sum()), total + len(test)
    assert done.summary["personal_accuracy"]["weighted"] == pytest.approx(right / total, abs=1e-6)
    own = client_setup.model_of(done.info("0")).state_dict()
    assert {*done.state.model} == {*network.state_dict()} != {*own}
