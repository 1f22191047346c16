"""Clients side by side compute what they compute one after the other, up to rounding.

In float64, in which rounding is not seen: an absolute error has a sign for its gradient, BatchNorm divides by what may
be next to nothing, and a matching of units may be a tie, so that a few rounds of float32 differ by more than any
tolerance that could tell, on one machine or another.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedhet import config as configuration
from fedhet import population
from fedhet.engines.local import run_locally
from fedhet.files import read_tensors
from fedhet.learning.batching import clients
from fedhet.learning.batching.joint import together
from fedhet.results.history import read_history

pytestmark = pytest.mark.usefixtures("no_report")

SETTINGS: dict[str, Any] = {
    **{"dataset": "digits", "clients": 4, "rounds": 2, "samples-per-client": 24, "public-samples": 64},
    **{"partition": "dirichlet", "local-epochs": 1, "batch-size": 8, "momentum": 0.5, "closing-epochs": 0},
    **{"fraction-train": 1.0, "workers": 1, "learning-rate": 0.05, "seed": 3, "architectures": "mlp-100"},
}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"architectures": "cnn-2-2", "weight-decay": 0.01},
    "fedprox": {"fedprox.mu": 0.1},
    "fedrep": {"local-epochs": 2},
    "fedproto": {"architectures": "mlp-100,cnn-2-2", "fedproto.width": 16},
    "fedhenn": {"architectures": "mlp-100,cnn-2-2", "fedhenn.rad-batch": 32},
    "local": {"architectures": "mlp-100,cnn-2-2"},
    "fedma": {"architectures": "mlp-100", "rounds": 0},
    "fd": {"architectures": "mlp-100,cnn-2-2"},
    "lg-fedavg": {"architectures": "mlp-100,mlp-100"},
    "fedmd": {
        **{"architectures": "mlp-100,cnn-2-2", "optimizer": "sgd"},
        **{"fedmd.public-epochs": 1, "fedmd.private-epochs": 1},
    },
    "fedhenn spectral": {"architectures": "mlp-100,cnn-2-2", "fedhenn.target": "spectral"},
    "fedavg re-estimate": {"architectures": "resnet8", "batch-norm": "re-estimate"},
}


def saved(folder: Path) -> dict[str, Tensor]:
    """Every tensor that a run leaves: of the server, of clients, and personal models."""
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.relative_to(folder)} {k}": v for file in files for k, v in (read_tensors(file) or {}).items()}


@pytest.mark.parametrize("case", METHODS)
def test_side_by_side_as_one_after_the_other(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joint: list[int] = []

    def spying(passes: Any, streams: Any) -> Any:
        joint.append(len(passes))
        return together(passes, streams)

    configured = population.model_of

    def double(client: population.ClientInfo) -> nn.Module:
        return configured(client).double()

    monkeypatch.setattr(clients, "together", spying)
    monkeypatch.setattr(population, "model_of", double)
    ran = {}
    for setting in ("off", "4"):
        config = configuration.resolve(
            {**SETTINGS, "method": case.split()[0], **METHODS[case], "client-batching": setting}
        )
        run_locally(config, tmp_path / setting)
        ran[setting] = saved(tmp_path / setting)
        assert [row["failures"] for row in read_history(tmp_path / setting) if row["failures"]] == []
        assert max(joint, default=0) == {"off": 0, "4": 4 // len({*config.architectures.split(",")})}[setting]
    assert any(tensor.dtype == torch.float64 for tensor in ran["off"].values())
    torch.testing.assert_close(ran["4"], ran["off"], rtol=1e-9, atol=1e-9)
