"""A user's examples of all clients together, which the configuration splits."""

import subprocess
import sys
from functools import partial
from textwrap import dedent

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedhet
from fedhet import data
from fedhet.data.pooled import as_pooled
from fedhet.errors import ConfigError, DataError, FedhetError
from fedhet.flower.grid import LocalGrid
from fedhet.results.history import read_clients
from fedhet.results.report import write_report
from fedhet.setup.client_setup import ClientInfo
from fedhet.setup.user_functions import UserFunctions
from fedhet.utils.files import read_tensors

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(240, 4)).astype(np.float32)
LABELS = INPUTS[:, :3].argmax(1)
SETTINGS = {"clients": 3, "rounds": 2, "report": False, "workers": 1, "optimizer": "sgd", "learning-rate": 0.1}
FRAME = pd.DataFrame(INPUTS, columns=["age", "bmi", "pulse", "sugar"])
FRAME["hospital"] = np.array(["north", "south", "12"])[RNG.integers(0, 3, 240)]
FRAME["label"] = np.array(["ant", "bee", "cat"])[LABELS]

pytestmark = pytest.mark.usefixtures("home")


def model(client):
    return nn.Sequential(nn.Linear(4, 5 + client.partition_id), nn.ReLU(), nn.Linear(5 + client.partition_id, 3))


def split_of(given, **settings):
    """Return each client's data, as its data function returns them."""
    functions = UserFunctions(model, given)
    config = functions.adapted(
        fedhet.config.configuration.configure({**SETTINGS, **settings}, supplied={"model", "data"})
    )
    names = functions.clients or [str(number) for number in range(config.clients)]
    infos = [ClientInfo(name, place, len(names), config) for place, name in enumerate(names)]
    return {info.name: functions.data_of(info) for info in infos}


@pytest.mark.parametrize(
    "settings",
    [{"partition": "dirichlet", "alpha": 0.5}, {"partition": "classes", "classes-per-client": 2}, {"validation": 0.2}],
)
def test_equal_to_a_data_function_that_returns_the_same_rows(tmp_path, settings):
    settings |= {"samples-per-client": 50}
    held = {"method": "fedmd", "fedmd.public-epochs": 0, "public-samples": 30}
    shares = split_of((INPUTS, LABELS), **settings, **held)

    def function(client):
        mine = shares[client.name]
        return {
            "train": (mine.train.inputs, mine.train.labels),
            "test": (mine.test.inputs, mine.test.labels),
            "public": (mine.public.inputs, mine.public.labels),
        }

    pooled = fedhet.run({**SETTINGS, **settings, **held}, model=model, data=(INPUTS, LABELS), out=tmp_path / "pooled")
    own = {**SETTINGS, "method": "fedmd", "fedmd.public-epochs": 0, "validation": settings.get("validation", 0.0)}
    other = fedhet.run(own, model=model, data=function, out=tmp_path / "function")
    assert pooled.summary["personal_accuracy"] == other.summary["personal_accuracy"]
    for path in sorted((tmp_path / "pooled" / "models").glob("*")):
        ours, theirs = read_tensors(path), read_tensors(tmp_path / "function" / "models" / path.name)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    counts = {
        name: dict(zip("012", np.bincount(share.train.labels, minlength=3).tolist(), strict=True))
        for name, share in shares.items()
    }
    if "validation" not in settings:
        assert pooled.summary["classes"] == counts
        write_report(pooled.folder)
        assert (pooled.folder / "figures" / "classes.png").is_file()


def test_split_as_a_data_set_is():
    """Every example is at one place, and the parts are those that the partition of a data set makes."""
    test = (INPUTS[200:], LABELS[200:])
    shares = split_of({"train": TensorDataset(*map(torch.tensor, (INPUTS[:200], LABELS[:200]))), "test": test})
    train, tested = (data.Examples(torch.tensor(i), torch.tensor(k)) for i, k in ((INPUTS[:200], LABELS[:200]), test))
    dataset = data.DataSet("mine", train, tested, 3, fedhet.Task(), (4,), lambda inputs: inputs)
    for share, part in zip(shares.values(), data.partition(dataset, "iid", clients=3, seed=0), strict=True):
        assert torch.equal(share.train.inputs, train.inputs[part.train])
        assert torch.equal(share.test.inputs, tested.inputs[part.test])


