"""Relations that every program must satisfy: a change of the program, and what may change in the outcome.

A relation is a function of a hypothesis `draw`, a program and a folder. It checks its claim, or rejects programs for
which the claim is not made. A program that fedhet refuses satisfies every relation, if the changed one is refused too.
"""

import json
import os
import random
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from safetensors.numpy import load_file
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    jaccard_score,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading
from sklearn.svm import SVC, SVR
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import fedhet
from fedhet.cli import app
from fedhet.config import configuration
from fedhet.data import PublicDataset
from fedhet.errors import FedhetError
from fedhet.flower.grid import LocalGrid
from fedhet.methods import registry
from fedhet.results.history import MEASURED, read_history
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.setup.user_functions import UserFunctions
from fedhet.utils import process
from tests.relations import outcomes
from tests.relations.outcomes import Outcome, close, equal, new, run
from tests.relations.programs import (
    CLASSES,
    COLUMNS,
    CONTROLS,
    FORMS,
    IN_ORDER,
    NAMED_CLASSES,
    NAMED_COLUMNS,
    NETWORKS,
    SYMMETRIC,
    Program,
    Rows,
    at,
    everywhere,
)
from tests.simulations import run_on_ray

Draw = Callable[[st.SearchStrategy[Any]], Any]
Check = Callable[[Draw, Program, Path], None]


@dataclass(frozen=True)
class Relation:
    """A relation: its check, the programs for which it is claimed (values of attributes), and whether it takes long."""

    check: Check
    programs: Mapping[str, Any]
    slow: bool = False


RELATIONS: dict[str, Relation] = {}


def relation(*, slow: bool = False, **programs: Any) -> Callable[[Check], Check]:
    """Register a relation under the name of its function; `programs` restricts the programs that are drawn."""

    def registered(check: Check) -> Check:
        RELATIONS[check.__name__] = Relation(check, programs, slow)
        return check

    return registered


def complete(program: Program, folder: Path, **arguments: Any) -> Outcome:
    """Return the outcome of a program that is not refused, or reject the program."""
    outcome = run(program, folder, **arguments)
    assume(not outcome.refused)
    return outcome


def order(draw: Draw, count: int) -> tuple[int, ...]:
    """Draw an order of so many things that is not the given one."""
    orders = [chosen for chosen in permutations(range(count)) if chosen != tuple(range(count))]
    return draw(st.sampled_from(orders))


BY_CLASS = tuple(method for method in SYMMETRIC if method not in ("local", "fedrep"))
"""Methods of which clients share what depends on the numbers of classes."""

PARTS = (("train",), ("test",), ("train", "test"))
WHOLE: dict[str, Any] = {}
"""Settings without `validation`, whose examples depend on the client's number and the order of rows."""

EACH_ROUND = (WHOLE, {"validation": 0.3, "keep-best": True})
"""Settings with which each client trains in each round."""

full = {"batch_size": 500}
"""A batch size that is larger than any client's number of examples."""
NETWORKS_ALONE = tuple(network for network in NETWORKS if network != "beside trees")
"""Networks of which runs save files."""

trained = tuple(method for method in registry.own_methods() if method not in CONTROLS)


# ---- names


@relation(form=NAMED_COLUMNS, sizes=("equal", "unequal"))
def columns_in_another_order_are_aligned(draw: Draw, program: Program, folder: Path) -> None:
    """One client's columns are in another order in its test part or, where clients share the first layer, in any."""
    client = draw(st.integers(0, program.clients - 1))
    shared = program.method in ("fedavg", "fedprox", "fedrep", "layer-average") and program.clients > 2
    parts = draw(st.sampled_from(PARTS)) if shared else ("test",)
    chosen = order(draw, len(program.rows(0, "train").columns))
    changed = run(program.edited(at(client, parts, lambda rows: rows.reordered(list(chosen)))), folder)
    equal(run(program, folder), changed)


@relation(form=NAMED_COLUMNS, network=("mlp", "dropout", "start"))
def other_columns_are_refused(draw: Draw, program: Program, folder: Path) -> None:
    """A test part with a column of another name is no test part of this network: its client is refused."""
    client = draw(st.integers(0, program.clients - 1))
    complete(program, folder)
    other = at(client, ("test",), lambda rows: replace(rows, columns=("height", *rows.columns[1:])))
    changed = run(program.edited(other), folder)
    said = changed.refused + " ".join(reason for name, reason in changed.failures if name == str(client))
    assert "height" in said
    assert "age" in said


@relation(form="frame", network=("mlp", "dropout", "start"))
def names_that_a_part_lacks_are_asked_for(draw: Draw, program: Program, folder: Path) -> None:
    """A part of a client whose other part has names of columns or classes has none: the run asks for them."""
    client = draw(st.integers(0, program.clients - 1))
    complete(program, folder)
    part, kind = draw(st.sampled_from(("train", "test"))), draw(st.sampled_from(("columns", "classes")))
    kind = kind if program.task == "classification" else "columns"
    none = tuple(map(str, range(len(COLUMNS)))) if kind == "columns" else ()
    changed = run(program.edited(at(client, (part,), lambda rows: replace(rows, **{kind: none}))), folder)
    assert f"give names to the {kind} of {part}, or check that their order is a" in changed.log


@relation(form="frame", network=("mlp", "dropout", "start"), sizes="equal")
def two_columns_of_one_name_are_refused(draw: Draw, program: Program, folder: Path) -> None:
    """Two columns of a client's table, or of all clients', have one name: no order can be told by names."""
    client = draw(st.integers(0, program.clients - 1))
    places = draw(st.sampled_from([*permutations(range(len(COLUMNS)), 2)]))
    parts = draw(st.sampled_from((*PARTS, ("public",))))

    def repeated(rows: Rows) -> Rows:
        names = [*rows.columns]
        names[places[0]] = names[places[1]]
        return replace(rows, columns=tuple(names))

    complete(program, folder)
    alone = draw(st.booleans()) and parts != ("public",)
    changed = run(program.edited(at(client, parts, repeated) if alone else everywhere(parts, repeated)), folder)
    words = changed.refused + " ".join(reason for name, reason in changed.failures if name == str(client))
    assert f"name {COLUMNS[places[1]]}" in words


@relation(form=NAMED_COLUMNS, clients=(3, 4))
def other_units_are_named(draw: Draw, program: Program, folder: Path) -> None:
    """A column or target of a client has other units than in its other part or, where layers are shared, at others."""
    client = int(draw(st.sampled_from(sorted(complete(program, folder).clients))))
    place = draw(st.integers(0, 5))
    factor = np.float32(draw(st.sampled_from((1e-2, 1e3))))
    factors = np.where(np.arange(6) == place, factor, np.float32(1))
    shared = program.method in ("fedavg", "fedprox", "layer-average")
    parts = draw(st.sampled_from(PARTS)) if shared else ("test",)
    change, name = lambda rows: replace(rows, inputs=rows.inputs * factors), f"column {COLUMNS[place]}"
    if program.task == "regression" and draw(st.booleans()):
        change, name = lambda rows: replace(rows, labels=rows.labels * factor), "target 0"
    changed = run(program.edited(at(client, parts, change)), folder)
    reasons = changed.refused + changed.log + " ".join(reason for _, reason in changed.failures)
    assert name in reasons or "loss" in reasons


