"""Relations between the files of a run or comparison and the program: what they say is recomputed from the rows."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from scipy import stats

import fedhet
from fedhet.results.history import read_history
from tests.relations import outcomes
from tests.relations.outcomes import new
from tests.relations.programs import CLASSES, IN_ORDER, NAMED_CLASSES, Program, at
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
        counts = np.bincount(rows.labels, minlength=max(program.outputs, 2))
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
        if program.task != "regression":
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


@relation(
    slow=True, settings={}, method=tuple(method for method in trained if method != "local"), network=NETWORKS_ALONE
)
def a_table_is_made_of_its_runs(draw: Draw, program: Program, folder: Path) -> None:
    """A comparison's numbers are recomputed from the clients' scores in the folders of its runs."""
    complete(program, folder)
    settings = {key: value for key, value in program.all_settings.items() if key not in ("method", "workers")}
    out, seeds = new(folder), range(3)
    with outcomes.kept_log():
        fedhet.compare(["local", program.method], settings, seeds=seeds, **program.arguments(), out=out, jobs=1)
    metric = json.loads((out / "local-seed0" / "summary.json").read_text())["metric"]
    personal = f"personal_{metric}"
    with (out / "comparison.csv").open(newline="") as file:
        table = {(row["method"], row["seed"]): row for row in csv.DictReader(file)}
    mine, alone = ([scores(out / f"{method}-seed{seed}") for seed in seeds] for method in (program.method, "local"))
    assume(all({*one} == {*other} for one, other in zip(mine, alone, strict=True)))
    differences = []
    for seed, one, other in zip(seeds, mine, alone, strict=True):
        row = table[program.method, str(seed)]
        gains = sorted(one[client][0] - other[client][0] for client in other)
        weights = np.array([weight for _, weight in one.values()])
        mean = np.array([value for value, _ in one.values()]) @ weights / weights.sum()
        differences.append(mean - np.array([value for value, _ in other.values()]) @ weights / weights.sum())
        found = [float(row[name]) for name in (personal, "worse_off", "worst_tenth")]
        np.testing.assert_allclose(found, [mean, np.mean(np.array(gains) < -1e-12), gains[0]], atol=1e-9)
    test = stats.ttest_1samp(differences, 0)
    interval = test.confidence_interval()
    rows = [table[program.method, name] for name in ("difference", "difference_low", "difference_high", "p")]
    found = [float(row[personal] or "nan") for row in rows]
    assume(np.std(differences) > 1e-12)
    np.testing.assert_allclose(found, [np.mean(differences), *interval, test.pvalue], rtol=1e-6, atol=1e-9)


def scores(run: Path) -> dict[str, tuple[float, float]]:
    """Return a run's last personal scores and their weights by client."""
    last = json.loads((run / "history.jsonl").read_text().splitlines()[-1])["scores"]
    personal = json.loads((run / "summary.json").read_text())["personal"]
    return {client: (values[0][0], values[1][0]) for client, values in last[personal].items()}
