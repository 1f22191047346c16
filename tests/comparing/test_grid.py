"""The grid of all methods (`run_configs/grid`): it goes on where it stopped, and its page says what its csv says."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stand_in
from rich.console import Console

from fedhet.comparing.runs import Execution
from fedhet.config import run_configs
from fedhet.errors import FedhetError
from fedhet.registry import module_of, own_methods

FOLDER = run_configs() / "grid"
grid: ModuleType = module_of(str(FOLDER / "grid.py"))
page: ModuleType = module_of(str(FOLDER / "page.py"))
costs: ModuleType = module_of(str(FOLDER / "costs.py"))

PLAN: dict[str, Any] = {
    "seeds": [0, 1],
    "tuning-seeds": [10],
    "tries": 2,
    "tune": {"learning-rate": [0.1, 0.2]},
    "all": {**stand_in.SETTINGS, "dataset": "digits"},
    "networks": {"mixed": {"architectures": stand_in.SETTINGS["architectures"]}, "equal": {"architectures": "cnn-2-2"}},
    "settings": {"five-classes": {"tuned": "digits"}},
}


def tiny(folder: Path) -> Any:
    """A grid of two methods, whose runs are written instead of trained."""
    execute = Execution(stand_in.run, 1, Console(file=io.StringIO()))
    tables = (
        grid.Table(folder / name, *of) for name, of in (("chosen.csv", (grid.CHOSEN, 3)), ("grid.csv", (grid.GRID, 4)))
    )
    methods = {"local": "local", "own": "own=fedavg"}
    return grid.Grid(PLAN, grid.cells(PLAN, None), methods, *tables, folder / "runs", execute)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.slow
def test_a_grid_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = tiny(tmp_path)
    whole = Execution.__call__

    def twice(self: Execution, runs: Sequence[Any]) -> dict[str, str]:
        if any(run.seed == 1 for run in runs):
            raise KeyboardInterrupt
        return whole(self, runs)

    monkeypatch.setattr(Execution, "__call__", twice)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    before = (tmp_path / "grid.csv").read_text()
    assert [(row["method"], row["seed"]) for row in rows(tmp_path / "grid.csv")] == [("local", "0")]

    monkeypatch.setattr(Execution, "__call__", whole)
    again = tiny(tmp_path)
    left, _ = again.left()
    assert left == (1 + 2) + 2 + 2 + 3 * 2, "local's second seed, three other cells, three tunings"
    assert replace(again, settings=("elsewhere",)).left() == (0, 0.0)
    assert replace(again, settings=tuple(again.plan["settings"])).left()[0] == left
    again.run()
    assert (tmp_path / "grid.csv").read_text().startswith(before), "what is there stays"
    found = [(row["networks"], row["method"], row["seed"], bool(row["reason"])) for row in rows(tmp_path / "grid.csv")]
    mixed = [("mixed", "local", "0", False), ("mixed", "local", "1", False), ("mixed", "own", "", True)]
    assert found == [*mixed, *(("equal", name, seed, False) for name in ("local", "own") for seed in "01")]
    assert "needs equal networks" in rows(tmp_path / "grid.csv")[2]["reason"]
    assert tiny(tmp_path).left() == (0, 0.0)
    chosen = {(row["networks"], row["method"]): row["choice"] for row in rows(tmp_path / "chosen.csv")}
    assert "0.2" in chosen["mixed", "local"]
    assert not chosen["mixed", "own"]


@pytest.mark.slow
def test_a_run_that_did_not_end_is_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path).run()
    (tmp_path / "grid.csv").unlink()
    whole, taken = Execution.__call__, "it is in use by another run"
    monkeypatch.setattr(Execution, "__call__", lambda self, runs: {run.name: taken for run in runs})
    for folder in (tmp_path / "runs").glob("*seed0"):
        (folder / "summary.json").unlink()
    with pytest.raises(FedhetError, match=taken):
        tiny(tmp_path).run()
    assert not (tmp_path / "grid.csv").exists()
    monkeypatch.setattr(Execution, "__call__", whole)
    tiny(tmp_path).run()
    assert tiny(tmp_path).left() == (0, 0.0)


def test_the_grid_has_every_method_and_is_not_tuned_on_reported_seeds() -> None:
    assert set(own_methods()) < set(page.METHODS)
    assert not {*page.PLAN["seeds"], *range(20, 25)} & {
        seed + more for seed in page.PLAN["tuning-seeds"] for more in range(3)
    }


def test_methods_train_alike_whatever_their_papers_do() -> None:
    cell = grid.cells(page.PLAN, None)[0]
    alike = set()
    for name, variant in grid.methods(page.PLAN).items():
        try:
            config = grid.shared(cell, variant, [0]).settings(name, 0)
        except FedhetError:  # it needs equal networks
            continue
        alike.add((config.fraction_train, config.weight_decay, config.lr_schedule, config.closing_epochs))
    assert alike == {(1.0, 0.0, "constant", 0)}


def test_a_control_with_labels_of_the_public_dataset_trains_as_long_in_settings_of_its_own() -> None:
    """Seven rounds of an epoch with 30 images, and in settings with more private steps more."""
    rounds = {}
    for cell in grid.cells(page.PLAN, None):
        variant = cell.variants.get("local-mixed", grid.methods(page.PLAN)["local-mixed"])
        rounds[cell.setting] = grid.shared(cell, variant, [0]).settings("local-mixed", 0).rounds
    assert rounds["digits-30-dirichlet"] == 7
    assert rounds["digits-72-iid"] == 12
    assert rounds["digits-30-dirichlet-50-rounds"] == 33


def test_the_page_says_what_the_csv_says() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.page(text, page.rows_of()), "run python run_configs/grid/page.py"
    assert text == costs.page(text, page.rows_of(costs.TABLE)), "run python run_configs/grid/costs.py --table"


def test_the_costs_of_every_method_are_known() -> None:
    rows = page.rows_of(costs.TABLE)
    assert set(own_methods()) <= {row["method"] for row in rows}
    found = {(row["method"], row["part"]): float(row["multiplications"]) for row in rows if not row["reason"]}
    for method in ("heterofl", "fedrolex"):  # a quarter, but for the input and the output
        assert 0.25 < found[method, "half"] / found[method, "whole"] < 0.35


def row(method: str, seed: object, accuracy: object, reason: str = "", steps: int = 1000) -> dict[str, str]:
    cell = {
        "setting": page.SETTINGS[0],
        "networks": "mixed",
        "method": method,
        "private_steps": str(steps),
        "steps": str(steps),
    }
    return cell | {"seed": str(seed), "personal_accuracy": str(accuracy), "reason": reason}


def test_a_row_with_other_steps_than_local_is_listed() -> None:
    text = page.generated([row("local", 0, 0.5), row("fd", 0, 0.5), row("fedmd", 0, 0.5, steps=1400)])
    assert f"all clients together: `fedmd` 1,400 instead of 1,000 ({page.SETTINGS[0]}).\n" in text


def test_methods_that_train_on_public_examples_too_have_their_steps_in_a_table() -> None:
    more = {**row("fedmd", 0, 0.5), "steps": "1400"}
    lines = list(page.more_steps(page.Results([row("local", 0, 0.5), row("fd", 0, 0.5), more])))
    assert [line for line in lines if line.startswith("| `")] == [
        "| `local` | four architectures | 1,000 |",
        "| `fedmd` | four architectures | 1,400 |",
    ]


def test_a_difference_is_to_the_best_control_seed_by_seed() -> None:
    levels = dict(zip(grid.CONTROLS, (0.5, 0.7, 0.6, 0.4), strict=True)) | {"fedhenn": 0.75}
    known = [row(name, seed, level + 0.01 * seed) for name, level in levels.items() for seed in page.PLAN["seeds"]]
    known += [
        row("fd", seed, 0.72 + 0.02 * (seed == 2)) for seed in page.PLAN["seeds"]
    ]  # above by less than its spread
    results = page.Results([*known, row("fedavg", "", "", "needs equal networks")])
    cell = page.SETTINGS[0], "mixed", "fedhenn"
    assert results.methods == [*grid.CONTROLS, "fd", "fedavg", "fedhenn"], "a method joins with its first row"
    assert results.line(*cell[:2]) == grid.CONTROLS[1]
    found = results.difference(cell)
    assert (found.mean, found.low, found.high) == pytest.approx((0.05, 0.05, 0.05))
    lines = "\n".join(page.table(results, "mixed"))
    assert "**+0.050 [+0.050, +0.050]**" in lines
    assert re.search(r"`fd` \|  \| \+0\.004 \[-", lines), "not clear of 0"
    assert "- `fedavg`: needs equal networks" in lines
    without = page.Results([each for each in known if (each["method"], each["seed"]) != ("local", "4")])
    assert without.difference(cell) is None, "a control is not complete"
    assert page.heat_map(known).axes


CHOOSER = {
    "any networks, and unlabelled": ("mixed", "unlabelled"),
    "any networks, and *labelled*": ("mixed", "labelled"),
    "any networks, no common": ("mixed", ""),
    "one network at all clients": ("equal", ""),
}
"""Rows of the README's table of methods, and what the grid has of them."""


