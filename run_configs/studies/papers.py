"""Write the tables of `run_configs/PAPERS.md`.

    python run_configs/studies/papers.py

In the folder `papers`, `numbers.csv` has each number that the papers print, with its run and where it is found in the
run's files; `runs.csv` has the preset, keys and cost of each run, and `measured.csv` the results at the paper's scale.
"""

from collections.abc import Iterator
from pathlib import Path

from fedhet.config.configuration import run_configs
from fedhet.methods.registry import module_of
from fedhet.utils.files import write_text

comparisons = module_of(str(Path(__file__).resolve().parent / "comparisons.py"))

PAGE = run_configs() / "PAPERS.md"
FOLDER = Path(__file__).resolve().parent / "papers"
NUMBER = ("paper", "table", "dataset", "setting", "method", "metric")  # the columns that identify a number


def presets() -> Iterator[list[str]]:
    """Yield the rows of the table of presets: the numbers that their runs give, and what a run costs."""
    yield ["preset", "runs", "numbers", "core hours of a run"]
    runs, numbers = comparisons.read_csv(FOLDER / "runs.csv"), comparisons.read_csv(FOLDER / "numbers.csv")
    for preset in dict.fromkeys(run["preset"] for run in runs):
        mine = [run for run in runs if run["preset"] == preset]
        names = {run["run"] for run in mine}
        given = [f"{number['paper']}, {number['table']}" for number in numbers if number["run"] in names]
        tables = "; ".join(f"{table}: {given.count(table)}" for table in dict.fromkeys(given))
        hours = sorted(float(run["core_hours"]) for run in mine)
        span = f"{hours[0]:,g}" if hours[0] == hours[-1] else f"{hours[0]:,g} to {hours[-1]:,g}"
        yield [f"[{preset}]({preset}.toml)", str(len(mine)), tables, span]


def measured() -> Iterator[list[str]]:
    """Yield the rows of the table of results at the papers' own scale."""
    yield ["number", "run", "paper", "here", "difference", "seeds, with their curves"]
    numbers = {tuple(row[name] for name in NUMBER): row for row in comparisons.read_csv(FOLDER / "numbers.csv")}
    for row in comparisons.read_csv(FOLDER / "measured.csv"):
        number = numbers[tuple(row[name] for name in NUMBER)]
        title = f"{row['paper']}, {row['table']}: {row['method']}, {row['dataset']}, {row['setting']}"
        curves = " ".join(f"[{seed}](studies/papers/{row['curve'].format(seed)})" for seed in row["seeds"].split())
        difference = f"{float(row['value']) - float(number['value']):+.2f}"
        yield [title, number["run"], number["value"], row["value"], difference, curves]


def written(text: str) -> str:
    """Return the page with its tables written anew."""
    for name, rows in (("measured", measured()), ("presets", presets())):
        text = comparisons.replaced(text, name, comparisons.markdown(rows))
    return text


if __name__ == "__main__":
    write_text(PAGE, written(PAGE.read_text(encoding="utf-8")))
