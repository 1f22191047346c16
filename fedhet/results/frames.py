"""A run for notebooks: its rounds and clients as tables of pandas, and a summary as HTML."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.errors import FedhetError
from fedhet.results.history import Row, flat, read_clients, read_history
from fedhet.results.run_files import RunFiles, read_run, showing
from fedhet.results.tables import headline

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


def table(rows: Sequence[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Rows as a table of pandas.

    Raises:
        FedhetError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise FedhetError("tables need pandas: pip install pandas") from error
    return pandas.DataFrame(list(rows))


def rounds_of(folder: Path) -> "pandas.DataFrame":
    """A line a round: accuracies and losses as columns such as `trained/accuracy/mean`, bytes, failures, seconds."""
    return table([_line(row) for row in read_history(folder)])


def clients_of(folder: Path) -> "pandas.DataFrame":
    """A line a client and round, as in `clients.csv`."""
    return table([vars(row) for row in read_clients(folder)])


def figure_of(folder: Path) -> "Figure":
    """The accuracy by round.

    Raises:
        FedhetError: no client was evaluated.
    """
    from fedhet.results.figures import accuracy_figure

    figure = accuracy_figure(read_run(folder))
    if figure is None:
        raise FedhetError(f"{folder}: no client was evaluated, so there is nothing to draw")
    return figure


def html_of(folder: Path) -> str:
    """What a run came to, and its curve."""
    from fedhet.results.figures import accuracy_figure, to_svg

    run: RunFiles = read_run(folder)
    with showing(folder):
        figure = accuracy_figure(run)
        svg = "" if figure is None else to_svg(figure, folder.name, on_page=False)
    return f"<p><b>{escape(headline(run))}</b><br><code>{escape(str(folder))}</code></p>{svg}"


def _line(row: Row) -> dict[str, Any]:
    beside = {"failures": len(row["failures"]), "seconds": row["timing"]["seconds"]}
    return {"round": row["round"], "final": bool(row.get("final")), **flat(row), **beside}
