"""The report of a run: one HTML file that needs nothing beside it, and its main figures as PNG."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet import config as configuration
from fedhet import registry
from fedhet.files import write_text
from fedhet.method import Drawing
from fedhet.results.courses import clients_by_round_figure, cost_figure, loss_figure, partition_figure
from fedhet.results.figures import lay_out, run_figures, save_png, to_svg
from fedhet.results.page import PAGE, SHARED
from fedhet.results.run_files import RunFiles, read_run, showing
from fedhet.results.tables import (
    architecture_cells,
    architecture_headings,
    beside,
    by_architecture,
    format_bytes,
    format_seconds,
    format_value,
)
from fedhet.rows import STATISTICS, client_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CAPTIONS = {
    "partition": "Training examples by client and class.",
    "losses": "Loss by round: in training, with what the method adds to it, and on test data.",
    "courses": "Each client's accuracy by round.",
    "cost": "Accuracy by what was sent until then.",
    "accuracy": "Accuracy by round, weighted by the clients' examples; a band spans the clients.",
    "clients": "The clients' accuracies at their last evaluation, by architecture.",
    "unseen_clients": "Clients that came after the last round, by epoch of training alone: with what they received, "
    "and from their own initial weights, in the same batches.",
    "bytes": "Payload bytes of all clients together, the greeting included.",
}


def write_report(folder: Path | str) -> Path:
    """Write `report.html` and `figures/*.png` into the directory of a run, finished or not, and return the page's path.

    Raises:
        FedhetError: the folder is not the directory of a run, one of its files is damaged, or it names a method that
            would have to be imported (`fedhet.registry.of_data`).
    """
    run = read_run(folder)
    with showing(folder):
        return _written(run, _drawings(run))


def _drawings(run: RunFiles) -> Mapping[str, Drawing]:
    """Pictures of the run's method by the name of their matrices."""
    reference = str(run.settings.get("method"))
    if ":" in reference:
        return registry.of_data(reference, run.folder / "config.toml").drawings
    return registry.drawings(reference)


def _written(run: RunFiles, drawings: Mapping[str, Drawing]) -> Path:
    captions = _CAPTIONS | {name: drawing.caption for name, drawing in drawings.items()}
    pictures = []
    main = run_figures(run, drawings)
    for name, figure in {**main, **_courses(run)}.items():
        lay_out(figure)
        if name in main:
            save_png(figure, run.folder / "figures" / f"{name}.png")
        pictures.append({"name": name, "svg": to_svg(figure, name), "caption": captions[name]})
    path = run.folder / "report.html"
    chosen, defaults = _settings(run)
    write_text(
        path,
        rendered(
            PAGE,
            run=run,
            title=f"{run.settings.get('method', '?')} on {run.settings.get('dataset', '?')}",
            about=_about(run),
            facts=_facts(run),
            pictures=pictures,
            classes_unknown=run.partition is None and run.summary is not None and run.metric == "accuracy",
            undrawn=sorted(run.matrices.keys() - drawings.keys()),
            headings=architecture_headings(run.metric),
            architectures=[architecture_cells(row) for row in by_architecture(run.clients)],
            failures=_failures(run),
            settings=chosen,
            defaults=defaults,
        ),
    )
    return path


def rendered(template: str, **values: Any) -> str:
    """A page of a template, whose style is the same for all."""
    from jinja2 import Environment

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(SHARED + template).render(**values)


def _courses(run: RunFiles) -> "dict[str, Figure]":
    drawn = {
        "partition": partition_figure(run.partition) if run.partition else None,
        "losses": loss_figure(run),
        "courses": clients_by_round_figure(run),
        "cost": cost_figure({str(run.settings.get("method", "run")): run}),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _settings(run: RunFiles) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The settings that are not fedhet's own defaults, and the others."""
    method = run.settings.get("method")
    known = {key: default for key, default, *_ in configuration.keys(outside=False)}
    lines = [(k, v if isinstance(v, str) else json.dumps(v, default=str)) for k, v in run.settings.items()]
    alike = {k for k, v in run.settings.items() if k != "method" and known.get(k) == v}
    of_others = {k for k in run.settings if "." in k and k.split(".")[0] not in (method, "own")}
    others = [line for line in lines if line[0] in alike | of_others]
    return [line for line in lines if line not in others], others


def _about(run: RunFiles) -> str:
    wanted, seed = (run.settings.get(key, "?") for key in ("rounds", "seed"))
    rounds = f"{run.rounds} of {wanted} rounds" if wanted else f"{run.rounds} rounds"  # 0: settled by the method
    if isinstance(wanted, int) and wanted and run.settings.get("closing-epochs"):
        last = ", the last of them of closing epochs" if run.rounds > wanted else ""
        rounds = f"{run.rounds} of {wanted + 1} rounds{last}"
    summary = run.summary or {}
    engine = f", engine {summary.get('engine', '?')}" if summary else ""
    where = f", on {', '.join(summary['devices'])}" if summary.get("devices") else ""
    return f"{rounds}, seed {seed}{engine}{where}"


def _facts(run: RunFiles) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page: name, value, note; none before there is a summary."""
    summary = run.summary
    if summary is None:
        return []
    recent = summary.get("last10") or {}

    def fact(kind: str, missing: str) -> tuple[str, str, str]:
        values, over_last = summary.get(f"{kind}_accuracy") or {}, recent.get(f"{kind}_accuracy") or {}
        notes = [f"{name} {format_value(values[name])}" for name in STATISTICS[1:] if name in values] or [missing]
        if over_last:
            notes.append(f"last ten rounds {format_value(over_last.get('weighted'))}")
        if kind == "personal" and (other := beside(summary)):
            notes.append(other)
        return f"{kind} {run.metric}, weighted", format_value(values.get("weighted")), ", ".join(notes)

    return [
        *([fact("personal", "not evaluated")] if run.has_personal else []),
        fact("global", "not evaluated" if run.has_global else "this method has no global model"),
        ("bytes up", format_bytes(summary.get("bytes_up", 0)), ""),
        ("bytes down", format_bytes(summary.get("bytes_down", 0)), ""),
        ("time", format_seconds(summary.get("seconds")), ""),
        ("clients", str(summary.get("clients", "?")), ""),
        ("failures", str(summary.get("failures", "?")), ""),
    ]


def _failures(run: RunFiles) -> list[tuple[str, str, str, str]]:
    """The failures as times, rounds, clients and reason, one line a reason: one cause often hits many clients."""
    by_reason: dict[str, list[tuple[int, str]]] = {}
    for row in run.rows:
        for failure in row.get("failures") or []:
            hits = by_reason.setdefault(str(failure.get("reason", "")), [])
            hits.append((row["round"], str(failure.get("client", "?"))))
    return [
        (
            str(len(hits)),
            _few(str(number) for number in sorted({number for number, _ in hits})),
            _few(sorted({client for _, client in hits}, key=client_order)),
            reason,
        )
        for reason, hits in by_reason.items()
    ]


def _few(names: Iterable[str], most: int = 12) -> str:
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")
