"""The pictures of a matching in the report, as JSON values.

`assignments` are by client (J), the global unit of each of its own units, (L_j,) ints.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedhet.graphs import PermutationGroups

from .structure import Array


def membership(groups: PermutationGroups, assignments: Mapping[str, Mapping[str, Array]]) -> dict[str, Any]:
    """Return a picture of the global units that clients share; assignments are by client and group (index as text).

    `units` of a layer is a matrix of clients by global units, 1 where a client has the unit.
    """
    layers = []
    for group in groups:
        members = [by_group[str(group.index)] for by_group in assignments.values()]
        units = np.zeros((len(members), 1 + max(int(each.max()) for each in members)), dtype=int)
        for row, each in zip(units, members, strict=True):
            row[each] = 1
        layers.append({"name": group.name, "units": units.tolist()})
    return {"clients": list(assignments), "layers": layers}
