"""Training and evaluation of several clients' networks together, as one batch of networks, by `torch.func.vmap`.

    results = Batches().train([Training(...), ...])

One forward pass, one backward pass and one step of an optimiser train all networks of a batch: losses are summed over
clients, and optimisers work elementwise. Mini-batches are padded to the same size by examples of weight 0, so networks
that mix examples or change buffers, as BatchNorm does, and networks with tied weights are trained alone.
"""

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.models.copies import storage_place
from fedhet.models.representation import RandomStream, isolated
from fedhet.tasks import Score, Task
from fedhet.training.backends import Backend, OneByOne, Scored, attempt
from fedhet.training.evaluation import Evaluation, forward
from fedhet.training.phases import Step, Term, Trained
from fedhet.training.training import Recorded, Training, forget_gradients, loss_of, mini_batches, only_trained, record
from fedhet.utils.text import log

MOST = 512  # largest number of test examples of a client whose network is evaluated together with other networks

R = TypeVar("R")
V = TypeVar("V")


class Batches:
    """The backend that computes networks of equal architectures and settings as one batch.

    Networks that match no other, or whose batch raises an exception, are computed by the backend `alone`.
    """

    def __init__(self, alone: Backend | None = None) -> None:
        self._alone = alone or OneByOne()

    def train(self, trainings: Sequence[Training]) -> list[Trained | BaseException]:
        """Train networks in batches (see `Backend.train`)."""
        return _by_kind(trainings, _training_kind, _train, self._alone.train)

    def evaluate(self, evaluations: Sequence[Evaluation]) -> list[Scored | BaseException | None]:
        """Evaluate networks in batches (see `Backend.evaluate`)."""
        return _by_kind(evaluations, _evaluation_kind, _evaluate, self._alone.evaluate)


def _by_kind(
    values: Sequence[V],
    kind_of: Callable[[V], Hashable],
    together: Callable[[Sequence[V]], Sequence[R]],
    alone: Callable[[Sequence[V]], Sequence[R]],
) -> list[R]:
    """Return results in order: those of one kind by `together`; by `alone` if this fails, and those of other values."""
    places: dict[Hashable, list[int]] = {}
    for place, value in enumerate(values if len(values) > 1 else ()):
        places.setdefault(kind_of(value), []).append(place)
    results: dict[int, R] = {}
    for kind, group in places.items():
        if kind is None or len(group) == 1:
            continue
        try:
            results |= zip(group, together([values[place] for place in group]), strict=True)
        except Exception as error:  # whatever it was, each client then finds out whether it is its own
            log.info("some clients are trained one by one: %s", error)
    rest = [place for place in range(len(values)) if place not in results]
    results |= zip(rest, alone([values[place] for place in rest]), strict=True)
    return [results[place] for place in range(len(values))]


def _kind_of(model: nn.Module, examples: Examples, task: Task) -> tuple[Any, ...] | None:
    inputs, labels = examples.inputs, examples.labels
    if type(inputs) is not Tensor or not len(inputs) or not task.plain or task.outputs.places != "one":
        return None
    if task.outputs.joint:
        return None
    shapes = (array.shape for array in arrays_of(model))
    return type(model), *shapes, inputs.shape[1:], inputs.dtype, labels.shape[1:], labels.dtype


def _training_kind(training: Training) -> tuple[Any, ...] | None:
    """Return a key that is equal for phases that can be trained together; None if one must be trained alone."""
    phase = training.phase
    optimisation = phase.optimisation
    terms = [term for term in phase.terms if isinstance(term, Term) and term.weighted]
    if training.alone or training.privacy or training.order or len(terms) < len(phase.terms):
        return None
    if phase.module or optimisation.bf16 or optimisation.schedule:
        return None
    data = _kind_of(training.model, training.rows, training.task)
    if data is None:
        return None
    constants = (item for term in terms for item in term.constants.items() if isinstance(item[1], int | float))
    trained = tuple(
        name
        for name, parameter in training.model.named_parameters()
        if parameter.requires_grad and (phase.trains is None or phase.trains(name))
    )
    functions = (term.function for term in terms)
    return optimisation, phase.task_weight, *phase.captures, *functions, *constants, trained, data


