"""Clients' networks as one batch compute what each of them computes alone."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.models.representation import RandomStream, Representation
from fedhet.tasks import Task
from fedhet.training import Batches, Evaluation, OneByOne, Optimisation, Phase, Term, Trained, Training, verification

CLIENTS = (21, 8, 17, 30)
"""Numbers of examples."""

LABELS = {
    "classification": lambda values: values.argmax(1),
    "binary": lambda values: (values[:, 0] > 0).long(),
    "multi-label": lambda values: (values > 0).float(),
    "regression": lambda values: values,
}


def plainly(inputs, generator=None):
    return inputs.double()


def as_is(inputs, generator=None):
    return inputs


def near(step, start, weight, representation, stream):
    """A loss term with captured values, an own pass, and a value to record."""
    apart = step.mean((step.captured["phi"] - start).square().mean(1))
    other = step.represent(step.inputs.new_ones(2, 1, 5), representation, stream).square().mean()
    return weight * (apart + other), {"apart": apart}


def network(outputs=3):
    return nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, outputs))


def clients(task="classification", own=None, spoilt=None, build=network):
    """Phases of training of clients with unequal data."""
    outputs = 1 if task == "binary" else 3
    for client, count in enumerate(CLIENTS):
        torch.manual_seed(client)
        model = build(outputs).double()
        inputs = torch.randn(count, 1, 5)
        if client == spoilt:
            inputs[0] = torch.nan
        labels = LABELS[task](torch.randn(count, 3))
        phi = Representation(model)
        start = torch.full((12,), float(client)).double()
        constants = {"start": start, "weight": 0.1, "representation": phi, "stream": RandomStream(0)}
        term = Term(near, captures={"phi": phi}, weighted=True, **constants)
        phase = Phase(2, own or Optimisation(batch_size=8), terms=(term,))
        stream = torch.Generator().manual_seed(client)
        yield Training(model, phase, Examples(inputs, labels), Task(task), plainly, stream, client, Trained())


class Counted(OneByOne):
    """Computes one by one, and counts what it computes."""

    count = 0

    def train(self, trainings):
        self.count += len(trainings)
        return super().train(trainings)

    def evaluate(self, evaluations):
        self.count += len(evaluations)
        return super().evaluate(evaluations)


def trained(trainings, backend=None):
    """What training gave for each client, and the number of clients that were not in a batch."""
    alone = Counted()
    results = (backend or Batches(alone)).train(trainings)
    values = [
        (done.mean_loss, done.means["apart"], done.work, done.epochs) if isinstance(done, Trained) else repr(done)
        for done in results
    ]
    return values, alone.count


def drawing(step, weight, kind, rows, wanted):
    """A loss term whose numbers differ between clients, for drawn rows."""
    outputs = F.linear(rows, step.parameters["3.weight"])
    factor = {"plus": 1, "minus": -1}[kind]
    return factor * weight * step.mean((outputs - wanted).square()), {"apart": weight * step.mean(rows)}


def check_as_one_by_one(batch, alone, left):
    """A new batch gives what equal clients give one by one; `left` clients are not in the batch."""
    verification.VERIFIED.clear()
    results, count = trained(batch)
    assert count == left
    for mine, other in zip(results, trained(alone, OneByOne())[0], strict=True):
        assert mine[:2] == pytest.approx(other[:2], rel=1e-12)
        assert mine[2:] == other[2:]
    torch.testing.assert_close(states(batch), states(alone), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("kinds", "size", "left"),
    [(("plus",) * 4, 8, 0), (("plus",) * 4, 64, 0), (("plus", "minus", "plus", "plus"), 8, 4)],
)
def test_floats_of_loss_terms_differ_between_clients_and_steps(kinds, size, left):
    """Drawn rows are as many as the mini-batch's; what is neither a tensor nor a float must be equal in each step."""

    def draw(number, examples, client):
        rows = torch.linspace(client, 1, 12 * examples).double().view(examples, 12)
        kind = kinds[client] if number else "plus"
        return {"rows": rows, "wanted": rows[:, :3], "weight": (client + 1) / (number + 10), "kind": kind}

    def group():
        for client, training in enumerate(clients(own=Optimisation(batch_size=size))):
            term = Term(drawing, draw=partial(draw, client=client), weighted=True)
            yield replace(training, phase=replace(training.phase, terms=(term,)))

    check_as_one_by_one([*group()], [*group()], left)