def test_the_first_page_names_methods_that_the_grid_finds_level_with_the_best() -> None:
    text = (run_configs().parent / "README.md").read_text(encoding="utf-8")
    table = text.split("## Which method")[1].split("```mermaid")[0]
    results = page.Results(page.rows_of())
    for begins, (networks, needs) in CHOOSER.items():
        (row,) = (line for line in table.splitlines() if line.startswith(f"| {begins}"))
        named = {*re.findall(r"`([\w-]+)`", row.split("|")[2])}
        named |= {"local-mixed"} if "local.public = mixed" in row else set()
        taken = page.taken(results, networks, needs)
        assert not results.complete(networks) or named & {*taken}, f"{row}: the grid has {taken}"


def test_a_method_stands_beside_its_control_seed_by_seed() -> None:
    levels = {"fedharm": 0.9, "local-mixed": 0.8, "propagation": 0.9}
    known = [row(name, seed, level + 0.01 * seed) for name, level in levels.items() for seed in page.PLAN["seeds"]]
    lines = list(page.pairs(page.Results(known)))
    assert [line for line in lines if line.startswith("| `")] == [
        "| `fedharm` | `local-mixed`: the same images and labels, no federation | four architectures | "
        "**+0.100 [+0.100, +0.100]** |"
    ]


