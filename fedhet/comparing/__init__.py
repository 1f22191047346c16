"""Comparisons of methods over several seeds, with equal clients, data, splits, participation and rounds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from fedhet.comparing import tables
from fedhet.comparing.measures import VariantResult, absent, measure, verdict
from fedhet.comparing.runs import Execution, announce, check, continued, prepared, unused
from fedhet.comparing.settings import (
    Choice,
    ComparedRun,
    PlannedRun,
    SharedSettings,
    distinct,
    shared_settings,
    variants_of,
)
from fedhet.comparing.tuning import RATE, WHOLE, Tuning, planned_trials, tune
from fedhet.errors import ConfigError, FedhetError, check_kinds, check_list
from fedhet.results.figures import WIDTH, save_figure
from fedhet.results.history import parse_object, showing
from fedhet.results.report import Section, table, write_together
from fedhet.results.terminal import TerminalTable
from fedhet.setup.user_functions import UserFunctions
from fedhet.tasks import Task
from fedhet.utils.files import csv_lines, expanded, write_text
from fedhet.utils.process import alone
from fedhet.utils.statistics import grouped

__all__ = ["Comparison", "Tuning", "compare"]

SAVED = "comparison.json"
"""File from which the other files of a comparison are written again."""

TEXTS = "failed", "title", "verdict", "notes"  # fields of a `Comparison` in this file

FILES = "comparison.html, .md, .csv, .tex, .png, .pdf and .svg"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`; a variant is a method with its own settings.

    Attributes:
        folder: the folder with the comparison's runs, tables and figure.
        results: the result of each variant, over its seeds.
        baseline: the element of `results` from which differences are computed.
        failed: the reason why each failed run failed, by the run's name.
        title, verdict, notes, sections: the title of the page, the sentence on which methods are better or worse than
            the baseline, the notes below the tables, and further sections of the page.
    """

    folder: Path
    results: Sequence[VariantResult] = field(repr=False)
    baseline: VariantResult = field(repr=False)
    failed: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    verdict: str = ""
    notes: Sequence[str] = field(default=(), repr=False)
    sections: Sequence[Section] = field(default=(), repr=False)

    @property
    def failure(self) -> str:
        """An error message with the reasons of failed runs, or an empty string if no run failed."""
        if not self.failed:
            return ""
        by_reason = grouped((reason, name) for name, reason in self.failed.items())
        reasons = "".join(f"\n  {', '.join(names)}: {reason}" for reason, names in by_reason.items())
        wanted = sum(result.seeds_wanted for result in self.results)
        return f"{len(self.failed)} of {wanted} runs failed; the same command tries them again:{reasons}"

    def check(self) -> None:
        """Raise a `FedhetError` with the reasons if any run failed."""
        if self.failed:
            raise FedhetError(self.failure)

    def plot(self, methods: Sequence[str] | None = None, *, width: float = WIDTH, height: float = 3.2) -> Figure:
        """Return a matplotlib figure with the mean accuracy of each variant's personal models by round.

        Bands are one standard deviation over seeds. The curves begin after round 1 unless all methods have round 0, and
        are over the clients that all of them scored. To save the figure, call `savefig("figure.pdf")`.

        Args:
            methods: names of the variants to draw, in this order; by default all.
            width: width of the figure in inches, such as that of a column of a paper.
            height: height of the figure in inches, without the legend above the axes.

        Raises:
            FedhetError: if a variant is unknown, or no run was completed.
        """
        results = {result.variant: result for result in self.results}
        if unknown := [name for name in methods or () if name not in results]:
            raise FedhetError(f"{', '.join(unknown)}: not in this comparison; choose from {', '.join(results)}")
        drawn = results.values() if methods is None else [results[name] for name in methods]
        return tables.comparison_figure([*drawn], width, height)

    def write(self) -> Path:
        """Write the tables, the figure and the page into `folder`; return the page's path."""
        results = self.results
        separate = tables.separate_tables(self.results, self.baseline)
        failure = [" ".join(self.failure.split())] if self.failed else []
        path = self.folder / "comparison.html"
        write_text(path.with_suffix(".csv"), csv_lines(tables.number_rows(results, self.baseline)))
        notes = [*self.notes, *failure]
        write_text(path.with_suffix(".md"), tables.markdown(results, self.baseline, notes, self.verdict))
        write_text(path.with_suffix(".tex"), tables.latex(separate, self.title, self.notes))
        runs = {outcome.run.name: outcome.files for result in results for outcome in result.outcomes}
        if runs:
            figure = self.plot()
            for kind in (".png", ".pdf", ".svg"):
                save_figure(figure, path.with_suffix(kind))
            sections = [Section("Results", separate, self.notes, kind="numbers"), *self.sections]
            missing = [*absent(results), *failure]
            write_together(path, self.title, runs, sections, {"comparison": figure}, missing, self.verdict)
        return path

    def _repr_html_(self) -> str:
        failure = f"<pre>{escape(self.failure)}</pre>" if self.failed else ""
        lines = "".join(f"<p>{escape(line)}</p>" for line in absent(self.results))
        return lines + table(tables.whole_table(self.results, self.baseline)) + failure