def far(step, rows):
    """A loss term that averages drawn rows."""
    loss = step.mean(F.linear(rows, step.parameters["3.weight"]).square())
    return loss, {"apart": loss}


@pytest.mark.parametrize("sizes", [CLIENTS, (21, 16, 17, 32)])
@pytest.mark.parametrize(
    ("public", "rows", "first", "left"),
    [(False, 8, 0, 4), (False, 6, 0, 4), (False, 0, 0, 0), (False, 0, 1, 4), (True, 8, 0, 0), (True, 6, 0, 0)],
)
def test_drawn_rows_of_a_fixed_number_are_averaged_as_one_by_one(sizes, public, rows, first, left, monkeypatch):
    """They are as many as the examples of some mini-batches; a batch that fails in a later step draws anew."""
    monkeypatch.setattr(f"{__name__}.CLIENTS", sizes)

    def draw(number, examples, stream):
        return {"rows": torch.randn(rows or examples, 12, generator=stream).double()} if number >= first else None

    def group():
        for client, training in enumerate(clients(own=Optimisation("sgd", 0.1, batch_size=8))):
            stream = torch.Generator().manual_seed(client)
            term = Term(far, draw=partial(draw, stream=stream), weighted=True, public=public)
            yield replace(training, phase=replace(training.phase, terms=(term,)))

    check_as_one_by_one([*group()], [*group()], left)


@pytest.mark.parametrize(
    ("optimizer", "steps", "left"), [("sgd", 0, 0), ("adam", 3, 0), ("adam", 0, 2), ("amsgrad", 3, 0)]
)
@pytest.mark.parametrize("first", ["alone", "batch"])
def test_a_phase_continues_with_the_state_of_optimisers(first, optimizer, steps, left):
    """Adam continues in a batch for clients with equal numbers of steps so far."""
    own = Optimisation(optimizer, 0.01, momentum=0.9, batch_size=8)

    def after(backends):
        group = [*clients(own=own)]
        phases = [replace(each.phase, steps=steps) for each in group], [each.phase for each in group]
        before = [Trained()] * len(group)
        for which, backend in zip(phases, backends, strict=True):
            each = zip(group, which, before, strict=True)
            continued = [replace(one, phase=replace(phase, continues=True), before=done) for one, phase, done in each]
            before = backend.train(continued)
        moments = [[*values.values()] for done in before for values in done.moments.values()]
        return states(group), moments

    last = Counted()
    found = after((Batches() if first == "batch" else OneByOne(), Batches(last)))
    assert last.count == left
    torch.testing.assert_close(found, after((OneByOne(), OneByOne())), rtol=1e-9, atol=1e-12)


def states(trainings):
    return [tensor for each in trainings for tensor in each.model.state_dict().values()]


@pytest.mark.parametrize(
    ("task", "own"),
    [
        ("classification", Optimisation("sgd", 0.1, momentum=0.9, weight_decay=0.1, batch_size=8)),
        ("binary", Optimisation("adam", 0.01, weight_decay=0.1, batch_size=8, clip_gradients=0.1)),
        ("multi-label", Optimisation("adamw", 0.01, weight_decay=0.1, batch_size=8)),
        ("regression", Optimisation("amsgrad", 0.01, batch_size=7)),
    ],
)
def test_training_in_a_batch(task, own):
    alone, batch = [*clients(task, own)], [*clients(task, own)]
    results, left = trained(batch)
    assert left == 0
    for mine, other in zip(results, trained(alone, OneByOne())[0], strict=True):
        assert mine[:2] == pytest.approx(other[:2], rel=1e-12)
        assert mine[2:] == other[2:]
    torch.testing.assert_close(states(batch), states(alone), rtol=1e-9, atol=1e-12)
    assert all(torch.equal(a.generator.get_state(), b.generator.get_state()) for a, b in zip(alone, batch, strict=True))


