"""Arrays, mini-batches and losses of several networks, stacked along a new first axis: (clients, ...)."""

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, compress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fedhet.errors import ModelError
from fedhet.training.dropout import replayed
from fedhet.training.evaluation import forward
from fedhet.training.phases import STEPS, Optimisation, Step, Term, set_moments
from fedhet.training.training import Recorded, Training, forget_gradients, loss_of

MEMORY = 2**30  # largest memory of a batch's transformed examples, in bytes, above which each step transforms its own

V = TypeVar("V")

Batch = tuple[list[int], Tensor, Tensor, Tensor, Tensor]
"""The numbers of examples of several networks in a step, and their inputs, labels, row numbers and weights, padded."""

Places = list[list[tuple[dict[str, Any], str]]]
"""For each array of a network, the modules' dicts that have it, each with its name there."""

_places: WeakKeyDictionary[nn.Module, Places] = WeakKeyDictionary()


def _places_of(model: nn.Module) -> Places:
    if model not in _places:  # finding them takes as long as a small network's forward pass
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for arrays in (module._parameters, module._buffers):
                for name, array in arrays.items():
                    if array is not None:
                        places.setdefault(id(array), []).append((arrays, name))
        _places[model] = [*places.values()]
    return _places[model]


@contextmanager
def swapped(model: nn.Module, arrays: Sequence[Tensor]) -> Iterator[None]:
    """Context manager in which a network has the `arrays`, in the order of `arrays_of`."""
    before = arrays_of(model)
    try:
        _put(model, arrays)
        yield
    finally:
        _put(model, before)


def _put(model: nn.Module, arrays: Sequence[Tensor]) -> None:
    for others, array in zip(_places_of(model), arrays, strict=True):
        for named, name in others:
            named[name] = array


def arrays_of(model: nn.Module) -> list[Tensor]:
    """Return a network's parameters and buffers as a list; an array that two modules share is listed once."""
    return [others[0][0][others[0][1]] for others in _places_of(model)]


