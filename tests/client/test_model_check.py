"""A user's own models and data that cannot be used: one sentence each, which says what it is and whose it was."""

import math
import re
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.models.inception import InceptionOutputs

import fedhet
from fedhet.client.app import make_client_app
from fedhet.data import ClientData, Examples, PublicDataset
from fedhet.data.own import as_client_data, as_public_dataset
from fedhet.errors import DataError, FedhetError
from fedhet.flower.grid import LocalGrid

pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.filterwarnings("ignore:`torch.jit")]

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS[:, :3].argmax(1)
PARTS = ("train", "test", "public", "common", "validation")


def data(client: Any) -> Any:
    return (INPUTS, LABELS), (INPUTS, LABELS)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def refused(new_watch: Any) -> Callable[..., str]:
    """Runs one client's model and data, which must be refused; gives the sentence."""

    def refused(model: Any = model, data: Any = data, name: str = "FedAvg", **settings: Any) -> str:
        strategy = getattr(fedhet, name)(**{"rounds": 1, "learning_rate": 0.01, "observers": [new_watch()], **settings})
        with pytest.raises(FedhetError) as caught:
            strategy.start(LocalGrid(make_client_app(model, data), 1))
        assert "Traceback" not in str(caught.value)
        return str(caught.value)

    return refused


def test_every_remark_of_a_client_reaches_the_server_whole(new_watch: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Counter(nn.Sequential):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += self.training
            return super().forward(inputs)

    names = [*"abcd"]
    part, other = ((pandas.DataFrame(INPUTS, columns=order), LABELS) for order in (names, names[::-1]))
    strategy = fedhet.FedAvg(rounds=1, learning_rate=0.01, observers=[new_watch()])
    app = make_client_app(lambda: Counter(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), lambda: (part, other))
    strategy.start(LocalGrid(app, 1))
    assert f"({', '.join(names[::-1])}) are aligned by name: {', '.join(names)}" in caplog.text
    assert "register them in __init__ as buffers, self.register_buffer('step', torch.zeros(()))" in caplog.text


def test_labels_beyond_the_outputs_are_told_with_the_classes_names(refused: Any) -> None:
    """A category without examples is a class, too."""
    texts = pandas.Categorical(["gull", "tern"] * (len(INPUTS) // 2), categories=["auk", "gull", "tern"])
    part = INPUTS[: len(texts)], texts
    message = refused(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), lambda: (part, part))
    assert "its labels go from 1 to 2" in message
    assert "(its classes, with or without examples, are auk, gull, tern)" in message


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            LABELS[:, None].repeat(1, 3) + 2,
            "its labels are whole numbers of shape (n, 3), each with an output",
        ),
        (10 * LABELS - 9, "its labels go from -9 to 11, but its network has 3 outputs"),
    ],
)
def test_whole_numbers_to_predict_are_told_from_classes(refused: Any, labels: Tensor, message: str) -> None:
    told = refused(data=lambda: ((INPUTS, labels), (INPUTS, labels)))
    assert message in told
    assert "set task = regression to predict" in told


def test_one_hot_labels_of_pixels_are_told_from_classes() -> None:
    labels = nn.functional.one_hot(torch.arange(4).view(1, 2, 2) % 2, 2).permute(0, 3, 1, 2)
    message = fedhet.Task("segmentation").problem(torch.zeros(1, 2, 2, 2), labels)
    assert (
        message == "its labels are 0 or 1 for each output (of shape (n, 2, 2, 2)): give class numbers, labels.argmax(1)"
    )


@pytest.mark.parametrize("convert", [lambda inputs: (10 * inputs).long(), lambda inputs: inputs > 0])
def test_inputs_without_floats_are_refused_if_the_network_needs_floats(refused: Any, convert: Any) -> None:
    part = convert(INPUTS), LABELS
    assert "give it floats, such as inputs.float() or table.astype(float)" in refused(data=lambda: (part, part))


