"""Names of classes and columns, by which the parts of a client and several clients are aligned."""

from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_iris
from sklearn.utils import Bunch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

import fedhet
from fedhet.data.names import CLASSES, COLUMNS, alike
from fedhet.data.naming import names_of
from fedhet.data.own import as_client_data
from fedhet.data.pooled import as_pooled
from fedhet.errors import DataError
from fedhet.messages import Report, WireError
from fedhet.methods import registry
from fedhet.utils.files import read_tensors

LEVELS = {"ant": 20, "bee": 120, "cat": 230}
FRAME = pd.DataFrame(np.arange(12.0).reshape(4, 3), columns=["age", "bmi", "bp"])
OTHER = FRAME[["bp", "age", "bmi"]]
LABELS = torch.tensor([0, 1, 1, 0])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for part, names in {"all": "ant bee cat", "two": "bee cat", "first": "ant bee"}.items():
        for name in names.split():
            (root / part / name).mkdir(parents=True)
            for number in range(2):
                Image.new("L", (2, 2), LEVELS[name]).save(root / part / name / f"{number}.png")
    return {part: ImageFolder(root / part, pil_to_tensor) for part in ("all", "two", "first")}


@pytest.mark.parametrize(
    "form",
    [
        lambda folder: folder,
        lambda folder: Subset(folder, [3, 0, 1]),
        lambda folder: random_split(folder, [0.5, 0.5])[0],
        lambda folder: ConcatDataset([folder, Subset(folder, [0])]),
        lambda folder: DataLoader(folder, 2, shuffle=True),
    ],
)
def test_classes_of_a_folder_are_aligned_by_name(folders, form):
    data = as_client_data("0", (folders["all"], form(folders["two"])))
    inputs, labels = data.test.at(slice(None))
    assert [[*LEVELS.values()].index(level) for level in inputs[:, 0, 0, 0].tolist()] == labels.tolist()
    assert torch.equal(data.test.labels, labels)
    assert data.note == "the classes of test (bee, cat) are aligned by name: ant, bee, cat"


def test_classes_that_only_a_later_part_has_get_the_next_numbers(folders):
    data = as_client_data("0", {"train": folders["two"], "test": folders["two"], "common": folders["all"]})
    assert data.common.labels.tolist() == [2, 2, 0, 0, 1, 1]
    assert data.names == {CLASSES: ("bee", "cat", "ant")}
    assert as_client_data("0", (folders["first"], folders["all"])).note == ""  # the numbers are the same


def test_members_with_other_numbers_are_refused(folders):
    with pytest.raises(DataError, match="member of the ConcatDataset are bee, cat, but the others' are ant, bee, cat"):
        as_client_data("0", (ConcatDataset([folders["all"], folders["two"]]), folders["all"]))
    shifted = ImageFolder(folders["two"].root, pil_to_tensor, target_transform=lambda label: label + 1)
    joined = as_client_data("0", (ConcatDataset([folders["all"], shifted]), folders["all"]))
    assert joined.train.labels.tolist() == [0, 0, 1, 1, 2, 2, 1, 1, 2, 2]


def test_labels_of_a_folder_are_those_of_its_rows(folders):
    folder = ImageFolder(folders["all"].root, pil_to_tensor)
    folder.targets = [0] * 6
    assert as_client_data("0", (folder, folder)).train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    folder.samples = [(path, 2 - label) for path, label in folder.samples[:5]]
    data = as_client_data("0", (folder, folder)).train
    assert data.labels.tolist() == data.at(slice(None))[1].tolist() == [2, 2, 1, 1, 0]


class Features(list):
    """Rows with the features of a Hugging Face dataset."""

    class Label:
        names = ("neg", "pos")

    def __init__(self, rows):
        super().__init__(rows)
        self.features = {"text": "string", "label": self.Label}


class Classes(list):
    """Rows of a dataset whose classes have a form that users give."""

    def __init__(self, classes):
        super().__init__([0])
        self.classes = classes


@pytest.mark.parametrize(
    "classes",
    [
        ["bee", "ant"],
        np.array(["bee", "ant"]),
        np.array(["bee", "ant"], object),
        pd.Index(["bee", "ant"]),
        pd.Series(["bee", "ant"]),
        {1: "ant", 0: "bee"},
        {"ant": 1, "bee": 0},
        {"ant": np.int64(1), "bee": np.int64(0)},
    ],
)
def test_forms_of_classes(classes):
    assert names_of(Subset(Classes(classes), [0])) == {CLASSES: ("bee", "ant")}


@pytest.mark.parametrize("classes", [None, [0, 1], np.arange(2), {0: 0, 1: 1}, {2: "ant", 5: "bee"}, "ab", {}])
def test_forms_without_names_of_classes(classes):
    assert names_of(Classes(classes)) == {}


def test_classes_of_tokens_are_aligned():
    class Sequence:
        def __init__(self, feature):
            self.feature = feature

    class Label:
        def __init__(self, names):
            self.names = names

    def tokens(names, labels):
        rows = Features([{"x": [0.0, 1.0], "labels": labels}] * 2)
        rows.features = {"x": None, "labels": Sequence(Label(names))}
        return rows

    data = as_client_data("0", (tokens(["o", "per", "loc"], [0, 2]), tokens(["loc", "o", "per"], [0, -100])))
    assert data.test.labels.tolist() == [[2, -100]] * 2
    assert data.train.labels.tolist() == [[0, 2]] * 2
    with pytest.raises(DataError, match="its labels are not numbers of these classes"):  # or columns of two classes
        as_client_data("0", (tokens(["o", "per"], [0, 1]), tokens(["per", "o"], [0, 1])))


