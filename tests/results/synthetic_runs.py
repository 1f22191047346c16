"""Run directories as a run leaves them, with plausible numbers."""

import csv
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedhet.config.toml import to_toml
from fedhet.results.history import Row
from fedhet.utils.statistics import STATISTICS, Metric, summarise

CNNS = ("cnn-1-1", "cnn-2-1", "cnn-2-2", "cnn-3-2", "cnn-3-3")


def statistics_of(value: float) -> dict[str, Any]:
    """The statistics of two clients that both have this accuracy."""
    return {"accuracy": dict.fromkeys(STATISTICS, value), "loss": dict.fromkeys(STATISTICS, 1 - value), "clients": 2}


def history_row(number: int, *, received: float | None = None, trained: float | None = None, **more: Any) -> Row:
    """A row of `history.jsonl` with these accuracies; `more` replaces or adds what else a row holds."""
    return {
        "round": number,
        "participants": [],
        "failures": [],
        "received": None if received is None else statistics_of(received),
        "trained": None if trained is None else statistics_of(trained),
        "common": None,
        "train_loss": None,
        "metrics": {},
        "bytes_up": 0,
        "bytes_down": 0,
        "timing": {"seconds": 2.5},
        **more,
    }


def write_run(
    folder: Path,
    *,
    clients: int = 10,
    rounds: int = 6,
    personal: str = "trained",
    has_global: bool = False,
    settings: dict[str, Any] | None = None,
    architectures: Sequence[str] = CNNS,
    seed: int = 0,
    level: float = 0.9,
    evaluate_every: int = 1,
    failures: dict[int, list[dict[str, str]]] | None = None,
    status: str | None = "completed",
    common: bool = False,
    unseen_clients: bool = False,
) -> Path:
    """Write a run's files; with `status=None` it was killed before its summary and its final row were written."""
    rng = random.Random(seed)
    names = [str(i) for i in range(clients)]
    examples = {name: 20 + 7 * i for i, name in enumerate(names)}
    skill = {name: rng.uniform(-0.08, 0.08) for name in names}
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {"method": "fedhenn", "dataset": "digits", "rounds": rounds, "seed": seed, "clients": clients}
    chosen |= settings or {}
    versions = {"versions.torch": "2.15.0", "versions.fedhet": "0.1.0"}
    (folder / "config.toml").write_text(to_toml(chosen | versions), encoding="utf-8")

    def evaluated(after: int) -> tuple[dict[str, Any], dict[str, tuple[float, float]], dict[str, Any]]:
        values, metrics, scores = {}, {}, {}
        for name in names:
            accuracy = min(
                1.0, max(0.0, level * (1 - math.exp(-(after + 0.6) / 2.5)) + skill[name] + rng.gauss(0, 0.01))
            )
            values[name] = (accuracy, -math.log(accuracy + 0.05))
            metrics[name] = (Metric((accuracy,), (float(examples[name]),)), values[name][1], examples[name])
            scores[name] = [accuracy], [float(examples[name])]
        statistics = summarise(metrics)
        assert statistics is not None
        return statistics, values, scores

    rows: list[Row] = [history_row(0, bytes_up=1_200, bytes_down=450_000)]
    records: list[list[Any]] = []
    for number in range(1, rounds + (2 if status == "completed" else 1)):
        final = number == rounds + 1
        sent = {} if final else {"bytes_up": 3_210_000, "bytes_down": 5_400_000}
        row = history_row(number, **sent)
        row["failures"] = (failures or {}).get(number, [])
        row["participants"] = [] if final else names
        values: dict[str, tuple[float, float]] = {}
        if final or number % evaluate_every == 0:
            row["received"], before, received = evaluated(number - 1)
            row["trained"], after, trained = evaluated(number - 1 if final else number)
            row["scores"] = {"received": received, "trained": trained}
            values = after if personal == "trained" else before
            if common:
                row["common"] = {"received": {"accuracy": 0.5 + number / 100, "loss": 1.0}, "trained": None}
        if final:
            row["final"] = True
            if unseen_clients:
                starts = {"received": (0.7, 0.8), "scratch": (0.1, 0.4)}
                row["unseen_clients"] = {
                    "own": {start: [statistics_of(value) for value in values] for start, values in starts.items()}
                }
        rows.append(row)
        for i, name in enumerate(names):
            accuracy, loss = values[name] if values else ("", "")
            architecture = architectures[i % len(architectures)]
            records.append([number, name, architecture, examples[name], accuracy, loss, 321_000, 540_000])

    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "clients.csv").open("w", newline="") as file:
        header = ["round", "client", "architecture", "examples", "accuracy", "loss", "bytes_up", "bytes_down"]
        csv.writer(file, lineterminator="\n").writerows([header, *records])
    if status is not None:
        last = next(row for row in reversed(rows) if row["trained"])
        both = {key: last["received"]["accuracy"][key] for key in ("weighted", "mean")}
        summary = {
            **{key: chosen[key] for key in ("method", "dataset", "clients", "rounds", "seed")},
            "engine": "local",
            "personal": personal,
            "metric": "accuracy",
            "personal_accuracy": last[personal]["accuracy"],
            "received_accuracy": last["received"]["accuracy"],
            "trained_accuracy": last["trained"]["accuracy"],
            "global_accuracy": both if has_global else None,
            "bytes_up": sum(row["bytes_up"] for row in rows),
            "bytes_down": sum(row["bytes_down"] for row in rows),
            "failures": sum(len(row["failures"]) for row in rows),
            "examples": {"labelled": sum(examples.values()), "unlabelled": 0},
            "work": {"private_steps": 120, "steps": 150, "forwards": 4800},
            "seconds": 61.25,
            "status": status,
        }
        if unseen_clients:
            summary["unseen_clients"] = {"received_accuracy": [0.7, 0.8], "scratch_accuracy": [0.1, 0.4]}
        if status == "failed":
            summary["error"] = "3 of 10 clients replied, 5 are needed"
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
