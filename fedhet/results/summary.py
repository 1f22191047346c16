"""The content of `summary.json`, computed from a run's history."""

from collections.abc import Sequence
from typing import Any

from fedhet.methods.options import Config
from fedhet.results.history import Row, TestSet, Which, last_round, learning_curve, unseen_lines
from fedhet.results.observers import RunInfo
from fedhet.utils.statistics import STATISTICS, Work, never_took_part


def summarised(rows: Sequence[Row], run: RunInfo, config: Config) -> dict[str, Any]:
    """Return the content of `summary.json` for a run with this history, without engine, time and status."""
    scored = run.traits.scored
    on: TestSet = "common" if config.test_on == "global" else "own"
    summary: dict[str, Any] = {
        "method": config.method_name,
        "dataset": "own" if run.own_data else config.dataset,
        "clients": len(run.state.clients),
        "rounds": last_round(rows),
        "seed": config.seed,
        "devices": run.devices,
        "personal": scored,
        "metric": run.metric,
        "personal_accuracy": _last(rows, scored, on),
        "received_accuracy": _last(rows, "received", on),
        "trained_accuracy": _last(rows, "trained", on),
        "global_accuracy": _last(rows, "received", on, STATISTICS[:2]) if run.traits.whole else None,
        "bytes_up": sum(row["bytes_up"] for row in rows),
        "bytes_down": sum(row["bytes_down"] for row in rows),
        "failures": sum(len(row["failures"]) for row in rows),
        "examples": _examples(run),
        "work": vars(sum((Work(**row["work"]) for row in rows if "work" in row), Work())),
    }
    if run.privacy:
        summary["privacy"] = dict(run.privacy)
    if run.warnings:
        summary["warnings"] = [*run.warnings]
    if absent := never_took_part(rows):
        summary["never_took_part"] = absent
    if config.validation:
        summary["validation_accuracy"] = _last(rows, scored, "validation")
    if config.test_on != "local":
        summary["common"] = next((row["common"] for row in reversed(rows) if row.get("common")), None)
    if lines := unseen_lines(rows):
        summary["unseen_clients"] = {f"{start}_accuracy": each for (test, start), each in lines.items() if test == on}
    return summary


def _last(
    rows: Sequence[Row], which: Which, test: TestSet, statistics: Sequence[str] = STATISTICS
) -> dict[str, float] | None:
    """Return the last accuracy of an evaluation in each of the `statistics`, or None if one of them is missing."""
    curves = {name: learning_curve(rows, which, name, test) for name in statistics}
    return {name: curve[-1][1] for name, curve in curves.items()} if all(curves.values()) else None


def _examples(run: RunInfo) -> dict[str, int]:
    labelled = sum(record.examples for record in run.state.clients.values())
    public, sent = run.state.public_size, run.traits.public
    return {
        "labelled": labelled + (public if sent == "labelled" else 0),
        "unlabelled": public if sent == "inputs" else 0,
    }