def test_names_of_forms(folders):
    assert names_of(Subset(Features([0]), [0])) == {CLASSES: ("neg", "pos")}
    assert names_of((FRAME, LABELS)) == names_of({"x": FRAME, "label": LABELS}) == {"columns": ("age", "bmi", "bp")}
    assert names_of(({"a": FRAME[["age"]], "b": OTHER}, LABELS))["columns.b"] == ("bp", "age", "bmi")
    assert names_of(pd.DataFrame({"two\nlines": [1.0]})) == {"columns": ("two\\nlines",)}
    assert names_of((torch.ones(2, 2), torch.ones(2))) == {}
    folder = ImageFolder(folders["two"].root)
    folder.class_to_idx = {"bee": 1, "cat": 2}  # numbers that a user gave to all clients' classes
    assert names_of(folder) == {}
    folder.class_to_idx = {"kitten": 0, "cat": 0, "dog": 1}
    folder.samples = [(f"{folder.root}/dog/1.png", 1)]
    assert names_of(folder) == {CLASSES: ("cat or kitten", "dog")}
    numbers = pd.Series([3, 1], dtype="category")  # are the classes themselves
    assert as_client_data("0", ((FRAME[:2], numbers), (FRAME[:2], numbers))).train.labels.tolist() == [3, 1]


def test_categories_are_classes():
    train = pd.Series(["no", "yes", "yes", "no"], dtype="category")
    test = pd.Categorical(train, ["yes", "maybe", "no"])
    data = as_client_data("0", ((FRAME, train), (FRAME, test)))
    assert data.train.labels.tolist() == data.test.labels.tolist() == LABELS.tolist()
    assert data.names[CLASSES] == ("no", "yes", "maybe")
    column = as_client_data("0", ((FRAME, train.to_frame()), (FRAME, test)))  # a table with one column
    assert (column.train.labels.tolist(), column.names) == (data.train.labels.tolist(), data.names)
    texts = as_client_data("0", ((FRAME, train.astype(str).to_frame()), (FRAME, test)))
    assert (texts.train.labels.tolist(), texts.names) == (data.train.labels.tolist(), data.names)


TEXTS = ["bee", "ant", "cat", "bee"]


@pytest.mark.parametrize(
    "form",
    [
        lambda texts: texts,
        tuple,
        np.array,
        partial(np.array, dtype=object),
        partial(np.array, dtype="S"),
        pd.Series,
        partial(pd.Series, dtype="string"),
        lambda texts: pd.DataFrame({"kind": texts}),
    ],
)
def test_texts_are_names_of_classes(form):
    """They are numbered in alphabetical order, and aligned by name in parts and clients that have others."""
    data = as_client_data("0", ((FRAME, form(TEXTS)), {"x": FRAME.iloc[:2], "label": form(["cat", "bee"])}))
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([1, 0, 2, 1], [2, 1])
    assert data.names[CLASSES] == ("ant", "bee", "cat")
    assert as_pooled((FRAME, form(TEXTS))).names[CLASSES] == ("ant", "bee", "cat")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["bee", None, "cat", "bee"], "texts, but some are missing"),
        (pd.Series(["bee", None, "cat", "bee"]), "texts, but some are missing"),
        (np.array(["bee", 1, "cat", "bee"], object), "texts, but some are missing or numbers"),
        (["1", "10", "2", "1"], "texts of numbers, such as '1': convert them, such as by int"),
    ],
)
def test_texts_that_are_no_names_are_refused(texts, message):
    with pytest.raises(DataError, match=f"train: the labels are {message}"):
        as_client_data("0", ((FRAME, texts), (FRAME, LABELS)))


class Enum(list):
    """A column of polars with the data type `Enum`."""

    dtype = SimpleNamespace(categories=["cat", "ant", "bee"])

    def __array__(self, dtype=None, copy=None):
        return np.array([*self], dtype)


class Column:
    """A column of a Hugging Face dataset, as `dataset["label"]` returns it."""

    column_name = "label"
    source = SimpleNamespace(features={"label": SimpleNamespace(names=["cat", "ant", "bee"])})

    def __array__(self, dtype=None, copy=None):
        return np.array([2, 1, 0, 2], dtype)


@pytest.mark.parametrize("labels", [Enum(TEXTS), Column()])
def test_columns_of_other_libraries_are_aligned(labels):
    data = as_client_data("0", ((FRAME, TEXTS), (FRAME, labels)))
    assert data.test.labels.tolist() == data.train.labels.tolist() == [1, 0, 2, 1]


def test_a_column_of_texts_of_a_hugging_face_dataset_has_names():
    class Texts(Column):
        source = SimpleNamespace(features={"label": SimpleNamespace(dtype="string")})

        def __array__(self, dtype=None, copy=None):
            return np.array(["cat", "bee"] * 2, dtype)

    data = as_client_data("0", ((FRAME, TEXTS), (FRAME, Texts())))
    assert data.test.labels.tolist() == [2, 1, 2, 1]


def test_a_data_set_of_scikit_learn_as_a_frame():
    both = load_iris(as_frame=True)
    assert names_of(both) == {CLASSES: ("setosa", "versicolor", "virginica"), COLUMNS: tuple(both.data.columns)}
    assert as_client_data("0", (both, both)).train.inputs.shape == (150, 4)


def test_names_in_data_sets_of_scikit_learn():
    names = {"feature_names": ["age", "bmi", "bp"], "target_names": np.array(["no", "yes"])}
    train = Bunch(data=FRAME.to_numpy(), target=LABELS.numpy(), **names)
    names = {"feature_names": ["bp", "age", "bmi"], "target_names": np.array(["yes", "no"])}
    test = Bunch(data=OTHER.to_numpy(), target=1 - LABELS.numpy(), **names)
    data = as_client_data("0", (train, test))
    assert torch.equal(data.train.inputs, data.test.inputs)
    assert torch.equal(data.train.labels, data.test.labels)
    assert names_of(Bunch(data=FRAME, target=LABELS, feature_names=["a", "b"]))[COLUMNS] == ("age", "bmi", "bp")


