"""Write `run_configs/PAPERS.md`: the papers' numbers, what runs each, what that costs, and what came out.

    python run_configs/papers/page.py                # writes the page
    python run_configs/papers/page.py --measure DATA # measures before what costs.csv lacks, on the data in that folder

`numbers.csv` has a row for each number: what the paper prints, the preset and keys of its run here, where in the run's
folder the number stands, and a note: why nothing runs it, or what is ours. `costs.csv` has the seconds on one core that
a training image takes, and `measured.csv` what was run at the paper's own scale.
"""

import argparse
import csv
import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

import fedhet
from fedhet import models
from fedhet.config import parse_settings, resolve
from fedhet.observing import Observer, RoundReport, RunInfo
from fedhet.options import Config

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "PAPERS.md"
NUMBER = ("paper", "table", "dataset", "setting", "method", "metric")

EXAMPLES = {
    "mnist": 55_000,
    "cifar10": 50_000,
    "cifar10-domains": 50_000,
    "cifar10-domains-balanced": 50_000,
    "cifar10-fedhenn": 50_000,
    "cifar10-fedharm": 45_000,
    "cifar100": 50_000,
    "shakespeare": 1_200_000,
    "sentiment140-glove": 6_000,
    "chestxray14": 86_524,
}
"""Training examples of all clients together, the public ones aside; of Sentiment140 an estimate for 100 users."""

LAYERS = {"vgg9": 9, "char-lstm": 3}
"""Rounds in a pass of FedMA."""

HEAD = """# The papers' numbers

The {count} numbers that the papers of FedHeNN, FedHARM, FedMA and FLHA-GHN print, and what runs each of them here:
{runnable} have a preset, the others a reason. Made by `python run_configs/papers/page.py` from
[numbers.csv](papers/numbers.csv), [costs.csv](papers/costs.csv) and [measured.csv](papers/measured.csv); tests hold it
to them and run a round of every preset.

**Cost** is that of one seed in hours of one CPU core: seconds that a training image takes, measured in a short run on a
core of a cloud machine ([costs.csv](papers/costs.csv) says when), times images, epochs, clients of a round and rounds.
Evaluation is not counted. FedMA's is an upper bound: it trains fewer layers from round to round.
"""


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of one of the csv files beside this one."""
    with (HERE / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def settings(number: Mapping[str, str]) -> dict[str, Any]:
    """A number's preset and the keys on top of it."""
    return {"preset": number["preset"], **parse_settings(number["keys"].split())}


def alike(preset: str, config: Config) -> tuple[str, str, str]:
    """Preset, networks and the kind of images, by which an image's cost goes; CIFAR-100's cost what CIFAR-10's do."""
    return preset, config.architectures, config.dataset.split("-")[0].replace("cifar100", "cifar10")


def rounds(config: Config) -> int:
    """Rounds of the whole run, also where FedMA settles them."""
    return config.rounds or config.parameters.passes * LAYERS[config.architectures]


def hours(config: Config, seconds: float) -> float:
    """Hours on one core, of the seconds that an image takes."""
    epochs = config.fraction_train * config.local_epochs * rounds(config) + config.closing_epochs
    return EXAMPLES[config.dataset] * epochs * seconds / 3600


def worked() -> float:
    """Seconds that this process and its workers have computed."""
    here = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (here, *here.children(recursive=True)))


class Clock(Observer):
    """Keeps how many seconds this process and its workers had computed when a round ended."""

    def __init__(self) -> None:
        """No round has ended."""
        self.ends: dict[int, float] = {}

    def round(self, run: RunInfo, report: RoundReport) -> None:
        """One more."""
        self.ends[report.row["round"]] = worked()


