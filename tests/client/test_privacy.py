"""Differentially private training at a node (`dp-noise`)."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from flwr.clientapp import ClientApp
from torch import nn

from fedhet.client.app import make_client_app
from fedhet.client.policy import Policy
from fedhet.client.secret import DELTA, NodeSecret, epsilon_of
from fedhet.config import configuration
from fedhet.data import Examples
from fedhet.engines.running import run_locally
from fedhet.errors import ConfigError, ModelError, Refused
from fedhet.flower.messages import decode_arrays
from fedhet.messages import Payload, Request, to_arrays
from fedhet.results.history import read_clients, read_history
from fedhet.tasks import Task
from fedhet.training import Optimisation, Phase, Privacy, Term, train
from tests.robustness.reading import Victim, correlation, linear, nearest
from tests.robustness.unmixing import unmixed

pytestmark = pytest.mark.usefixtures("home", "in_a_run")
pytest.importorskip("dp_accounting")

NODE = {"dp-noise": 1.0, "dp-clip": 1.0}


def privacy(noise: float, clip: float) -> Privacy:
    return Privacy(noise, clip, lambda rate, steps: 0.0, torch.Generator().manual_seed(0))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4)).double()


def test_gradients_of_examples_are_clipped() -> None:
    model, inputs, labels = convolution(), torch.randn(70, 1, 8, 8).double(), torch.randint(4, (70,))
    expected = [torch.zeros_like(each) for each in model.parameters()]
    for number in range(70):
        one = slice(number, number + 1)
        gradients = torch.autograd.grad(F.cross_entropy(model(inputs[one]), labels[one]), list(model.parameters()))
        norm = torch.cat([each.flatten() for each in gradients]).norm()
        for total, each in zip(expected, gradients, strict=True):
            total += each * min(1.0, 0.8 / float(norm)) / 64
    loss = privacy(0.0, 0.8).backward(model, F.cross_entropy, inputs, labels, 64)
    for parameter, total in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, total)
    torch.testing.assert_close(loss, F.cross_entropy(model(inputs), labels).detach())


def test_noise_is_added_even_without_examples() -> None:
    model = nn.Linear(200, 200)
    privacy(2.0, 0.5).backward(model, F.cross_entropy, torch.zeros(0, 200), torch.zeros(0).long(), 10)
    assert model.weight.grad.std() == pytest.approx(2.0 * 0.5 / 10, rel=0.05)


def test_batches_are_poisson_samples() -> None:
    rows = torch.cat(list(privacy(1.0, 1.0).rows(50, 10, 4000)))
    assert torch.bincount(rows, minlength=50).double() / 4000 == pytest.approx(0.2, abs=0.03)


def test_epsilon_grows_over_all_runs_until_the_budget_is_spent(tmp_path) -> None:
    one = epsilon_of([(1.0, 0.25, 4)])
    assert 0 < one < epsilon_of([(1.0, 0.25, 8)])
    assert epsilon_of([(1.0, 1.0, 1)]) == pytest.approx(math.sqrt(2 * math.log(1 / DELTA)) + 0.5, rel=0.15)
    settings = {"method": "fedavg", "batch-size": 10}
    sent = Payload({"model": to_arrays(linear().state_dict())})
    for run, refused in (("one", 0), ("two", 0), ("three", 1)):
        budget = epsilon_of([(1.0, 0.25, 8)])
        victim = Victim(0, tmp_path, settings, network=linear, **NODE, **{"dp-epsilon": budget})
        reply = victim.ask("train", sent, Request(round=1, epochs=1, run=run))
        assert len(victim.refusals) == refused
        assert reply is None or "train-loss" not in reply["metrics"]
    assert "privacy budget is spent" in victim.refusals[0]
    assert json.loads((tmp_path / "nodes" / "0.json").read_text())["spent"] == [[1.0, 0.25, 4]] * 2


def test_nodes_with_one_state_dir_have_one_budget_also_after_a_move(tmp_path) -> None:
    budget = epsilon_of([(1.0, 0.25, 8)])
    one, other = (NodeSecret(tmp_path / "state", "0", "digits") for _ in range(2))
    one.spend(1.0, 0.25, 4, budget)
    other.spend(1.0, 0.25, 4, budget)
    (tmp_path / "state").rename(tmp_path / "moved")
    for node in (NodeSecret(tmp_path / "moved", "0", "digits"), NodeSecret(tmp_path / "moved", "0", "other data")):
        with pytest.raises(Refused, match="privacy budget is spent"):
            node.spend(1.0, 0.25, 1, budget)


class Private(ClientApp):
    """fedhet's app at nodes with differential privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.app = make_client_app()

    def __call__(self, message, context):
        context.node_config.update(NODE)
        return self.app(message, context)