def test_an_augmentation_gets_the_columns_in_the_users_order():
    """Also if the server chose another order."""

    def older(inputs):
        inputs[:, 0] += 100
        return inputs

    data = as_client_data("0", {"train": (FRAME, LABELS), "test": (FRAME, LABELS), "augment": older})
    moved = data.aligned({COLUMNS: ("bp", "bmi", "age")})
    inputs = moved.augment(moved.train.inputs, torch.Generator())
    assert torch.equal(inputs - moved.train.inputs, torch.tensor([[0.0, 0.0, 100.0]] * 4).double())


@pytest.mark.parametrize("key", ["target_names", "classes"])
def test_names_beside_the_columns_of_a_mapping(key):
    inputs, names = FRAME.to_numpy(), ["age", "bmi", "bp"]
    train = {"x": inputs, "y": LABELS, "feature_names": names, key: ["ant", "bee"]}
    test = {"x": inputs[:, ::-1], "y": 1 - LABELS, "feature_names": names[::-1], key: ["bee", "ant"]}
    data = as_client_data("0", (train, test))
    assert torch.equal(data.train.inputs, data.test.inputs)
    assert torch.equal(data.train.labels, data.test.labels)


def test_rows_with_one_index_in_different_orders_are_refused():
    labels = pd.Series(LABELS.numpy())
    for inputs in (FRAME[::-1], {"a": FRAME, "b": FRAME[::-1]}):
        with pytest.raises(
            DataError, match="train: the index of the labels differs from that of the inputs in its order or rows"
        ):
            as_client_data("0", ((inputs, labels), (FRAME, labels)))
    same = as_client_data("0", ((FRAME[::-1], labels[::-1]), (FRAME[::-1], labels.set_axis([5, 6, 7, 8]))))
    assert same.train.labels.tolist() == same.test.labels.tolist()[::-1]
    few, others = FRAME.set_axis([1, 2, 4, 5]), labels.set_axis([2, 4, 5, 6])
    with pytest.raises(DataError, match="the index of the labels differs from that of the inputs"):
        as_client_data("0", ((few, others), (FRAME, labels)))
    scaled = as_client_data("0", ((FRAME, others), (few, labels)))  # one has the default index
    assert scaled.train.labels.tolist() == labels.tolist()


def test_columns_are_aligned_in_all_parts():
    parts = {"test": (OTHER, LABELS), "common": {"x": OTHER, "label": LABELS}, "public": OTHER}
    data = as_client_data("0", {"train": (FRAME, LABELS), **parts})
    for part in (data.test, data.common, data.public):
        assert torch.equal(part.inputs, data.train.inputs)
    targets = (FRAME, FRAME), (FRAME, OTHER)
    assert torch.equal(
        *(part.labels for part in (as_client_data("0", targets).train, as_client_data("0", targets).test))
    )
    unlike = "client 0: test: its columns are AGE, bmi, bp, but the others' are age, bmi, bp: give all parts the same"
    with pytest.raises(DataError, match=unlike):
        as_client_data("0", ((FRAME, LABELS), (FRAME.rename(columns={"age": "AGE"}), LABELS)))
    without_names = as_client_data("0", ((FRAME, LABELS), (OTHER.to_numpy(), LABELS)))
    assert torch.equal(without_names.test.inputs, torch.tensor(OTHER.to_numpy()).float())


@pytest.mark.parametrize(
    "examples",
    [
        {"x": FRAME, "age": [50, 60, 70, 80], "label": LABELS},
        {"x": FRAME, "age": [True, False, True, True], "label": LABELS},
        {"x": FRAME, "age": [50, 60, 70, 80], "label": np.eye(4)},
        [{"x": [1.0, 2.0], "age": 50, "label": [0, 1]}] * 3,
        *([{"x": [1.0, 2.0], "age": age, "label": 1}] * 3 for age in (50.0, 50, True)),
    ],
)
def test_columns_of_numbers_beside_the_inputs_are_refused(examples):
    with pytest.raises(DataError, match="the columns age have numbers, but the inputs are the column x: join them"):
        as_client_data("0", (examples, examples))


def test_columns_that_are_not_numbers_of_examples_are_left_out():
    rows = {
        "x": FRAME,
        "idx": [0, 1, 2, 3],
        "__index_level_0__": [0, 1, 2, 3],
        "uid": [7, 9, 8, 6],
        "path": [*"abcd"],
        "coarse_label": LABELS,
        "version": 3,
        "mean": 0.5,
        "label": LABELS,
    }
    assert as_client_data("0", (rows, rows)).train.labels.tolist() == LABELS.tolist()


def test_alike():
    assert alike(CLASSES, ("ant", "bee"), ("ant", "bee", "cat"))
    assert alike("columns", ("0", "1"), ("age", "bmi"))  # a table without names has numbers
    assert not alike("columns", ("0", "1"), ("1", "0"))
    assert not alike("columns", ("age",), ("age", "bmi"))


def test_names_in_a_report():
    assert Report.of(Report("0", names="classes\tant\tbee").fields()).names == "classes\tant\tbee"
    for names in (
        "classes\tant\rINFO : forged",
        "classes" + "\tant" * 2**16 + "\tbee" * 2**10,
        "classes\tant\n" * 2**15,
    ):
        with pytest.raises(WireError, match="names of classes and columns are too many or not printable: rename"):
            Report.of({"client": "0", "names": names})
    with pytest.raises(WireError, match="names is .* must be text of at most 524288 characters"):
        Report.of({"client": "0", "names": "\t".join(map(str, range(10**6)))})


