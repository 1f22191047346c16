"""Write the tables of `run_configs/grid/README.md` from the csv files of its comparisons.

    python run_configs/studies/comparisons.py grid digits-72-iid-equal --data FOLDER --runs FOLDER   # run one column
    python run_configs/studies/grid.py                                                               # write the tables

`grid.toml` declares a comparison for each setting and each kind of networks.
"""

import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from fedhet.comparing.measures import CONFIDENCE, Difference, holm, paired_difference
from fedhet.comparing.settings import variants_of
from fedhet.config.configuration import resolve
from fedhet.methods import registry
from fedhet.methods.registry import module_of
from fedhet.utils.files import write_text

comparisons = module_of(str(Path(__file__).resolve().parent / "comparisons.py"))

CONTROLS = ("local", "nearest-neighbour", "logistic-regression", "label-spreading")
"""Training without communication, and scikit-learn on each client's own examples."""

NETWORKS = {"mixed": "four architectures", "equal": "equal networks"}
NEEDS = ("", "unlabelled", "labelled")  # the public examples that methods need, the least first

PAIRS = {
    **{(name, "local"): "training alone" for name in ("fedhenn", "fedharm", "fedgen", "flha-ghn", "fedma")},
    ("fedharm", "fedharm-own"): "the client's own descriptors, no peers",
    ("fedharm", "local-mixed"): "the same images and labels, no federation",
    ("fedhenn", "label-spreading"): "no networks and no peers",
    ("flha-ghn", "layer-average"): "no hypernetwork",
    ("fedgen", "lg-fedavg"): "heads averaged, nothing generated",
    ("fedma", "fedavg"): "no matching",
}
"""Methods and what they are compared with, and what that leaves out."""

Key = TypeVar("Key", bound=Hashable)


