"""Differentially private training at a node (`dp-noise`)."""

import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.clientapp import ClientApp
from PIL import Image
from scipy.stats import kstest
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from typer.testing import CliRunner

from fedhet.cli import app as cli
from fedhet.client.app import make_client_app
from fedhet.client.policy import Policy
from fedhet.client.secret import NodeSecret, epsilon_of
from fedhet.client_apps.families.submodels import FirstBlocks
from fedhet.config import configuration
from fedhet.data import Examples, PublicDataset
from fedhet.data.own import examples_of
from fedhet.engines.running import run_locally
from fedhet.errors import ConfigError, ModelError, Refused
from fedhet.flower.messages import decode_arrays
from fedhet.messages import Payload, Request, to_arrays
from fedhet.messages.protocol import HANDSHAKE, with_public_dataset
from fedhet.results.history import read_clients, read_history
from fedhet.tasks import Task
from fedhet.training import Optimisation, Phase, Privacy, Term, Training
from fedhet.training.training import private_loss
from fedhet.utils.files import locked
from fedhet.utils.inputs import Inputs, together
from fedhet.utils.randomness import SecretStream, seed_everything
from tests.robustness.reading import Victim, correlation, linear, nearest
from tests.robustness.unmixing import unmixed

pytestmark = pytest.mark.usefixtures("home", "in_a_run")
pytest.importorskip("dp_accounting")

NODE = {"dp-noise": 1.0, "dp-clip": 1.0}


def privacy(noise: float, clip: float) -> Privacy:
    return Privacy(noise, clip, lambda noise, rate, steps: 0.0, SecretStream(bytes(32)))


def backward(private: Privacy, model: nn.Module, inputs: Tensor, labels: Tensor, size: int) -> None:
    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    private.backward(model, loss, lambda rows: (inputs[rows], labels[rows]), torch.arange(len(inputs)), size)


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
    backward(privacy(0.0, 0.8), model, inputs, labels, 64)
    for parameter, total in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, total)


def test_noise_is_added_even_without_examples() -> None:
    model = nn.Linear(200, 200)
    backward(privacy(2.0, 0.5), model, torch.zeros(0, 200), torch.zeros(0).long(), 10)
    assert model.weight.grad.std() == pytest.approx(2.0 * 0.5 / 10, rel=0.05)


def test_batches_are_poisson_samples() -> None:
    rows = torch.cat(list(privacy(1.0, 1.0).rows(50, 10, 4000)))
    assert (torch.bincount(rows, minlength=50) / 4000).tolist() == pytest.approx([0.2] * 50, abs=0.03)


def test_noise_is_standard_normal_and_on_a_grid() -> None:
    drawn = SecretStream(bytes(32)).normal(torch.Size([100, 1000])).flatten()
    assert kstest(drawn.numpy(), "norm").pvalue > 0.01
    assert drawn.unique().numel() == len(drawn)
    noisy = privacy(3.0, 0.5)._noisy(drawn, 1.5)
    assert torch.equal(noisy * 2**19, (noisy * 2**19).round())


