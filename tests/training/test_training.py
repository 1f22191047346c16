import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.models.representation import Output, RandomStream, Representation
from fedhet.tasks import Task
from fedhet.training import Optimisation, Phase, Term, Trained, Training, batches, learning_rate

TASK = Task("classification")


def examples_of(count=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Examples(torch.randn(count, 5, generator=generator), torch.randint(3, (count,), generator=generator))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def plainly(inputs, generator):
    return inputs


def run(model, phase, examples=None, seed=0, before=None, stream=None):
    stream = stream or torch.Generator().manual_seed(seed)
    examples = examples or examples_of()
    return Training(model, phase, examples, TASK, plainly, generator=stream, before=before or Trained()).result()


def copy(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.1, 0.1, 0.1, 0.1, 0.1]),
        ("linear", [0.1, 0.075, 0.05, 0.025, 0.0]),
        ("cosine", [0.05 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]),
    ],
)
def test_learning_rate_schedules(schedule, expected):
    # The fifth is that of the closing round.
    assert [learning_rate(schedule, 0.1, done / 4) for done in range(5)] == pytest.approx(expected)
    assert learning_rate(schedule, 0.1, -1.0) == pytest.approx(0.1)


@pytest.mark.parametrize(("count", "size"), [(10, 3), (9, 3), (1, 4), (5, 10), (7, 1), (0, 2)])
def test_batches_cover_all_examples(count, size):
    parts = list(batches(count, size, torch.Generator().manual_seed(1)))
    assert sorted(torch.cat([torch.empty(0, dtype=torch.long), *parts]).tolist()) == list(range(count))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert len(parts) == math.ceil(count / size)


def test_small_last_batch():
    stream = torch.Generator()
    assert [len(part) for part in batches(7, 3, stream, least=2)] == [3, 4]
    assert [len(part) for part in batches(8, 3, stream, least=3)] == [3, 5]
    assert [len(part) for part in batches(7, 3, stream)] == [3, 3, 1]
    assert math.isfinite(run(network(), Phase(1, Optimisation(batch_size=23))).mean_loss)


def test_sgd_by_hand():
    model, plain = network(), network()
    optimisation = Optimisation("sgd", 0.1, 0.5, 0.01, batch_size=24)
    examples = examples_of()
    trained = run(model, Phase(2, optimisation))
    velocity = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
    losses = []
    plain.train()
    for _ in range(2):
        value = nn.functional.cross_entropy(plain(examples.inputs), examples.labels)
        names, parameters = zip(*plain.named_parameters(), strict=True)
        gradients = torch.autograd.grad(value, parameters)
        losses.append(value.item())
        with torch.no_grad():
            for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
                decayed = gradient + 0.01 * parameter if parameter.ndim > 1 else gradient
                velocity[name] = 0.5 * velocity[name] + decayed
                parameter -= 0.1 * velocity[name]
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)
    assert trained.mean_loss == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_gradient_clipping():
    steps = {}
    for norm in (0.0, 1e-3, 1e9):
        model = network()
        before = copy(model)
        how = Optimisation(learning_rate=1.0, batch_size=8, clip_gradients=norm)
        run(model, Phase(0, how, steps=1), examples_of(8))
        steps[norm] = torch.cat([(p - before[name]).flatten() for name, p in model.named_parameters()])
    assert torch.equal(steps[0.0], steps[1e9])
    assert steps[1e-3].norm().item() == pytest.approx(1e-3, rel=1e-3)
    assert torch.cosine_similarity(steps[0.0], steps[1e-3], dim=0).item() == pytest.approx(1.0)


def test_frozen_by_the_user():
    model = network()
    model[0].weight.requires_grad_(False)
    before = copy(model)
    for trains in (None, lambda name: name.startswith("0."), lambda name: name.startswith("3.")):
        run(model, Phase(1, Optimisation(weight_decay=0.1, momentum=0.9), trains=trains))
        assert not model[0].weight.requires_grad
        assert model[0].bias.requires_grad
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[0].bias, before["0.bias"])