@pytest.mark.parametrize(("scale", "told"), [(1, True), (255, False)])
def test_images_with_the_values_of_bytes_are_pointed_out(new_watch: Any, scale: int, told: bool) -> None:
    images = torch.randint(256, (40, 1, 2, 2), generator=torch.Generator().manual_seed(0)) / scale
    watch = new_watch()
    strategy = fedhet.FedAvg(rounds=1, learning_rate=1e-6, observers=[watch])
    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3))  # noqa: E731
    strategy.start(LocalGrid(make_client_app(network, lambda: ((images, LABELS), (images, LABELS))), 1))
    assert any("images are floats up to 255" in line for line in strategy.run.told) is told


def remarks(
    new_watch: Any, *, network: Any = model, method: Any = fedhet.FedAvg, validation: float = 0.0, **options: Any
) -> str:
    """Return the warnings of two clients' run."""
    keys = {"validation": validation} if validation else {}
    strategy = method(rounds=1, learning_rate=1e-6, observers=[new_watch()], **keys)
    strategy.start(LocalGrid(make_client_app(network, **options), 2))
    return " ".join(strategy.run.told)


def halves(client: Any) -> Any:
    mine = slice(client.partition_id, None, 2)
    return (INPUTS[mine][:10], LABELS[mine][:10]), (INPUTS[mine][10:], LABELS[mine][10:])


def test_examples_that_are_used_twice_are_named(new_watch: Any) -> None:
    assert remarks(new_watch, data=halves) == ""
    alike = lambda: ((INPUTS[:20], LABELS[:20]), (INPUTS[20:], LABELS[20:]))  # noqa: E731
    assert "its training examples are those of client 0" in remarks(new_watch, data=alike)
    leaking = lambda client: (halves(client)[0], tuple(part.flip(0)[:6] for part in halves(client)[0]))  # noqa: E731
    assert "6 of 6 test examples have inputs and label of training examples" in remarks(new_watch, data=leaking)
    relabelled = lambda client: (halves(client)[0], (halves(client)[0][0], (halves(client)[0][1] + 1) % 3))  # noqa: E731
    assert remarks(new_watch, data=relabelled) == ""


class TwoHeads(nn.Module):
    """A network that in training mode returns another head's outputs, or leaves out a layer at random."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body, self.head, self.other = kind, nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kind == "dropped" and self.training and torch.rand(()) < 0.94:  # a layer at random
            return self.head(inputs)
        outputs = (self.other if self.kind == "other" and self.training else self.head)(self.body(inputs))
        return outputs + self.other(inputs) if self.kind == "both" and self.training else outputs


@pytest.mark.parametrize(("kind", "told"), [("other", True), ("dropped", False), ("both", False)])
def test_layers_that_only_evaluations_use_are_named(new_watch: Any, kind: str, told: bool) -> None:
    warnings = remarks(new_watch, network=lambda: TwoHeads(kind), data=halves)
    assert ("outputs of the client's TwoHeads do not depend on head, as they do in evaluation" in warnings) is told
    assert ("do not depend on" in warnings) is told


def test_validation_examples_that_are_not_used_are_named(new_watch: Any) -> None:
    def parts(client: Any) -> dict[str, Any]:
        train, test = halves(client)
        return {"train": train, "test": test, "validation": test}

    assert "its validation examples are unused: set validation to a fraction" in remarks(new_watch, data=parts)
    assert remarks(new_watch, data=parts, validation=0.2) == ""


def test_repeated_examples_are_compared_in_full_precision(new_watch: Any) -> None:
    network = lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()  # noqa: E731
    large = lambda client: tuple((1e4 + 1e-5 * inputs.double(), labels) for inputs, labels in halves(client))  # noqa: E731
    assert "examples have inputs and label of" not in remarks(new_watch, network=network, data=large)


@pytest.mark.parametrize(
    "change",
    [lambda inputs: nn.functional.dropout(inputs, 0.5), lambda inputs: inputs - inputs.mean(0)],
    ids=["chance", "batch"],
)
def test_outputs_that_depend_on_chance_or_the_batch_are_named(new_watch: Any, change: Any) -> None:
    class Network(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(change(inputs))

    told = remarks(new_watch, network=lambda: Network(4, 3), data=halves)
    assert "outputs of the client's Network depend on chance or on the other examples of a batch" in told


class Mean(nn.Module):
    """The mean of a text's embedded tokens, with or without its padding."""

    def __init__(self, *, masks: bool) -> None:
        super().__init__()
        self.masks = masks
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embedding(ids)
        kept = ids > 0 if self.masks else torch.ones_like(ids)
        mean = (embedded * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)
        return self.head(mean)


