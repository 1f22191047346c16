"""Paired differences, what each method had and took, and the notes below."""

import math
import statistics
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from scipy import stats
from variants import result

from fedhet.comparing import Comparison
from fedhet.comparing.figures import comparison_figure
from fedhet.comparing.runs import Execution
from fedhet.comparing.tables import _in_markdown, accuracies, markdown, notes_below, number_rows, terminal_table

LOCAL = result("local", {0: 0.5, 1: 0.6, 2: 0.7, 3: 0.9})
FEDAVG = result("fedavg", {0: 0.6, 1: 0.65, 2: 0.9, 5: 0.1})


def test_two_seeds_are_too_few_for_an_interval_and_the_notes_say_so():
    local, fedavg = result("local", {0: 0.5, 1: 0.6}), result("fedavg", {0: 0.6, 1: 0.65})
    text = markdown([local, fedavg], local, notes_below([local, fedavg], local))
    assert "2 here: too few seeds for an interval." in text
    assert "| +0.075 |" in text
    assert "| p |" not in text
    heading, *rows = number_rows([local, fedavg], local)
    by_name = {row[1]: row[heading.index("personal_accuracy")] for row in rows}
    assert by_name["difference"] == pytest.approx(0.075)
    assert by_name["difference_low"] is by_name["difference_high"] is None
    assert "too few seeds" not in "\n".join(notes_below([LOCAL, FEDAVG], LOCAL))


def test_names_stand_under_their_bars_and_legends_above_the_lines():
    variants = [f"variant-{number}-with-a-rather-long-name" for number in range(9)]
    results = [replace(result("fedavg", {0: 0.5, 1: 0.6}), variant=name) for name in variants]
    for each in (run for variant in results[::2] for run in variant.outcomes):
        each.values["global_accuracy"] = 0.5
    figure = comparison_figure(results)
    figure.draw_without_rendering()
    _, bars = figure.axes
    ends = [[bar.get_y() + bar.get_height() for bar in group] for group in bars.containers if hasattr(group, "patches")]
    names = {text.get_text(): text.get_position()[1] for text in bars.texts if text.get_text().startswith("variant")}
    assert list(names) == [each.variant for each in results]
    assert len(ends) == 9 + 5
    tops = sorted(end for (end,) in ends)
    for number, place in enumerate(names.values()):
        below = [end for end in tops if end <= place]
        assert len(below) == number + 1 + len(range(0, number + 1, 2)), "its own bars, and those before, are above it"
        assert place - below[-1] < 0.2
    box = figure.get_tightbbox()
    assert -0.01 < box.x0 < box.x1 < figure.get_figwidth() + 0.01
    assert bars.get_legend().get_window_extent().y0 >= bars.get_window_extent().y1


def test_accuracy_after_local_training_has_a_column_where_it_is_another_one():
    def headings(*trained):
        both = [result("fedavg", {0: 0.6, 1: 0.5}), result("local", {0: 0.4, 1: 0.5})]
        for each, value in zip(both, trained, strict=True):
            for run in each.outcomes:
                run.values["trained_accuracy"] = value if value else run.values["personal_accuracy"]
        return markdown(both, both[0], []).splitlines()[0]

    assert "after training" not in headings(None, None)
    assert "after training" in headings(0.75, None)


def test_the_table_has_differences_and_what_each_method_had():
    text = markdown([LOCAL, FEDAVG], LOCAL, [])
    heading, _, local, fedavg = (line.strip("| ").split(" | ") for line in text.splitlines()[:4])
    assert heading[5:8] == ["minus local", "p", "labelled"]
    assert local[5:8] == ["-", "-", "1,440"]
    assert float(fedavg[6]) == pytest.approx(stats.ttest_1samp([0.1, 0.05, 0.2], 0).pvalue, abs=5e-4)
    margin = stats.t.ppf(0.975, 2) * statistics.stdev([0.1, 0.05, 0.2]) / math.sqrt(3)
    assert fedavg[5] == f"{0.35 / 3:+.3f} [{0.35 / 3 - margin:+.3f}, {0.35 / 3 + margin:+.3f}]"
    assert dict(zip(heading, fedavg, strict=True))["examples seen"] == "28,800"


def test_validation_is_noted():
    validated = result("fedavg", {0: 0.5, 1: 0.6}, validation=0.2)
    notes = "\n".join(notes_below([validated], validated))
    assert "20% of training examples were for validation only" in notes


def test_the_common_test_set_is_a_column_where_it_was_evaluated():
    assert "| common |" not in markdown([LOCAL], LOCAL, [])
    for run in (ensemble := result("ensemble", {0: 0.5})).outcomes:
        run.values["common_accuracy"] = 0.75
    assert "| common |" in (text := markdown([ensemble], ensemble, []))
    assert "0.750" in text


def test_a_variant_that_lacks_clients_is_said_to():
    short = result("fedproto", {0: 0.5, 1: 0.6}, refused={"3": "its representation has width 9"}, clients=4)
    notes = "\n".join(notes_below([LOCAL, short], LOCAL))
    assert "fedproto lacks 1 of 4 clients (seeds 0, 1)" in notes
    assert "client 3: its representation has width 9." in notes
    assert "local lacks" not in notes


def test_a_variant_of_which_clients_diverged_is_said_to_lack_them():
    """They took part in the first round, but the last scores are of the others."""
    short = result("fedproto", {0: 1.0, 1: 1.0}, diverged={"3": "training diverged"}, clients=4)
    notes = "\n".join(notes_below([LOCAL, short], LOCAL))
    assert "fedproto lacks 1 of 4 clients (seeds 0, 1)" in notes
    assert "client 3: training diverged." in notes


def test_a_cell_of_markdown_is_text():
    assert _in_markdown("a|b <script> [x](http://y) 0.1 [-0.2, +0.3]") == (
        r"a\|b \<script> [x]\(http://y) 0.1 [-0.2, +0.3]"
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_names_of_methods_stay_whole_in_narrow_tables_and_all_does_in_files(terminal):
    results = [LOCAL, result("nearest-neighbour", {0: 0.6, 1: 0.65, 2: 0.9})]
    console = Console(file=StringIO(), width=50, force_terminal=terminal)
    Execution(print, 1, console).show(terminal_table(accuracies(results, LOCAL)))
    lines = console.file.getvalue().splitlines()
    assert any("nearest-neighbour" in line for line in lines)
    assert (len(lines) == 4) == (not terminal)


def test_a_reason_is_told_once_with_all_that_failed_by_it():
    failed = {"a-seed0": "no", "b-seed0": "never", "a-seed1": "no"}
    assert [*Comparison(Path(), [], LOCAL, failed).reasons] == [("a-seed0, a-seed1", "no"), ("b-seed0", "never")]


def test_a_reason_of_several_lines_is_printed_in_as_many():
    console = Console(file=StringIO())
    Execution(print, 1, console).tell("no client can serve:\n  client 0: \x1b[31mno head")
    assert console.file.getvalue() == "no client can serve:\n  client 0: \\x1b[31mno head\n"
