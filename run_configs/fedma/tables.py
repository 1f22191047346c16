"""FedMA and PFNM beside what has as many rounds or steps, and without matching: README.md's tables (`../tables.py`).

    python run_configs/fedma/tables.py own --runs FOLDER --data FOLDER   # goes on where it stopped
    python run_configs/fedma/tables.py                                   # the tables anew, from results/

Digits need no files: any `FOLDER` of `--data` will do.
"""

from pathlib import Path
from typing import Any

from fedhet.comparing import Tuning
from fedhet.config import run_configs
from fedhet.registry import module_of

tables = module_of(str(run_configs() / "tables.py"))

CONTROLS = "run_configs/fedma/controls.py"
WIDER = "variances=estimated,{0}.gamma=1,{0}.average=mean,{0}.max-growth=2"


def as_many_steps(rounds: int) -> str:
    """Settings of 60 epochs in as many rounds."""
    return f"rounds={rounds},local-epochs={60 // rounds}"


def digits(shared: bool) -> Any:
    """Eight clients, Dirichlet 0.5, an MLP of 200 and 200 units, 60 epochs, or 20 in one round."""
    wider, retrained = WIDER.format("fedma"), "fedma.last-epochs=1,fedma.retrain-epochs=20"
    return tables.Benchmark(
        "fedma/digits.toml",
        {"test-split": "drawn", "test-on": "global", "evaluate-every": 60, "shared-init": shared},
        (
            *("fedma", f"identity={CONTROLS}:identity", f"random={CONTROLS}:random"),
            f"fedma-2x=fedma,fedma.{wider},{retrained}",
            f"identity-2x={CONTROLS}:identity,{retrained}",
            *(f"fedavg-{rounds}=fedavg,{as_many_steps(rounds)}" for rounds in (3, 6, 12)),
            "fedma-slow=fedma,fedma.last-learning-rate=0.005",
            *("pfnm=pfnm,rounds=1", f"pfnm-2x=pfnm,rounds=1,pfnm.{WIDER.format('pfnm')}"),
            f"pfnm-identity={CONTROLS}:pfnm_identity,rounds=1",
            *("ensemble=ensemble,rounds=1", "fedavg-once=fedavg,rounds=1"),
        ),
        "fedavg-3",
        seeds=range(10),
        scores={"common_accuracy": "global model"},
        tuning=Tuning({"learning-rate": (0.02, 0.05, 0.1)}, (10, 11)),
    )


OWN = digits(shared=False)
SUMMARY = tables.Summary(
    {"own": "initial weights of their own", "shared": "equal initial weights"},
    tuple(variant.name for variant in tables.variants_of(OWN.variants)),
    [
        ("fedma", "identity"),
        *(("fedma-2x", name) for name in ("identity-2x", "fedavg-3", "fedavg-6")),
        *(("pfnm-2x", name) for name in ("pfnm", "pfnm-identity", "ensemble")),
    ],
    turned=True,
)
TABLES = tables.Tables(
    Path(__file__).resolve().parent, {"own": OWN, "shared": digits(shared=True)}, {"summary": SUMMARY}
)

if __name__ == "__main__":
    TABLES.main()