class Column:
    """The results of one comparison: accuracies of each method by seed."""

    def __init__(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Sort the rows of a csv file by method."""
        self.accuracies: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["seed"].isdigit():
                self.accuracies.setdefault(row["method"], {})[int(row["seed"])] = float(row["personal_accuracy"])

    def mean(self, method: str) -> float:
        """Return the mean accuracy of a method."""
        return statistics.fmean(self.accuracies[method].values())

    def best(self, methods: Sequence[str]) -> str:
        """Return the method with the highest mean of those that are there."""
        return max((name for name in methods if name in self.accuracies), key=self.mean)

    def minus(self, method: str, other: str) -> Difference | None:
        """Return the paired difference of two methods, or None if one of both is missing."""
        if not {method, other} <= self.accuracies.keys():
            return None
        return paired_difference(self.accuracies[method], self.accuracies[other])

    def clearly_above(self, method: str, other: str) -> bool:
        """Return whether the interval of the difference is above 0."""
        found = self.minus(method, other)
        return found is not None and found.low is not None and found.low > 0

    def level_with_best(self, methods: Sequence[str]) -> list[str]:
        """Return the best of these methods, and those that it is not clearly above."""
        best = self.best(methods)
        return [name for name in methods if name in self.accuracies and not self.clearly_above(best, name)]


def clear(differences: Mapping[Key, Difference]) -> list[Key]:
    """Return the differences from 0, by p values after Holm's correction for their number."""
    ps = {key: each.p for key, each in differences.items() if each.p is not None}
    return [key for key, p in zip(ps, holm([*ps.values()]), strict=True) if p < 1 - CONFIDENCE]


def shown(difference: Difference, bold: bool) -> str:
    """Return a difference with half of its interval, which is symmetric."""
    text = f"{difference.mean:+.3f}"
    text += "" if difference.high is None else f"±{difference.high - difference.mean:.3f}"
    return f"**{text}**" if bold else text


class Grid:
    """The grid's columns by setting and networks, and its methods."""

    def __init__(self) -> None:
        """Read the csv files."""
        self.page = comparisons.Page("grid")
        self.columns: dict[tuple[str, str], Column] = {}
        self.variants: dict[str, str] = {}
        for name, comparison in self.page.comparisons.items():
            setting, _, networks = name.rpartition("-")
            if networks not in NETWORKS:
                continue
            self.columns[setting, networks] = Column(self.page.rows_of(name))
            for variant, text in zip(variants_of(comparison.variants), comparison.variants, strict=True):
                self.variants.setdefault(variant.name, text)
        others = [name for name in self.variants if name not in CONTROLS]
        self.methods = [*CONTROLS, *others]

    def settings(self, networks: str) -> list[str]:
        """Return the settings with these networks."""
        return [setting for setting, kind in self.columns if kind == networks]

    def table(self, networks: str) -> Iterator[list[str]]:
        """Yield the rows of a table: the best control of each setting, then each method's difference to it."""
        settings = self.settings(networks)
        columns = [self.columns[setting, networks] for setting in settings]
        best = [column.best(CONTROLS) for column in columns]
        yield ["method", "public examples", *settings]
        first = (f"`{name}` {column.mean(name):.3f}" for name, column in zip(best, columns, strict=True))
        yield ["the best of `local` and scikit-learn", "", *first]
        texts: dict[str, list[str]] = {name: [] for name in self.methods}
        for column, control in zip(columns, best, strict=True):
            differences = {name: column.minus(name, control) for name in self.methods if name != control}
            known = {name: found for name, found in differences.items() if found}
            above = [name for name in clear(known) if known[name].mean > 0]
            for name in self.methods:
                text = shown(known[name], name in above) if name in known else "0" if name == control else ""
                texts[name].append(text)
        yield from ([f"`{name}`", self.needs(name), *texts[name]] for name in self.methods if any(texts[name]))

    def pairs(self) -> Iterator[list[str]]:
        """Yield the rows of the table of methods and their controls."""
        settings = list(dict.fromkeys(setting for setting, _ in self.columns))
        yield ["method", "minus", "networks", *settings]
        for (method, control), without in PAIRS.items():
            known = {key: found for key, column in self.columns.items() if (found := column.minus(method, control))}
            bold = clear(known)
            for networks, words in NETWORKS.items():
                keys = [(setting, networks) for setting in settings]
                cells = [shown(known[key], key in bold) if key in known else "" for key in keys]
                if any(cells):
                    yield [f"`{method}`", f"`{control}`: {without}", words, *cells]

    def choices(self) -> Iterator[list[str]]:
        """Yield the rows of the table of methods to take."""
        yield ["networks", "public examples", "methods", "controls that the best of them is not above"]
        for networks, words in NETWORKS.items():
            columns = [column for (_, kind), column in self.columns.items() if kind == networks]
            for needs in NEEDS:
                enough = [name for name in self.methods if NEEDS.index(self.needs(name)) <= NEEDS.index(needs)]
                methods = self.to_take(columns, [name for name in enough if name not in CONTROLS])
                best = [column.best(methods) for column in columns]
                pairs = [*zip(columns, best, strict=True)]
                level = {
                    control: sum(not column.clearly_above(name, control) for column, name in pairs)
                    for control in CONTROLS
                    if control in enough
                }
                named = ", ".join(f"`{name}`" for name in methods)
                controls = ", ".join(f"`{name}` in {count}" for name, count in level.items() if count)
                yield [words, needs or "none", named, controls or "none"]

    def to_take(self, columns: Sequence[Column], methods: Sequence[str]) -> list[str]:
        """Return the methods that are level with the best in at least half of the columns, or in as many as any."""
        levels = [column.level_with_best(methods) for column in columns]
        counts = {name: sum(name in level for level in levels) for name in methods}
        enough = min(max(counts.values()), len(columns) / 2)
        return [name for name in sorted(counts, key=lambda name: -counts[name]) if counts[name] >= enough]

    @cache  # noqa: B019 (one grid in a process)
    def needs(self, name: str) -> str:
        """Return what a method needs of the public examples, one of `NEEDS`."""
        (variant,) = variants_of([self.variants[name]])
        settings = {**self.page.comparisons["digits-30-dirichlet-equal"].set, **variant.settings}
        config = resolve({**settings, "preset": "", "method": variant.method}, strict=False)
        return {"none": "", "inputs": "unlabelled", "labelled": "labelled"}[registry.traits(config).public]

    def written(self, text: str) -> str:
        """Return the page with its tables written anew."""
        tables = {networks: self.table(networks) for networks in NETWORKS} | {
            "pairs": self.pairs(),
            "choices": self.choices(),
        }
        for name, rows in tables.items():
            text = comparisons.replaced(text, name, comparisons.markdown(rows))
        return text


def main() -> None:
    """Write the page."""
    grid = Grid()
    write_text(grid.page.file, grid.written(grid.page.file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
