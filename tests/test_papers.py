"""`run_configs/PAPERS.md`: each of the papers' numbers has a run that this tree can start, or a reason."""

import csv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedhet import config as configuration
from fedhet import models
from fedhet.config import resolve, run_configs
from fedhet.options import Config
from fedhet.registry import module_of
from tests.test_presets import one_round

FOLDER = run_configs() / "papers"
measure: ModuleType = module_of(str(FOLDER / "measure.py"))
page: ModuleType = measure.page
NUMBERS: list[dict[str, str]] = page.costs.rows_of("numbers.csv")
RUNS: dict[tuple[str, str], dict[str, Any]] = page.runs_of(NUMBERS)


def test_the_page_is_that_of_its_files() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python run_configs/papers/page.py"


def test_every_number_has_a_run_or_a_reason() -> None:
    assert len(NUMBERS) == 420
    assert sum(bool(row["preset"]) for row in NUMBERS) >= 360
    assert all(row["read"] if row["preset"] else row["note"] for row in NUMBERS)


def test_the_numbers_are_the_papers(reference: Path) -> None:
    with (reference / "paper_numbers.csv").open(newline="") as file:
        papers = list(csv.DictReader(file))
    assert [{key: row[key] for key in papers[0]} for row in NUMBERS] == papers


def test_what_looks_out_of_reach_has_the_weight_of_its_run() -> None:
    rows = [row for row in NUMBERS if "out of reach" in row["note"]]
    assert len(rows) == 5
    for row in rows:
        config = resolve(RUNS[row["preset"], row["keys"]])
        assert f"at most {config.parameters.eta(config.rounds):.3f} " in row["note"]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_can_be_set(run: tuple[str, str]) -> None:
    config = resolve(RUNS[run])
    assert config.remarks == (), "no key without effect"


def test_what_was_measured_is_among_the_numbers() -> None:
    known = {page.number_of(row) for row in NUMBERS}
    assert {page.number_of(row) for row in page.costs.rows_of("measured.csv")} <= known


TINY = "clients=2 local-epochs=1 samples-per-client=20"


@pytest.mark.parametrize(
    ("preset", "read", "keys"),
    [
        ("local/digits", "personal accuracy", f"rounds=2 {TINY}"),
        ("local/digits", "global accuracy", f"rounds=2 test-on=global {TINY} architectures=cnn-2-2"),
        ("ensemble/digits", "global accuracy", TINY),
        ("fedavg/digits", "global accuracy", f"rounds=2 test-on=both {TINY}"),
        ("fedavg/digits", "global model on the clients' test parts", f"rounds=2 {TINY}"),
    ],
)
def test_a_number_is_measured_with_its_curve_and_goes_on_where_it_stopped(
    preset: str, read: str, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = dict.fromkeys(NUMBERS[0], "") | {"value": "90", "read": read, "preset": preset, "keys": keys}
    files = {"numbers.csv": [number]}
    monkeypatch.setattr(measure, "HERE", tmp_path)
    monkeypatch.setattr(page.costs, "rows_of", lambda name: files.get(name, []))
    ends = []
    for seed in ("0", "1", "1"):
        monkeypatch.setattr("sys.argv", ["measure.py", "R1", "--data", ".", "--runs", str(tmp_path), "--seed", seed])
        measure.main()
        (row,) = csv.DictReader((tmp_path / "measured.csv").open())
        curve = list(csv.DictReader((tmp_path / row["curve"].format(seed)).open()))
        assert curve[-1]["round"] == "end"
        assert float(curve[-1][read]) == pytest.approx(float(curve[-2][read]), abs=1e-6), "the last evaluation"
        ends.append(float(curve[-1][read]))
    assert row["seeds"] == "0 1"
    assert ends[1] == ends[2], "it was complete"
    assert float(row["value"]) == pytest.approx(50 * (ends[0] + ends[1]), abs=0.006)
    files["measured.csv"] = [row]
    cells = next(page.lines([number], {}, {page.number_of(row): row}))
    assert cells[-1].startswith(f"{row['value']}, {float(row['value']) - 90:+.2f} (seeds and curves [0](papers/curves/")


def test_every_run_has_a_curve_of_its_own() -> None:
    names = [measure.curve_of(run) for run in RUNS]
    assert len(set(names)) == len(names)
    assert {name.count("/") for name in names} == {1}


def parts(config: Config) -> set[tuple[str, str]]:
    """The networks, the data set and the unseen clients of a run, each with its method."""
    unseen = ["unseen clients"] if config.unseen_clients else []
    return {(config.method_name, part) for part in (*models.expand(config.architectures), config.dataset, *unseen)}


def unlike() -> list[tuple[str, str]]:
    """The runs that have a network or a data set for their method which no preset and no run before has."""
    seen = set().union(*(parts(resolve({"preset": name})) for name in configuration.presets()))
    chosen = []
    for run, settings in RUNS.items():
        if not (new := parts(resolve(settings))) <= seen:
            chosen.append(run)
            seen |= new
    return chosen


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("run", unlike())
def test_a_run_with_a_network_or_data_of_its_own_runs_a_round(
    run: tuple[str, str], stand_ins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_round(RUNS[run], stand_ins, tmp_path, monkeypatch)
