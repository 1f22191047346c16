"""FjORD, server side: each entry is averaged over the clients that have it (Horvath et al., NeurIPS 2021).

    W(t)[S] = sum_{i: S in S_i} n_i W_i(t)[S] / sum_{i: S in S_i} n_i

where client i has the entries S_i: along each axis of K units the first ceil(p_max K), for its own largest width p_max.
"""

from fedhet.methods.included import fjord
from fedhet.server.submodel import SubmodelState, SubmodelStrategy


class FjORD(SubmodelStrategy[fjord.FjORDOptions, SubmodelState]):
    """Averages like FedAvg, but each entry of an array over the clients whose networks have it."""

    method = fjord.method
