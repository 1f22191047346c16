"""Write `run_configs/PAPERS.md`: the papers' numbers, what runs each, what that costs, and what came out.

    python run_configs/papers/page.py

`numbers.csv` has a row for each number: what the paper prints, the preset and keys of its run here, where in the run's
folder the number stands, and a note: why nothing runs it, or what is ours. `costs.csv` has the seconds on one core that
an example and a client take (`costs.py` measures them), and `measured.csv` what was run at the paper's own scale
(`measure.py`).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedhet.config import resolve
from fedhet.options import Config
from fedhet.registry import module_of

HERE = Path(__file__).resolve().parent
costs = module_of(str(HERE / "costs.py"))
PAGE = HERE.parent / "PAPERS.md"
NUMBER = ("paper", "table", "dataset", "setting", "method", "metric")

EXAMPLES = {
    "mnist": 60_000,
    "cifar10": 50_000,
    "cifar10-domains": 50_000,
    "cifar10-domains-balanced": 50_000,
    "cifar10-fedhenn": 50_000,
    "cifar10-fedharm": 50_000,
    "cifar100": 50_000,
    "shakespeare": 880_885,
    "sentiment140-glove": 6_000,
    "chestxray14": 86_524,
}
"""Training examples; of Sentiment140 an estimate for 100 users."""

LAYERS = {"vgg9": 9, "char-lstm": 3}
"""Rounds in a pass of FedMA."""

HEAD = """# The papers' numbers

The {count} numbers that the papers of FedHeNN, FedHARM, FedMA and FLHA-GHN print, and the run that gives each of them
here; {runnable} have a preset, the others a reason. This command runs R4, continues where it stopped, and adds the
result to [measured.csv](papers/measured.csv); the last column then has it, with its curve and its difference to the
paper:

```bash
python run_configs/papers/measure.py R4 --data FOLDER --runs FOLDER
python run_configs/papers/page.py    # this page, from numbers.csv, costs.csv and measured.csv
```

**Cost** is that of one seed on one CPU core, without evaluation. It is extrapolated from short runs
([costs.csv](papers/costs.csv) has their size, place and date). FedMA's round is the mean of those of a pass.

**What is ours.** The papers do not say how they ran FedRep, for which the settings are its authors', and how long the
members of FedMA's ensemble train, for which it is FedMA's 150 epochs. For FedMA's training on the entire data,
momentum and the cosine schedule are ours. FedHeNN's term weighs at most 0.014 on CIFAR-10 with the paper's eta0 (eta0
sqrt(t) in the last of 200 rounds), so a client can end at most 0.014 above the least loss without the term.
"""


def rounds(config: Config) -> int:
    """Rounds of the whole run, also where FedMA settles them."""
    return config.rounds or config.parameters.passes * LAYERS[config.architectures]


def seconds(config: Config, example: float, client: float) -> float:
    """Seconds of a round on one core, from those of an example in an epoch and of a client beside."""
    clients = config.fraction_train * (config.clients - config.unseen_clients)
    examples = (EXAMPLES[config.dataset] - config.public_samples) / config.clients
    if config.method_name == "fedharm":  # clients train on the public ones, too
        examples += config.public_samples
    return clients * (config.local_epochs * examples * example + client)


def hours(config: Config, example: float, client: float) -> float:
    """Hours of a run on one core."""
    closing = config.closing_epochs / (config.local_epochs * config.fraction_train)  # all clients take part
    if config.method_name == "fedharm":  # it is the half of a round that the first one lacks
        closing = 0
    return (rounds(config) + closing) * seconds(config, example, client) / 3600


def page() -> str:
    """The text of PAPERS.md."""
    numbers = costs.rows_of("numbers.csv")
    measured = {
        costs.key_of(row): (float(row["example_seconds"]), float(row["client_seconds"]))
        for row in costs.rows_of("costs.csv")
    }
    results = {number_of(row): row for row in costs.rows_of("measured.csv")}
    runs, names = runs_of(numbers), names_of(numbers)
    text = [HEAD.format(count=len(numbers), runnable=sum(bool(row["preset"]) for row in numbers))]
    text += ["## Runs", ""]
    text += table(
        ("run", "preset", "keys on top of it", "seconds a round", "rounds", "core hours"),
        (
            (names[run], f"[{run[0]}]({run[0]}.toml)", code(run[1].split()), *cost(run[0], resolve(chosen), measured))
            for run, chosen in runs.items()
        ),
    )
    for (paper, name), group in itertools.groupby(numbers, lambda row: (row["paper"], row["table"])):
        text += [f"## {paper}, {name}", ""]
        text += table(
            ("data", "setting", "method", "metric", "paper", "run", "where it stands", "here"),
            lines(group, names, results),
        )
    return "\n".join(text)


def number_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """The cells that tell a number from the others."""
    return tuple(row[name] for name in NUMBER)


def runs_of(numbers: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The settings of the runs that give the numbers, by preset and keys."""
    return {(row["preset"], row["keys"]): costs.settings(row) for row in numbers if row["preset"]}


def names_of(numbers: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], str]:
    """The runs' names on the page."""
    return {run: f"R{index}" for index, run in enumerate(runs_of(numbers), 1)}


def lines(
    group: Iterable[Mapping[str, str]],
    names: Mapping[tuple[str, str], str],
    results: Mapping[tuple[str, ...], Mapping[str, str]],
) -> Iterator[tuple[str, ...]]:
    """A table's numbers."""
    for row in group:
        spread = f" ± {row['std']}" if row["std"] else ""
        found, here = results.get(number_of(row)), ""
        if found:
            curves = " ".join(f"[{seed}](papers/{found['curve'].format(seed)})" for seed in found["seeds"].split())
            less = float(found["value"]) - float(row["value"])
            here = f"{found['value']}, {less:+.2f} (seeds and curves {curves}; {found['date']})"
        where = "; ".join(filter(None, (row["read"], row["note"])))
        run = names.get((row["preset"], row["keys"]), "none")
        yield row["dataset"], row["setting"], row["method"], row["metric"], row["value"] + spread, run, where, here


def cost(preset: str, config: Config, measured: Mapping[tuple[str, str, str], tuple[float, float]]) -> tuple[str, ...]:
    """A run's seconds a round, rounds and core hours."""
    known = measured.get(costs.alike(preset, config))
    if known is None:
        return "not measured", str(rounds(config)), "not measured"
    return two_digits(seconds(config, *known)), str(rounds(config)), two_digits(hours(config, *known))


def two_digits(value: float) -> str:
    """A number in two digits."""
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def code(words: Iterable[str]) -> str:
    """Words as code, one after the other."""
    return " ".join(f"`{word}`" for word in words)


def table(head: tuple[str, ...], body: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of a table in Markdown, and an empty one."""
    rows = (head, ("---",) * len(head), *body)
    return [*("| " + " | ".join(cells).replace("  ", " ") + " |" for cells in rows), ""]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
