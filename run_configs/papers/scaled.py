"""A table of each paper, scaled down to two cores: its runs, and the tables of README.md (`../tables.py`).

    python run_configs/papers/scaled.py fedma --data FOLDER --runs FOLDER   # goes on where it stopped
    python run_configs/papers/scaled.py                                     # the tables anew, from results/

Each benchmark is the preset of the paper's run with the keys that scale it down. `FOLDER` of `--data` has CIFAR-10.
"""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhet.comparing import Tuning
from fedhet.config import run_configs
from fedhet.registry import module_of

HERE = Path(__file__).resolve().parent
tables = module_of(str(run_configs() / "tables.py"))
costs = module_of(str(HERE / "costs.py"))

SEEDS, TUNED = (0, 1, 2), (10,)
SMALL = {"input-size": 16}
"""CIFAR-10 at 16 x 16."""

CONTROLS = "run_configs/fedma/controls.py"
STARTS = ("GHN init", "from scratch")

NUMBERS = [
    row
    for row in costs.rows_of("numbers.csv")
    if row["dataset"].startswith("CIFAR-10") and row["dataset"] != "CIFAR-100"
]
"""The papers' numbers for CIFAR-10, also with grey images."""


def printed(paper: str, setting: str, methods: Mapping[str, str], table: str = "") -> dict[str, str]:
    """A paper's numbers in a setting, by variant, of the methods whose names begin so: their mean."""
    found = {}
    for variant, method in methods.items():
        values = [
            float(row["value"])
            for row in NUMBERS
            if row["paper"] == paper and setting in row["setting"] and row["table"].startswith(table)
            if row["method"].startswith(method)
        ]
        found[variant] = f"{statistics.fmean(values) / 100:.3f}"
    return found


def fedhenn(classes: int, **more: Any) -> Any:
    """FedHeNN's tables 1 (global models) and 2 (personal ones) with equal networks.

    eta0 is so much larger that the term's weight in the last of 20 rounds is that in the last of the paper's 200.
    """
    keys = {"clients": 20, "samples-per-client": 100, "rounds": 20, "fedhenn.rad-size": 200, "fedhenn.rad-batch": 64}
    setting = f"100 clients, {classes} cls"
    served = printed("FedHeNN", setting, {"fedavg": "FedAvg", "fedprox": "FedProx", "fedhenn": "FedHeNN-global"})
    own = printed("FedHeNN", setting, {"fedhenn": "FedHeNN-homo", "fedrep": "FedRep"})
    return tables.Benchmark(
        "fedhenn/cifar10_2cls_homogeneous.toml",
        {**SMALL, **keys, "classes-per-client": classes, "fedhenn.eta0": 0.0032, "evaluate-every": 20},
        (
            *("local", "fedhenn", "without-term=fedhenn,fedhenn.eta0=0"),
            f"fedrep=fedrep,local-epochs={11 if classes == 2 else 15},fedrep.body-epochs={1 if classes == 2 else 5}",
            *("fedavg", "fedprox=fedprox,fedprox.mu=0.1"),
        ),
        "local",
        baselines={"global_accuracy": "fedavg"},
        seeds=SEEDS,
        scores={"personal_accuracy": "personal models", "global_accuracy": "global model"},
        printed={
            **{name: f"{number} global" for name, number in served.items()},
            "fedhenn": f"{own['fedhenn']} personal, {served['fedhenn']} global",
            "fedrep": f"{own['fedrep']} personal",
        },
        **more,
    )


def family(classes: int, **more: Any) -> Any:
    """FedHeNN's table 2 with five networks."""
    alike = fedhenn(classes)
    keys = {"architectures": "cnn-family", "assign": "random", "fedhenn.setting": "heterogeneous"}
    return replace(
        alike,
        keys={**alike.keys, **keys},
        variants=("local", "fedhenn"),
        scores={"personal_accuracy": "personal models"},
        printed=printed("FedHeNN", f"100 clients, {classes} cls", {"fedhenn": "FedHeNN-hetero"}),
        **more,
    )


