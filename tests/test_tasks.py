"""Tasks of a user's data, run by `fedhet.run` and `fedhet.compare` with tiny models and data."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedhet
from fedhet.client.app import make_client_app
from fedhet.client.policy import Policy
from fedhet.errors import ConfigError, FedhetError
from fedhet.utils.statistics import Metric
from tests.small import SMALL

pytestmark = pytest.mark.usefixtures("home", "no_report")

QUICK = {
    "clients": 3,
    "rounds": 3,
    "local-epochs": 4,
    "closing-epochs": 0,
    "fraction-train": 1.0,
    "learning-rate": 0.05,
    "optimizer": "adam",
    "batch-size": 8,
}
KERNEL = {"fedhenn.target": "kernel", "fedhenn.eta0": 0.1}
OF_METHOD = {
    "depthfl": SMALL["depthfl"],
    "fedmd": {"fedmd.public-epochs": 4, "fedmd.private-epochs": 4},
    "flha-ghn": {"flha-ghn.head": "tiled"},
    "heterofl": {"heterofl.widths": "1,0.5"},
    "fedrolex": {"fedrolex.widths": "1,0.5"},
    "fjord": {"fjord.widths": "1,0.5"},
    "fml": {"fml.shared-model": "mlp-20"},
}
CLASSICAL = ("logistic-regression", "label-spreading")
DEEP = ("heterofl", "fedrolex", "fjord", "depthfl", "inclusivefl", "fml")
"""Methods whose networks have several hidden layers, the same for all clients."""


def drawn(client, *shape):
    return torch.randn(60, *shape, generator=torch.Generator().manual_seed(client.partition_id))


def parts(inputs, labels):
    """40 examples to train on, 20 to test on, and a public dataset that all have."""
    public = torch.randn(24, *inputs.shape[1:], generator=torch.Generator().manual_seed(99))
    return {"train": (inputs[:40], labels[:40]), "test": (inputs[40:], labels[40:])}, public


def with_public(label):
    """A data function with these labels of inputs (n, 4)."""

    def data(client):
        inputs = drawn(client, 4)
        own, public = parts(inputs, label(inputs))
        return own | {"public": (public, label(public))}

    return data


def network(outputs):
    """Networks whose widths differ, but for those of clients 0 and 2."""

    def model(client):
        width = 8 + 4 * (client.partition_id % 2) * (client.config.method_name != "fedavg")
        width = 8 if client.config.method_name in ("fedproto", "fedrep") else width
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, outputs))

    return model


@pytest.fixture
def run(tmp_path):
    """Runs a method, and returns the summary."""

    def run(method, model, data, out="run", settings=None, **further):
        common = {"clients": 3} if method in CLASSICAL else QUICK
        config = {"method": method, **common, **OF_METHOD.get(method, {}), **(settings or {})}
        return fedhet.run(config, model=model, data=data, out=tmp_path / out, **further).summary

    return run


def personal(summary):
    return summary[f"personal_{summary['metric']}"]["weighted"]


def refusal(run, *args, **further):
    with pytest.raises(FedhetError) as caught:
        run(*args, **further)
    return str(caught.value)


def yes(inputs):
    return (inputs[:, 0] + inputs[:, 1] > 0).long()


def several(inputs):
    return (inputs[:, :3] > 0).long()


def targets(inputs):
    return torch.stack([inputs[:, :2].sum(1), inputs[:, 2] - inputs[:, 3]], 1)


def blobs(client):
    """Images of which the bright columns are class 1."""
    number = client.partition_id
    images = torch.rand(30, 1, 6, 6, generator=torch.Generator().manual_seed(number)) * 0.4
    masks = torch.zeros(30, 6, 6, dtype=torch.uint8)
    for row in range(30):
        masks[row, :, : 1 + (row + number) % 4] = 1
    images += 0.6 * masks[:, None]
    public = torch.rand(20, 1, 6, 6, generator=torch.Generator().manual_seed(99))
    return {"train": (images[:20], masks[:20]), "test": (images[20:], masks[20:]), "public": public}


def convolutional(classes):
    def model(client):
        width = 4 + 2 * client.partition_id * (client.config.method_name in ("local", "fedhenn"))
        return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, classes, 1))

    return model


def tagged(client):
    """Sequences of 5 tokens out of 6; a token's class is its number modulo 3, and the last one does not count."""
    generator = torch.Generator().manual_seed(client.partition_id)
    tokens = torch.randint(6, (40, 5), generator=generator)
    labels = tokens % 3
    labels[:, -1] = -100
    public = torch.randint(6, (30, 5), generator=torch.Generator().manual_seed(99))
    return {"train": (tokens[:30], labels[:30]), "test": (tokens[30:], labels[30:]), "public": (public, public % 3)}


