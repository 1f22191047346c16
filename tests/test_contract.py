"""Every method keeps the contract. A method gets all of it by registering."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fedhet
from fedhet.methods import registry
from fedhet.testing import MIXED, Case, MethodContract

from .contract.further import Contract
from .small import SMALL

# What a method needs beside the settings of all to be run in a few seconds.
OF_METHOD: dict[str, dict[str, Any]] = SMALL | {
    "fedharm": {
        "learning-rate": 0.01,
        "fedharm.blocks": "body.2,body.4,head; body.1,body.2,head",
        "fedharm.slots": "20,20,10",
    },
    "fedhenn": {"fedhenn.eta0": 1.0},
    "feddf": {"feddf.server-steps": 30, "feddf.teach": True},
    "fedmd": {"fedmd.public-epochs": 2, "fedmd.private-epochs": 0, "fedmd.public-batch": 32},
    "fedgen": {"fedgen.server-steps": 2},
    "fedgh": {"fedgh.width": 32},
    "fedproto": {"fedproto.width": 32},
    "fedre": {"fedre.width": 32},
    "fedca": {
        "fedca.width": 16,
        "fedca.probe-epochs": 2,
        "fedca.base-epochs": 1,
        "fedca.samples": 8,
        "public-samples": 16,
    },
    "fedcon": {"fedcon.width": 16, "public-samples": 16},
    "fedsimclr": {"fedsimclr.width": 16, "fedsimclr.probe-epochs": 2, "fedsimclr.labels": 0.5},
    "fedsimsiam": {"fedsimsiam.width": 16, "fedsimsiam.probe-epochs": 2, "fedsimsiam.projector": "own"},
    "fedtgp": {"fedtgp.width": 32},
    "fedrep": {"local-epochs": 3},
    "fedrolex": {"fedrolex.widths": "1,0.75"},
    "flha-distillation": {"architectures": "cnn-1-1,mlp"},
    "flha-ghn": {"optimizer": "adam", "learning-rate": 0.005},
    "heterofl": {"heterofl.widths": "1,0.5"},
    "lora": {"lora.aggregate": "stack", "lora.train-head": True},
    "pfedhn": {"architectures": "cnn-1-1,mlp"},
}
CASES = {name: Case.of(name, OF_METHOD.get(name, {})) for name in registry.methods()} | {
    "fedhenn-kernel": Case.of("fedhenn", {"fedhenn.eta0": 0.1, "fedhenn.target": "kernel"}),
    "fedhenn-contrast": Case.of("fedhenn", {"fedhenn.eta0": 0.3, "fedhenn.target": "contrast", "fedhenn.width": 32}),
    "layer-average-architecture": Case.of("layer-average", {"layer-average.by": "architecture"}),
}
ANY = (MIXED["any"], "cnn-1-1,mlp")
QUICK = {
    *("local", "fedavg", "fedrep", "fedproto", "fedmd", "fedhenn", "fedma", "pfedhn", "heterofl", "fedkd"),
    "label-spreading",
}
"""Methods in the quick suite: one for each way in which something is shared or trained."""
LIKE_OTHERS = ("gradient-boosting", "logistic-regression", "nearest-neighbour", "fedsimsiam")
"""Methods that differ from label-spreading only in the classifier that they fit, or from fedsimclr only in the loss."""

SIDES = {"strategies": r"(fedhet\.)?client", "client_apps": r"fedhet\.server"}
"""The folders of the two sides, and what must not be imported there."""


@pytest.mark.parametrize("side", SIDES)
def test_a_side_does_not_import_the_other(side: str) -> None:
    for path in (Path(fedhet.__file__).parents[1] / side).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        imports = re.findall(r"^ *(?:from|import) ([\w.]+)", text, re.MULTILINE)
        assert [name for name in imports if re.match(SIDES[side], name)] == [], path
        if side == "client_apps":  # A method's file in strategies/ has its keys, from which a node makes its config.
            for module, names in re.findall(r"^from (fedhet\.strategies\.[\w.]+) import (.+)$", text, re.MULTILINE):
                values = [getattr(import_module(module), name) for name in names.split(", ")]
                assert not [value for value in values if hasattr(value, "run_round")], path


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    if name in LIKE_OTHERS:
        return [pytest.mark.long]
    return [] if name in QUICK else [pytest.mark.slow]


class TestContract(Contract):
    test_it_learns = None  # test_own_settings.py has all methods but these two

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["fedharm", "inclusivefl"])
    def test_they_learn(self, name: str, tmp_path: Path) -> None:
        MethodContract.test_it_learns(self, CASES[name], tmp_path)

    @pytest.fixture(params=[pytest.param(name, marks=marks_of(name)) for name in CASES])
    def case(self, request: pytest.FixtureRequest) -> Case:
        """A method's case, with networks that cost little unless it needs others or several processes train them."""
        case = CASES[request.param]
        if "worker_processes" in request.function.__name__ or case.settings()["architectures"] not in ANY:
            return case
        own = {key: value for key, value in case.own if key != "architectures"}
        return Case.of(case.reference, own, "mlp-20,mlp-30")
