"""Relations between the files of a run or comparison and the program: what they say is recomputed from the rows."""

import csv
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from scipy import stats

import fedhet
from fedhet.comparing import Comparison
from fedhet.errors import ConfigError
from fedhet.methods.method import ABSENT
from fedhet.results.figures import run_figures, save_figure
from fedhet.results.history import read_history, read_run
from fedhet.results.terminal import by_architecture
from tests.relations import outcomes
from tests.relations.outcomes import new
from tests.relations.programs import CLASSES, FORMS, IN_ORDER, NAMED_CLASSES, Program, at
from tests.relations.relations import NETWORKS_ALONE, Draw, complete, relation, trained

NAMED = (*NAMED_CLASSES, "files")
"""Forms whose classes have names."""


@relation(settings={})
def a_summary_is_made_of_the_clients(draw: Draw, program: Program, folder: Path) -> None:
    """The statistics of `summary.json` are those of the clients' last scores, weighted by their test examples."""
    outcome = complete(program, folder)
    summary = json.loads((outcome.folder / "summary.json").read_text())
    scores = np.array([accuracy for accuracy, _ in outcome.clients.values()])
    tests = np.array([len(program.rows(int(client), "test").labels) for client in outcome.clients])
    metric = summary["metric"]
    assert metric in (outcome.folder / "clients.csv").read_text().splitlines()[0].split(",")
    said = summary[f"personal_{metric}"] or summary[f"global_{metric}"]
    expected = {"mean": scores.mean(), "std": scores.std(), "min": scores.min(), "max": scores.max()}
    np.testing.assert_allclose([said[name] for name in expected], [*expected.values()], rtol=1e-9, atol=1e-9)
    if program.task in ("classification", "binary"):  # whose metric is a mean over examples
        np.testing.assert_allclose(said["weighted"], scores @ tests / tests.sum(), rtol=1e-9)
    for client, counts in summary.get("classes", {}).items():
        assert counts == classes(program, int(client)), client


def classes(program: Program, client: int) -> dict[str, int]:
    """Return a client's numbers of training examples by the name of a class or, without names, by its number."""
    rows = program.rows(client, "train")
    if program.task == "multi-label":
        counts = rows.labels.sum(0)
    else:
        counts = np.bincount(rows.labels.ravel(), minlength=max(program.outputs, 2))
    names = rows.classes if program.form in NAMED and rows.classes else range(len(counts))
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}


@relation(
    settings={"validation": 0.3, "keep-best": True}, method=trained, task="classification", network=NETWORKS_ALONE
)
def the_best_networks_have_the_scores_of_the_summary(draw: Draw, program: Program, folder: Path) -> None:
    """A network in `models/best` predicts a client's test examples as well as `best` in `summary.json` says."""
    assume("rounds" in program.all_settings)
    outcome = complete(program.having(rounds=4), folder)
    best = json.loads((outcome.folder / "summary.json").read_text())["best"]
    assert {*best["clients"]} == {*outcome.clients}
    for client, about in best["clients"].items():
        functions = {"model": program.model, "data": program.data}
        network = fedhet.load_model(outcome.folder / "models" / "best", int(client), **functions)
        assert abs(accuracy_of(network, program, int(client)) - about["test"]) < 1e-6, (client, best)


@relation(settings={"save-every": 1}, method=trained, task="classification", network=NETWORKS_ALONE)
def networks_of_a_round_have_its_scores(draw: Draw, program: Program, folder: Path) -> None:
    """A client's network in `models/round-N` predicts its test examples as well as round N of the history says."""
    assume("rounds" in program.all_settings)
    outcome = complete(program, folder)
    scored = json.loads((outcome.folder / "summary.json").read_text())["personal"]
    rows = {row["round"]: row for row in read_history(outcome.folder) if not row.get("final")}
    for path in sorted((outcome.folder / "models").glob("round-*/*.safetensors")):
        if path.stem == "global":
            continue
        number = int(path.parent.name.removeprefix("round-"))
        network = fedhet.load_model(path.parent, int(path.stem), model=program.model, data=program.data)
        accuracy = accuracy_of(network, program, int(path.stem))
        assert abs(accuracy - rows[number]["scores"][scored][path.stem][0][0]) < 1e-6, (path, accuracy)