def test_methods_that_compare_names():
    assert [registry.method("fedavg").traits.compares(kind) for kind in (CLASSES, "columns")] == [True, True]
    assert [registry.method("fedrep").traits.compares(kind) for kind in (CLASSES, "columns")] == [False, True]
    assert [registry.method("lg-fedavg").traits.compares(kind) for kind in (CLASSES, "columns")] == [True, False]


# ---- between clients

ORDERS = ("ant", "bee", "cat"), ("cat", "ant", "bee")


class Named(Dataset):
    """Rows whose labels number `LEVELS` in the order of `classes`."""

    def __init__(self, seed, classes):
        self.classes = [*classes]
        self.labels = torch.randint(3, (24,), generator=torch.Generator().manual_seed(seed))
        self.inputs = torch.eye(3)[self.labels] + 0.1 * torch.arange(72.0).view(24, 3).sin()

    def __len__(self):
        return 24

    def __getitem__(self, row):
        return self.inputs[row], self.classes.index([*LEVELS][self.labels[row]])


def small(client):
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


def data_of(orders, table=False, public=False):
    """Return a data function for clients whose classes or, in a `table`, columns have these orders."""

    def part(seed, order):
        data = Named(seed, ORDERS[0] if table else order)
        frame = pd.DataFrame(data.inputs.numpy(), columns=[*LEVELS])
        return (frame[[*order]], data.labels) if table else data

    def data(client):
        order, seed = orders[client.partition_id], client.partition_id
        parts = {"train": part(seed, order), "test": part(10 + seed, order), "common": part(20, order)}
        return parts | ({"public": part(30, order)} if public else {})

    return data


def run(folder, method, data, **settings):
    """Return the networks that a run saves, and its result."""
    settings = {"clients": 3, "rounds": 2, "local-epochs": 1, "learning-rate": 0.2, "test-on": "both"} | settings
    settings |= {"workers": 1, "report": False, "method": method}
    done = fedhet.run(settings, model=small, data=data, out=folder, progress=False)
    return networks_in(folder), done


def networks_in(folder):
    tensors = [read_tensors(path) for path in sorted((folder / "models").glob("*.safetensors"))]
    return [{name: tensor.tolist() for name, tensor in network.items()} for network in tensors]


@pytest.mark.parametrize("method", ["fedavg", "fedmd"])
@pytest.mark.parametrize("table", [False, True])
def test_clients_in_another_order_give_the_same_networks(tmp_path, method, table):
    public = method == "fedmd"
    ordered, done = run(tmp_path / "ordered", method, data_of([ORDERS[0]] * 3, table, public))
    for place in (0, 1):  # the common test set at the server is client 0's
        orders = [ORDERS[number == place] for number in range(3)]
        networks, other = run(tmp_path / str(place), method, data_of(orders, table, public))
        assert networks == ordered
        for scores in ("personal_accuracy", "common"):
            assert other.summary[scores] == done.summary[scores]
        kind = "columns" if table else CLASSES
        said = f"client {place}: its {kind} (cat, ant, bee) are put in the server's order: ant, bee, cat"
        assert said in other.summary["warnings"]
        assert other.summary["names"][kind] == [*ORDERS[0]]


@pytest.mark.parametrize("settings", [{"metric": "macro-f1"}, {"class_weights": [1, 9, 0.1]}])
def test_numbers_by_class_of_clients_that_share_nothing_do_not_depend_on_their_orders(tmp_path, settings):
    weights = settings.get("class_weights", ())
    given = {key: value for key, value in settings.items() if key == "metric"} | {"test-on": "local", "rounds": 1}
    scores = []
    for name, second in (("same", ORDERS[0]), ("other", ORDERS[1])):
        orders = [ORDERS[0], second, ORDERS[0]]
        done = fedhet.run(
            {"clients": 3, "method": "local", "workers": 1, "report": False, "learning-rate": 0.2, **given},
            model=fixed,
            data=data_of(orders),
            task=fedhet.Task(class_weights=weights),
            out=tmp_path / name,
            progress=False,
        )
        scores.append((done.summary["personal_accuracy"], done.history[-1]["scores"]["trained"]))
    assert scores[0] == scores[1]


def fixed(client):
    """A network whose initial weights are the same in any order of the classes."""
    network = nn.Linear(3, 3)
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    return network


def test_clients_that_share_nothing_may_have_other_classes(tmp_path):
    def data(client):
        parts = data_of([ORDERS[0]] * 3)(client)
        for part in parts.values():
            part.classes = Dogs(["ant", "bee", "dog"]) if client.partition_id else part.classes
        return {name: part for name, part in parts.items() if name != "common"}

    _, done = run(tmp_path / "run", "local", data, **{"test-on": "local", "metric": "macro-f1"})
    assert not done.summary["failures"]
    assert len(done.history[-1]["scores"]["trained"]) == 3


def test_resumed_runs_keep_the_order(tmp_path):
    data = data_of([ORDERS[0], ORDERS[1], ORDERS[0]])
    whole, _ = run(tmp_path / "whole", "fedavg", data, rounds=2)
    run(tmp_path / "begun", "fedavg", data, rounds=1)
    fedhet.run({"rounds": 2}, resume=tmp_path / "begun", model=small, data=data, progress=False)
    assert networks_in(tmp_path / "begun") == whole


