"""The model card of a run, `models.md` beside `models/`: how the networks were trained, and how well they predict."""

from fedhet.results.history import RunFiles
from fedhet.results.terminal import format_value
from fedhet.utils.files import write_text
from fedhet.utils.text import printable

KEYS = ("method", "dataset", "partition", "clients", "architectures", "rounds", "local-epochs", "optimizer", "seed")
STATISTICS = ("weighted", "mean", "min", "max")

CARD = """\
# Models of {name}

`models/NAME.safetensors` is the network of the client NAME, `global.safetensors` the server's, if there is one.
In Python (with `model=...` if you gave one to the run): `fedhet.load_model("{name}", "NAME")`.

Training, of which `config.toml` has all keys:

{training}

Predictions by {predicts_by}, after the last round; {metric} on test examples over clients:

| models | weighted by predictions | mean | lowest | highest |
| --- | ---: | ---: | ---: | ---: |
{scores}

A personal network is scored on its own client's examples and may be worse on others. Its weights may disclose examples
that it was trained on.
"""


def write_card(run: RunFiles) -> None:
    """Write `models.md` of a completed run whose models are in its folder."""
    summary = run.summary
    if summary.get("status") != "completed" or not any((run.folder / "models").glob("*.safetensors")):
        return
    scores = {which: [format_value(run.accuracy(which, name)) for name in STATISTICS] for which in run.scores}
    # A Flower app has data and networks of its own, and its configuration the default names.
    other = summary.get("dataset") not in (None, run.settings.get("dataset"))
    others = ("dataset", "partition", "architectures") if other else ()
    settings = {key: run.settings[key] for key in KEYS if key in run.settings and key not in others} | run.versions
    if run.ended_early:
        settings["rounds"] = f"{summary['rounds']} of {run.wanted}"
    elif not settings.get("rounds", 1):  # settled by the method
        settings["rounds"] = summary["rounds"]
    text = CARD.format(
        name=run.folder.name,
        training="\n".join(f"- {key}: {value}" for key, value in settings.items()),
        predicts_by=summary.get("predicts_by"),
        metric=summary.get("metric", "accuracy"),
        scores="\n".join(f"| {' | '.join([which, *values])} |" for which, values in scores.items()),
    )
    write_text(run.folder / "models.md", printable(text, keep="\n"))
