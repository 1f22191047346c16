"""Tables of comparisons: differences and their intervals, clients' gains, costs, notes, and the figures."""

import math
import statistics
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from scipy import stats

from fedhet.comparing import recommending
from fedhet.comparing.measures import (
    MEASURES,
    RunOutcome,
    VariantResult,
    differences,
    holm,
    is_local,
    local_variant,
    outcome,
    paired_difference,
    verdict,
)
from fedhet.comparing.runs import Execution
from fedhet.comparing.tables import (
    _in_markdown,
    comparison_figure,
    markdown,
    notes_below,
    number_rows,
    separate_tables,
    unequal_steps,
)
from fedhet.config import configuration
from fedhet.results.history import RunFiles
from fedhet.results.terminal import TerminalTable
from fedhet.utils.statistics import ClientRow, Metric


def result(method, accuracies, refused=None, diverged=None, **settings):
    config = configuration.resolve({"method": method, **{key.replace("_", "-"): v for key, v in settings.items()}})
    failures = [{"client": client, "reason": reason} for client, reason in (refused or {}).items()]
    rows = [{"round": 1, "participants": [], "failures": failures}]
    for client, reason in (diverged or {}).items():  # in the first round all is well, and in the second it is not
        rows[0]["participants"].append(client)
        rows.append({"round": 2, "failures": [{"client": client, "reason": reason}], "participants": []})
        rows[-1]["trained"] = {"accuracy": {"weighted": 1.0}, "clients": 1}
    runs = [
        RunOutcome(
            SimpleNamespace(seed=seed, variant=method),
            RunFiles(Path(), config.flat(), {}, rows=rows, summary={}),
            dict.fromkeys(MEASURES) | {"personal_accuracy": accuracy, "labelled": 1440, "forwards": 28800},
        )
        for seed, accuracy in accuracies.items()
    ]
    return VariantResult(method, len(runs), runs, False)


LOCAL = result("local", {0: 0.5, 1: 0.6, 2: 0.7, 3: 0.9})
FEDAVG = result("fedavg", {0: 0.6, 1: 0.65, 2: 0.9, 5: 0.1})


def test_p_values_agree_with_intervals():
    zeros = dict.fromkeys(range(4), 0.0)
    found = [
        paired_difference({seed: mean / 100 + 0.04 * (-1) ** seed for seed in range(4)}, zeros)
        for mean in range(-12, 13)
    ]
    significant = [each.p < 0.05 for each in found]
    assert 5 < sum(significant) < 20
    assert significant == [not each.low <= 0 <= each.high for each in found]
    repeated = paired_difference(dict.fromkeys(range(4), 0.5), zeros)
    assert (repeated.mean, repeated.low, repeated.p) == (0.5, None, None)


def test_a_comparison_has_a_verdict():
    base = {seed: 0.5 + 0.01 * seed for seed in range(4)}
    better, same, worse = (
        result(name, {seed: value + by + 0.01 * (-1) ** seed for seed, value in base.items()})
        for name, by in (("fedhenn", 0.14), ("fedproto", 0.0), ("fd", -0.2))
    )
    local = result("local", base)
    assert verdict([local, worse, same, better], local) == (
        "fedhenn beats training alone by 0.140 [0.122, 0.158]; fd is worse than training alone by 0.200 "
        "[0.182, 0.218]; not significantly different from training alone after Holm's correction of p: fedproto."
    )
    assert verdict([same, better], same).startswith("fedhenn beats fedproto by 0.140")
    few = [result(name, {0: 0.5, 1: 0.6}) for name in ("local", "fedavg")]
    assert verdict(few, few[0]).startswith("Fewer than 3 seeds")
    assert verdict([local], local) == ""
    alike = [result(name, dict.fromkeys(range(5), value)) for name, value in (("local", 0.5), ("fedavg", 0.9))]
    assert verdict(alike, alike[0]).startswith("The same values with all seeds: no difference to training alone can")
    assert markdown([local, better], local, [], "fedhenn beats it.").startswith("fedhenn beats it.\n\n| method |")


