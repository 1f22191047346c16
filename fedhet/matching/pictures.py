"""The pictures of a matching in the report, as JSON values.

`assignments` are by client (J), the global unit of each of its own units, (L_j,) ints.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedhet.graphs import PermutationGroups

from .structure import Array

FILTERS_SHOWN = 8


def membership(groups: PermutationGroups, assignments: Mapping[str, Mapping[str, Array]]) -> dict[str, Any]:
    """Show which clients share which global units; assignments are by client and by group, its index as text.

    `units` of a layer are clients by global units, 1 where a client has the unit.
    """
    layers = []
    for group in groups:
        own = [mine[str(group.index)] for mine in assignments.values()]
        units = np.zeros((len(own), 1 + max(int(each.max()) for each in own)), dtype=int)
        for row, each in zip(units, own, strict=True):
            row[each] = 1
        layers.append({"name": group.name, "units": units.tolist()})
    return {"clients": list(assignments), "layers": layers}


def filters(layer: str, local: Mapping[str, Array], matched: Array, assignments: Mapping[str, Array]) -> dict[str, Any]:
    """Show filters that most clients share: each client's, the matched one, and the plain mean at the same place.

    `local` are a layer's filters by client before matching, (L_j, channels, height, width), `matched` the global ones.
    """
    kept = {client: array for client, array in local.items() if client in assignments}
    popularity = np.bincount(np.concatenate([assignments[client] for client in kept]), minlength=len(matched))
    chosen = np.argsort(-popularity, kind="stable")[:FILTERS_SHOWN]
    places = {client: {int(unit): place for place, unit in enumerate(assignments[client])} for client in kept}
    plain = []
    for unit in chosen:  # the place that the first client has it at: where plain averaging would put it
        place = next(where[unit] for where in places.values() if unit in where)
        plain.append(np.mean([array[place] for array in kept.values() if place < len(array)], axis=0))
    shown = list(kept)[:FILTERS_SHOWN]
    own = [[kept[c][places[c][unit]] if unit in places[c] else None for unit in chosen.tolist()] for c in shown]
    return {
        "layer": layer,
        "clients": shown,
        "units": chosen.tolist(),
        "local": [[None if each is None else _listed(each) for each in filters] for filters in own],
        "matched": [_listed(each) for each in matched[chosen]],
        "plain": [_listed(each) for each in plain],
    }


def _listed(filter: Array) -> Any:
    return np.round(filter.astype(np.float64), 4).tolist()
