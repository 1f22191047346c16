"""Running a federation from beginning to end: what `fedhet run` and `fedhet.run` do."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhet import config as configuration
from fedhet import population
from fedhet.errors import ConfigError
from fedhet.observing import Observer
from fedhet.options import Config
from fedhet.results.history import Row, read_history
from fedhet.serving import new_folder

RESUMABLE = (
    "rounds",
    "engine",
    "data",
    "device",
    "num-gpus",
    "workers",
    "timeout",
    "min-clients",
    "wait-for-clients",
    "state-dir",
)
"""Keys that may change when a run is resumed: how long and where it runs, not what it computes."""


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        folder: the run directory.
        summary: what `summary.json` holds; empty where the server wrote it to a disk that is not seen from here.
    """

    folder: Path
    summary: dict[str, Any]

    @property
    def history(self) -> list[Row]:
        """The rows of `history.jsonl`."""
        return read_history(self.folder)


def run(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path | None = None,
    engine: str | None = None,
    resume: str | Path | None = None,
    observers: Sequence[Observer] = (),
) -> RunResult:
    """Run a federation from beginning to end.

    Args:
        config: settings (kebab-case keys), a TOML file, or a complete configuration; the preset `fedhenn/digits`
            without any.
        out: the run directory; a new one under `runs/` if left out.
        engine: `local`, `ray`, or a SuperLink connection of Flower's config; `local` unless `config` says otherwise.
        resume: go on with the run in this directory; its own configuration counts, `config` may change single keys.
        observers: told of every round, if its history can be read here.

    Raises:
        FedhetError: the configuration is wrong, the directory holds another run, or the run failed.
    """
    complete = config if isinstance(config, Config) else _resolved(config, resume)
    if resume is not None:
        out = Path(resume)
    if engine is not None:
        complete = complete.but(engine=engine)
    folder = Path(out or complete.out or new_folder(Path("runs"), complete)).resolve()
    if complete.engine in ("local", "ray"):  # elsewhere only the nodes have the data
        population.check(complete)
    if complete.engine == "local":
        from fedhet.engines.local import run_locally

        run_locally(complete, folder, resume=resume is not None, observers=observers)
    else:
        from fedhet.engines.flower import run_on_flower

        run_on_flower(complete, folder, resume=resume is not None, observers=observers)
    summary = folder / "summary.json"
    return RunResult(folder, json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {})


def _resolved(config: Mapping[str, Any] | str | Path | None, resume: str | Path | None) -> Config:
    """The configuration of a run, or of the one that goes on, with changes."""
    chosen = dict(configuration.read(Path(config)) if isinstance(config, str | Path) else config or {})
    if resume is not None:
        return configuration.resolve(_resumed(Path(resume), chosen), strict=False)
    return configuration.resolve(chosen or {"preset": configuration.DEFAULT_PRESET})


def _resumed(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} holds no run to resume")
    settings = configuration.read(folder / "config.toml")
    if not settings:
        raise ConfigError(f"{folder / 'config.toml'} is empty: nobody knows any more what was run there")
    different = [key for key, value in changes.items() if key not in RESUMABLE and settings.get(key) != value]
    if different:
        raise ConfigError(
            f"{folder} was run with another {', '.join(different)}: a resumed run may change {', '.join(RESUMABLE)}"
        )
    return {**settings, **changes}