@relation(slow=True, settings={}, method=trained, task="classification", network=NETWORKS_ALONE)
def each_network_is_evaluated_at_each_client(draw: Draw, program: Program, folder: Path) -> None:
    """A cell of the table of `fedhet.evaluate` is the accuracy of a loaded network on a client's test examples.

    The classes of one client have another order, where they have names.
    """
    place = draw(st.integers(0, program.clients - 1))
    order = draw(st.sampled_from(((0, 1, 2), (2, 0, 1))))
    if program.form in NAMED_CLASSES and program.sizes != "lacking":
        edited = program.edited(at(place, ("train", "test"), lambda rows: rows.renumbered(list(order))))
    else:
        edited = program
    outcome = complete(edited, folder)
    with outcomes.kept_log():
        table = fedhet.evaluate(outcome.folder, **edited.arguments())
    names = json.loads((outcome.folder / "summary.json").read_text()).get("names", {}).get("classes", list(CLASSES))
    for model in outcome.clients:
        with outcomes.kept_log() as log:
            network = fedhet.load_model(outcome.folder, int(model), model=program.model, data=program.data)
        said = re.search(r"its classes have the order (\w+), (\w+), (\w+)", "\n".join(log))
        own = [*said.groups()] if said else names
        for client in outcome.clients:
            value = table.value(model, client)
            if value is not None:
                expected = accuracy_of(network, program, int(client), [CLASSES.index(name) for name in own])
                assert abs(value - expected) < 1e-6, (model, client, value, expected, own)


def accuracy_of(network: torch.nn.Module, program: Program, client: int, order: Sequence[int] = (0, 1, 2)) -> float:
    """Return the accuracy of a network, whose outputs are for classes in this order, on a client's test examples."""
    rows = program.rows(client, "test")
    with torch.no_grad():
        outputs = network(torch.tensor(rows.inputs).to(next(network.parameters()).dtype))
    return float((np.array(order)[outputs.argmax(1).numpy()] == rows.labels).mean())


@relation(settings={}, method="local", network=NETWORKS_ALONE, form=IN_ORDER)
def described_data_are_the_rows(draw: Draw, program: Program, folder: Path) -> None:
    """What a run without training says of the clients' data is what NumPy says of their rows."""
    said = json.loads((complete(program.having(rounds=0), folder).folder / "summary.json").read_text())["data"]
    every = []
    for client, about in said["clients"].items():
        rows = program.rows(int(client), "train")
        every.append(rows.inputs)
        check_description(about, rows.inputs)
        assert about["test"] == len(program.rows(int(client), "test").labels)
        if program.task in ("classification", "binary", "multi-label"):
            assert about["classes"] == [*classes(program, int(client)).values()]
    assert len(every) == program.clients
    check_description(said["all"], np.concatenate(every))


def check_description(about: Mapping[str, Any], inputs: np.ndarray[Any, Any]) -> None:
    """Compare what is said about training examples with their inputs (n, d)."""
    assert (about["train"], about["values"], about["missing"]) == (len(inputs), inputs.size, 0)
    assert about["shape"] == [*inputs.shape[1:]]
    values = [about["mean"], about["std"], *about["range"]]
    expected = [inputs.mean(dtype=float), inputs.std(dtype=float), inputs.min(), inputs.max()]
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class Flaky(Program):
    """A program whose functions, or networks in training, raise an exception in some of their calls.

    Attributes:
        raising: by client, the function (`data`, `model` or `training`) and the numbers of its calls that raise.
        calls: number of calls by client and function.
    """

    raising: Mapping[int, tuple[str, range]] = field(default_factory=dict)
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)

    def call(self, client: int, function: str) -> None:
        """Count a call; raise an exception if it is one that fails."""
        self.calls[client, function] += 1
        chosen, numbers = self.raising[client]
        if function == chosen and self.calls[client, function] in numbers:
            raise ValueError(f"a call of {function} fails")

    def data(self, client: Any) -> dict[str, Any]:
        """Return a client's data, or raise."""
        self.call(client.partition_id, "data")
        return super().data(client)

    def model(self, client: Any) -> Any:
        """Return a client's network, which may raise in training, or raise."""
        number = client.partition_id
        self.call(number, "model")
        network = super().model(client)
        network.register_forward_pre_hook(lambda module, _: self.call(number, "training") if module.training else None)
        return network


def flaky(draw: Draw, program: Program) -> Flaky:
    """Return the program with clients that are not drawn in some rounds, fail in some, or come later."""
    raising = {}
    for client in range(program.clients):
        function, most = draw(st.sampled_from((("", 0), ("data", 2), ("model", 3), ("training", 40))))
        first = draw(st.integers(1, most + 1))
        raising[client] = function, range(first, first + draw(st.sampled_from((1, 2, 20))))
    rounds = {"rounds": 4} if "rounds" in program.all_settings else {}
    having = program.having(**rounds, fraction_train=draw(st.sampled_from((0.4, 0.7, 1.0))))
    return Flaky(**vars(having), raising=raising)


