"""The runs behind the papers' numbers (`run_configs/PAPERS.md`) can be started."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedhet.config import configuration
from fedhet.config.configuration import resolve, run_configs
from fedhet.config.toml import parse_settings
from fedhet.methods.options import Config
from fedhet.methods.registry import module_of
from tests.test_presets import one_round, parts

page: ModuleType = module_of(str(run_configs() / "studies" / "papers.py"))
read_csv = page.comparisons.read_csv
NUMBERS = read_csv(page.FOLDER / "numbers.csv")
RUNS: dict[str, dict[str, Any]] = {
    row["run"]: {"preset": row["preset"], **parse_settings(row["keys"].split())}
    for row in read_csv(page.FOLDER / "runs.csv")
}


def test_the_page_has_what_its_csv_files_say() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.written(text), "run python run_configs/studies/papers.py"


def test_every_number_has_a_run_or_a_reason() -> None:
    assert {row["run"] for row in NUMBERS} - {""} == {*RUNS}
    assert all(row["read"] if row["run"] else row["note"] for row in NUMBERS)


def test_the_numbers_are_the_papers(reference: Path) -> None:
    papers = read_csv(reference / "paper_numbers.csv")
    assert [{key: row[key] for key in papers[0]} for row in NUMBERS] == papers


def test_runs_have_no_keys_without_effect() -> None:
    assert {name: config.remarks for name, config in configurations().items() if config.remarks} == {}


def configurations() -> dict[str, Config]:
    """The configurations of all runs by name."""
    return {name: resolve(settings) for name, settings in RUNS.items()}


def unlike_presets() -> list[str]:
    """The runs with a network or data set that their method has in no preset and no run before."""
    seen = set().union(*(parts(resolve({"preset": name})) for name in configuration.presets()))
    chosen = []
    for run, config in configurations().items():
        if not (new := parts(config)) <= seen:
            chosen.append(run)
            seen |= new
    return chosen


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("run", unlike_presets())
def test_a_run_with_another_network_or_data_set_runs_a_round(
    run: str, stand_ins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_round(RUNS[run], stand_ins, tmp_path, monkeypatch)
