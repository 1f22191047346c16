"""What stands below a comparison's table: what a reader must know."""

from collections.abc import Sequence

from fedhet.comparing.measures import CONFIDENCE, ArmResult
from fedhet.comparing.tuning import Tuned, Tuning


def notes_below(
    results: Sequence[ArmResult],
    baseline: ArmResult,
    homogeneous_model: str,
    settings: Sequence[str] = (),
    tuning: Tuning | None = None,
    tuned: Sequence[Tuned] = (),
) -> list[str]:
    """The notes, in order.

    Args:
        results: what stands in the table.
        baseline: the method that differences are to.
        homogeneous_model: the model of methods that need equal architectures.
        settings: notes on the settings.
        tuning: what was tried, if anything was,
        tuned: and what came of it.
    """
    metrics = sorted({run.metric for result in results for run in result.runs}) or ["accuracy"]
    on = {run.case.settings.test_on == "global" for result in results for run in result.runs}
    where = "the common test set" if on == {True} else "the clients' own data"
    notes = [
        f"{' and '.join(metrics).capitalize()} after the last round, weighted by examples, on {where}: "
        "mean ± sample standard deviation over seeds (- with one seed). Examples (labelled, and unlabelled ones of the "
        "pool), gradient steps (on clients' own examples, and all), examples that went forward in training, bytes (up "
        "and down) and time: mean of a run, all clients together."
    ]
    if any(result.mean("trained_accuracy") not in (None, result.mean("personal_accuracy")) for result in results):
        notes.append("Trained: after the last local training, which is not every method's own evaluation.")
    if any(result.mean("common_accuracy") is not None for result in results):
        notes.append("Common: on the common test set, of what all clients share, else of their own models.")
    if len(results) > 1:
        notes.append(
            f"Less {baseline.arm}: difference of personal {metrics[0]}, paired over the seeds that both completed, "
            f"with its {CONFIDENCE:.0%} interval (Student's t)."
        )
    if any(result.forced for result in results):
        notes.append(f"* needs equal architectures: every client got {homogeneous_model}.")
    notes += _absent(results)
    notes += settings
    if tuning:
        seeds = ", ".join(map(str, tuning.seeds))
        notes.append(
            f"Tuned by validation accuracy with seeds {seeds}, of which nothing is in the table; then trained on whole "
            f"training parts. Chosen for {'; '.join(each.text for each in tuned)}."
        )
    notes += _validation(results)
    return notes


def _absent(results: Sequence[ArmResult]) -> list[str]:
    """Arms without some of the clients, which are compared with others that had them."""
    notes = []
    for result in results:
        if short := [run for run in result.runs if run.refused]:
            seeds = ", ".join(str(run.case.seed) for run in short)
            count = max(len(run.refused) for run in short)
            client, reason = next(iter(short[0].refused.items()))
            notes.append(
                f"{result.arm} went without {count} of {short[0].case.settings.clients} clients (seeds {seeds}), so "
                f"its numbers are of fewer clients than the others': client {client}: {reason}."
            )
    return notes


def _validation(results: Sequence[ArmResult]) -> list[str]:
    """What was set apart for validation in the reported runs, and where it ended them."""
    notes = []
    settings = [run.case.settings for result in results for run in result.runs]
    if shares := sorted({each.validation for each in settings if each.validation}):
        notes.append(f"{', '.join(f'{share:.0%}' for share in shares)} of training examples were for validation only.")
    if patience := sorted({each.early_stopping for each in settings if each.early_stopping}):
        stopped = [
            f"{result.arm} {', '.join(f'seed {run.case.seed} after round {run.stopped}' for run in ended)}"
            for result in results
            if (ended := [run for run in result.runs if run.stopped])
        ]
        notes.append(
            f"Early stopping after {', '.join(map(str, patience))} evaluations without a better validation accuracy "
            f"ended training; the state then, not the best one, is reported: {'; '.join(stopped) or 'no run'}."
        )
    return notes
