"""Networks of one's own in float64, with every method: what they are compared with takes their dtype."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedhet.config import client_setup, configuration
from fedhet.config.user_functions import UserFunctions
from fedhet.engines.running import run_locally
from fedhet.methods import registry
from fedhet.testing import Case, Run
from fedhet.utils.files import read_tensors
from tests.small import SMALL

HARM: dict[str, Any] = {
    **{"learning-rate": 0.02, "architectures": "mlp-30"},
    **{"fedharm.blocks": "body.1,body.2,head", "fedharm.slots": "30,30,10"},
}
OF_METHOD: dict[str, dict[str, Any]] = {
    "fedharm": HARM,
    "fedhenn": {"fedhenn.eta0": 1.0, "fedhenn.target": "kernel", "fedhenn.rad-batch": 32},
    "fedma": {"rounds": 0},
    "feddf": {"feddf.server-steps": 30, "feddf.teach": True, "rounds": 5},
    "fedmd": {"optimizer": "sgd", "fedmd.public-epochs": 1, "fedmd.private-epochs": 0, "fedmd.public-batch": 32},
    "depthfl": SMALL["depthfl"] | {"rounds": 6},
    "inclusivefl": SMALL["inclusivefl"] | {"rounds": 6},
    "fedgen": {"fedgen.width": 32, "rounds": 5},
    "fedgh": {"fedgh.width": 32, "fedgh.server-learning-rate": 0.1, "rounds": 5},
    "fedproto": {"fedproto.width": 32},
    "fedtgp": {"fedtgp.width": 32, "fedtgp.weight": 1.0, "rounds": 5},
    "fedrep": {"rounds": 5},
    "fedrolex": {"rounds": 6, "fedrolex.widths": "1, 0.75"},
    "fjord": {"rounds": 6, "fjord.widths": "1, 0.5"},
    "fedkd": {"rounds": 6, "learning-rate": 0.1, "fedkd.shared-model": "mlp-20"},
    "fml": {"rounds": 6, "learning-rate": 0.1, "fml.shared-model": "mlp-20"},
    "flha-distillation": {"learning-rate": 0.1, "rounds": 6},
    "flha-ghn": {"optimizer": "adam", "learning-rate": 0.01, "rounds": 2},
    "lora": {"rounds": 5, "lora.train-head": True},
    "pfedhn": {"rounds": 20, "pfedhn.server-learning-rate": 0.03},
}
CASES = {name: OF_METHOD.get(name, {}) for name in registry.own_methods()} | {
    "fedhenn rbf": {"fedhenn.eta0": 1.0, "fedhenn.kernel": "rbf", "fedhenn.rad-batch": 32},
    "fedhenn spectral": {"fedhenn.eta0": 1.0, "fedhenn.target": "spectral"},
    "fedharm cka": HARM | {"fedharm.align": "cka", "fedharm.alpha": 0.0},
    "fedharm spectral": HARM | {"fedharm.align": "spectral", "fedharm.alpha": 0.0},
}

pytestmark = pytest.mark.usefixtures("no_report")


def double(client: client_setup.ClientInfo) -> nn.Module:
    """The configured architecture in float64."""
    return client_setup.model_of(client).double()


def ran(folder: Path, case: str, **keys: Any) -> Run:
    method, *_ = case.split()
    common = {"architectures": "mlp-30", "samples-per-client": 300, "momentum": 0.9, "learning-rate": 0.05}
    common |= {"local-epochs": 2, "rounds": 2}
    settings = Case.of(method, {**common, **CASES[case]}).settings(**keys)
    config = configuration.resolve(settings).replace(chosen=frozenset())  # the models are the configured ones
    run_locally(config, folder, functions=UserFunctions(model=double))
    return Run(folder)


QUICK = ("fedhenn", "fedharm")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_float64_networks(case: str, tmp_path: Path) -> None:
    done = ran(tmp_path / "run", case)
    assert done.failures == []
    assert done.summary["personal_accuracy"]["weighted"] > 0.5
    saved = [read_tensors(path) or {} for path in (done.folder / "models").glob("[0-9]*.safetensors")]
    own = {each.dtype for tensors in saved for name, each in tensors.items() if not name.startswith("shared.")}
    assert own <= {torch.float64}, "only a shared network beside it is float32"


@pytest.mark.parametrize("method", ["ensemble"])
def test_float64_on_the_common_test_set(method: str, tmp_path: Path) -> None:
    done = ran(tmp_path / "run", method, test_on="both", rounds=1)
    assert done.rows[-1]["common"]["received"]["accuracy"] > 0.3
