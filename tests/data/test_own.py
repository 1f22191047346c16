"""Data in users' own forms, and public datasets."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torchvision.datasets import DatasetFolder

from fedhet.data import ClientData, Examples, PublicDataset, with_validation
from fedhet.data.own import as_client_data, as_input, as_public_dataset
from fedhet.data.reading import as_labels
from fedhet.errors import DataError
from fedhet.tasks import Task

INPUTS, LABELS = torch.arange(12.0).view(3, 4), torch.tensor([0, 1, 1])


def test_digest_of_a_public_dataset():
    labelled = PublicDataset(INPUTS, LABELS)
    assert labelled.digest == PublicDataset(INPUTS.clone().T.contiguous().T, LABELS.clone()).digest
    others = [PublicDataset(each) for each in (INPUTS, INPUTS + 1, INPUTS.view(4, 3), INPUTS.double(), INPUTS.flip(0))]
    others += [PublicDataset(INPUTS, each) for each in (LABELS.flip(0), LABELS.int(), LABELS.view(3, 1))]
    assert len({labelled.digest, *(public.digest for public in others)}) == 9
    assert labelled.unlabelled is labelled.unlabelled.unlabelled
    assert labelled.unlabelled.digest == PublicDataset(INPUTS).digest


@pytest.mark.parametrize("value", [(INPUTS, LABELS), (INPUTS.tolist(), LABELS.tolist()), Examples(INPUTS, LABELS)])
def test_forms_of_a_public_dataset(value):
    assert as_public_dataset(value).digest == PublicDataset(INPUTS, LABELS).digest
    assert as_public_dataset(INPUTS).digest == PublicDataset(INPUTS).digest
    assert as_public_dataset(None) is None
    public = PublicDataset(INPUTS)
    assert as_public_dataset(public) is public


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("all of them", "the public dataset: rows of a str cannot be read by index"),
        ((INPUTS, LABELS[:2]), "the public dataset: the set has 3 inputs but 2 labels"),
    ],
)
def test_invalid_public_datasets(value, message):
    with pytest.raises(DataError, match=message):
        as_public_dataset(value)


def test_public_dataset_and_common_test_set_of_a_client():
    part = (INPUTS, LABELS)
    mapping = {"train": part, "test": TensorDataset(*part), "public": part, "common": TensorDataset(*part)}
    for given in (mapping, ClientData(Examples(*part), Examples(*part), PublicDataset(*part), Examples(*part))):
        data = as_client_data("3", given)
        assert data.public.digest == PublicDataset(*part).digest
        assert torch.equal(data.common.inputs, INPUTS)
        assert torch.equal(data.train.labels, LABELS)


def test_inputs_are_converted_for_a_model():
    assert as_input(torch.tensor([255], dtype=torch.uint8)).tolist() == [1.0]
    assert as_input(torch.tensor([255])).tolist() == [255]
    assert as_input(torch.ones(1).double(), torch.float32).dtype == torch.float32
    assert as_input(torch.ones(1).long(), torch.float32).dtype == torch.int64


class Rows(torch.utils.data.Dataset):
    """Pairs or dicts that are counted as they are read."""

    def __init__(self, row, count=6):
        self.row, self.count, self.read = row, count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        return self.row(index)


def picture(value, mode="L"):
    from PIL import Image

    return Image.new(mode, (4, 3), value)


class HuggingFaceLike:
    """The used part of a `datasets.Dataset`: columns by name, rows by number, another format."""

    column_names = ["img", "label"]  # noqa: RUF012
    format = {"type": None}  # noqa: RUF012

    def __len__(self):
        return 3

    def __getitem__(self, key):
        return list(range(3)) if key == "label" else {"img": picture(40 * key), "label": key}

    def with_format(self, kind):
        return self


FORMS = {
    "pairs": lambda: [(torch.full((1, 3, 4), 40 * i).byte(), i) for i in range(3)],
    "dict rows": lambda: Rows(lambda i: {"image": picture(40 * i), "label": i}, 3),
    "Hugging Face": HuggingFaceLike,
    "a loader": lambda: torch.utils.data.DataLoader(Rows(lambda i: (picture(40 * i), i), 3), batch_size=2),
    "its own collate": lambda: torch.utils.data.DataLoader(
        range(3), collate_fn=lambda rows: {"x": [torch.full((1, 3, 4), 40 * i).byte() for i in rows], "y": rows}
    ),
    "columns": lambda: {"img": [picture(40 * i) for i in range(3)], "label": [0, 1, 2]},
    "dicts of one tensor": lambda: Rows(lambda i: ({"pixel_values": picture(40 * i)}, i), 3),
    "strided": lambda: (40 * torch.arange(3).byte().view(3, 1, 1, 1).expand(3, 1, 3, 4), torch.arange(6)[::2] // 2),
    "arrays": lambda: (np.stack([np.full((1, 3, 4), 40 * i, np.uint8) for i in range(3)]), np.arange(3)),
    "a part": lambda: torch.utils.data.Subset(Rows(lambda i: (picture(40 * (i - 2)), i - 2)), [2, 3, 4]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_data(form):
    data = as_client_data("3", (FORMS[form](), FORMS[form]()))
    assert torch.equal(data.train.labels, torch.arange(3))
    assert data.train.inputs[:].dtype == torch.uint8
    assert torch.equal(data.train.inputs[torch.tensor([2, 0])], data.test.inputs[:][[2, 0]])
    assert data.train.inputs[:].float().mean((1, 2, 3)).tolist() == [0, 40, 80]
    assert data.batch_size == {"a loader": 2, "its own collate": 1}.get(form)


@pytest.mark.parametrize(
    ("mode", "kept"), [("1", torch.uint8), ("L", torch.uint8), ("I;16", torch.float32), ("F", torch.float32)]
)
def test_grey_pictures_of_any_number_of_bits_have_one_channel(mode, kept):
    value = {"1": 255, "L": 200}.get(mode, 1000)
    rows = Rows(lambda i: (picture(value, mode), picture(i)), 3)  # a class for each pixel
    train = as_client_data("3", (rows, (INPUTS, LABELS))).train
    assert (train.inputs[:].dtype, train.inputs[:].shape) == (kept, (3, 1, 3, 4))
    assert train.inputs[:].unique().tolist() == [value]
    assert train.labels.float().mean((1, 2)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("image", [np.zeros((1, 3, 4), np.float32), picture(9)], ids=["array", "picture"])
def test_masks_of_pictures(image):
    data = as_client_data("0", ([(image, picture(1))] * 3, [(image, picture(1))] * 3))
    assert torch.equal(data.train.labels.long(), torch.ones(3, 3, 4).long())
    assert data.test.inputs[:].shape == (3, 1, 3, 4)


def test_a_structured_array_is_refused_with_what_to_give():
    from numpy.lib.recfunctions import structured_to_unstructured

    labels = np.array([(1.5, True), (2.5, False)], [("time", float), ("event", bool)])
    inputs = np.array([(1, 2.0), (3, 4.0)], [("age", int), ("dose", float)])
    for pair in ((np.ones((2, 3)), labels), (inputs, np.arange(2))):
        with pytest.raises(DataError, match=r"numpy\.lib\.recfunctions\.structured_to_unstructured"):
            as_client_data("0", (pair, pair))
    pair = tuple(map(structured_to_unstructured, (inputs, labels)))
    assert as_client_data("0", (pair, pair)).train.labels.tolist() == [[1.5, 1], [2.5, 0]]


def test_rows_are_read_on_demand():
    rows = Rows(lambda i: (torch.full((2,), float(i)), i))
    data = with_validation(as_client_data("3", (rows, (INPUTS, LABELS))), 0.5, 0, "3")
    assert rows.read == list(range(6))  # for the labels
    rows.read.clear()
    assert data.train.inputs[torch.tensor([1])].shape == (1, 2)
    assert len(rows.read) == 1
    rows.read.clear()
    assert torch.equal(torch.cat([inputs for inputs, _ in data.train.batches(2)])[:, 0].long(), data.train.labels)
    assert len(rows.read) == 3


def test_random_transforms_stay_random():
    data = as_client_data("3", (Rows(lambda i: (torch.rand(2), i)), (INPUTS, LABELS)))
    assert not torch.equal(data.train.inputs[:], data.train.inputs[:])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            Rows(lambda i: ({"input_ids": [1] * (2 + i % 2), "mask": 1}, i)),
            r"examples differ .* inputs.input_ids \[2\], .* and inputs.input_ids \[3\], .*: convert or pad",
        ),
        (
            Rows(lambda i: (torch.ones(1), i, i, "path")),
            r"a row or batch must be a pair .*, not 4 values: leave out the others, .* collate_fn",
        ),
        (Rows(lambda i: (torch.ones(1),)), "a row or batch must be a pair .*, not 1 values$"),
        (Rows(lambda i: ({"a": 1, "b": 1} if i else {"a": 1}, i)), "examples differ in shape or type, such as inputs "),
        (({"input_ids": INPUTS, "mask": INPUTS[:2]}, LABELS), "the set has 2 inputs but 3 labels: give one label"),
        (
            Rows(lambda i: {"height": 1, "width": 2, "label": 3}),
            "the columns height, width, label must include one for inputs",
        ),
        (
            Rows(lambda i: (picture(9, "F" if i else "L"), i)),
            r"examples differ in shape or type, such as inputs \[1, 3, 4\] and inputs \[1, 3, 4\] of bytes",
        ),
        (Rows(lambda i: (torch.ones(1), "cat")), "the labels cannot be converted .*str.*: number the classes from 0"),
        ([(row, "a") for row in INPUTS], "the labels cannot be converted .*str.*, or give all labels as one list"),
        (([[1.0], [1.0, 2.0]], [0, 1, 0]), "the inputs cannot be converted .*: give numbers, in rows of one length"),
        (
            (np.ma.masked_invalid([[1.0], [np.nan], [2.0]]), LABELS),
            "the inputs .type MaskedArray. are sparse, nested, mas",
        ),
        (
            Subset(TensorDataset(INPUTS, LABELS), LABELS == 0),
            r"the indices of a Subset are a mask of booleans: give row numbers \(mask.nonzero",
        ),
        (Subset(Subset(TensorDataset(INPUTS, LABELS), (LABELS == 0).tolist()), [0]), "the indices of a Subset are"),
        ([(INPUTS, LABELS)] * 3, "the pairs in the list, with 3 inputs and labels each, may be batches or examples"),
        ((INPUTS.to("meta"), LABELS), "the inputs .type Tensor. are .*: give dense arrays"),
        (iter([]), "rows of a list_iterator cannot be read by index"),
    ],
)
def test_unusable_rows_are_refused(part, message):
    with pytest.raises(DataError, match=f"client 3: train: {message}"):
        as_client_data("3", (part, (INPUTS, LABELS))).train.inputs[:]


def test_a_table_with_texts_names_their_columns():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"age": [1, 2, 3], "city": ["x", "y", "x"], "visits": pandas.array([1, None, 2], "Int64")})
    with pytest.raises(DataError, match="train: the inputs have texts, dates or missing values in 'city', 'visits': "):
        as_client_data("3", ((table, LABELS), (INPUTS, LABELS)))


def test_data_have_no_gradients():
    network = torch.nn.Linear(INPUTS.shape[1], 2)
    with torch.inference_mode():
        inferred = INPUTS.float() * 2
    rows = Rows(lambda row: (network(INPUTS[row % 3].float()), row % 3))
    parts = {"train": (network(INPUTS.float()), LABELS), "test": (inferred, LABELS), "validation": rows}
    data = as_client_data("3", parts)
    for part in (data.train, data.test, data.validation):
        inputs = part.inputs[:]
        assert (inputs.requires_grad, inputs.is_inference()) == (False, False)


def test_labels_become_what_a_task_takes():
    assert as_labels(np.array([[3], [1]], np.int32)).tolist() == [3, 1]
    assert as_labels([0.5, 1.5]).shape == (2, 1)
    assert as_labels([True, False]).dtype == torch.int64
    assert as_labels(torch.tensor([[0, 1], [1, 1]])).shape == (2, 2)


def test_a_misspelt_part_is_refused():
    with pytest.raises(DataError, match="it returned 'train', 'test', 'trian'"):
        as_client_data("3", {"train": 1, "test": 1, "trian": 1})


SEEN: list[object] = []


def noted(inputs, *arguments):
    SEEN[:] = arguments
    return inputs


AUGMENTS = {
    "a default": (lambda x, p=0.5: noted(x, p), [0.5]),
    "a keyword": (lambda x, *, p=0.5: noted(x, p), [0.5]),
    "partial": (partial(lambda x, p=0.5, generator=1: noted(x, p, generator), p=0.3, generator=2), [0.3, 2]),
    "by name": (lambda x, p=0.5, generator=None: noted(x, p, generator), [0.5, "given"]),
    "an object": (type("Shift", (), {"__call__": lambda self, x, p=0.5: noted(x, p)})(), [0.5]),
    "a module": (
        type("Noise", (torch.nn.Module,), {"forward": lambda self, x, generator: noted(x, generator)})(),
        ["given"],
    ),
}


@pytest.mark.parametrize("form", AUGMENTS)
def test_arguments_of_an_augmentation(form):
    augment, expected = AUGMENTS[form]
    data = as_client_data("3", {"train": (INPUTS, LABELS), "test": (INPUTS, LABELS), "augment": augment})
    assert torch.equal(data.augment(INPUTS, "given"), INPUTS)
    assert expected == SEEN


@pytest.mark.parametrize(
    ("augment", "words"),
    [
        (lambda x: None, "returned no tensor for a batch of torch.float32 of shape"),
        (lambda x: x[:1], r"returned torch.float32 of shape \(1, "),
        (lambda x: x.byte(), "returned torch.uint8"),
        (lambda x: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_an_augmentation_that_returns_no_batch(augment, words):
    data = as_client_data("3", {"train": (INPUTS, LABELS), "test": (INPUTS, LABELS), "augment": augment})
    with pytest.raises(DataError, match=f"the augment function {words}"):
        data.augment(INPUTS, None)


WHOLE = TensorDataset(torch.arange(12.0)[:, None], torch.arange(12))
CHOSEN = [9, 2, 5, 4]
SAMPLERS = {
    "subset": ({"sampler": SubsetRandomSampler(CHOSEN)}, [2, 4, 5, 9]),
    "list": ({"sampler": CHOSEN, "batch_size": 3, "drop_last": True}, [2, 4, 5, 9]),
    "batches": ({"batch_sampler": BatchSampler(SubsetRandomSampler(CHOSEN), 3, True)}, [2, 4, 5, 9]),
    "own batches": ({"batch_sampler": [[9, 2], [5, 4]]}, [2, 4, 5, 9]),
    "distributed": ({"sampler": DistributedSampler(WHOLE, 3, 1, shuffle=False)}, [1, 4, 7, 10]),
    "all, shuffled": ({"shuffle": True, "batch_size": 5, "drop_last": True}, list(range(12))),
    "all, in an order of weights": ({"sampler": WeightedRandomSampler(range(1, 13), 12, False)}, list(range(12))),
    "weights": ({"sampler": WeightedRandomSampler([1.0] * 12, 12)}, "WeightedRandomSampler repeats rows"),
    "with replacement": ({"sampler": RandomSampler(WHOLE, True)}, "RandomSampler repeats rows or draws"),
    "some": ({"sampler": RandomSampler(WHOLE, num_samples=11)}, "RandomSampler repeats rows or draws"),
    "without end": ({"sampler": iter(lambda: 3, None)}, "repeats rows"),
    "no batches": ({"batch_size": None}, "DataLoader with .* batch_size = None has unknown examples: give the dataset"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("dataset", [WHOLE, Rows(lambda i: (torch.tensor([float(i)]), i), 12)], ids=["memory", "rows"])
def test_samplers(dataset, kind):
    options, expected = SAMPLERS[kind]
    loader = DataLoader(dataset, **options)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=f"train: .*{expected}"):
            as_client_data("3", (loader, WHOLE))
    else:
        data = as_client_data("3", (loader, WHOLE))
        assert data.train.labels.tolist() == data.train.inputs[:][:, 0].tolist() == expected
        assert data.batch_size == (None if kind == "own batches" else getattr(loader.batch_sampler, "batch_size", 1))


def test_a_loader_with_its_own_batches_is_refused():
    mixing = type("Mixing", (DataLoader,), {"__iter__": lambda self: iter(())})
    with pytest.raises(DataError, match="train: a DataLoader with its own __iter__ or .* has unknown examples"):
        as_client_data("3", (mixing(WHOLE), WHOLE))


class Listed(Dataset):
    """Rows of two tensors, and a list of labels that torchvision's data sets have, too."""

    def __init__(self, inputs, labels):
        self.inputs, self.targets = inputs, labels

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, row):
        return self.inputs[row], int(self.targets[row])