def test_noise_and_draws_are_not_from_a_seeded_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever knows all seeds, or breaks the generators of torch, NumPy and Python, changes nothing."""

    def drawn() -> list[list[float]]:
        private = Privacy(1.0, 1.0, lambda *_: 0.0)
        model = nn.Linear(4, 3)
        seed_everything(0)
        backward(private, model, torch.zeros(0, 4), torch.zeros(0).long(), 10)
        return [model.weight.grad.flatten().tolist(), torch.cat([*private.rows(40, 10, 5)]).tolist()]

    one, other = drawn(), drawn()
    assert one[0] != other[0]
    assert one[1] != other[1]

    def broken(*_: object, **__: object) -> None:
        raise AssertionError

    model = nn.Linear(4, 3)
    for place, names in ((torch, ("randn", "rand", "randperm", "normal")), (np.random, ("normal", "default_rng"))):
        for name in names:
            monkeypatch.setattr(place, name, broken)
    private = Privacy(1.0, 1.0, lambda *_: 0.0)
    backward(private, model, torch.zeros(0, 4), torch.zeros(0).long(), 10)
    assert len([*private.rows(40, 10, 5)]) == 5
    assert sorted(SecretStream().permutation(20).tolist()) == [*range(20)]


def test_a_client_with_few_examples_makes_steps_of_full_length() -> None:
    """Ten examples in batches of 32: each is drawn in each step, and the sum is divided by ten."""
    inputs, labels = torch.randn(10, 3).double(), torch.randint(2, (10,))
    phase = Phase(1, Optimisation(learning_rate=1.0, batch_size=32))
    models = [nn.Linear(3, 2).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, private in zip(models, (None, privacy(0.0, 1e6)), strict=True):
        options = {"generator": torch.Generator(), "privacy": private}
        Training(
            model, phase, Examples(inputs, labels), Task("classification"), lambda inputs, _: inputs, **options
        ).result()
    torch.testing.assert_close(models[1].weight, models[0].weight)


def test_an_example_that_fails_counts_as_zero() -> None:
    """That a message fails must not depend on examples: here a transform raises for one of them."""
    inputs, labels, model = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 0]), nn.Linear(3, 2).double()

    def batch(rows: Tensor) -> tuple[Tensor, Tensor]:
        if 2 in rows:
            raise ValueError("a damaged image")
        return inputs[rows], labels[rows]

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    privacy(0.0, 1.0).backward(model, loss, batch, torch.arange(5), 10)
    found = model.weight.grad.clone()
    others = torch.tensor([0, 1, 3, 4])
    backward(privacy(0.0, 1.0), model, inputs[others], labels[others], 10)
    torch.testing.assert_close(found, model.weight.grad)


@pytest.mark.parametrize(("dropout", "augments"), [(0.5, False), (0.0, True)])
def test_an_example_that_fails_changes_no_other(dropout: float, augments: bool) -> None:
    """Else random numbers of the others, as of dropout, would be drawn anew, and a sum differ by more than a clip."""
    inputs, labels = torch.randn(40, 8).double(), torch.arange(40) % 2
    updates = []
    for fails in (False, True):
        seed_everything(0)
        model = nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Dropout(dropout), nn.Linear(50, 2)).double()
        begun = nn.utils.parameters_to_vector(model.parameters()).detach()

        def prepare(rows: Tensor, generator: torch.Generator | None, fails: bool = fails) -> Tensor:
            noise = torch.randn(rows.shape, generator=generator) if augments and generator else 0
            if fails and torch.equal(rows[0], inputs[0]):
                raise ValueError("a damaged image")
            return rows + noise

        options = {"generator": torch.Generator(), "privacy": privacy(0.0, 1.0), "augments": augments}
        phase = Phase(1, Optimisation(learning_rate=1.0, batch_size=40))
        Training(model, phase, Examples(inputs, labels), Task("classification"), prepare, **options).result()
        updates.append(nn.utils.parameters_to_vector(model.parameters()).detach() - begun)
    assert 0.1 < float((updates[0] - updates[1]).norm()) * 40 <= 1.0001


def test_what_cannot_be_trained_is_not_charged() -> None:
    charged: list[int] = []

    class Branching(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs if inputs.sum() > 0 else -inputs)

    private = Privacy(1.0, 1.0, lambda noise, rate, steps: float(charged.append(steps) or 0.0))
    examples = Examples(torch.randn(20, 3), torch.zeros(20).long())
    options = {"generator": torch.Generator(), "privacy": private}
    with pytest.raises(Refused, match="torch.func cannot compute it for this Branching"):
        Training(
            Branching(3, 2), Phase(1, Optimisation()), examples, Task("classification"), lambda x, _: x, **options
        ).result()
    assert charged == []


def test_sums_by_class_are_clipped_and_noisy() -> None:
    examples = Examples(torch.tensor([[3.0, 4.0], [0.3, 0.4], [1.0, 0.0]]), torch.tensor([1, 1, 7]))
    sums, counts = privacy(0.0, 1.0).class_sums(lambda inputs: inputs, examples, 3, 10)
    torch.testing.assert_close(sums, torch.tensor([[0.0, 0.0], [0.9, 1.2], [0.0, 0.0]]).double())
    assert counts.tolist() == [0.0, 2.0, 0.0]
    charged: list[tuple[float, float, int]] = []
    private = Privacy(2.0, 0.5, lambda *charge: charged.append(charge) or 0.0)
    many = Examples(torch.zeros(40, 400), torch.zeros(40).long())
    sums, _ = private.class_sums(lambda inputs: inputs, many, 5, 10)
    assert charged == [(4.0, 1.0, 1)]
    assert float(sums.std()) == pytest.approx(math.sqrt(2) * 4.0 * 0.5, rel=0.1)


def spent(folder: Path) -> list[list[float]]:
    return json.loads((folder / "account.json").read_text())["spent"]


def test_epsilon_grows_over_all_runs_until_the_budget_is_spent(tmp_path) -> None:
    one = epsilon_of([(1.0, 0.25, 4)])
    assert 0 < one < epsilon_of([(1.0, 0.25, 8)])
    assert epsilon_of([(1.0, 1.0, 1)]) == pytest.approx(4.377, abs=0.001)  # Balle and Wang (2018), equation 6
    settings = {"method": "fedavg", "batch-size": 10}
    sent = Payload({"model": to_arrays(linear().state_dict())})
    for run, refused in (("one", 0), ("two", 0), ("three", 1)):
        budget = epsilon_of([(1.0, 0.25, 8)], 1 / 400)
        victim = Victim(0, tmp_path, settings, network=linear, **NODE, **{"dp-epsilon": budget})
        reply = victim.ask("train", sent, Request(round=1, epochs=1, run=run))
        assert len(victim.refusals) == refused
        assert reply is None or "train-loss" not in reply["metrics"]
    assert "privacy budget is spent" in victim.refusals[0]
    assert spent(tmp_path) == [[1.0, 0.25, 4]] * 2


def test_a_charge_outlasts_a_loss_of_power(tmp_path, monkeypatch) -> None:
    secret = NodeSecret(tmp_path, "north", "digits")
    steps: list[str] = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, call=call, name=name: (steps.append(name), call(*args))[1])
    secret.spend(1.0, 0.5, 1, 10.0)
    assert steps == ["fsync", "replace", "fsync"], "the content, and then its name, are on the disk"


def test_nodes_with_one_state_dir_have_one_budget_also_after_a_move(tmp_path) -> None:
    budget = epsilon_of([(1.0, 0.25, 8)])
    one, other = (NodeSecret(tmp_path / "state", "0", "digits") for _ in range(2))
    one.spend(1.0, 0.25, 4, budget)
    other.spend(1.0, 0.25, 4, budget)
    (tmp_path / "state").rename(tmp_path / "moved")
    for name, data in (("0", "digits"), ("0", "other data"), ("another name", "digits")):
        node = NodeSecret(tmp_path / "moved", name, data)
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


def test_new_examples_are_accepted_by_the_command_that_the_message_names(tmp_path) -> None:
    node = NodeSecret(tmp_path, "north", "own")
    node.keep({"training labels": "one"})
    node.spend(1.0, 0.1, 200, 20.0)
    with pytest.raises(Refused, match="fedhet node accept-data north, which keeps the privacy account") as refused:
        node.keep({"training labels": "another"})
    command = re.search(r"fedhet (node accept-data \w+)", str(refused.value))
    assert command is not None
    result = CliRunner().invoke(cli, [*command[1].split(), "--state-dir", str(tmp_path)])
    assert (result.exit_code, "the next run of north stores its examples" in result.output) == (0, True)
    again = NodeSecret(tmp_path, "north", "own")
    again.keep({"training labels": "another"})
    with pytest.raises(Refused):
        again.keep({"training labels": "one"})
    assert again.seed == node.seed
    assert again.spend(1.0, 0.1, 200, 20.0) == epsilon_of([(1.0, 0.1, 400)])
    result = CliRunner().invoke(cli, ["node", "accept-data", "south", "--state-dir", str(tmp_path)])
    assert (result.exit_code, "has no client south (there: north)" in result.output) == (2, True)


@pytest.mark.parametrize("noise", [1e-6, 1e-200])
def test_too_little_noise_is_said_to_be_too_large_an_epsilon(noise, tmp_path) -> None:
    with pytest.raises(Refused, match=r"epsilon would be \S+ at delta = 1e-05, but is limited to 1e\+06"):
        NodeSecret(tmp_path, "north", "own").spend(noise, 0.1, 1, math.inf)


def test_many_steps_need_little_memory(tmp_path) -> None:
    """A server can ask for any number. A grid of 1e-4 for the sum of so many losses has more than 1e10 points."""
    node = NodeSecret(tmp_path, "north", "own")
    with pytest.raises(Refused, match=r"epsilon would be 1e\+12 at"):
        node.spend(1.0, 1.0, 10**12, math.inf)
    assert not (tmp_path / "account.json").exists()
    # The sum of a million losses is normal, with mean 500,000 and deviation 1000, and above epsilon with about delta.
    assert 504_000 < epsilon_of([(1.0, 1.0, 10**6)]) < 504_500


@pytest.mark.parametrize(
    ("spent", "least", "most"),
    [
        ([(1.0, 0.01, 10**8)], 9_000, 20_000),  # took more than six minutes
        ([(100.0, 1.0, 10**7)], 630, 640),  # 4 GB
        ([(10.0, 0.99, 10**6)], 5_300, 5_350),  # a minute, and 6 GB
        ([(1.0, k / 400, 1) for k in range(1, 41)], 3.01, 4.2),  # a quarter of a second for each
        ([(1.0, k / 4000, 1) for k in range(1, 4001)], 500, 2000),
        ([(2.0, 1.0, 1)] * 4, 4.377, 4.378),  # as one of noise 1
    ],
)
def test_a_server_cannot_make_the_account_slow(spent, least, most) -> None:
    began = time.monotonic()
    assert least < epsilon_of(spent) < most
    assert time.monotonic() - began < 30


SIXTEEN = [(1.0, 0.01 + k / 10_000, 10) for k in range(16)]


@pytest.mark.parametrize(
    ("spent", "step", "delta"),
    [
        ([*SIXTEEN, (1.1, 0.01, 10)], (1.0, 0.0117, 1), 1e-5),
        ([*SIXTEEN, (100.0, 1.0, 1)], (1.0, 0.0117, 1), 1e-5),
        ([(50.0, 0.01, 10**6)], (50.0, 0.01, 1), 1e-12),
        (SIXTEEN, (100.0, 1.0, 1), 1e-5),
    ],
)
def test_a_step_never_lowers_epsilon(spent, step, delta) -> None:
    assert 0 < epsilon_of(spent, delta) <= epsilon_of([*spent, step], delta)


def test_delta_follows_the_number_of_examples(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    sent = Payload({"model": to_arrays(linear().state_dict())})
    for name, node, delta in (("one", {}, "0.0025"), ("two", {"dp-delta": 1e-6}, "1e-06")):
        victim = Victim(0, tmp_path / name, {"method": "fedavg"}, network=linear, **NODE, **node)
        victim.ask("train", sent, Request(round=1, epochs=1))
        assert f"at delta = {delta} over all runs of the node, for replacing one training example by" in caplog.text


def test_a_server_that_chooses_few_examples_does_not_choose_a_larger_delta(tmp_path, caplog) -> None:
    """Of the node's 288 examples; 1,440 digits are divided among five nodes."""
    caplog.set_level("INFO")
    settings = {"method": "fedavg", "dataset": "digits", "architectures": "mlp", "samples-per-client": 20}
    victim = Victim(0, tmp_path, settings, network=None, own_data=False, **NODE, **{"num-partitions": 5})
    reply = victim.ask("train", Payload(), Request(round=1, epochs=1))
    assert reply is not None
    assert reply["metrics"]["num-examples"] == 20
    assert f"at delta = {1 / 2880:.4g} over all runs" in caplog.text