def test_a_verdict_says_with_which_of_several_ways_of_training_alone_it_compares():
    base = {seed: 0.5 + 0.01 * seed for seed in range(4)}
    local, fedavg, trees, long = (
        result(name, {seed: value + by + 0.01 * (-1) ** seed for seed, value in base.items()})
        for name, by in (("local", 0.0), ("fedavg", 0.1), ("gradient-boosting", 0.2), ("local", 0.3))
    )
    long, public = replace(long, variant="long"), replace(long, variant="public", outcomes=[])
    for each in long.outcomes:
        files = replace(each.files, settings=each.files.settings | {"local.public": "mixed"})
        public.outcomes.append(replace(each, files=files))
    assert verdict([local, fedavg], local).startswith("fedavg beats training alone by 0.100")
    assert verdict([local, trees, fedavg], local).startswith("gradient-boosting beats local by 0.200")
    assert "; fedavg beats local by 0.100" in verdict([local, trees, fedavg], local)
    assert verdict([local, long], local).startswith("long beats local by 0.300")
    assert verdict([local, public], local).startswith("public beats local by 0.300")
    assert verdict([public, fedavg], public).startswith("fedavg is worse than public by 0.200")
    assert verdict([trees, fedavg], trees).startswith("fedavg is worse than gradient-boosting by 0.100")
    assert verdict([trees, long], trees).startswith("long beats gradient-boosting by 0.100")


def test_holms_correction():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_p_values_are_corrected():
    results = [
        result(name, {0: 0.5, 1: 0.5 + x, 2: 0.5 - x}) for name, x in (("local", 0), ("fd", 0.01), ("fml", 0.02))
    ]
    alone = [differences([results[0], each], results[0])[each.variant].p for each in results[1:]]
    together = differences(results, results[0])
    assert [together[each.variant].p for each in results[1:]] == holm(alone)
    assert "corrected for the number of differences in the table (2, Holm)" in "\n".join(
        notes_below(results, results[0])
    )


def test_methods_that_train_longer_are_named():
    """FedMA, which trains after each layer, "beat" training alone by three times its gradient steps without a word."""
    steps = {"local": 100, "fedavg": 110, "fedma": 350, "gradient-boosting": 0}
    results = [result(name, {0: 0.5, 1: 0.6, 2: 0.7}) for name in steps]
    for each in results:
        for run in each.outcomes:
            run.values["private_steps"] = steps[each.variant]
    sentence = "fedma takes 3.5 times local's gradient steps on own examples."
    assert [unequal_steps(each, results[0]) for each in results] == ["", "", sentence, ""]
    assert [note for note in notes_below(results, results[0]) if "gradient steps on own" in note] == [sentence]


def test_two_seeds_are_too_few():
    local, fedavg = result("local", {0: 0.5, 1: 0.6}), result("fedavg", {0: 0.6, 1: 0.65})
    text = markdown([local, fedavg], local, notes_below([local, fedavg], local))
    assert "if there are three seeds and not all give the same values." in text
    assert "| +0.075 |" in text
    assert "| p |" not in text
    heading, *rows = number_rows([local, fedavg], local)
    by_name = {row[1]: row[heading.index("personal_accuracy")] for row in rows}
    assert by_name["difference"] == pytest.approx(0.075)
    assert by_name["difference_low"] is by_name["difference_high"] is None


def test_differences_and_counts():
    text = markdown([LOCAL, FEDAVG], LOCAL, [])
    heading, _, local, fedavg = (line.strip("| ").split(" | ") for line in text.splitlines()[:4])
    assert heading[5:8] == ["minus local", "p", "labelled"]
    assert local[5:8] == ["-", "-", "1,440"]
    assert float(fedavg[6]) == pytest.approx(stats.ttest_1samp([0.1, 0.05, 0.2], 0).pvalue, abs=5e-4)
    margin = stats.t.ppf(0.975, 2) * statistics.stdev([0.1, 0.05, 0.2]) / math.sqrt(3)
    assert fedavg[5] == f"{0.35 / 3:+.3f} [{0.35 / 3 - margin:+.3f}, {0.35 / 3 + margin:+.3f}]"
    assert dict(zip(heading, fedavg, strict=True))["examples seen"] == "28,800"


@pytest.mark.parametrize(("measure", "column"), [("common_accuracy", "common"), ("trained_accuracy", "after training")])
def test_columns_of_other_accuracies(measure, column):
    assert f"| {column} |" not in markdown([LOCAL], LOCAL, [])
    for run in (ensemble := result("ensemble", {0: 0.5})).outcomes:
        run.values[measure] = 0.75
    text = markdown([ensemble], ensemble, [])
    assert f"| {column} |" in text
    assert "0.750" in text


