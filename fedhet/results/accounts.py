"""What a run had to learn from and what it took, and how its validation went: parts of `summary.json`."""

from collections.abc import Sequence
from typing import Any

from fedhet.observing import RunInfo
from fedhet.results.history import Row, accuracy_curve
from fedhet.rows import STATISTICS, Work


def account(rows: Sequence[Row], run: RunInfo) -> dict[str, dict[str, int]]:
    """What the method had and did.

    Returns:
        `examples`: the labelled examples of all clients, with those of a pool whose labels the method uses, and the
        unlabelled ones of the pool; 0 where the method uses none. `work`: gradient steps on clients' own examples, all
        gradient steps, and examples that went forward in training, over all clients and rounds.
    """
    labelled = sum(record.examples for record in run.state.clients.values())
    pool, kind = run.state.pool_size, run.traits.pool
    examples = {
        "labelled": labelled + (pool if kind == "labelled" else 0),
        "unlabelled": pool if kind == "inputs" else 0,
    }
    return {"examples": examples, "work": vars(sum((Work(**row["work"]) for row in rows if "work" in row), Work()))}


def validation(rows: Sequence[Row], run: RunInfo) -> dict[str, Any]:
    """The last validation accuracy of what the method is scored by, and the round in which training ended early."""
    curves = {name: accuracy_curve(rows, run.traits.scored, name, "validation") for name in STATISTICS}
    last = {name: curve[-1][1] for name, curve in curves.items()} if all(curves.values()) else None
    return {"validation_accuracy": last, "stopped_early": run.state.stopped or None}