@pytest.mark.parametrize(
    ("pooled", "chosen", "whole"), [(True, {"samples-per-client": 12}, 40), (False, {"validation": 0.7}, 40)]
)
def test_nor_of_examples_of_ones_own(pooled, chosen, whole, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    victim = Victim(0, tmp_path, {"method": "fedavg", "batch-size": 12, **chosen}, network=linear, **NODE)
    victim.context.node_config |= {"num-partitions": 1}
    if pooled:
        part = slice(whole)
        victim.app = make_client_app(model=linear, data=(victim.inputs[part], victim.labels[part]))
    sent = Payload({"model": to_arrays(linear().state_dict())})
    reply = victim.ask("train", sent, Request(round=1, epochs=1))
    assert reply is not None, victim.refusals
    assert reply["metrics"]["num-examples"] == 12
    assert f"at delta = {1 / (10 * whole):.4g} over all runs" in caplog.text


@pytest.mark.parametrize("largest", [1.0, 3.0])
def test_a_public_dataset_in_other_units_is_not_compared_with_private_examples(largest, tmp_path) -> None:
    """Whether it is refused would tell whether some private value is above 1."""
    victim = Victim(0, tmp_path, {"method": "fedmd"}, network=linear, **NODE)
    victim.inputs[0] = largest
    public = PublicDataset(torch.zeros(4, 64, dtype=torch.uint8), torch.arange(4))
    reply = victim.ask("query", with_public_dataset(public), Request(question=HANDSHAKE))
    assert reply is not None, victim.refusals


@pytest.mark.parametrize(
    ("task", "network", "shape"),
    [
        ("token-classification", nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)), (6,)),
        ("segmentation", nn.Conv2d(1, 4, 1), (1, 5, 5)),
    ],
)
def test_tokens_and_pixels_can_be_ignored_in_private_training(task, network, shape) -> None:
    inputs = torch.randint(20, (10, *shape))
    labels = torch.randint(4, (10, *shape[-2:]))
    labels[0] = -100
    labels[1:, ..., :2] = -100
    before = [parameter.detach().clone() for parameter in network.parameters()]

    def prepare(batch: Tensor, generator: torch.Generator | None) -> Tensor:
        return batch if task == "token-classification" else batch.float()

    options = {"generator": torch.Generator(), "privacy": privacy(0.0, 1.0)}
    phase = Phase(1, Optimisation(batch_size=10, learning_rate=1.0))
    Training(network, phase, Examples(inputs, labels), Task(task), prepare, **options).result()
    moved = [after.detach() - begun for after, begun in zip(network.parameters(), before, strict=True)]
    assert 0 < sum(float(change.square().sum()) for change in moved) ** 0.5 <= 0.9 + 1e-6, "nine have some labels"


