"""Run the methods in other libraries' benchmarks, and write the tables of README.md (`../tables.py`).

python run_configs/htfl/tables.py mnist --data FOLDER --runs FOLDER   # goes on where it stopped
python run_configs/htfl/tables.py                                     # the tables anew, from results/
"""

from pathlib import Path
from typing import Any

from fedhet.comparing import Tuning
from fedhet.config import run_configs
from fedhet.registry import module_of

tables = module_of(str(run_configs() / "tables.py"))

HTFL: dict[str, Any] = {
    "preset": "local/htfl_mnist.toml",
    "keys": {"public-samples": 500},
    "variants": (
        *("local", "fedproto", "fd", "fml", "alone=run_configs/fml/controls.py:shared_alone", "lg-fedavg", "fedgh"),
        *("fedmrl", "fedtgp", "paper=fedtgp,fedtgp.weight=.1", "fedkd", "fedgen", "fedhenn", "flha-ghn"),
        *("nearest-neighbour", "label-spreading"),
    ),
    "baseline": "local",
    "costs": "htfl_costs",
}
SUMMARY = tables.Summary(
    {
        "mnist": "MNIST",
        "fashion-mnist": "Fashion-MNIST",
        "mnist-two-classes": "MNIST, two classes a client",
        "mnist-tuned": "MNIST, learning rate tuned",
    },
    ("local",),
    [(variant.name, "local") for variant in tables.variants_of(HTFL["variants"][1:])],
    turned=True,
)
TABLES = tables.Tables(
    Path(__file__).resolve().parent,
    {
        "mnist": tables.Benchmark(**HTFL),
        "fashion-mnist": tables.Benchmark(**{**HTFL, "keys": {**HTFL["keys"], "dataset": "fashion-mnist"}}),
        "mnist-two-classes": tables.Benchmark(**{**HTFL, "keys": {**HTFL["keys"], "partition": "classes"}}),
        "mnist-tuned": tables.Benchmark(**HTFL, tuning=Tuning({"learning-rate": (0.01, 0.03, 0.1)}, (10, 11))),
        "heflwr": tables.Benchmark(
            "heterofl/heflwr_mnist.toml",
            {"samples-per-client": 375, "evaluate-every": 50},
            ("heterofl", "fedrolex", "fjord", "large=run_configs/heterofl/controls.py:large_only", "fedavg", "local"),
            "large",
            seeds=range(10),
            costs="heflwr_costs",
            tuning=Tuning({"learning-rate": (0.001, 0.003, 0.01)}, (10, 11)),
        ),
        "depths": tables.Benchmark(
            "depthfl/digits_plain.toml",
            {"evaluate-every": 30},
            (
                *("depthfl", "exits=run_configs/depthfl/controls.py:exits_large_only", "inclusivefl"),
                *("large=run_configs/depthfl/controls.py:large_only", "fedavg", "local"),
            ),
            "large",
            costs="depths_costs",
            tuning=Tuning({"learning-rate": (0.001, 0.003, 0.01)}, (10, 11)),
        ),
    },
    {"htflib": SUMMARY},
)

if __name__ == "__main__":
    TABLES.main()