@pytest.mark.parametrize("place", ["", "models", "models/round-2"])
def test_runs_that_start_from_others_keep_the_order(tmp_path, place):
    run(tmp_path / "whole", "fedavg", data_of([ORDERS[0], ORDERS[1], ORDERS[0]]), **{"save-every": 2, "rounds": 3})
    # All clients have the other order, and `local` compares none.
    start = {"start-from": str(tmp_path / "whole" / place), "learning-rate": 1e-9, "test-on": "local"}
    _, started = run(tmp_path / "next", "local", data_of([ORDERS[1]] * 3), **start)
    _, expected = run(tmp_path / "same", "local", data_of([ORDERS[0]] * 3), **start)
    assert started.summary["names"] == {CLASSES: [*ORDERS[0]]}
    assert started.summary["personal_accuracy"] == expected.summary["personal_accuracy"]


class Dogs(list):
    """Names of classes, of which the last has another name than in `LEVELS`."""

    def index(self, name):
        return super().index("dog" if name == "cat" else name)


def test_a_network_that_goes_on_with_other_classes_is_told(tmp_path):
    whole = tmp_path / ("whole" * 40)  # the warning has the names after a path of any length
    run(whole, "local", data_of([ORDERS[0]] * 3), **{"test-on": "local"})
    start = {"start-from": str(whole), "test-on": "local"}
    _, same = run(tmp_path / "same", "local", data_of([ORDERS[0]] * 3), **start)
    assert not any("start-from" in line for line in same.summary.get("warnings", []))
    data = data_of([ORDERS[0]] * 3)

    def with_dogs(client):
        parts = data(client)
        for part in parts.values():
            part.classes = Dogs(["ant", "bee", "dog"])
        return parts

    _, renamed = run(tmp_path / "renamed", "local", with_dogs, **start)
    ends = "are ant, bee, cat, but this run's are ant, bee, dog"
    assert sum(line.startswith("client") and line.endswith(ends) for line in renamed.summary["warnings"]) == 3


def test_a_network_in_another_order_is_refused(tmp_path):
    data = data_of([ORDERS[0], ORDERS[1], ORDERS[0]])
    settings = {"test-on": "local", "learning-rate": 1e-9, "rounds": 1}
    _, before = run(tmp_path / "local", "local", data, **settings | {"learning-rate": 0.5, "local-epochs": 30})
    assert before.summary["personal_accuracy"]["weighted"] == 1
    settings["shared-init"] = False
    start = settings | {"start-from": str(tmp_path / "local")}
    _, refused = run(tmp_path / "refused", "layer-average", data, **start)
    (reason,) = {failure["reason"] for row in refused.history for failure in row["failures"]}
    assert reason.startswith("start-from: the classes of the network in ")
    assert "are cat, ant, bee, but this run's are ant, bee, cat: repeat that run with these classes" in reason
    # A method without common classes keeps the client's own order.
    settings.pop("shared-init")
    _, kept = run(tmp_path / "kept", "local", data, **settings | {"start-from": start["start-from"]})
    assert kept.summary["personal_accuracy"]["weighted"] == 1
    data = data_of([ORDERS[0]] * 3)
    run(tmp_path / "repeated", "local", data, **settings)
    start["start-from"] = str(tmp_path / "repeated")
    _, admitted = run(tmp_path / "admitted", "layer-average", data, **start)
    assert not admitted.summary["failures"]


def test_loading_a_model_logs_its_order(tmp_path, caplog):
    run(tmp_path / "run", "fedavg", data_of([ORDERS[0], ORDERS[1], ORDERS[0]], table=True))
    run(tmp_path / "own", "local", data_of([ORDERS[1]] * 3), **{"test-on": "local"})
    with caplog.at_level("INFO", "flwr.fedhet"):
        fedhet.load_model(tmp_path / "run", 1, model=small)
        fedhet.load_model(tmp_path / "own", 1, model=small)
    assert [line.split("safetensors: ")[1] for line in caplog.messages if "safetensors" in line] == [
        "its columns have the order ant, bee, cat",
        "its classes have the order cat, ant, bee",
    ]


def test_clients_without_names_are_named(tmp_path):
    named = data_of([ORDERS[1], ORDERS[1], ORDERS[1]], table=True)

    def data(client):
        parts = named(client)
        if client.partition_id == 1:
            return parts
        return {part: (frame[[*ORDERS[0]]].to_numpy(), labels) for part, (frame, labels) in parts.items()}

    _, done = run(tmp_path / "run", "fedavg", data)
    message = "2 clients (0, 2): give names to the columns, or check that their order is cat, ant, bee"
    assert message in done.summary["warnings"]
    for method, form in ("fedavg", named), ("local", data):
        _, done = run(tmp_path / method, method, form, **{"test-on": "local"})
        assert not any("give names" in line for line in done.summary.get("warnings", ()))


@pytest.mark.parametrize(
    ("method", "refused"), [("fedavg", True), ("fedproto", True), ("local", False), ("fedrep", False)]
)
def test_other_classes_are_refused_if_their_numbers_are_shared(tmp_path, method, refused):
    class Other(Named):
        def __getitem__(self, row):
            return self.inputs[row], int(self.labels[row])

    def data(client):
        part = Other(0, ("ant", "bee", "dog" if client.partition_id == 1 else "cat"))
        return part, part

    _, done = run(tmp_path / "run", method, data, **{"rounds": 1, "local-epochs": 3, "test-on": "local"})
    reasons = {failure["reason"] for row in done.history for failure in row["failures"]}
    message = (
        "the client's classes are ant, bee, dog, but the others' are ant, bee, cat: give all clients the same classes"
    )
    assert reasons == ({message} if refused else set())


