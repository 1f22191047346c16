"""Clients side by side compute what they compute one after the other, up to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedhet import config as configuration
from fedhet import population
from fedhet.engines.local import run_locally
from fedhet.files import read_tensors
from fedhet.given import Given
from fedhet.learning import cohort
from fedhet.learning.joint import together
from fedhet.results import recorder

SETTINGS: dict[str, Any] = {
    **{"dataset": "digits", "clients": 4, "rounds": 2, "samples-per-client": 24, "shared-samples": 64},
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
    "fedma": {"architectures": "mlp-100", "rounds": 1},
    "fd": {"architectures": "mlp-100,cnn-2-2"},
    "lg-fedavg": {"architectures": "mlp-100,mlp-100"},
    "fedmd": {"architectures": "mlp-100,cnn-2-2", "optimizer": "sgd", "fedmd.scores-dtype": "float32"},
    "fedhenn spectral": {"architectures": "mlp-100,cnn-2-2", "fedhenn.target": "spectral"},
    "fedavg re-estimate": {"architectures": "resnet8", "batch-norm": "re-estimate"},
}


def double(client: population.ClientInfo) -> nn.Module:
    """The configured architecture in float64."""
    return population.model_of(client).double()


def saved(folder: Path) -> dict[str, Tensor]:
    """Every tensor that a run leaves: of the server, of clients, and personal models."""
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.relative_to(folder)} {k}": v for file in files for k, v in (read_tensors(file) or {}).items()}


@pytest.mark.parametrize("case", METHODS)
def test_side_by_side_as_one_after_the_other(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "write_report", lambda folder: None)
    joint: list[int] = []

    def spying(passes: Any, streams: Any) -> Any:
        joint.append(len(passes))
        return together(passes, streams)

    monkeypatch.setattr(cohort, "together", spying)
    for own, tolerance in ((Given(), 1e-5), (Given(model=double), 1e-12)):
        ran = {}
        for setting in ("off", "4"):
            config = configuration.resolve({**SETTINGS, "method": case.split()[0], **METHODS[case], "cohort": setting})
            folder = tmp_path / f"{setting} {tolerance}"
            run_locally(config, folder, own=own)
            ran[setting] = saved(folder)
        assert max(joint) >= 2
        assert ran["off"].keys() == ran["4"].keys()
        for name, tensor in ran["off"].items():
            torch.testing.assert_close(ran["4"][name], tensor, rtol=tolerance, atol=tolerance)