def texts() -> tuple[Any, Any]:
    """Texts of unlike lengths, whose batches are padded with zeros."""

    def padded(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        inputs, labels = zip(*rows, strict=True)
        return nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.tensor(labels)

    rows = [(torch.arange(1, 2 + (5 * row) % 8), row % 3) for row in range(20)]
    return tuple(DataLoader(part, batch_size=4, collate_fn=padded) for part in (rows[:10], rows[10:]))


def test_outputs_that_depend_on_padding_are_named(new_watch: Any) -> None:
    assert remarks(new_watch, network=lambda: Mean(masks=True), data=texts) == ""
    told = remarks(new_watch, network=lambda: Mean(masks=False), data=texts)
    assert "outputs of the client's Mean depend on the padding that the collate_fn adds" in told


@pytest.mark.parametrize("value", [-100, 0])
def test_labels_of_padding_that_count_are_named(new_watch: Any, value: int) -> None:
    def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        return pad(rows), pad([row % 3 for row in rows], padding_value=value)

    rows = [torch.arange(1, 2 + (5 * row) % 8) for row in range(20)]
    loaders = [DataLoader(part, batch_size=4, collate_fn=padded) for part in (rows[:10], rows[10:])]
    told = remarks(new_watch, network=lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), data=lambda: loaders)
    assert ("labels of padding count in loss and metrics: " in told) is (value == 0)


