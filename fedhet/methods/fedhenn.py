"""FedHeNN (Makhija et al., ICML 2022)."""

import math
from dataclasses import dataclass
from typing import Literal

from fedhet.errors import ConfigError
from fedhet.method import METRICS, Drawing, Method, Traits
from fedhet.options import Config, Parameters, option
from fedhet.sharing import EVERYTHING, NOTHING, SENT

LEAST_ROWS = 8
"""Rows on which similarity can be estimated: RBF blocks of at most as many have at least the four that HSIC_1 needs."""

AUGMENTATION, SHUFFLE = "rad augmentation", "shuffled rows"
"""What both halves draw in a round, the same for all clients: purposes of random streams."""


@dataclass(frozen=True)
class FedHeNNParameters(Parameters):
    """FedHeNN's own keys, with the paper's values but for the target, which is fedhet's own.

    What is left to the target, `eta0` and `schedule`, is settled when the keys are made.
    """

    setting: str = option(
        "heterogeneous",
        "heterogeneous: personal models, kernels are shared; homogeneous: weights are averaged as well",
        choices=("heterogeneous", "homogeneous"),
    )
    eta0: float = option(
        -1.0,
        "weight of the proximal term, eta(t) = eta0 f(t); negative: 3 for the spectral target, else the paper's 0.001",
    )
    schedule: str = option(
        "auto",
        "f(t), t = 0 in the first round; auto: constant for the spectral target, else the paper's sqrt",
        choices=("auto", "sqrt", "linear", "constant"),
    )
    rad_size: int = option(5000, "rows of the pool in a round's RAD (at most the pool's)", at_least=LEAST_ROWS)
    rad_source: str = option(
        "held-out",
        "pool that the RAD is drawn from: held out of all training data, or the union of the clients' (the paper's)",
        choices=("held-out", "train-union"),
    )
    target: Literal["kernel", "spectral", "inputs"] = option(
        "spectral",
        "what clients are aligned with: how the class posteriors of all cluster the pool (fedhet's own), a kernel of "
        "representations (the paper's), or a linear kernel of the raw inputs (a control)",
        choices=("kernel", "spectral", "inputs"),
    )
    whose: Literal["peers", "own", "shuffled"] = option(
        "peers",
        "whose target: the peers', or as controls the client's own one of the last round, or the peers' of other rows",
        choices=("peers", "own", "shuffled"),
    )
    clusters: int = option(
        0,
        "columns of the spectral target; 0: as many as a client has classes, or more if clients agree on more",
        at_least=0,
    )
    rad_batch: int = option(128, "rows of the RAD in a training step (8 or more); 0: all, as in the paper", at_least=0)
    rad_every: int = option(1, "take the term every so many steps, that much heavier", at_least=1)
    kernel: Literal["linear", "rbf", "procrustes"] = option(
        "linear",
        "kernel of CKA; procrustes: orthogonal Procrustes distance instead (homogeneous only)",
        choices=("linear", "rbf", "procrustes"),
    )
    rbf_threshold: float = option(0.5, "bandwidth of the RBF kernel in median distances", above=0)
    kernel_norm: Literal["raw", "frobenius"] = option(
        "raw", "scale of each peer's kernel in the mean: raw, or divided by its norm", choices=("raw", "frobenius")
    )
    peers: str = option(
        "selected", "whose kernels are averaged: the last round's clients, or all", choices=("selected", "all")
    )
    peer_weights: str = option("uniform", "w_j: uniform, examples, or a comma-separated number for each client")
    representations: str = option(
        "clients",
        "who computes the peers' representations: clients send theirs and keep their models, or the server does from "
        "models that they send (the paper)",
        choices=("clients", "server"),
    )
    target_error: float = option(
        0.002, "error of the alignment's gradient that compression aims at; 0: features travel whole", at_least=0
    )
    target_dtype: Literal["float16", "float32"] = option(
        "float16", "dtype of kernels and posteriors on the wire", choices=("float16", "float32")
    )
    probe: int = option(256, "pool rows for the report's CKA between clients before and after; 0: none", at_least=0)

    def __post_init__(self) -> None:
        """Settle what is left to the target, and check what goes together.

        Raises:
            ConfigError: what does not.
        """
        spectral = self.target == "spectral"
        if self.eta0 < 0:
            object.__setattr__(self, "eta0", 3.0 if spectral else 0.001)
        if self.schedule == "auto":
            object.__setattr__(self, "schedule", "constant" if spectral else "sqrt")
        if self.kernel == "procrustes" and self.setting != "homogeneous":
            raise ConfigError(
                "fedhenn.kernel = 'procrustes' compares equally wide representations of one global model: it needs "
                "fedhenn.setting = 'homogeneous'"
            )
        if 0 < self.rad_batch < LEAST_ROWS:
            raise ConfigError(f"fedhenn.rad-batch = {self.rad_batch}: must be 0 (all rows) or at least {LEAST_ROWS}")
        if self.peer_weights not in ("uniform", "examples"):
            listed_weights(self.peer_weights)

    def eta(self, round: int) -> float:
        """The weight of the term in a round (from 1): eta0 f(t) with t = round - 1."""
        return self.eta0 * {"sqrt": (round - 1) ** 0.5, "linear": round - 1, "constant": 1.0}[self.schedule]

    @property
    def alone(self) -> bool:
        """Whether a client makes its target by itself: of the inputs, of its own network, or of the global model."""
        return self.target == "inputs" or self.whose == "own" or (self.homogeneous and self.target == "kernel")

    @property
    def homogeneous(self) -> bool:
        """Whether weights are averaged as well."""
        return self.setting == "homogeneous"

    @property
    def makes_pool(self) -> bool:
        """The RAD may be drawn from all training examples."""
        return self.rad_source == "train-union"

    def augments(self, config: Config) -> bool:
        """Whether X(t) is augmented, once a round: where it is of the clients' training images, which are."""
        return config.augment and self.rad_source == "train-union"

    def idle(self, config: Config) -> dict[str, str]:
        """What another kind of target, or another maker of it, has no use for.

        Homogeneous clients have one model: its kernel is everybody's own one, and they compute it themselves.
        """
        travels = ["peers", "peer_weights", "representations", "target_error", "target_dtype", "kernel_norm"]
        kernels = ["kernel", "rbf_threshold", "kernel_norm", "target_error"]
        reasons: dict[str, list[str]] = {}
        if self.homogeneous:
            own = ["whose"] if self.whose == "own" else []
            reasons["setting"] = [*own, *travels] if self.target == "kernel" else ["representations"]
        if self.kernel != "rbf":
            reasons["kernel"] = ["rbf_threshold"]
        if self.kernel == "procrustes":
            reasons["kernel"] += ["rad_batch"]
        if self.whose == "own" and not (self.homogeneous and self.target == "kernel"):
            reasons["whose"] = travels
        if self.target != "kernel":
            reasons.pop("kernel", None)  # it is put back itself
            reasons["target"] = kernels if self.target == "spectral" else [*kernels, *travels, "whose"]
        if self.target != "spectral":
            reasons["target"] = [*reasons.get("target", []), "clusters"]
        return self.set_in_vain("fedhenn", reasons)