@relation(form=NAMED_CLASSES, task=("classification", "classification", "multi-label", "segmentation"))
def classes_in_another_order_are_aligned(draw: Draw, program: Program, folder: Path) -> None:
    """One client numbers its classes, or orders its columns of labels, in another way in some of its parts."""
    assume(program.rows(0, "train").classes)
    client = draw(st.integers(0, program.clients - 1))
    parts = ("test",) if program.clients == 2 else draw(st.sampled_from(PARTS))
    chosen = order(draw, 3)
    changed = run(program.edited(at(client, parts, lambda rows: rows.renumbered(list(chosen)))), folder)
    first = run(program, folder)
    if changed.refused or program.method not in BY_CLASS:  # without shared numbers of classes, a client keeps its own
        assume(not first.refused)
        assert set(changed.clients) == set(first.clients)
        return
    equal(first, changed)


@relation(form=(*NAMED_CLASSES, "files"), task="classification", sizes="equal")
def a_class_that_a_part_lacks(draw: Draw, program: Program, folder: Path) -> None:
    """A client whose part does not list a class is refused, or scores with the right classes."""
    complete(program, folder)
    lacking = draw(st.integers(0, 2))

    def without(rows: Rows) -> Rows:
        kept = rows.take(rows.labels != lacking)
        classes = tuple(name for number, name in enumerate(kept.classes) if number != lacking)
        return replace(kept, labels=kept.labels - (kept.labels > lacking), classes=classes)

    client = draw(st.integers(0, program.clients - 1))
    part = draw(st.sampled_from(PARTS))
    changed = run(program.edited(at(client, part, without)), folder)
    same = run(program.edited(at(client, part, lambda rows: rows.take(rows.labels != lacking))), folder)
    words = changed.refused + changed.log + " ".join(reason for _, reason in changed.failures)
    if part == ("test",) and not changed.refused:
        close(replace(same, models={}), replace(changed, models={}))
    else:
        assert program.method not in BY_CLASS or CLASSES[lacking] in words or changed.clients == same.clients


@relation(form=("named", "collated"), task="classification", sizes="equal")
def classes_of_one_name_are_not_scored_by_number(draw: Draw, program: Program, folder: Path) -> None:
    """Two classes have one name, and a part has another order: its client is refused, or named."""
    complete(program, folder)
    client = draw(st.integers(0, program.clients - 1))
    names = draw(st.sampled_from((("ant", "ant", "bee"), ("ant", "bee", "ant"), ("bee", "ant", "ant"))))
    others = draw(st.sampled_from(((0, 1, 2), (1, 2, 0), (2, 0, 1))))
    alike = everywhere(("train", "test", "public"), lambda rows: replace(rows, classes=names))
    other = at(client, ("test",), lambda rows: rows.renumbered(list(others)))
    changed = run(program.edited(alike).edited(other), folder)
    words = changed.refused + " ".join(reason for name, reason in changed.failures if name == str(client))
    assert names == tuple(names[number] for number in others) or "ant" in words


@relation(settings=WHOLE, method=SYMMETRIC, network="start", double=True, form=IN_ORDER, clients=(3, 4))
def clients_in_another_order(draw: Draw, program: Program, folder: Path) -> None:
    """Client k does what client p(k) did."""
    chosen = order(draw, program.clients)
    # Projections to a common width have random initial weights, which depend on the client.
    widths = {f"{program.method}.width": 0} if program.method in ("fedproto", "fedgh") else {}
    program = program.having(**full, **widths)
    first = complete(program, folder)
    moved = run(Renumbered(**vars(program), chosen=chosen), folder)
    close(first, moved, {str(old): str(chosen.index(old)) for old in range(program.clients)})


@dataclass(frozen=True)
class Renumbered(Program):
    """A program whose client k has the data of client `chosen[k]`."""

    chosen: tuple[int, ...] = ()

    def rows(self, client: int, part: str) -> Rows:
        """Return the rows of another client."""
        return super().rows(self.chosen[client], part)


@relation(form="frame", task="classification", network=("mlp", "start"), sizes="equal")
def names_of_new_examples(draw: Draw, program: Program, folder: Path) -> None:
    """Saved networks score new examples alike with columns and classes in another order, and refuse other names."""
    outcome = complete(program, folder)
    rows = program.rows(7, "test")
    columns, classes = order(draw, len(rows.columns)), order(draw, 3)
    first = evaluated(program, outcome, rows)
    assert evaluated(program, outcome, rows.reordered(list(columns)).renumbered(list(classes))) == first
    kind = draw(st.sampled_from(("columns", "classes")))
    changed = evaluated(program, outcome, replace(rows, **{kind: ("height", *getattr(rows, kind)[1:])}))
    assert isinstance(first, str) or (isinstance(changed, str) and "height" in changed)


@relation(method=("local", "fedavg", "fedrep", "fedproto"), task="classification", network=("mlp", "widths", "dropout"))
def one_table_of_all_clients(draw: Draw, program: Program, folder: Path) -> None:
    """Clients' rows alternate in one table; and a new table has its columns and classes in another order."""
    table = OneTable(**vars(program))
    mixed = replace(table, mixed=True, index=draw(st.booleans()))
    first = run(table, folder)
    equal(first, run(mixed, folder))
    assume(not first.refused)
    other = replace(mixed, columns=order(draw, len(COLUMNS)), classes=order(draw, 3))
    tables = []
    for new_rows in (table, other):
        with outcomes.kept_log():
            data = {"test": new_rows.arguments()["data"]}
            tables.append(fedhet.evaluate(first.folder, model=program.model, data=data).table)
    assert tables[0] == tables[1]


@dataclass(frozen=True)
class OneTable(Program):
    """A program with the clients' training rows in one table, split by `fedhet.by_column`.

    Attributes:
        columns: the order of the table's columns.
        classes: the order of the classes.
        mixed: whether rows of all clients alternate.
        index: whether the index has other numbers than the rows' places.
    """

    columns: tuple[int, ...] = tuple(range(len(COLUMNS)))
    classes: tuple[int, ...] = (0, 1, 2)
    mixed: bool = False
    index: bool = False

    @property
    def all_settings(self) -> dict[str, Any]:
        """Return the settings without a number of clients, which the table has."""
        return {key: value for key, value in super().all_settings.items() if key != "clients"}

    def arguments(self) -> dict[str, Any]:
        """Return the network, the table and the task."""
        import pandas

        parts = []
        for client in range(self.clients):
            rows = self.rows(client, "train").reordered(list(self.columns)).renumbered(list(self.classes))
            part = pandas.DataFrame(rows.inputs, columns=list(rows.columns))
            part["kind"] = pandas.Categorical.from_codes(rows.labels, categories=list(rows.classes))
            part["ward"] = f"ward {client}"
            parts.append(part)
        table = pandas.concat(parts)
        table = table.sort_index(kind="stable") if self.mixed else table
        table.index = range(len(table), 0, -1) if self.index else range(len(table))
        return {"model": self.model, "data": fedhet.by_column(table, "ward", label="kind"), "task": self.task}