def test_a_client_without_a_class_lists_it_nevertheless(tmp_path):
    """The advice in the refusal of a shorter list of classes."""
    inputs = torch.arange(24.0).sin().view(8, 3)
    whole = ["a", "b", "c"]

    def data(client, last):
        labels = ["b", "c"] * 4 if client.partition_id == 2 else ["a", "b", "c", "a"] * 2
        part = inputs, pd.Series(pd.Categorical(labels, categories=last if client.partition_id == 2 else whole))
        return part, part

    settings = {"rounds": 1, "test-on": "local"}
    _, done = run(tmp_path / "short", "fedavg", lambda client: data(client, ["b", "c"]), **settings)
    (reason,) = {failure["reason"] for row in done.history for failure in row["failures"]}
    assert reason.endswith("give all clients the same classes, also those of which a client has no example")
    _, done = run(tmp_path / "whole", "fedavg", lambda client: data(client, whole), **settings)
    assert [row["failures"] for row in done.history] == [[]] * len(done.history)


class ArrowTable:
    """What fedhet uses of a table of pyarrow, whose `columns` are values."""

    column_names = ("b", "a")
    columns = ([1.0, 2.0], [3.0, 4.0])

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.columns, dtype=dtype).T


class XArray(np.ndarray):
    """What fedhet uses of an array of xarray whose last axis has coordinates."""

    dims = ("row", "column")
    coords: ClassVar = {"column": pd.Series(["b", "a"])}


@pytest.mark.parametrize("table", [ArrowTable(), np.array([[1.0, 3], [2, 4]]).view(XArray)])
def test_columns_of_other_libraries_have_names(table):
    assert names_of((table, [0, 1]))[COLUMNS] == ("b", "a")
    parts = ((pd.DataFrame({"a": [3.0, 4], "b": [1.0, 2]}), [0, 1]), (table, [0, 1]))
    data = as_client_data("0", parts)
    assert torch.equal(data.test.inputs, data.train.inputs)


def test_a_table_with_its_labels_is_no_list_of_rows():
    with pytest.raises(DataError, match="in one table: give a pair"):
        as_client_data("0", (ArrowTable(), ArrowTable()))


class OneColumn:
    """What fedhet uses of a table of polars with one column."""

    columns = ("label",)

    def __getitem__(self, name):
        return np.array({"label": [1, 0]}[name])

    def to_numpy(self):
        return self["label"][:, None]


def test_a_table_of_labels_with_one_column():
    part = pd.DataFrame({"a": [3.0, 4], "b": [1.0, 2]}), OneColumn()
    assert as_client_data("0", (part, part)).train.labels.tolist() == [1, 0]


class Six(TensorDataset):
    """Six examples whose classes have names."""

    def __init__(self, classes):
        super().__init__(torch.arange(6.0)[:, None], torch.arange(6) % 2)
        self.classes = classes


class Reading(Dataset):
    """A user's own dataset that reads rows of another, perhaps some only, or with other labels."""

    def __init__(self, whole, rows=None, label=lambda label: label):
        self.whole, self.rows, self.label = whole, rows, label

    def __len__(self):
        return len(self.whole if self.rows is None else self.rows)

    def __getitem__(self, row):
        inputs, label = self.whole[row if self.rows is None else int(self.rows[row])]
        return inputs, self.label(label)


class Counting(torch.Tensor):
    """A tensor that counts how often its entries are listed."""

    read = 0

    def __iter__(self):
        self.read += 1
        return super().__iter__()


@pytest.mark.parametrize("rows", [None, [3, 0, 1], range(1, 5), np.array([5, 2]), torch.tensor([4, 4, 4])])
def test_classes_of_the_dataset_that_a_users_own_reads(rows):
    assert names_of(Reading(Six(["ant", "bee"]), rows)) == {CLASSES: ("ant", "bee")}
    assert names_of(DataLoader(Reading(Reading(Six(["ant", "bee"]), rows)))) == {CLASSES: ("ant", "bee")}
    parts = Reading(Six(["ant", "bee"])), Reading(Six(["bee", "ant"]), rows)
    data = as_client_data("0", parts)
    order = torch.arange(6) if rows is None else torch.as_tensor([*map(int, rows)])
    assert data.test.labels.tolist() == (1 - order % 2).tolist()


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("label2id", {"bee": 0, "ant": 1}),
        ("id2label", {0: "bee", 1: "ant"}),
        ("label_to_idx", {"bee": 0, "ant": 1}),
        ("classNames", ("bee", "ant")),
        ("idx_to_class", {0: "bee", 1: "ant"}),
        ("name2label", {"bee": 0, "ant": 1}),
        ("class_to_name", {0: "bee", 1: "ant"}),
        ("class_labels", ["bee", "ant"]),
        ("all_classes", ["bee", "ant"]),
        ("coarse_classes", ["bee", "ant"]),
        ("fine_label_names", ["bee", "ant"]),
        ("label_mapping", {np.str_("bee"): np.int64(0), np.str_("ant"): np.int64(1)}),
        ("class_names", ["bee", "ant"]),
        ("categories", np.array(["bee", "ant"])),
        ("encoder", SimpleNamespace(classes_=np.array(["bee", "ant"]))),
    ],
)
def test_classes_in_attributes_of_a_users_own_dataset(attribute, value):
    rows = Reading(TensorDataset(torch.arange(6.0)[:, None], torch.arange(6) % 2))
    for name, other in {"class_weights": {"bee": 0.5, "ant": 2.5}, "label_smoothing": 0.1, "classes": 2}.items():
        setattr(rows, name, other)
    assert names_of(rows) == {}
    setattr(rows, attribute, value)
    assert names_of(rows) == {CLASSES: ("bee", "ant")}
    rows.labels = ["a", "b", "a", "b", "a", "b"]  # of the rows
    assert as_client_data("0", (Six(["ant", "bee"]), rows)).test.labels.tolist() == [1, 0] * 3
    rows._class_list = ["one", "two"]
    assert names_of(rows) == {}, "it is unknown which are the labels'"


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("labels", {f"patient-{row}.png": row % 2 for row in range(8)}),  # of files, as in many users' datasets
        ("labels", {0: "a text", 1: "another", 2: "a third", 3: "one more", 4: "the fifth", 5: "the last"}),  # of rows
        ("labels", {"a.png": [0, 1]}),
        ("label_columns", ["diagnosis", "age"]),
        ("patient_labels", ["Ann", "Ben"]),
        ("photo_labels", ["indoors", "outdoors"]),
        ("label_map_files", ["a.csv", "b.csv"]),
        ("label_files", ["a.csv", "b.csv"]),
        ("label_names", ["diagnosis"]),
        ("labeled_ids", ["patient-1", "patient-2"]),
        ("label_to_patient", {0: "Ann", 1: "Ben"}),
        ("class_dirs", ["/data/a", "/data/b"]),
        ("encoder", {"the": 0, "patient": 1}),  # a vocabulary
        ("sentences", ["a text", "another"]),
        ("country_encoder", SimpleNamespace(classes_=np.array(["DE", "FR"]))),
        ("classes", torch.tensor(2)),
    ],
)
def test_attributes_that_are_no_names_of_classes(attribute, value):
    rows = Reading(TensorDataset(torch.arange(6.0)[:, None], torch.arange(6) % 2))
    setattr(rows, attribute, value)
    assert names_of(rows) == {}


