"""What a comparison came to, for Python and notebooks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.comparing.figure import comparison_figure
from fedhet.comparing.measures import ArmResult
from fedhet.comparing.tables import headings_and_rows, number_rows
from fedhet.errors import FedhetError
from fedhet.results.frames import table
from fedhet.results.page import html_table

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Comparison:
    """A finished comparison.

    Attributes:
        folder: its folder.
        results: what each arm came to, in order.
        baseline: the one that differences are to.
        failed: why runs failed, by the name of their folder.
    """

    folder: Path
    results: Sequence[ArmResult] = field(repr=False)
    baseline: ArmResult = field(repr=False)
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def failure(self) -> str:
        """How many runs failed, and why, in words; empty if none did."""
        if not self.failed:
            return ""
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in self.failed.items())
        wanted = sum(result.seeds_wanted for result in self.results)
        return f"{len(self.failed)} of {wanted} runs failed; the same command tries them again:\n{reasons}"

    def check(self) -> None:
        """Find out whether all runs completed.

        Raises:
            FedhetError: some did not, and why.
        """
        if self.failed:
            raise FedhetError(self.failure)

    def frame(self) -> "pandas.DataFrame":
        """What `comparison.csv` holds: a line a run, then statistics over seeds.

        Raises:
            FedhetError: pandas is not installed.
        """
        heading, *rows = number_rows(self.results, self.baseline)
        return table([dict(zip(map(str, heading), row, strict=True)) for row in rows])

    def plot(self) -> "Figure":
        """Accuracy by round and after the last one."""
        return comparison_figure(self.results)

    def _repr_html_(self) -> str:
        table = html_table(*headings_and_rows(self.results, self.baseline))
        return table + (f"<pre>{escape(self.failure)}</pre>" if self.failed else "")
