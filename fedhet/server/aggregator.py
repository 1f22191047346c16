"""Aggregation as a run's configuration has it: by the sharing map, with the configured rule and clipping."""

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from fedhet.server.aggregation import average_shared
from fedhet.server.federation import Federation
from fedhet.server.robust import Rule, combined, cut_to_bound
from fedhet.server.run import Run
from fedhet.wire import Arrays, Spec
from fedhet.wire import cast as cast_arrays

Array = np.ndarray[Any, Any]
K = TypeVar("K", bound=Hashable)


class Aggregator:
    """Averages what clients send. Updates that are clipped are named in the round's record.

    Args:
        run: its configuration and state.
        federation: the clients, and what each shares.
    """

    def __init__(self, run: Run, federation: Federation) -> None:
        self.run, self.federation = run, federation
        self._parts: tuple[Arrays, dict[tuple[str, ...], Arrays]] = ({}, {})

    @property
    def rule(self) -> Rule:
        """The configured rule."""
        return Rule.of(self.run.config)

    def average(
        self,
        models: Mapping[str, Arrays],
        weights: Mapping[str, float],
        specs: Mapping[str, Spec] | None = None,
        before: Arrays | None = None,
        rule: Rule | None = None,
    ) -> Arrays:
        """Return one array of each shared key, over the clients that have it.

        Args:
            models: what each client sent, by shared key, in order of name.
            weights: of each client, for the mean.
            specs: shapes and dtypes of each client's keys; by default of what it shares of its network.
            before: the values from which the clients set out; by default those of the state.
            rule: how; by default as configured.
        """
        rule = rule or self.rule
        models = self.clipped(models, self.run.state.model if before is None else before, rule)
        specs = self.federation.specs if specs is None else specs
        return average_shared(models, weights, specs, partial(combined, rule=rule))

    def average_arrays(self, groups: Mapping[str, Mapping[K, Array]]) -> dict[K, Array]:
        """Return one array of each name, of float arrays that are no part of a network.

        Args:
            groups: by client, in order of name; all count the same, and a name, of whatever type, counts for those who
                have it.
        """
        specs = {c: {name: (array.shape, "float32") for name, array in own.items()} for c, own in groups.items()}
        found: Any = self.average(cast(Any, groups), dict.fromkeys(groups, 1.0), cast(Any, specs), before={})
        return cast(dict[K, Array], found)

    def clipped(
        self, groups: Mapping[str, Arrays], before: Arrays | None = None, rule: Rule | None = None
    ) -> Mapping[str, Arrays]:
        """Return what clients sent, cut to `clip-norm` median norms if there is such a bound.

        Args:
            groups: by client.
            before: the values from which the clients set out; a name that is not there was zero.
            rule: with the bound; by default as configured.
        """
        bound = (rule or self.rule).bound
        if not bound or not groups:
            return groups
        found, cuts = cut_to_bound(groups, before or {}, bound)
        self.run.round.name_cuts(map(vars, cuts))
        return found

    def part_of(self, client: str) -> Arrays:
        """Return a client's part of what is shared, as it travels; one object for all that have the same keys."""
        model = self.run.state.model
        if self._parts[0] is not model:
            self._parts = (model, {})
        keys, parts = tuple(self.federation.specs.get(client, ())), self._parts[1]
        if keys not in parts:
            # The global model of a method that matches has other shapes than any client's, and the same names.
            own = model if self.run.traits.whole else {key: model[key] for key in keys if key in model}
            parts[keys] = cast_arrays(own, self.run.config.wire_dtype)
        return parts[keys]