def test_test_examples_drawn_for_each_seed():
    def tests_of(**settings):
        shares = split_of((INPUTS, LABELS), **settings)
        rows = [tuple(row) for share in shares.values() for row in share.test.inputs.tolist()]
        both = rows + [tuple(row) for share in shares.values() for row in share.train.inputs.tolist()]
        assert sorted(both) == sorted(map(tuple, INPUTS.tolist()))
        return sorted(rows)

    given, again, drawn, other = (
        tests_of(**settings)
        for settings in (
            {},
            {"seed": 1},
            {"seed": 1, "test-split": "drawn"},
            {"seed": 2, "test-split": "drawn", "test-share": 0.5},
        )
    )
    assert given == again
    assert drawn not in (given, other)
    assert [len(given), len(drawn), len(other)] == [48, 48, 120]


def test_names_of_clients_at_nodes_that_have_none_as_on_ray(tmp_path):
    app = fedhet.make_client_app(model=lambda: nn.Linear(4, 3), data=fedhet.by_column(FRAME, "hospital"))
    strategy = fedhet.FedAvg(rounds=1, state_dir=str(tmp_path))
    strategy.start(LocalGrid(app, 3))
    assert list(strategy.state.clients) == ["12", "north", "south"]


def test_by_column(tmp_path):
    pool = fedhet.by_column(FRAME, "hospital")
    shares = split_of(pool)
    assert list(shares) == ["12", "north", "south"]
    for name, share in shares.items():
        rows = FRAME[FRAME["hospital"] == name]
        inputs = torch.cat([share.train.inputs, share.test.inputs])
        assert sorted(inputs.float().tolist()) == sorted(rows.iloc[:, :4].to_numpy().tolist())
        assert len(share.test) == round(len(rows) / 5)
        assert share.names == {"columns": ("age", "bmi", "pulse", "sugar"), "classes": ("ant", "bee", "cat")}
        labels = dict(zip(map(tuple, rows.iloc[:, :4].to_numpy().tolist()), rows["label"], strict=True))
        found = [labels[tuple(row)] for row in share.test.inputs.float().tolist()]
        assert [share.names["classes"][label] for label in share.test.labels] == found
    done = fedhet.run(
        {"method": "fedavg", "rounds": 1, "report": False},
        model=lambda: nn.Linear(4, 3),
        data=pool,
        out=tmp_path / "run",
    )
    assert list(done.summary["classes"]) == ["12", "north", "south"]
    for name, counts in done.summary["classes"].items():
        labels = FRAME["label"][FRAME["hospital"] == name]
        assert counts.keys() == {"ant", "bee", "cat"}
        assert sum(counts.values()) == len(labels) - round(len(labels) / 5)
    networks = fedhet.run(
        {"method": "local", "rounds": 1, "report": False}, model=model, data=pool, out=tmp_path / "local"
    )
    assert fedhet.load_model(networks, "12", model=model)[0].out_features == 5
    assert fedhet.load_model(networks, "south", model=model)[0].out_features == 7
    assert {*fedhet.evaluate(networks, model=model, data=pool).scores} == {"12", "north", "south"}


