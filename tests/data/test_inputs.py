"""Inputs of several tensors: dicts and tuples, padded by a collate function, from the data function to the network."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import fedhet
from fedhet.algorithms.graphs import architecture_graph
from fedhet.data.examples import digest
from fedhet.data.own import as_client_data
from fedhet.errors import DataError, FedhetError
from fedhet.messages.protocol import public_dataset_in, with_public_dataset
from fedhet.methods.options import Config
from fedhet.models.representation import Representation
from fedhet.results.history import read_clients
from fedhet.setup.client_setup import ClientInfo
from fedhet.setup.user_functions import model_function
from fedhet.utils.inputs import Inputs, from_parts, parts_of

pytestmark = pytest.mark.usefixtures("home", "no_report")


def texts(count, seed, length=6):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    ids = torch.randint(3, 20, (count, length), generator=generator)
    ids[:, 0] = 1 + labels
    mask = (torch.arange(length) < torch.randint(2, length + 1, (count, 1), generator=generator)).long()
    return {"input_ids": ids * mask, "attention_mask": mask}, labels


class Bag(nn.Module):
    """The mean embedding of the tokens; it takes keywords, and returns an object with `.logits`."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, width), nn.Linear(width, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[:, :, None]
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return {"logits": self.head(mean)}


class Scored(nn.Module):
    """A head for every token, of which the last one counts, as in networks for sequences."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.score = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 2, bias=False)

    def forward(self, input_ids, attention_mask):
        last = attention_mask.sum(1) - 1
        scores = self.score(self.mix(self.embedding(input_ids)).cumsum(1))
        return scores[torch.arange(len(last)), last]


class ScoredForSequenceClassification(Scored):
    pass


def built(model):
    """A user's network, as clients have it."""
    return model_function(model)(ClientInfo("0", 0, 1, Config()))


def dicts(client):
    return {"train": texts(16, client.partition_id), "test": texts(8, 50), "public": texts(12, 99)[0]}


def tuples(client):
    def several(part):
        return tuple(part[0].values()), part[1]

    return {"train": several(texts(16, client.partition_id)), "test": several(texts(8, 50))}


def collated(client):
    def rows(count, seed):
        inputs, labels = texts(count, seed)
        lengths = inputs["attention_mask"].sum(1).tolist()
        return [
            {"input_ids": ids[:n].tolist(), "text": "unread", "idx": n, "label": int(label)}
            for ids, n, label in zip(inputs["input_ids"], lengths, labels, strict=True)
        ]

    def pad(batch):
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch])
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": torch.tensor([row["label"] for row in batch]),
        }

    loaders = (
        DataLoader(rows(*which), batch_size=4, collate_fn=pad)
        for which in ((16, client.partition_id), (8, 50), (12, 99))
    )
    return dict(zip(("train", "test", "public"), loaders, strict=True))


@pytest.mark.parametrize(
    ("data", "method"),
    [
        (dicts, "fedhenn"),
        (dicts, "fedmd"),
        (dicts, "fml"),
        (dicts, "feddf"),
        (tuples, "fedproto"),
        (tuples, "flha-ghn"),
        (collated, "fedhenn"),
        (collated, "local"),
    ],
)
def test_networks_of_several_inputs_train(tmp_path, data, method):
    settings = {"method": method, "clients": 2, "rounds": 2, "local-epochs": 2, "workers": 1}
    settings |= {"fedmd.public-epochs": 0} if method == "fedmd" else {}
    run = fedhet.run(
        settings, model=lambda client: Bag(6 + 2 * client.partition_id), data=data, out=tmp_path / "run", progress=False
    )
    assert run.summary["failures"] == 0
    assert run.history[-1]["train_loss"] is None or run.history[-1]["train_loss"] < 1


def tagged(lengths):
    """Return a loader of texts of these lengths, each token with the class of its number; a batch is padded."""
    rows = [torch.arange(n) % 7 + 1 for n in lengths]

    def pad(batch):
        classes = pad_sequence([ids % 3 for ids in batch], batch_first=True, padding_value=-100)
        return pad_sequence(batch, batch_first=True), classes

    return DataLoader(rows, batch_size=4, collate_fn=pad)


