"""Data in users' own forms, and public datasets."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedhet.data import ClientData, Examples, PublicDataset, with_validation
from fedhet.data.own import as_client_data, as_input, as_public_dataset
from fedhet.data.reading import as_labels
from fedhet.errors import DataError

INPUTS, LABELS = torch.arange(12.0).view(3, 4), torch.tensor([0, 1, 1])


def test_a_digest_is_of_content_type_and_shape():
    digest = PublicDataset(INPUTS).digest
    assert digest == PublicDataset(INPUTS.clone().T.contiguous().T).digest
    others = [INPUTS + 1, INPUTS.view(4, 3), INPUTS.double(), INPUTS.flip(0)]
    assert len({digest, *(PublicDataset(tensor).digest for tensor in others)}) == 5


def test_a_digest_covers_the_labels():
    labelled = PublicDataset(INPUTS, LABELS)
    assert labelled.digest == PublicDataset(INPUTS.clone(), LABELS.clone()).digest
    others = [
        PublicDataset(INPUTS),
        PublicDataset(INPUTS, LABELS.flip(0)),
        PublicDataset(INPUTS, LABELS.int()),
        PublicDataset(INPUTS, LABELS.view(3, 1)),
    ]
    assert len({labelled.digest, *(public.digest for public in others)}) == 5


def test_a_public_dataset_without_its_labels_is_the_same_object_again():
    labelled = PublicDataset(INPUTS, LABELS)
    assert labelled.unlabelled is labelled.unlabelled
    assert labelled.unlabelled.digest == PublicDataset(INPUTS).digest
    assert labelled.unlabelled.unlabelled is labelled.unlabelled
    assert len(labelled) == 3


@pytest.mark.parametrize("labels", [LABELS, None])
def test_a_public_dataset_moves_with_its_labels(labels):
    moved = PublicDataset(INPUTS, labels).to(torch.device("cpu"))
    assert moved.digest == PublicDataset(INPUTS, labels).digest


@pytest.mark.parametrize(
    "value",
    [
        (INPUTS, LABELS),
        [INPUTS, LABELS],
        (INPUTS.tolist(), LABELS.tolist()),
        Examples(INPUTS, LABELS),
        PublicDataset(INPUTS, LABELS),
    ],
)
def test_a_labelled_public_dataset_may_be_a_pair_examples_or_a_public_dataset(value):
    assert as_public_dataset(value).digest == PublicDataset(INPUTS, LABELS).digest


def test_a_public_dataset_of_inputs_may_be_a_tensor_and_none_is_none():
    assert as_public_dataset(INPUTS).digest == PublicDataset(INPUTS).digest
    assert as_public_dataset(None) is None
    public = PublicDataset(INPUTS)
    assert as_public_dataset(public) is public


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("all of them", "a public dataset must be a tensor of inputs or a pair .*, not a str"),
        ((INPUTS,), "not a tuple"),
        ((INPUTS, LABELS[:2]), "a public dataset has 3 inputs and 2 labels"),
    ],
)
def test_what_is_no_public_dataset_is_refused(value, message):
    with pytest.raises(DataError, match=message):
        as_public_dataset(value)


@pytest.mark.parametrize("form", ["mapping", "tuple", "datasets", "client data"])
def test_a_clients_data_bring_the_public_dataset_and_the_common_test_set_along(form):
    part = (INPUTS, LABELS)
    given = {
        "mapping": {"train": part, "test": part, "public": part, "common": part},
        "tuple": (part, part, part, part),
        "datasets": {"train": TensorDataset(*part), "test": part, "public": part, "common": TensorDataset(*part)},
        "client data": ClientData(Examples(*part), Examples(*part), PublicDataset(*part), Examples(*part)),
    }[form]
    data = as_client_data("3", given)
    assert data.public.digest == PublicDataset(*part).digest
    assert torch.equal(data.common.inputs, INPUTS)
    assert torch.equal(data.train.labels, LABELS)


def test_a_tensor_in_client_data_is_a_public_dataset_without_labels():
    data = as_client_data("3", ClientData(Examples(INPUTS, LABELS), Examples(INPUTS, LABELS), INPUTS))
    assert data.public.digest == PublicDataset(INPUTS).digest
    assert as_client_data("3", (Examples(INPUTS, LABELS), Examples(INPUTS, LABELS))).public is None


def test_bytes_alone_are_scaled():
    assert as_input(torch.tensor([255], dtype=torch.uint8)).tolist() == [1.0]
    assert as_input(torch.tensor([255])).tolist() == [255]


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
def test_data_in_the_forms_that_users_hold(form):
    data = as_client_data("3", (FORMS[form](), FORMS[form]()))
    assert torch.equal(data.train.labels, torch.arange(3))
    assert data.train.inputs[:].dtype == torch.uint8
    assert torch.equal(data.train.inputs[torch.tensor([2, 0])], data.test.inputs[:][[2, 0]])
    assert data.train.inputs[:].float().mean((1, 2, 3)).tolist() == [0, 40, 80]
    assert data.batch_size == {"a loader": 2, "its own collate": 1}.get(form)


def test_rows_are_read_when_they_are_needed_and_not_before():
    rows = Rows(lambda i: (torch.full((2,), float(i)), i))
    rows.targets = list(range(6))
    data = with_validation(as_client_data("3", (rows, (INPUTS, LABELS))), 0.5, 0, "3")
    assert not rows.read
    assert data.train.inputs[torch.tensor([1])].shape == (1, 2)
    assert len(rows.read) == 1
    rows.read.clear()
    assert torch.equal(torch.cat(list(data.train.inputs.split(2)))[:, 0].long(), data.train.labels)
    assert len(rows.read) == 3


def test_random_transforms_stay_random():
    data = as_client_data("3", (Rows(lambda i: (torch.rand(2), i)), (INPUTS, LABELS)))
    assert not torch.equal(data.train.inputs[:], data.train.inputs[:])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Rows(lambda i: ({"input_ids": 1, "mask": 1}, i)), r"has inputs of several tensors \(input_ids, mask\)"),
        (Rows(lambda i: {"input_ids": 1, "mask": 1, "label": i}), r"has .* one: put them together in each row"),
        (Rows(lambda i: ((torch.ones(1), torch.ones(1)), i)), r"has inputs of several tensors \(2 in a tuple\)"),
        (
            Rows(lambda i: {"height": 1, "width": 2, "label": 3}),
            "has columns height, width, label, of which",
        ),
        (Rows(lambda i: (torch.ones(i + 1), i)), r"has inputs of different shapes, \[1\] and \[2\]"),
        (Rows(lambda i: (torch.ones(1), "cat")), "has labels that are no numbers but str: number the classes from 0"),
        ((INPUTS, np.array(["a", "b", "a"])), "has labels that are no numbers but str: number the classes from 0"),
        (iter([]), "is of type list_iterator, whose rows cannot be asked for by number"),
    ],
)
def test_rows_that_cannot_be_used_are_told_in_a_sentence(part, message):
    with pytest.raises(DataError, match=f"client 3: train {message}"):
        as_client_data("3", (part, (INPUTS, LABELS))).train.inputs[:]


def test_labels_become_what_a_task_takes():
    assert as_labels(np.array([[3], [1]], np.int32)).tolist() == [3, 1]
    assert as_labels([0.5, 1.5]).shape == (2, 1)
    assert as_labels([True, False]).dtype == torch.int64
    assert as_labels(torch.tensor([[0, 1], [1, 1]])).shape == (2, 2)


def test_floats_go_to_the_model_in_its_precision():
    assert as_input(torch.ones(1).double(), torch.float32).dtype == torch.float32
    assert as_input(torch.ones(1).long(), torch.float32).dtype == torch.int64


def test_an_augmentation_of_ones_own():
    both = as_client_data("3", {"train": (INPUTS, LABELS), "test": (INPUTS, LABELS), "augment": lambda x: x + 1})
    assert both.augment(INPUTS, None).tolist() == (INPUTS + 1).tolist()
    drawn = as_client_data("3", {**dict.fromkeys(("train", "test"), (INPUTS, LABELS)), "augment": lambda x, g: (x, g)})
    assert drawn.augment(1, 2) == (1, 2)
    with pytest.raises(DataError, match="it returned 'train', 'test', 'trian'"):
        as_client_data("3", {"train": 1, "test": 1, "trian": 1})
