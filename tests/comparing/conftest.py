"""Fixtures of comparisons: one whose runs are written instead of trained."""

import csv
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

# Processes that a comparison starts import these modules by the same names.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "results"))

import stand_in

from fedhet import comparing
from fedhet.comparing import compare
from fedhet.engines import running
from fedhet.errors import FedhetError


class Comparison:
    """A folder that comparisons are made in, and what they left there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.printed = folder, ""
        self.done: Any = None

    def go(
        self,
        methods: Sequence[str] = stand_in.ALL,
        seeds: Sequence[int] = (0, 1),
        settings: Mapping[str, object] = stand_in.SETTINGS,
        run: Callable[..., object] = stand_in.run,
        **options: Any,
    ) -> str:
        """Compare, and return what was printed; it is in `printed` after an error, too."""
        console = Console(file=io.StringIO(), width=100, soft_wrap=True)
        try:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(running, "run", run)
                patched.setattr(comparing, "announce", lambda *_: None)  # whose handshakes take seconds
                options = {"out": self.folder, "jobs": 4, "console": console, **options}
                settings = settings if "fedhenn" in methods else {**settings, "fedhenn.eta0": ""}
                self.done = compare(methods, {"preset": "", **settings}, seeds=seeds, **options)
        finally:
            self.printed = console.file.getvalue()
        return self.printed

    def order(self, name: str, what: str) -> None:
        """Have a run do something else than write its files; see `stand_in.run`."""
        path = self.folder / f"{name}.does"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(what)

    def calls(self) -> list[str]:
        """Which runs were started or resumed since this was last asked, by name."""
        path = self.folder / "calls.txt"
        lines = sorted(path.read_text().splitlines()) if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def summaries(self, method: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The summaries of a method's runs."""
        return [json.loads((self.folder / f"{method}-seed{seed}" / "summary.json").read_text()) for seed in seeds]

    def rows(self) -> list[dict[str, str]]:
        """The rows of `comparison.csv`."""
        with (self.folder / "comparison.csv").open() as file:
            return list(csv.DictReader(file))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of comparisons are calls, and no figures are drawn."""

    def run_jobs(jobs: Any, at_once: int, deadline: float) -> Any:
        for job in jobs:
            try:
                job.call()
                yield job.name, None
            except FedhetError as error:
                yield job.name, str(error)

    monkeypatch.setattr("fedhet.comparing.runs.run_jobs", run_jobs)
    # Runs have processes of their own outside of tests, so that none is within the comparison.
    monkeypatch.setattr(running, "alone", nullcontext)
    monkeypatch.setattr("fedhet.comparing.save_figure", lambda figure, path: None)
    monkeypatch.setattr("fedhet.comparing.write_together", lambda *_: None)
    monkeypatch.setattr("fedhet.results.recorder.write_report", lambda folder: None)
    monkeypatch.setattr("fedhet.results.report.write_report", lambda folder: (folder / "report.html").touch())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """A comparison in a new folder."""
    return Comparison(tmp_path / "comparison")