def test_a_table_of_test_rows(tmp_path):
    """Its columns have another order, and it lacks a class: rows keep what their names say."""
    tested = FRAME[::3]
    other = tested[tested["label"] != "ant"][["label", "sugar", "pulse", "hospital", "bmi", "age"]]
    given = {
        "train": fedhet.by_column(FRAME.drop(tested.index), "hospital"),
        "test": fedhet.by_column(other, "hospital"),
    }
    for name, share in split_of(given).items():
        rows = other[other["hospital"] == name]
        assert share.test.inputs.float().tolist() == rows[["age", "bmi", "pulse", "sugar"]].to_numpy().tolist()
        assert [("ant", "bee", "cat")[label] for label in share.test.labels] == rows["label"].tolist()
        assert len(share.train) == (FRAME.drop(tested.index)["hospital"] == name).sum()
    settings = {"method": "fedavg", "rounds": 1, "report": False}
    done = fedhet.run(settings, model=lambda: nn.Linear(4, 3), data=given, out=tmp_path / "run")
    assert list(done.summary["classes"]) == ["12", "north", "south"]
    fewer = fedhet.by_column(other[other["hospital"] != "12"], "hospital")
    with pytest.raises(DataError, match="must have rows of the same clients, but one of them has none of '12'"):
        as_pooled({**given, "test": fewer})
    with pytest.raises(DataError, match="one of train and test is a fedhet.by_column: give both so"):
        as_pooled({**given, "test": (INPUTS, LABELS)})


def test_one_row_of_a_client_is_enough_for_a_table_of_test_rows():
    single = fedhet.by_column(FRAME.drop_duplicates("hospital"), "hospital")
    parts = split_of({"train": fedhet.by_column(FRAME, "hospital"), "test": single})
    assert [len(share.test) for share in parts.values()] == [1, 1, 1]
    with pytest.raises(DataError, match="client '12' has one row, but needs one to train and one to test"):
        fedhet.run({"method": "local"}, model=lambda: nn.Linear(4, 3), data=single)