def test_missing_clients_are_named_above_the_table():
    short = result("fedproto", {0: 0.5, 1: 0.6}, refused={"3": "its representation has width 9"}, clients=4)
    first, _, table = markdown([LOCAL, short], LOCAL, []).partition("\n\n")
    assert first == "fedproto, seeds 0, 1: 1 of 1 clients took no part: client 3: its representation has width 9."
    assert table.startswith("| method |")


def by_clients(name, accuracies, *, served=None, weights=(1, 1, 1, 3), alone=()):
    """Three seeds of a variant on four clients; `served` has other accuracies by client, for single seeds."""
    outcomes = []
    for seed in range(3):
        mine = {str(client): value + seed / 100 for client, value in (served or {}).get(seed, accuracies).items()}
        scores = {client: [[value], [weights[int(client)]]] for client, value in mine.items()}
        mean = sum(value[0] * weight[0] for value, weight in scores.values())
        mean /= sum(weight[0] for _, weight in scores.values())
        evaluated = {"accuracy": {"weighted": mean}, "clients": len(mine)}
        failures = [{"client": client, "reason": "too wide"} for client in "0123" if client not in mine]
        row = {"round": 1, "participants": [*mine], "failures": failures, "received": evaluated, "trained": evaluated}
        row["scores"] = {"received": scores, "trained": scores}
        rows = [ClientRow(1, client, "cnn", 9, value, None, 0, 0) for client, value in mine.items()]
        summary = {f"{kind}_accuracy": {"weighted": mean} for kind in ("personal", "global", "trained")}
        summary = summary | {"personal": "trained", "bytes_up": 9 * len(mine)}
        if name == "local":
            summary["global_accuracy"] = None
        config = configuration.resolve({"method": name, "clients": 4})
        files = RunFiles(Path(), config.flat(), {}, rows=[row], clients=rows, summary=summary)
        run = SimpleNamespace(seed=seed, variant=name)
        outcomes.append(outcome(run, files, alone[seed].scores["personal_accuracy"] if alone else {}))
    return VariantResult(name, 3, outcomes, False)


LONE = by_clients("local", {0: 0.9, 1: 0.8, 2: 0.7, 3: 0.1})


@pytest.mark.parametrize(("metric", "worst"), [("accuracy", -0.3), ("rmse", 0.1)])
def test_the_worst_tenth_is_a_difference_to_local_like_the_other_column(metric, worst):
    """A client whose error rises by 0.1 is the worst off, as one whose accuracy falls by 0.3."""
    row = {"round": 1, "trained": {metric: {"weighted": 0.75}, "clients": 2}}
    row["scores"] = {"trained": {"0": [[1.0], [9]], "1": [[0.5], [9]]}}
    config = configuration.resolve({"clients": 2})
    files = RunFiles(Path(), config.flat(), {}, rows=[row], summary={"metric": metric})
    run = SimpleNamespace(seed=0, variant="fedavg")
    values = outcome(run, files, {"0": Metric((0.9,), (1.0,)), "1": Metric((0.8,), (1.0,))}).values
    assert values["worst_tenth"] == pytest.approx(worst)
    assert values["worse_off"] == 0.5


def test_a_global_model_that_the_server_scored_is_each_clients():
    config = configuration.resolve({"clients": 2, "test-on": "global"})
    row = {"round": 1, "participants": ["0", "1"], "failures": [], "common": {"received": {"accuracy": 0.7}}}
    rows = [ClientRow(1, client, "cnn", 9, None, None, 0, 0) for client in "01"]
    files = RunFiles(Path(), config.flat(), {}, rows=[row], clients=rows, summary={"personal": "received"})
    alone = {"0": Metric((0.9,), (1.0,)), "1": Metric((0.4,), (1.0,))}
    values = outcome(SimpleNamespace(seed=0, variant="fedavg"), files, alone).values
    assert (values["worse_off"], values["worst_tenth"]) == (0.5, pytest.approx(-0.2))


def test_unseen_clients_are_not_among_those_of_a_global_model_that_the_server_scored():
    row = {"round": 2, "participants": [], "failures": [], "common": {"received": {"accuracy": 0.7}}}
    row["unseen_clients"] = {"clients": {"2": {}}}
    rows = [ClientRow(2, client, "cnn", 9, None, None, 0, 0) for client in "012"]
    files = RunFiles(Path(), {}, {}, rows=[row], clients=rows, summary={"personal": "received"})
    assert sorted(files.by_client("received", "common")) == ["0", "1"]