def test_a_learning_rate_that_changes_in_every_step_needs_equal_numbers_of_steps(monkeypatch):
    monkeypatch.setitem(globals(), "CLIENTS", (17, 8, 17, 17))
    own = Optimisation("adam", 0.1, batch_size=4, schedule=lambda done: 0.1 * (1 - done))
    alone, batch = ([*clients(own=own)] for _ in range(2))
    for trainings in (alone, batch):
        trainings[3] = replace(trainings[3], phase=replace(trainings[3].phase, epochs=3))
    results, left = trained(batch)
    expected = trained(alone, OneByOne())[0]
    assert left == 2
    for mine, other in zip(results, expected, strict=True):
        assert mine[:2] == pytest.approx(other[:2], rel=1e-9)
    torch.testing.assert_close(states(batch), states(alone), rtol=1e-9, atol=1e-12)


class Counting(nn.Module):
    """A layer with a buffer that a forward pass replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen = self.seen + len(inputs)
        return inputs


class Centred(nn.Module):
    """A layer that mixes examples, without a buffer."""

    def forward(self, inputs):
        return inputs - inputs.mean(0)


class Shifted(nn.Module):
    """A layer with a buffer that does not change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.ones(4, 1))

    def forward(self, inputs):
        return inputs + self.shift


class Mixed(nn.Module):
    """A layer that adds the mean over examples."""

    def forward(self, inputs):
        return inputs + 0.5 * inputs.mean(0, keepdim=True)


class Expanded(nn.Module):
    """A layer with a buffer that verification cannot change, as its entries share their memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factors", torch.ones(1, dtype=torch.float64).expand(3))

    def forward(self, inputs):
        return inputs * self.factors


class Twice(nn.Module):
    """A layer that also reads its weight by another attribute; all clients' weights are the same at first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.again = self.read()

    def read(self):
        return [self.weight]

    def forward(self, inputs):
        return inputs + self.weight + self.again[0]


class AsArray(Twice):
    """The same with a NumPy array in the weight's memory, which belongs to the first network of a batch."""

    def read(self):
        return [self.weight.detach().numpy()]

    def forward(self, inputs):
        return inputs + self.weight + torch.from_numpy(self.again[0])


@pytest.mark.parametrize("label", range(3))
def test_examples_that_mix_behind_wide_layers_are_found(label):
    """Verification changes weights, but not so much that the loss and its gradients become 0 for one of the labels."""

    def group():
        torch.manual_seed(0)
        hidden = [layer for _ in range(6) for layer in (nn.LazyLinear(512), nn.ReLU())]
        model = nn.Sequential(nn.Flatten(), *hidden[:2], Mixed(), *hidden[2:], nn.LazyLinear(3))
        model(torch.rand(1, 1, 100))
        for client in range(2):
            examples = Examples(torch.rand(8, 1, 100), torch.full((8,), label))
            phase = Phase(1, Optimisation("sgd", 0.1, batch_size=8))
            stream = torch.Generator().manual_seed(client)
            yield Training(deepcopy(model), phase, examples, Task("classification"), as_is, stream, client, Trained())

    verification.VERIFIED.clear()
    alone = Counted()
    Batches(alone).train([*group()])
    assert alone.count == 2