def test_loss_terms():
    model, seen = network(), []

    def term(step):
        seen.append((step.number, step.inputs.shape, step.labels.shape, step.outputs.shape, dict(step.captured)))
        assert step.model is model
        assert step.parameters["3.weight"] is model[3].weight
        return 2 * step.outputs.square().mean()

    examples = examples_of(24)
    outputs = network().train()(examples.inputs)
    expected = nn.functional.cross_entropy(outputs, examples.labels) + 2 * outputs.square().mean()
    nothing, left_out = lambda step: torch.zeros(()), lambda step: None
    trained = run(model, Phase(1, Optimisation(batch_size=24), terms=(term, nothing, left_out)), examples)
    assert trained.mean_loss == pytest.approx(expected.item(), rel=1e-5)
    assert seen == [(0, (24, 5), (24,), (24, 3), {})]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (0, r"returned a value of type int: return a scalar tensor, such as step.mean\(values\), or None"),
        (torch.ones(2), r"a value of shape \(2,\)"),
        ((torch.zeros(()), {"distance": 3.0}), "a value of type float: "),
    ],
)
def test_loss_terms_that_are_no_scalars(result, message):
    with pytest.raises(ModelError, match=message):
        run(network(), Phase(1, Optimisation(), terms=(Term(lambda step: result),)))
    with pytest.raises(ModelError, match=r"must be a tuple, such as \(Term\(...\),\), not a Term"):
        Phase(1, Optimisation(), terms=Term(lambda step: result))


def test_captures():
    model, seen = network(), []

    def term(step):
        seen.append((step.rows, step.captured))
        return step.captured["first"].square().mean() + step.captured["normalised"].square().mean()

    examples = examples_of(24)
    captures = {"first": Output(model, "0"), "normalised": Output(model, "1"), "features": Representation(model)}
    trained = run(model, Phase(1, Optimisation(batch_size=24), terms=(Term(term, captures=captures),)), examples)
    plain, ((rows, captured),) = network().train(), seen
    first = plain[0](examples.inputs[rows])
    normalised = plain[1](first)
    features = plain[2](normalised)
    for name, expected in {"first": first, "normalised": normalised, "features": features}.items():
        assert torch.equal(captured[name], expected)
    loss = nn.functional.cross_entropy(plain[3](features), examples.labels[rows])
    loss = loss + first.square().mean() + normalised.square().mean()
    assert trained.mean_loss == pytest.approx(loss.item(), rel=1e-5)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_phase_of_steps(steps):
    seen = []

    def term(step):
        seen.append(step.rows)
        return torch.zeros(())

    phase = Phase(0, Optimisation(batch_size=10), steps=steps, terms=(term,))
    trained = run(network(), phase)
    assert [len(rows) for rows in seen] == ([10, 10, 4] * 3)[:steps]
    assert trained.epochs == pytest.approx(sum(map(len, seen)) / 24)
    # The order is that of epochs, one after the other.
    stream = torch.Generator().manual_seed(0)
    epochs = [rows for _ in range(3) for rows in batches(24, 10, stream)]
    assert all(torch.equal(*pair) for pair in zip(seen, epochs[:steps], strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_continued_optimiser(optimizer):
    optimisation = Optimisation(optimizer, 0.01, 0.9 if optimizer == "sgd" else 0.0, 0.1, batch_size=10)
    model, whole, afresh = network(), network(), network()
    for network_, continues in ((model, True), (afresh, False)):
        stream = torch.Generator().manual_seed(0)
        first = run(network_, Phase(3, optimisation), stream=stream)
        run(network_, Phase(2, optimisation, continues=continues), before=first, stream=stream)
    run(whole, Phase(5, optimisation))
    assert all(torch.equal(tensor, copy(whole)[name]) for name, tensor in copy(model).items())
    assert not all(torch.allclose(tensor, copy(afresh)[name], atol=1e-4) for name, tensor in copy(model).items())


def test_schedule_by_step():
    done, model = [], nn.Sequential(nn.Linear(5, 3))
    weights = []

    def schedule(part):
        done.append(part)
        return 0.1 * (1 - part)

    def term(step):
        weights.append(step.parameters["0.bias"].clone())
        return step.parameters["0.bias"].sum()

    optimisation = Optimisation("sgd", 7.0, batch_size=12, schedule=schedule)
    run(model, Phase(2, optimisation, task_weight=0.0, terms=(term,)))
    assert done == [0, 0.25, 0.5, 0.75]
    weights.append(model[0].bias.detach().clone())
    # The bias's gradient is 1, so a step is as long as the learning rate.
    steps = [float((before - after)[0].detach()) for before, after in pairwise(weights)]
    assert steps == pytest.approx([0.1, 0.075, 0.05, 0.025], rel=1e-4)


@pytest.mark.parametrize("augmented", [False, True])
def test_augmentation_of_phase_examples(augmented):
    generators = []

    def prepare(inputs, generator):
        generators.append(generator)
        return inputs

    stream = torch.Generator().manual_seed(0)
    for phase in (Phase(1, Optimisation(), examples=examples_of(5), augmented=augmented), Phase(1, Optimisation())):
        Training(network(), phase, examples_of(5), TASK, prepare, generator=stream).result()
    assert generators == [stream if augmented else None, stream]


def test_mixed_precision():
    seen = []

    def trained(bf16):
        model, inside, stream = network(), [], RandomStream(0)

        def term(step):
            further = step.represent(examples_of().inputs[:4], phi, stream)
            seen.extend(tensor.dtype for tensor in (step.outputs, step.captured["hidden"], further))
            return further.square().mean()

        model[0].register_forward_hook(lambda module, args, output: inside.append(output.dtype))
        phi = Representation(model)
        optimisation = Optimisation("sgd", 0.05, batch_size=8, bf16=bf16)
        captures = {"hidden": Output(model, "0")}
        done = run(model, Phase(2, optimisation, terms=(Term(term, captures=captures),)))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        return done.mean_loss, nn.utils.parameters_to_vector(model.parameters()), set(inside)

    loss, weights, inside = trained(True)
    plain_loss, plain_weights, plain_inside = trained(False)
    assert (inside, plain_inside, set(seen)) == ({torch.bfloat16}, {torch.float32}, {torch.float32})
    assert loss == pytest.approx(plain_loss, rel=0.01)
    assert 0 < (weights - plain_weights).abs().max() < 0.01


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4, affine=False), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_statistics_of_frozen_parts(norm):
    if isinstance(norm, nn.InstanceNorm1d):
        norm = nn.Sequential(nn.Unflatten(1, (4, 2)), norm, nn.Flatten())
    body = nn.Sequential(nn.Linear(5, 8), norm) if len([*norm.children()]) else nn.Sequential(nn.Linear(5, 4), norm)
    model = nn.ModuleDict({"body": body, "head": nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3, affine=False))})
    model.forward = lambda inputs: model["head"](model["body"](inputs))
    model(examples_of().inputs)
    before = copy(model)
    run(model, Phase(1, Optimisation(0.1), trains=lambda name: name.startswith("head.")))
    # InstanceNorm of torch 2.7 rounds its statistics even in evaluation mode.
    changed = {name for name, tensor in model.state_dict().items() if not tensor.allclose(before[name])}
    assert {name.partition(".")[0] for name in changed} == {"head"}
    assert "head.1.running_mean" in changed
    run(model, Phase(1, Optimisation(0.1), trains=lambda name: name.startswith("body.")))
    assert any("body" in n and "running" in n for n, each in model.state_dict().items() if not each.equal(before[n]))