class Centred(nn.Module):
    """A network that subtracts the batch's mean, without a layer that says so."""

    def __init__(self, client=None) -> None:
        super().__init__()
        self.network = linear()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs - inputs.mean(0))


def test_noisy_sums_are_of_each_example_by_itself() -> None:
    """A server chooses the weights, for example so that only some private examples mix."""
    network, examples = Centred(), Examples(torch.rand(3, 64), torch.arange(3))
    sums, _ = privacy(0.0, 100.0).class_sums(network, examples, 3, 2)
    torch.testing.assert_close(sums.float(), network.network[1].bias.expand(3, 10))


@pytest.mark.parametrize("damaged", [(), (3,)])
def test_buffers_do_not_count_passes(damaged) -> None:
    """Spectral normalisation changes buffers in each pass, of which an example that fails needs more."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), nn.Linear(2, 2))
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    inputs = torch.randn(20, 3)

    def prepare(rows: Tensor, _: torch.Generator | None) -> Tensor:
        if any(torch.equal(row, inputs[place]) for row in rows for place in damaged):
            raise ValueError("a damaged image")
        return rows

    examples, options = Examples(inputs, torch.arange(20) % 2), {"generator": torch.Generator()}
    phase, task = Phase(2, Optimisation(batch_size=10)), Task("classification")
    Training(model, phase, examples, task, prepare, privacy=privacy(1.0, 1.0), **options).result()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())


def test_a_repeated_message_gets_the_same_reply(tmp_path) -> None:
    """A server that was restarted asks again: the budget is not charged twice, and there is no second noise."""
    sent = Payload({"model": to_arrays(linear().state_dict())})
    replies = []
    for round, here in ((1, ""), (1, "another process"), (2, ""), (1, "")):
        victim = Victim(0, tmp_path, {"method": "fedavg"}, network=linear, **NODE)
        reply = victim.ask("train", sent, Request(round=round, epochs=1, here=here))
        replies.append(torch.tensor(decode_arrays(reply["model"])["1.weight"]))
    assert torch.equal(replies[0], replies[1])
    assert (replies[0] - replies[2]).abs().median() > 0
    assert (replies[0] - replies[3]).abs().median() > 0  # charged again, since only the last reply is kept
    assert len(spent(tmp_path)) == 3


@pytest.mark.parametrize("allow", [{}, {"allow": "posteriors,public-training"}])
def test_a_network_that_was_trained_without_noise_is_not_sent_with_noise(allow, tmp_path) -> None:
    """A run that began before the node's owner set dp-noise, or allow, has such a network at the node."""
    public = PublicDataset(torch.rand(20, 64))
    sent = Payload({"next-rows": {"rows": np.arange(20)}})
    settings = {"method": "fedmd", "fedmd.public-epochs": 0, "batch-size": 20}

    def told(round: int, run: str, epochs: int, **node) -> str:
        victim = Victim(0, tmp_path, settings, **node)
        asked = Request(round=round, expected=round - 1 or -1, run=run, public=public.digest, epochs=epochs)
        begun = Request(question=HANDSHAKE, run=run)
        _ = victim.ask("query", with_public_dataset(public), begun) and victim.ask("train", sent, asked)
        return " ".join(victim.refusals)

    assert told(1, "a", 2, **allow) == ""
    assert "but dp-noise has changed from False to True: start another run" in told(2, "a", 0, **allow, **NODE)
    assert told(1, "b", 2, **allow, **NODE) == ""
    assert told(2, "b", 0, **allow, **NODE) == ""
    assert "but dp-noise has changed from True to False" in told(3, "b", 0, **allow)
    if not allow:
        stricter = {"allow": "posteriors,public-training", **NODE}
        assert "but allow has changed from False to True" in told(3, "b", 0, **stricter)


