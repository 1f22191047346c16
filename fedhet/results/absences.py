"""Clients that a run's score leaves out, with the reasons, from the lines of `history.jsonl`."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from fedhet.methods.method import ABSENT
from fedhet.utils.statistics import client_order, grouped, never_took_part

Row = Mapping[str, Any]


def absences(rows: Sequence[Row], scored: str, *, shared: bool) -> Iterator[str]:
    """Yield a line each about clients without a metric or without training, and about failures, with the reasons.

    With `shared`, received networks are one global model, whose score does not depend on the client's own training.
    """
    last, final = _last_evaluation(rows, scored)
    absent = {client: reason for client, reason in never_took_part(rows).items() if client not in final}
    late = {client: reason for client, reason in unscored(rows, scored).items() if client not in absent}
    evaluated = (client for row in rows for by_client in row.get("scores", {}).values() for client in by_client)
    trained = {client for row in rows for client in row["participants"]}
    described = (client for row in rows for client in row.get("data", ()))
    metric = next(iter(last.get(scored) or (last.get("common") or {}).get(scored) or ["metric"]))
    silent = _without_metric(last, scored, trained - final - absent.keys() - late.keys())
    there = trained | {*evaluated, *described, *absent, *late, *silent}
    own = bool(trained) and not (shared and scored == "received")
    untrained = final - trained if own else ()
    failed = {str(failure.get("client")): str(failure.get("reason")) for row in rows for failure in row["failures"]}
    for words, group in (
        (ABSENT, absent),
        ("clients failed in the last evaluation", late),
        (f"clients have no {metric}", silent),
        ("clients failed in a round, but are scored", {name: why for name, why in failed.items() if name in final}),
        ("clients never trained, but are scored", dict.fromkeys(untrained, "raise fraction-train or rounds")),
    ):
        by_reason = grouped((group[client], client) for client in sorted(group, key=client_order))
        reasons = (f"client{'s'[: len(names) - 1]} {', '.join(names)}: {why}" for why, names in by_reason.items())
        if group:
            yield f"{len(group)} of {len(there)} {words}: {'; '.join(reasons)}"


def _without_metric(last: Row, scored: str, others: Set[str]) -> dict[str, str]:
    """Return why clients have no metric in the last evaluation, by client; `others` took part and are not scored.

    If the server scored a global model, it is every client's.
    """
    name = scored if last.get(scored) else f"common-{scored}"
    undefined = last.get("undefined", {}).get(name, ())
    silent = others if last.get("final") and last.get("scores", {}).get(name) else set[str]()
    reasons = dict.fromkeys(silent, "no evaluation (no test examples, metrics not allowed, or the node is gone)")
    return reasons | dict.fromkeys(undefined, "undefined on the test examples, or not sent")


def unscored(rows: Sequence[Row], scored: str) -> dict[str, str]:
    """Return why clients have no final score: they never took part, or failed in the last evaluation, by client."""
    last, there = _last_evaluation(rows, scored)
    missing = never_took_part(rows)
    missing |= {str(failure.get("client")): str(failure.get("reason")) for failure in last.get("failures", ())}
    return {client: reason for client, reason in missing.items() if client not in there}


def _last_evaluation(rows: Sequence[Row], scored: str) -> tuple[Row, set[str]]:
    """Return the last row with an evaluation of `scored` networks, and the clients that it scores."""
    last: Row = next((row for row in reversed(rows) if row.get(scored) or (row.get("common") or {}).get(scored)), {})
    return last, {client for name in (scored, f"common-{scored}") for client in last.get("scores", {}).get(name, ())}
