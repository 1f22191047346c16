"""Declaration of FedHeNN (Makhija et al., ICML 2022): clients with different networks align representations."""

from dataclasses import dataclass
from typing import Literal

from fedhet.errors import ConfigError
from fedhet.methods.method import METRICS, Method, Traits
from fedhet.methods.options import Options, option
from fedhet.methods.sharing import EVERYTHING, NOTHING

LEAST_ROWS = 8
"""Smallest number of examples on which the similarity (CKA) of representations is estimated."""

AUGMENTATION = "rad augmentation"
"""Name that, with the run's seed and the round, seeds the augmentation of the alignment examples at all clients."""


@dataclass(frozen=True)
class FedHeNNOptions(Options):
    # The defaults are the paper's, except for target and rad-batch. The RAD is the paper's representation alignment
    # dataset, on which the representations of clients are compared.
    setting: Literal["heterogeneous", "homogeneous"] = option(
        "heterogeneous", "heterogeneous: weights stay at the clients; homogeneous: weights are averaged as well"
    )
    target: Literal["kernel", "spectral"] = option(
        "spectral", "alignment target: spectral (this project's), or the peers' mean kernel (the paper's)"
    )
    eta0: float = option(-1.0, "weight of the proximal term, eta0 f(t); negative: 3 (spectral) or 0.001 (kernel)")
    schedule: Literal["auto", "sqrt", "linear", "constant"] = option(
        "auto", "f(t), with t = 0 in the first round; auto: constant (spectral) or sqrt (kernel)"
    )
    kernel: Literal["linear", "rbf", "procrustes"] = option(
        "linear",
        "kernel of CKA, or the orthogonal Procrustes distance; rbf and procrustes in the homogeneous setting only",
        needs={"target": ("kernel",)},
    )
    rad_source: Literal["held-out", "train-union"] = option(
        "held-out", "source of the RAD: examples held out of all training data, or the union of the training data"
    )
    rad_size: int = option(5000, "maximum number of examples in the RAD of a round", at_least=LEAST_ROWS)
    rad_batch: int = option(
        128,
        "number of RAD examples per training step, at least 8; 0: all, as in the paper",
        at_least=0,
        needs={"kernel": ("linear", "rbf")},
    )
    rad_every: int = option(1, "number of steps between proximal terms, whose weight is multiplied by it", at_least=1)

    def __post_init__(self) -> None:
        spectral = self.target == "spectral"
        if self.eta0 < 0:
            object.__setattr__(self, "eta0", 3.0 if spectral else 0.001)
        if self.schedule == "auto":
            object.__setattr__(self, "schedule", "constant" if spectral else "sqrt")
        if self.target == "kernel" and self.kernel != "linear" and not self.homogeneous:
            raise ConfigError(f"fedhenn.kernel = {self.kernel!r} needs fedhenn.setting = 'homogeneous', or use linear")
        if 0 < self.rad_batch < LEAST_ROWS:
            raise ConfigError(f"fedhenn.rad-batch = {self.rad_batch}: set at least {LEAST_ROWS}, or 0 for all examples")

    def eta(self, round: int) -> float:
        """Return the proximal term's weight, `eta0` f(t) with t = `round` - 1; f is 1, t or sqrt(t) by `schedule`."""
        return self.eta0 * {"sqrt": (round - 1) ** 0.5, "linear": round - 1, "constant": 1.0}[self.schedule]

    @property
    def homogeneous(self) -> bool:
        """Whether the server also averages the clients' networks, which then must have equal architectures."""
        return self.setting == "homogeneous"

    @property
    def sent(self) -> str:
        """Kind of the values that clients send for alignment examples: `posteriors`, `features`, or empty for none."""
        if not self.eta0 or (self.homogeneous and self.target == "kernel"):
            return ""
        return "posteriors" if self.target == "spectral" else "features"

    @property
    def makes_public_dataset(self) -> bool:  # type: ignore[override]
        """Whether the alignment examples are drawn from the union of the clients' training examples."""
        return self.rad_source == "train-union"


fedhenn = Method(
    "fedhenn",
    lambda options: Traits(
        networks="equal" if options.homogeneous else "any",
        shares=EVERYTHING if options.homogeneous else NOTHING,
        keeps="model",
        common_init=options.homogeneous,
        public="inputs" if options.eta0 else "none",
        other_arrays="whole" if options.sent == "features" else "",  # posteriors have a given norm
        sends={"distance": METRICS} | ({options.sent: options.sent} if options.sent else {}),
    ),
    FedHeNNOptions,
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
    own={"fedhenn.eta0": 1.0, "fedhenn.rad-every": 4},
)