def test_two_nodes_that_share_name_and_folder_have_noise_of_their_own(tmp_path, monkeypatch) -> None:
    """Of equal noise, the difference of both replies would be one of private examples."""
    sent = Payload({"model": to_arrays(linear().state_dict())})
    replies = []
    # Neither has stored its reply when the other one begins.
    monkeypatch.setattr(NodeSecret, "answer", lambda *_: None)
    for place in (0, 1):
        chosen = {"method": "fedavg", "dataset": "digits", "learning-rate": 1.0, "batch-size": 40}
        victim = Victim(0, tmp_path, chosen, network=linear, own_data=False, **{"dp-noise": 50.0, "dp-clip": 1.0})
        victim.context.node_config |= {"name": "north", "partition-id": place}
        reply = victim.ask("train", sent, Request(round=1, run="a", epochs=1))
        assert reply is not None, victim.refusals
        replies.append(torch.tensor(decode_arrays(reply["model"])["1.weight"]))
    noise = (replies[0] - sent.arrays["model"]["1.weight"]).norm()
    assert (replies[0] - replies[1]).norm() > noise / 2
    assert len(spent(tmp_path)) == 2


def test_noise_is_not_repeated_after_the_message_of_a_client_with_another_name(tmp_path) -> None:
    """It can have trained the state, by the name of a request (`called`), from which the repeated message starts."""
    nodes = [NodeSecret(tmp_path, name, "own") for name in ("north", "south")]

    def begun(place: int, message: str) -> list[int]:
        stream, reply = nodes[place].begin(message)
        assert reply is None
        return stream.permutation(100).tolist()

    first = begun(0, "one")
    assert begun(0, "one") == first
    begun(1, "two")
    assert begun(0, "one") != first


def test_a_message_that_fails_after_the_charge_is_charged_once(tmp_path, monkeypatch) -> None:
    sent = Payload({"model": to_arrays(linear().state_dict())})
    victim = Victim(0, tmp_path, {"method": "fedavg"}, network=linear, **NODE)
    drawn = []
    noisy = Privacy._noisy

    def noted(self: Privacy, total: Tensor, deviation: float) -> Tensor:
        drawn.append(noisy(self, torch.zeros_like(total), deviation))
        return noisy(self, total, deviation)

    with monkeypatch.context() as patch:
        patch.setattr(Privacy, "_noisy", noted)
        patch.setattr(Policy, "outgoing", lambda *_: 1 / 0)
        assert victim.ask("train", sent, Request(round=1, epochs=1)) is None
        first = drawn[0]
        drawn.clear()
        patch.undo()
        patch.setattr(Privacy, "_noisy", noted)
        assert victim.ask("train", sent, Request(round=1, epochs=1)) is not None, victim.refusals
    assert torch.equal(first, drawn[0])
    assert len(spent(tmp_path)) == 1


def test_messages_that_are_answered_at_the_same_time_are_both_charged(tmp_path) -> None:
    nodes = [NodeSecret(tmp_path, "north", "own") for _ in range(2)]
    streams = [node.begin(message)[0] for node, message in zip(nodes, ("one", "two"), strict=True)]
    for node in nodes:
        node.spend(1.0, 0.1, 5, 20.0)
    nodes[0].answer("one", b"a reply")
    assert not torch.equal(*(stream.normal(torch.Size([4])) for stream in streams))
    assert spent(tmp_path) == [[1.0, 0.1, 5]] * 2
    nodes[1].spend(1.0, 0.1, 5, 20.0)
    assert len(spent(tmp_path)) == 3
    again = NodeSecret(tmp_path, "north", "own")
    again.begin("two")
    for _ in range(2):
        again.spend(1.0, 0.1, 5, 20.0)
    assert len(spent(tmp_path)) == 3, "its second attempt has the same noise, and is not charged"


