"""HeteroFL, server side: each entry is averaged over the clients that have it (Diao et al., ICLR 2021, equation 2).

    W(t)[S] = sum_{i: S in S_i} n_i W_i(t)[S] / sum_{i: S in S_i} n_i

where client i of width r_i has the entries S_i: along each axis of K units, the first ceil(r_i K). An entry that no
client of the round has keeps its value.
"""

from collections.abc import Mapping

from fedhet.messages import Reply, WireError
from fedhet.methods.included import heterofl
from fedhet.server.submodel import SubmodelState, SubmodelStrategy


class HeteroFL(SubmodelStrategy[heterofl.SizedOptions, SubmodelState]):
    """Averages each entry over the clients that have it, and rows of the head over the clients that have the class."""

    method = heterofl.method

    def check_reply(self, reply: Reply) -> None:
        """Check the reply, with the numbers of the head's rows that the client trained (its classes)."""
        super().check_reply(reply)
        spec, rows = self.federation.specs[reply.client], reply.arrays.get("rows", {})
        for key, each in rows.items():
            many = spec[key][0][0] if key in spec and spec[key][0] else 0
            ordered = each.ndim == 1 and each.dtype == "int64" and (each[1:] > each[:-1]).all()
            if not ordered or not len(each) or not 0 <= each[0] <= each[-1] < many:
                raise WireError(f"the client's row numbers of {key[:100]} are not in ascending order, or out of range")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
        """Average each entry over the clients that have it, and rows of the head over clients that have the class."""
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
