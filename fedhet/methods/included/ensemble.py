"""Ensemble: the mean of the predictions of all clients' networks, a baseline of FedMA's paper (tables 1 and 2)."""

from fedhet.methods.method import Method, Traits
from fedhet.methods.sharing import Sharing

method = Method(
    "ensemble",
    traits=Traits(
        shares=Sharing("everything", averaged=False),
        keeps="model",
        scored="trained",
        common_init=True,
        serves_clients=False,
    ),
    common={
        "clients": 16,
        "rounds": 1,
        "shared-init": False,
        "test-on": "both",
        "batch-size": 64,
        "learning-rate": 0.01,
        "momentum": 0.9,
        "local-epochs": 150,
    },
    own={"rounds": 1, "local-epochs": 100},
)