def test_a_lock_ends_although_a_process_that_was_forked_has_its_file(tmp_path, monkeypatch) -> None:
    """A user's augmentation may start processes that outlive the message; the next message would wait for their end."""
    fcntl = pytest.importorskip("fcntl")
    copies: list[int] = []
    lock = fcntl.flock

    def forked(file: Any, operation: int) -> None:
        copies.append(os.dup(file.fileno()))
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", forked)
    for _ in range(2):
        with locked(tmp_path):
            pass
    for copy in copies:
        os.close(copy)


def test_clients_with_noise_are_in_no_batch(tmp_path, monkeypatch) -> None:
    """Two nodes that send one name have one account: in a batch, the second would wait for the reply of the first."""
    monkeypatch.setattr("fedhet.client.policy.proof", lambda text: "")
    batched = []
    for noise in ({}, NODE):
        reply = Victim(0, tmp_path, **noise).ask("query", Payload(), Request(question=HANDSHAKE, run="a"))
        batched.append("alike" in reply["report"])
    assert batched == [True, False]


@pytest.mark.parametrize("here", [False, True])
def test_handshakes_do_not_depend_on_examples(here, tmp_path, monkeypatch) -> None:
    """Nor whether they fail: FedHARM describes an example, whose gradients overflow if its pixels are large enough."""
    if here:
        monkeypatch.setattr("fedhet.client.policy.proof", lambda text: "")
    settings = {"method": "fedharm", "architectures": "cnn-2-2", "fedharm.blocks": "body.2,body.5,head"}
    settings |= {"fedharm.slots": "4,4,10", "dataset": "digits"}
    told = []
    for size, shift in ((1.0, 0), (3e38, 1)):
        victim = Victim(0, tmp_path / str(shift), settings, network=None, **NODE)
        victim.inputs = victim.inputs.view(-1, 1, 8, 8)
        victim.inputs[0] = size
        victim.labels[0] = (victim.labels[0] + shift) % 10
        reply = victim.ask("query", Payload(), Request(question=HANDSHAKE, run="a"))
        assert reply is not None, victim.refusals
        told.append({name: dict(record) for name, record in reply.items()})
    assert told[0] == told[1]


@pytest.mark.parametrize("method", ["depthfl", "inclusivefl"])
def test_nor_are_parts_of_networks_found_by_examples(method, tmp_path, monkeypatch) -> None:
    found: list[Tensor] = []
    groups_of = FirstBlocks.groups_of
    monkeypatch.setattr(
        FirstBlocks, "groups_of", lambda model, inputs: found.append(inputs) or groups_of(model, inputs)
    )
    victim = Victim(0, tmp_path, {"method": method, "architectures": "cnn"}, network=None, **NODE)
    victim.inputs = 1 + victim.inputs.view(-1, 1, 8, 8)
    assert victim.ask("query", Payload(), Request(question=HANDSHAKE, run="a")) is not None, victim.refusals
    assert found
    assert not any(inputs.any() for inputs in found)


def test_a_message_that_is_asked_twice_trains_from_one_state(tmp_path, monkeypatch) -> None:
    """Of equal noise, the difference of two replies from different states would be one of private gradients."""
    waiting: list[str] = []
    answer = NodeSecret.answer

    def answered(self: NodeSecret, message: str, reply: bytes) -> None:
        with pytest.raises(ConfigError, match="is in use") as told, locked(tmp_path / "nodes" / "0"):
            pass  # of another process, which waits
        waiting.append(str(told.value))
        answer(self, message, reply)

    monkeypatch.setattr(NodeSecret, "answer", answered)
    victim = Victim(0, tmp_path, {"method": "fedrep"}, **NODE)
    for expected in (-1, 1):
        victim.ask("train", Payload(), Request(round=1, expected=expected, run="a", epochs=1))
    assert len(waiting) == 1
    assert victim.refusals == ["the server asks for round 1 after round 1: use one version of fedhet"]


@pytest.mark.parametrize("method", ["fedproto", "fd", "fedmd", "fml", "fedkd"])
def test_methods_with_other_terms_and_kinds_are_served(method, tmp_path) -> None:
    settings = {"method": method, "architectures": "mlp-20", "clients": 2, "rounds": 2, "workers": 1, "seed": 1}
    settings |= {"samples-per-client": 30}
    if method == "fedmd":
        settings |= {"public-samples": 20, "fedmd.private-epochs": 0, "fedmd.public-epochs": 1}
    else:
        settings |= {"local-epochs": 1}
    run_locally(configuration.resolve(settings, strict=False), tmp_path / "run", app=Private())
    history = read_history(tmp_path / "run")
    assert [failure for row in history for failure in row["failures"]] == []
    assert any(row.epsilon for row in read_clients(tmp_path / "run"))