@alone()
@continued()
def compare(
    methods: Sequence[Any],
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    model: Any = None,
    data: Any = None,
    task: str | Task | None = None,
    client_settings: Any = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    baseline: str | None = None,
    tuning: Tuning | None = None,
    console: Console | None = None,
) -> Comparison:
    """Run every method with every seed, print a table, and write it as `comparison.html`, `.tex`, ... into `out`.

    The run directories are `out/<variant>-seed<seed>/`. If called again with the same settings, a comparison keeps
    completed runs, and resumes interrupted and failed ones. Returns the results over seeds. Raises a ConfigError if
    settings are invalid or a folder in `out` has a run with other settings, and a FedhetError if all runs failed.

    Args:
        methods: names of methods in the table's order, or `[NAME=]METHOD,KEY=VALUE,...` for one with its own settings,
            or a strategy class of your own that declares its method.
        config: settings for all methods, as for `fedhet.run`, without `seed`, `out`, `engine` and `workers`. Keys that
            are not set have the first method's defaults; a method's own keys have the values of its own preset. If one
            method needs public examples or `closing-epochs` (training after the last round), all methods get them.
        seeds: each method runs once with each seed.
        model: the clients' networks, as for `fedhet.run`.
        data: the clients' data, as for `fedhet.run`.
        task: the task (loss and metric) of the user's data, as for `fedhet.run`.
        client_settings: settings of single clients, as for `fedhet.run`.
        out: folder of the comparison; by default `runs/compare-METHODS`, with a number if that has other settings.
        jobs: number of simultaneous runs, with a thread each; by default one per CPU core, or per 4 GiB of GPU memory.
        baseline: method, or NAME in `methods`, with which all others are compared; by default the first.
        tuning: configurations to try before the runs, to choose each method's settings by validation accuracy.
        console: rich console for progress and tables; by default standard output.
    """
    check_list("seeds", seeds, int, "[0, 1, 2]")
    check_kinds(tuning=(tuning, (Tuning,)), baseline=(baseline, (str,)))
    variants, seeds = variants_of(methods), distinct(seeds)
    names = [variant.name for variant in variants]
    folder = expanded(out or Path("runs") / f"compare-{'-'.join(names)}")
    functions = UserFunctions(model, data, task, client_settings)
    settings, execute = prepared(config, functions, folder if out is None else out, jobs, console)
    if not variants or not seeds:
        raise ConfigError("a comparison needs at least one method and one seed: add them to methods and seeds")
    if baseline is not None and baseline not in names:
        raise ConfigError(f"baseline {baseline} is not among the compared methods: choose one of {', '.join(names)}")
    all_seeds = distinct([*seeds, *(tuning.seeds if tuning else ())])
    shared = shared_settings(variants, seeds=all_seeds, config=settings, functions=functions)
    if out is None:
        varied = [RATE, *WHOLE, *(key.rpartition(":")[2] for key in tuning.grid)] if tuning else []
        folder = unused(folder, lambda place: _plans(shared, seeds, place, {}), varied, functions)
    return _compared(shared, seeds, folder, baseline or names[0], tuning, execute)