def with_layer(kind):
    """A function that builds a network with a layer of this kind, some with parameters that are frozen or tied."""

    def build(outputs):
        model = network(outputs)
        if kind == "frozen":
            model[0].requires_grad_(False)
        elif kind in (spectral_norm, weight_norm):
            model[0] = kind(model[0])
        elif kind in ("tied", "one memory"):
            model.insert(1, nn.Conv1d(4, 4, 1))
            model.insert(1, nn.Conv1d(4, 4, 1))
            model.double()
            if kind == "tied":
                model[2].weight = model[1].weight
            else:
                model[2].weight.data = model[1].weight.data
        else:
            model.insert(1, kind())
        return model

    return build


@pytest.mark.parametrize(
    ("kind", "together"),
    [
        (Shifted, True),
        ("frozen", True),
        (weight_norm, True),
        ("tied", True),
        ("one memory", False),
        (partial(nn.BatchNorm1d, 4), False),
        (partial(nn.SyncBatchNorm, 4), False),
        (partial(nn.BatchNorm1d, 4, track_running_stats=False), False),
        (partial(nn.InstanceNorm1d, 4, track_running_stats=True), False),
        (spectral_norm, False),
        (Counting, False),
        (Centred, False),
        (Expanded, False),
        (Twice, False),
        (AsArray, False),
    ],
)
def test_networks_that_padding_would_change_are_trained_alone(kind, together):
    own = Optimisation("sgd", 0.1, momentum=0.9, batch_size=8)
    alone, batch = [*clients(own=own, build=with_layer(kind))], [*clients(own=own, build=with_layer(kind))]
    verification.VERIFIED.clear()
    results, left = trained(batch)
    assert left == (0 if together else len(CLIENTS))
    assert kind is not Expanded or None in verification.VERIFIED.values(), "each round would try again"
    for mine, other in zip(results, trained(alone, OneByOne())[0], strict=True):
        assert mine[:2] == pytest.approx(other[:2], rel=1e-9)
    torch.testing.assert_close(states(batch), states(alone), rtol=1e-9, atol=1e-12)
    assert all(torch.equal(a.generator.get_state(), b.generator.get_state()) for a, b in zip(alone, batch, strict=True))


class Text(nn.Module):
    """A network of 12 word numbers, which attend to each other."""

    def __init__(self, outputs):
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, inputs):
        return self.head(self.attention(self.words(inputs))[:, -1])


class Padded(Text):
    """A network of an embedding that does not train the row of word 0."""

    def __init__(self, outputs):
        super().__init__(outputs)
        self.words = nn.Embedding(9, 8, padding_idx=0)


class PaddedByFunction(Text):
    """The same, which no attribute says."""

    def forward(self, inputs):
        return self.head(F.embedding(inputs, self.words.weight, padding_idx=0).sum(1))


class Images(nn.Module):
    """A network with normalisation of single examples and all kinds of dropout, as modules and as functions."""

    def __init__(self, outputs):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Dropout2d(0.3), nn.InstanceNorm2d(4)
        )
        self.middle = nn.Sequential(nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, outputs)

    def forward(self, inputs):
        return self.head(F.dropout(self.middle(self.body(inputs)), 0.1, self.training))


@pytest.mark.parametrize(("build", "left"), [(Text, 0), (Images, 0), (Padded, 4), (PaddedByFunction, 4)])
def test_layers_and_dropout_compute_in_a_batch_what_they_compute_alone(build, left):
    def group():
        for client in clients(build=build):
            torch.manual_seed(7)
            shape = (len(client.examples), 12)
            texts = issubclass(build, Text)
            inputs = torch.randint(9, shape) if texts else torch.rand(shape[0], 1, 3, 3).double()
            examples = Examples(inputs, client.examples.labels)
            phase = replace(client.phase, terms=())
            yield replace(client, phase=phase, examples=examples, prepare=lambda inputs, generator: inputs)

    alone, batch = [*group()], [*group()]
    OneByOne().train(alone)
    counted = Counted()
    Batches(counted).train(batch)
    assert counted.count == left
    torch.testing.assert_close(states(batch), states(alone), rtol=1e-9, atol=1e-12)


