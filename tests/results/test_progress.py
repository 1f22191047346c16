"""The progress that a run shows."""

import io

from rich.console import Console

from fedhet.methods.method import Traits
from fedhet.results.observers import RoundReport, RunInfo
from fedhet.results.progress import ProgressLine
from fedhet.results.state import State


def told(terminal: bool) -> str:
    out = io.StringIO()
    line = ProgressLine(Console(file=out, force_terminal=terminal, width=160))
    run = RunInfo("fedavg", Traits(), State())
    line.prepare("run", "reading data")
    line.started(run, 1, 2)
    for round, accuracy in ((1, 0.25), (2, 0.5), (3, 0.75)):
        row = {"round": round, "participants": ["0", "1"], "failures": [], "bytes_up": 500, "bytes_down": 500}
        row |= {"received": {"accuracy": {"weighted": accuracy}}, "final": round == 3}
        line.round(run, RoundReport(row, []))
    line.finished(run)
    return out.getvalue()


def test_the_last_line_stays():
    for terminal in (True, False):
        last = told(terminal).rstrip().splitlines()[-1]
        assert "fedavg: 2 rounds in 0 s, 2 clients, accuracy 0.750 after the last aggregation, 3.00 KB" in last
    assert "reading data" in told(True)
    assert "round 1/2: 2 clients, accuracy 0.250 before aggregation, 1.00 KB" in told(False)
