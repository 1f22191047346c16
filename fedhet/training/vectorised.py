"""Training and evaluation of several clients' networks together, as one batch of networks, by `torch.func.vmap`.

    results = Batches().train([Training(...), ...])

One forward pass, one backward pass and one step of an optimiser train all networks of a batch: losses are summed over
clients, and optimisers work elementwise. Mini-batches are padded to the same size by examples of weight 0. Before the
first batch of a kind in a process, one network's loss and gradients are also computed alone; where they differ, as with
layers that mix examples, networks of this kind are trained alone.
"""

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, compress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.models.representation import RandomStream
from fedhet.tasks import Score, Task
from fedhet.training.backends import Backend, OneByOne, Scored, attempt
from fedhet.training.dropout import Draw, masks, replayed
from fedhet.training.evaluation import Evaluation, forward
from fedhet.training.kinds import IncomparableError, Kinds, constants_key
from fedhet.training.phases import Step, Term, Trained
from fedhet.training.stacked import arrays_of, clip, first_of, stack, swapped, transposed
from fedhet.training.training import Recorded, Training, forget_gradients, loss_of, mini_batches, only_trained, record
from fedhet.training.verification import VERIFIED, computing, padded_by_one, verify
from fedhet.utils.text import log

FEW = 512  # largest number of test examples of a client whose network is evaluated together with other networks
MEMORY = 2**30  # largest memory of a batch's transformed examples, in bytes, above which each step transforms its own

Batch = tuple[list[int], Tensor, Tensor, Tensor, Tensor]
"""The numbers of examples of several networks in a step, and their inputs, labels, row numbers and weights, padded."""

R = TypeVar("R")
V = TypeVar("V")


class Batches:
    """The backend that computes networks of equal kinds, such as the same class and settings, as one batch.

    Networks that match no other, or whose batch raises an exception, are computed by the backend `alone`.
    """

    def __init__(self, alone: Backend | None = None) -> None:
        self._alone = alone or OneByOne()
        self._networks: dict[nn.Module, tuple[Kinds, Hashable]] = {}

    def train(self, trainings: Sequence[Training]) -> list[Trained | BaseException]:
        """Train networks in batches (see `Backend.train`)."""
        return _by_kind(trainings, self._training_kind, _train, self._alone.train)

    def evaluate(self, evaluations: Sequence[Evaluation]) -> list[Scored | BaseException | None]:
        """Evaluate networks in batches (see `Backend.evaluate`)."""
        return _by_kind(evaluations, self._evaluation_kind, _evaluate, self._alone.evaluate)

    def _kind_of(self, model: nn.Module, examples: Examples, task: Task) -> tuple[Kinds, tuple[Hashable, ...]]:
        """Return what compares values of a network, and the key of the network and its examples.

        A backend serves one message of each client, so networks are compared once. Raises an `IncomparableError`.
        """
        inputs = examples.inputs
        labels = examples.labels
        separate = task.plain and task.outputs.places == "one" and not task.outputs.joint
        if type(inputs) is not Tensor or not len(inputs) or not separate:
            raise IncomparableError("its examples are no single tensors, or have no losses of their own")
        if model not in self._networks:
            kinds = Kinds(model)
            self._networks[model] = kinds, kinds.network()
        kinds, network = self._networks[model]
        shapes = inputs.shape[1:], inputs.dtype, labels.shape[1:], labels.dtype, labels.device
        return kinds, (network, task.name, *shapes)

    def _training_kind(self, training: Training) -> Hashable:
        """Return a key that is equal for phases that can be trained together; None if one must be trained alone."""
        phase = training.phase
        optimisation = phase.optimisation
        terms = [term for term in phase.terms if isinstance(term, Term) and term.weighted]
        if training.alone or training.privacy or training.order or len(terms) < len(phase.terms):
            return None
        if optimisation.bf16 or optimisation.schedule:
            return None
        model = training.network
        try:
            kinds, data = self._kind_of(model, training.rows, training.task)
            captures = [(name, kinds.of(value)) for name, value in phase.captures.items()]
            of_terms = [(term.function, term.draw is None, constants_key(kinds, term.constants)) for term in terms]
        except IncomparableError as error:
            log.debug("a network is trained alone: %s", error)
            return None
        trained: Sequence[str] = ()
        if phase.trains:
            trained = [name for name, _ in model.named_parameters() if phase.trains(name)]
        return optimisation, phase.task_weight, training.augments, *captures, *of_terms, *trained, data

    def _evaluation_kind(self, evaluation: Evaluation) -> Hashable:
        """Return a key that is equal for evaluations that can be computed together; None if one must run alone."""
        model = evaluation.predict
        if not isinstance(model, nn.Module) or len(evaluation.examples) > FEW:
            return None
        try:
            data = self._kind_of(model, evaluation.examples, evaluation.task)[1]
        except IncomparableError:
            return None
        return "evaluation", data, len(evaluation.examples).bit_length()


