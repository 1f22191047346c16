"""Runs with networks and data of a user's own, and nothing set but the method: every method trains so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhet
from fedhet.config.configuration import resolve, settings_of
from fedhet.data import load
from fedhet.errors import FedhetError
from fedhet.methods import registry
from fedhet.methods.options import keys_about
from tests.relations.programs import CONTROLS

BELOW = 0.15
"""How much less accurate than `local` a method may be."""

MORE_BELOW = {"flha-ghn": 0.25, "fedcon": 0.25, "gradient-boosting": 0.25}
"""FLHA-GHN's tiles, which hide the layers' types from the server, overfit 40 examples a client; `share = own` does not.
FedCon's clients use no labels."""

CANNOT_SERVE = {
    "fedharm": "4 are needed, one for each block: set the key blocks",  # of one spatial size each
    "inclusivefl": "needs repeated blocks",
}
"""Methods for networks of another kind, with what they say."""

SLOWEST = ("fedca", "fedsimsiam", "fedsimclr", "fml", "scalefl", "heterofl", "fedtgp")
"""Methods that others resemble."""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def data(partition_id: int) -> dict[str, tuple[Tensor, Tensor]]:
    digits = load("digits")
    order = torch.randperm(1400, generator=torch.Generator().manual_seed(0))
    inputs, labels = digits.train.inputs[:][order].flatten(1) / 16, digits.train.labels[order]
    starts = {"train": (40 * partition_id, 40), "test": (200 + 200 * partition_id, 200), "public": (1000, 300)}
    return {part: (inputs[at : at + count], labels[at : at + count]) for part, (at, count) in starts.items()}


@pytest.fixture(scope="module")
def score(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], float]:
    scores: dict[str, float] = {}

    def score(method: str) -> float:
        if method not in scores:
            settings: dict[str, Any] = {"method": method, "clients": 3, "report": False, "workers": 1}
            folder = tmp_path_factory.mktemp(method) / "run"
            done = fedhet.run(settings, model=model, data=data, out=folder, progress=False)
            scores[method] = done.summary["personal_accuracy"]["weighted"]
        return scores[method]

    return score


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [pytest.param(method, marks=pytest.mark.long if method in SLOWEST else ()) for method in registry.own_methods()],
)
def test_every_method_trains(method: str, score: Callable[[str], float]) -> None:
    if method in CANNOT_SERVE:
        with pytest.raises(FedhetError, match=CANNOT_SERVE[method]):
            score(method)
    else:
        assert score(method) >= score("local") - MORE_BELOW.get(method, BELOW)


def own(config: Any, *supplied: str) -> Any:
    return resolve(settings_of(config, supplied or ("model", "data")))


def test_settings_for_own_networks_and_data() -> None:
    config = own({"method": "fedtgp", "clients": 3})
    assert (config.preset, config.optimizer, config.learning_rate, config.rounds) == ("own", "adam", 0.003, 20)
    assert (config.clients, config.options.width, config.chosen) == (3, 32, {"preset", "method", "clients"})
    assert own("fedtgp").flat() == config.replace(clients=10).flat()
    assert own(None).method == "fedhenn"
    assert (own("fedma").rounds, own("pfnm").rounds, own("nearest-neighbour").rounds) == (0, 1, 1)
    assert own("fedtgp/digits").flat() == resolve({"preset": "fedtgp/digits"}).flat()
    for only in ("model", "data"):  # the data, or the networks, are those of the preset for digits
        assert own({"method": "fedtgp"}, only).preset == "fedtgp/digits"


@pytest.mark.parametrize("chosen", [{}, {"optimizer": "sgd"}])
def test_every_method_has_the_same_optimiser(chosen: dict[str, Any]) -> None:
    methods = {*registry.own_methods()} - {*CONTROLS}
    alike = {method: own({"method": method, **chosen}).flat() for method in methods}
    for method, config in alike.items():
        unlike = {key for key in keys_about("optimiser") if config[key] != alike["local"][key]}
        assert unlike <= registry.method(method).own.keys(), method


@pytest.mark.parametrize("chosen", [{"learning-rate": 0.1}, {"momentum": 0.9}, {"optimizer": "sgd"}])
def test_learning_rate_with_optimizer(chosen: dict[str, Any]) -> None:
    config = own({"method": "fedavg", **chosen}).flat()
    expected = {"optimizer": "sgd", "learning-rate": 0.05, "momentum": 0.5} | chosen
    assert {key: config[key] for key in expected} == expected
    assert own({"method": "fedavg", "learning-rate": 0.01, "optimizer": "adam"}).learning_rate == 0.01