def test_a_batch_augments_as_each_client_alone():
    def noisy(inputs, generator=None):
        return inputs + torch.rand(inputs.shape, generator=generator)

    alone, batch = [
        [replace(client, prepare=noisy, augments=True, phase=replace(client.phase, terms=())) for client in clients()]
        for _ in range(2)
    ]
    for each in (*alone, *batch):
        each.model.float()
    OneByOne().train(alone)
    counted = Counted()
    Batches(counted).train(batch)
    assert counted.count == 0
    torch.testing.assert_close(states(batch), states(alone), rtol=1e-4, atol=1e-6)
    assert all(torch.equal(a.generator.get_state(), b.generator.get_state()) for a, b in zip(alone, batch, strict=True))


class Drawing(nn.Linear):
    """A layer that draws random numbers by itself, or whose attribute is not that of others, or changes."""

    def __init__(self, size, kind, client):
        super().__init__(size, size)
        self.kind = kind
        self.factor = client if kind == "other" else 1
        self.source = torch.Generator().manual_seed(3) if kind == "generator" else None
        self.apply = (lambda values: values * client) if kind == "closure" else None
        self.calls = 0

    def forward(self, inputs):
        values = super().forward(inputs) * self.factor
        if self.kind == "rand":
            values = values * torch.rand(values.shape[-1:])
        if self.kind == "generator":
            values = values * torch.rand(values.shape[-1:], generator=self.source)
        if self.kind == "closure":
            values = self.apply(values)
        if self.kind == "counts":
            self.calls += 1
            values = values * self.calls
        if self.kind == "begins to count":
            self.begun = getattr(self, "begun", 0) + 1
            values = values * self.begun
            self.kept = torch.zeros(10_000)  # as some networks keep representations; too large to be compared
        return values


@pytest.mark.parametrize("kind", ["rand", "generator", "other", "closure", "counts", "begins to count"])
def test_networks_whose_python_code_differs_or_draws_are_trained_alone(kind):
    def group():
        for client, each in enumerate(clients()):
            each.model.insert(3, Drawing(12, kind, client).double())
            yield replace(each, phase=replace(each.phase, terms=()))

    alone, batch = [*group()], [*group()]
    OneByOne().train(alone)
    counted = Counted()
    Batches(counted).train(batch)
    assert counted.count == len(CLIENTS)
    assert all(map(torch.equal, states(batch), states(alone)))


def test_networks_with_other_frozen_parts_are_in_no_batch():
    alone, batch = [*clients()], [*clients()]
    for each in (alone[1], batch[1]):
        each.model[0].requires_grad_(False)
    results, left = trained(batch)
    assert left == 1
    for mine, other in zip(results, trained(alone, OneByOne())[0], strict=True):
        assert mine[:2] == pytest.approx(other[:2], rel=1e-9)
    torch.testing.assert_close(states(batch), states(alone), rtol=1e-9, atol=1e-12)


def test_a_client_that_diverges_fails_alone():
    alone, batch = [*clients(spoilt=2)], [*clients(spoilt=2)]
    results, left = trained(batch)
    expected = trained(alone, OneByOne())[0]
    assert left == 0
    assert [isinstance(result, str) for result in results] == [False, False, True, False]
    assert results[2] == expected[2]
    assert results[2].startswith("ModelError(")
    torch.testing.assert_close(states(batch), states(alone), rtol=1e-9, atol=1e-12, equal_nan=True)


def late(step):
    """A loss term that fails after some clients have taken their last step."""
    return step.inputs.sum().item() if step.number > 6 else None