@pytest.mark.parametrize(("count", "size"), [(1, 8), (4, 1)])
def test_batch_of_one_example(count, size):
    with pytest.raises(ModelError, match="BatchNorm cannot normalise one example .*: set batch-size to at least 2"):
        run(network(), Phase(1, Optimisation(0.1, batch_size=size)), examples_of(count))
    kept = network()
    kept.train = lambda mode=True: nn.Module.train(kept, False)
    assert run(kept, Phase(1, Optimisation(0.1, batch_size=1)), examples_of(1)).work.steps == 1


def test_mean_loss_by_class_weights():
    """The reported loss of an epoch does not depend on the batches."""
    weights, examples = torch.tensor([1.0, 5.0, 9.0]), examples_of()
    for task in (Task("classification", class_weights=weights.tolist()), Task(loss=nn.CrossEntropyLoss(weights))):
        task = task.of(torch.zeros(24, 3), examples.labels)
        model = nn.Linear(5, 3)
        expected = nn.functional.cross_entropy(model(examples.inputs), examples.labels, weights).item()
        phase = Phase(2, Optimisation(learning_rate=1e-9, batch_size=7))
        trained = Training(model, phase, examples, task, plainly, generator=torch.Generator()).result()
        assert trained.mean_loss == pytest.approx(expected, rel=1e-5)
