"""The arrays that each permutation group settles, and descriptions of permutation groups as text."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from fedhet.algorithms.graphs import PermutationGroup, PermutationGroups, Segment, Slot

Array = npt.NDArray[Any]
State = Mapping[str, Array]  # a client's arrays by name
Assignments = Mapping[int, Array]  # group -> the global unit of each of a client's units, (L_j,) ints


def parameters_of(groups: PermutationGroups, index: int) -> tuple[str, ...]:
    """Return the parameters that a group settles: those of its rows, then those that it completes."""
    slots = groups[index].rows + groups[index].completes
    return tuple(dict.fromkeys(slot.parameter for slot in slots if groups.kinds.get(slot.parameter) != "statistic"))


def rest_of(groups: PermutationGroups, *, statistics: bool = True) -> tuple[str, ...]:
    """Return the arrays that no group settles: output layers and buffers, with or without BatchNorm's statistics."""
    settled = {name for group in groups for name in parameters_of(groups, group.index)}
    return tuple(
        name
        for name in groups.axes
        if name not in settled and name not in groups.tied and (statistics or groups.kinds.get(name) != "statistic")
    )


def due(groups: PermutationGroups, done: int, step: int, *, statistics: bool) -> list[str]:
    """Return the arrays that a client with `done` settled groups sends in a step of FedMA."""
    names = [name for index in range(done, min(step + 1, len(groups))) for name in parameters_of(groups, index)]
    return list(dict.fromkeys([*names, *(rest_of(groups, statistics=statistics) if step == len(groups) else ())]))


def describe(groups: PermutationGroups) -> str:
    """Return permutation groups as JSON text, for a server that does not have the model."""
    return json.dumps(dataclasses.asdict(groups))


def understand(text: str) -> PermutationGroups:
    """Return permutation groups from the text of `describe`; raises a ValueError for any other text."""
    try:
        description = json.loads(text)
        axes = {
            name: tuple(tuple(Segment(**segment) for segment in axis) for axis in axes)
            for name, axes in description["axes"].items()
        }
        needs = {name: (int(group), int(least)) for name, (group, least) in description["needs"].items()}
        groups, fixed = tuple(map(_group, description["groups"])), tuple(description["fixed"])
        return PermutationGroups(groups, axes, fixed, description["tied"], needs, dict(description["kinds"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no description of permutation groups: {error!r}") from error


def _group(description: dict[str, Any]) -> PermutationGroup:
    slots = {key: tuple(Slot(**slot) for slot in description[key]) for key in ("rows", "completes")}
    return PermutationGroup(**{**description, **slots})
