"""Write the tables of README.md and the heat map, from grid.csv.

    python run_configs/grid/page.py

The page's own text stays; what is between its two marks is written anew, and a test holds it to the csv.
"""

import json
import math
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from matplotlib.figure import Figure

from fedhet import registry
from fedhet.comparing.settings import variants_of
from fedhet.comparing.uncertainty import CONFIDENCE, Difference, holm, paired_difference
from fedhet.config import resolve
from fedhet.files import read_csv
from fedhet.registry import module_of
from fedhet.results.plotting import INK, colour_bar, draw_image, new_figure, save_png

HERE = Path(__file__).resolve().parent
PAGE, PICTURE = HERE / "README.md", HERE / "heatmap.png"
BEGIN, END = "<!-- made by page.py -->\n", "<!-- end -->\n"

grid = module_of(str(HERE / "grid.py"))
marks = module_of(str(HERE.parent / "marks.py"))
PLAN = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))
SETTINGS, METHODS = list(PLAN["settings"]), list(grid.methods(PLAN))

Key = TypeVar("Key")

NETWORKS = {"mixed": "four architectures", "equal": "equal networks"}
NEEDS = ("", "unlabelled", "labelled")
"""How methods need the public examples, the least first."""

PAIRS = {
    **{
        (method, "local"): "training alone"
        for method in (
            "fedhenn",
            "fedhenn-clipped",
            "fedmd",
            "fedharm",
            "fedproto",
            "fedgen",
            "layer-average",
            "flha-ghn",
            "fedavg",
            "fedma",
        )
    },
    ("fedharm", "fedharm-own"): "the client's own descriptors, no peers",
    ("fedharm", "local-mixed"): "the same images and labels, no federation",
    ("propagation", "propagation-own"): "the graph of the client's own posteriors, no peers",
    ("propagation", "fedhenn"): "the spectral target alone",
    ("fedhenn", "label-spreading"): "no networks and no peers",
    ("fedhenn-clipped", "label-spreading"): "no networks and no peers",
    ("fedhenn-clipped", "fedhenn"): "gradients of any norm",
    ("fedmd", "label-spreading"): "no networks and no peers",
    ("fedmd", "local-mixed"): "the same images and labels, no federation",
    ("flha-ghn", "layer-average"): "no hypernetwork",
    ("fedgen", "lg-fedavg"): "heads averaged, nothing generated",
    ("fedma", "fedavg"): "no matching",
}
"""Methods, each beside training alone or what takes away what it rests on, and what that is."""

Cell = tuple[str, str, str]
"""Setting, networks and method."""


def different(found: Mapping[Key, Difference]) -> list[Key]:
    """The differences from 0, by p-values corrected for their number (Holm)."""
    ps = {key: each.p for key, each in found.items() if each.p is not None}
    return [key for key, p in zip(ps, holm([*ps.values()]), strict=True) if p < 1 - CONFIDENCE]