class Unknown(Reading):
    """A user's own dataset that has targets for some of its classes only."""

    @property
    def targets(self):
        raise NotImplementedError


def test_a_property_that_raises_does_not_matter():
    rows = Unknown(TensorDataset(torch.arange(6.0)[:, None], torch.arange(6) % 2))
    rows.classes = ["ant", "bee"]
    assert names_of(rows) == {CLASSES: ("ant", "bee")}


def test_labels_of_a_users_own_dataset_are_not_listed_one_by_one():
    rows = Reading(TensorDataset(torch.arange(6.0)[:, None], torch.arange(6) % 2))
    rows.labels = Counting(torch.arange(6) % 2)
    assert names_of(rows) == {}
    assert rows.labels.read == 0


@pytest.mark.parametrize(
    "samples",
    [
        ["a.png", "b.png"] * 3,
        [("a.png", row % 2) for row in range(6)],
        [("a.png", row % 2, "north") for row in range(6)],
    ],
)
def test_samples_of_a_users_own_dataset_may_have_any_form(samples):
    rows = Reading(TensorDataset(torch.arange(6.0)[:, None], torch.arange(6) % 2))
    rows.classes, rows.samples = ["ant", "bee"], samples
    assert names_of(rows) == {CLASSES: ("ant", "bee")}


def test_a_dataset_with_other_labels_than_the_one_that_it_reads_has_no_names():
    assert names_of(Reading(Six(["ant", "bee"]), label=lambda label: 1 - label)) == {}
    assert names_of(Reading(Six(["ant", "bee"]), [1, 0, 2], label=lambda label: 1 - label)) == {}
    both = Reading(Six(["ant", "bee"]))
    both.other = Six(["ant", "bee"])
    assert names_of(both) == {}, "it is unknown which one it reads"


class Corrected(Reading):
    """A user's own dataset that numbers the classes of a list of folders alike, and may list one's classes."""

    def __init__(self, whole, classes=None):
        super().__init__(whole, label=int)
        if classes:
            self.classes = classes

    def __getitem__(self, row):
        inputs, label = self.whole[row]
        folders = getattr(self.whole, "datasets", [self.whole])
        ends = np.cumsum([len(folder) for folder in folders])
        return inputs, [*LEVELS].index(folders[np.searchsorted(ends, row, "right")].classes[label])


class Anew(ImageFolder):
    """A user's own folder of images, which numbers classes by a list."""

    def __getitem__(self, row):
        inputs, label = super().__getitem__(row)
        return inputs, [*LEVELS].index(self.classes[label])


class Part(Subset):
    """A user's own part of a folder, which numbers classes by a list."""

    def __getitem__(self, row):
        inputs, label = super().__getitem__(row)
        return inputs, [*LEVELS].index(self.dataset.classes[label])

    def __getitems__(self, rows):
        return [self[row] for row in rows]


class Transformed:
    """A dataset of Hugging Face whose transform numbers the classes anew."""

    features: ClassVar = {"label": SimpleNamespace(names=["bee", "cat"])}
    format: ClassVar = {"type": "custom"}

    def __len__(self):
        return 4

    def __getitem__(self, row):
        return {"image": torch.zeros(1, 2, 2), "label": 1 + row % 2}

    def with_format(self, _kind):
        return [{"image": b"", "label": row % 2, "path": "a.png"} for row in range(4)]


def with_samples(folder):
    changed = copy(folder)
    changed.samples = [(path, [*LEVELS].index(folder.classes[label])) for path, label in folder.samples]
    return changed


def collated(rows):
    return torch.stack([inputs for inputs, _ in rows]), torch.tensor([1 + label for _, label in rows])


@pytest.mark.parametrize(
    "form",
    [
        Corrected,
        lambda folder: Corrected(folder, folder.classes),
        lambda folder: Corrected(ConcatDataset([folder, folder])),
        lambda folder: Anew(folder.root, pil_to_tensor),
        lambda folder: Part(folder, range(4)),
        lambda folder: DataLoader(folder, 2, collate_fn=collated),
        with_samples,
        lambda folder: Transformed(),
    ],
)
def test_a_dataset_that_numbers_classes_anew_is_not_aligned_by_the_old_names(folders, form):
    data = as_client_data("0", (folders["all"], form(folders["two"])))
    assert data.test.labels.unique().tolist() == [1, 2]
    assert data.note == "give names to the classes of test, or check that their order is ant, bee, cat"