def test_missing_values_of_pandas_own_types_are_named():
    table = FRAME.astype({"age": "Float64"})
    table.loc[table.index[3], "age"] = pd.NA
    # pandas 2.0 makes an array of objects of such a column.
    objects = pd.__version__.startswith("2.0")
    message = "the columns age are no numbers" if objects else "the inputs of row 3 contain nan in column age"
    with pytest.raises(DataError, match=message):
        fedhet.by_column(table, "hospital").check_finite()


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ((INPUTS, LABELS[:-1]), {}, "240 inputs but 239 labels: give one label per input"),
        ((INPUTS, LABELS), {"clients": 300}, "leaves client 192 of 300 without any of the data's 192 training"),
        ((INPUTS, LABELS), {"partition": "natural"}, "the data has no natural clients"),
        ((INPUTS, INPUTS[:, :1]), {"partition": "dirichlet"}, "the data has examples without exactly one class each"),
        (DataLoader(TensorDataset(torch.tensor(INPUTS))), {}, "a DataLoader, whose batches cannot be split"),
        ("all of them", {}, r"data \(a function of a client, or examples to split among clients\): rows of a str"),
        ((INPUTS, LABELS), {"method": "fedmd"}, "fedmd needs a public dataset: set, for example, public-samples"),
    ],
)
def test_what_cannot_be_split(tmp_path, given, settings, message):
    with pytest.raises((ConfigError, DataError), match=message):
        fedhet.run({**SETTINGS, "method": "local", **settings}, model=model, data=given, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("frame", "arguments", "message"),
    [
        (FRAME, {"column": "clinic"}, "the table has no column 'clinic': its columns are age, bmi"),
        (FRAME, {"column": "hospital", "label": "outcome"}, "no column 'outcome'"),
        (FRAME.rename(columns={"label": "outcome"}), {"column": "hospital"}, "unclear which column .* pass label="),
        (
            FRAME.assign(note="stable"),
            {"column": "label", "label": "age"},
            "the columns hospital, note are no numbers",
        ),
        (FRAME.assign(patient_id=FRAME.index // 3), {"column": "hospital"}, "column 'patient_id' identifies rows"),
        (FRAME.reset_index(names="Unnamed: 0"), {"column": "hospital"}, "column 'Unnamed: 0' identifies rows"),
        (
            FRAME.assign(hospital="a/b"),
            {"column": "hospital"},
            "'a/b' in column 'hospital' cannot name",
        ),
        (FRAME.assign(hospital=None), {"column": "hospital"}, "column 'hospital' has missing values"),
        (
            FRAME.assign(label=FRAME["label"].where(FRAME["age"] > 0).astype("string")),
            {"column": "hospital"},
            "the labels are texts, but some are missing or numbers: remove such rows",
        ),
        (
            pd.concat([FRAME, FRAME[["age", "label"]]], axis=1),
            {"column": "hospital"},
            "more than one column has the name age, label: rename or remove them",
        ),
        (INPUTS, {"column": "hospital"}, "needs a data frame, as of pandas, not a ndarray"),
        ({"train": FRAME, "test": FRAME}, {"column": "hospital"}, r"pass \{'train': by_column\(...\), 'test':"),
    ],
)
def test_tables_that_cannot_be_split(frame, arguments, message):
    with pytest.raises(DataError, match=message):
        fedhet.by_column(frame, **arguments)


@pytest.mark.parametrize(("key", "value"), [("clients", 5), ("partition", "dirichlet")])
def test_keys_that_a_column_determines(tmp_path, key, value):
    pool = fedhet.by_column(FRAME, "hospital")
    with pytest.raises(ConfigError, match=f"{key} = {value}: the data have 3 clients by name"):
        fedhet.run({"method": "local", key: value}, model=model, data=pool, out=tmp_path / "run")


def test_forms():
    pairs = [as_pooled((INPUTS, LABELS)), as_pooled(TensorDataset(torch.tensor(INPUTS), torch.tensor(LABELS)))]
    rows = as_pooled([(torch.tensor(row), int(label)) for row, label in zip(INPUTS, LABELS, strict=True)])
    for pool in (*pairs, rows):
        assert torch.equal(pool.train.inputs[:], torch.tensor(INPUTS))
        assert torch.equal(pool.train.labels, torch.tensor(LABELS))


def test_numbers_by_class_of_clients_with_unlike_orders_have_names(tmp_path):
    def own(client):
        listed = ["ant", "bee", "cat"] if client.partition_id else ["cat", "bee", "ant"]
        names = pd.Series(["ant", "ant", "ant", "bee"] * 5).astype(pd.CategoricalDtype(listed))
        return (INPUTS[:20], names), (INPUTS[:20], names)

    settings = {"method": "local", "clients": 2, "rounds": 1, "report": False}
    done = fedhet.run(settings, model=model, data=own, out=tmp_path / "run")
    assert list(done.summary["classes"].values()) == [{"cat": 0, "bee": 5, "ant": 15}, {"ant": 15, "bee": 5, "cat": 0}]


def test_test_examples_have_labels(tmp_path):
    some = np.where(np.arange(240) % 4 == 0, LABELS, -1)
    settings = {"method": "fedsimclr", "fedsimclr.probe-epochs": 1, "clients": 3, "rounds": 1, "report": False}
    done = fedhet.run(
        settings,
        model=lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)),
        data=(INPUTS, some),
        out=tmp_path / "run",
    )
    assert done.summary["examples"] == {"labelled": 0, "unlabelled": 228}  # a fifth of 60 are tested
    with pytest.raises(DataError, match="data has no labels, so no test examples"):
        fedhet.run(settings, model=model, data=(INPUTS, None), out=tmp_path / "none")


def test_all_new_examples_are_evaluated(tmp_path):
    """Of examples passed again, each client's test part is evaluated; of a dict of `test`, all rows."""
    pool = fedhet.by_column(FRAME, "hospital")
    settings = {"method": "local", "rounds": 1, "report": False}
    done = fedhet.run(settings, model=model, data=pool, out=tmp_path / "run")
    again = fedhet.evaluate(done, model=model, data=pool)
    new = fedhet.evaluate(done, model=model, data={"test": pool}, out=tmp_path / "new")
    everywhere = fedhet.evaluate(done, model=model, data={"test": (INPUTS, LABELS)}, out=tmp_path / "everywhere")
    for name in pool.clients:
        rows = FRAME["hospital"] == name
        assert again.scores[name][name].count == round(rows.sum() / 5)
        network = fedhet.load_model(done, name, model=model, data=pool)
        right = network(torch.from_numpy(INPUTS)).argmax(1).numpy() == LABELS
        assert (new.scores[name][name].count, new.value(name, name)) == (rows.sum(), pytest.approx(right[rows].mean()))
        values = [everywhere.value(name, client) for client in everywhere.clients]
        assert values == pytest.approx([right.mean()] * 3)

    with pytest.raises(FedhetError) as caught:
        fedhet.evaluate(done, model=model, data={"test": fedhet.by_column(FRAME.assign(height=1.0), "hospital")})
    sentences = str(caught.value).splitlines()  # each reason once, not for every model and client
    assert len(sentences) == 2
    assert "model 12 at client 12: the data's columns are age, bmi, pulse, sugar, height, but" in sentences[1]


