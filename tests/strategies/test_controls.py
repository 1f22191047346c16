"""The controls of the studies in run_configs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedhet.config import configuration
from fedhet.setup import client_setup


def control(method: str, name: str) -> str:
    return f"{configuration.run_configs() / method / 'controls.py'}:{name}"


KERNEL = {"fedhenn.target": "kernel", "fedhenn.eta0": 0.3, "fedhenn.schedule": "constant"}
HARM = {
    **{"architectures": "cnn-1-1,mlp", "public_samples": 40, "closing_epochs": 2, "fedharm.alpha": 0.5},
    **{"fedharm.blocks": "body.1,body.2; body.2,body.4", "fedharm.slots": "24,12"},
}
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


RUNS: dict[tuple[str, str], dict[str, Any]] = {
    **{("fedhenn", name): KERNEL | {"public_samples": 96} for name in ("own", "inputs", "hostile", "frobenius")},
    ("fedma", "pfnm_identity"): {"rounds": 1, "architectures": "mlp", "shared_init": False},
    **{("fedma", name): {"rounds": 0, "architectures": "mlp"} for name in ("identity", "random")},
    **{("fedharm", name): HARM for name in ("own", "shuffled")},
    **{("flha-ghn", name): {"architectures": "flha-small-1,flha-small-cnn-4"} for name in ("none", "shuffled")},
    ("fml", "shared_alone"): {"architectures": "cnn-1-1,cnn", "fml.shared-model": "mlp"},
}
"""The other controls, and settings of a small run."""


@pytest.mark.parametrize(("folder", "name"), RUNS)
def test_a_run_of_a_control(folder: str, name: str, federate: Any) -> None:
    done = federate(control(folder, name), **RUNS[folder, name])
    assert done.failures == []
    assert done.summary["status"] == "completed"
    assert done.summary["personal_accuracy"]["weighted"] > 0
    if name == "own":  # each client aligns with itself
        assert not any(done.sent.values())


def test_public_examples_in_local_training(federate):
    mixed = federate("local", public_samples=64, **{"local.public": "mixed"})
    alone = federate("local", "alone", public_samples=64)
    assert mixed.failures == []
    steps = [row["work"]["steps"] for row in (mixed.rows[1], alone.rows[1])]
    assert steps == [3 * 2 * (32 + 64) // 16, 3 * 2 * 32 // 16]
    public = client_setup.public_dataset(mixed.config)
    right = [
        (done.network("0")(client_setup.dataset_of(done.config).transform(public.inputs)).argmax(1) == public.labels)
        .float()
        .mean()
        for done in (mixed, alone)
    ]
    assert right[0] > right[1] + 0.05
