"""Training and evaluation of several clients' networks together, as one batch of networks, by `torch.func.vmap`.

    work = Training(...)
    compute_in_batches([work, ...])  # stacks the parameters of networks with equal architectures and settings
    trained = work.result()     # trains this network alone if it was in no batch, or if its batch raised an exception

One forward pass, one backward pass and one step of an optimiser train all networks of a batch: losses are summed over
clients, and optimisers work elementwise. Mini-batches are padded to the same size by examples of weight 0, so networks
that mix examples or change buffers, as BatchNorm does, and networks with tied weights are trained alone.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import Any
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
from fedhet.tasks import Task
from fedhet.training.evaluation import Evaluation, forward
from fedhet.training.phases import Step, Term
from fedhet.training.training import Training, loss_of, mini_batches, only_trained, record
from fedhet.utils.text import log

MOST = 512  # largest number of test examples of a client whose network is evaluated together with other networks
Computation = Training | Evaluation


def _kind_of(model: nn.Module, examples: Examples, task: Task) -> tuple[Any, ...] | None:
    inputs, labels = examples.inputs, examples.labels
    if type(inputs) is not Tensor or not task.plain or task.outputs.places != "one":
        return None
    shapes = (array.shape for array in arrays_of(model))
    return type(model), *shapes, inputs.shape[1:], inputs.dtype, labels.shape[1:], labels.dtype


def _training_kind(work: Training) -> tuple[Any, ...] | None:
    """Return a key that is equal for phases that can be trained together; None if `work` must be trained alone."""
    phase, own = work.phase, work.phase.optimisation
    terms = [term for term in phase.terms if isinstance(term, Term) and term.weighted]
    alone = work.alone or work.privacy or work.order or phase.module or own.bf16 or own.schedule
    if alone or len(terms) < len(phase.terms) or not (data := _kind_of(work.model, work.rows, work.task)):
        return None
    constants = (each for term in terms for each in term.constants.items() if isinstance(each[1], int | float))
    chosen = tuple(
        name
        for name, parameter in work.model.named_parameters()
        if parameter.requires_grad and (phase.trains is None or phase.trains(name))
    )
    return own, phase.task_weight, *phase.captures, *(term.function for term in terms), *constants, chosen, data


def _evaluation_kind(work: Evaluation) -> tuple[Any, ...] | None:
    """Return a key that is equal for evaluations that can be computed together; None if `work` must run alone."""
    if not isinstance(work.predict, nn.Module) or not 0 < len(work.examples) <= MOST:
        return None
    data = _kind_of(work.predict, work.examples, work.task)
    return data and (data, getattr(work.predict, "site", ()), len(work.examples).bit_length())


def compute_in_batches(computations: Sequence[Computation]) -> None:
    """Train or evaluate networks of equal architectures and settings together; `result` then returns each result.

    Each of `computations` is a `Training` or an `Evaluation`. One that matches no other, or whose joint
    computation raises an exception, is computed alone when `result` is called.
    """
    groups: dict[Any, list[Any]] = {}
    for each in computations if len(computations) > 1 else ():
        kind = _training_kind(each) if isinstance(each, Training) else _evaluation_kind(each)
        groups.setdefault((type(each), kind), []).append(each)
    for (_, kind), group in groups.items():
        states = [each.generator.get_state() for each in group if isinstance(each, Training)]
        try:
            if kind is not None and len(group) > 1:
                (_train if states else _evaluate)(group)
        except Exception as error:  # whatever it was, each client then finds out whether it is its own
            log.info("some clients are trained one by one: %s", error)
            for each in group:
                each.found = None
            for each, state in zip(group, states, strict=False):
                each.generator.set_state(state)


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


def _evaluate(group: Sequence[Evaluation]) -> None:
    models: list[Any] = [each.predict for each in group]
    model, sizes = models[0].eval(), [len(each.examples) for each in group]
    check_that_examples_are_separate(model, torch.cat([each.transform(each.examples.inputs[:1]) for each in group]))
    with torch.no_grad():
        padded = pad_sequence([each.transform(each.examples.inputs[:]) for each in group], batch_first=True)
        held = map(arrays_of, models)
        outputs = batched(model, model)([torch.stack(each) for each in zip(*held, strict=True)], padded)
        for each, values, size in zip(group, outputs, sizes, strict=True):
            each.found = each.task.evaluate(values[:size], each.examples.labels)


def _train(group: Sequence[Training]) -> None:
    drawn = [[*mini_batches(each.model, each.phase, each.rows, each.generator, None)[0]] for each in group]
    # Clients with more steps come first, so that those that still train are the first ones.
    order = sorted((place for place in range(len(group)) if drawn[place]), key=lambda place: -len(drawn[place]))
    group, drawn = [group[place] for place in order], [drawn[place] for place in order]
    model, phase = group[0].model.train(), group[0].phase
    losses, recorded = list[Tensor](), [dict(each.before.recorded) for each in group]
    further, terms = [0] * len(group), list[Term]()
    draws = any(isinstance(term, Term) and term.draw for term in phase.terms)
    with only_trained(model, phase.trains):
        check_that_examples_are_separate(model, torch.cat([each.prepare(each.rows.inputs[:1], None) for each in group]))
        live = [isinstance(each, nn.Parameter) and each.requires_grad for each in arrays_of(model)]
        # Weights of linear layers are transposed in training, so that gradients are contiguous and not copied.
        layers = {id(module._parameters) for module in model.modules() if type(module) is nn.Linear}
        linear = [id(arrays) in layers and key == "weight" for arrays, key in _places_of(model)]
        held = [transposed(arrays_of(each.model), linear) for each in group]
        state = [torch.stack(each).detach() for each in zip(*held, strict=True)]
        now = [each.detach().requires_grad_(trains) for each, trains in zip(state, live, strict=True)]
        leaves = [*compress(now, live)]
        optimizer = phase.optimisation.build(model, [*compress(arrays_of(model), live)], leaves)
        for number, batch in enumerate(_padded(group, drawn, leaves[0].dtype)):
            active = len(batch[0])
            if active < len(leaves[0]):
                now, terms = first_of(active, now, optimizer), []
                leaves = [*compress(now, live)]
            if not terms or draws:
                terms = _terms(group[:active], number, batch[3])
            constants, passed = tuple(term.constants for term in terms), list[int]()
            of_one = _loss(group[0], number, terms, passed)
            dims = tree_map(lambda each: 0 if isinstance(each, Tensor) else None, constants)
            run = batched(model, of_one, (dims, 0, 0, 0, 0))
            loss, values = run(transposed(now, linear), constants, *batch)
            loss.sum().backward()
            if phase.optimisation.clip_gradients:
                clip([each.grad for each in leaves if each.grad is not None], phase.optimisation.clip_gradients)
            optimizer.step()
            for each in leaves:
                each.grad = None
            losses.append(loss.detach())
            for place in range(active):
                further[place] += passed[0]
                record(recorded[place], {name: each[place] for name, each in values.items()})
    trained = [*compress(state, live)]
    for place, arrays in enumerate(held):  # only now, since after an exception each client is trained alone
        torch._foreach_copy_([each.detach() for each in compress(arrays, live)], [each[place] for each in trained])
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in trained]).amax(0).tolist()
    for place, (client, values) in enumerate(zip(group, pad_sequence(losses).tolist(), strict=True)):
        sizes = [len(rows) for rows in drawn[place]]
        results = (values[: len(sizes)], sizes, norms[place], further[place], recorded[place])
        try:
            client.found = client.outcome(*results)
        except ModelError as error:
            client.found = error


def _padded(
    group: Sequence[Training], drawn: Sequence[Sequence[Tensor]], dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    inputs = torch.cat([each.prepare(each.rows.inputs[:], None) for each in group])
    labels = torch.cat([each.rows.labels for each in group])
    starts = torch.tensor([0, *[len(each.rows) for each in group][:-1]], device=labels.device).cumsum(0)[:, None, None]
    batches, lengths = [*chain(*drawn)], [len(each) for each in drawn]
    # (clients, steps, examples) and (clients, steps)
    rows = pad_sequence([*pad_sequence(batches, batch_first=True).split(lengths)], batch_first=True)
    sizes = pad_sequence([*torch.tensor([len(each) for each in batches]).split(lengths)], batch_first=True)
    weights = ((torch.arange(rows.shape[2]) < sizes[..., None]).to(dtype) / sizes[..., None]).to(labels.device)
    places = rows + starts
    for step, most in enumerate(sizes.amax(0).tolist()):
        here = slice(sum(length > step for length in lengths)), step, slice(most)
        chosen, shape = places[here].flatten(), places[here].shape
        arrays = (each.index_select(0, chosen).unflatten(0, shape) for each in (inputs, labels))
        yield *arrays, rows[here], weights[here]


def _loss(client: Training, number: int, terms: Sequence[Term], passed: list[int]) -> Callable[..., Any]:
    """Return a function of the constants of loss `terms` and a mini-batch that returns loss and values to record.

    It appends to `passed` how many examples terms pass through the network beside the mini-batch of step `number`.
    """

    def of_one(constants: Sequence[Mapping[str, Any]], inputs: Tensor, labels: Tensor, rows: Tensor, w: Tensor) -> Any:
        model, recorded = client.model, dict[str, tuple[Tensor, int]]()
        outputs, captured = forward(model, inputs, client.phase.captures)
        parameters = dict(model.named_parameters())
        step = Step(number, model, parameters, inputs, labels, rows, outputs, captured, task=client.task, weights=w)
        filled = [Term(term.function, **own) for term, own in zip(terms, constants, strict=True)]
        loss = loss_of(step, replace(client.phase, terms=tuple(filled)), recorded)
        passed.append(step.further)
        return loss, {name: value for name, (value, _) in recorded.items()}

    return of_one


def _terms(group: Sequence[Training], number: int, weights: Tensor) -> list[Term]:
    counts, terms = (weights > 0).sum(1).tolist(), []
    for several in zip(*(each.phase.terms for each in group), strict=True):
        first: Any = several[0]
        constants = [term.constants for term in several]
        if first.draw:
            drawn = [term.draw(number, count) for term, count in zip(several, counts, strict=True)]
            if all(each is None for each in drawn):
                continue
            constants = [{**own, **each} for own, each in zip(constants, drawn, strict=True)]
        terms.append(Term(first.function, draw=first.draw, captures=first.captures, **stack(constants)))
    return terms


# ---- arrays of several networks, stacked along a new first axis: (clients, ...)

_places: WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], str]]] = WeakKeyDictionary()


def _places_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    if model not in _places:  # finding them takes as long as a small network's forward pass
        arrays = (arrays for module in model.modules() for arrays in (module._parameters, module._buffers))
        _places[model] = [(each, key) for each in arrays for key, array in each.items() if array is not None]
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
            for (arrays, key), each in zip(places, state, strict=True):
                arrays[key] = each
            return function(*args)
        finally:
            for (arrays, key), each in zip(places, before, strict=True):
                arrays[key] = each

    return vmap(of_one, in_dims=(0, *dims), randomness="error")


def arrays_of(model: nn.Module) -> list[Tensor]:
    """Return a network's parameters and buffers as a list; an array that two modules share is listed twice."""
    return [arrays[key] for arrays, key in _places_of(model)]


