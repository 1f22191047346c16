import io
from statistics import fmean

import pytest
from rich.console import Console

from fedhet.results.history import final_clients, read_clients, read_run
from fedhet.results.tables import by_architecture, closing_table, format_bytes, headline


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


def test_closing_table_of_failed_and_unfinished_runs(make_run):
    assert "FAILED" in printed(closing_table(make_run(status="failed")))
    assert "unfinished, 4 rounds recorded" in printed(closing_table(make_run("killed", rounds=4, status=None)))
    assert "all" not in printed(closing_table(make_run("dark", rounds=2, status=None, evaluate_every=5)))


def test_the_headline_tells_of_unseen_clients(make_run):
    line = headline(read_run(make_run(unseen_clients=True)))
    assert "unseen clients 0.700 as received, 0.800 after 1 epochs alone (from scratch 0.400)" in line