def test_a_difference_is_over_the_clients_that_both_scored():
    fedavg = by_clients("fedavg", {0: 0.85, 1: 0.75, 2: 0.65}, alone=LONE.outcomes)
    assert fedavg.mean("personal_accuracy") - LONE.mean("personal_accuracy") > 0.2
    found = fedavg.difference(LONE, "personal_accuracy")
    assert (found.mean, found.seeds, found.over) == (pytest.approx(-0.05), 3, "3 of 4")
    assert fedavg.difference(LONE, "global_accuracy") is None, "local has no global model"
    assert fedavg.difference(LONE, "bytes_up") is None, "costs of unlike clients"
    assert fedavg.difference(fedavg, "bytes_up").mean == 0
    whole = by_clients("fedprox", {0: 0.9, 1: 0.8, 2: 0.7, 3: 0.2})
    assert fedavg.difference(whole, "global_accuracy").mean == pytest.approx(-0.05)
    assert fedavg.outcomes[0].values["worse_off"] == 1.0
    assert verdict([LONE, fedavg], LONE) == (
        "fedavg is worse than training alone by 0.050 [0.050, 0.050] over the 3 of 4 clients that both scored."
    )
    heading, _, _, line = markdown([LONE, fedavg], LONE, [], "").splitlines()[2:6]
    cells = dict(zip(heading.split(" | "), line.split(" | "), strict=True))
    assert (cells["minus local"], cells["over clients"]) == ("-0.050 [-0.050, -0.050]", "3 of 4")
    names, *rows = number_rows([LONE, fedavg], LONE)
    clients = [row[names.index("clients")] for row in rows if row[0] == "fedavg"]
    assert clients == [3, 3, 3, "", "", "3 of 4", "3 of 4", "3 of 4", "3 of 4"]
    curves = [line.get_ydata()[0] for line in comparison_figure([LONE, fedavg]).axes[0].lines]
    assert curves == pytest.approx([0.81, 0.76]), "over clients 0, 1 and 2"


def test_a_best_of_fewer_clients_says_so():
    """Two clients failed in the best round: +0.238 was a difference over unlike clients."""
    results = []
    for name, failing in (("fedavg", "23"), ("fedprox", "")):
        rows = []
        for number, values in ((1, (0.9, 0.9, 0.3, 0.4)), (2, (0.9, 0.8, 0.5, 0.6))):
            scored = {c: value for c, value in zip("0123", values, strict=True) if number == 2 or c not in failing}
            mean = sum(scored.values()) / len(scored)
            row = {"round": number, "participants": [*scored], "failures": [], "scores": {}}
            row["scores"]["trained"] = {client: [[value], [1]] for client, value in scored.items()}
            rows.append(row | {"trained": {"accuracy": {"weighted": mean}, "clients": len(scored)}})
        clients = {client: {"round": 1} for client in rows[0]["participants"]}
        summary = {"best": {"accuracy": rows[0]["trained"]["accuracy"], "clients": clients}}
        summary["personal_accuracy"] = rows[1]["trained"]["accuracy"]
        settings = configuration.resolve({"method": name, "clients": 4}).flat()
        files = RunFiles(Path(), settings, {}, rows=rows, summary=summary)
        results.append(VariantResult(name, 1, [outcome(SimpleNamespace(seed=0, variant=name), files, {})], False))
    fedavg, fedprox = results
    found = fedavg.difference(fedprox, "best_accuracy")
    assert (found.mean, found.over) == (pytest.approx(0), "2 of 4")
    names, *rows = number_rows(results, fedprox)
    assert {row[names.index("clients")] for row in rows if "difference" in str(row[1])} == {"best_accuracy: 2 of 4"}
    assert "fedavg, seed 0: best is over 2 clients, personal over 4." in notes_below(results, fedprox)
    (axes,) = comparison_figure(results).axes
    (rings,) = (each for each in axes.collections if each.get_label() == "fewer clients")
    assert rings.get_offsets().tolist() == [[1, pytest.approx(0.9)]]
    assert "fewer clients" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_client_that_one_seed_lacks():
    served = {1: {0: 0.9, 1: 0.8, 2: 0.7}}
    fedavg = by_clients("fedavg", {0: 0.9, 1: 0.8, 2: 0.7, 3: 0.2}, served=served)
    found = fedavg.difference(LONE, "personal_accuracy")
    assert (found.mean, found.over) == (pytest.approx((0.05 + 0 + 0.05) / 3), "3 to 4 of 4")
    assert "fedavg over the 3 to 4 of 4 clients that both scored" in verdict([LONE, fedavg], LONE)
    assert "fedavg, seeds 1: 1 of 4 clients took no part: client 3: too wide." in markdown([LONE, fedavg], LONE, [])


