"""The progress that a run shows."""

import io
import json
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fedhet.methods.method import Traits
from fedhet.results.observers import RoundReport, RunInfo
from fedhet.results.progress import ProgressLine
from fedhet.results.state import State

sys.path.insert(0, str(Path(__file__).parent))

from synthetic_runs import history_row


def told(terminal: bool, width: int = 160, folder: Path | None = None) -> str:
    out = io.StringIO()
    line = ProgressLine(Console(file=out, force_terminal=terminal, width=width), folder)
    run = RunInfo("fedavg", Traits(), State())
    line.prepare("run", "reading data")
    first = 2 if folder else 1
    line.started(run, first, 2)
    for round, accuracy in ((1, 0.25), (2, 0.5), (3, 0.75))[first - 1 :]:
        line.answered(1, 2)
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


def test_eighty_columns_have_both_times(monkeypatch):
    old = Progress.update
    monkeypatch.setattr(
        "rich.progress.Progress.update", lambda self, *args, **news: (old(self, *args, **news), self.refresh())
    )
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", told(True, width=80)).replace("\r", "\n").splitlines()
    lines = [line.rstrip() for line in shown if line.startswith("fedavg ") and "last aggregation" not in line]
    assert "fedavg 1/2 1 of 2 clients, accuracy 0.250, 1.00 KB 0:00:00 -:--:--" in lines
    assert all(len(line) <= 80 and "\u2026" not in line for line in lines)


def test_a_resumed_run_counts_all_its_rounds(tmp_path):
    row = history_row(1, bytes_up=1000, bytes_down=1000, timing={"seconds": 60.0})
    (tmp_path / "history.jsonl").write_text(json.dumps(row) + "\n")
    last = told(False, folder=tmp_path).rstrip().splitlines()[-1]
    assert "fedavg: 2 rounds in 60 s, 2 clients, accuracy 0.750 after the last aggregation, 4.00 KB" in last


def test_a_long_handshake_is_told_without_a_terminal(monkeypatch):
    monkeypatch.setattr("fedhet.results.progress.SECONDS", 0.0)
    out = io.StringIO()
    line = ProgressLine(Console(file=out, force_terminal=False, width=160))
    line.answered(3, 1000)
    assert out.getvalue() == "3 of 1000 clients have answered the handshake\n"
