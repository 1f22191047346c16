"""What differential privacy costs on digits, for each kind of values: prints the table of the deployment page.

`python tests/robustness/private.py [SEED ...] [METHOD ...]`, by default seeds 0, 1 and 2, and all methods. Five clients
have 288 digits each and train for 20 rounds of two epochs. Accuracy is that of the method's scored networks on the
common test set after the last round: the mean over seeds, and in brackets the lowest and the highest.
"""

import logging
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from flwr.clientapp import ClientApp

import fedhet.results.recorder
from fedhet.client.app import make_client_app
from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.results.history import read_clients, read_history

COMMON = {
    "dataset": "digits",
    "clients": 5,
    "samples-per-client": 288,
    "architectures": "mlp",
    "rounds": 20,
    "local-epochs": 2,
    "batch-size": 30,
    "optimizer": "sgd",
    "learning-rate": 0.2,
    "momentum": 0.0,
    "weight-decay": 0.0,
    "lr-schedule": "constant",
    "fraction-train": 1.0,
    "closing-epochs": 0,
    "public-samples": 0,
    "test-on": "global",
    "evaluate-every": 20,
    "workers": 1,
}
PUBLIC = {"samples-per-client": 240, "public-samples": 200}
OF_METHOD = {
    "fedavg": {},
    "fedhenn": PUBLIC,
    "fedhenn-kernel": PUBLIC | {"method": "fedhenn", "fedhenn.target": "kernel"},
    "fedmd": PUBLIC | {"fedmd.public-epochs": 1, "fedmd.private-epochs": 0},
    "fedharm": PUBLIC | {"fedharm.blocks": "body.1,body.3,head", "fedharm.slots": "32,32,10"},
    "fd": {},
    "fedproto": {"fedproto.predict": "head"},
    "fedgh": {},
}


class Node(ClientApp):
    """fedhet's app at nodes with these settings."""

    def __init__(self, settings):
        super().__init__()
        self.settings, self.app = settings, make_client_app()

    def __call__(self, message, context):
        context.node_config.update(self.settings)
        return self.app(message, context)


def trained(method, noise, seed):
    """Return the accuracy and the largest epsilon of a run; None without noise."""
    node = {"dp-noise": noise, "dp-clip": 1.0} if noise else {}
    config = configuration.resolve({"method": method, **COMMON, "seed": seed, **OF_METHOD[method]}, strict=False)
    with tempfile.TemporaryDirectory() as folder:
        run_locally(config, Path(folder) / "run", app=Node(node))
        rows = [row["common"] for row in read_history(Path(folder) / "run")]
        clients = read_clients(Path(folder) / "run")
    score = next(row[when] for row in reversed(rows) for when in ("trained", "received") if row and row[when])
    accuracy = score["accuracy"] if isinstance(score["accuracy"], float) else score["accuracy"]["weighted"]
    return accuracy, max((row.epsilon for row in clients if row.epsilon), default=None)


if __name__ == "__main__":
    fedhet.results.recorder.write_report = lambda folder: None
    logging.disable(logging.CRITICAL)
    print("| method | `dp-noise` | accuracy | epsilon |\n| --- | ---: | ---: | ---: |")
    chosen = [int(word) for word in sys.argv[1:] if word.isdecimal()] or [0, 1, 2]
    for method in [word for word in sys.argv[1:] if not word.isdecimal()] or OF_METHOD:
        for noise in (0.0, 0.5, 1.0, 2.0) if method == "fedavg" else (0.0, 1.0):
            runs = [trained(method, noise, seed) for seed in chosen]
            scores = [accuracy for accuracy, _ in runs]
            shown = f"{fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})"
            epsilon = f"{max(epsilon for _, epsilon in runs):.1f}" if noise else ""
            print(f"| {method} | {noise or 'none'} | {shown} | {epsilon} |", flush=True)