def evaluated(program: Program, outcome: Outcome, rows: Rows) -> list[list[str]] | str:
    """Return the table of a run's models by clients, with the same new examples at each, or why there is none."""
    data = {"test": FORMS[program.form](rows, program)}
    try:
        with outcomes.kept_log():
            return fedhet.evaluate(outcome.folder, model=program.model, data=data).table
    except FedhetError as error:
        return str(error).partition("\n")[2]


# ---- the same examples


@relation(settings=WHOLE, method=(*SYMMETRIC, "fedmd", "fml"), network=("start", "mlp"), double=True, form=IN_ORDER)
def rows_in_another_order(draw: Draw, program: Program, folder: Path) -> None:
    """The rows of a client's part are in another order; a batch has all of them."""
    program = program.having(**full)
    part = draw(st.sampled_from(("train", "test")))
    shuffled = at(draw(st.integers(0, program.clients - 1)), (part,), lambda rows: rows.take(slice(None, None, -1)))
    close(complete(program, folder), run(program.edited(shuffled), folder))


WHOLE_PUBLIC: dict[str, dict[str, Any]] = {
    "feddf": {},
    "fedhenn": {"fedhenn.target": "kernel", "fedhenn.rad-batch": 0, "fedhenn.eta0": 1.0},
    "fedmd": {"fedmd.public-batch": 24},
}
"""Settings with which each step has all public examples, and no random number depends on one."""


@relation(settings=WHOLE, method=tuple(WHOLE_PUBLIC), network="start", double=True, form=("tensors", *NAMED_CLASSES))
def public_rows_in_another_order(draw: Draw, program: Program, folder: Path) -> None:
    """The rows of the public dataset are in another order; a step has all of them."""
    program = replace(program, settings={**program.settings, "batch-size": 500, **WHOLE_PUBLIC[program.method]})
    shuffled = everywhere(("public",), lambda rows: rows.take(slice(None, None, -1)))
    close(complete(program, folder), run(program.edited(shuffled), folder))


