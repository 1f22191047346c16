"""Clients' gains over training alone, in tables and in the figure."""

from dataclasses import replace

import numpy as np
import pytest
from variants import result

from fedhet.comparing.figures import gains_figure
from fedhet.comparing.measures import VariantResult, _with_gains, corrected_p_values, is_local
from fedhet.comparing.tables import gains, markdown, notes_below, number_rows
from fedhet.utils.statistics import ClientRow


def with_clients(name, accuracies):
    """Three seeds of a variant, whose clients have these accuracies after the last round."""
    made = result(name, {0: 0.5, 1: 0.5, 2: 0.5})
    rows = [
        ClientRow(r, str(i), "cnn", 9, value * r / 2, None, 0, 0) for i, value in enumerate(accuracies) for r in (1, 2)
    ]
    outcomes = [replace(each, files=replace(each.files, clients=rows)) for each in made.outcomes]
    return VariantResult(name, 3, outcomes, False)


@pytest.fixture
def variants():
    local, fedavg = with_clients("local", [0.5] * 4), with_clients("fedavg", [0.3, 0.8, 0.9, 0.9])
    assert [is_local(each) for each in (local, fedavg)] == [True, False]
    return [_with_gains(each, local) for each in (local, fedavg)]


def test_the_table_counts_clients_that_are_worse_off(variants):
    local, fedavg = variants
    headings, alone, line = gains([local, fedavg])
    assert headings == ["method", "worse off", "worst tenth"]
    assert (alone, line) == (["local", "-", "-"], ["fedavg", "25%", "-0.200"])
    assert "| worse off | worst tenth |" in markdown([local, fedavg], local, [])
    heading, *rows = number_rows([local, fedavg], local)
    assert {row[heading.index("worse_off")] for row in rows if row[0] == "fedavg" and row[1] in (0, "mean")} == {0.25}
    assert "Worse off: fraction of clients" in "\n".join(notes_below([local, fedavg], local))
    assert gains([result("fedavg", {0: 0.5})]) == [["method"], ["fedavg"]]


def test_the_figure_has_the_clients_of_all_seeds(variants):
    line, _ = gains_figure(variants).axes[0].get_lines()
    assert line.get_label() == "fedavg, 25% worse off"
    assert line.get_ydata() == pytest.approx([-0.2] * 3 + [0.3] * 3 + [0.4] * 6)
    assert gains_figure([result("fedavg", {0: 0.5})]) is None


def test_p_values_are_corrected_for_their_number():
    accuracies = {"local": 0.5, "fedavg": 0.6, "fedprox": 0.505, "fd": 0.7}
    rng = np.random.default_rng(0)
    results = [
        result(name, {seed: value + (name != "local") * float(rng.normal(0, 0.004)) for seed in range(4)})
        for name, value in accuracies.items()
    ]
    alone = [corrected_p_values([results[0], each], results[0])[each.variant] for each in results[1:]]
    together = corrected_p_values(results, results[0])
    assert all(together[each.variant] >= p for each, p in zip(results[1:], alone, strict=True))
    assert min(together.values()) == pytest.approx(3 * min(alone))
    notes = "\n".join(notes_below(results, results[0]))
    assert "corrected for the number of differences in the table (3, Holm)" in notes