def batch_norm(client=None):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def hidden(client=None):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize(
    ("method", "network", "words"),
    [
        ("fedgen", linear, "fedgen also sends means or numbers of the client's examples that get no noise"),
        ("heterofl", linear, "heterofl also sends means or numbers"),
        ("fjord", hidden, "fjord draws a width for each batch"),
        ("nearest-neighbour", linear, "nearest-neighbour fits a classifier without noise"),
        ("fedavg", batch_norm, "2 (BatchNorm1d) normalises over the examples of a batch: use GroupNorm"),
    ],
)
def test_what_cannot_be_private_is_refused(method, network, words, tmp_path) -> None:
    victim = Victim(0, tmp_path, {"method": method}, network=network, **NODE)
    assert victim.ask("train", Payload(), Request(round=1, epochs=1)) is None
    assert words in victim.refusals[0]


def test_a_classifier_that_is_only_evaluated_is_refused(tmp_path) -> None:
    """Its score on the common test set would depend on all private examples."""
    victim = Victim(
        0, tmp_path, {"method": "logistic-regression", "test-on": "both"}, own_data=False, network=None, **NODE
    )
    assert victim.ask("evaluate", Payload(), Request(round=1, evaluate=True)) is None
    assert "logistic-regression fits a classifier without noise" in victim.refusals[0]


def test_another_network_of_the_method_cannot_normalise_over_examples(tmp_path) -> None:
    """With `batch-norm = re-estimate` its statistics would be private ones, also without a step of training."""
    settings = {"method": "flha-distillation", "flha-distillation.teacher": "resnet8", "batch-norm": "re-estimate"}
    victim = Victim(0, tmp_path, settings | {"architectures": "mlp"}, own_data=False, network=None, **NODE)
    assert victim.ask("train", Payload(), Request(round=1)) is None
    assert "(BatchNorm2d) normalises over the examples of a batch" in victim.refusals[0]


def test_test_images_in_a_folder_of_the_node_are_private(tmp_path) -> None:
    for number in range(60):
        path = tmp_path / "images" / ("well", "ill")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 4 * number, np.uint8)).save(path)
    settings = {"method": "local", "dataset": "folder", "input-size": 8, "architectures": "mlp", "test-on": "both"}
    here = {"data": str(tmp_path / "images"), "num-partitions": 1}
    victim = Victim(0, tmp_path / "state", settings, own_data=False, network=None, **NODE, **here)
    reply = victim.ask("evaluate", Payload(), Request(round=1, evaluate=True))
    assert reply is not None, victim.refusals
    assert dict(reply["metrics"]) == {"num-examples": 48, "test-examples": 12}


@pytest.mark.parametrize("policy", [NODE, {"allow": "posteriors,public-training"}, {}])
def test_a_server_does_not_make_a_nodes_own_examples_public(policy, tmp_path) -> None:
    """Scores of public examples have neither noise nor groups."""

    def told(**node) -> tuple[bool, bool]:
        settings = {"method": "fedmd", "fedmd.public-epochs": 0, "public-samples": 10, "batch-size": 20}
        settings["test-on"] = "both"
        victim = Victim(0, tmp_path / "-".join(node), settings, network=linear, **policy)
        victim.app = make_client_app(model=linear, data=(victim.inputs, victim.labels))
        victim.context.node_config |= {"num-partitions": 1, **node}
        begun = victim.ask("query", Payload(), Request(question=HANDSHAKE, run="a"))
        assert begun is not None, victim.refusals
        digest = begun["report"].get("public", "")
        assert begun["report"].get("common-test", True) == (node.get("num-partitions") == 2)
        asked = Request(round=1, run="a", public=digest, epochs=1)
        return bool(digest), bool(victim.ask("train", Payload({"next-rows": {"rows": np.arange(10)}}), asked))

    assert told() == (False, False)
    assert told(**{"public-samples": 10}) == (True, True), "the node's owner says that they are public"
    assert told(**{"num-partitions": 2}) == (True, True), "nodes share the examples"


def test_the_scale_of_generated_weights_does_not_depend_on_examples(tmp_path, monkeypatch) -> None:
    inputs = []
    monkeypatch.setattr("fedhet.client_apps.flha_ghn.calibrated", lambda model, batch: inputs.append(batch) or {})
    settings = {"method": "flha-ghn", "flha-ghn.head": "tiled"}
    victim = Victim(0, tmp_path, settings, network=linear, **NODE)
    victim.ask("train", Payload(), Request(round=1))
    assert len(inputs) == 1
    assert not inputs[0].any()


def test_nor_on_fewer_than_min_examples(tmp_path, monkeypatch) -> None:
    sizes = []
    monkeypatch.setattr("fedhet.client_apps.flha_ghn.calibrated", lambda model, batch: sizes.append(len(batch)) or {})
    settings = {"method": "flha-ghn", "flha-ghn.head": "tiled", "batch-size": 30}
    victim = Victim(0, tmp_path, settings, network=linear, **{"allow": "hypernetwork", "min-examples": 30})
    victim.ask("train", Payload(), Request(round=1))
    assert sizes == [30]