@pytest.mark.parametrize("where", ["prepare", "term"])
def test_an_exception_in_a_batch_leaves_all_clients_alone(where):
    def fail(inputs, generator=None):
        raise ZeroDivisionError

    alone, batch = [*clients()], [*clients()]
    if where == "prepare":
        alone[1], batch[1] = (replace(group[1], prepare=fail) for group in (alone, batch))
    else:
        term = Term(late, weighted=True)
        alone, batch = (
            [replace(each, phase=replace(each.phase, terms=(*each.phase.terms, term))) for each in group]
            for group in (alone, batch)
        )
    results, left = trained(batch)
    assert left == len(CLIENTS)
    assert results == trained(alone, OneByOne())[0]
    assert (results[1] == "ZeroDivisionError()") == (where == "prepare")
    assert all(map(torch.equal, states(batch), states(alone)))


def test_networks_that_mix_examples_are_evaluated_alone():
    build = with_layer(partial(nn.BatchNorm1d, 4, track_running_stats=False))
    alone = Counted()
    Batches(alone).evaluate(
        [Evaluation(c.model, c.examples, c.task, plainly, c.model, 0) for c in clients(build=build)]
    )
    assert alone.count == len(CLIENTS)


@pytest.mark.parametrize("task", LABELS)
def test_evaluation_in_a_batch(task):
    alone = Counted()
    evaluations = [Evaluation(c.model, c.examples, c.task, plainly, c.model, 0) for c in clients(task)]
    results = Batches(alone).evaluate(evaluations)
    assert alone.count == 1, "the sizes of three clients are alike"
    for mine, other in zip(results, OneByOne().evaluate(evaluations), strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=1e-12)
        for name, metric in other.metrics.items():
            assert mine.metrics[name].values == pytest.approx(metric.values)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_networks_whose_hooks_set_weights_are_evaluated_alone():
    """A hook that computes a weight in a forward pass leaves no tensor of a batch behind."""
    examples = Examples(torch.rand(9, 4).double(), torch.arange(9) % 3)
    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(nn.utils.weight_norm(nn.Linear(4, 3).double()))
        with torch.no_grad():
            networks[-1](examples.inputs)
    evaluations = [Evaluation(each, examples, Task("classification"), plainly) for each in networks]
    scores = [score.loss for score in Batches().evaluate(evaluations)]
    assert all(each.weight.isfinite().all() for each in networks)
    assert scores == [score.loss for score in OneByOne().evaluate(evaluations)]


@pytest.mark.parametrize(("gap", "equal"), [(1e-5, True), (1e-2, False)])
def test_a_float32_network_of_a_method_rounds_what_a_float64_network_computes(gap, equal, monkeypatch):
    monkeypatch.setattr(verification, "VERIFIED", {})
    values = [torch.ones(3, dtype=torch.float64), torch.ones(3)]

    def verified():
        verification.verify(
            "kind", nn.Linear(2, 2), 3, lambda _: values, lambda _: [(1 + gap) * each for each in values]
        )

    if equal:
        verified()
    else:
        with pytest.raises(ModelError, match="other outputs or gradients than a network alone"):
            verified()


def unweighted(step):
    """A loss term that records a mean over the padding of a mini-batch, too."""
    return 0.1 * step.mean(step.outputs.square().mean(1)), {"apart": step.outputs.square().mean()}


def test_scalars_of_a_batch_are_verified():
    group = [replace(each, phase=replace(each.phase, terms=(Term(unweighted, weighted=True),))) for each in clients()]
    assert trained(group)[1] == len(CLIENTS)


def test_networks_in_half_precision_are_in_no_batch():
    """Their rounding is larger than what tells a wrong result from a right one."""

    def group():
        for training in clients():
            plain = replace(training.phase, terms=())
            half = replace(training, phase=plain, prepare=lambda inputs, _: inputs.bfloat16())
            yield replace(half, model=training.model.bfloat16())

    alone = Counted()
    assert all(isinstance(done, Trained) for done in Batches(alone).train([*group()]))
    assert alone.count == len(CLIENTS)