def fedharm(clients: int, partition: str, networks: str = "rem", **more: Any) -> Any:
    """FedHARM's tables 1 (IID) and 2 (Dirichlet 0.1): mean accuracy of the clients on the common test set.

    `longer` has about as many steps as the methods that train on the public examples, too; `own` is FedHARM without
    peers.
    """
    keys = {"samples-per-client": 1800 // clients, "public-samples": 200, "clients": clients, "evaluate-every": 10}
    epochs = {"local-epochs": 2, "closing-epochs": 2, "batch-size": 32, "fedharm.slots": "128,256,256,96"}
    architectures = {"rem": "fedharm-small", "res": "small-resnet-a,small-resnet-b"}[networks]
    longer = {5: 3, 10: 4, 20: 7}[clients]
    return tables.Benchmark(
        f"fedharm/cifar10_{partition}.toml",
        {**SMALL, **keys, **epochs, "architectures": architectures},
        (
            "local=local,closing-epochs=0",
            f"longer=local,closing-epochs=0,local-epochs={longer}",
            "mixed=local,closing-epochs=0,local.public=mixed",
            "own=run_configs/fedharm/controls.py:own",
            "fedharm",
        ),
        "mixed",
        seeds=SEEDS,
        scores={"personal_accuracy": "accuracy"},
        printed=printed(
            "FedHARM",
            f"{clients} clients, {'IID' if partition == 'iid' else 'Dirichlet 0.1'}",
            {"fedharm": f"FedHARM_{networks}"},
            table="Table 1" if partition == "iid" else "Table 2",
        ),
        **more,
    )


def fedma(keys: Mapping[str, Any], epochs: tuple[int, int], numbers: Mapping[str, str], **more: Any) -> Any:
    """FedMA's table 1 and figure 4, 4 passes of 4 rounds: the global model on the common test set.

    What is the paper's for VGG-9 alone, a last round of a pass thrice as long at a tenth of the rate, is left out. The
    epochs of a round are FedMA's, and FedAvg's and FedProx's. In batches of 64 FedAvg would end at
    chance, after 98 steps.
    """
    long, short = epochs
    averaged = "rounds=16,weight-decay=1e-4,local-epochs"
    return tables.Benchmark(
        "fedma/cifar10_vgg9.toml",
        {
            **SMALL,
            **{"architectures": "lenet", "local-epochs": long, "batch-size": 16, "evaluate-every": 16},
            **{"fedma.passes": 4, "fedma.last-learning-rate": 0.0, "fedma.last-epochs": 1, **keys},
        },
        (
            *("fedma", f"identity={CONTROLS}:identity", "ensemble=ensemble,rounds=1,weight-decay=1e-4"),
            *(f"fedavg=fedavg,{averaged}={short}", f"fedprox=fedprox,fedprox.mu=0.001,{averaged}={short}"),
            f"fedavg-longer=fedavg,{averaged}={long}",
        ),
        "fedavg",
        seeds=SEEDS,
        scores={"common_accuracy": "global model"},
        printed=numbers,
        **more,
    )


def entire(dataset: str, method: str) -> Any:
    """Figure 4's training on the entire data, by one client."""
    return tables.Benchmark(
        "local/cifar10_domains.toml",
        {
            **SMALL,
            **{"dataset": dataset, "samples-per-client": 3200, "architectures": "lenet"},
            **{"rounds": 40, "evaluate-every": 40},
        },
        ("local",),
        "local",
        seeds=SEEDS,
        scores={"personal_accuracy": "accuracy"},
        printed=printed("FedMA", "", {"local": f"{method} SGD"}, "Appendix F"),
        tuning=rates(0.003, 0.01, 0.03),
    )


def flha(clients: int, **more: Any) -> Any:
    """FLHA-GHN's table 1: mean accuracy over clients of four architectures."""
    teacher = "rounds=80,flha-distillation.teacher=flha-small-0,flha-distillation.teacher-rounds=0.5"
    return tables.Benchmark(
        "flha-ghn/cifar10.toml",
        {
            **SMALL,
            **{"architectures": "flha-small", "rounds": 40, "batch-size": 32, "evaluate-every": 40},
            **{"clients": clients, "samples-per-client": 2000 // clients},
        },
        (
            *("local", "flha-ghn", "layer-average", "pfedhn"),
            f"distillation=flha-distillation,{teacher},flha-distillation.student-learning-rate=0.1",
            "upper=fedavg,architectures=flha-small-0",
        ),
        "local",
        seeds=SEEDS,
        scores={"personal_accuracy": "accuracy"},
        printed=printed(
            "FLHA-GHN",
            f"% ({clients} clients)",
            {
                "local": "Local",
                "flha-ghn": "FLHA-GHN",
                "pfedhn": "pFedHN",
                "distillation": "FLHA-distillation",
                "upper": "Upper bound",
            },
            table="Table 1",
        ),
        **more,
    )


def longer(alike: Any, rounds: int, **more: Any) -> Any:
    """A benchmark of FLHA-GHN's table 1 in more rounds."""
    keys = {**alike.keys, "rounds": rounds, "evaluate-every": rounds}
    return replace(alike, keys=keys, variants=("local", "flha-ghn", "layer-average"), printed={}, **more)


def unseen(**more: Any) -> Any:
    """FLHA-GHN's table 6: a client of a fourth architecture comes after three have trained.

    From scratch it trains at the rate that `local` chose.
    """
    alike, names = flha(4), [f"flha-small-{number}" for number in range(4)]
    order = {name: ",".join([*(other for other in names if other != name), name]) for name in names}
    numbers = {}
    for number, name in enumerate(names):
        both = [printed("FLHA-GHN", f"leave-one-out Arch{number}", {name: of}, "Table 6")[name] for of in STARTS]
        numbers[name] = f"{both[0]}; from scratch {both[1]}"
    return replace(
        alike,
        keys={**alike.keys, "unseen-clients": 1, "unseen-epochs": 40},
        variants=(
            *(f"{name}=flha-ghn,architectures={networks}" for name, networks in order.items()),
            *(f"{name}{tables.SCRATCH}=local,architectures={networks}" for name, networks in order.items()),
        ),
        baseline=names[0],
        unseen=True,
        printed=numbers,
        **more,
    )


def rates(*values: float, **of: tuple[float, ...]) -> Tuning:
    """Learning rates to try; those of single variants by their names."""
    own = {f"{name.replace('_', '-')}:learning-rate": tried for name, tried in of.items()}
    return Tuning({"learning-rate": values, **own}, TUNED)


SUMMARIES = {
    "entire": tables.Summary(
        {
            "fedma-entire": "half of the classes grey",
            "fedma-balanced": "half of each class grey",
            "fedma-no-bias": "all images in colour",
        },
        ("local",),
        (),
    ),
    "flha": tables.Summary(
        {
            **{f"flha-{clients}": f"{clients} clients" for clients in (4, 8, 16)},
            "flha-8-longer": "8 clients, 200 epochs",
        },
        ("local", "flha-ghn", "layer-average", "pfedhn", "distillation", "upper"),
        [*(("flha-ghn", name) for name in ("local", "layer-average", "distillation")), ("pfedhn", "local")],
    ),
    "fedharm": tables.Summary(
        {
            f"{name}-{clients}": f"{words}, {clients} clients"
            for name, words in (("fedharm", "rem"), ("fedharm-res", "res"), ("fedharm-dirichlet", "rem, Dirichlet 0.1"))
            for clients in (5, 10, 20)
        },
        ("local", "longer", "mixed", "own", "fedharm"),
        [("fedharm", name) for name in ("local", "mixed", "own")],
    ),
    "family": tables.Summary(
        {"fedhenn-family-2": "two classes a client", "fedhenn-family-5": "five classes a client"},
        ("local", "fedhenn"),
        [("fedhenn", "local")],
    ),
}

TABLES = tables.Tables(
    HERE,
    {
        "fedma": fedma(
            {"public-samples": 50_000 - 3200},
            (15, 2),
            printed(
                "FedMA",
                "J=16 Dir(0.5)",
                {"fedma": "FedMA", "ensemble": "Ensemble", "fedavg": "FedAvg", "fedprox": "FedProx"},
                table="Table 1",
            ),
            tuning=rates(0.003, 0.01, 0.03),
        ),
        "fedma-domains": fedma(
            {"dataset": "cifar10-domains", "partition": "natural", "clients": 2, "samples-per-client": 1600},
            (10, 1),
            {},
            rates_of="fedma",
        ),
        "fedma-entire": entire("cifar10-domains", "Entire data"),
        "fedma-balanced": entire("cifar10-domains-balanced", "Color balanced"),
        "fedma-no-bias": entire("cifar10", "No bias"),
        "flha-8": flha(8, tuning=rates(0.01, 0.03, 0.1, flha_ghn=(0.003, 0.009, 0.03), pfedhn=(0.03, 0.1, 0.3))),
        "flha-8-longer": longer(flha(8), 200, rates_of="flha-8"),
        "flha-4": flha(4, rates_of="flha-8"),
        "flha-16": flha(16, rates_of="flha-8"),
        "flha-unseen": unseen(rates_of="flha-8"),
        "fedharm-10": fedharm(10, "iid", tuning=rates(0.001, 0.003, 0.01)),
        "fedharm-5": fedharm(5, "iid", rates_of="fedharm-10"),
        "fedharm-20": fedharm(20, "iid", rates_of="fedharm-10"),
        **{f"fedharm-res-{clients}": fedharm(clients, "iid", "res", rates_of="fedharm-10") for clients in (5, 10, 20)},
        **{
            f"fedharm-dirichlet-{clients}": fedharm(clients, "dirichlet", rates_of="fedharm-10")
            for clients in (5, 10, 20)
        },
        "fedhenn-2": fedhenn(2, tuning=rates(0.003, 0.01, 0.03)),
        "fedhenn-5": fedhenn(5, rates_of="fedhenn-2"),
        "fedhenn-family-2": family(2, rates_of="fedhenn-2"),
        "fedhenn-family-5": family(5, rates_of="fedhenn-2"),
    },
    SUMMARIES,
)

if __name__ == "__main__":
    TABLES.main()