def test_a_global_model_is_evaluated_at_a_client_that_took_no_part(tmp_path):
    """Its table has the classes that it has, by name, and its columns in another order."""
    network = partial(nn.Linear, 4, 3)
    settings = {"method": "fedavg", "rounds": 1, "report": False}
    done = fedhet.run(settings, model=network, data=fedhet.by_column(FRAME, "hospital"), out=tmp_path / "run")
    other = FRAME[FRAME["label"] != "ant"].assign(hospital="east")[::-1][[*FRAME.columns[::-1]]]
    scores = fedhet.evaluate(done, model=network, data={"test": fedhet.by_column(other, "hospital")})
    rows = torch.from_numpy(INPUTS[LABELS > 0])
    right = fedhet.load_model(done, "north", model=network)(rows).argmax(1).numpy() == LABELS[LABELS > 0]
    assert scores.value("global", "east") == pytest.approx(right.mean())


def test_missing_values_of_a_client_are_refused_there_only(tmp_path):
    frame = FRAME.copy()
    frame.loc[frame["hospital"] == "south", "age"] = np.nan
    settings = {"method": "fedavg", "rounds": 1, "report": False}
    done = fedhet.run(settings, model=lambda: nn.Linear(4, 3), data=fedhet.by_column(frame, "hospital"), out=tmp_path)
    assert {failure["client"] for row in done.history for failure in row["failures"]} == {"south"}
    assert {row.client for row in read_clients(tmp_path)} == {"12", "north"}


def test_a_row_that_is_not_finite_has_its_number_in_the_given_data(tmp_path):
    inputs = INPUTS.copy()
    inputs[57, 1] = np.nan
    with pytest.raises(DataError, match="the inputs of row 57 contain nan"):
        split_of((inputs, LABELS), clients=3)
    with pytest.raises(DataError, match="the test inputs of row 57 contain nan"):
        split_of({"train": (INPUTS, LABELS), "test": (inputs, LABELS)}, clients=1)
    table = FRAME.drop(columns="label").assign(bmi=inputs[:, 1])
    with pytest.raises(DataError, match="the inputs of row 57 contain nan in column bmi"):
        split_of((table.drop(columns="hospital"), LABELS), clients=3)


def test_each_client_is_told_of_a_row_of_its_own(tmp_path):
    rows = {name: int(np.flatnonzero(FRAME["hospital"] == name)[-1]) for name in FRAME["hospital"].unique()}
    frame = FRAME.reset_index(drop=True)
    frame.loc[[*rows.values()], "age"] = np.nan
    data = fedhet.by_column(frame, "hospital")
    with pytest.raises(FedhetError, match="no client can take part") as refused:
        fedhet.run({"method": "local", "rounds": 1}, model=lambda: nn.Linear(4, 3), data=data, out=tmp_path)
    for client, row in rows.items():
        assert f"client {client}: the inputs of row {row} contain nan in column age" in str(refused.value)


def test_tables_whose_arrays_are_read_only_are_read_without_a_warning():
    """Torch warns about the first such array of a process."""
    program = """
        import fedhet, pandas
        frame = pandas.DataFrame({"age": [1.5, 2, 3, 4], "hospital": [0, 0, 1, 1], "label": [0, 1, 0, 1]})
        fedhet.by_column(frame, "hospital")
    """
    done = subprocess.run([sys.executable, "-W", "error", "-c", dedent(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
