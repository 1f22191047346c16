"""Declarations of methods that average the clients' weights or parts of them, and of baselines."""

from dataclasses import dataclass, replace
from typing import Literal

from fedhet.errors import ConfigError
from fedhet.methods import sharing
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Config, Options, keys_about, option

fedavg = Method("fedavg", Traits(networks="equal", shares=sharing.EVERYTHING, common_init=True))


@dataclass(frozen=True)
class FedProxOptions(Options):
    mu: float = option(0.1, "weight of the proximal term mu / 2 ||W - W(t-1)||^2", at_least=0)


fedprox = Method("fedprox", fedavg.traits, FedProxOptions)


@dataclass(frozen=True)
class FedRepOptions(Options):
    body_epochs: int = option(1, "number of epochs per round for the body; the others are for the head", at_least=1)

    def check(self, config: Config) -> None:
        """Check that epochs remain for the head: `local-epochs` above `body-epochs`; raise a ConfigError otherwise."""
        if 0 < config.local_epochs <= self.body_epochs:
            limit = f"below local-epochs = {config.local_epochs}, so that epochs remain for the head"
            raise ConfigError(f"fedrep.body-epochs = {self.body_epochs}: must be {limit}")


fedrep = Method(
    "fedrep",
    Traits(networks="equal", shares=sharing.BODY, keeps="rest", common_init=True),
    FedRepOptions,
    common={"local-epochs": 11, "closing-epochs": 10},
    own={"fedrep.body-epochs": 2},
)

lg_fedavg = Method("lg-fedavg", Traits(shares=sharing.HEAD, keeps="model", common_init=True))


@dataclass(frozen=True)
class LayerAverageOptions(Options):
    # FlexiFed (Wang et al., WWW 2023) averages common first layers. Its authors compare layers by name and position;
    # here, layers match if class, options and shapes are equal.
    by: Literal["type-order", "max-common", "architecture"] = option(
        "type-order",
        "layers averaged together: same type and order, equal first layers (FlexiFed), or same architecture",
    )


_maps = {
    "type-order": sharing.BY_TYPE_AND_ORDER,
    "architecture": sharing.WITHIN_ARCHITECTURES,
    "max-common": sharing.BY_FIRST_LAYERS,
}

layer_average = Method(
    "layer-average",
    lambda options: Traits(shares=_maps[options.by], common_init=True),
    LayerAverageOptions,
    common={"batch-norm": "re-estimate"},  # statistics of one network say nothing of another's layer
)


class EnsembleOptions(Options):
    without = ("batch-norm",)  # clients always send whole networks


ensemble = Method(
    "ensemble",
    Traits(shares=sharing.Sharing("everything", averaged=False), keeps="model", common_init=True, serves_clients=False),
    EnsembleOptions,
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


@dataclass(frozen=True)
class LocalOptions(Options):
    public: Literal["unused", "mixed"] = option(
        "unused", "labelled public examples: unused, or mixed into the client's training batches"
    )


_alone = Traits(keeps="model", communicates=False)

local = Method(
    "local", lambda keys: replace(_alone, public="labelled" if keys.public == "mixed" else "none"), LocalOptions
)


@dataclass(frozen=True)
class ClassicalOptions(Options):
    without = (
        *keys_about("optimiser"),
        *("batch-size", "augment", "precision", "local-epochs", "closing-epochs", "start-from"),
    )


_classical = replace(_alone, predicts="a classifier of scikit-learn", trains_network=False)

nearest_neighbour = Method("nearest-neighbour", _classical, ClassicalOptions, common={"rounds": 1}, own={"rounds": 1})
logistic_regression = replace(nearest_neighbour, name="logistic-regression", family="logistic-regression")
label_spreading = replace(
    nearest_neighbour, name="label-spreading", family="label-spreading", traits=replace(_classical, public="inputs")
)
