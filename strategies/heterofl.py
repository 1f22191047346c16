"""HeteroFL, FedRolex and FjORD, server side: each entry is averaged over the clients that have it.

    W(t)[S] = sum_{i: S in S_i} n_i W_i(t)[S] / sum_{i: S in S_i} n_i

where client i of width r_i has the entries S_i: of the K units along each axis, ceil(r_i K). An entry that no client of
the round has keeps its value (HeteroFL: Diao et al., ICLR 2021, equation 2).
"""

from collections.abc import Mapping

from fedhet.messages import Reply, WireError
from fedhet.methods.included.submodels import FjORDOptions, SizedOptions, fedrolex, fjord, heterofl
from fedhet.server.submodel import SubmodelState, SubmodelStrategy


class HeteroFL(SubmodelStrategy[SizedOptions, SubmodelState]):
    """Averages each entry over the clients that have it, and rows of the head over the clients that have the class."""

    method = heterofl

    def check_reply(self, reply: Reply) -> None:
        """Check the reply, including the row numbers of the client's classes in the head."""
        super().check_reply(reply)
        spec, rows = self.federation.specs[reply.client], reply.arrays.get("rows", {})
        for key, each in rows.items():
            many = spec[key][0][0] if key in spec and spec[key][0] else 0
            ordered = each.ndim == 1 and each.dtype == "int64" and (each[1:] > each[:-1]).all()
            if not ordered or not len(each) or not 0 <= each[0] <= each[-1] < many:
                raise WireError(f"the client's row numbers of {key[:100]} must be ascending, from 0 to {many - 1}")

    def aggregate_fit(self, round: int, replies: Mapping[str, Reply]) -> dict[str, float]:
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


class FedRolex(HeteroFL):
    """Averages like HeteroFL, but a client's units roll over each hidden layer (Alam et al., NeurIPS 2022, equation 2).

    In round t, it has the units that start at (t - 1) mod K and wrap around (`sharing.ROLLING_UNITS`).
    """

    method = fedrolex


class FjORD(SubmodelStrategy[FjORDOptions, SubmodelState]):
    """Averages each entry over the clients whose widest network has it (Horvath et al., NeurIPS 2021)."""

    method = fjord