def _plans(
    shared: SharedSettings, seeds: Sequence[int], out: Path, choices: Mapping[str, Choice]
) -> Iterator[PlannedRun]:
    for name in shared.own:
        for seed in seeds:
            yield shared.plan(name, seed, out / f"{name}-seed{seed}", choices.get(name))


def _compared(
    shared: SharedSettings, seeds: Sequence[int], out: Path, baseline: str, tuning: Tuning | None, execute: Execution
) -> Comparison:
    for note in shared.notes:
        execute.tell(note)
    tuned = planned_trials(tuning, shared, seeds, out) if tuning else []
    trials = [run for search in tuned for run in search.runs]
    announce(trials, [*_plans(shared, seeds, out, {})], shared.functions, execute)
    if tuned:
        tune(tuned, out, execute)
    # The best round is chosen on validation examples, so these stay held out.
    whole = {} if shared.for_all["keep-best"] or shared.for_all["patience"] else WHOLE
    choices = {search.variant: search.best.choice | whole for search in tuned if search.best}
    untuned = {search.variant: search.text for search in tuned if not search.best}
    runs = [*_plans(shared, seeds, out, choices)]
    check(runs, shared.functions)
    failures = execute([run for run in runs if run.variant not in untuned])
    failures |= {run.name: untuned[run.variant] for run in runs if run.variant in untuned}
    failed = {run.name: failures[run.name] for run in runs if run.name in failures}  # in order of the runs, not of time

    with showing(out):
        results = measure(runs, failed)
        first = next(result for result in results if result.variant == baseline)
        notes = tables.notes_below(results, first, shared.notes, [search.text for search in tuned if search.best])
        dataset = "own data" if shared.functions.data is not None else runs[0].settings.dataset
        title = f"{', '.join(shared.own)} on {dataset}"
        done = Comparison(out, results, first, failed, title, verdict(results, first), notes)
        publish(done, runs, execute)
    further = [note for note in notes if note not in shared.notes]
    execute.show(Text("\n".join([*further, *absent(results), done.verdict])))
    execute.tell(f"results are in {out.resolve()}: {FILES}, and a folder for each run")
    if len(failed) == len(runs):
        raise FedhetError(done.failure)
    return done


def publish(done: Comparison, runs: Sequence[ComparedRun], execute: Execution) -> None:
    """Print the tables of a comparison of these runs to the console of `execute`, and write its files."""
    for lines in tables.separate_tables(done.results, done.baseline):
        execute.show(TerminalTable(lines))
    saved = {name: getattr(done, name) for name in TEXTS}
    saved |= {"baseline": done.baseline.variant, "sections": [asdict(section) for section in done.sections]}
    places = [run.folder.relative_to(done.folder).as_posix() for run in runs]
    saved["runs"] = [[run.variant, run.seed, place, run.equalised] for run, place in zip(runs, places, strict=True)]
    write_text(done.folder / SAVED, json.dumps(saved, indent=2) + "\n")
    done.write()


def read_comparison(folder: Path) -> Comparison:
    """Read a comparison from `comparison.json` and the runs in its folder; raises a FedhetError if they are damaged."""
    with showing(folder):
        saved = parse_object((folder / SAVED).read_text(encoding="utf-8"))
        runs = [ComparedRun(name, seed, folder / place, equalised) for name, seed, place, equalised in saved["runs"]]
        for run in runs:
            if not run.folder.resolve().is_relative_to(folder.resolve()):
                raise FedhetError(f"{folder / SAVED} names a run outside of its folder: restore it from a copy")
        results = measure(runs, saved["failed"])
        first = next(result for result in results if result.variant == saved["baseline"])
        sections = [Section(**section) for section in saved["sections"]]
        return Comparison(folder, results, first, sections=sections, **{name: saved[name] for name in TEXTS})
