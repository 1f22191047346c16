"""Training and evaluation of several clients' networks together, as one batch of networks, by `torch.func.vmap`.

    results = Batches().train([Training(...), ...])

One forward pass, one backward pass and one step of an optimiser train all networks of a batch: losses are summed over
clients, and optimisers work elementwise. Mini-batches are padded to the same size by examples of weight 0. Before the
first batch of a kind in a process, one network's loss and gradients are also computed alone; where they differ, as with
layers that mix examples, networks of this kind are trained alone.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves

from fedhet.data import Examples
from fedhet.errors import ModelError
from fedhet.models.copies import held_by
from fedhet.models.representation import RandomStream
from fedhet.tasks import Score, Task
from fedhet.training.backends import Backend, OneByOne, Scored, attempt
from fedhet.training.compiled import compiled_step
from fedhet.training.dropout import Draw, masks
from fedhet.training.evaluation import Evaluation, forward
from fedhet.training.kinds import IncomparableError, Kinds, constants_key
from fedhet.training.phases import STEPS, Step, Term, Trained
from fedhet.training.stacked import Losses, Networks, arrays_of, padded_batches, swapped, transposed
from fedhet.training.training import Recorded, Training, loss_of, mini_batches, only_trained, record
from fedhet.training.verification import VERIFIED, computing, first_two, padded_twice, verify
from fedhet.utils.randomness import restoring
from fedhet.utils.text import log

FEW = 512  # largest number of test examples of a client whose network is evaluated together with other networks

Kind = tuple[Hashable, Hashable]
"""What else must be equal for a batch, such as the optimiser, and what its losses, gradients or outputs depend on."""

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
        return _by_kind(trainings, self._training_kind, _train, self._train_alone)

    def _train_alone(self, trainings: Sequence[Training]) -> Sequence[Trained | BaseException]:
        if any(training.compiled for training in trainings):
            _say("clients that are trained one by one are not compiled")
        return self._alone.train(trainings)

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

    def _training_kind(self, training: Training) -> Kind | None:
        """Return a key that is equal for phases that can be trained together; None if one must be trained alone."""
        phase = training.phase
        optimisation = phase.optimisation
        terms = [term for term in phase.terms if isinstance(term, Term) and term.weighted]
        if training.alone or training.privacy or training.order or optimisation.bf16 or len(terms) < len(phase.terms):
            return None
        model = training.network
        rates: tuple[Hashable, ...] = ()
        if optimisation.schedule:  # in each step, so that clients need equal numbers of steps
            steps = mini_batches(model, phase, training.rows, training.generator, None)[1]
            rates = (*map(optimisation.schedule, (0.1, 0.4, 0.9)), steps)
            optimisation = replace(optimisation, schedule=None)
        try:
            kinds, data = self._kind_of(model, training.rows, training.task)
            captures = [(name, kinds.of(value)) for name, value in phase.captures.items()]
            of_terms = [(t.function, t.public, t.draw is None, constants_key(kinds, t.constants)) for t in terms]
        except IncomparableError as error:
            log.debug("a network is trained alone: %s", error)
            return None
        if phase.continues:
            moments = [training.before.moments.get(parameter, {}) for parameter in model.parameters()]
            rates += tuple((*moment, float(moment.get(STEPS, 0))) for moment in moments)
        trained: Sequence[str] = ()
        if phase.trains:
            trained = [name for name, _ in model.named_parameters() if phase.trains(name)]
        return (optimisation, *rates), (phase.task_weight, training.augments, *captures, *of_terms, *trained, data)

    def _evaluation_kind(self, evaluation: Evaluation) -> Kind | None:
        """Return a key that is equal for evaluations that can be computed together; None if one must run alone."""
        model = evaluation.predict
        if not isinstance(model, nn.Module) or len(evaluation.examples) > FEW:
            return None
        try:
            data = self._kind_of(model, evaluation.examples, evaluation.task)[1]
        except IncomparableError:
            return None
        return len(evaluation.examples).bit_length(), ("evaluation", data)


_said: set[str] = set()
"""Lines of this process's log about networks that are computed one by one."""


def _say(line: str) -> None:
    if line not in _said:  # a network that counts its calls is of another kind in each round
        _said.add(line)
        log.info("%s", line)


