"""How far the runs of a comparison are, as a table that renews itself on a terminal."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedhet import registry
from fedhet.comparing.cases import Case
from fedhet.errors import FedhetError
from fedhet.results.history import read_history, scored_curve
from fedhet.results.tables import format_seconds, format_value

if TYPE_CHECKING:
    from rich.table import Table

ROWS = 30
"""So many runs are shown, those that are under way first."""


@dataclass
class Progress:
    """The runs that are to be completed.

    Attributes:
        cases: in order.
        ended: what became of those that ended, by name.
        begun: when each was first seen to run, by name.
    """

    cases: Sequence[Case]
    ended: dict[str, str] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)

    def __call__(self) -> "Table":
        """The table now."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table("run", "round", "accuracy", "time left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        left = [case for case in self.cases if case.name not in self.ended]
        running = [case for case in left if (case.folder / "config.toml").is_file()]
        waiting = [case for case in left if case not in running]
        ended = [case for case in reversed(self.cases) if case.name in self.ended]
        for case in [*running, *waiting, *ended][:ROWS]:
            table.add_row(case.name, *self._cells(case, running=case in running))
        table.caption = f"{len(ended)} of {len(self.cases)} ended, {len(running)} running"
        return table

    def _cells(self, case: Case, *, running: bool) -> tuple[str, str, str]:
        if not running and case.name not in self.ended:
            return "", "", "waiting"
        try:
            rows = read_history(case.folder)
        except FedhetError:  # being written
            return "", "", ""
        scored = registry.method(case.settings.prefix).traits_of(case.settings.parameters).scored
        curve = scored_curve(rows, scored)
        done = max((row["round"] for row in rows if not row.get("final")), default=0)
        last = case.settings.rounds + bool(case.settings.closing_epochs)
        left = self.ended.get(case.name, "")
        if running:
            began = self.begun.setdefault(case.name, time.monotonic())
            spent = time.monotonic() - began
            left = format_seconds(spent / done * (last - done)) if done and case.settings.rounds else "starting"
        accuracy = format_value(curve[-1][1]) if curve else ""
        return f"{done}/{last if case.settings.rounds else '?'}", accuracy, left
