"""Seconds of a round and steps per second on a GPU: clients one by one, in worker processes, and in batches.

python -m tests.benchmarks.gpu [--device cuda] [--data FOLDER with CIFAR-10] [--clients 10,100,1000]
"""

import argparse
import statistics
import tempfile
from itertools import product
from pathlib import Path

from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.engines.workers import WorkerGrid
from fedhet.results.history import read_history

METHODS: dict[str, dict[str, object]] = {
    "fedavg": {},
    "fedproto": {"fedproto.width": 32},
    "fedhenn": {"public-samples": 500},
}
NETWORKS = {"digits": ("cnn", "mlp"), "cifar10": ("cnn", "resnet")}


def measured(own: dict[str, object]) -> tuple[float, float]:
    """Return the median seconds of a round, without the first two, and training steps per second."""
    with tempfile.TemporaryDirectory() as folder:
        run_locally(configuration.resolve(own), Path(folder) / "run")
        rows = [row for row in read_history(Path(folder) / "run") if row["round"] and not row.get("final")][2:]
    seconds = statistics.median(row["timing"]["seconds"] for row in rows)
    return seconds, statistics.median(row["work"]["steps"] for row in rows) / seconds


def main() -> None:
    """Measure all cases, and print a table row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", default="")
    parser.add_argument("--clients", default="10,100,1000")
    arguments = parser.parse_args()
    WorkerGrid.patience = 0.0
    print("| data set | network | method | clients | batch | workers | s a round | steps a second |")
    print("| --- | --- | --- | ---: | --- | ---: | ---: | ---: |")
    for dataset, clients, method in product(NETWORKS, map(int, arguments.clients.split(",")), METHODS):
        if dataset != "digits" and not arguments.data:
            continue
        for network, batch, workers in product(NETWORKS[dataset], ("off", "10", "100", "100 compiled"), (1, 8)):
            own: dict[str, object] = {"method": method, **METHODS[method], "dataset": dataset, "clients": clients}
            own |= {"architectures": network, "samples-per-client": 32, "batch-size": 16, "learning-rate": 0.05}
            most, _, compiled = batch.partition(" ")
            own |= {"device": arguments.device, "workers": workers, "rounds": 6}
            own |= {"client-batching": most, "compile": bool(compiled)}
            own |= {"preset": "", "report": False} | ({"data": arguments.data} if dataset != "digits" else {})
            seconds, steps = measured(own)
            print(
                f"| {dataset} | {network} | {method} | {clients} | {batch} | {workers} | {seconds:.3f} | {steps:.0f} |"
            )


if __name__ == "__main__":
    main()