def test_epsilon_is_in_the_results(tmp_path) -> None:
    settings = {"method": "fedprox", "architectures": "mlp", "clients": 2, "rounds": 2, "workers": 1, "seed": 1}
    run_locally(configuration.resolve(settings), tmp_path / "run", app=Private())
    told = [row.epsilon for row in read_clients(tmp_path / "run") if row.client == "0" and row.epsilon]
    assert told == sorted(told)
    assert len(told) == 2
    assert {row["train_loss"] for row in read_history(tmp_path / "run")} == {None}


def test_a_repeated_message_draws_new_noise(tmp_path) -> None:
    victim = Victim(0, tmp_path, {"method": "fedavg"}, network=linear, **NODE)
    sent = Payload({"model": to_arrays(linear().state_dict())})
    replies = [victim.ask("train", sent, Request(round=1, epochs=1)) for _ in range(2)]
    one, two = (torch.tensor(decode_arrays(reply["model"])["1.weight"]) for reply in replies)
    assert (one - two).abs().min() > 0


def batch_norm(client=None):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


@pytest.mark.parametrize(
    ("method", "network", "words"),
    [
        ("fedproto", linear, "fedproto also sends means or numbers of the client's examples"),
        ("fd", linear, "fd also sends means or numbers"),
        ("nearest-neighbour", linear, "does not train by fedhet's training loop"),
        ("fedavg", batch_norm, "2 (BatchNorm1d) normalises over the examples of a batch: use GroupNorm"),
    ],
)
def test_what_cannot_be_private_is_refused(method, network, words, tmp_path) -> None:
    victim = Victim(0, tmp_path, {"method": method}, network=network, **NODE)
    assert victim.ask("train", Payload(), Request(round=1, epochs=1)) is None
    assert words in victim.refusals[0]


def test_loss_terms_must_not_read_examples(tmp_path, caplog) -> None:
    victim = Victim(0, tmp_path, {"method": "fml"}, network=linear, **NODE)
    assert victim.ask("train", Payload(), Request(round=1, epochs=1)) is None
    assert "a loss term that reads the client's examples" in caplog.text
    other = Victim(0, tmp_path, {"method": "fedprox"}, network=linear, **NODE)
    sent = Payload({"model": to_arrays(linear().state_dict())})
    assert other.ask("train", sent, Request(round=1, epochs=1)) is not None, other.refusals


def test_loss_terms_on_public_examples_are_served() -> None:
    model, examples = linear(), Examples(torch.zeros(20, 1, 8, 8), torch.zeros(20).long())
    drawn = Term(lambda step, x: step.parameters["1.bias"].sum() * x, draw=lambda *_: {"x": 5.0}, public=True)
    phase = Phase(1, Optimisation(learning_rate=1.0, batch_size=10), terms=(drawn,), task_weight=0.0)
    before = model[1].bias.detach().clone()
    options = {"generator": torch.Generator(), "privacy": privacy(0.0, 1.0)}
    train(model, phase, examples, Task("classification"), lambda inputs, _: inputs, **options)
    torch.testing.assert_close(model[1].bias, before - 2 * 5.0)


@pytest.mark.parametrize("node", [{"dp-noise": 1.0}, {"dp-clip": 1.0}, {"dp-epsilon": 3.0}, {"dp-noise": "much"}])
def test_incomplete_settings_are_refused(node) -> None:
    with pytest.raises(ConfigError, match="dp-noise"):
        Policy.of(node, deployed=True)


def test_rounds_reveal_no_image_beyond_the_mean(tmp_path) -> None:
    """The attack by differences between rounds, which reads every image of an ordinary node."""
    read, images, _ = unmixed(0, tmp_path, "weights", 60, **NODE)
    mean = images.mean(0)
    assert nearest(read, images).mean() < sum(correlation(mean, image) for image in images) / len(images)


def test_user_functions_that_torch_cannot_vectorise_are_named() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs):
            return self.layer(inputs if inputs.sum() > 0 else -inputs)

    with pytest.raises(
        ModelError, match="gradient of each example, and torch.func cannot compute it for this Branching"
    ):
        privacy(1.0, 1.0).backward(Branching(), F.cross_entropy, torch.randn(4, 3), torch.zeros(4).long(), 4)