def listed_weights(text: str) -> list[float]:
    """`fedhenn.peer-weights` as numbers, one a client in order of name.

    Raises:
        ConfigError: it is none.
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = [-1.0]
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ConfigError(
            f"fedhenn.peer-weights = {text!r}: must be uniform, examples, or numbers separated by commas, none negative"
        )
    return weights


def _traits(parameters: FedHeNNParameters) -> Traits:
    pool: Literal["inputs", "none"] = "inputs" if parameters.eta0 else "none"
    tells = {"distance": METRICS} | ({"probe": "features"} if parameters.eta0 and parameters.probe else {})
    if parameters.homogeneous:
        return Traits("equal", EVERYTHING, "model", "trained", together=True, pool=pool, tells=tells)
    # The server cannot represent anything without BatchNorm's statistics, which nobody averages here.
    shares = SENT if parameters.representations == "server" else NOTHING
    if parameters.eta0 and not parameters.alone and parameters.representations != "server":
        told = "posteriors" if parameters.target == "spectral" else "features"
        tells[told] = told
    # Posteriors, RBF kernels and kernels that are divided by their norm are of one size whoever tells them.
    sized = parameters.target == "kernel" and (parameters.kernel, parameters.kernel_norm) == ("linear", "raw")
    combined: Literal["whole", ""] = "whole" if parameters.eta0 and not parameters.alone and sized else ""
    return Traits(shares=shares, keeps="model", scored="trained", pool=pool, combined=combined, tells=tells)


method = Method(
    "fedhenn",
    traits=_traits,
    Parameters=FedHeNNParameters,
    server="fedhet.strategies.fedhenn:FedHeNN",
    client="fedhet.client_apps.fedhenn:FedHeNN",
    common={
        "rounds": 200,
        "fraction-train": 0.1,
        "local-epochs": 20,
        "batch-size": 10,
        "learning-rate": 0.01,
        "momentum": 0.5,
        "weight-decay": 1e-4,
        "closing-epochs": 10,
    },
    drawings={
        "cka": Drawing(
            "fedhet.results.drawings:cka_figure",
            "Similarity (linear CKA, 0 to 1) of the representations of every two clients.",
        )
    },
)