def _by_kind(
    values: Sequence[V],
    kind_of: Callable[[V], Kind | None],
    together: Callable[[Sequence[V], Hashable], Sequence[R]],
    alone: Callable[[Sequence[V]], Sequence[R]],
) -> list[R]:
    """Return results in order: those of one kind by `together`; by `alone` if this fails, and those of other values."""
    places: dict[Kind | None, list[int]] = {}
    for place, value in enumerate(values if len(values) > 1 else ()):
        places.setdefault(kind_of(value), []).append(place)
    results: dict[int, R] = {}
    for kind, group in places.items():
        if kind is None or len(group) == 1 or VERIFIED.get(kind[1], ()) is None:
            continue
        try:
            results |= zip(group, together([values[place] for place in group], kind[1]), strict=True)
        except Exception as error:  # whatever it was, each client then finds out whether it is its own
            _say(f"some clients are computed one by one: {error}")
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
            rows = padded_twice(inputs, count, count + 1)
            second = models[1].eval()
            verify(
                *(kind, second, count),
                alone=lambda draws: [forward(second, rows[1, :count])[0]],
                together=lambda draws: [function(rows, *first_two(stacked))[1, :count]],
            )
        outputs = function(inputs, *stacked)
    return [
        evaluation.task.evaluate(rows[: len(evaluation.examples)], evaluation.examples.labels)
        for evaluation, rows in zip(group, outputs, strict=True)
    ]


# ---- training


def _train(group: Sequence[Training], kind: Hashable) -> list[Trained | BaseException]:
    """Train networks of one kind; raise an exception before a network or a random generator has changed."""
    terms = [term for training in group for term in training.phase.terms if isinstance(term, Term) and term.draw]
    held = chain.from_iterable(held_by(term.draw) for term in terms)
    restores = restoring(chain((training.generator for training in group), held))
    # In training mode, in which BatchNorm needs two examples in a mini-batch.
    drawn = [mini_batches(each.network.train(), each.phase, each.rows, each.generator, None) for each in group]
    # Clients with more steps come first, so that those that still train are the first ones.
    order = sorted(range(len(group)), key=lambda place: -drawn[place][1])
    batch = _Batch([group[place] for place in order], kind)
    try:
        with computing(kind):
            batch.train([drawn[place] for place in order])
        networks = batch.networks
        norms = networks.norms()
        losses = pad_sequence(batch.losses).tolist()
        moments = networks.moments([drawn[place][1] for place in order])
    except Exception:
        for restore in restores:  # the networks' own steps draw again
            restore()
        raise
    results: dict[int, Trained | BaseException] = {}
    for index, place in enumerate(order):
        networks.write(index)
        sizes = [counts[index] for counts in batch.counts if index < len(counts)]
        results[place] = attempt(
            group[place].outcome,
            losses[index][: len(sizes)],
            sizes,
            norms[index],
            batch.further[index],
            batch.recorded[index],
            moments[index],
        )
    return [results[place] for place in range(len(group))]


