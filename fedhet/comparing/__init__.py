"""Comparing methods: the same clients, data, splits, participation and rounds for all, over several seeds."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet import running, text
from fedhet.comparing import cases
from fedhet.comparing.arms import arms_of
from fedhet.comparing.execution import Execution
from fedhet.comparing.figure import comparison_figure
from fedhet.comparing.ground import common_ground, distinct
from fedhet.comparing.measures import measure
from fedhet.comparing.notes import notes_below
from fedhet.comparing.outcome import Comparison
from fedhet.comparing.tables import cost_table, costs, markdown, number_rows, outcomes, result_table
from fedhet.comparing.tuning import Tuned, Tuning, tune
from fedhet.engines import children
from fedhet.errors import ConfigError, FedhetError
from fedhet.files import check_place, write_csv, write_text
from fedhet.given import Given
from fedhet.machine import device_of, runs_at_once
from fedhet.results.figures import lay_out, save_png
from fedhet.results.run_files import read_run
from fedhet.results.together import write_together

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Comparison", "Tuning", "compare"]


def compare(
    methods: Sequence[str],
    *,
    seeds: Sequence[int],
    config: Mapping[str, object],
    out: Path | None = None,
    jobs: int | None = None,
    homogeneous_model: str = "cnn",
    baseline: str | None = None,
    tuning: Tuning | None = None,
    own: Given = Given(),  # noqa: B008 - it is frozen
    run: Callable[..., object] = running.run,
    console: "Console | None" = None,
) -> Comparison:
    """Run every method with every seed; write `comparison.csv`, `.md`, `.png` and `.html` into `out`.

    Each run lies in `out/<arm>-seed<seed>/`. Started again with the same settings, a comparison keeps its completed
    runs and resumes interrupted and failed ones. The table is printed too.

    Args:
        methods: in the order of the table: names, or `NAME=METHOD,KEY=VALUE,...` for an arm with settings of its own.
        seeds: each method runs once with each.
        config: settings for all (kebab-case keys; `method`, `seed`, `out` and `engine` are set here). A method's own
            keys go to that method alone. What is not set comes from the first method's defaults, for all, and a
            method's own keys from its preset of the same name, as in `fedhet run`; the held-out pool and closing epochs
            that one method needs are given to all. With `rounds = 0`, which one of the methods must settle by itself,
            one-shot methods get one round and the others as many as that one.
        out: folder of the comparison; one in `runs/` that is named by the methods if left out.
        jobs: runs at a time, each in a process of its own with one thread; None: as many as cores, and on a GPU one for
            each 4 GiB of its memory.
        homogeneous_model: the model of all clients under methods that need equal architectures, where `config` mixes
            them.
        baseline: the arm that the others' differences are to; None: the first.
        tuning: what each method's settings are chosen from before (`fedhet.comparing.tuning`), on validation parts;
            the reported runs train on the whole training parts. None: as `config` says.
        own: a user's own model and data, which `run` gives to each run.
        run: what runs one configuration; must be picklable.
        console: where progress and the table go; None: standard output.

    Returns:
        What it came to; of runs that failed, the reasons.

    Raises:
        ConfigError: settings that cannot be run, or a folder in `out` that holds a run with other settings; nothing was
            started (but for the tuning, where what it chose does not fit the runs that are there).
        FedhetError: after everything was written, if all runs failed; with the reasons.
    """
    children.prepare("matplotlib.backends.backend_agg")  # for reports; meanwhile what is asked for is checked
    arms, seeds = arms_of(methods), distinct(seeds)
    names = [arm.name for arm in arms]
    out = Path(out or Path("runs") / f"compare-{'-'.join(names)}")
    if not arms or not seeds:
        raise ConfigError("a comparison needs at least one method and one seed")
    if baseline is not None and baseline not in names:
        raise ConfigError(f"baseline {baseline} is not among the arms compared: {', '.join(names)}")
    check_place(out)
    jobs = jobs or runs_at_once(device_of(str(config.get("device", "auto"))))
    execute = Execution(run, jobs, console or text.console(soft_wrap=True))
    all_seeds = distinct([*seeds, *(tuning.seeds if tuning else ())])
    ground = common_ground(arms, seeds=all_seeds, config=config, homogeneous_model=homogeneous_model, given=own)
    for note in ground.notes:
        execute.tell(note)
    tuned: Mapping[str, Tuned] = tune(tuning, ground, reported=seeds, out=out, execute=execute) if tuning else {}
    planned = []
    for arm in names:
        choice = {**dict(tuned[arm].best.choice), "validation": 0.0} if tuned else {}
        for seed in seeds:
            settings = ground.settings(arm, seed, choice)
            planned.append(ground.case(arm, seed, settings, out / f"{arm}-seed{seed}"))
    cases.check(planned, own)
    failed = execute(planned)

    results = measure(planned, failed)
    against = results[names.index(baseline) if baseline else 0]
    notes = notes_below(results, against, homogeneous_model, ground.notes, tuning, list(tuned.values()))
    told = notes + [f"{name} failed: {'; '.join(reason.splitlines())}" for name, reason in failed.items()]
    write_csv(out / "comparison.csv", number_rows(results, against))
    write_text(out / "comparison.md", markdown(results, against, told))
    if any(result.runs for result in results):
        first = comparison_figure(results)
        lay_out(first)
        save_png(first, out / "comparison.png")
        runs = {case.name: read_run(case.folder) for case in planned if case.name not in failed}
        firsts = {run.case.arm: runs[run.case.name] for result in results for run in result.runs[:1]}
        title = f"{', '.join(names)} on {'own data' if own.data is not None else planned[0].settings.dataset}"
        page = out / "comparison.html"
        tables = [outcomes(results, against), costs(results)]
        write_together(page, title, runs, tables, notes=told, first=first, shown=firsts)
    execute.console.print(result_table(results, against))
    execute.console.print(cost_table(results, notes))
    done = Comparison(out, results, against, failed)
    if len(failed) == len(planned):
        raise FedhetError(done.failure)
    return done