def test_a_function_that_augments_gets_each_example_by_itself() -> None:
    """It could mix the examples of a batch, as mixup does, so that a gradient would have several of them."""
    sizes = []

    def prepare(inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        sizes.append(len(inputs))
        return inputs

    phase, examples = Phase(1, Optimisation(batch_size=20)), Examples(torch.randn(20, 3), torch.zeros(20).long())
    options = {"generator": torch.Generator(), "privacy": privacy(1.0, 1.0), "augments": True}
    Training(nn.Linear(3, 2), phase, examples, Task("classification"), prepare, **options).result()
    assert {*sizes} == {1}


def test_a_function_that_collates_gets_each_example_by_itself() -> None:
    sizes = []

    def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        sizes.append(len(rows))
        return default_collate(rows)

    loader = DataLoader([(torch.randn(3), row % 2) for row in range(20)], batch_size=20, collate_fn=collate)
    examples, model = examples_of(loader), nn.Linear(3, 2)
    options = {"generator": torch.Generator(), "privacy": privacy(1.0, 1.0)}
    sizes.clear()
    phase = Phase(1, Optimisation(batch_size=20))
    Training(model, phase, examples, Task("classification"), lambda inputs, _: inputs, **options).result()
    privacy(1.0, 1.0).class_sums(model, examples, 2, 20)
    assert {*sizes} == {1}


def test_networks_of_several_inputs_are_trained() -> None:
    class Masked(nn.Linear):
        def forward(self, inputs: Inputs) -> Tensor:
            return super().forward(inputs.parts["values"] * inputs.parts["mask"])

    inputs = together({"values": torch.randn(20, 3), "mask": torch.ones(20, 3)})
    model, examples = Masked(3, 2), Examples(inputs, torch.arange(20) % 2)
    phase, task = Phase(1, Optimisation(learning_rate=1.0, batch_size=20)), Task("classification")
    before = model.weight.detach().clone()
    options = {"generator": torch.Generator(), "privacy": privacy(0.0, 1.0)}
    Training(model, phase, examples, task, lambda inputs, _: inputs, **options).result()
    assert not torch.equal(model.weight, before)
    sums, _ = privacy(0.0, 100.0).class_sums(model, examples, 2, 20)
    torch.testing.assert_close(sums.sum(0).float(), model(inputs).sum(0))


def test_loss_terms_are_clipped_with_the_tasks_loss() -> None:
    model, inputs, labels = nn.Linear(3, 2).double(), torch.randn(6, 3).double(), torch.randint(2, (6,))
    term = Term(lambda step, weight: weight * step.mean(step.outputs.square().sum(1)), weight=0.5)
    phase = Phase(1, Optimisation(batch_size=6), terms=(term,), task_weight=0.3)
    of_one, rest = private_loss(model, phase, Task("classification"))
    assert rest.terms == ()
    privacy(0.0, 1e6).backward(model, of_one, lambda rows: (inputs[rows], labels[rows]), torch.arange(6), 6)
    outputs = model(inputs)
    loss = 0.3 * F.cross_entropy(outputs, labels) + 0.5 * outputs.square().sum(1).mean()
    torch.testing.assert_close(model.weight.grad, torch.autograd.grad(loss, model.weight)[0])
    with pytest.raises(ModelError, match="a loss term that is no function of one example"):
        private_loss(model, replace(phase, terms=(lambda step: None,)), Task("classification"))


def test_loss_terms_on_public_examples_are_served() -> None:
    model, examples = linear(), Examples(torch.zeros(20, 1, 8, 8), torch.zeros(20).long())
    drawn = Term(lambda step, x: step.parameters["1.bias"].sum() * x, draw=lambda *_: {"x": 5.0}, public=True)
    phase = Phase(1, Optimisation(learning_rate=1.0, batch_size=10), terms=(drawn,), task_weight=0.0)
    before = model[1].bias.detach().clone()
    options = {"generator": torch.Generator(), "privacy": privacy(0.0, 1.0)}
    Training(model, phase, examples, Task("classification"), lambda inputs, _: inputs, **options).result()
    torch.testing.assert_close(model[1].bias, before - 2 * 5.0)


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ({"dp-noise": 1.0}, "dp-noise"),
        ({"dp-clip": 1.0}, "dp-noise"),
        ({"dp-epsilon": 3.0}, "dp-noise"),
        ({"dp-delta": 0.1}, "dp-noise"),
        ({"dp-noise": "much"}, "dp-noise"),
        # Beyond these limits, the account fails or has no finite epsilon.
        (
            {"dp-noise": 1e160, "dp-clip": 1.0},
            r"dp-noise is 1e\+160, but must be a number of at least 0 and at most 1e",
        ),
        ({**NODE, "dp-delta": 1e-20}, "dp-delta is 1e-20, but must be a number of at least 1e-12 and at most 0.5"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(node, told) -> None:
    with pytest.raises(ConfigError, match=told):
        Policy.of(node, deployed=True)
    for noise, delta in [(1e9, 0.5), (1e9, 1e-12), (0.01, 1e-12)]:
        assert epsilon_of([(noise, 0.1, 10), (noise, 1.0, 10)], delta) < math.inf


@pytest.mark.long
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

    model = Branching()
    with pytest.raises(Refused, match="gradient of each example, and torch.func cannot compute it for this Branching"):
        privacy(1.0, 1.0).check(
            model,
            lambda inputs, labels: F.cross_entropy(model(inputs), labels),
            torch.zeros(1, 3),
            torch.zeros(1).long(),
        )
