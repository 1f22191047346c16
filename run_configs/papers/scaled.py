"""A table of each paper, scaled down to two cores: its runs, and the tables of README.md (`../tables.py`).

    python run_configs/papers/scaled.py fedma --data FOLDER --runs FOLDER   # goes on where it stopped
    python run_configs/papers/scaled.py                                     # the tables anew, from results/

Each benchmark is the preset of the paper's run with the keys that scale it down. `FOLDER` of `--data` has CIFAR-10.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedhet.comparing import Tuning
from fedhet.config import run_configs
from fedhet.registry import module_of

HERE = Path(__file__).resolve().parent
tables = module_of(str(run_configs() / "tables.py"))
costs = module_of(str(HERE / "costs.py"))

SEEDS, TUNED = (0, 1, 2), (10, 11)
SMALL = {"input-size": 16}
"""CIFAR-10 at 16 x 16."""


def printed(paper: str, setting: str, methods: Mapping[str, str], table: str = "") -> dict[str, str]:
    """A paper's numbers for CIFAR-10 in a setting, by variant; the mean over architectures, where it has several."""
    found: dict[str, str] = {}
    for variant, texts in methods.items():
        shown = []
        for text in texts.split(", "):
            method, _, unit = text.partition(": ")
            values = [
                float(row["value"])
                for row in costs.rows_of("numbers.csv")
                if row["paper"] == paper and row["dataset"] == "CIFAR-10" and setting in row["setting"]
                if row["table"].startswith(table or row["table"]) and row["method"].startswith(method)
            ]
            shown.append(f"{statistics.fmean(values) / 100:.3f} {unit}".strip())
        found[variant] = ", ".join(shown)
    return found


def fedhenn(classes: int, **more: Any) -> Any:
    """FedHeNN's tables 1 and 2: global models and personal ones."""
    keys = {"clients": 20, "samples-per-client": 100, "rounds": 30, "fedhenn.rad-size": 200, "fedhenn.rad-batch": 64}
    family = "architectures=cnn-family,assign=random"
    return tables.Benchmark(
        "fedhenn/cifar10_2cls_homogeneous.toml",
        {**SMALL, **keys, "classes-per-client": classes, "evaluate-every": 30},
        (
            *("local", "fedavg", "fedprox=fedprox,fedprox.mu=0.1", "fedhenn"),
            f"fedrep=fedrep,local-epochs={11 if classes == 2 else 15},fedrep.body-epochs={1 if classes == 2 else 5}",
            f"family=local,{family}",
            f"fedhenn-family=fedhenn,fedhenn.setting=heterogeneous,{family}",
        ),
        "local",
        seeds=SEEDS,
        scores={"personal_accuracy": "personal models", "global_accuracy": "global model"},
        printed=printed(
            "FedHeNN",
            f"100 clients, {classes} cls",
            {
                "fedavg": "FedAvg: global",
                "fedprox": "FedProx: global",
                "fedhenn": "FedHeNN-homo: personal, FedHeNN-global: global",
                "fedrep": "FedRep: personal",
                "fedhenn-family": "FedHeNN-hetero: personal",
            },
        ),
        **more,
    )


