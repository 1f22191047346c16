"""FedHARM's descriptors beside other targets, with and without labels of the public images: README.md's tables.

    python run_configs/fedharm/tables.py labels --runs FOLDER --data FOLDER   # goes on where it stopped
    python run_configs/fedharm/tables.py                                      # the tables anew, from results/

Of `foreign-labels` `FOLDER` of `--data` has MNIST's files; the others need none, any folder will do.
"""

from pathlib import Path
from typing import Any

from fedhet.comparing import Tuning
from fedhet.config import run_configs
from fedhet.registry import module_of

tables = module_of(str(run_configs() / "tables.py"))

CONTROLS = "run_configs/fedharm/controls.py"
FEW = {"samples-per-client": 20, "batch-size": 10}
FEDMD = "fedmd=fedmd,fedmd.private-epochs=0,fedmd.digest-epochs=2,fedmd.public-batch=34,closing-epochs=0"
ALONE = ("local=local,local-epochs=12,closing-epochs=0", "nearest-neighbour", "label-spreading")


def targets(more: str = "") -> tuple[str, ...]:
    """The paper's target, and others in its place."""
    own, shuffled = (f"{CONTROLS}:{name}" for name in ("own", "shuffled"))
    methods = {
        **{"fedharm": "fedharm", "own": own, "shuffled": shuffled},
        **{"cka": "fedharm,fedharm.align=cka", "own-cka": f"{own},fedharm.align=cka"},
        **{"spectral": "fedharm,fedharm.align=spectral", "own-spectral": f"{own},fedharm.align=spectral"},
    }
    return tuple(f"{name}={method}{more}" for name, method in methods.items())


def with_labels(mixed: str = "rounds=8,local-epochs=2", **of: Any) -> Any:
    """The public images' labels are known: what training on them alone gives is in the table."""
    mixed = f"mixed=local,local.public=mixed,{mixed},closing-epochs=0"
    alpha1 = "alpha1=fedharm,fedharm.alpha=1.0"
    return benchmark((*ALONE, mixed, alpha1, *targets(), f"{FEDMD},fedmd.public-epochs=2"), "alpha1", **of)


def without_labels(**of: Any) -> Any:
    """Without them descriptors are of the class that a network itself predicts."""
    return benchmark((*ALONE, *targets(",fedharm.alpha=0"), f"{FEDMD},fedmd.public-epochs=0"), "local", **of)


def benchmark(variants: tuple[str, ...], baseline: str, keys: Any = None, **of: Any) -> Any:
    """Five clients with five networks and as many steps in every variant; each seed draws its own test set."""
    keys = {"test-split": "drawn", "evaluate-every": 10, **(keys or {})}
    how = {"seeds": range(10), **of}
    if "rates_of" not in how:
        how["tuning"] = Tuning({"optimizer": ("adam", "sgd"), "learning-rate": (0.003, 0.01, 0.03)}, (10,))
    return tables.Benchmark("fedharm/digits.toml", keys, variants, baseline, **how)


TABLES = tables.Tables(
    Path(__file__).resolve().parent,
    {
        "labels": with_labels(),
        "few-labels": with_labels("rounds=7,local-epochs=1", keys=FEW),
        "foreign-labels": with_labels(keys={"public-dataset": "mnist"}, rates_of="labels"),
        "no-labels": without_labels(),
        "few-no-labels": without_labels(keys=FEW),
    },
    {
        "summary": tables.Summary(
            {
                "labels": "labels, 60 private",
                "few-labels": "labels, 20 private",
                "foreign-labels": "labels, public images of MNIST",
                "no-labels": "no labels, 60 private",
                "few-no-labels": "no labels, 20 private",
            },
            tuple(variant.name for variant in tables.variants_of(with_labels().variants)),
            [
                *(("fedharm", name) for name in ("local", "mixed", "own")),
                *(("cka", "own-cka"), ("spectral", "own-spectral")),
                *(("spectral", "label-spreading"), ("spectral", "fedmd"), ("fedmd", "label-spreading")),
            ],
            turned=True,
        )
    },
)

if __name__ == "__main__":
    TABLES.main()