def _evaluation_kind(evaluation: Evaluation) -> tuple[Any, ...] | None:
    """Return a key that is equal for evaluations that can be computed together; None if one must run alone."""
    model = evaluation.predict
    if not isinstance(model, nn.Module) or len(evaluation.examples) > MOST:
        return None
    data = _kind_of(model, evaluation.examples, evaluation.task)
    return data and (data, getattr(model, "site", ()), len(evaluation.examples).bit_length())


def check_that_examples_are_separate(model: nn.Module, inputs: Tensor) -> None:
    """Raise a ModelError if a network in its current mode mixes examples or changes its arrays, or has tied arrays.

    Padding would change its outputs, or the arrays it changes, such as running statistics; a batch would train tied
    arrays as two. `inputs` are some transformed examples; neither the network nor random generators are changed.
    """
    if len({storage_place(array) for array in arrays_of(model)}) < len(arrays_of(model)):
        raise ModelError("the network has tied arrays")
    with isolated(model, RandomStream(0)), torch.no_grad():
        before = arrays_of(model)
        versions = [array._version for array in before]
        outputs = forward(model, inputs)[0]
        padded = forward(model, torch.cat([inputs, inputs[:1], inputs[:1]]))[0]
        after = arrays_of(model)
        if not all(map(operator.is_, before, after)) or versions != [array._version for array in after]:
            raise ModelError("the network changes its buffers in a forward pass")
    if not torch.allclose(outputs, padded[: len(outputs)], rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ModelError("the network's outputs for an example depend on other examples")


def _evaluate(group: Sequence[Evaluation]) -> list[Score]:
    models: list[Any] = [evaluation.predict for evaluation in group]
    model = models[0].eval()
    firsts = [evaluation.transform(evaluation.examples.inputs[:1]) for evaluation in group]
    check_that_examples_are_separate(model, torch.cat(firsts))
    with torch.no_grad():
        inputs = [evaluation.transform(evaluation.examples.inputs[:]) for evaluation in group]
        stacked = [torch.stack(arrays) for arrays in zip(*map(arrays_of, models), strict=True)]
        outputs = batched(model, model)(stacked, pad_sequence(inputs, batch_first=True))
        return [
            evaluation.task.evaluate(rows[: len(evaluation.examples)], evaluation.examples.labels)
            for evaluation, rows in zip(group, outputs, strict=True)
        ]


def _train(group: Sequence[Training]) -> list[Trained | BaseException]:
    """Train networks of one kind; raise an exception before a network or a random generator has changed."""
    generators = [training.generator.clone_state() for training in group]
    drawn = [
        [*mini_batches(training.model, training.phase, training.rows, generator, None)[0]]
        for training, generator in zip(group, generators, strict=True)
    ]
    # Clients with more steps come first, so that those that still train are the first ones.
    order = sorted(range(len(group)), key=lambda place: -len(drawn[place]))
    steps = _Steps([group[place] for place in order], [drawn[place] for place in order])
    norms = torch.stack([array.flatten(1).norm(dim=1) for array in steps.trained]).amax(0).tolist()
    losses = pad_sequence(steps.losses).tolist()
    results: dict[int, Trained | BaseException] = {}
    for index, place in enumerate(order):
        training = group[place]
        training.generator.set_state(generators[place].get_state())
        torch._foreach_copy_(steps.arrays[index], [array[index] for array in steps.trained])
        sizes = [len(rows) for rows in drawn[place]]
        outcome = (losses[index][: len(sizes)], sizes, norms[index], steps.further[index], steps.recorded[index])
        results[place] = attempt(training.outcome, *outcome)
    return [results[place] for place in range(len(group))]


class _Steps:
    """The steps of networks of one kind, in descending order of their numbers of mini-batches `drawn`.

    Attributes:
        trained: the trained arrays after the last step, each stacked over networks; they share no memory with these.
        arrays: each network's arrays of the same order.
        losses: the networks' losses in each step; fewer in later steps, in which only the first networks train.
        recorded, further: for each network, scalars that loss terms record, and the number of examples that they pass.
    """

    def __init__(self, group: Sequence[Training], drawn: Sequence[Sequence[Tensor]]) -> None:
        model = group[0].model.train()
        phase = group[0].phase
        self.losses: list[Tensor] = []
        self.recorded = [dict(training.before.recorded) for training in group]
        self.further = [0] * len(group)
        self._drawn = drawn
        with only_trained(model, phase.trains):
            firsts = [training.prepare(training.rows.inputs[:1], None) for training in group]
            check_that_examples_are_separate(model, torch.cat(firsts))
            live = [isinstance(array, nn.Parameter) and array.requires_grad for array in arrays_of(model)]
            # Weights of linear layers are transposed in training, so that gradients are contiguous and not copied.
            layers = {id(module._parameters) for module in model.modules() if type(module) is nn.Linear}
            linear = [id(arrays) in layers and key == "weight" for arrays, key in _places_of(model)]
            networks = [transposed(arrays_of(training.model), linear) for training in group]
            self.arrays = [[array.detach() for array in compress(network, live)] for network in networks]
            state = [torch.stack(arrays).detach() for arrays in zip(*networks, strict=True)]
            self.trained = [*compress(state, live)]
            current = [array.detach().requires_grad_(trains) for array, trains in zip(state, live, strict=True)]
            leaves = [*compress(current, live)]
            optimizer = phase.optimisation.build(model, [*compress(arrays_of(model), live)], leaves)
            draws = any(isinstance(term, Term) and term.draw for term in phase.terms)
            terms: list[Term] = []
            for number, batch in enumerate(_padded(group, drawn, leaves[0].dtype)):
                active = len(batch[0])
                if active < len(leaves[0]):
                    current = first_of(active, current, optimizer)
                    leaves = [*compress(current, live)]
                    terms = []
                if not terms or draws:
                    terms = _terms(group[:active], number, batch[3])
                self._backward(group[0], number, terms, transposed(current, linear), batch)
                if phase.optimisation.clip_gradients:
                    clip([leaf.grad for leaf in leaves if leaf.grad is not None], phase.optimisation.clip_gradients)
                optimizer.step()
                forget_gradients(leaves)

    def _backward(
        self, first: Training, number: int, terms: Sequence[Term], state: list[Tensor], batch: tuple[Tensor, ...]
    ) -> None:
        constants = tuple(term.constants for term in terms)
        dims = tree_map(lambda constant: 0 if isinstance(constant, Tensor) else None, constants)
        passed: list[tuple[int, int]] = []
        of_one = _loss(first, number, terms, passed)
        loss, values = batched(first.model, of_one, (dims, 0, 0, 0, 0))(state, constants, *batch)
        loss.sum().backward()
        self.losses.append(loss.detach())
        further, again = passed[0]
        for place in range(len(loss)):
            self.further[place] += further + again * len(self._drawn[place][number])
            record(self.recorded[place], {name: value[place] for name, value in values.items()})


def _padded(
    group: Sequence[Training], drawn: Sequence[Sequence[Tensor]], dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield for each step inputs, labels, row numbers and weights of the active clients' examples, padded."""
    inputs = torch.cat([training.prepare(training.rows.inputs[:], None) for training in group])
    labels = torch.cat([training.rows.labels for training in group])
    counts = [0, *[len(training.rows) for training in group][:-1]]
    starts = torch.tensor(counts, device=labels.device).cumsum(0)[:, None, None]
    batches = [*chain(*drawn)]
    lengths = [len(steps) for steps in drawn]
    # (clients, steps, examples) and (clients, steps)
    rows = pad_sequence([*pad_sequence(batches, batch_first=True).split(lengths)], batch_first=True)
    sizes = pad_sequence([*torch.tensor([len(batch) for batch in batches]).split(lengths)], batch_first=True)
    weights = ((torch.arange(rows.shape[2]) < sizes[..., None]).to(dtype) / sizes[..., None]).to(labels.device)
    places = rows + starts
    for step, most in enumerate(sizes.amax(0).tolist()):
        here = slice(sum(length > step for length in lengths)), step, slice(most)
        chosen, shape = places[here].flatten(), places[here].shape
        arrays = (array.index_select(0, chosen).unflatten(0, shape) for array in (inputs, labels))
        yield *arrays, rows[here], weights[here]


def _loss(client: Training, number: int, terms: Sequence[Term], passed: list[tuple[int, int]]) -> Callable[..., Any]:
    """Return a function of the constants of loss `terms` and a mini-batch that returns loss and values to record.

    It appends `further` and `again` of step `number` to `passed` (see `Step`).
    """

    def of_one(constants: Sequence[Mapping[str, Any]], inputs: Tensor, labels: Tensor, rows: Tensor, w: Tensor) -> Any:
        model = client.model
        recorded: Recorded = {}
        outputs, captured = forward(model, inputs, client.phase.captures)
        parameters = dict(model.named_parameters())
        step = Step(number, model, parameters, inputs, labels, rows, outputs, captured, task=client.task, weights=w)
        filled = [Term(term.function, **own) for term, own in zip(terms, constants, strict=True)]
        loss = loss_of(step, replace(client.phase, terms=tuple(filled)), recorded)
        passed.append((step.further, step.again))
        return loss, {name: value for name, (value, _) in recorded.items()}

    return of_one


def _terms(group: Sequence[Training], number: int, weights: Tensor) -> list[Term]:
    """Return the loss terms of a step, with constants stacked over clients."""
    counts = (weights > 0).sum(1).tolist()
    terms: list[Term] = []
    for several in zip(*(training.phase.terms for training in group), strict=True):
        first: Any = several[0]
        constants = [term.constants for term in several]
        if first.draw:
            drawn = [term.draw(number, count) for term, count in zip(several, counts, strict=True)]
            if all(arguments is None for arguments in drawn):
                continue
            constants = [{**fixed, **arguments} for fixed, arguments in zip(constants, drawn, strict=True)]
        terms.append(Term(first.function, draw=first.draw, captures=first.captures, **stack(constants)))
    return terms


# ---- arrays of several networks, stacked along a new first axis: (clients, ...)

_places: WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], str]]] = WeakKeyDictionary()