class Tokens(nn.Module):
    """A network of tokens, with or without a mask."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4, padding_idx=padding), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.embedding(input_ids))


@pytest.mark.parametrize("value", [-100, 0])
@pytest.mark.parametrize("masked", ["mask", "mask to add", ""])
def test_labels_of_tensors_padding_that_count_are_named(new_watch: Any, masked: str, value: int) -> None:
    """Where the mask or, without one, the embedding says what padding is."""
    tokens = torch.arange(120).view(20, 6) % 8 + 1
    mask = (torch.arange(6) < 3 + torch.arange(20)[:, None] % 4).long()
    given = mask if masked == "mask" else -1e4 * (1 - mask)
    inputs = {"input_ids": tokens * mask, "attention_mask": given} if masked else tokens * mask
    labels = torch.where(mask > 0, tokens % 3, value)
    parts = {"train": slice(10), "test": slice(10, 20)}

    def rows(part: slice) -> Any:
        return {name: each[part] for name, each in inputs.items()} if isinstance(inputs, dict) else inputs[part]

    data = {name: (rows(part), labels[part]) for name, part in parts.items()}
    told = remarks(new_watch, network=lambda: Tokens(None if masked else 0), data=lambda: data)
    assert ("labels of padding count in loss and metrics: " in told) is (value == 0)


class Configured(Mean):
    """A network whose config names the token that pads."""

    config = SimpleNamespace(pad_token_id=0)


@pytest.mark.parametrize("method", [fedhet.FML, fedhet.FedKD, fedhet.FedMRL, fedhet.FLHADistillation])
def test_padding_that_a_methods_own_network_reads_is_named(new_watch: Any, method: Any) -> None:
    told = remarks(new_watch, network=lambda: Mean(masks=True), data=texts, method=method)
    assert "adds reads the padding of the collate_fn: return an attention_mask, or name the token" in told
    assert remarks(new_watch, network=lambda: Configured(masks=True), data=texts, method=method) == ""


@pytest.mark.parametrize(
    ("shape", "remedy"), [((40, 6, 6, 3), "inputs.permute(0, 3, 1, 2)"), ((40, 6, 6), "inputs[:, None]")]
)
def test_images_with_their_channels_elsewhere(refused: Any, shape: tuple[int, ...], remedy: str) -> None:
    def convolution() -> nn.Module:
        first = nn.Conv2d(1 if len(shape) == 3 else 3, 4, 3)
        return nn.Sequential(first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    part = torch.rand(shape, generator=torch.Generator().manual_seed(0)), LABELS
    assert f"give images as (n, channels, height, width), such as {remedy}" in refused(
        convolution, lambda: (part, part)
    )


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        (torch.rand(40, 9, 2), "two axes look swapped: give inputs.permute(0, 2, 1)"),
        (torch.rand(40, 2, 9, dtype=torch.complex64), "give real numbers, such as inputs.abs()"),
    ],
)
def test_windows_with_swapped_axes_and_complex_numbers(refused: Any, part: torch.Tensor, remedy: str) -> None:
    def convolution() -> nn.Module:
        return nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3))

    assert remedy in refused(convolution, lambda: ((part, LABELS), (part, LABELS)))


def test_augmented_inputs_are_checked_and_the_users_data_stay(new_watch: Any, refused: Any) -> None:
    before = INPUTS.clone()

    def augmented(augment: Any) -> Any:
        return lambda client: dict(zip(("train", "test"), halves(client), strict=True)) | {"augment": augment}

    remarks(new_watch, data=augmented(lambda inputs: inputs.mul_(0)))
    assert torch.equal(INPUTS, before)
    assert "cannot process augmented training inputs" in refused(data=augmented(lambda inputs: inputs[:, :3]))


# ---- numbers that are not finite


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_inputs_not_finite(part: str, value: float) -> None:
    inputs = INPUTS.clone()
    inputs[17, 2] = value
    parts = dict.fromkeys(PARTS, (INPUTS, LABELS)) | {part: (inputs, LABELS)}
    with pytest.raises(DataError, match=rf"client 3: {part}: the inputs of row 17 contain {value}"):
        as_client_data("3", parts)
    with pytest.raises(DataError, match=rf"client 3: {part}: the inputs of row 17 contain {value}"):
        as_client_data("3", as_client_data_unchecked(parts))


def as_client_data_unchecked(parts: dict[str, Any]) -> ClientData:
    made: dict[str, Any] = {name: Examples(*pair) for name, pair in parts.items() if name != "public"}
    return ClientData(**made, public=PublicDataset(*parts["public"]))


def test_targets_not_finite() -> None:
    targets = torch.ones(40)
    targets[3] = math.nan
    with pytest.raises(DataError, match="client 3: train: the labels of row 3 contain nan"):
        as_client_data("3", ((INPUTS, targets), (INPUTS, LABELS)))
    inputs = INPUTS.clone()
    inputs[5] = math.inf
    with pytest.raises(DataError, match="the public dataset: the inputs of row 5 contain inf"):
        as_public_dataset(inputs)


class Rows(torch.utils.data.Dataset[Any]):
    """Rows that are read when they are needed, the 30th of them with a hole."""

    targets = LABELS

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return INPUTS[row] / (row != 30), int(LABELS[row])


def partly_hollow() -> nn.Module:
    class Somewhere(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            elsewhere = (inputs != INPUTS[20].to(inputs.device)).any(1, keepdim=True)
            return super().forward(inputs).where(elsewhere, math.nan)

    return Somewhere(4, 3)


def test_untrained_network_returns_nan(refused: Any) -> None:
    text = refused(changed(lambda scores: (scores - 1e6).log()))
    assert "the loss of the received model is nan: the network returns values that are not finite" in text


def test_nan_for_some_rows(refused: Any) -> None:
    assert "the network returns values that are not finite for some example" in refused(partly_hollow)
    rest = torch.arange(40) != 20
    text = refused(partly_hollow, lambda client: ((INPUTS, LABELS), (INPUTS[rest], LABELS[rest])), batch_size=40)
    assert "the loss of the first step is nan, before training has changed a weight" in text


# ---- networks


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 3))


def scripted() -> nn.Module:
    return torch.jit.script(model())


def frozen() -> nn.Module:
    return model().requires_grad_(False)


def changed(change: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    """Return a model function of a linear network whose outputs are changed."""

    class Changed(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return change(super().forward(inputs))

    return lambda: Changed(4, 3)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lazy, "the model function returned a Sequential whose 0.weight has no values yet"),
        (scripted, "whose modules TorchScript hides"),
        (frozen, "the model function returned a Sequential without a parameter that requires gradients"),
        (changed(Tensor.mean), "the client's Changed returned outputs of shape () for 8 examples"),
        (changed(lambda rows: rows.sum(0, keepdim=True)), "the client's Changed returned outputs of shape (1, 3) for"),
        (changed(sys.exit), "Changed cannot process training inputs, float32 of shape (8, 4): SystemExit: "),
        (lambda client: "net", "the model function returned a str, not an nn.Module"),
    ],
)
def test_untrainable_networks(refused: Any, function: Any, sentence: str) -> None:
    text = refused(function)
    assert sentence in text
    assert f"(model = {function.__module__}.{function.__qualname__})" in text
    assert text.count("client 0") == 1


def test_changing_networks(refused: Any) -> None:
    widths = iter(range(5, 50))

    def changing(client: Any) -> nn.Module:
        width = next(widths)
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))

    text = refused(changing)
    assert "the client's Sequential has other layers when it is built again" in text
    assert "changing)" in text


def test_system_exit_in_user_code(new_watch: Any) -> None:
    class Leaving(Rows):
        def __getitem__(self, row: int) -> Any:
            raise SystemExit("no disk")

    with pytest.raises(FedhetError, match="SystemExit: no disk"):
        fedhet.Local(rounds=1).start(LocalGrid(make_client_app(model, lambda client: (Leaving(), Leaving())), 1))

    def ends(client: Any) -> Any:
        raise SystemExit("no disk")

    with pytest.raises(FedhetError, match=r"SystemExit: no disk \(test_model_check.py, line \d+\) \(data = .*ends\)"):
        fedhet.Local(rounds=1).start(LocalGrid(make_client_app(model, ends), 1))


class Auxiliary(nn.Module):
    """A network with an auxiliary head, whose outputs it returns in training mode in the given form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any] | None) -> None:
        super().__init__()
        self.form, self.auxiliary, self.head = form, nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.head(inputs)
        return self.form(outputs, self.auxiliary(inputs)) if self.form and self.training else outputs


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (InceptionOutputs, "Auxiliary returns auxiliary outputs in training mode, which fedhet does not train: build"),
        (lambda *outputs: {"logits": outputs[0], "aux": outputs[1]}, "returns auxiliary outputs in training mode"),
        (lambda *outputs: SimpleNamespace(logits=outputs[0], aux=outputs[1]), "auxiliary outputs in training mode"),
        (lambda *outputs: outputs, "Auxiliary returned a tuple in training mode: a network must return a tensor"),
        (
            lambda *outputs: torch.stack(outputs, 1),
            r"shape \[8, 2, 3\] in training mode, but \[8, 3\] in eval",
        ),
        (
            lambda *outputs: type("Output", (), {"logits": torch.cat(outputs, 1)})(),
            r"shape \[8, 6\] in training mode, but \[8, 3\] in eval",
        ),
    ],
)
def test_other_outputs_in_training_mode(refused: Any, form: Any, sentence: str) -> None:
    said = refused(lambda client: Auxiliary(form))
    assert re.search(sentence, said), said
    assert "no client can take part" in said


def test_without_auxiliary_outputs(new_watch: Any) -> None:
    watch = new_watch()
    strategy = fedhet.FedAvg(rounds=1, learning_rate=0.01, observers=[watch])
    strategy.start(LocalGrid(make_client_app(lambda client: Auxiliary(None), data), 1))
    assert watch.rows[0]["failures"] == []