class Tagger(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.head = nn.Linear(6, classes)

    def forward(self, ids):
        return self.head(self.embedding(ids))


SHORT_FIRST = [3] * 8 + [9, 2]


def test_numbers_that_a_collate_function_pads_are_refused():
    def pad(batch):
        return pad_sequence(batch, batch_first=True), pad_sequence([ids / 3 for ids in batch], batch_first=True)

    rows = [torch.arange(3)] * 256 + [torch.arange(4)]
    loader = DataLoader(rows, batch_size=4, collate_fn=pad)
    with pytest.raises(DataError, match="the labels of the collate_fn are numbers, and their shapes differ"):
        as_client_data("3", (loader, loader))


def test_a_list_of_rows_of_unlike_tensors():
    rows = [((torch.full((3, 4, 4), float(i)), torch.full((5,), float(i))), i % 2) for i in range(6)]
    data = as_client_data("3", (rows, rows))
    assert [part.shape for part in parts_of(data.train.inputs[:]).values()] == [(6, 3, 4, 4), (6, 5)]
    assert data.train.labels.tolist() == [0, 1] * 3


@pytest.mark.parametrize("lengths", [SHORT_FIRST, [4] * 256 + SHORT_FIRST], ids=["short first", "of two lengths"])
def test_a_collate_function_pads_the_labels_of_tokens(tmp_path, lengths):
    def model():
        return Tagger()

    def data(client):
        return {"train": tagged(lengths), "test": tagged([2, 5 + client.partition_id])}

    settings = {"method": "local", "clients": 2, "rounds": 1, "workers": 1}
    run = fedhet.run(settings, model=model, data=data, out=tmp_path / "run", progress=False)
    assert run.summary["task"] == "token-classification"
    scores = {row.client: row.accuracy for row in read_clients(tmp_path / "run")}
    for client in range(2):
        network = fedhet.load_model(run, client, model=model)
        texts = [torch.arange(n) % 7 + 1 for n in (2, 5 + client)]
        right = torch.cat([network(ids[None])[0].argmax(1) == ids % 3 for ids in texts])
        assert scores[str(client)] == pytest.approx(float(right.float().mean()))
    with pytest.raises(FedhetError, match=r"its labels go from 0 to 2, but its network has 2 outputs"):
        fedhet.run(settings, model=lambda: Tagger(2), data=data, out=tmp_path / "few", progress=False)


@pytest.mark.parametrize(("data", "other"), [(dicts, tuples), (dicts, collated)])
def test_forms_of_the_same_texts_give_the_same_result(tmp_path, data, other):
    settings = {"method": "local", "clients": 2, "rounds": 1, "batch-size": 4, "workers": 1}
    losses = [
        fedhet.run(
            settings, model=lambda client: Bag(), data=each, out=tmp_path / each.__name__, progress=False
        ).history[1]["train_loss"]
        for each in (data, other)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_inputs_pass_like_one_tensor():
    inputs = as_client_data("0", (texts(5, 0), texts(5, 1))).train.inputs
    assert isinstance(inputs, Inputs)
    assert (len(inputs), inputs.shape, inputs.dtype) == (5, (5, 6), torch.int64)
    for chosen in (
        inputs[1:3],
        inputs[torch.tensor([1, 2])],
        inputs.index_select(0, torch.tensor([1, 2])),
        inputs.split(2)[0],
    ):
        assert {name: part.shape[0] for name, part in parts_of(chosen).items()} == {
            "inputs.input_ids": 2,
            "inputs.attention_mask": 2,
        }
    assert torch.cat([inputs, inputs]).parts["attention_mask"].shape == (10, 6)
    for same in (
        copy.deepcopy(inputs),
        pickle.loads(pickle.dumps(inputs)),  # noqa: S301 - its own bytes
        from_parts(parts_of(inputs)),
        inputs.clone(),
    ):
        assert digest(same) == digest(inputs) != digest(inputs[:4])
    assert digest(inputs) != digest(Inputs({**inputs.parts, "attention_mask": inputs.parts["input_ids"]}))
    public = as_client_data("0", {**dict.fromkeys(("train", "test"), texts(5, 0)), "public": texts(5, 2)}).public
    assert public_dataset_in(with_public_dataset(public)).digest == public.digest


def test_a_network_of_several_inputs_is_exported():
    inputs = as_client_data("0", (texts(5, 0), texts(5, 1))).train.inputs
    network = built(Bag)
    graph = architecture_graph(network, inputs)
    assert [node.operator for node in graph].count("input") == 2
    assert graph.unused == ()


@pytest.mark.parametrize(
    ("model", "what", "expected"),
    [
        (ScoredForSequenceClassification, "", "last"),
        (Scored, "last", "last"),
        (Scored, "mean", "mean"),
        (Scored, "mix", None),
        (Scored, "", "must be a floating tensor .*set representation = last or mean for tokens"),
        (Scored, "nowhere", "has no module 'nowhere' whose output could be the representation"),
    ],
)
def test_the_representation_of_tokens(model, what, expected):
    network = built(model).eval()
    inputs = as_client_data("0", (texts(5, 0), texts(5, 1))).train.inputs
    if what in ("nowhere", "mix") or expected not in ("last", "mean"):
        with pytest.raises(FedhetError, match=expected or "must be a floating tensor"):
            Representation(network, "", what)(inputs)
        return
    with torch.no_grad():
        values = network.mix(network.embedding(inputs.parts["input_ids"])).cumsum(1)
        mask = inputs.parts["attention_mask"]
        rows, last = torch.arange(5), mask.sum(1) - 1
        wanted = (
            values[rows, last] if expected == "last" else (values * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        )
        representation = Representation(network, "", what)
        assert torch.allclose(representation(inputs), wanted, atol=1e-6)
        with representation.capture() as captured:
            outputs = network(inputs)
        assert torch.allclose(captured(), wanted, atol=1e-6)
    if expected == "last":
        assert torch.allclose(network.score(wanted), outputs, atol=1e-6)