def _places_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    if model not in _places:  # finding them takes as long as a small network's forward pass
        arrays = (arrays for module in model.modules() for arrays in (module._parameters, module._buffers))
        _places[model] = [(named, key) for named in arrays for key, array in named.items() if array is not None]
    return _places[model]


def batched(model: nn.Module, function: Callable[..., Any], dims: Sequence[Any] = (0,)) -> Callable[..., Any]:
    """Return `function`, which calls `model`, vectorised over several networks by `torch.func.vmap`.

    The result has a new first argument: the list of the networks' arrays (see `arrays_of`), each stacked along a new
    first axis. `dims` are the `in_dims` of the other arguments.
    """
    places = _places_of(model)
    before = [arrays[key] for arrays, key in places]

    def of_one(state: Sequence[Tensor], *args: Any) -> Any:
        try:
            for (arrays, key), array in zip(places, state, strict=True):
                arrays[key] = array
            return function(*args)
        finally:
            for (arrays, key), array in zip(places, before, strict=True):
                arrays[key] = array

    return vmap(of_one, in_dims=(0, *dims), randomness="error")


def arrays_of(model: nn.Module) -> list[Tensor]:
    """Return a network's parameters and buffers as a list; an array that two modules share is listed twice."""
    return [arrays[key] for arrays, key in _places_of(model)]


def transposed(arrays: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    """Return the list `arrays`, with the last two axes exchanged in arrays for which `chosen` is True."""
    return [array.mT if exchanged else array for array, exchanged in zip(arrays, chosen, strict=True)]


def stack(values: Sequence[Any]) -> Any:
    """Stack the tensors of nested containers of equal structure, such as dicts; keep the first one's other entries."""
    return tree_map(lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *values)


def clip(gradients: Sequence[Tensor], most: float) -> None:
    """Scale `gradients` (clients, ...) in place so that each client's total norm is at most `most`."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


def first_of(count: int, arrays: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return views of the first `count` clients' stacked `arrays`, which the optimizer trains from now on."""
    chosen = {array: array.detach()[:count].requires_grad_(array.requires_grad) for array in arrays}
    for group in optimizer.param_groups:
        for array in group["params"]:
            optimizer.state[chosen[array]] = {
                name: value[:count] if isinstance(value, Tensor) and value.ndim else value
                for name, value in optimizer.state.pop(array, {}).items()
            }
        group["params"] = [chosen[array] for array in group["params"]]
    return [*chosen.values()]
