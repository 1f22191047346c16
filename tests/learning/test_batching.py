"""Several networks trained side by side: one batch of networks where they are built alike, and the same results."""

import copy
import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.data import Examples
from fedhet.learning import ClientBatching, Forward, Optimisation, Phase, Trained, evaluation, reestimate, train
from fedhet.learning.batching import clients
from fedhet.learning.batching.layouts import layout
from fedhet.representations import RandomStream, Representation
from fedhet.task import get_task

TASK, CPU = get_task("classification"), torch.device("cpu")
SIZES = (23, 30, 30, 7)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(1), nn.Linear(12, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


class Noisy(nn.Sequential):
    """Draws by itself, so it can be no part of a batch of networks."""

    def forward(self, inputs):
        return F.dropout(super().forward(inputs), 0.2, self.training)


class Doubling(nn.Linear):
    """Has an effect on each pass that no batch of networks could have: it counts by itself."""

    def forward(self, inputs):
        return super().forward(inputs) * (2 if inputs.sum().item() > 0 else 1)


def examples(size, seed, shape=(5,)):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
    return Examples(inputs, torch.randint(3, (size,), generator=generator))


def work(model, part, number, phase):
    """Train with a stream of batches and of dropout of its own."""
    torch.manual_seed(100 + number)
    generator = torch.Generator().manual_seed(number)
    return train(model, phase, part, TASK, lambda inputs, _: inputs, generator=generator)


def both(build, phase=None, sizes=SIZES, shape=(5,), size=4, **settings):
    """Networks trained one after the other, and the same side by side."""
    phase = phase or (lambda model: Phase(2, Optimisation(batch_size=8, learning_rate=0.1, momentum=0.9)))
    torch.manual_seed(1)
    one = [build().double() for _ in sizes]
    other = copy.deepcopy(one)
    parts = [examples(count, number, shape) for number, count in enumerate(sizes)]
    alone = []
    for number, (model, part) in enumerate(zip(one, parts, strict=True)):
        alone.append(work(model, part, number, phase(model)))
    members = zip(other, parts, range(len(sizes)), map(phase, other), strict=True)
    side = ClientBatching(size, **settings).run([partial(work, *member) for member in members])
    return one, other, alone, side


def assert_same(one, other, alone, side):
    for mine, its in zip(alone, side, strict=True):
        assert mine.loss == pytest.approx(its.loss, abs=1e-12)
        assert mine.work == its.work
    for mine, its in zip(one, other, strict=True):
        for name, tensor in mine.state_dict().items():
            torch.testing.assert_close(its.state_dict()[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.fixture
def joint(monkeypatch):
    """How many networks each joint pass had."""
    seen, together = [], clients.together

    def spying(passes, streams):
        answers = together(passes, streams)
        seen.append(len(passes))
        return answers

    monkeypatch.setattr(clients, "together", spying)
    return seen


def adam(model):
    return Phase(2, Optimisation("adamw", batch_size=8, weight_decay=0.1), trains=lambda name: not name.startswith("0"))


def clipped(model):
    return Phase(2, Optimisation(batch_size=8, learning_rate=0.1, momentum=0.9, clip_gradients=0.1))


def aligned(model):
    """With a term on Phi of a further batch, drawn in every other step."""
    rows = torch.randn(9, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    phi, stream = Representation(model, "2"), RandomStream(3)

    def term(step):
        if step.number % 2:
            return None
        further = step.represent(rows, phi, stream)
        return further.square().mean(), {"size": further.detach().norm()}

    return Phase(2, Optimisation(batch_size=8), terms=(term, lambda step: 0.1 * step.parameters["0.weight"].norm()))


@pytest.mark.parametrize(
    ("build", "phase", "shape", "most"),
    [
        (plain, None, (5,), 4),
        (plain, adam, (5,), 4),
        (plain, clipped, (5,), 4),
        (plain, aligned, (5,), 4),
        (normalised, None, (1, 5), 3),
        (dropping, None, (5,), 3),
    ],
    ids=["plain", "part of it with adamw", "clipped", "terms", "batch-norm", "dropout"],
)
def test_networks_side_by_side_learn_what_each_learns_alone(build, phase, shape, most, joint):
    assert_same(*both(build, phase, shape=shape))
    assert max(joint) == most


def test_statistics_taken_anew_side_by_side_are_those_that_each_takes_alone(joint, monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", 8)  # the one with 23 examples has a last batch of its own
    torch.manual_seed(1)
    one = [normalised().double() for _ in SIZES]
    other = copy.deepcopy(one)
    parts = [examples(count, number, (1, 5)).inputs for number, count in enumerate(SIZES)]
    for model, part in zip(one, parts, strict=True):
        reestimate(model, part, lambda inputs: 2 * inputs)
    ClientBatching(4).run(
        [partial(reestimate, model, part, lambda inputs: 2 * inputs) for model, part in zip(other, parts, strict=True)]
    )
    for mine, its in zip(one, other, strict=True):
        assert its[1].momentum == 0.1
        for name, tensor in mine.state_dict().items():
            torch.testing.assert_close(its.state_dict()[name], tensor, rtol=1e-12, atol=1e-12)
    assert joint == [3, 3, 2, 2]


@pytest.mark.parametrize("build", [lambda: Noisy(*plain()), lambda: nn.Sequential(Doubling(5, 3))])
def test_what_cannot_be_one_batch_is_trained_one_by_one_with_the_same_numbers(build, joint, caplog):
    caplog.set_level("INFO", "flwr.fedhet")
    assert_same(*both(build))
    assert not joint
    assert len([line for line in caplog.messages if "are passed one by one" in line]) == 1


def test_networks_that_may_differ_unseen_are_never_one(joint):
    def closing():
        network = plain()
        network.scale = torch.rand(1)  # no buffer
        return network

    assert_same(*both(closing))
    assert not joint
    assert layout(nn.Sequential(nn.LeakyReLU(0.1))).built != layout(nn.Sequential(nn.LeakyReLU(0.2))).built
    assert layout(plain()).built == layout(plain()).built
    layout.cache_clear()


def halved(module, inputs, outputs):
    return outputs / 2


def negated(module, inputs, outputs):
    return -outputs


def with_keywords(module, inputs, keywords, outputs):
    return outputs + 1


def hooked(*hooks, **settings):
    network = plain()
    for hook in hooks:
        network[0].register_forward_hook(hook, **settings)
    return network


def test_networks_with_the_same_hooks_are_one_batch_whatever_torch_numbers_them(joint):
    assert_same(*both(lambda: hooked(halved, negated)))
    assert max(joint) == 4


@pytest.mark.parametrize(
    "other",
    [
        lambda: hooked(),
        lambda: hooked(negated),
        lambda: hooked(halved, halved),
        lambda: hooked(halved, always_call=True),
        lambda: nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(), nn.Linear(6, 3)),
        lambda: nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 3)),
        lambda: plain().double(),
    ],
)
def test_networks_that_differ_in_what_they_compute_are_not_built_alike(other):
    one = hooked(halved)
    assert layout(one).built == layout(hooked(halved)).built != ""
    assert layout(one).built != layout(other()).built
    layout.cache_clear()


def test_the_order_of_hooks_and_what_they_are_given_count():
    built = [layout(hooked(*each)).built for each in ((halved, negated), (negated, halved))]
    one, other = hooked(negated), hooked(negated)
    one[0].register_forward_hook(with_keywords, with_kwargs=True)
    other[0].register_forward_hook(with_keywords)
    built += [layout(each).built for each in (one, other)]
    assert len({*built, ""}) == 5
    layout.cache_clear()


def test_networks_of_one_class_of_which_no_two_are_alike_are_told_once_with_a_difference(joint, caplog):
    caplog.set_level("INFO", "flwr.fedhet")
    slopes = iter((0.1, 0.2, 0.3, 0.4))
    assert_same(*both(lambda: nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(next(slopes)), nn.Linear(6, 3))))
    assert not joint
    (line,) = [line for line in caplog.messages if "passed one by one" in line]
    assert line.endswith(
        "no two are built alike, 1 is LeakyReLU(negative_slope=0.1) in one and LeakyReLU(negative_slope=0.2) in another"
    )


def test_one_that_fails_fails_alone():
    def breaking(model):
        def term(step):
            if step.number == 1 and len(step.inputs) == 7:
                raise ValueError("no more")
            return 0.0 * step.outputs.sum()

        return Phase(2, Optimisation(batch_size=8, learning_rate=0.1), terms=(term,))

    torch.manual_seed(1)
    networks = [plain().double() for _ in SIZES]
    parts = [examples(count, number) for number, count in enumerate(SIZES)]
    members = zip(networks, parts, range(4), map(breaking, networks), strict=True)
    outcomes = ClientBatching(4).run([partial(work, *member) for member in members])
    assert [type(each) for each in outcomes] == [Trained, Trained, Trained, ValueError]


def test_with_gpu_only_clients_on_one_train_side_by_side_and_other_processes_know_it():
    for setting, device in (("gpu", "cpu"), ("gpu", "mps"), ("off", "cpu")):
        assert ClientBatching.of(setting, torch.device(device)) is None
    for setting, size in (("gpu", clients.AUTO), ("auto", clients.AUTO), ("3", 3)):
        there = copy.copy(ClientBatching.of(setting, torch.device("cuda:1")))  # as pickle makes one
        assert (there.size, there._measure, there._device) == (size, size != 3, torch.device("cuda:1"))


def test_what_is_slower_here_is_not_done_and_what_was_measured_is_kept(tmp_path, monkeypatch, joint):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    asked = []

    def seconds(run, device):
        run()
        asked.append(run)
        return 2.0 if len(asked) % 2 else 1.0  # first of one batch, then of one after the other

    monkeypatch.setattr(clients, "_seconds", seconds)
    assert_same(*both(plain, measure=True))
    assert joint == [4], "it is measured once, and never done again"
    assert set(json.loads((tmp_path / ".fedhet" / "client-batching.json").read_text()).values()) == {2.0}
    known = len(asked)
    both(plain, measure=True)
    assert len(asked) == known == 2
    assert joint == [4]


def test_a_mode_of_torch_that_one_client_sets_holds_for_no_other(joint):
    models = [plain() for _ in range(3)]

    def asks(model, *modes):
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            outputs, _ = Forward(model, torch.ones(2, 5)).run()
            return outputs.requires_grad, outputs.dtype, torch.is_grad_enabled()

    modes = ([], [torch.no_grad()], [torch.autocast("cpu", torch.bfloat16)])
    seen = ClientBatching(3).run([partial(asks, model, *each) for model, each in zip(models, modes, strict=True)])
    assert seen == [(True, torch.float32, True), (False, torch.float32, False), (True, torch.bfloat16, True)]
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert not joint


def test_clients_let_go_of_what_they_hold_when_the_run_is_interrupted():
    closed = []

    def waits(number):
        try:
            Forward(plain(), torch.ones(2, 5)).run()
            if number == 2:
                raise KeyboardInterrupt
            Forward(plain(), torch.ones(2, 5)).run()
        finally:
            closed.append(number)

    with pytest.raises(KeyboardInterrupt):
        ClientBatching(3).run([partial(waits, number) for number in range(3)])
    assert sorted(closed) == [0, 1, 2]


def test_a_clients_code_that_ends_the_process_ends_its_own_work():
    (outcome,) = ClientBatching(2).run([lambda: sys.exit(3)])
    assert repr(outcome) == "RuntimeError('SystemExit: 3')"