@relation(settings=WHOLE, method=SYMMETRIC, network=("start", "mlp"), double=True, form=IN_ORDER)
def all_rows_repeated(draw: Draw, program: Program, folder: Path) -> None:
    """Each client has each of its training or test rows twice; a batch has all of them."""
    assume(program.task != "survival")  # whose loss has a correction for equal times
    program = program.having(**full)
    part = draw(st.sampled_from(("train", "test")))
    twice = everywhere((part,), lambda rows: rows.take(np.arange(2 * len(rows.labels)) // 2))
    close(complete(program, folder), run(program.edited(twice), folder))


@relation(form=IN_ORDER)
def another_form(draw: Draw, program: Program, folder: Path) -> None:
    """The same rows in another form of data give the same bytes."""
    form = draw(st.sampled_from([name for name in IN_ORDER if name != program.form]))
    alone = program.having(client_batching="off")  # clients whose rows are read on demand are trained one by one
    equal(run(alone, folder), run(replace(alone, form=form), folder))


@relation(form=("tensors", "arrays", "frame", "dataset", "subset"), task=("classification", "binary", "multi-label"))
def another_dtype(draw: Draw, program: Program, folder: Path) -> None:
    """Labels in another type of whole numbers, and inputs in float64 with values of float32, give the same bytes."""
    labels = draw(st.sampled_from((np.int32, np.uint8, np.int16)))
    wide = draw(st.booleans())

    def cast(rows: Rows) -> Rows:
        inputs = rows.inputs.astype(np.float64) if wide else rows.inputs
        return replace(rows, inputs=inputs, labels=rows.labels.astype(labels))

    equal(run(program, folder), run(program.edited(everywhere(("train", "test"), cast)), folder))


@relation(
    task="regression",
    method=("local", "fedavg", "fedrep", "layer-average"),
    network=NETWORKS_ALONE,  # scikit-learn's trees lose small differences of large targets
    double=True,
    form=IN_ORDER,
)
def a_constant_added_to_targets(draw: Draw, program: Program, folder: Path) -> None:
    """A constant that is added to the targets and to the network's outputs changes no loss and no R2."""
    constant = draw(st.sampled_from((1e3, -1e6, 1e8)))
    moved = everywhere(("train", "test"), lambda rows: replace(rows, labels=rows.labels + constant))
    first = complete(replace(program, offset=1e-9), folder)
    changed = run(replace(program, offset=constant).edited(moved), folder)
    assert not changed.refused
    for client, numbers in first.clients.items():
        np.testing.assert_allclose(changed.clients[client], numbers, rtol=1e-4, atol=1e-4)


@relation(task="survival", method=("local", "fedavg", "fedrep", "fedhenn", "heterofl"), form=IN_ORDER)
def another_unit_of_time(draw: Draw, program: Program, folder: Path) -> None:
    """Times of a client in another unit change nothing, and are not warned of: only their order counts."""
    client = draw(st.integers(0, program.clients - 1))
    factor = draw(st.sampled_from((2.0**-10, 365.25)))
    parts = draw(st.sampled_from(PARTS))
    other = at(client, parts, lambda rows: replace(rows, labels=rows.labels * [factor, 1]))
    changed = run(program.edited(other), folder)
    equal(run(program, folder), changed)
    assert "times as large" not in changed.log


@relation(task="classification", form=tuple(form for form in IN_ORDER if form not in ("lists", "read")), sizes="equal")
def bytes_are_scaled(draw: Draw, program: Program, folder: Path) -> None:
    """Bytes are the same inputs as their 255ths; methods that make views of rows need floats."""
    assume(program.form != "named")

    def as_bytes(rows: Rows) -> Rows:
        return replace(rows, inputs=(rows.inputs * 40 + 128).clip(0, 255).astype(np.uint8))

    def as_floats(rows: Rows) -> Rows:
        return replace(rows, inputs=as_bytes(rows).inputs.astype(np.float32) / np.float32(255))

    parts = ("train", "test", "public")
    first = run(program.edited(everywhere(parts, as_floats)), folder)
    assume(not first.refused)
    changed = run(program.edited(everywhere(parts, as_bytes)), folder)
    if "views are known for images" not in changed.refused:
        equal(first, changed)


# ---- clients


@relation(method=SYMMETRIC, sizes="equal", clients=(3, 4), settings=EACH_ROUND)
def a_client_that_is_refused_changes_nothing(draw: Draw, program: Program, folder: Path) -> None:
    """A client whose data are lost, or whose network does not fit, is named, and changes nothing for the others."""
    first = complete(program, folder)
    reason = draw(st.sampled_from(("lost data", "other network")))
    more = replace(program, clients=program.clients + 1)
    if reason == "lost data":
        more = replace(more, absent=(program.clients,))
    elif program.method in ("fedavg", "fedprox"):
        more = Refusing(**vars(more), left_out=program.clients)
    else:
        return
    changed = run(more, folder)
    assert not changed.refused
    assert str(program.clients) in {client for client, _ in changed.failures}
    close(first, changed)


@relation(method=trained, network=("start", "repeated"), clients=(3, 4), settings=EACH_ROUND)
def a_client_that_cannot_train_has_no_score(draw: Draw, program: Program, folder: Path) -> None:
    """A client whose training always fails is named and not scored; where clients are alike, no other changes."""
    last = Failing(**vars(replace(program, clients=program.clients + 1)), failing=program.clients)
    changed = complete(last, folder)
    absent = json.loads((changed.folder / "summary.json").read_text()).get("never_took_part", {})
    # Some methods train other networks than the client's: its exits, or a network of the server.
    assume(str(last.failing) in absent)
    assert set(changed.clients) == {str(number) for number in range(program.clients)}
    if program.method in SYMMETRIC and program.sizes == "equal":
        close(run(program, folder), changed)


@dataclass(frozen=True)
class Failing(Program):
    """A program with one client whose network returns NaN in training."""

    failing: int = 0

    def model(self, client: Any) -> nn.Module:
        """Return the program's network, for one client with a hook that spoils outputs in training."""
        network = super().model(client)
        if client.partition_id == self.failing:
            network.register_forward_hook(lambda module, _, outputs: outputs * (np.nan if module.training else 1.0))
        return network


@relation(settings=WHOLE, method="fedavg", network="start", double=True, form=IN_ORDER, clients=(3, 4))
def an_average_is_of_the_clients_that_trained(draw: Draw, program: Program, folder: Path) -> None:
    """The global model is the mean of the networks that participants train alone, weighted by their examples."""
    program = program.having(rounds=1, **full)
    alone = complete(replace(program, method="local"), folder)
    failing = draw(st.integers(0, program.clients))
    failing_program = Failing(**vars(program.having(fraction_train=draw(st.sampled_from((0.5, 1.0))))), failing=failing)
    outcome = complete(failing_program, folder)
    clients = [client for row in outcome.history for client in row["participants"]]
    assert str(failing) not in clients
    weights = np.array([len(program.rows(int(client), "train").labels) for client in clients], float)
    for name, array in outcome.models["models/global.safetensors"].items():
        arrays = [alone.models[f"models/{client}.safetensors"][name] for client in clients]
        np.testing.assert_allclose(array, np.average(arrays, 0, weights), rtol=1e-7, atol=1e-9, err_msg=name)


@relation(task="classification", method=trained, sizes="equal", clients=(3, 4))
def random_labels_are_chance(draw: Draw, program: Program, folder: Path) -> None:
    """Labels that are independent of the inputs are predicted by chance."""
    seed = draw(st.integers(0, 10**6))

    def random_labels(client: int, part: str, rows: Rows) -> Rows:
        rng = np.random.default_rng([seed, client, len(part)])
        if part == "test":
            rows = rows.take(np.arange(140) % len(rows.labels))
            return replace(
                rows, inputs=rng.normal(size=rows.inputs.shape).astype(np.float32), labels=np.arange(140) % 3
            )
        return replace(rows, labels=rng.permutation(np.arange(len(rows.labels)) % 3))

    outcome = complete(program.edited(random_labels), folder)
    mean = np.mean([accuracy for accuracy, _ in outcome.clients.values()])
    assert 0.18 < mean < 0.49, mean


@relation(
    settings=WHOLE,
    method="local",
    double=True,
    task="classification",
    network=("mlp", "widths", "start"),
    form=IN_ORDER,
    sizes="equal",
)
def one_client_alone_is_a_plain_loop(draw: Draw, program: Program, folder: Path) -> None:
    """A client that trains alone gets what a loop of plain PyTorch gives."""
    program = replace(program, clients=1).having(optimizer="sgd", momentum=0.5, rounds=1, **full)
    outcome = complete(program, folder)
    network = program.model(Client(0)).double()
    saved = {name: torch.tensor(array) for name, array in outcome.models["models/0.safetensors"].items()}
    rate, epochs = program.all_settings["learning-rate"], program.all_settings["local-epochs"]
    rows, test = program.rows(0, "train"), program.rows(0, "test")
    untrained = replace(program, settings={**program.settings, "learning-rate": 1e-30})
    start = complete(untrained, folder).models["models/0.safetensors"]
    network.load_state_dict({name: torch.tensor(array) for name, array in start.items()})
    optimizer = torch.optim.SGD(network.parameters(), rate, momentum=0.5)
    for _ in range(epochs):
        optimizer.zero_grad()
        outputs = network(torch.tensor(rows.inputs).double())
        nn.functional.cross_entropy(outputs, torch.tensor(rows.labels)).backward()
        optimizer.step()
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        outputs = network(torch.tensor(test.inputs).double())
    right = (outputs.argmax(1) == torch.tensor(test.labels)).double().mean().item()
    loss = nn.functional.cross_entropy(outputs, torch.tensor(test.labels)).item()
    np.testing.assert_allclose(outcome.clients["0"], (right, loss), rtol=1e-6)


ESTIMATORS = (
    *(LogisticRegression, GaussianNB, SVC, partial(KNeighborsClassifier, 3)),
    *(partial(RandomForestClassifier, 3, random_state=1), partial(make_pipeline, StandardScaler(), SVC())),
)
REGRESSORS = (LinearRegression, Ridge, SVR, partial(KNeighborsRegressor, 3))
"""Estimators of scikit-learn whose fit depends on nothing but the examples."""

CLASSIFIERS: dict[str, Callable[[int], Any]] = {
    "nearest-neighbour": lambda examples: KNeighborsClassifier(1),
    "logistic-regression": lambda examples: LogisticRegression(max_iter=1000),
    "gradient-boosting": lambda examples: HistGradientBoostingClassifier(
        min_samples_leaf=min(20, examples // 10), random_state=0
    ),
    "label-spreading": lambda examples: LabelSpreading(kernel="knn", n_neighbors=7, max_iter=200),
}
"""What clients of a method fit to so many examples."""


@relation(
    settings=WHOLE, method=(*CONTROLS, "local", "local"), task=("classification", "binary", "regression"), network="mlp"
)
def estimators_are_scikit_learns(draw: Draw, program: Program, folder: Path) -> None:
    """Clients with estimators, and those of the methods with a classifier, score as scikit-learn does on their rows."""
    estimator = draw(st.sampled_from(REGRESSORS if program.task == "regression" else ESTIMATORS))
    fitted = Fitted(**vars(program), estimator=estimator if program.method == "local" else None)
    dtype = np.float64 if program.double and not fitted.estimator else np.float32
    for client, (score, _) in complete(fitted, folder).clients.items():
        rows, test, public = (program.rows(int(client), part) for part in ("train", "test", "public"))
        inputs, labels = rows.inputs.astype(dtype), rows.labels if program.task != "regression" else rows.labels[:, 0]
        model = fitted.estimator() if fitted.estimator else CLASSIFIERS[program.method](len(labels))
        if program.method == "label-spreading":
            inputs = np.concatenate([inputs, public.inputs.astype(dtype)])
            labels = np.concatenate([labels, np.full(len(public.labels), -1)])
        with warnings.catch_warnings(action="ignore"):
            expected = model.fit(inputs, labels).score(test.inputs.astype(dtype), test.labels)
        np.testing.assert_allclose(score, expected, rtol=1e-5, atol=1e-6, err_msg=f"{model}, client {client}")


@dataclass(frozen=True)
class Fitted(Program):
    """A program whose clients have an estimator of scikit-learn, if one is given."""

    estimator: Callable[[], Any] | None = None

    def model(self, client: Any) -> Any:
        """Return a new estimator, or the network."""
        return super().model(client) if self.estimator is None else self.estimator()


@dataclass(frozen=True)
class Client:
    """What a model function needs to know of a client."""

    partition_id: int


@relation(form=IN_ORDER, sizes=("equal", "unequal"))
def test_examples_train_nothing(draw: Draw, program: Program, folder: Path) -> None:
    """Other test examples change no model."""
    first = complete(program, folder)
    other = everywhere(("test",), lambda rows: rows.take(slice(3, None)))
    changed = run(program.edited(other), folder)
    equal(replace(first, clients={}, history=()), replace(changed, clients={}, history=()))


# ---- ways of running


@relation(slow=True, form=tuple(form for form in FORMS if form != "files"))
def two_workers(draw: Draw, program: Program, folder: Path) -> None:
    """Worker processes change nothing; with such a timeout they start at once."""
    equal(run(program, folder), run(program.having(workers=2, timeout=600.0), folder))


@relation(slow=True, clients=2, form=tuple(form for form in FORMS if form != "files"))
def on_ray(draw: Draw, program: Program, folder: Path) -> None:
    """Flower's simulation on Ray gives the same bytes."""
    if program.task == "classification" and draw(st.booleans()):
        program = OneTable(**vars(program))
    alone = program.having(client_batching="off")  # on Ray, clients are trained one by one
    first, out = complete(alone, folder), new(folder)
    functions = UserFunctions(**program.arguments())
    supplied = functions.words.keys()
    settings = configuration.settings_of(program.all_settings, supplied)
    config = functions.adapted(configuration.resolve(settings, supplied=supplied))
    run_on_ray(out, config, **program.arguments())
    equal(first, outcomes.read(out))


def by_itself(program: Program, folder: Path, kind: type[Any]) -> Outcome:
    """Run a program by the strategy class `kind`, started as in a user's ServerApp; `fedhet.run` has the preset own."""
    out = new(folder)
    keys = {key.removeprefix(f"{program.method}.").replace("-", "_"): v for key, v in program.all_settings.items()}
    keys = {key: value for key, value in keys.items() if key not in ("method", "report", "workers")}
    keys |= {"preset": "own", "out": str(out), "state_dir": str(out / "state")}
    public = PublicDataset(*program.data(SimpleNamespace(partition_id=0))["public"])
    with outcomes.kept_log() as messages:
        try:
            strategy = kind(**keys, public=public, model=program.model)
            strategy.start(LocalGrid(fedhet.make_client_app(**program.arguments()), program.clients))
        except FedhetError as error:
            return Outcome(refused=str(error), folder=out)
    return outcomes.read(out, "\n".join(messages))


@relation(method=trained, form="tensors", settings=(WHOLE, {"fraction-train": 0.5}))
def a_strategy_by_itself(draw: Draw, program: Program, folder: Path) -> None:
    """A strategy that the user's ServerApp starts gives the same numbers, also in Flower's own loop.

    There, hooks call `super()` or, in the evaluation, not.
    """
    alone = program.having(client_batching="off", closing_epochs=0)
    if program.method == "flha-ghn":  # which `fedhet.run` sets for users' networks, and a strategy asks for
        alone = alone.having(**{"flha-ghn.head": "tiled"})
    first = complete(alone, folder)
    kind = registry.strategy(program.method)
    hook = kind.configure_train
    calling = {"configure_train": lambda own, *given: hook(own, *given)}
    silent = {"configure_evaluate": lambda *_: [], "aggregate_evaluate": lambda *_: None}
    hooks: dict[str, Any] = draw(st.sampled_from(({}, calling, silent)))
    other = by_itself(alone, folder, type("Hooked", (kind,), hooks) if hooks else kind)
    assert [row["participants"] for row in other.history] == [row["participants"] for row in first.history]
    # Personal networks lie in the clients' state folders, and Flower's loop evaluates all clients in each round.
    assert other.models.keys() <= first.models.keys()
    same = replace(first, models={name: first.models[name] for name in other.models})
    equal(same, replace(other, history=first.history if hooks else other.history))


@dataclass(frozen=True)
class Included(Program):
    """A program without functions: scikit-learn's digits, and architectures of fedhet."""

    def arguments(self) -> dict[str, Any]:
        """Return no functions."""
        return {}


ARCHITECTURES = ("mlp", "cnn-1-1", "cnn-1-1,mlp", "flha-small-0", "flha-small-1")


def of_digits(draw: Draw, program: Program, settings: Mapping[str, Any]) -> Included:
    """Return a program of the same method and number of clients, with drawn architectures on digits."""
    settings = {"samples-per-client": 30, "public-samples": 40, **settings}
    if program.method not in CONTROLS:
        settings |= {"batch-size": draw(st.sampled_from((7, 13, 30)))}
    settings |= {"dataset": "digits", "architectures": draw(st.sampled_from(ARCHITECTURES))}
    return Included(program.method, clients=program.clients, settings=settings)


@relation(method=trained, clients=(3, 4))
def batches_of_clients(draw: Draw, program: Program, folder: Path) -> None:
    """Clients whose networks are trained in one batch get what they get one by one, up to rounding."""
    settings = {"local-epochs": 3} | ({"rounds": 1} if "rounds" in program.all_settings else {})
    settings |= {"optimizer": program.all_settings.get("optimizer", "sgd")}  # Adam divides rounding by rounding
    either = replace(program, settings={**program.settings, **settings})
    with pytest.MonkeyPatch.context() as patched:
        if draw(st.booleans()):
            either = of_digits(draw, program, settings)
            # The deep ones amplify rounding in float32.
            patched.setitem(process.STANDARD, "dtype", torch.float64)
        first = complete(either.having(client_batching="off"), folder)
        changed = run(either.having(client_batching=str(draw(st.sampled_from((2, 10))))), folder)
    models_agree(first, changed)


def models_agree(first: Outcome, changed: Outcome) -> None:
    """Check that the models of two runs are equal up to rounding."""
    assert not changed.refused
    for name, arrays in first.models.items():
        for key, array in arrays.items():
            scale = max(1e-3, np.abs(array).max(initial=0.0))
            gap = np.abs(np.float64(changed.models[name][key]) - array).max(initial=0.0) / scale
            assert gap < 2e-3, f"{name} {key}: {gap}"


@relation(method=trained, network="by columns", double=True)
def order_of_weights_in_memory(draw: Draw, program: Program, folder: Path) -> None:
    """Weights that lie by columns in memory are trained as those that lie by rows."""
    assume(program.network == "by columns")  # InclusiveFL has a network of its own
    program = program.having(**draw(st.sampled_from(({"optimizer": "sgd", "momentum": 0.5}, {"optimizer": "adam"}))))
    close(complete(program, folder), run(replace(program, network="convolutional"), folder), models=False)


@relation()
def twice(draw: Draw, program: Program, folder: Path) -> None:
    """A second run gives the same bytes."""
    equal(run(program, folder), run(program, folder))


class Killed(Observer):
    """An observer that interrupts the run after the first round."""

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """Interrupt the run."""
        if report.row["round"] == 1:
            raise KeyboardInterrupt


@relation()
def killed_and_resumed(draw: Draw, program: Program, folder: Path) -> None:
    """A run that is interrupted and resumed gives the same bytes, and stays as it is if it is resumed once more."""
    first, out = complete(program, folder), new(folder)
    try:
        run(program, folder, out=out, observers=[Killed()])
    except KeyboardInterrupt:
        fedhet.run({}, **program.arguments(), resume=out, progress=False)
    equal(first, outcomes.read(out))
    before = files_of(out)
    with outcomes.kept_log():
        fedhet.run({}, **program.arguments(), resume=out, progress=False)
    assert files_of(out) == before


@relation()
def again_is_the_same_run(draw: Draw, program: Program, folder: Path) -> None:
    """`fedhet run --again` of a run of included data and architectures, and `--resume` of it, give the same files."""
    further = draw(
        st.sampled_from(({}, {"validation": 0.3, "keep-best": True}, {"fraction-train": 0.4}, {"save-every": 1}))
    )
    included = of_digits(draw, program, {"rounds": 2, **further} if "rounds" in program.all_settings else {})
    outcome = complete(included, folder)
    before = files_of(outcome.folder)
    for options in (["--resume", str(outcome.folder)], ["--again", str(outcome.folder), "--out", str(new(folder))]):
        with outcomes.kept_log():
            result = CliRunner().invoke(app, ["run", *options])
        assert result.exit_code == 0, result.output
        assert files_of(outcome.folder) == before
    equal(outcome, outcomes.read(Path(options[-1])))
    assert files_of(Path(options[-1])) == before


def files_of(folder: Path) -> dict[str, Any]:
    """Return the content of a run's files, without times and what says where it ran."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = read_history(folder)
    return {
        "clients.csv": (folder / "clients.csv").read_text(),
        "summary": {name: value for name, value in summary.items() if name not in MEASURED},
        "history": [{name: value for name, value in row.items() if name != "timing"} for row in rows],
        **{path.name: path.read_bytes() for path in (folder / "models").rglob("*.safetensors")},
        **{path.name: load_file(path).keys() for path in (folder / "checkpoint").rglob("*.safetensors")},
    }


@relation(slow=True)
def beside_another_run(draw: Draw, program: Program, folder: Path) -> None:
    """A run beside another run, in a thread, gives the same bytes or is refused."""
    first = complete(program, folder)
    results: dict[int, Outcome] = {}
    failures: list[BaseException] = []

    def one(number: int) -> None:
        try:
            settings = program.all_settings | {"seed": number}
            fedhet.run(settings, **program.arguments(), out=folders[number], progress=False)
            results[number] = outcomes.read(folders[number])
        except FedhetError:
            pass
        except BaseException as error:
            failures.append(error)

    folders = [new(folder) for _ in range(2)]
    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    if 0 in results:
        equal(replace(first, failures=()), replace(results[0], failures=()))


@relation()
def in_another_state_of_the_process(draw: Draw, program: Program, folder: Path) -> None:
    """What the caller set for its own purposes changes nothing, and is as it was afterwards."""
    first = run(program, folder)
    state = draw(st.sampled_from(("seeds", "float64", "no_grad", "inference_mode", "autocast", "folder")))
    here = Path.cwd()
    rng = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]
    try:
        if state == "seeds":
            random.seed(1), np.random.seed(2), torch.manual_seed(3)
            rng = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]
        elif state == "float64":
            torch.set_default_dtype(torch.float64)
        elif state == "folder":
            os.chdir(folder)
        contexts = {"no_grad": torch.no_grad(), "inference_mode": torch.inference_mode()}
        with contexts.get(state, torch.autocast("cpu", enabled=state == "autocast")):
            changed = run(program if state != "float64" else InFloat32(**vars(program)), folder)
            assert torch.is_inference_mode_enabled() == (state == "inference_mode")
            assert torch.is_grad_enabled() == (state not in ("no_grad", "inference_mode"))
        assert torch.get_default_dtype() == (torch.float64 if state == "float64" else torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
        os.chdir(here)
    assert random.getstate() == rng[0]
    assert np.random.get_state()[1].tolist() == rng[1]
    assert torch.equal(torch.get_rng_state(), rng[2])
    equal(first, changed)


@dataclass(frozen=True)
class InFloat32(Program):
    """A program whose functions do not depend on the default dtype."""

    def model(self, client: Any) -> nn.Module:
        """Return the network that is built with the default dtype float32."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return super().model(client)
        finally:
            torch.set_default_dtype(before)


@relation()
def values_of_keys_written_out(draw: Draw, program: Program, folder: Path) -> None:
    """A run's complete configuration, given as settings, is the same run."""
    import tomllib

    first = complete(program, folder)
    written = tomllib.loads((first.folder / "config.toml").read_text())
    kept = draw(st.sets(st.sampled_from(sorted(written)), max_size=8))
    settings = {key: value for key, value in written.items() if key in kept and key not in ("data", "dataset")}
    changed = run(program.having(**{key.replace("-", "_"): value for key, value in settings.items()}), folder)
    if changed.refused:
        assert any(key in changed.refused for key in settings), changed.refused
    else:
        equal(first, changed)


KEYS: dict[str, Any] = {
    **{"learning-rate": 0.02, "optimizer": "adam", "momentum": 0.3, "weight-decay": 0.3, "clip-gradients": 0.01},
    **{"lr-schedule": "linear", "local-epochs": 4, "batch-size": 5, "precision": "bf16", "fraction-train": 0.4},
    **{"head": "2", "representation": "1"},
}
"""Other values of keys of training."""


@relation()
def a_key_changes_the_models_or_is_said_to_have_no_effect(draw: Draw, program: Program, folder: Path) -> None:
    """Another value of a key of training gives other models, or a sentence names the key."""
    first = complete(program, folder)
    key = draw(st.sampled_from(sorted(KEYS)))
    assume(program.all_settings.get(key) != KEYS[key])
    assume(key != "fraction-train" or key not in program.settings)  # two fractions can be of as many clients
    assume(key != "lr-schedule" or "rounds" in program.all_settings)  # a single round has a single rate
    # These count for classes that a client lacks, and for texts.
    assume((key, program.method) not in {("head", "heterofl"), ("head", "fedrolex"), ("representation", "fedmrl")})
    changed = run(program.having(**{key.replace("-", "_"): KEYS[key]}), folder)
    words = changed.refused + changed.log + " ".join(reason for _, reason in changed.failures)
    try:
        equal(replace(first, failures=()), replace(changed, failures=()))
    except AssertionError:
        return
    assert key in words


IDLE: dict[str, dict[str, Any]] = {
    **{"evaluate-every": {"evaluate-every": 2}, "save-every": {"save-every": 1}, "clip-norm": {"clip-norm": 1e9}},
    **{key: {} for key in ("learning-rate", "batch-size", "local-epochs")},
}
"""Settings by the key that they set; the last ones are those of single clients, which are the run's."""


@relation(method=trained)
def settings_that_change_nothing(draw: Draw, program: Program, folder: Path) -> None:
    """Fewer evaluations, models that are saved in between, a norm that no update reaches, and clients' own settings."""
    first = complete(program, folder)
    key = draw(st.sampled_from(sorted(IDLE)))
    assume(key != "evaluate-every" or "keep-best" not in program.settings)  # the best of fewer rounds
    own = {"client_settings": lambda client: {key: program.all_settings[key]}} if not IDLE[key] else {}
    changed = run(replace(program, settings={**program.settings, **IDLE[key]}), folder, **own)
    if changed.refused:
        assert key in changed.refused, changed.refused
    elif key == "clip-norm":
        close(first, changed, models=False, tolerance=1e-4)
    else:
        models = {name: arrays for name, arrays in changed.models.items() if "round-" not in name}
        equal(replace(first, history=()), replace(changed, history=(), models=models))


# ---- what is made of runs


@relation(slow=True, form=("tensors", "arrays", "frame"))
def compare_is_run(draw: Draw, program: Program, folder: Path) -> None:
    """A comparison's run is the run."""
    first, out = complete(program, folder), new(folder)
    settings = {key: value for key, value in program.all_settings.items() if key not in ("method", "workers")}
    fedhet.compare([program.method], settings, seeds=[0], **program.arguments(), out=out, jobs=1)
    equal(first, outcomes.read(out / f"{program.method}-seed0"))


@relation(
    slow=True,
    method=("fedavg", "fedprox", "fedproto", "fedrep"),
    task="classification",
    clients=4,
    sizes="equal",
    form=("tensors", "arrays"),
)
def clients_that_a_method_refused_are_no_gain(draw: Draw, program: Program, folder: Path) -> None:
    """The difference to `local` is over the clients that both served, with a further client or without."""
    settings = {key: value for key, value in program.all_settings.items() if key not in ("method", "workers")}
    methods = ["local", program.method]
    arguments = {"seeds": [0, 1], "jobs": 1, "model": program.model, "data": program.data, "task": program.task}
    left_out = draw(st.integers(0, 3))
    refusing = Refusing(**vars(program), left_out=left_out)
    out = new(folder)
    try:
        fedhet.compare(methods, settings, **{**arguments, "data": refusing.data, "model": refusing.model}, out=out)
    except FedhetError:
        return
    rows = [outcomes.read(out / f"{method}-seed{seed}").clients for seed in (0, 1) for method in methods]
    pairs = [(rows[0], rows[1]), (rows[2], rows[3])]
    common = [[other[name][0] - alone[name][0] for name in alone if name in other] for alone, other in pairs]
    assume(all(common))
    (row,) = [
        line for line in (out / "comparison.md").read_text().splitlines() if line.startswith(f"| {program.method} ")
    ][:1]
    difference = np.mean([np.mean(values) for values in common])
    # A difference such as -0.0625 is rounded up or down by its last bit.
    rounded = {f"{difference + shift:+.3f}".replace("-0.000", "+0.000") for shift in (-1e-9, 1e-9)}
    assert any(text in row for text in rounded), (difference, row)


@dataclass(frozen=True)
class Refusing(Program):
    """A program with one client whose network has another width."""

    left_out: int = 0

    def model(self, client: Any) -> nn.Module:
        """Return a wider network for one client."""
        if client.partition_id != self.left_out:
            return super().model(client)
        return nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 3)).to(torch.float64 if self.double else None)


@relation(method=trained, task="classification", network=NETWORKS_ALONE)
def saved_networks_are_the_scored_ones(draw: Draw, program: Program, folder: Path) -> None:
    """A loaded network predicts a client's test examples as well as its score says."""
    outcome = complete(program, folder)
    summary = json.loads((outcome.folder / "summary.json").read_text())
    for number in range(program.clients):
        if str(number) not in outcome.clients:
            continue
        network = fedhet.load_model(outcome.folder, number, model=program.model)
        rows = program.rows(number, "test")
        with torch.no_grad():
            outputs = network(torch.tensor(rows.inputs).to(next(network.parameters()).dtype))
        accuracy = (outputs.argmax(1).numpy() == rows.labels).mean()
        assert abs(accuracy - outcome.clients[str(number)][0]) < 1e-6, (number, summary["personal_accuracy"])


@relation(method=("local", "fedavg", "fedproto", "fedrep"), task="classification", double=True, sizes="equal")
def texts_score_alike_alone_and_in_a_batch(draw: Draw, program: Program, folder: Path) -> None:
    """A loaded network predicts texts one by one as well as their score says, or the run says that padding counts."""
    texts = Texts(**vars(program), reads=draw(st.sampled_from(("last", "both ends", "mean", "all"))))
    outcome = complete(texts, folder)
    for number in range(program.clients):
        network = fedhet.load_model(outcome.folder, number, model=texts.model)
        with torch.no_grad():
            right = [int(network(ids[None]).argmax()) == label for ids, label in texts.texts(number, "test")]
        assert abs(np.mean(right) - outcome.clients[str(number)][0]) < 1e-6 or "depend on the padding" in outcome.log


@relation(method=trained, task="classification", double=True, settings=EACH_ROUND)
def padding_in_a_batch_is_padding_beforehand(draw: Draw, program: Program, folder: Path) -> None:
    """Texts or tokens that a `collate_fn` pads batch by batch, as pairs or dicts, give what padded tensors give."""
    texts = Texts(**vars(program), reads=draw(st.sampled_from(("mean", "tokens"))), given="padded")
    other = replace(texts, given=draw(st.sampled_from(("pairs", "dicts", "padded dicts", "padded columns"))))
    close(run(texts, folder), run(other, folder))


@dataclass(frozen=True)
class Texts(Program):
    """A program whose examples are texts of unlike lengths, which are padded with zeros.

    Attributes:
        reads: what the head reads, see `Reader`; with `tokens`, each token has a label, and padding -100.
        given: `pairs` or `dicts` for loaders with a `collate_fn` that pads each batch, or in which form texts are
            `padded` to one length.
    """

    reads: str = "last"
    given: str = "pairs"

    def texts(self, client: int, part: str) -> list[tuple[torch.Tensor, Any]]:
        """Return pairs of tokens and label."""
        rows = super().rows(client, part)
        tokens = torch.tensor(np.abs(rows.inputs * 9).astype(np.int64) % 8 + 1)
        texts = [(ids[: 2 + k % 5], int(label)) for k, (ids, label) in enumerate(zip(tokens, rows.labels, strict=True))]
        return [(ids, (ids + label) % 3) for ids, label in texts] if self.reads == "tokens" else texts

    def data(self, client: Any) -> dict[str, Any]:
        """Return texts in the chosen form; those of the public dataset are tensors."""
        parts = {part: self.part(self.texts(client.partition_id, part)) for part in ("train", "test")}
        return {**parts, "public": padded(self.texts(0, "public"))}

    def part(self, texts: list[tuple[torch.Tensor, Any]]) -> Any:
        """Return texts in the chosen form."""
        inputs, labels = padded(texts)
        dicts = [{"input_ids": ids.tolist(), "labels": label} for ids, label in texts]
        loader = partial(DataLoader, batch_size=self.all_settings["batch-size"])
        return {
            "pairs": loader(texts, collate_fn=padded),
            "dicts": loader(dicts, collate_fn=padded_dicts),
            "padded": (inputs, labels),
            "padded columns": {"input_ids": inputs, "labels": labels},
            "padded dicts": [{"input_ids": ids, "labels": label} for ids, label in zip(inputs, labels, strict=True)],
        }[self.given]

    def model(self, client: Any) -> nn.Module:
        """Return a recurrent network."""
        return Reader(self.reads).double()

    def arguments(self) -> dict[str, Any]:
        """Return the functions, and the task of the labels."""
        return {**super().arguments(), "task": "token-classification" if self.reads == "tokens" else self.task}


def padded(rows: list[tuple[torch.Tensor, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of texts."""
    texts, labels = zip(*rows, strict=True)
    by_token = isinstance(labels[0], torch.Tensor)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return pad(texts), pad(labels, padding_value=-100) if by_token else torch.tensor(labels)


def padded_dicts(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch of texts, as collators of transformers do."""
    inputs, labels = padded([(torch.tensor(row["input_ids"]), row["labels"]) for row in rows])
    return {"input_ids": inputs, "labels": labels}


class Reader(nn.Module):
    """A recurrent network whose head `reads` some of its states; only `mean` and `tokens` do not depend on padding."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads, self.embedding, self.config = reads, nn.Embedding(9, 4), SimpleNamespace(pad_token_id=0)
        both = reads not in ("mean", "tokens")
        self.layer, self.head = nn.GRU(4, 4, batch_first=True, bidirectional=both), nn.LazyLinear(3)
        self(torch.ones(1, 1, dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.layer(self.embedding(ids))[0]
        kept = (ids > 0)[..., None]
        read = {
            **{"last": states[:, -1], "both ends": torch.cat([states[:, 0], states[:, -1]], 1)},
            **{"mean": (states * kept).sum(1) / kept.sum(1), "all": states.mean(1), "tokens": states},
        }
        return self.head(read[self.reads])


METRICS = {
    "classification": ("accuracy", "balanced-accuracy", "macro-f1", "auc"),
    "binary": ("accuracy", "balanced-accuracy", "f1", "auc", "average-precision"),
    "multi-label": ("auc", "average-precision", "macro-f1"),
    "regression": ("r2", "rmse", "mae"),
    "segmentation": ("iou", "dice", "accuracy"),
    "survival": ("concordance",),
}
"""The metrics of a task."""


@relation(method=trained, network=NETWORKS_ALONE)
def metrics_are_scikit_learns(draw: Draw, program: Program, folder: Path) -> None:
    """Each client's metric, and that over all clients, are scikit-learn's of the saved networks' outputs."""
    metric = draw(st.sampled_from(METRICS[program.task]))
    outcome = complete(program.having(metric=metric), folder)
    summary = json.loads((outcome.folder / "summary.json").read_text())
    refused = {client for client, _ in outcome.failures}
    outputs, labels = [], []
    for number in range(program.clients):
        if str(number) in refused:
            continue
        rows = program.rows(number, "test")
        network = fedhet.load_model(outcome.folder, number, model=program.model, data=program.data)
        outputs.append(predictions(network, rows.inputs, program))
        labels.append(rows.labels)
        expected = scikit_learns(metric, program.task, outputs[-1], labels[-1])
        if np.isnan(expected):
            assert str(number) not in outcome.clients
        else:
            np.testing.assert_allclose(outcome.clients[str(number)][0], expected, rtol=1e-5, atol=1e-6)
    if metric in ("accuracy", "balanced-accuracy", "f1", "macro-f1", "iou", "dice", "mae"):  # of all examples together
        expected = scikit_learns(metric, program.task, np.concatenate(outputs), np.concatenate(labels))
        np.testing.assert_allclose(summary[f"personal_{metric}"]["weighted"], expected, rtol=1e-5, atol=1e-6)


def predictions(network: nn.Module, inputs: np.ndarray[Any, Any], program: Program) -> np.ndarray[Any, Any]:
    """Return a network's outputs as scores of classes or labels, or as targets."""
    with torch.no_grad():
        outputs = network(torch.tensor(inputs).to(next(network.parameters()).dtype)).double()
    return (outputs.softmax(1) if program.task in ("classification", "segmentation") else outputs).numpy()


def scikit_learns(metric: str, task: str, scores: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    """Return a metric's value; NaN if it has none."""
    if task == "regression":
        errors = {"r2": r2_score, "rmse": root_mean_squared_error, "mae": mean_absolute_error}
        return errors[metric](labels, scores.reshape(labels.shape))
    if task == "survival":
        pairs = [(one, other) for one in range(len(labels)) for other in range(len(labels)) if labels[one, 1]]
        pairs = [(one, other) for one, other in pairs if labels[one, 0] < labels[other, 0]]
        won = [np.sign(scores[one] - scores[other]).item() / 2 + 0.5 for one, other in pairs]
        return float(np.mean(won)) if won else float("nan")
    if task == "segmentation":
        chosen, labels = scores.argmax(1).ravel(), labels.ravel()
        measures = {"iou": partial(jaccard_score, average="macro"), "dice": partial(f1_score, average="macro")}
        return measures.get(metric, accuracy_score)(labels, chosen)
    if metric in ("auc", "average-precision"):
        value = {"auc": roc_auc_score, "average-precision": average_precision_score}[metric]
        if task == "classification":
            pairs = [(labels == number, scores[:, number]) for number in range(scores.shape[1])]
        else:
            pairs = list(zip(labels.reshape(len(labels), -1).T, scores.reshape(len(labels), -1).T, strict=True))
        values = [value(of, by) for of, by in pairs if 0 < of.sum() < len(of)]
        return float(np.mean(values)) if values else float("nan")
    chosen = scores.argmax(1) if task == "classification" else (scores > 0).astype(int).reshape(labels.shape)
    if metric in ("f1", "macro-f1"):
        average = "binary" if metric == "f1" else "macro"
        return f1_score(labels, chosen, average=average, zero_division=0)
    return {"accuracy": accuracy_score, "balanced-accuracy": balanced_accuracy_score}[metric](labels, chosen)


@relation(method=trained, network=NETWORKS_ALONE)
def an_evaluation_gives_the_runs_scores(draw: Draw, program: Program, folder: Path) -> None:
    """`fedhet.evaluate` on a run's own data gives the run's scores."""
    outcome = complete(program, folder)
    with outcomes.kept_log():
        table = fedhet.evaluate(outcome.folder, **program.arguments())
    for client, (score, _) in outcome.clients.items():
        values = [table.value(model, client) for model in (client, "global")]
        assert any(value is not None and abs(value - score) < 1e-6 for value in values), (client, score, values)


@relation(method=trained, form="tensors")
def start_from_a_run(draw: Draw, program: Program, folder: Path) -> None:
    """Networks of a run from which another starts, without training, are this run's networks."""
    assume(program.method in ("local", "fedavg", "fedprox", "fedrep", "layer-average"))
    first = complete(program, folder)
    changed = run(program.having(start_from=str(first.folder), learning_rate=1e-30, rounds=1), folder)
    assume(not changed.refused)
    last = {name: arrays for name, arrays in first.models.items() if "best/" not in name}
    for name, arrays in last.items():
        for key, array in arrays.items():
            # Statistics of the inputs change without a step.
            if array.dtype.kind == "f" and "running" not in key and key != "mean":
                np.testing.assert_allclose(
                    changed.models[name][key], array, rtol=1e-5, atol=1e-6, err_msg=f"{name} {key}"
                )
