"""HeteroFL (Diao et al., ICLR 2021): clients have narrower parts of one network.

Client i of width r_i has the first ceil(r_i K) of the K units of each hidden layer.

    client i:  w_i = argmin_w  L_i(w) for its part of w(t-1)
    server:    w(t)[a] = sum_i n_i w_i[a] / sum_i n_i over the clients i that have the entry a           (equation 2)

An entry that no client of the round has keeps its value. A row of the head is averaged over clients with its class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedhet.server import Reply, WireError, method, option

from .families.submodels import PARTS, SubmodelKeys, SubmodelState, SubmodelStrategy


@dataclass(frozen=True)
class Keys(SubmodelKeys):
    widths: str = option(
        "1,0.5,0.25,0.125,0.0625",
        "fractions of each hidden layer's units per client, assigned as `assign` says; a node may set its own as width",
    )


@method(
    "heterofl",
    replace(PARTS, sends={"rows": "statistics"}, inside="head"),
    Keys,
    client="fedhet.client_apps.heterofl:HeteroFL",
    common={"batch-norm": "re-estimate"},  # static BatchNorm
    own={"heterofl.widths": "1,0.25"},
)
class HeteroFL(SubmodelStrategy[Keys, SubmodelState]):
    """HeteroFL: averages each weight over clients that have it, and a row of the head over clients with its class."""

    def check_reply(self, reply: Reply) -> None:
        super().check_reply(reply)
        spec = self.federation.specs[reply.client]
        for key, rows in reply.arrays.get("rows", {}).items():
            count = spec[key][0][0] if key in spec and spec[key][0] else 0
            ordered = rows.ndim == 1 and rows.dtype == "int64" and (rows[1:] > rows[:-1]).all()
            if not ordered or not len(rows) or not 0 <= rows[0] <= rows[-1] < count:
                raise WireError(f"rows of {key[:100]} must be ascending int64 below {count}: check the client's mods")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        models = {}
        parts = {}
        for client, reply in replies.items():
            models[client] = dict(reply.arrays["model"])
            parts[client] = dict(self.parts(client))
            for key, rows in reply.arrays.get("rows", {}).items():
                array = models[client][key]
                if len(rows) < len(array):
                    models[client][key] = array[rows]
                    parts[client][key] = (rows, *parts[client].get(key, (None,) * array.ndim)[1:])
        self.state.model = self.state.model | self.average_entries(models, self.aggregator.weights(replies), parts)
        return {}
