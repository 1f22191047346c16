"""A finished run, for Python and notebooks."""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.errors import FedhetError
from fedhet.results.history import Row, read_history, read_run, showing
from fedhet.results.tables import headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RunResult:
    """A finished run: its directory and the content of `summary.json` ({} if the server ran on another machine)."""

    folder: Path
    summary: dict[str, Any]

    @property
    def history(self) -> list[Row]:
        """The rows of `history.jsonl`."""
        return read_history(self.folder)

    def plot(self) -> "Figure":
        """Plot the accuracy by round; raises a `FedhetError` if no client was evaluated."""
        from fedhet.results.figures import accuracy_figure

        figure = accuracy_figure(read_run(self.folder))
        if figure is None:
            raise FedhetError(f"{self.folder}: no client was evaluated, so nothing can be drawn: set evaluate-every")
        return figure

    def __str__(self) -> str:
        return f"{headline(read_run(self.folder))}\n{self.folder}" if self.summary else str(self.folder)

    def _repr_html_(self) -> str:
        from fedhet.results.figures import accuracy_figure
        from fedhet.results.plotting import to_svg

        run = read_run(self.folder)
        with showing(self.folder):
            figure = accuracy_figure(run)
            svg = "" if figure is None else to_svg(figure, self.folder.name, on_page=False)
        return f"<p><b>{escape(headline(run))}</b><br><code>{escape(str(self.folder))}</code></p>{svg}"
