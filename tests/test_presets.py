"""Every preset in `run_configs/` says what can be run: one round of it, on data of its data set's shape."""

import math
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedhet import models
from fedhet.config import configuration, validation
from fedhet.config.configuration import resolve
from fedhet.data import examples as datasets
from fedhet.data.text import shakespeare
from fedhet.errors import ConfigError
from fedhet.methods import registry
from fedhet.methods.options import Config, kebab
from fedhet.testing import run

LARGE = ("vgg9", "torchvision/", "timm/", "'flha'", "flha-small", "fedharm-small")
"""Networks of which a round takes some seconds."""

LONG = {
    *("fedca/cifar10", "fedharm/cifar10_dirichlet", "fedharm/mnist_iid", "fedsimsiam/cifar10"),
    *("flha-distillation/cifar10_flha", "flha-ghn/chestxray14_paper", "flha-ghn/cifar10"),
    *("local/cifar10_flha", "local/htfl_cifar10", "pfedhn/cifar10_flha", "fedre/cifar10_dirichlet", "scalefl/cifar10"),
}
"""Presets whose round takes long, with smaller ones of the same method in other tests."""


def parts(config: Config) -> set[tuple[str, str]]:
    """The networks, the data set and the unseen clients of a run, each with its method."""
    unseen = ["unseen clients"] if config.unseen_clients else []
    return {(config.method_name, part) for part in (*models.expand(config.architectures), config.dataset, *unseen)}


def presets() -> Iterator[Any]:
    """The presets to run: those on digits, and others with a network or data set that is new for their method."""
    seen: set[tuple[str, str]] = set()
    for name in configuration.presets():
        config = resolve({"preset": name})
        if config.dataset != "digits" and parts(config) <= seen:
            continue
        seen |= parts(config)
        text = str(configuration.preset_settings(name))
        heavy = any(large in text for large in LARGE)
        mark = pytest.mark.long if name in LONG else pytest.mark.slow
        yield pytest.param(name, marks=mark) if heavy else name


def smaller(config: Config) -> dict[str, Any]:
    """Settings that leave the preset's method, networks and data set as they are, and make it short."""
    dealt = models.expand(config.architectures)
    small: dict[str, Any] = {
        "rounds": min(config.rounds, 1),
        "clients": max(2, len(dealt)),
        "samples-per-client": 6,
        "public-samples": min(config.public_samples, 10),
        "local-epochs": min(config.local_epochs, 2 if config.method_name == "fedrep" else 1),  # it divides them
        "closing-epochs": min(config.closing_epochs, 1),
    }
    for own in fields(config.options):
        value = getattr(config.options, own.name)
        if own.name.endswith(("epochs", "passes")) and value > 1:
            small[f"{config.method_name}.{kebab(own.name)}"] = 1
    ineffective = validation.ineffective(config, registry.traits(config))
    return {key: value for key, value in small.items() if key not in ineffective}


def one_round(settings: dict[str, Any], stand_ins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a round of a preset, and of what is set on top of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = resolve(settings)
    monkeypatch.setitem(datasets._LOADERS, "shakespeare", partial(shakespeare, min_characters=500))
    data = {} if config.dataset == "digits" else {"data": stand_ins}
    done = run(tmp_path / "run", {**settings, **smaller(config), **data})
    assert done.summary["status"] == "completed"
    assert done.failures == []
    row = done.row(1)
    assert row["participants"]
    assert math.isfinite(row["train_loss"])
    assert done.rows[-1]["final"]
    assert 0 <= done.summary["personal_accuracy"]["weighted"] <= 1


def test_every_method_has_a_preset_on_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {f"{name}/digits" for name in registry.own_methods()} <= {*configuration.presets()}
    monkeypatch.setattr(configuration, "presets", tuple)
    with pytest.raises(ConfigError, match="fedavg has no preset fedavg/digits: name another preset and the method"):
        configuration.settings_of("fedavg")


@pytest.mark.parametrize("name", configuration.presets())
def test_presets_have_no_keys_without_effect(name: str) -> None:
    """A copy of a preset is a user's file, in which such a key is refused. Other methods' keys are for compare."""
    preset = configuration.preset_settings(name)
    own = {key: value for key, value in preset.items() if key.partition(".")[0] in (key, preset["method"])}
    resolve(own | {"preset": ""})


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("name", [*presets()])
def test_a_preset_runs_a_round(name: str, stand_ins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_round({"preset": name}, stand_ins, tmp_path, monkeypatch)


def test_a_wheel_has_the_folder_of_presets() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "run_configs" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
