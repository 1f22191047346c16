"""What a comparison came to, for Python and notebooks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.comparing.figure import comparison_figure
from fedhet.comparing.measures import ArmResult
from fedhet.comparing.tables import headings_and_rows, number_rows
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
    """

    folder: Path
    results: Sequence[ArmResult] = field(repr=False)
    baseline: ArmResult = field(repr=False)

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
        return html_table(*headings_and_rows(self.results, self.baseline))
