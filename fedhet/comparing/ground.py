"""The common ground of a comparison: which settings all arms share, and which are an arm's own."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedhet import config as configuration
from fedhet import population, registry
from fedhet.client.app import make_client_app
from fedhet.comparing.arms import Arm
from fedhet.comparing.cases import PLACES, Case
from fedhet.config import Config, Value
from fedhet.engines.grid import LocalGrid
from fedhet.errors import ConfigError
from fedhet.given import Given
from fedhet.observing import Observer, Watched


@dataclass(frozen=True)
class Ground:
    """What the arms of a comparison share and where they differ.

    Attributes:
        for_all: settings that all cases with one seed share, if their arm has no others.
        own: further settings of each arm by its name, the method first of all.
        fixed: keys that an arm sets itself, which are not its to tune.
        forced: arms that need equal architectures where the settings mix them, and so get one model for all.
        notes: what a reader must know of the settings.
    """

    for_all: Mapping[str, Value]
    own: Mapping[str, Mapping[str, Value]]
    fixed: Mapping[str, frozenset[str]]
    forced: frozenset[str]
    notes: Sequence[str]

    def settings(self, arm: str, seed: int, choice: Mapping[str, Value]) -> Config:
        """An arm's settings, some of them chosen for it.

        Raises:
            ConfigError: they cannot be run.
        """
        return configuration.resolve({**self.for_all, **self.own[arm], **choice, "seed": seed}, strict=False)

    def case(self, arm: str, seed: int, settings: Config, folder: Path) -> Case:
        """A run of these settings."""
        return Case(arm, seed, settings, folder, arm in self.forced)


def common_ground(
    arms: Sequence[Arm],
    *,
    seeds: Sequence[int],
    config: Mapping[str, object],
    homogeneous_model: str,
    given: Given = Given(),  # noqa: B008 - it is frozen
) -> Ground:
    """What the arms share: see `compare` for the arguments.

    What is not set comes from the first arm's method, and a method's own keys from its own preset where the settings
    for all are a preset (`fedproto/digits` beside `fedhenn/digits`); pool and closing epochs from whoever needs most.
    Where a method settles by itself how many rounds it needs (`rounds = 0`), one-shot methods get their one round, and
    the others as many as it.

    Raises:
        FedhetError: every problem of the settings.
    """
    base = {key: value for key, value in config.items() if key not in PLACES | {"method", "seed"}}
    base["seed"] = seeds[0]
    base = _own_keys(arms, base) | base
    rounds = _rounds(arms, base, given)

    def complete(arm: Arm, settings: Mapping[str, Value], seed: int) -> Config:
        return configuration.resolve(
            {**base, "rounds": rounds[arm.name], **settings, "method": arm.method, "seed": seed}, strict=False
        )

    completed = {arm.name: complete(arm, arm.settings, seeds[0]) for arm in arms}
    first = given.tested(complete(arms[0], {}, seeds[0]))
    for_all = {key: value for key, value in first.flat().items() if "." not in key}
    for key in ("public-samples", "closing-epochs"):
        for_all[key] = max(each.flat()[key] for each in completed.values())

    equal: dict[str, Value] = {"architectures": homogeneous_model, "assign": "round-robin"}
    own: dict[str, dict[str, Value]] = {}
    forced = set()
    for arm in arms:
        flat, prefix = completed[arm.name].flat(), completed[arm.name].prefix
        settings = {key: value for key, value in flat.items() if key.startswith(f"{prefix}.")}
        settings |= {"method": arm.method, "rounds": rounds[arm.name], **arm.settings}
        configs = [configuration.resolve({**for_all, **settings, "seed": seed}, strict=False) for seed in seeds]
        if given.model is None and any(map(population.must_be_equal, configs)):
            forced.add(arm.name)
            settings |= equal
        own[arm.name] = settings
    notes = [
        f"{arm.name}: rounds = {rounds[arm.name]}, {_why(arm, completed)}"
        for arm in arms
        if 0 in rounds.values() and rounds[arm.name] and "rounds" not in arm.settings
    ]
    notes += [why for key, why in first.idle if key == "test-on"]
    fixed = {arm.name: frozenset(arm.settings) for arm in arms}
    return Ground(for_all, own, fixed, frozenset(forced), notes)


def _own_keys(arms: Sequence[Arm], base: Mapping[str, Any]) -> dict[str, Any]:
    """The methods' own keys as their presets have them that stand beside the one for all, as in a run of each."""
    if not base.get("preset"):
        return {}
    for_all, known = configuration.read(configuration.preset_path(str(base["preset"]))), configuration.presets()
    own: dict[str, Any] = {}
    for prefix in {registry.method(arm.method).name for arm in arms}:
        if (name := f"{prefix}/{str(base['preset']).rpartition('/')[2]}") in known:
            settings = configuration.read(configuration.preset_path(name))
            own |= {key: settings[key] for key in settings.keys() - for_all.keys() if key.startswith(f"{prefix}.")}
    return own


def _rounds(arms: Sequence[Arm], base: Mapping[str, Any], given: Given) -> dict[str, int]:
    """The key `rounds` for each arm."""
    preset = configuration.read(configuration.preset_path(str(base["preset"]))) if base.get("preset") else {}
    known = {arm.name: registry.method(arm.method) for arm in arms}
    own = {arm.name: int(arm.settings["rounds"]) for arm in arms if "rounds" in arm.settings}
    told = {**preset, **base}.get("rounds", known[arms[0].name].common.get("rounds", Config.rounds))
    if told != 0:
        return {arm.name: told for arm in arms} | own
    if not (settling := [arm for arm in arms if known[arm.name].settles_rounds]):
        names = ", ".join(known)
        raise ConfigError(f"rounds = 0: none of {names} settles by itself how many it needs: set rounds")
    rounds = {name: 0 if method.settles_rounds else 1 for name, method in known.items()} | own
    if others := [name for name, method in known.items() if rounds[name] and not method.one_shot and name not in own]:
        first = settling[0]
        config = configuration.resolve({**base, **first.settings, "method": first.method, "rounds": 0}, strict=False)
        rounds |= dict.fromkeys(others, settled_rounds(config, given))
    return rounds


def _why(arm: Arm, completed: Mapping[str, Config]) -> str:
    if registry.method(arm.method).one_shot:
        return "all that a one-shot method needs"
    return f"as many as {next(name for name, each in completed.items() if not each.rounds)} needs"


class _GreetedError(Exception):
    """Clients were greeted, and the rounds are known."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds


class _Greeted(Observer):
    def started(self, strategy: Watched, first: int, last: int) -> None:
        raise _GreetedError(last)


def settled_rounds(config: Config, given: Given = Given()) -> int:  # noqa: B008 - it is frozen
    """How many rounds a method needs that settles it by itself: its clients are greeted, and nothing is trained.

    Raises:
        FedhetError: no client can serve.
    """
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        config = config.but(state_dir=folder, out="")
        strategy = registry.strategy(config.prefix)(
            config,
            shared=population.shared_pool(config) if given.data is None else None,
            model=given.model,
            observers=[_Greeted()],
        )
        try:
            strategy.start(LocalGrid(make_client_app(given.model, given.data, task=given.task), config.clients))
        except _GreetedError as greeted:
            return greeted.rounds - bool(config.closing_epochs)
    raise AssertionError("a run tells its observers that it starts")


def distinct(values: Iterable[Any]) -> list[Any]:
    """The values without repetitions, in their order."""
    return list(dict.fromkeys(values))