@relation(settings={}, method=trained, network=NETWORKS_ALONE, clients=(3, 4))
def files_agree_on_who_took_part(draw: Draw, program: Program, folder: Path) -> None:
    """Means and numbers of clients in a run's files are of those that took part, of whom some fail or come later."""
    outcome = complete(flaky(draw, program), folder)
    run = read_run(outcome.folder)
    said = run.summary
    for row in run.rows:
        lines = {line.client: line.accuracy for line in run.clients if line.round == row["round"]}
        scored = {client: total([pair]) for client, pair in row["scores"].get(said["personal"], {}).items()}
        assert {client: value for client, value in lines.items() if value is not None} == pytest.approx(scored)
        failed = {failure["client"] for failure in row["failures"]}
        assert not failed & ({*row["participants"]} | {*scored})
        for which in ("received", "trained"):
            pairs = [*row["scores"].get(which, {}).values()]
            count = len(pairs) + len(row.get("undefined", {}).get(which, ()))
            assert (row[which] or {"clients": 0})["clients"] == count
            if pairs:
                check_statistics(row[which][said["metric"]], pairs)
    last = [row for row in run.rows if row[said["personal"]]][-1]["scores"][said["personal"]]
    check_statistics(said[f"personal_{said['metric']}"], [*last.values()])
    trained = {client for row in run.rows for client in row["participants"]}
    failures = [failure["client"] for row in run.rows for failure in row["failures"]]
    absent = {*failures} - trained
    assert ({*said.get("never_took_part", {})}, said["failures"]) == (absent, len(failures))
    assert said["clients"] == len({line.client for line in run.clients})
    for way in ("bytes_up", "bytes_down"):
        assert said[way] == sum(getattr(line, way) for line in run.clients)
    assert all(line.examples == len(program.rows(int(line.client), "train").labels) for line in run.clients)
    assert by_architecture(run)[-1][1] == str(len(outcome.clients))
    absences = " ".join(run.absences)
    assert not absent - {*last} or re.search(rf"{len(absent - {*last})} of \d+ {ABSENT}", absences)
    if not run.has_global or said["personal"] == "trained":
        assert not {*last} - trained or "clients never trained, but are scored" in absences


def total(pairs: Sequence[Any]) -> float:
    """Return the metric of several clients, whose pairs have its values and weights: the mean of the weighted means."""
    values, weights = (np.array([pair[place] for pair in pairs]) for place in (0, 1))
    known = weights.sum(0) > 0
    return float(np.average(values[:, known], 0, weights[:, known]).mean())


def check_statistics(said: Mapping[str, float], pairs: Sequence[Any]) -> None:
    """Compare statistics over clients with the values and weights of their metric."""
    each = np.array([total([pair]) for pair in pairs])
    expected = {"weighted": total(pairs), "mean": each.mean(), "std": each.std(), "min": each.min(), "max": each.max()}
    np.testing.assert_allclose([said[name] for name in expected], [*expected.values()], rtol=1e-9, atol=1e-9)


@relation(settings=({}, {"fraction-train": 0.5}), method=trained)
def figures_show_the_numbers_of_the_files(draw: Draw, program: Program, folder: Path) -> None:
    """Lines, dots and matrices of a run's figures have the values of `history.jsonl` and `clients.csv`."""
    outcome = complete(program, folder)
    run = read_run(outcome.folder)
    drawn = {name: figure.axes[0] for name, figure in run_figures(run).items()}
    dots = [value for line in drawn["clients"].lines for value in line.get_xdata()]
    np.testing.assert_array_equal(sorted(dots), sorted(accuracy for accuracy, _ in outcome.clients.values()))
    names = {"personal models": run.scored, "global model": "received", "as received": "received"}
    for line in drawn["accuracy"].lines:
        which = names.get(line.get_label(), "trained")
        points = {
            row["round"] - (which == "received" or row.get("final", False)): total([*row["scores"][which].values()])
            for row in run.rows
            if row["scores"].get(which)
        }
        np.testing.assert_allclose([*zip(line.get_xdata(), line.get_ydata(), strict=True)], sorted(points.items()))
    losses = [[row["round"], row["train_loss"]] for row in run.rows if row["train_loss"] is not None]
    lines = {line.get_label(): line.get_xydata().tolist() for line in drawn["losses"].lines}
    assert lines.get("training", []) == losses
    if "classes" in drawn:
        values = [[*classes(program, int(client)).values()] for client in run.summary["classes"]]
        np.testing.assert_array_equal(drawn["classes"].images[0].get_array(), values)