def transposed(arrays: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    """Return the list `arrays`, with the last two axes exchanged in arrays for which `chosen` is True."""
    return [each.mT if its else each for each, its in zip(arrays, chosen, strict=True)]


def stack(values: Sequence[Any]) -> Any:
    """Stack the tensors of nested containers of equal structure, such as dicts; keep the first one's other entries."""
    return tree_map(lambda *each: torch.stack(each) if isinstance(each[0], Tensor) else each[0], *values)


def clip(gradients: Sequence[Tensor], most: float) -> None:
    """Scale `gradients` (clients, ...) in place so that each client's total norm is at most `most`."""
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    for each in gradients:
        each.mul_(factors.view(-1, *[1] * (each.ndim - 1)))


def first_of(count: int, arrays: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return views of the first `count` clients' stacked `arrays`, which the optimizer trains from now on."""
    chosen = {each: each.detach()[:count].requires_grad_(each.requires_grad) for each in arrays}
    for group in optimizer.param_groups:
        for each in group["params"]:
            state = optimizer.state.pop(each, {}).items()
            kept = {n: x[:count] if isinstance(x, Tensor) and x.ndim else x for n, x in state}
            optimizer.state[chosen[each]] = kept
        group["params"] = [chosen[each] for each in group["params"]]
    return [*chosen.values()]