def tagger(client):
    width = 4 + 2 * client.partition_id * (client.config.method_name != "fedavg")
    return nn.Sequential(nn.Embedding(6, width), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3))


def deep(outputs):
    """Networks with two hidden layers, the same for all clients."""
    return lambda client: nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs)
    )


def deep_filters(client):
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(8, 2, 1))


def deep_tagger(client):
    return nn.Sequential(nn.Embedding(6, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


TASKS = {
    "one logit": (network(1), deep(1), with_public(yes), "accuracy", 0.75),
    "several labels": (network(3), deep(3), with_public(several), "auc", 0.75),
    "numbers": (network(2), deep(2), with_public(targets), "r2", 0.3),
    "pixels": (convolutional(2), deep_filters, blobs, "iou", 0.7),
    "one channel": (convolutional(1), convolutional(1), blobs, "iou", 0.7),
    "tokens": (tagger, deep_tagger, tagged, "accuracy", 0.75),
}
"""For each task networks, deep ones, data, the metric, and a value that it reaches."""

LEARNT = {
    "one logit": ["local", "fedavg", "fedhenn", "fedmd", "fedproto", "fd", "!depthfl", "!layer-average", "!fedrolex"],
    "several labels": ["local", "fedhenn", "fedmd", "!heterofl", "!fml"],
    "numbers": ["fedavg", "fedmd", "fedhenn/kernel", "!fedrep", "!pfedhn", "!fedma", "!fedrolex"],
    "pixels": ["fjord", "fedhenn/kernel", "!local", "!fedrep", "!heterofl"],
    "one channel": ["fedavg", "!flha-ghn", "!pfedhn"],
    "tokens": ["fedhenn/kernel", "heterofl", "!fjord"],
}
"""Methods that learn a task; `!` marks slow tests, `/kernel` FedHeNN with kernel targets."""


@pytest.mark.parametrize(
    ("method", "task"),
    [
        pytest.param(method.strip("!"), task, marks=[pytest.mark.slow] if method[0] == "!" else [])
        for task, methods in LEARNT.items()
        for method in methods
    ],
)
def test_methods_learn_tasks(method, task, run):
    method, _, kernel = method.partition("/")
    settings = KERNEL if kernel else {}
    if task == "tokens":
        settings = settings | {"learning-rate": 0.02}
    model, deep_model, data, metric, least = TASKS[task]
    if hypernetwork := method in ("flha-ghn", "pfedhn"):
        settings = {"learning-rate": 0.001}
    summary = run(method, deep_model if method in DEEP else model, data, settings=settings)
    assert (summary["metric"], summary["failures"]) == (metric, 0)
    assert personal(summary) > least or hypernetwork


SCORES = "one vector of class scores"
ONE_CLASS = "needs examples with exactly one class each, but the task is"


@pytest.mark.parametrize(
    ("method", "task", "reason"),
    [
        ("fedharm", "one logit", "needs an output for each class, but the network has one output for both"),
        ("fedhenn", "pixels", f"{SCORES} .*fedhenn.target = kernel.* a segmentation are vectors for each pixel"),
        ("fedmd", "pixels", f"{SCORES} .* a segmentation are vectors for each pixel"),
        ("fedhenn", "tokens", f"{SCORES} .* a token-classification are vectors for each token"),
        ("fedhenn", "numbers", "the outputs of a regression are numbers"),
        ("fedproto", "numbers", f"{ONE_CLASS} regression"),
        ("fd", "tokens", f"{ONE_CLASS} token-classification"),
        ("logistic-regression", "several labels", f"{ONE_CLASS} multi-label"),
        ("fjord", "numbers", "fjord.distil needs class scores, but the outputs of a"),
        ("depthfl", "numbers", "which its exits exchange, but the outputs of a regression are numbers"),
        ("depthfl", "pixels", r"must return logits \(2, classes\) for 2 examples, but .* returns shape \(2, 2, 6, 6\)"),
        ("depthfl", "tokens", r"must return logits \(2, classes\) for 2 examples, but .* returns shape \(2, 5, 3\)"),
        (
            "fml",
            "pixels",
            "which the two networks exchange, but the outputs of a segmentation are vectors for each pixel",
        ),
    ],
)
def test_methods_refuse_tasks_with_the_reason(method, task, reason, run):
    model, deep_model, data, *_ = TASKS[task]
    settings = {"fedmd.public-epochs": 0} if method == "fedmd" else {}
    text = refusal(run, method, deep_model if method in DEEP else model, data, settings=settings)
    assert re.search(reason, text)


# ---- shapes of outputs and labels


@pytest.mark.parametrize("squeezed", [False, True])
def test_shapes_of_a_binary_task(squeezed, run):
    class Logit(nn.Sequential):
        def forward(self, inputs):
            return super().forward(inputs).squeeze(1) if squeezed else super().forward(inputs)

    labels = yes if squeezed else lambda inputs: yes(inputs)[:, None].float()
    summary = run("fedavg", lambda: Logit(nn.Linear(4, 1)), with_public(labels))
    assert (summary["metric"], personal(summary) > 0.8) == ("accuracy", True)


def test_ignored_labels_of_pixels(run):
    def data(client):
        supplied = blobs(client)
        images, masks = supplied["train"]
        masks = masks.long()
        masks[:, :3] = -100
        return {"train": (images, masks), "test": supplied["test"]}

    assert personal(run("fedavg", convolutional(2), data)) > 0.7

    def nothing(client):
        return {name: (images, torch.full((len(images), 6, 6), -100)) for name, (images, _) in data(client).items()}

    assert "all of its labels are -100, which is ignored" in refusal(
        run, "fedavg", convolutional(2), nothing, out="none"
    )


def test_a_depth_for_each_pixel_is_one_target(run):
    def data(client):
        supplied = blobs(client)
        return {name: (supplied[name][0], 2 * supplied[name][0][:, 0] + 1) for name in ("train", "test")}

    summary = run("fedavg", convolutional(1), data)
    assert (summary["metric"], personal(summary) > 0.8) == ("r2", True)


def test_a_node_withholds_the_iou_of_rare_classes():
    policy, metric = (
        Policy(None, 10, deployed=True),
        Metric((0.123456, 0.5, math.nan), (123456.0, 40.0, 0.0), (30, 9, 0)),
    )
    told = policy.metric(metric)
    assert told.weights == (123500.0, 0.0, 0.0)
    assert told.values[0] == 0.1235


def test_one_hot_labels_are_pointed_out(run, caplog):
    def one_of_three(inputs):
        return F.one_hot(inputs[:, :3].argmax(1), 3)

    run("fedavg", network(3), with_public(one_of_three))
    assert "each of the client's examples has exactly one of several labels" in caplog.text
    caplog.clear()
    run("fedavg", network(3), with_public(one_of_three), task="multi-label", out="named")
    assert "each of its examples" not in caplog.text


@pytest.mark.parametrize("shift", [0, 1])
def test_labels_that_copy_the_tokens_are_pointed_out(run, caplog, shift):
    """As they are for networks that shift them in their own loss, which fedhet does not use."""

    def data(client):
        tokens = torch.randint(1, 9, (30, 7), generator=torch.Generator().manual_seed(client.partition_id))
        labels = tokens.roll(-shift, 1).index_fill(1, torch.tensor([6]), -100)  # the last one is unknown
        return (tokens, labels), (tokens, labels)

    run("local", lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), data)
    assert ("labels are its inputs, token for token" in caplog.text) == (shift == 0)


def test_one_label_is_ranked_where_the_task_is_named(run):
    summary = run("fedavg", network(1), with_public(yes), task="multi-label")
    assert (summary["metric"], personal(summary) > 0.8) == ("auc", True)


def test_several_labels_need_as_many_outputs(run):
    text = refusal(run, "fedavg", network(2), with_public(several))
    assert "task = multi-label" in text
    assert "(n, 3)" in text


# ---- weights and losses of one's own


def test_class_weights_are_trained_with(run):
    module = fedhet.Task(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0])))
    plain, weighted, own = (
        run("fedavg", network(2), with_public(yes), out=f"run-{number}", settings={"rounds": 1}, task=task)
        for number, task in enumerate((None, fedhet.Task(class_weights=[1, 20]), module))
    )
    assert weighted["trained_accuracy"] == own["trained_accuracy"] != plain["trained_accuracy"]


