"""How far Byzantine clients carry the honest ones: methods, rules and attacks; prints the table of README.md.

`python tests/robustness/attacks.py [--one] [METHOD[:RULE,...] ...]`. Ten clients hold 60 digits each and train an MLP
for ten rounds, or two networks in turn where they may differ. The last two (with `--one`, the last one) are Byzantine:
they train as the others do, and change what they send. `nan` is a run that ends, since no client can train.
"""

import logging
import sys
import tempfile
from pathlib import Path

import numpy as np

from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.errors import FedhetError
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.methods.registry import traits
from fedhet.testing import Tampering

BYZANTINE = ("8", "9")
COMMON = {
    "dataset": "digits",
    "clients": 10,
    "samples-per-client": 60,
    "rounds": 10,
    "local-epochs": 3,
    "batch-size": 16,
    "learning-rate": 0.1,
    "public-samples": 200,
    "closing-epochs": 0,
    "fraction-train": 1.0,
    "evaluate-every": 10,
    "workers": 1,
    "optimizer": "sgd",
    "momentum": 0.0,
    "lr-schedule": "constant",
}
CNNS = {"architectures": "cnn-2-2,cnn-3-2", "optimizer": "adam", "learning-rate": 0.005}
MLPS = {"architectures": "mlp-150,mlp-100"}
OF_METHOD = {
    "fedavg": {"architectures": "mlp"},
    "fedprox": {"architectures": "mlp"},
    "lg-fedavg": CNNS,
    "fedrep": {"architectures": "mlp", "local-epochs": 4, "fedrep.body-epochs": 2},
    "flha-ghn": MLPS | {"optimizer": "adam", "learning-rate": 0.006, "rounds": 20, "evaluate-every": 20},
    "layer-average": CNNS,
    "fedproto": CNNS | {"fedproto.width": 32},
    "fd": MLPS,
    "fedmd": MLPS | {"fedmd.public-epochs": 2, "fedmd.private-epochs": 0},
    "fedharm": CNNS
    | {
        "architectures": "cnn-1-1,mlp",
        "fedharm.blocks": "body.1,body.2,head; body.2,body.4,head",
        "fedharm.slots": "32,32,10",
    },
    "pfedhn": {"architectures": "mlp", "rounds": 20, "evaluate-every": 20, "pfedhn.server-learning-rate": 0.03},
    "fedma": MLPS | {"rounds": 3, "local-epochs": 10, "shared-init": False},
    "pfnm": MLPS | {"rounds": 1, "local-epochs": 20, "shared-init": False},
    "fedhenn": MLPS | {"fedhenn.eta0": 1.0, "fedhenn.target": "spectral"},
    "fedhenn-kernel": MLPS | {"method": "fedhenn", "fedhenn.eta0": 0.1, "fedhenn.target": "kernel"},
}


def huge(array, before):
    return np.full_like(array, 1e30)


def tenfold(array, before):
    return before + 10 * (array - before)


def flipped(array, before):
    return before - (array - before)


def far(array, before):
    return before - 25 * (array - before)


ATTACKS = {"huge": huge, "tenfold": tenfold, "flipped": flipped}
if "--one" in sys.argv:
    BYZANTINE = ("9",)
    ATTACKS = {"flipped": flipped, "25-fold": far}


def accuracy(method, rule, attack, *, honest_only=False):
    """The honest clients' mean accuracy at the end; with `honest_only` the Byzantine ones say nothing."""

    def change(message, client, reply):
        if client not in BYZANTINE or message.metadata.message_type != "train" or not reply.has_content():
            return
        sent = message.content.array_records
        for name, group in reply.content.array_records.items():
            start = decode_arrays(sent[name]) if name in sent else {}
            with np.errstate(over="ignore"):
                reply.content[name] = encode_arrays(
                    {
                        key: attack(array, start.get(key, np.zeros_like(array))).astype(array.dtype)
                        if array.dtype.kind == "f"
                        else array
                        for key, array in decode_arrays(group).items()
                    }
                )

    def silent(message, client):
        if client in BYZANTINE:
            raise RuntimeError("is not there")

    settings = {"method": method, **COMMON, **OF_METHOD[method], "aggregation": rule}
    app = Tampering(before=silent) if honest_only else Tampering(after=change) if attack else Tampering()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            run_locally(configuration.resolve(settings, strict=False), run, app=app)
        except FedhetError:
            return np.nan
        rows = [line.split(",") for line in (run / "clients.csv").read_text().splitlines()]
    place, last = rows[0].index("accuracy"), rows[-1][0]
    own = [float(row[place]) for row in rows[1:] if row[0] == last and row[1] not in BYZANTINE and row[place]]
    return float(np.mean(own))


def table(methods):
    for method, _, chosen in (each.partition(":") for each in methods):
        config = configuration.resolve({"method": method, **COMMON, **OF_METHOD[method]}, strict=False)
        alone = accuracy(method, "mean", None, honest_only=True)
        rules = traits(config).aggregations
        for rule in chosen.split(",") if chosen else rules:
            found = {name: accuracy(method, rule, attack) for name, attack in {"none": None, **ATTACKS}.items()}
            yield method, rule, alone, found


if __name__ == "__main__":
    import fedhet.results.recorder

    fedhet.results.recorder.write_report = lambda folder: None
    logging.disable(logging.CRITICAL)
    print("| method | rule | without the two | nobody Byzantine | " + " | ".join(ATTACKS) + " |")
    print("| --- " * (4 + len(ATTACKS)) + "|")
    for method, rule, alone, found in table([word for word in sys.argv[1:] if word != "--one"] or OF_METHOD):
        print(
            "|",
            " | ".join([method, rule, f"{alone:.3f}", *(f"{value:.3f}" for value in found.values())]),
            "|",
            flush=True,
        )