def changed(base):
    def changed_row(self, row):
        inputs, label = base.__getitem__(self, row)
        return -inputs, 11 - int(label)

    changes = {"__getitem__": changed_row, "__getitems__": lambda self, rows: [self[row] for row in rows]}
    return type(f"Changed{base.__name__}", (base,), changes)


@pytest.mark.parametrize(
    "dataset",
    [
        changed(TensorDataset)(*WHOLE.tensors),
        changed(Listed)(*WHOLE.tensors),
        changed(Subset)(WHOLE, range(12)),
        Subset(changed(TensorDataset)(*WHOLE.tensors), range(12)),
        DataLoader(Subset(changed(Listed)(*WHOLE.tensors), range(12)), batch_size=5),
    ],
)
def test_rows_of_subclasses(dataset):
    train = as_client_data("3", (dataset, WHOLE)).train
    assert train.labels.tolist() == list(range(11, -1, -1))
    assert torch.equal(train.at(slice(2, 4))[0], torch.tensor([[-2.0], [-3.0]]))
    assert train.at(torch.tensor([3, 1]))[1].tolist() == [8, 10]


def test_labels_of_torchvision_datasets(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text(name)
    read = []
    folder = partial(DatasetFolder, str(tmp_path), lambda path: read.append(path) or torch.ones(2), (".txt",))
    assert as_client_data("3", (Subset(folder(), [1]), WHOLE)).train.labels.tolist() == [1]
    assert not read
    assert as_client_data("3", (folder(target_transform=lambda y: 1 - y), WHOLE)).train.labels.tolist() == [1, 0]
    assert len(read) == 2


def test_labels_of_a_hugging_face_partition(monkeypatch):
    monkeypatch.setattr(HuggingFaceLike, "__module__", "datasets.arrow_dataset")
    monkeypatch.setattr(HuggingFaceLike, "__getitems__", lambda self, rows: [{"x": 1.0, "y": 2}] * 3, raising=False)
    assert as_client_data("3", (HuggingFaceLike(), WHOLE)).train.labels.tolist() == [0, 1, 2]
    monkeypatch.setattr(HuggingFaceLike, "format", {"type": "custom"})
    assert as_client_data("3", (HuggingFaceLike(), WHOLE)).train.labels.tolist() == [2, 2, 2]


def test_a_collate_function_that_sorts():
    def falling(rows):
        return default_collate(sorted(rows, key=lambda row: -row[0]))

    def binary(rows):
        inputs, labels = falling(rows)
        return inputs, (labels % 2).float()

    train = as_client_data("3", (DataLoader(WHOLE, 4, collate_fn=falling), WHOLE)).train
    for inputs, labels in [train.at(torch.tensor([1, 7, 3])), *train.batches(5)]:
        assert labels.tolist() == inputs[:, 0].tolist() == sorted(labels.tolist(), reverse=True)
    data = as_client_data("3", (DataLoader(WHOLE, 4, collate_fn=binary), WHOLE))
    inputs, labels = data.relabelled(Task("binary").outputs.labels).train.at(slice(0, 4))
    assert labels.dtype == torch.int64
    assert torch.equal(labels, inputs[:, 0].long() % 2)


def test_a_collate_function_that_drops_rows_is_refused():
    loader = DataLoader(WHOLE, 4, collate_fn=lambda rows: default_collate(rows[1:]))
    with pytest.raises(DataError, match="train: the collate function returned 11 inputs and 11 labels for 12"):
        as_client_data("3", (loader, WHOLE))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((WHOLE, WHOLE, WHOLE), r"must return \(train, test\), or a mapping .* it returned a tuple"),
        (
            (Rows(lambda i: {"image": 1.0, "pixel_values": 1.0, "y": 1}), WHOLE),
            "the columns image, pixel_values, y must include one for inputs",
        ),
        (({"x": INPUTS, "label": LABELS, "labels": LABELS}, WHOLE), "the columns x, label, labels must include one"),
        (([(1.0, 0), (2.0, 1)], WHOLE), r"may be two examples or inputs and labels"),
    ],
)
def test_ambiguous_forms_are_refused(value, message):
    with pytest.raises(DataError, match=message):
        as_client_data("3", value)


@pytest.mark.parametrize("form", [np.asarray, np.ndarray.tolist, torch.tensor])
def test_float64_is_kept(form):
    """A second in a time since 1970, which float32 does not tell from its neighbours."""
    times = 1.7e9 + np.arange(3.0)[:, None]
    data = as_client_data("0", {"train": (form(times), form(times)), "test": (form(times), form(times[:, 0]))})
    for part in (data.train, data.test):
        assert part.inputs.tolist() == part.labels.tolist() == times.tolist()
    rows = as_client_data("0", ([(form(row), form(row)) for row in times], (form(times), form(times)))).train
    assert rows.at(slice(None))[0].tolist() == rows.labels.tolist() == times.tolist()
    assert as_public_dataset((form(times), form(times))).inputs.tolist() == times.tolist()


@pytest.mark.parametrize("empty", [([], []), (np.empty((0, 4)), np.empty(0)), {"image": [], "label": []}])
def test_empty_parts(empty):
    assert len(as_client_data("0", {"train": (INPUTS, LABELS), "test": empty}).test) == 0