def transposed(arrays: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    """Return the list `arrays`, with the last two axes exchanged in arrays for which `chosen` is True."""
    return [array.mT if exchanged else array for array, exchanged in zip(arrays, chosen, strict=True)]


def stack(values: Sequence[Any], like: Tensor, *, floats: bool = False) -> Any:
    """Stack the tensors of nested containers of equal structure, such as dicts; keep the first one's other entries.

    Tensors with other numbers of rows, as they are drawn for mini-batches of other sizes, are padded. Floats that
    differ, or all if `floats`, become a tensor (clients,) with the type and the device of `like`. Raises a ModelError
    for tensors whose rows have other shapes.
    """

    def stacked(*leaves: Any) -> Any:
        if isinstance(leaves[0], float) and (floats or len({*leaves}) > 1):
            return like.new_tensor(leaves)
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        if len({leaf.shape for leaf in leaves}) == 1:
            return torch.stack(leaves)
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise ModelError("a loss term draws tensors of other shapes for each client")
        return pad_sequence([*leaves], batch_first=True)

    return tree_map(stacked, *values)


class Networks:
    """Networks of one kind as one batch: their arrays, stacked along a new first axis, and an optimiser.

    Weights of linear layers are transposed in a batch, so that gradients are contiguous and not copied.

    Args:
        networks: the networks, of which some parameters have `requires_grad` in the first one: they are trained.
        optimisation: the optimiser.
        moments: for each network, the state from which the optimiser starts (see `Trained`).

    Attributes:
        arrays: all arrays of the networks that still train, each (clients, ...), in the order of `arrays_of`.
        leaves: those of them that are trained.
        linear: for each array of a network, whether it is transposed.
        trained: the trained arrays of all networks; they share no memory with the networks.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        optimisation: Optimisation,
        moments: Sequence[Mapping[Tensor, Mapping[str, Tensor]]],
    ) -> None:
        model = networks[0]
        arrays = [arrays_of(network) for network in networks]
        weights = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
        self.linear = [id(array) in weights for array in arrays[0]]
        self._live = [isinstance(array, nn.Parameter) and array.requires_grad for array in arrays[0]]
        columns = zip(*(transposed(each, self.linear) for each in arrays), strict=True)
        stacked = [torch.stack(column) for column in columns]
        self.arrays = [array.detach().requires_grad_(live) for array, live in zip(stacked, self._live, strict=True)]
        self.leaves = self.trained_of(self.arrays)
        self._transposed = self.trained_of(self.linear)
        self.trained = [leaf.detach() for leaf in self.leaves]
        self._parameters = [self.trained_of(each) for each in arrays]
        self._optimisation = optimisation
        self._optimizer = optimisation.build(model, self._parameters[0], self.leaves)
        self._moments: list[dict[str, Tensor]] = [{} for _ in self.leaves]
        if any(moments):
            self._start(moments)

    def _start(self, moments: Sequence[Mapping[Tensor, Mapping[str, Tensor]]]) -> None:
        for place, leaf in enumerate(self.leaves):
            several = [each.get(own[place], {}) for each, own in zip(moments, self._parameters, strict=True)]
            stacked = {name: torch.stack([each[name] for each in several]) for name in several[0]}
            arrays = {name: self._laid(array, place) for name, array in stacked.items() if name != STEPS}
            set_moments(self._optimizer, leaf, {**several[0], **arrays})

    def _laid(self, array: Tensor, place: int) -> Tensor:
        """Return a trained array of a network as it lies in a batch, or the other way round."""
        return array.mT if self._transposed[place] else array

    def __len__(self) -> int:
        return len(self.leaves[0])

    def trained_of(self, values: Sequence[V]) -> list[V]:
        """Return those of the `values`, one for each array of a network, whose arrays are trained."""
        return [*compress(values, self._live)]

    def keep_first(self, count: int) -> None:
        """Train only the first `count` networks from now on."""
        self._keep_moments()
        optimizer = self._optimizer
        chosen = {array: array.detach()[:count].requires_grad_(array.requires_grad) for array in self.arrays}
        for group in optimizer.param_groups:
            for array in group["params"]:
                optimizer.state[chosen[array]] = {
                    name: value[:count] if value.ndim else value
                    for name, value in optimizer.state.pop(array, {}).items()
                }
            group["params"] = [chosen[array] for array in group["params"]]
        self.arrays = [*chosen.values()]
        self.leaves = self.trained_of(self.arrays)

    def step(self, number: int, total: int) -> None:
        """Take the step `number` of `total` with the gradients of `leaves`, and forget these."""
        optimisation = self._optimisation
        if optimisation.clip_gradients:
            clip([leaf.grad for leaf in self.leaves if leaf.grad is not None], optimisation.clip_gradients)
        optimisation.set_rate(self._optimizer, number, total)
        self._optimizer.step()
        forget_gradients(self.leaves)

    def norms(self) -> list[float]:
        """Return the largest norm of a trained array of each network."""
        norms: list[float] = torch.stack([array.flatten(1).norm(dim=1) for array in self.trained]).amax(0).tolist()
        return norms

    def write(self, index: int) -> None:
        """Write the trained arrays of the network `index` into it."""
        arrays = [array[index] for array in self.trained]
        with torch.no_grad():
            torch._foreach_copy_(self._parameters[index], transposed(arrays, self._transposed))

    def moments(self, steps: Sequence[int]) -> list[dict[Tensor, dict[str, Tensor]]]:
        """Return the optimiser's state for each network (see `Trained`), which took so many `steps`, the first most."""
        self._keep_moments()
        results = []
        for index, (parameters, count) in enumerate(zip(self._parameters, steps, strict=True)):
            moments = {}
            for place, (parameter, stacked) in enumerate(zip(parameters, self._moments, strict=True)):
                moments[parameter] = {
                    name: value - (steps[0] - count) if name == STEPS else self._laid(value[index], place)
                    for name, value in stacked.items()
                }
            results.append(moments)
        return results

    def _keep_moments(self) -> None:
        # Those of networks that end here; later steps change the tensors of the others in place.
        for moments, leaf in zip(self._moments, self.leaves, strict=True):
            for name, value in self._optimizer.state[leaf].items():
                moments.setdefault(name, value)


def clip(gradients: Sequence[Tensor], most: float) -> None:
    """Scale `gradients` (clients, ...) in place so that each client's total norm is at most `most`."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (most / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


# ---- mini-batches, padded to the same number of examples by examples of weight 0


def padded_batches(
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
    largest = rows.shape[2]
    for step, most in enumerate(sizes.amax(0).tolist()):
        if group[0].compiled:  # each number of examples is compiled by itself
            most = largest
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


# ---- losses


class Losses:
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
        self._functions = [(clients[0].function, clients[0].public) for clients in terms]
        constants = [[term.constants for term in clients] for clients in terms]
        like = next(first.network.parameters())
        # Floats that change from round to round would be compiled again in each.
        self._leaves, self._spec = tree_flatten([stack(of_term, like, floats=first.compiled) for of_term in constants])
        self._tensors = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        numbers = {id(array): number for number, array in enumerate(arrays_of(first.network))}
        self._parameters = [(name, numbers[id(array)]) for name, array in first.network.named_parameters()]
        self._function = vmap(self._of_one, randomness="error")
        self._number = 0
        self.further = 0
        self.again = 0

    def of_two(self) -> "Losses":
        """Return the losses of a batch that has only the first two networks."""
        other = copy.copy(self)
        other._leaves = [leaf[:2] if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        other._function = vmap(other._of_one, randomness="error")
        return other

    @property
    def key(self) -> Hashable:
        """A key that is equal for the losses of networks of one kind with the same loss terms in the step."""
        names = [getattr(function, "__qualname__", "") for function, _ in self._functions]
        values = [leaf if isinstance(leaf, bool | int | float | str) else type(leaf) for leaf in self._leaves]
        return *names, *values, self._spec

    def arguments(self, batch: Sequence[Tensor], state: Sequence[Tensor], dropped: Sequence[Tensor]) -> list[Tensor]:
        """Return the arguments of a step as a list, each (clients, ...).

        `batch` has inputs, labels, row numbers and weights, `state` the networks' arrays, `dropped` dropout's masks.
        """
        return [*batch, *state, *(self._leaves[place] for place in self._tensors), *dropped]

    def __call__(self, number: int, arguments: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses (clients,) of the step with this number, and scalars to record (clients,) by name."""
        self._number = number
        results: tuple[Tensor, dict[str, Tensor]] = self._function(*arguments)
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
            terms = tuple(Term(function, public=public, **values) for (function, public), values in filled)
            loss = loss_of(step, replace(training.phase, terms=terms), recorded)
        self.further = step.further
        self.again = step.again
        return loss, {name: value for name, (value, _) in recorded.items()}