def test_a_dataset_may_correct_unlike_members(folders):
    members = ConcatDataset([folders["two"], folders["first"]])
    data = as_client_data("0", (folders["all"], Corrected(members)))
    assert data.test.labels.tolist() == [1, 1, 2, 2, 0, 0, 1, 1]
    with pytest.raises(DataError, match="the classes of a member of the ConcatDataset are"):
        as_client_data("0", (folders["all"], Reading(members)))


def test_labels_with_noise_keep_their_names(folders):
    noisy = Reading(folders["two"], label=partial(lambda draw, label: next(draw, label), iter([1, 0, 0, 0])))
    noisy.classes = folders["two"].classes
    assert names_of(noisy) == {CLASSES: ("bee", "cat")}


def test_attributes_that_are_no_rows_do_not_matter():
    rows = Reading(Six(["ant", "bee"]), {0: 3, 1: 0})
    for name, value in {"mean": torch.tensor(0.5), "lines": [7, "a"], "feature_names": None, "itself": rows}.items():
        setattr(rows, name, value)
    rows.boxes = [[1], [1, 2]]
    assert names_of(rows) == {}
    rows.order = [3, 0]
    assert names_of(rows) == {CLASSES: ("ant", "bee")}
    rows.whole.reader = rows
    assert names_of(rows) == {CLASSES: ("ant", "bee")}


class Rows(Dataset):
    """A user's own dataset of a table's rows, in any of several ways."""

    def __init__(self, order, read):
        self.read = read
        table = pd.DataFrame(np.arange(12.0).reshape(4, 3), columns=["age", "bmi", "bp"])[order]
        if read == "features":
            self.feature_names = order
            self.values = table.to_numpy()
        elif read == "columns":
            self.columns = table.columns
            self.values = table.to_numpy()
        elif read == "chosen":
            self.table = table.assign(patient=7.0, label=[0, 1, 1, 0])
            self.feature_cols = order
        else:
            self.table = table.assign(label=[0, 1, 1, 0])

    def __len__(self):
        return 4

    def __getitem__(self, row):
        if self.read in ("features", "columns"):
            return torch.tensor(self.values[row]), 1
        series = self.table.iloc[row]
        inputs = series[self.feature_cols] if self.read == "chosen" else series.drop("label")
        return (inputs if self.read == "series" else torch.tensor(inputs.to_numpy())), int(series["label"])


@pytest.mark.parametrize("read", ["features", "columns", "chosen", "tensor", "series"])
def test_columns_of_the_table_that_a_users_own_dataset_reads(read):
    one, other = Rows(["age", "bmi", "bp"], read), Rows(["bp", "age", "bmi"], read)
    assert names_of(one)[COLUMNS] == names_of(DataLoader(Subset(one, [2, 0])))[COLUMNS] == ("age", "bmi", "bp")
    assert names_of([one[row] for row in range(4)]).get(COLUMNS, ()) == (
        ("age", "bmi", "bp") if read == "series" else ()
    )
    data = as_client_data("0", (one, other))
    assert torch.equal(data.train.inputs[:], data.test.inputs[:])
    assert names_of(ConcatDataset([one, one]))[COLUMNS] == ("age", "bmi", "bp")
    with pytest.raises(DataError, match="unlike columns"):
        names_of(ConcatDataset([one, other]))


class Scaled(Dataset):
    """Rows of a table that are scaled when they are read."""

    def __init__(self, table, change=lambda rows: rows):
        self.table, self.change = table, change

    def __len__(self):
        return len(self.table)

    def __getitem__(self, row):
        values = (self.table - self.table.mean()) / self.table.std()
        return torch.tensor(self.change(values.iloc[row].to_numpy())), row % 2


def test_columns_of_a_table_whose_rows_are_scaled():
    rng = np.random.default_rng(0)
    values = {"age": rng.normal(50, 9, 40), "smoker": rng.integers(0, 2, 40), "male": rng.integers(0, 2, 40)}
    table = pd.DataFrame(values)
    data = as_client_data("0", (Scaled(table), Scaled(table[["male", "age", "smoker"]])))
    assert torch.equal(data.train.inputs[:], data.test.inputs[:])
    assert names_of(Scaled(table, lambda row: np.roll(row, 1))) == {}


def test_columns_of_equal_values_may_have_any_order():
    rows = Rows(["age", "bmi", "bp"], "tensor")
    rows.table["bp"] = rows.table["bmi"]
    assert names_of(rows) == {}


@pytest.mark.parametrize("frames", [True, False])
def test_times_are_no_columns(frames):
    """Each example is a series with times of its own."""
    table = pd.DataFrame(np.arange(24.0).reshape(12, 2), index=pd.date_range("2026-11-30", periods=12))
    series = [table[row : row + 3] if frames else table[0][row : row + 3] for row in range(6)]
    train, test = [(each, 0) for each in series[:3]], [(each, 1) for each in series[3:]]
    assert as_client_data("0", (train, test)).names == {}


def test_a_dataset_that_changes_the_values_of_its_table_has_no_columns_by_name():
    scaled = Rows(["age", "bmi", "bp"], "tensor")
    scaled.table["age"] += 0.5
    assert COLUMNS in names_of(scaled)
    scaled.other = scaled.table.copy()
    assert names_of(scaled) == {}, "it is unknown which one it reads"
