"""A stand-in for training in a comparison: a function that writes a run's files, or fails as it is told."""

import json
import os
from pathlib import Path
from typing import Any

from synthetic_runs import CNNS, write_run

from fedhet.config.configuration import read
from fedhet.errors import FedhetError

WEIGHTS = (1, 1, 1, 1, 1, 9)
ALL = ("fedhenn", "fedavg", "local")
SETTINGS = {
    "clients": 6,
    "rounds": 4,
    "architectures": ",".join(CNNS),
    "partition": "classes",
    "classes-per-client": 5,
    "public-samples": 64,
    "fedhenn.eta0": 0.1,
    "local-epochs": 3,
}


def run(config: dict[str, Any] | None, *, out: Path, engine: str = "local", resume: Path | None = None) -> None:
    """In place of `fedhet.run`: notes the call, does what the file `<out>.does` orders, writes a run."""
    assert (config or {}).keys() <= {"data"} if resume else config
    assert engine == "local"
    settings = {**(read(out / "config.toml") if resume else {}), **(config or {})}
    does = out.parent / f"{out.name}.does"
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / "calls.txt").open("a") as calls:
        calls.write(f"{out.name} {'resumed' if resume else 'started'} {os.environ['OMP_NUM_THREADS']}\n")
    print("training", out.name)
    order = does.read_text() if does.exists() else ""
    if order == "refuse":
        raise FedhetError("client 3:\n  its model has no head")
    if order == "stumble":
        raise ZeroDivisionError("no clients in round 4")
    if order == "die":
        os._exit(137)
    without_global = settings["method"] in ("fedhenn", "local")
    write_run(
        out,
        clients=settings["clients"],
        rounds=settings["rounds"],
        personal="trained" if without_global else "received",
        has_global=not without_global,
        settings=settings,
        architectures=settings["architectures"].split(","),
        seed=settings["seed"],
        level={"fedhenn": 0.95, "fedavg": 0.8}.get(settings["method"], 0.85),
        status="failed" if order == "fail" else "completed",
    )
    if settings.get("validation"):
        summary = json.loads((out / "summary.json").read_text())
        best = {"fedhenn": 0.1, "fedavg": 0.4}.get(settings["method"], 0.2)
        weighted = 0.9 - abs(settings["learning-rate"] - best) - settings["seed"] / 1e6
        accuracy, failures, clients = weighted - 0.05 * settings.get("fedhenn.eta0", 0), [], settings["clients"]
        if order == "diverge":  # all clients but one
            failures = [{"client": str(client), "reason": "diverged"} for client in range(1, clients)]
            accuracy, clients = 1.0, 1
        if order == "lose":  # only the last client, which has most examples
            failures = [{"client": str(clients - 1), "reason": "diverged"}]
            accuracy, clients = 0.95, clients - 1
        summary["validation_accuracy"] = {"weighted": accuracy}
        *rows, last = (out / "history.jsonl").read_text().splitlines()
        row = json.loads(last) | {"failures": failures}
        row["validation"] = {summary["personal"]: {"accuracy": {"weighted": accuracy}, "clients": clients}}
        row["scores"][f"validation-{summary['personal']}"] = {
            str(c): [[accuracy], [WEIGHTS[c]]] for c in range(clients)
        }
        (out / "history.jsonl").write_text("\n".join([*rows, json.dumps(row)]) + "\n")
        (out / "summary.json").write_text(json.dumps(summary))