def fedharm(clients: int, partition: str, **more: Any) -> Any:
    """FedHARM's tables 1 (IID) and 2 (Dirichlet 0.1): mean accuracy of the clients on the common test set."""
    iid = partition == "iid"
    keys = {"architectures": "fedharm-small", "samples-per-client": 1800 // clients, "public-samples": 200}
    epochs = {"local-epochs": 2, "closing-epochs": 2, "batch-size": 32, "fedharm.slots": "128,256,256,96"}
    networks = {"rem": "fedharm-small", "res": "small-resnet-a,small-resnet-b"} if iid else {"rem": "fedharm-small"}
    variants = []
    for name, family in networks.items():
        variants += [
            f"fedharm-{name}=fedharm,architectures={family}",
            f"local-{name}=local,architectures={family}",
            f"mixed-{name}=local,local.public=mixed,architectures={family}",
        ]
    return tables.Benchmark(
        f"fedharm/cifar10_{partition}.toml",
        {**SMALL, **keys, **epochs, "clients": clients, "evaluate-every": 10},
        tuple(variants),
        "mixed-rem",
        seeds=SEEDS,
        scores={"personal_accuracy": "accuracy"},
        printed=printed(
            "FedHARM",
            f"{clients} clients, {'IID' if iid else 'Dirichlet 0.1'}",
            {f"fedharm-{name}": f"FedHARM_{name}" for name in networks},
            table="Table 1" if iid else "Table 2",
        ),
        **more,
    )


def fedma(keys: Mapping[str, Any], numbers: Mapping[str, str], **more: Any) -> Any:
    """FedMA's table 1 and figure 4: the global model on the common test set."""
    rounds = "local-epochs=2,rounds=20,weight-decay=1e-4"
    return tables.Benchmark(
        "fedma/cifar10_vgg9.toml",
        {**SMALL, "architectures": "lenet", "local-epochs": 15, "evaluate-every": 20, "fedma.passes": 5, **keys},
        (
            *("fedma", "identity=run_configs/fedma/controls.py:identity", "ensemble=ensemble,rounds=1,local-epochs=15"),
            *(f"fedavg=fedavg,{rounds}", f"fedprox=fedprox,fedprox.mu=0.001,{rounds}"),
            "fedavg-longer=fedavg,local-epochs=15,rounds=20,weight-decay=1e-4",
        ),
        "fedavg",
        seeds=SEEDS,
        scores={"common_accuracy": "global model"},
        printed=numbers,
        **more,
    )


def entire(dataset: str, **more: Any) -> Any:
    """Figure 4's training on the entire data, by one client."""
    return tables.Benchmark(
        "fedma/cifar10_vgg9.toml",
        {
            **SMALL,
            **{"dataset": dataset, "partition": "iid", "clients": 1, "samples-per-client": 3200},
            **{"architectures": "lenet", "rounds": 20, "local-epochs": 2, "evaluate-every": 20},
        },
        ("local",),
        "local",
        seeds=SEEDS,
        **more,
    )


def flha(clients: int, **more: Any) -> Any:
    """FLHA-GHN's table 1: mean accuracy over clients of four architectures."""
    once, twice = "rounds=12", "rounds=24,flha-distillation.teacher=flha-small-0,flha-distillation.teacher-rounds=0.5"
    return tables.Benchmark(
        "flha-ghn/cifar10.toml",
        {
            **SMALL,
            **{"architectures": "flha-small", "rounds": 60, "batch-size": 32, "evaluate-every": 60},
            **{"clients": clients, "samples-per-client": 2000 // clients},
        },
        (
            *("flha-ghn", f"local=local,{once}", "local-longer=local", "layer-average", "pfedhn"),
            *(f"distillation=flha-distillation,{twice}", f"upper=fedavg,architectures=flha-small-0,{once}"),
        ),
        "local-longer",
        seeds=SEEDS,
        scores={"personal_accuracy": "accuracy"},
        printed=printed(
            "FLHA-GHN",
            f"% ({clients} clients)",
            {
                "flha-ghn": "FLHA-GHN",
                "local": "Local",
                "pfedhn": "pFedHN",
                "distillation": "FLHA-distillation",
                "upper": "Upper bound",
            },
            table="Table 1",
        ),
        **more,
    )


def rates(*values: float, **of: tuple[float, ...]) -> Tuning:
    """Learning rates to try; those of single variants by their names."""
    own = {f"{name.replace('_', '-')}:learning-rate": tried for name, tried in of.items()}
    return Tuning({"learning-rate": values, **own}, TUNED)


def unseen(**more: Any) -> Any:
    """FLHA-GHN's table 6: a client of a fourth architecture comes after three have trained."""
    names = [f"flha-small-{number}" for number in range(4)]
    order = {name: ",".join([*(other for other in names if other != name), name]) for name in names}
    return tables.Benchmark(
        "flha-ghn/cifar10.toml",
        {
            **SMALL,
            **{"rounds": 60, "batch-size": 32, "evaluate-every": 60, "clients": 4, "samples-per-client": 500},
            **{"unseen-clients": 1, "unseen-epochs": 12},
        },
        tuple(f"{name}=flha-ghn,architectures={networks}" for name, networks in order.items()),
        names[0],
        seeds=SEEDS,
        unseen=True,
        printed={
            name: " and ".join(
                printed("FLHA-GHN", f"leave-one-out Arch{number}", {name: start}, "Table 6")[name]
                for start in ("GHN init", "from scratch")
            )
            for number, name in enumerate(names)
        },
        **more,
    )


TABLES = tables.Tables(
    HERE,
    {
        "fedma": fedma(
            {"samples-per-client": 200},
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
            {},
            rates_of="fedma",
        ),
        "fedma-entire": entire("cifar10-domains", tuning=rates(0.003, 0.01, 0.03)),
        "fedma-no-bias": entire("cifar10", tuning=rates(0.003, 0.01, 0.03)),
        "flha-8": flha(8, tuning=rates(0.01, 0.03, 0.1, flha_ghn=(0.003, 0.009, 0.03), pfedhn=(0.03, 0.1, 0.3))),
        "flha-4": flha(4, rates_of="flha-8"),
        "flha-16": flha(16, rates_of="flha-8"),
        "flha-unseen": unseen(rates_of="flha-8"),
        "fedharm-10": fedharm(10, "iid", tuning=rates(0.001, 0.003, 0.01)),
        "fedharm-5": fedharm(5, "iid", rates_of="fedharm-10"),
        "fedharm-20": fedharm(20, "iid", rates_of="fedharm-10"),
        **{
            f"fedharm-dirichlet-{clients}": fedharm(clients, "dirichlet", rates_of="fedharm-10")
            for clients in (5, 10, 20)
        },
        "fedhenn-2": fedhenn(2, tuning=rates(0.003, 0.01, 0.03)),
        "fedhenn-5": fedhenn(5, rates_of="fedhenn-2"),
    },
)

if __name__ == "__main__":
    TABLES.main()