class _Batch:
    """The training of networks of one kind, in descending order of their numbers of mini-batches.

    Attributes:
        networks: the networks.
        losses, counts: for each step, the losses and numbers of examples of the networks that still train.
        recorded, further: for each network, scalars that loss terms record, and the number of examples that they pass.
    """

    networks: Networks

    def __init__(self, group: Sequence[Training], kind: Hashable) -> None:
        self._kind = kind
        self._group = group
        self.losses: list[Tensor] = []
        self.counts: list[list[int]] = []
        self.recorded = [dict(training.before.recorded) for training in group]
        self.further = [0] * len(group)

    def train(self, drawn: Sequence[tuple[Iterator[Tensor], int]]) -> None:
        """Take all steps; `drawn` has each network's mini-batches, as indices of examples, and their number."""
        group = self._group
        model = group[0].network.train()
        phase = group[0].phase
        draws = any(isinstance(term, Term) and term.draw for term in phase.terms)
        generators = [torch.Generator().manual_seed(training.seed) for training in group]
        losses: Losses | None = None
        with only_trained(model, phase.trains):
            before = [training.before.moments if phase.continues else {} for training in group]
            self.networks = networks = Networks([training.network for training in group], phase.optimisation, before)
            for number, (counts, *batch) in enumerate(padded_batches(group, drawn, networks.leaves[0].dtype)):
                active = len(counts)
                if active < len(networks):
                    networks.keep_first(active)
                    losses = None
                if losses is None or draws:
                    terms = self._terms(number, counts)
                    losses = Losses(group[0], terms, networks.linear)
                if not number and self._kind not in VERIFIED:
                    self._verify([several[1] for several in terms], losses, batch, counts[1])
                dropped = masks(VERIFIED[self._kind] or (), counts, batch[3].shape[1], generators, batch[3].device)
                loss, values = self._gradients(number, losses, losses.arguments(batch, networks.arrays, dropped))
                self._note(loss, counts, values, losses)
                networks.step(number, drawn[0][1])

    def _terms(self, number: int, counts: Sequence[int]) -> list[list[Term]]:
        """Return the loss terms of a step, each a list with the term of each client, whose constants include its draws.

        `counts` are the numbers of examples in the step of the clients that still train. Raises a ModelError if clients
        draw what cannot be computed as one batch. Only the first step is verified, so it must have all terms.
        """
        terms: list[list[Term]] = []
        active = self._group[: len(counts)]
        for several in zip(*(training.phase.terms for training in active), strict=True):
            clients = cast(Sequence[Term], several)
            drawn = [term.drawn(number, count) for term, count in zip(clients, counts, strict=True)]
            if number and all(constants is None for constants in drawn):
                continue
            _check_drawn(drawn)
            public = clients[0].public
            rows = [_rows(constants) for constants in drawn]
            # Otherwise `Step.mean`, which ignores the padding of the mini-batch, would not average all rows.
            fitting = public or all({*lengths} <= {count} for lengths, count in zip(rows, counts, strict=True))
            if not fitting or (not number and None in drawn):
                VERIFIED[self._kind] = None
                raise ModelError("the first step lacks a loss term, or one draws other rows than one for each example")
            if public and any(lengths != rows[0] for lengths in rows):
                raise ModelError("a loss term of public data draws other numbers of rows for each client")
            pairs = zip(clients, cast(Sequence[Mapping[str, Any]], drawn), strict=True)
            terms.append([Term(term.function, public=public, **term.constants, **more) for term, more in pairs])
        return terms

    def _gradients(
        self, number: int, losses: Losses, arguments: Sequence[Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Set the gradients of the networks, and return losses and scalars to record.

        Only steps of all networks are compiled, since each number of networks is compiled by itself.
        """
        leaves = self.networks.leaves
        if self._group[0].compiled and len(self.networks) == len(self._group):
            step = compiled_step(self._kind, losses, arguments, leaves)
            if step is not None:
                return step(losses, arguments, leaves)
        loss, values = losses(number, arguments)
        loss.sum().backward()
        return loss.detach(), values

    def _note(self, loss: Tensor, counts: list[int], values: Mapping[str, Tensor], losses: Losses) -> None:
        self.losses.append(loss)
        self.counts.append(counts)
        for place in range(len(loss)):
            self.further[place] += losses.further + losses.again * counts[place]
            record(self.recorded[place], {name: value[place] for name, value in values.items()})

    def _verify(self, terms: Sequence[Term], losses: Losses, batch: Sequence[Tensor], count: int) -> None:
        """Compare the second network's first loss, gradients and scalars in a batch with what it computes alone."""
        second = self._group[1]
        model = second.network.train()
        of_two = losses.of_two()
        inputs, labels, rows = (array[1, :count] for array in batch[:3])
        # With padding, and as many rows as loss terms draw for the largest mini-batch.
        length = batch[3].shape[1] + 1
        padded = [padded_twice(array, count, length) for array in batch[:3]]
        weights = batch[3].new_zeros(2, length)
        weights[:, :count] = 1 / count
        networks = self.networks
        pairs = zip(first_two([*map(Tensor.detach, networks.arrays)]), networks.arrays, strict=True)
        arrays = [two.requires_grad_(array.requires_grad) for two, array in pairs]

        def alone(draws: Sequence[Draw]) -> list[Tensor]:
            parameters = networks.trained_of(arrays_of(model))
            outputs, captured = forward(model, inputs, second.phase.captures)
            if draws and any(isinstance(value, RandomStream) for term in terms for value in term.constants.values()):
                VERIFIED[self._kind] = None
                raise ModelError("a loss term passes examples through a network with dropout")
            named = dict(model.named_parameters())
            step = Step(0, model, named, inputs, labels, rows, outputs, captured, task=second.task)
            noted: Recorded = {}
            loss = loss_of(step, replace(second.phase, terms=tuple(terms)), noted)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            return [loss.detach(), *gradients, *(value for value, _ in noted.values())]

        def together(draws: Sequence[Draw]) -> list[Tensor]:
            generators = [torch.Generator().manual_seed(training.seed) for training in self._group[:2]]
            dropped = masks(draws, [count, count], length, generators, inputs.device)
            loss, noted = of_two(0, of_two.arguments((*padded, weights), arrays, dropped))
            trained = networks.trained_of(arrays)
            gradients = torch.autograd.grad(loss.sum(), trained, allow_unused=True, materialize_grads=True)
            its = transposed([gradient[1] for gradient in gradients], networks.trained_of(networks.linear))
            return [loss[1].detach(), *its, *(value[1].detach() for value in noted.values())]

        with only_trained(model, second.phase.trains), torch.random.fork_rng([]):
            torch.default_generator.manual_seed(second.seed)
            verify(self._kind, model, count, alone, together)


def _check_drawn(drawn: Sequence[Any]) -> None:
    """Raise a ModelError if clients draw values that differ, and are neither tensors nor floats."""
    for leaves in zip(*map(tree_leaves, drawn), strict=True):
        first = leaves[0]
        if not isinstance(first, Tensor | float) and any(leaf is not first and leaf != first for leaf in leaves):
            raise ModelError("a loss term draws other values for each client, which are neither tensors nor floats")


def _rows(drawn: object) -> list[int]:
    return [len(leaf) for leaf in tree_leaves(drawn) if isinstance(leaf, Tensor) and leaf.ndim]
