"""Carrying out the runs of a comparison: those that are not there yet, several at a time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedhet.comparing.cases import Case
from fedhet.comparing.live import Progress
from fedhet.comparing.processes import Job, run_jobs
from fedhet.text import printable

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Execution:
    """How runs are carried out.

    Attributes:
        run: what runs one configuration; must be picklable.
        workers: runs at a time, each in a process of its own.
        console: where progress goes.
    """

    run: Callable[..., object]
    workers: int
    console: "Console"

    def __call__(self, cases: Sequence[Case]) -> dict[str, str]:
        """Complete the cases; returns the names of those that failed, and why."""
        ready = {case.name for case in cases if case.shortcoming is None}
        if ready:
            self.tell(f"{len(ready)} of {len(cases)} runs were completed before and are kept")
        for note in dict.fromkeys(f"{case.arm}: {why}" for case in cases for _, why in case.settings.idle):
            self.tell(note)
        waiting = [self._job(case) for case in cases if case.name not in ready]
        failed: dict[str, str] = {}
        by_name = {case.name: case for case in cases}
        progress = Progress(cases, dict.fromkeys(ready, "kept"))
        with self._live(progress) if waiting else nullcontext():
            for number, (name, reason) in enumerate(run_jobs(waiting, workers=self.workers), start=len(ready) + 1):
                reason = reason or by_name[name].shortcoming
                if reason is not None:
                    failed[name] = reason
                progress.ended[name] = "failed" if reason else "completed"
                self.tell(f"[{number}/{len(cases)}] {name}: {reason or 'completed'}")
        return failed

    def _live(self, progress: Progress) -> AbstractContextManager[object]:
        """The table of the runs while they are under way, on a terminal."""
        if not self.console.is_terminal:
            return nullcontext()
        from rich.live import Live

        return Live(get_renderable=progress, console=self.console, refresh_per_second=1, transient=True)

    def tell(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(printable(line), markup=False)

    def _job(self, case: Case) -> Job:
        log = case.folder.parent / "logs" / f"{case.name}.log"
        keywords = {"out": case.folder, "engine": "local"}
        if (case.folder / "config.toml").is_file():
            reference = case.settings.method  # which the user named, and not the folder alone
            named = {"method": reference} if ":" in reference else None
            return Job(case.name, self.run, (named,), keywords | {"resume": case.folder}, log)
        return Job(case.name, self.run, ({**case.settings.flat(), "preset": ""},), keywords, log)
