"""The summary of a run, from its history: the content of `summary.json`."""

from collections.abc import Sequence
from typing import Any

from fedhet.observing import RunInfo
from fedhet.options import Config
from fedhet.results.history import Row, TestSet, Which, accuracy_curve, last10, unseen_lines
from fedhet.rows import STATISTICS, Work, never_took_part


def summarised(rows: Sequence[Row], run: RunInfo, config: Config) -> dict[str, Any]:
    """Return the summary, but for the engine, the time and how the run ended.

    Args:
        rows: the history, see `read_history`.
        run: known of it at its end.
        config: its configuration.
    """
    scored, has_global = run.traits.scored, run.traits.whole
    on: TestSet = "common" if config.test_on == "global" else "own"

    def last(which: Which, test: TestSet = on, statistics: Sequence[str] = STATISTICS) -> dict[str, float] | None:
        curves = {name: accuracy_curve(rows, which, name, test) for name in statistics}
        return {name: curve[-1][1] for name, curve in curves.items()} if all(curves.values()) else None

    summary: dict[str, Any] = {
        "method": config.method_name,
        "dataset": "own" if run.own_data else config.dataset,
        "clients": len(run.state.clients),
        "rounds": max((row["round"] for row in rows if not row.get("final")), default=0),
        "seed": config.seed,
        "devices": run.devices,
        "personal": scored,
        "metric": run.metric,
        "personal_accuracy": last(scored),
        "received_accuracy": last("received"),
        "trained_accuracy": last("trained"),
        "global_accuracy": last("received", statistics=STATISTICS[:2]) if has_global else None,
        "last10": last10(rows, scored, has_global=has_global, test=on),
        "bytes_up": sum(row["bytes_up"] for row in rows),
        "bytes_down": sum(row["bytes_down"] for row in rows),
        "failures": sum(len(row["failures"]) for row in rows),
        "examples": _examples(run),
        "work": vars(sum((Work(**row["work"]) for row in rows if "work" in row), Work())),
    }
    if absent := never_took_part(rows):
        summary["never_took_part"] = absent
    if config.validation:
        summary["validation_accuracy"] = last(scored, "validation")
        summary["stopped_early"] = run.state.stopped or None
    if config.test_on != "local":
        summary["common"] = next((row["common"] for row in reversed(rows) if row.get("common")), None)
    if lines := unseen_lines(rows):
        of_test = {f"{start}_accuracy": values for (test, start), values in lines.items() if test == on}
        summary["unseen_clients"] = of_test
    return summary


def _examples(run: RunInfo) -> dict[str, int]:
    """The labelled examples of clients and of a public dataset whose labels the method uses; its unlabelled ones."""
    labelled = sum(record.examples for record in run.state.clients.values())
    public, sent = run.state.public_size, run.traits.public
    return {
        "labelled": labelled + (public if sent == "labelled" else 0),
        "unlabelled": public if sent == "inputs" else 0,
    }