def test_of_many_differences_those_are_clear_that_are_after_correction() -> None:
    seeds, settings = page.PLAN["seeds"], page.SETTINGS[:7]
    known = [row("local-mixed", seed, 0.8) | {"setting": each} for each in settings for seed in seeds]
    steps = (0.00, 0.02, 0.04, 0.06, 0.03)  # p = .04
    gains = {settings[0]: (0.2, 0.21, 0.2, 0.19, 0.2), settings[1]: steps} | dict.fromkeys(
        settings[2:], (0.1, -0.1, 0.1, -0.1, 0.0)
    )
    known += [
        row("fedharm", seed, 0.8 + gain) | {"setting": each}
        for each, gained in gains.items()
        for seed, gain in zip(seeds, gained, strict=True)
    ]
    (line,) = (line for line in page.pairs(page.Results(known)) if line.startswith("| `"))
    cells = line.split(" | ")[3:]
    assert cells[0].startswith("**+0.200")
    assert re.match(r"\+0.030 \[\+0\.", cells[1]), "its own interval is above 0"


def test_whom_to_take_is_counted_by_settings() -> None:
    levels = dict.fromkeys(page.METHODS, 0.5)
    levels |= {"fd": 0.7, "fedproto": 0.8, "fedhenn": 0.9, "label-spreading": 0.85}
    noise = {"fedproto": 0.04}  # by seed, so that it is not clearly below fedhenn
    known = [
        row(name, seed, level + noise.get(name, 0.01) * seed)
        for name, level in levels.items()
        for seed in page.PLAN["seeds"]
    ]
    results = page.Results(known)
    assert (results.complete("mixed"), results.complete("equal")) == (page.SETTINGS[:1], [])
    assert page.taken(results, "mixed", "") == ["fedproto"]
    assert sorted(page.taken(results, "mixed", "unlabelled")) == ["fedhenn", "fedproto"]
    assert page.taken(results, "equal", "") == []
    assert page.beaten(results, "mixed", ["fedhenn"], "label-spreading") == 1
    assert page.beaten(results, "mixed", ["fd"], "label-spreading") == 0
    lines = "\n".join(page.for_whom(results))
    assert re.search(r"four architectures \| none \| 1 \| `fedproto` \| none \|", lines)