class Results:
    """The rows of the csv: the methods that have some, and accuracies by seed, gradient steps and reasons by cell."""

    def __init__(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Sort the rows by cell."""
        known = {*grid.CONTROLS, *(row["method"] for row in rows)}
        self.methods = [name for name in METHODS if name in known]
        self.accuracies: dict[Cell, dict[int, float]] = {}
        self.reasons: dict[Cell, str] = {}
        self.private_steps: dict[Cell, int] = {}
        self.steps: dict[Cell, int] = {}
        for row in rows:
            cell = row["setting"], row["networks"], row["method"]
            if row["reason"]:
                self.reasons[cell] = row["reason"]
            else:
                self.accuracies.setdefault(cell, {})[int(row["seed"])] = float(row["personal_accuracy"])
                self.private_steps[cell], self.steps[cell] = int(row["private_steps"]), int(row["steps"])

    def mean(self, cell: Cell) -> float:
        """The mean accuracy over all seeds; NaN unless all of them are there."""
        known = self.accuracies.get(cell, {})
        return statistics.fmean(known.values()) if len(known) == len(PLAN["seeds"]) else math.nan

    def line(self, setting: str, networks: str) -> str | None:
        """The control with the highest mean; None as long as one of them is missing."""
        means = {name: self.mean((setting, networks, name)) for name in grid.CONTROLS}
        return None if any(map(math.isnan, means.values())) else max(means, key=means.__getitem__)

    def difference(self, cell: Cell) -> Difference | None:
        """The paired difference to the best control, with its interval; None where something is missing."""
        line = self.line(*cell[:2])
        return None if line is None else self.between(cell, line)

    def between(self, cell: Cell, other: str) -> Difference | None:
        """The paired difference to another method in the same setting; None where seeds of one of both are missing."""
        theirs = (*cell[:2], other)
        if math.isnan(self.mean(cell) + self.mean(theirs)):
            return None
        return paired_difference(self.accuracies[cell], self.accuracies[theirs])

    @property
    def begun(self) -> list[str]:
        """The settings with any run."""
        return [setting for setting in SETTINGS if any(cell[0] == setting for cell in self.accuracies)]

    @property
    def there(self) -> set[Cell]:
        """The cells with all seeds or a reason."""
        return {*self.reasons, *(cell for cell in self.accuracies if not math.isnan(self.mean(cell)))}

    def complete(self, networks: str) -> list[str]:
        """The settings in which every method of the registry has all seeds or a reason."""
        there, names = self.there, [name for name in METHODS if name not in PLAN["variants"]]
        return [setting for setting in SETTINGS if all((setting, networks, name) in there for name in names)]

    def level(self, setting: str, networks: str, names: Sequence[str]) -> list[str]:
        """Of these methods the best one by its mean, and those whose interval of the difference to it includes 0."""
        best = self.best(setting, networks, names)
        serving = [name for name in names if (setting, networks, name) in self.accuracies]
        return [name for name in serving if name == best or self.beside(setting, networks, name, best)[1] >= 0]

    def best(self, setting: str, networks: str, names: Sequence[str]) -> str:
        """Of these methods the one with the highest mean."""
        serving = [name for name in names if (setting, networks, name) in self.accuracies]
        return max(serving, key=lambda name: self.mean((setting, networks, name)))

    def beside(self, setting: str, networks: str, name: str, other: str) -> tuple[float, float]:
        """The interval of the paired difference of two methods."""
        ours, theirs = self.accuracies[setting, networks, name], self.accuracies[setting, networks, other]
        found = paired_difference(ours, theirs)
        if found is None or found.low is None or found.high is None:
            return -math.inf, math.inf
        return found.low, found.high

    def clear(self, setting: str, networks: str) -> list[str]:
        """The methods above the best control, by p-values corrected for the number of methods (Holm)."""
        others = [name for name in self.methods if name != self.line(setting, networks)]
        known = {name: found for name in others if (found := self.difference((setting, networks, name)))}
        return [name for name in different(known) if known[name].mean > 0]


def generated(rows: Sequence[Mapping[str, str]]) -> str:
    """The tables."""
    results, text = Results(rows), list[str]()
    for networks, name in NETWORKS.items():
        text += [f"### {name.capitalize()}: `{PLAN['networks'][networks]['architectures']}`\n"]
        text += [*table(results, networks), ""]
    return "\n".join([*text, *pairs(results), *more_steps(results), *for_whom(results)])


def table(results: Results, networks: str) -> Iterator[str]:
    """Lines of Markdown: the best control of each setting, each method's difference to it, and why some have none."""
    reasons: dict[str, list[str]] = {}
    settings = [setting for setting in SETTINGS if results.line(setting, networks)]
    yield f"| method | public examples | {' | '.join(settings)} |"
    yield f"|{' --- |' * 2}{' ---: |' * len(settings)}"
    lines = {setting: results.line(setting, networks) for setting in settings}
    clear = {setting: results.clear(setting, networks) for setting in settings}
    best = [f"`{name}` {results.mean((s, networks, name)):.3f}" if name else "" for s, name in lines.items()]
    yield f"| the best of `local` and scikit-learn | | {' | '.join(best)} |"
    for name in results.methods:
        cells = []
        for setting in settings:
            difference = results.difference(cell := (setting, networks, name))
            if cell in results.reasons:
                needs = results.reasons[cell].partition(";")[0].rpartition(": ")[2]
                reasons.setdefault(needs, []).append(name)
            refused = "refused" if cell in results.reasons else ""
            cells.append(
                refused
                if difference is None
                else "0"
                if name == lines[setting]
                else shown(difference, name in clear[setting])
            )
        if {*cells} - {"", "refused"}:
            yield f"| `{name}` | {public(name)} | {' | '.join(cells)} |"
    if reasons:
        yield "\nRefused:\n"
    for reason, methods in reasons.items():
        yield f"- {', '.join(f'`{name}`' for name in dict.fromkeys(methods))}: {reason}"
    other = [
        f"`{name}` {steps:,} instead of {usual:,} ({setting})"
        for (setting, where, name), steps in results.private_steps.items()
        if where == networks and name not in grid.CONTROLS and name not in PLAN["variants"]
        if steps != (usual := results.private_steps.get((setting, networks, "local"), steps))
    ]
    if other:
        yield f"\nOther gradient steps on private examples than `local`, of all clients together: {'; '.join(other)}."


def pairs(results: Results) -> Iterator[str]:
    """Yield the lines of the table of methods beside their controls."""
    yield "### Methods beside their controls\n"
    yield (
        "A method's difference to training alone or to a control; bold: p < 0.05 after Holm's correction for all "
        "differences of the pair.\n"
    )
    settings = results.begun
    yield f"| method | minus | networks | {' | '.join(settings)} |"
    yield f"| --- | --- | --- |{' ---: |' * len(settings)}"
    for (method, control), what in PAIRS.items():
        every = {(setting, networks): (setting, networks, method) for networks in NETWORKS for setting in settings}
        known = {key: found for key, cell in every.items() if (found := results.between(cell, control))}
        clear = different(known)
        texts = {key: shown(found, key in clear) for key, found in known.items()}
        for networks, name in NETWORKS.items():
            cells = [texts.get((setting, networks), "") for setting in settings]
            if any(cells):
                yield f"| `{method}` | `{control}`: {what} | {name} | {' | '.join(cells)} |"
    yield ""


def more_steps(results: Results) -> Iterator[str]:
    """Yield the lines of the table of methods that train on public examples, too, and of `local` as many do."""
    yield "### Methods with more gradient steps\n"
    yield "All gradient steps of a run, also those on public examples. Other methods have those of `local`.\n"
    settings = results.begun
    yield f"| method | networks | {' | '.join(settings)} |"
    yield f"| --- | --- |{' ---: |' * len(settings)}"
    for method in results.methods:
        for networks, name in NETWORKS.items():
            steps = [results.steps.get((setting, networks, method), 0) for setting in settings]
            alone = [results.steps.get((setting, networks, "local"), 0) for setting in settings]
            if any(map(operator.gt, steps, alone)) or (method == "local" and any(steps)):
                yield f"| `{method}` | {name} | {' | '.join(f'{each:,}' if each else '' for each in steps)} |"
    yield ""


def taken(results: Results, networks: str, needs: str) -> list[str]:
    """The methods to take with these networks, which need no other public examples, by settings level with the best.

    They are level with the best of them in at least half of the complete settings, or in as many as any.
    """
    settings, counts = results.complete(networks), dict.fromkeys(METHODS, 0)
    serving = [name for name in enough_for(needs) if name not in grid.CONTROLS]
    for setting in settings:
        for name in results.level(setting, networks, serving):
            counts[name] += 1
    enough = min(max(counts.values()), len(settings) / 2)
    return [name for name in sorted(counts, key=lambda name: -counts[name]) if settings and counts[name] >= enough]


def for_whom(results: Results) -> Iterator[str]:
    """Lines of Markdown: which methods to take, and which controls they leave behind."""
    yield "### Which method for whom\n"
    yield "| networks | public examples | settings | methods | controls that the best of them is not clearly above |"
    yield f"|{' --- |' * 5}"
    for networks, words in NETWORKS.items():
        settings = results.complete(networks)
        for needs in NEEDS if settings else ():
            methods = taken(results, networks, needs)
            controls = [name for name in enough_for(needs) if name in grid.CONTROLS]
            better = {name: beaten(results, networks, methods, name) for name in controls}
            said = [f"`{name}` in {len(settings) - many}" for name, many in better.items() if many < len(settings)]
            named = ", ".join(f"`{name}`" for name in methods)
            yield f"| {words} | {needs or 'none'} | {len(settings)} | {named} | {', '.join(said) or 'none'} |"


def beaten(results: Results, networks: str, methods: Sequence[str], control: str) -> int:
    """In how many settings the best of the methods is clearly above a control."""
    best = {setting: results.best(setting, networks, methods) for setting in results.complete(networks)}
    return sum(results.beside(setting, networks, name, control)[0] > 0 for setting, name in best.items())


def enough_for(needs: str) -> list[str]:
    """The methods and controls for which so much of the public examples is enough."""
    return [name for name in METHODS if NEEDS.index(public(name)) <= NEEDS.index(needs)]


@cache
def public(name: str) -> str:
    """How a method gets the 500 public examples, one of `NEEDS`."""
    (variant,) = variants_of([grid.methods(PLAN)[name]])
    config = resolve({**PLAN["all"], "preset": "", "method": variant.method, **variant.settings}, strict=False)
    return {"none": "", "inputs": "unlabelled", "labelled": "labelled"}[registry.traits(config).public]


def shown(difference: Difference, clear: bool) -> str:
    """A difference and its interval, bold where it is clear."""
    return f"**{difference}**" if clear else str(difference)


def heat_map(rows: Sequence[Mapping[str, str]]) -> Figure:
    """Methods by settings: accuracy minus that of the best control, a panel for each set of networks."""
    results = Results(rows)
    figure, panels = new_figure(1.6 + 0.3 * len(results.methods), panels=2, width=11.0)
    for axes, (networks, words) in zip(panels, NETWORKS.items(), strict=True):
        found = [[results.difference((setting, networks, name)) for setting in SETTINGS] for name in results.methods]
        values = [[each.mean if each else math.nan for each in row] for row in found]
        image = draw_image(axes, values, cmap="RdBu", vmin=-0.3, vmax=0.3, aspect="auto")
        for row, columns in enumerate(values):
            for column, value in enumerate(columns):
                refused = (SETTINGS[column], networks, results.methods[row]) in results.reasons
                text = f"{value:+.2f}" if not math.isnan(value) else "refused" if refused else ""
                colour = "white" if abs(value) > 0.2 else INK
                axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=colour)
        axes.set_title(words, fontsize=10, color=INK)
        axes.set_xticks(range(len(SETTINGS)), SETTINGS, rotation=40, ha="right", fontsize=7)
        axes.set_yticks(
            range(len(results.methods)),
            results.methods if axes is panels[0] else [""] * len(results.methods),
            fontsize=8,
        )
    colour_bar(image, panels, "minus the best control")
    return figure


def page(text: str, rows: Sequence[Mapping[str, str]]) -> str:
    """The page with what is between its marks written anew."""
    return str(marks.between(text, BEGIN, END, generated(rows)))


def rows_of(file: Path = HERE / "grid.csv") -> list[dict[str, str]]:
    """The rows of the csv by name of column; none as long as there is no file."""
    return read_csv(file) if file.is_file() else []


def main() -> None:
    """Write the page and the picture."""
    rows = rows_of()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    save_png(heat_map(rows), PICTURE)


if __name__ == "__main__":
    main()
