"""The content of `summary.json`, which is computed from a run's history."""

from collections.abc import Sequence
from typing import Any

from fedhet.messages.protocol import names_in, scales_in
from fedhet.methods.options import Config
from fedhet.methods.registry import client_side
from fedhet.results.description import pooled
from fedhet.results.history import Row, TestSet, Which, client_scores, last_round, learning_curve, round_behind
from fedhet.results.observers import RunInfo
from fedhet.utils.statistics import STATISTICS, Metric, Work, as_statistics, metric_in, never_took_part, summarise


def summarised(rows: Sequence[Row], run: RunInfo, config: Config) -> dict[str, Any]:
    """Return the content of `summary.json`, except for engine, time and status, given a run's history (`rows`)."""
    scored = run.traits.scored
    private = sum(record.examples for record in run.state.clients.values() if not record.failed)
    public = run.state.public_size
    learns_from_labels = client_side(config.method_name).needs_labels
    on: TestSet = "common" if config.test_on == "global" else "own"
    work = [row["work"] for row in rows if "work" in row]
    summary: dict[str, Any] = {
        "method": config.method_name,
        "dataset": "own" if run.own_data else config.dataset,
        "clients": len(run.state.clients),
        "rounds": last_round(rows),
        "seed": config.seed,
        "devices": run.devices,
        "personal": scored,
        "task": run.task,
        "metric": run.metric,
        "predicts_by": run.traits.predicts,
        "personal_accuracy": _last(rows, scored, on),
        "received_accuracy": _last(rows, "received", on),
        "trained_accuracy": _last(rows, "trained", on),
        "global_accuracy": _last(rows, "received", on, STATISTICS[:2]) if run.traits.whole else None,
        "bytes_up": sum(row["bytes_up"] for row in rows),
        "bytes_down": sum(row["bytes_down"] for row in rows),
        "failures": sum(len(row["failures"]) for row in rows),
        "examples": {
            "labelled": private * learns_from_labels + public * (run.traits.public == "labelled"),
            "unlabelled": private * (not learns_from_labels) + public * (run.traits.public == "inputs"),
        },
        "work": None if None in work else vars(sum((Work(**of_round) for of_round in work), Work())),
    }
    optional = {
        "privacy": dict(run.privacy),
        "names": names_in(run.state.names),  # outputs of saved networks are in their order
        "classes": dict(run.classes),
        # With these, new examples are compared.
        "scales": {name: scales_in(record.scales) for name, record in run.state.clients.items() if record.scales},
        "warnings": [*run.warnings],
        "never_took_part": never_took_part(rows),
    }
    summary |= {name: value for name, value in optional.items() if value}
    if names := config.further_metrics(run.metric):
        where = (row if on == "own" else row.get(on) or {} for row in reversed(rows))
        last: Row = next((row[scored] for row in where if row.get(scored)), {})
        summary["further"] = {name: as_statistics(last.get(f"further/{name}")) or None for name in names}
    if described := next((row["data"] for row in rows if row.get("data")), None):
        named = {client: {"names": [*counts], "classes": [*counts.values()]} for client, counts in run.classes.items()}
        described = {client: {**values, **named.get(client, {})} for client, values in described.items()}
        summary["data"] = {"clients": described, "all": pooled(described)}
    if config.keep_best and "" in run.state.best:
        summary["best"] = best_models(rows, run, config, on)
    if config.validation:
        summary["validation_accuracy"] = _last(rows, scored, "validation")
    if config.test_on != "local":
        summary["common"] = next((row["common"] for row in reversed(rows) if row.get("common")), None)
    unseen: Row = next((row["unseen_clients"] for row in reversed(rows) if row.get("unseen_clients")), {})
    if starts := unseen.get(on):
        curves = {
            f"{start}_accuracy": [(metric_in(scores) or {}).get("weighted") for scores in by_epoch]
            for start, by_epoch in starts.items()
        }
        summary["unseen_clients"] = _also_named(curves, run.metric)
    return _also_named(summary, run.metric)


def _also_named(table: dict[str, Any], metric: str) -> dict[str, Any]:
    """Return a table whose entries about `accuracy`, which programs read for every task, are also named by `metric`."""
    named = {name.replace("accuracy", metric): value for name, value in table.items() if name.endswith("accuracy")}
    return table | named


def best_models(rows: Sequence[Row], run: RunInfo, config: Config, test: TestSet) -> dict[str, Any]:
    """Return which models in `models/best` the validation metric chose, and their metric on the test set `test`.

    The entry `round` is that of the weighted mean over clients, with its `validation_accuracy`. If clients have models
    of their own, each has its own best round. `accuracy` has the statistics over clients in `clients`, by client.
    """
    scored = run.traits.scored
    round, validation = run.state.best[""]
    after = {row["round"]: round_behind(row, scored) for row in rows}
    result: dict[str, Any] = {"round": after[round], "validation_accuracy": validation, "accuracy": None, "clients": {}}
    metrics: dict[str, Metric] = {}
    for row in rows:
        for client, metric in client_scores(row, scored, test).items():
            best = round
            if run.traits.models_of_clients(config.batch_norm):
                best, validation = run.state.best.get(client, (-1, None))
            if row["round"] == best:
                metrics[client] = metric
                result["clients"][client] = {"round": after[best], "validation": validation, "test": metric.value}
    if metrics:
        result["accuracy"] = metric_in(summarise({client: (metric, 0.0, 1.0) for client, metric in metrics.items()}))
    elif values := dict(learning_curve(rows, scored, test=test)):
        result["accuracy"] = {"weighted": values.get(after[round])}  # the server evaluated the global model
    return _also_named(result, run.metric)


def _last(
    rows: Sequence[Row], which: Which, test: TestSet, statistics: Sequence[str] = STATISTICS
) -> dict[str, float] | None:
    curves = {name: learning_curve(rows, which, name, test) for name in statistics}
    return {name: curve[-1][1] for name, curve in curves.items()} if all(curves.values()) else None