_said: set[str] = set()
"""Reasons in this process's log why networks are computed one by one."""


def _by_kind(
    values: Sequence[V],
    kind_of: Callable[[V], Hashable],
    together: Callable[[Sequence[V], Hashable], Sequence[R]],
    alone: Callable[[Sequence[V]], Sequence[R]],
) -> list[R]:
    """Return results in order: those of one kind by `together`; by `alone` if this fails, and those of other values."""
    places: dict[Hashable, list[int]] = {}
    for place, value in enumerate(values if len(values) > 1 else ()):
        places.setdefault(kind_of(value), []).append(place)
    results: dict[int, R] = {}
    for kind, group in places.items():
        if kind is None or len(group) == 1 or VERIFIED.get(kind, ()) is None:
            continue
        try:
            results |= zip(group, together([values[place] for place in group], kind), strict=True)
        except Exception as error:  # whatever it was, each client then finds out whether it is its own
            if str(error) not in _said:  # a network that counts its calls is of another kind in each round
                _said.add(str(error))
                log.info("some clients are computed one by one: %s", error)
    rest = [place for place in range(len(values)) if place not in results]
    results |= zip(rest, alone([values[place] for place in rest]), strict=True)
    return [results[place] for place in range(len(values))]


# ---- evaluation


def _evaluate(group: Sequence[Evaluation], kind: Hashable) -> list[Score]:
    models: list[Any] = [evaluation.predict for evaluation in group]
    model = models[0].eval()
    with torch.no_grad(), computing(kind):
        inputs = pad_sequence([each.transform(each.examples.inputs[:]) for each in group], batch_first=True)
        stacked = [torch.stack(arrays) for arrays in zip(*map(arrays_of, models), strict=True)]

        def of_one(inputs: Tensor, *arrays: Tensor) -> Tensor:
            with swapped(model, arrays):
                return forward(model, inputs)[0]

        function = vmap(of_one, randomness="error")
        if kind not in VERIFIED:
            count = len(group[1].examples)
            rows = padded_by_one(inputs[:, :count])
            second = models[1].eval()
            of_two = [array[:2] for array in stacked]
            verify(
                *(kind, second, count),
                alone=lambda draws: [forward(second, rows[1, :count])[0]],
                together=lambda draws: [function(rows, *of_two)[1, :count]],
            )
        outputs = function(inputs, *stacked)
    return [
        evaluation.task.evaluate(rows[: len(evaluation.examples)], evaluation.examples.labels)
        for evaluation, rows in zip(group, outputs, strict=True)
    ]


# ---- training


def _train(group: Sequence[Training], kind: Hashable) -> list[Trained | BaseException]:
    """Train networks of one kind; raise an exception before a network or a random generator has changed."""
    copies = [replace(training, generator=training.generator.clone_state()) for training in group]
    # In training mode, in which BatchNorm needs two examples in a mini-batch.
    drawn = [mini_batches(each.network.train(), each.phase, each.rows, each.generator, None) for each in copies]
    # Clients with more steps come first, so that those that still train are the first ones.
    order = sorted(range(len(group)), key=lambda place: -drawn[place][1])
    with computing(kind):
        steps = _Steps([copies[place] for place in order], [drawn[place] for place in order], kind)
    norms = torch.stack([array.flatten(1).norm(dim=1) for array in steps.trained]).amax(0).tolist()
    losses = pad_sequence(steps.losses).tolist()
    results: dict[int, Trained | BaseException] = {}
    for index, place in enumerate(order):
        training = group[place]
        training.generator.set_state(copies[place].generator.get_state())
        torch._foreach_copy_(steps.arrays[index], [array[index] for array in steps.trained])
        sizes = [counts[index] for counts in steps.counts if index < len(counts)]
        outcome = (losses[index][: len(sizes)], sizes, norms[index], steps.further[index], steps.recorded[index])
        results[place] = attempt(training.outcome, *outcome)
    return [results[place] for place in range(len(group))]