def measured(preset: str, config: Config, data: str) -> float:
    """Seconds on one core for a training image, in the second round of a short run."""
    clients, samples, epochs = max(2, len(models.expand(config.architectures))), 96, 2
    short = {
        "dataset": config.dataset.replace("cifar100", "cifar10"),
        "architectures": config.architectures,
        "rounds": min(2, config.rounds),
        "clients": clients,
        "samples-per-client": samples,
        "public-samples": min(config.public_samples, 256),
        "fraction-train": 1,
        "local-epochs": epochs,
        "closing-epochs": 0,
        "unseen-clients": 0,
        "partition": config.partition if config.partition == "natural" else "iid",
        "test-on": "local",
        "evaluate-every": 10,
        "workers": 1,
        "data": data,
    }
    if config.method_name == "fedrep":
        short["fedrep.body-epochs"] = 1
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        fedhet.run({"preset": preset} | short, out=f"{folder}/run", progress=False, observers=[clock])
    last = 1 if config.rounds == 1 else 2
    return (clock.ends[last] - clock.ends[last - 1]) / (samples * clients * epochs)


def measure(data: str) -> None:
    """Add to `costs.csv` what it lacks."""
    torch.set_num_threads(1)
    known = {(row["preset"], row["architectures"], row["dataset"]) for row in rows_of("costs.csv")}
    for number in rows_of("numbers.csv"):
        preset = number["preset"]
        if not preset or (kind := alike(preset, config := resolve(settings(number)))) in known:
            continue
        known.add(kind)
        with (HERE / "costs.csv").open("a", newline="", encoding="utf-8") as file:
            row = (*kind, f"{measured(preset, config, data):.2g}", date.today().isoformat())
            csv.writer(file, lineterminator="\n").writerow(row)
            print(*row)


def page() -> str:
    """The text of PAPERS.md."""
    numbers = rows_of("numbers.csv")
    costs = {(row["preset"], row["architectures"], row["dataset"]): row["seconds"] for row in rows_of("costs.csv")}
    results = {tuple(row[name] for name in NUMBER): row for row in rows_of("measured.csv")}
    runs = {(row["preset"], row["keys"]): settings(row) for row in numbers if row["preset"]}
    names = {run: f"R{index}" for index, run in enumerate(runs, 1)}
    text = [HEAD.format(count=len(numbers), runnable=sum(bool(row["preset"]) for row in numbers))]
    text += ["## Runs", ""]
    text += table(
        ("run", "preset", "keys on top of it", "core hours"),
        (
            (names[run], f"[{run[0]}]({run[0]}.toml)", code(run[1].split()), cost(run[0], resolve(chosen), costs))
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


def lines(
    group: Iterable[Mapping[str, str]],
    names: Mapping[tuple[str, str], str],
    results: Mapping[tuple[str, ...], Mapping[str, str]],
) -> Iterator[tuple[str, ...]]:
    """A table's numbers."""
    for row in group:
        spread = f" ± {row['std']}" if row["std"] else ""
        found = results.get(tuple(row[name] for name in NUMBER))
        here = f"{found['value']} (seeds {found['seeds']}, {found['date']}{found['note']})" if found else ""
        where = "; ".join(filter(None, (row["read"], row["note"])))
        run = names.get((row["preset"], row["keys"]), "none")
        yield row["dataset"], row["setting"], row["method"], row["metric"], row["value"] + spread, run, where, here


def cost(preset: str, config: Config, costs: Mapping[tuple[str, str, str], str]) -> str:
    """A run's cost in core hours, with two digits."""
    seconds = costs.get(alike(preset, config))
    if seconds is None:
        return "not measured"
    total = hours(config, float(seconds))
    digits = max(0, 1 - math.floor(math.log10(total)))
    return f"{round(total, digits):,.{digits}f}" if total < 100 else f"{round(total, -len(str(int(total))) + 2):,.0f}"


def code(words: Iterable[str]) -> str:
    """Words as code, one after the other."""
    return " ".join(f"`{word}`" for word in words)


def table(head: tuple[str, ...], body: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of a table in Markdown, and an empty one."""
    rows = (head, ("---",) * len(head), *body)
    return [*("| " + " | ".join(cells).replace("  ", " ") + " |" for cells in rows), ""]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", metavar="DATA", help="measure what costs.csv lacks, on the data in this folder")
    if data := parser.parse_args().measure:
        measure(data)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
