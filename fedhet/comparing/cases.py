"""The runs of a comparison, and whether their folders hold them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedhet import config as configuration
from fedhet import population
from fedhet.config import Config
from fedhet.errors import ConfigError
from fedhet.files import LOCK
from fedhet.given import Given
from fedhet.results.run_files import read_run

# Where and how a run is carried out, which is the comparison's to say and changes nothing of what is computed.
PLACES = frozenset({"out", "state-dir", "engine", "resume", "workers", "report"})


@dataclass(frozen=True)
class Case:
    """One run of a comparison; `forced` where its method needs equal architectures and so got one model for all."""

    arm: str
    seed: int
    settings: Config
    folder: Path
    forced: bool

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.name

    @property
    def shortcoming(self) -> str | None:
        """Why the folder does not hold a completed run; None if it does."""
        summary = (read_run(self.folder).summary if (self.folder / "config.toml").is_file() else None) or {}
        return None if summary.get("status") == "completed" else str(summary.get("error", "ended without completing"))


def check(cases: Iterable[Case], own: Given = Given()) -> None:  # noqa: B008 - it is frozen
    """Find out at once whether runs can be carried out in their folders.

    Raises:
        FedhetError: every problem of the folders that are there already; data that cannot be had.
    """
    cases = list(cases)
    if problems := [problem for case in cases if (problem := _conflict(case, own))]:
        raise ConfigError("\n".join(problems))
    for case in cases:
        population.check(case.settings, own_model=own.model is not None, own_data=own.data is not None)


def _conflict(case: Case, own: Given) -> str | None:
    """Why the case's folder cannot be used, if it cannot."""
    if not case.folder.exists():
        return None
    if case.folder.is_dir() and {path.name for path in case.folder.iterdir()} <= {LOCK}:  # killed as it began
        return None
    if not (case.folder / "config.toml").is_file():
        return f"{case.folder} is there already and is not the directory of a run: choose another folder"
    there, wanted = configuration.read(case.folder / "config.toml", own.words.keys()), case.settings.flat()
    different = [
        f"{key} = {there.get(key, 'not set')!r} instead of {wanted.get(key, 'not set')!r}"
        for key in sorted((there.keys() | wanted.keys()) - PLACES)
        if there.get(key, "") != wanted.get(key, "")
    ]
    if different:
        return f"{case.folder} holds a run with other settings ({'; '.join(different)}): choose another folder"
    return None
