"""The spectral target on three data sets, and where it may break: runs, and tables of README.md (`../tables.py`).

    python run_configs/fedhenn/tables.py digits --data FOLDER --runs FOLDER   # goes on where it stopped
    python run_configs/fedhenn/tables.py                                      # the tables anew, from results/

`FOLDER` of `--data` has the files of the benchmark's data set (of `elsewhere` MNIST's); digits need none.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from fedhet.comparing import Tuning
from fedhet.config import run_configs
from fedhet.registry import module_of

HERE = Path(__file__).resolve().parent
tables = module_of(str(run_configs() / "tables.py"))
disjoint = module_of(str(HERE / "disjoint.py"))
cloudpickle.register_pickle_by_value(disjoint)  # the processes of runs cannot import it by its name

CONTROLS = "run_configs/fedhenn/controls.py"
TUNING = Tuning({"optimizer": ("sgd", "adam"), "learning-rate": (0.003, 0.03), "fedhenn.eta0": (1, 3, 10)}, (10,))
SEEDS = (*range(5, 10), *range(13, 18))
"""Those that are reported: 0 to 4 showed that gradients have to be clipped, and tuning takes 10, then 18 and on."""

WITHOUT_PEERS = ("local", "nearest-neighbour", "label-spreading", f"inputs={CONTROLS}:inputs", f"own={CONTROLS}:own")


def spectral(variants: tuple[str, ...], keys: Mapping[str, Any], **of: Any) -> Any:
    """A benchmark of twenty clients with thirty images each, whose test parts each seed draws."""
    keys = {"test-split": "drawn", "evaluate-every": 10, **keys}
    how = {"seeds": SEEDS, **of}
    return tables.Benchmark("fedhenn/digits_spectral.toml", keys, variants, "local", **how)


def targets(dataset: str, networks: str) -> Any:
    """All targets, tuned alike."""
    keys: dict[str, Any] = {"architectures": networks, "dataset": dataset}
    if dataset != "digits":
        keys["input-size"] = 14
    variants = (*WITHOUT_PEERS, f"kernel={CONTROLS}:frobenius,fedhenn.target=kernel", "spectral=fedhenn")
    return spectral(variants, keys, tuning=TUNING)


def condition(
    like: str = "",
    spectral_as: str = "fedhenn",
    supplied: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = SEEDS,
    **keys: Any,
) -> Any:
    """A condition that may break the spectral target: tuned, or with the settings that were chosen without it."""
    keys = {key.replace("_", "-"): value for key, value in keys.items()}
    rates: dict[str, Any] = {"rates_of": like} if like else {"tuning": TUNING}
    return spectral((*WITHOUT_PEERS, f"spectral={spectral_as}"), keys, supplied=supplied or {}, seeds=seeds, **rates)


TABLES = tables.Tables(
    HERE,
    {
        "digits": targets("digits", "cnn-family"),
        "digits-mlps": targets("digits", "mlp-widths"),
        "mnist": targets("mnist", "cnn-family"),
        "mnist-mlps": targets("mnist", "mlp-widths"),
        "fashion-mnist": targets("fashion-mnist", "cnn-family"),
        "fashion-mnist-mlps": targets("fashion-mnist", "mlp-widths"),
        "five-classes": condition(partition="classes", classes_per_client=5),
        "two-classes": condition(partition="classes", classes_per_client=2),
        "disjoint": condition(supplied={"model": disjoint.model, "data": disjoint.data}, test_split="given"),
        "participation": condition(fraction_train=0.3, rounds=33, evaluate_every=33),
        "elsewhere": condition(public_dataset="mnist"),
        "hostile": condition(spectral_as=f"{CONTROLS}:hostile"),
        "hundred-clients": condition("mnist", seeds=SEEDS[:5], dataset="mnist", input_size=14, clients=100),
    },
    {
        "summary": tables.Summary(
            {
                "digits": "digits, CNNs",
                "digits-mlps": "digits, MLPs",
                "mnist": "MNIST, CNNs",
                "mnist-mlps": "MNIST, MLPs",
                "fashion-mnist": "Fashion-MNIST, CNNs",
                "fashion-mnist-mlps": "Fashion-MNIST, MLPs",
                "five-classes": "digits, five classes a client",
                "two-classes": "digits, two classes a client",
                "disjoint": "digits, disjoint label sets",
                "participation": "digits, three of ten clients a round",
                "elsewhere": "digits, public images of MNIST",
                "hostile": "digits, a hostile fifth",
                "hundred-clients": "MNIST, a hundred clients",
            },
            ("local", "label-spreading", "own", "kernel", "spectral"),
            [("spectral", name) for name in ("local", "label-spreading", "own")],
        ),
    },
)

if __name__ == "__main__":
    TABLES.main()
