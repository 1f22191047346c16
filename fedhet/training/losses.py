"""The losses of several networks of one kind, as one batch of networks."""

import copy
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedhet.training.dropout import replayed
from fedhet.training.evaluation import forward
from fedhet.training.phases import Step, Term
from fedhet.training.stacked import arrays_of, stack, swapped, transposed
from fedhet.training.training import Recorded, Training, loss_of


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