class _Steps:
    """The steps of networks of one kind, in descending order of their numbers of mini-batches.

    Attributes:
        trained: the trained arrays after the last step, each stacked over networks; they share no memory with these.
        arrays: each network's arrays of the same order.
        losses, counts: for each step, the losses and numbers of examples of the networks that still train.
        recorded, further: for each network, scalars that loss terms record, and the number of examples that they pass.
    """

    def __init__(
        self, group: Sequence[Training], drawn: Sequence[tuple[Iterator[Tensor], int]], kind: Hashable
    ) -> None:
        model = group[0].network.train()
        phase = group[0].phase
        self._kind = kind
        self._group = group
        self.losses: list[Tensor] = []
        self.counts: list[list[int]] = []
        self.recorded = [dict(training.before.recorded) for training in group]
        self.further = [0] * len(group)
        with only_trained(model, phase.trains):
            live = [isinstance(array, nn.Parameter) and array.requires_grad for array in arrays_of(model)]
            # Weights of linear layers are transposed in training, so that gradients are contiguous and not copied.
            weights = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
            linear = [id(array) in weights for array in arrays_of(model)]
            networks = [transposed(arrays_of(training.network), linear) for training in group]
            self.arrays = [[array.detach() for array in compress(network, live)] for network in networks]
            state = [torch.stack(arrays).detach() for arrays in zip(*networks, strict=True)]
            self.trained = [*compress(state, live)]
            current = [array.detach().requires_grad_(trains) for array, trains in zip(state, live, strict=True)]
            leaves = [*compress(current, live)]
            optimizer = phase.optimisation.build(model, [*compress(arrays_of(model), live)], leaves)
            draws = any(isinstance(term, Term) and term.draw for term in phase.terms)
            generators = [torch.Generator().manual_seed(training.seed) for training in group]
            losses: _Losses | None = None
            for number, (counts, *batch) in enumerate(_batches(group, drawn, leaves[0].dtype)):
                active = len(counts)
                if active < len(leaves[0]):
                    current = first_of(active, current, optimizer)
                    leaves = [*compress(current, live)]
                    losses = None
                if losses is None or draws:
                    terms = _terms(group[:active], number, counts)
                    losses = _Losses(group[0], terms, linear)
                if not number and kind not in VERIFIED:
                    self._verify([several[1] for several in terms], losses, current, live, batch, counts[1])
                dropped = masks(VERIFIED[kind] or (), counts, batch[3].shape[1], generators, batch[3].device)
                loss, values = losses(number, current, batch, dropped)
                loss.sum().backward()
                self._note(loss.detach(), counts, values, losses)
                if phase.optimisation.clip_gradients:
                    clip([leaf.grad for leaf in leaves if leaf.grad is not None], phase.optimisation.clip_gradients)
                optimizer.step()
                forget_gradients(leaves)

    def _note(self, loss: Tensor, counts: list[int], values: Mapping[str, Tensor], losses: "_Losses") -> None:
        self.losses.append(loss)
        self.counts.append(counts)
        for place in range(len(loss)):
            self.further[place] += losses.further + losses.again * counts[place]
            record(self.recorded[place], {name: value[place] for name, value in values.items()})

    def _verify(
        self,
        terms: Sequence[Term],
        losses: "_Losses",
        state: list[Tensor],
        live: list[bool],
        batch: Sequence[Tensor],
        count: int,
    ) -> None:
        """Compare the second network's first loss and gradients in a batch with what it computes alone."""
        second = self._group[1]
        model = second.network.train()
        of_two = losses.of_two()
        inputs, labels, rows = (array[1, :count] for array in batch[:3])
        padded = [padded_by_one(array[:, :count]) for array in batch[:3]]
        weights = torch.cat([batch[3].new_full((2, count), 1 / count), batch[3].new_zeros(2, 1)], 1)
        leaves = [array[:2].detach().requires_grad_(array.requires_grad) for array in state]

        def alone(draws: Sequence[Draw]) -> list[Tensor]:
            parameters = [*compress(arrays_of(model), live)]
            outputs, captured = forward(model, inputs, second.phase.captures)
            if draws and any(isinstance(value, RandomStream) for term in terms for value in term.constants.values()):
                VERIFIED[self._kind] = None
                raise ModelError("a loss term passes examples through a network with dropout")
            named = dict(model.named_parameters())
            step = Step(0, model, named, inputs, labels, rows, outputs, captured, task=second.task)
            loss = loss_of(step, replace(second.phase, terms=tuple(terms)), {})
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            return [loss.detach(), *gradients]

        def together(draws: Sequence[Draw]) -> list[Tensor]:
            generators = [torch.Generator().manual_seed(training.seed) for training in self._group[:2]]
            dropped = masks(draws, [count, count], count + 1, generators, inputs.device)
            loss = of_two(0, leaves, (*padded, weights), dropped)[0]
            trained = [*compress(leaves, live)]
            gradients = torch.autograd.grad(loss.sum(), trained, allow_unused=True, materialize_grads=True)
            its = [gradient[1] for gradient in gradients]
            return [loss[1].detach(), *transposed(its, [*compress(losses.linear, live)])]

        with only_trained(model, second.phase.trains), torch.random.fork_rng([]):
            torch.default_generator.manual_seed(second.seed)
            verify(self._kind, model, count, alone, together)