@pytest.mark.parametrize("method", ["fedavg", "fedmd"])
def test_methods_train_with_a_loss_of_ones_own(method, run):
    called = []

    def focal(outputs, labels):
        called.append(tuple(outputs.shape))
        entropy = F.cross_entropy(outputs, labels, reduction="none")
        return ((1 - (-entropy).exp()) ** 2 * entropy).mean()

    def three(inputs):
        return inputs[:, :3].argmax(1)

    summary = run(method, network(3), with_public(three), task=fedhet.Task("classification", loss=focal))
    assert personal(summary) > 0.6
    assert {shape[1] for shape in called} == {3}


@pytest.mark.parametrize(
    ("task", "labels", "shape", "dtype"),
    [("binary", yes, (8, 1), torch.float32), ("classification", yes, (8,), torch.int64)],
)
def test_a_loss_gets_labels_as_pytorchs_own_take_them(task, labels, shape, dtype, run):
    seen = []

    def loss(outputs, supplied):
        seen.append((tuple(supplied.shape), supplied.dtype))
        return outputs.square().mean()

    run("fedavg", network(shape[-1] if len(shape) > 1 else 2), with_public(labels), task=fedhet.Task(task, loss=loss))
    assert (shape, dtype) in seen
    assert {dtype for _, dtype in seen} == {dtype}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"name": "regressive"}, "unknown task 'regressive'; did you mean 'regression'"),
        ({"class_weights": [1, -1]}, "class_weights must be a list of positive numbers"),
        ({"class_weights": [1], "loss": nn.MSELoss()}, "a loss of your own has its own weights"),
        ({"name": "regression", "class_weights": [1]}, "a regression has no classes"),
        ({"loss": "focal"}, "loss must be a function of outputs and labels, not a str"),
    ],
)
def test_invalid_tasks(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        fedhet.Task(**settings)


def test_class_weights_match_classes(run):
    text = refusal(run, "fedavg", network(2), with_public(yes), task=fedhet.Task(class_weights=[1, 2, 3]))
    assert "class_weights has 3 weights, but its network has 2 classes" in text
    with pytest.raises(ConfigError, match="task is for your own data"):
        fedhet.run({"method": "fedavg"}, model=network(2), task="classification")
    with pytest.raises(ConfigError, match="task is for your own data"):
        make_client_app(task="classification")


# ---- apps and the page


def test_the_example_of_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    page = Path(fedhet.__file__).parent / "data" / "README.md"
    code = re.search(r"```python\n(# spots.py.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "spots.py", "exec"), {"__name__": "__main__"})
    metric, value = capsys.readouterr().out.splitlines()[-1].split()
    assert metric == "iou"
    assert 0.6 < float(value) <= 1