def test_no_client_in_common():
    one, other = by_clients("fedavg", {0: 0.9, 1: 0.8}), by_clients("fedprox", {2: 0.7, 3: 0.1})
    assert one.difference(other, "personal_accuracy") is None
    said = verdict([other, one], other)
    assert said == "fedavg and fedprox have no scores of the same clients."
    assert "| - |" in markdown([other, one], other, [], said)
    same = by_clients("fedmd", {2: 0.7, 3: 0.1})
    assert verdict([other, one, same], other).endswith(said)


def test_no_seed_in_common():
    """Both scored all clients, and were said to have no scores of the same clients."""
    local, fedavg = result("local", {1: 0.5, 2: 0.6}), result("fedavg", {0: 0.9})
    said = "fedavg and local have no scores with the same seed."
    assert verdict([local, fedavg], local) == said
    assert recommending._verdict(local, fedavg, beats=False) == f"There is no verdict, since {said}"


def test_a_cell_of_markdown_is_text():
    assert _in_markdown("a|b <script> [x](http://y) 0.1 [-0.2, +0.3]") == (
        r"a\|b \<script> [x]\(http://y) 0.1 [-0.2, +0.3]"
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_names_stay_whole_in_narrow_tables(terminal):
    results = [LOCAL, result("nearest-neighbour", {0: 0.6, 1: 0.65, 2: 0.9})]
    console = Console(file=StringIO(), width=60, force_terminal=terminal)
    Execution(print, 1, console).show(TerminalTable(separate_tables(results, LOCAL)[0]))
    heading, _, *lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["local", "nearest-neighbour"]
    assert (max(map(len, lines)) <= 60) == terminal
    assert lines[2:] == (["(no room for models, seeds, global, p: see comparison.md)"] if terminal else [])
    assert ("models" in heading) == (not terminal)


def with_clients(name, accuracies, alone):
    """Three seeds of a variant, whose clients have these accuracies after the last round."""
    rows = [
        {
            "round": round,
            "participants": [],
            "failures": [],
            "trained": {"accuracy": {"weighted": 0.5}, "clients": 4},
            "scores": {"trained": {str(i): [[value * round / 2], [1]] for i, value in enumerate(accuracies)}},
        }
        for round in (1, 2)
    ]
    made = result(name, {0: 0.5, 1: 0.5, 2: 0.5})
    outcomes = [outcome(each.run, replace(each.files, rows=rows), alone) for each in made.outcomes]
    return VariantResult(name, 3, outcomes, False)


@pytest.fixture
def variants():
    local = with_clients("local", [0.5] * 4, {})
    return [local, with_clients("fedavg", [0.3, 0.8, 0.9, 0.9], local.outcomes[0].scores["personal_accuracy"])]


def test_local_is_without_public_examples():
    def local(**settings):
        return is_local(RunFiles(Path(), configuration.resolve(settings).flat(), {}))

    assert local(method="local")
    assert not local(**{"method": "local", "local.public": "mixed", "public-samples": 9})
    assert not local(method="fedavg")


def test_of_two_variants_that_train_alone_local_is_the_one_with_which_clients_are_compared():
    other = result("local", {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.6})
    for each in other.outcomes:
        each.run.variant = "X"
    other = replace(other, variant="X")
    assert local_variant({"X": other.outcomes[0].files, "local": LOCAL.outcomes[0].files}) == "local"
    assert local_variant({"X": other.outcomes[0].files, "fedavg": FEDAVG.outcomes[0].files}) == "X"
    assert verdict([other, LOCAL], other).startswith("local beats X by 0.375")
    assert verdict([other, FEDAVG], other).startswith("fedavg beats training alone by")


def test_gains_in_tables(variants):
    local, fedavg = variants
    _, (headings, alone, line), _ = separate_tables([local, fedavg], local)
    assert headings == ["method", "worse off", "worst tenth"]
    assert (alone, line) == (["local", "-", "-"], ["fedavg", "25%", "-0.200"])
    assert "| worse off | worst tenth |" in markdown([local, fedavg], local, [])
    heading, *rows = number_rows([local, fedavg], local)
    assert {row[heading.index("worse_off")] for row in rows if row[0] == "fedavg" and row[1] in (0, "mean")} == {0.25}
    assert "Worse off: fraction of clients" in "\n".join(notes_below([local, fedavg], local))
    assert len(separate_tables([LOCAL], LOCAL)) == 2, "without gains"
