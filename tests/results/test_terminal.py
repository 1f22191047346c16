"""The progress and the tables that a terminal shows."""

import io
import json
import re
from pathlib import Path
from statistics import fmean

import pytest
from rich.console import Console
from rich.progress import Progress
from synthetic_runs import history_row

from fedhet.methods.method import Traits
from fedhet.results.description import data_table
from fedhet.results.history import final_clients, read_clients, read_run
from fedhet.results.observers import RoundReport, RunInfo
from fedhet.results.state import State
from fedhet.results.terminal import (
    ProgressLine,
    TerminalTable,
    by_architecture,
    closing_table,
    format_bytes,
    headline,
)


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # rich shows no progress at a `dumb` one


def printed(table, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (4_560_000, "4.56 MB"), (999_400, "999 KB"), (999_600, "1.00 MB")],
)
def test_bytes_in_decimal_units(number, text):
    assert format_bytes(number) == text


def test_rows_by_architecture_and_their_total(make_run):
    folder = make_run(clients=12, architectures=["wide", "deep"])
    final = final_clients(read_clients(folder))
    heading, *rows = by_architecture(read_run(folder))
    assert heading == ["architecture", "clients", "examples", "mean accuracy", "min", "max", "mean loss"]
    assert [row[:2] for row in rows] == [["deep", "6"], ["wide", "6"], ["all", "12"]]
    for row, members in zip(rows, (final[1::2], final[::2], final), strict=True):
        accuracies = [client.accuracy for client in members]
        numbers = (fmean(accuracies), min(accuracies), max(accuracies), fmean(client.loss for client in members))
        assert row[2] == str(sum(client.examples for client in members))
        assert row[3:] == [f"{number:.3f}" for number in numbers]


def test_closing_table(make_run):
    text = " ".join(printed(closing_table(make_run(failures={2: [{"client": "1", "reason": "gone"}]}))).split())
    for part in (
        "fedhenn on digits",
        "cnn-3-3",
        "all",
        "no global model",
        "19.3 MB up, 32.9 MB down",
        "61.2 s",
        "failures: 1",
    ):
        assert part in text
    with_global = printed(closing_table(make_run("other", has_global=True, architectures=[""])))
    assert "global accuracy 0." in with_global
    assert "undisclosed" in with_global


@pytest.mark.parametrize(
    ("width", "hidden"),
    [(50, "clients, examples, mean loss"), (60, "examples, mean loss"), (77, "")],
)
def test_a_narrow_terminal_shows_fewer_columns(make_run, width, hidden):
    folder = make_run(architectures=["architecture"])
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(closing_table(folder))
    title, heading, _, _, total, *below = console.file.getvalue().splitlines()
    assert (title, heading.split()[0], total.split()[0]) == ("fedhenn on digits", "architecture", "all")
    assert max(map(len, (heading, total))) <= width
    after = f"(no room for {hidden}: see clients.csv)" if hidden else "fedhenn: "
    assert " ".join(" ".join(below).split()).startswith(after)
    assert not hidden or (folder / "clients.csv").is_file()


@pytest.mark.parametrize("names", [None, [f"class {number}" for number in range(10)]])
@pytest.mark.parametrize("width", [50, 60, 80])
def test_a_narrow_terminal_keeps_words_and_numbers_of_a_description_whole(width, names):
    description = {"train": 1442, "validation": 0, "test": 355, "missing": 0, "values": 92288, "shape": [1, 8, 8]}
    description |= {"mean": 4.882, "std": 6.019, "range": [0, 16], "classes": [143] * 10, "names": names}
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(TerminalTable(data_table({"0": description}), "summary.json"))
    heading, _, row, *_ = console.file.getvalue().splitlines()
    assert max(map(len, (heading, row))) <= width
    assert heading.split() == [word for word in data_table({"0": description})[0] if word in heading.split()]
    assert {"client", "train", "missing", "classes"} <= {*heading.split()}
    assert row.split()[:2] == ["0", "1442"]


def test_closing_table_of_failed_and_unfinished_runs(make_run):
    assert "FAILED" in printed(closing_table(make_run(status="failed")))
    assert "unfinished, 4 rounds recorded" in printed(closing_table(make_run("killed", rounds=4, status=None)))
    assert "all" not in printed(closing_table(make_run("dark", rounds=2, status=None, evaluate_every=5)))


def test_the_headline_tells_of_unseen_clients(make_run):
    line = headline(read_run(make_run(unseen_clients=True)))
    assert "unseen clients 0.700 as received, 0.800 after 1 epochs alone (from scratch 0.400)" in line


@pytest.mark.parametrize(("chosen", "words"), [("012", " (over 3 of 4 clients);"), ("0123", ";")])
def test_the_headline_says_over_how_many_clients_the_best_is(make_run, chosen, words):
    folder = make_run(clients=4)
    path = folder / "summary.json"
    best = {"accuracy": {"weighted": 0.5}, "clients": {client: {} for client in chosen}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"best": best}))
    assert f"best by validation 0.500{words}" in headline(read_run(folder))


def test_the_headline_says_when_a_number_is_over_other_clients(make_run):
    folder = make_run(clients=4, personal="received", has_global=True)
    assert re.search(r"after local training, 0\.\d{3}\)", headline(read_run(folder)))
    path = folder / "history.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[-1]["scores"]["trained"]["3"]  # it did not train in the last round
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert re.search(r"after local training, 0\.\d{3} over 3 clients instead of 4\)", headline(read_run(folder)))


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
    assert "round 1/2: 2 clients, accuracy 0.250 as received, 1.00 KB" in told(False)


def test_training_that_ends_early_is_said():
    out = io.StringIO()
    line = ProgressLine(Console(file=out, width=120))
    run = RunInfo("local", Traits(), State())
    line.started(run, 1, 30)
    line.round(run, RoundReport(history_row(1, trained=0.5) | {"bytes_up": 0, "bytes_down": 0}, []))
    line.finished(run)
    assert "local: 1 of 30 rounds in 0 s" in out.getvalue()


def test_the_line_says_that_workers_start():
    out = io.StringIO()
    line = ProgressLine(Console(file=out, force_terminal=True, width=120))
    line.started(RunInfo("fedavg", Traits(), State()), 1, 2)
    line.doing("starting 2 worker processes")
    line.answered(3, 10)
    line._live.refresh()
    line.close()
    assert "3 of 10 clients, starting 2 worker processes" in out.getvalue()


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