class _Losses:
    """The losses of networks of one kind in a step, as a function of stacked arrays, vectorised by `torch.func.vmap`.

    Args:
        first: the training of one of the networks, whose module computes all of them.
        terms: the phase's loss terms, each a list with every client's term.
        linear: for each array of a network, whether the function takes it transposed.

    After a call, `further` and `again` are those of the step (see `Step`).
    """

    def __init__(self, first: Training, terms: Sequence[Sequence[Term]], linear: Sequence[bool]) -> None:
        self.linear = linear
        self._first = first
        self._functions = [clients[0].function for clients in terms]
        self._leaves, self._spec = tree_flatten([stack([term.constants for term in clients]) for clients in terms])
        self._tensors = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        numbers = {id(array): number for number, array in enumerate(arrays_of(first.network))}
        self._parameters = [(name, numbers[id(array)]) for name, array in first.network.named_parameters()]
        self._function = vmap(self._of_one, randomness="error")
        self._number = 0
        self.further = 0
        self.again = 0

    def of_two(self) -> "_Losses":
        """Return the losses of a batch that has only the first two networks."""
        other = copy.copy(self)
        other._leaves = [leaf[:2] if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        other._function = vmap(other._of_one, randomness="error")
        return other

    def __call__(
        self, number: int, state: Sequence[Tensor], batch: Sequence[Tensor], dropped: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses (clients,), and scalars to record (clients,) by name.

        `number` is the step's, `state` has the networks' arrays, `batch` inputs, labels, row numbers and weights, and
        `dropped` the masks of dropout, all of them (clients, ...).
        """
        self._number = number
        constants = [self._leaves[place] for place in self._tensors]
        results: tuple[Tensor, dict[str, Tensor]] = self._function(*batch, *state, *constants, *dropped)
        return results

    def _of_one(self, inputs: Tensor, labels: Tensor, rows: Tensor, weights: Tensor, *rest: Tensor) -> Any:
        training = self._first
        model = training.network
        state = transposed(rest[: len(self.linear)], self.linear)
        constants = [*self._leaves]
        for place, value in zip(self._tensors, rest[len(state) :], strict=False):
            constants[place] = value
        dropped = rest[len(state) + len(self._tensors) :]
        recorded: Recorded = {}
        with swapped(model, state):
            with replayed(dropped) if dropped else nullcontext():
                outputs, captured = forward(model, inputs, training.phase.captures)
            named = {name: state[number] for name, number in self._parameters}
            step = Step(
                *(self._number, model, named, inputs, labels, rows, outputs, captured),
                task=training.task,
                weights=weights,
            )
            filled = zip(self._functions, tree_unflatten(constants, self._spec), strict=True)
            terms = tuple(Term(function, **values) for function, values in filled)
            loss = loss_of(step, replace(training.phase, terms=terms), recorded)
        self.further = step.further
        self.again = step.again
        return loss, {name: value for name, (value, _) in recorded.items()}


def _batches(
    group: Sequence[Training], drawn: Sequence[tuple[Iterator[Tensor], int]], dtype: torch.dtype
) -> Iterator[Batch]:
    """Yield for each step the active clients' examples, padded (see `Batch`)."""
    examples = [training.rows for training in group]
    size = sum(len(part) * part.inputs[:1].numel() for part in examples) * dtype.itemsize
    lengths = [length for _, length in drawn]
    iterators = [iterator for iterator, _ in drawn]
    if group[0].augments or size > MEMORY:
        yield from _prepared_in_each_step(group, iterators, lengths, dtype)
    else:
        yield from _prepared_once(group, [[*iterator] for iterator in iterators], lengths, dtype)


def _prepared_once(
    group: Sequence[Training], drawn: Sequence[Sequence[Tensor]], lengths: Sequence[int], dtype: torch.dtype
) -> Iterator[Batch]:
    inputs = torch.cat([training.prepare(training.rows.inputs[:], None) for training in group])
    labels = torch.cat([training.rows.labels for training in group])
    counts = [0, *[len(training.rows) for training in group][:-1]]
    starts = torch.tensor(counts, device=labels.device).cumsum(0)[:, None, None]
    batches = [*chain(*drawn)]
    # (clients, steps, examples) and (clients, steps)
    rows = pad_sequence([*pad_sequence(batches, batch_first=True).split(lengths)], batch_first=True)
    sizes = pad_sequence([*torch.tensor([len(batch) for batch in batches]).split(lengths)], batch_first=True)
    weights = ((torch.arange(rows.shape[2]) < sizes[..., None]).to(dtype) / sizes[..., None]).to(labels.device)
    places = rows + starts
    for step, most in enumerate(sizes.amax(0).tolist()):
        active = sum(length > step for length in lengths)
        here = slice(active), step, slice(most)
        chosen = places[here].flatten()
        shape = places[here].shape
        arrays = (array.index_select(0, chosen).unflatten(0, shape) for array in (inputs, labels))
        yield sizes[:active, step].tolist(), *arrays, rows[here], weights[here]


def _prepared_in_each_step(
    group: Sequence[Training], iterators: Sequence[Iterator[Tensor]], lengths: Sequence[int], dtype: torch.dtype
) -> Iterator[Batch]:
    for step in range(lengths[0]):
        active = sum(length > step for length in lengths)
        rows = [next(iterator) for iterator in iterators[:active]]
        batches = [training.batch(index) for training, index in zip(group, rows, strict=False)]
        weights = [torch.full((len(index),), 1 / len(index), dtype=dtype, device=index.device) for index in rows]
        inputs, labels = zip(*batches, strict=True)
        padded = [pad_sequence([*arrays], batch_first=True) for arrays in (inputs, labels, rows, weights)]
        yield [len(index) for index in rows], padded[0], padded[1], padded[2], padded[3]


def _terms(group: Sequence[Training], number: int, counts: Sequence[int]) -> list[list[Term]]:
    """Return the loss terms of a step, each a list with the term of each client, whose constants include what it draws.

    `counts` are the clients' numbers of examples in the step.
    """
    terms: list[list[Term]] = []
    for several in zip(*(training.phase.terms for training in group), strict=True):
        clients = cast(Sequence[Term], several)
        drawn = [term.drawn(number, count) for term, count in zip(clients, counts, strict=True)]
        if any(constants is not None for constants in drawn):
            pairs = zip(clients, cast(Sequence[Mapping[str, Any]], drawn), strict=True)
            terms.append([Term(term.function, **term.constants, **constants) for term, constants in pairs])
    return terms
