"""HeteroFL, server side: each entry is averaged over the clients that have it (Diao et al., ICLR 2021, equation 2).

    W(t)[S] = sum_{i: S in S_i} n_i W_i(t)[S] / sum_{i: S in S_i} n_i

where client i has the entries S_i: along each axis of units the first ceil(r_i K) of K. An entry that no client of the
round has keeps its value.
"""

from collections.abc import Mapping

from fedhet.messages import Reply, WireError
from fedhet.methods.included import heterofl
from fedhet.server.submodel import SubmodelState, SubmodelStrategy


class HeteroFL(SubmodelStrategy[heterofl.SizedParameters, SubmodelState]):
    """Averages like FedAvg, but only the rows of the head whose classes a client has."""

    method = heterofl.method

    def check_reply(self, reply: Reply) -> None:
        """Check which rows of the head the client trained."""
        super().check_reply(reply)
        spec, rows = self.federation.specs[reply.client], reply.arrays.get("rows", {})
        for key, each in rows.items():
            many = spec[key][0][0] if key in spec and spec[key][0] else 0
            ordered = each.ndim == 1 and each.dtype == "int64" and (each[1:] > each[:-1]).all()
            if not ordered or not len(each) or not 0 <= each[0] <= each[-1] < many:
                raise WireError(f"its rows of {key[:100]} are not in order, or out of range")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average each entry over the clients that have it; head rows over those that have the class."""
        models, parts = {}, {}
        for client, reply in replies.items():
            models[client], parts[client] = dict(reply.arrays["model"]), dict(self.parts(client))
            for key, rows in reply.arrays.get("rows", {}).items():
                array = models[client][key]
                if len(rows) < len(array):
                    models[client][key] = array[rows]
                    parts[client][key] = (rows, *parts[client].get(key, (None,) * array.ndim)[1:])
        weights = {client: float(reply.examples) for client, reply in replies.items()}
        self.state.model = self.state.model | self.average_entries(models, weights, parts)
        return {}