@relation(
    slow=True,
    settings={},
    method=tuple(method for method in trained if method != "local"),
    network=NETWORKS_ALONE,
    form=tuple(form for form in FORMS if form != "files"),  # whose folder other processes do not know
)
def a_table_is_made_of_its_runs(draw: Draw, program: Program, folder: Path) -> None:
    """A comparison's numbers, and its figure, are recomputed from the clients' scores in the folders of its runs."""
    complete(program, folder)
    program = flaky(draw, program) if draw(st.booleans()) else program
    settings = {key: value for key, value in program.all_settings.items() if key not in ("method", "workers")}
    out, seeds = new(folder), range(3)
    with outcomes.kept_log():
        arguments = {"seeds": seeds, **program.arguments(), "out": out, "jobs": 1}
        try:
            done = fedhet.compare(["local", program.method], settings, **arguments)
        except ConfigError as error:  # before the first run
            assume("cannot train these clients" not in str(error))
            raise
    assume(not done.failed)
    personal = "personal_" + json.loads((out / "local-seed0" / "summary.json").read_text())["metric"]
    with (out / "comparison.csv").open(newline="") as file:
        table = {(row["method"], row["seed"]): row for row in csv.DictReader(file)}
    mine, alone = ([scores(out / f"{method}-seed{seed}") for seed in seeds] for method in (program.method, "local"))
    assume(all({*one} & {*other} for one, other in zip(mine, alone, strict=True)))
    differences = []
    for seed, one, other in zip(seeds, mine, alone, strict=True):
        row = table[program.method, str(seed)]
        both = [client for client in one if client in other]
        gains = sorted(total([one[client]]) - total([other[client]]) for client in both)
        differences.append(mean_of(one, both) - mean_of(other, both))
        found = [float(row[name]) for name in (personal, "worse_off", "worst_tenth")]
        expected = [mean_of(one), np.mean(np.array(gains) < -1e-12), gains[0]]
        np.testing.assert_allclose(found, expected, atol=1e-9)
    check_figure(done, [program.method], [mine])
    check_figure(done, ["local", program.method], [alone, mine])
    assume(np.std(differences) > 1e-12)  # the same values with all seeds have no p
    test = stats.ttest_1samp(differences, 0)
    interval = test.confidence_interval()
    rows = [table[program.method, name] for name in ("difference", "difference_low", "difference_high", "p")]
    found = [float(row[personal] or "nan") for row in rows]
    np.testing.assert_allclose(found, [np.mean(differences), *interval, test.pvalue], rtol=1e-6, atol=1e-9)


def mean_of(scores: Mapping[str, Any], clients: Collection[str] | None = None) -> float:
    """Return the metric of all clients, or of some, from their `scores`."""
    return total([scores[client] for client in clients or scores])


def check_figure(done: Comparison, names: Sequence[str], runs: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Check that lines end at the mean over seeds, of the clients that all scored, and that the files have them."""
    shared = set.intersection(*({*scores} for by_seed in runs for scores in by_seed))
    axes = done.plot(names).axes[0]
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    bands = [band.get_paths()[0].vertices for band in axes.collections]
    for name, by_seed, band in zip(names, runs, bands, strict=True):
        values = [mean_of(scores, shared) for scores in by_seed]
        spread = np.std(values, ddof=1)
        last = band[band[:, 0] == band[:, 0].max()][:, 1]
        found = [lines[name][-1], last.min(), last.max()]
        np.testing.assert_allclose(
            found, [np.mean(values), np.mean(values) - spread, np.mean(values) + spread], atol=1e-9
        )
    figure = done.plot()
    for kind in ("png", "pdf", "svg"):
        save_figure(figure, done.folder / f"again.{kind}")
        assert (done.folder / f"again.{kind}").read_bytes() == (done.folder / f"comparison.{kind}").read_bytes()


def scores(run: Path) -> dict[str, Any]:
    """Return the values and weights of the metric of the last personal models, by client."""
    last = json.loads((run / "history.jsonl").read_text().splitlines()[-1])["scores"]
    return last[json.loads((run / "summary.json").read_text())["personal"]]
