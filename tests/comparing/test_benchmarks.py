"""Other libraries' benchmarks (`run_configs/htfl`): a table is made by one command, and says what its csv files say."""

import csv
from pathlib import Path
from types import ModuleType

import pytest

from fedhet.config import run_configs
from fedhet.registry import module_of

tables: ModuleType = module_of(str(run_configs() / "htfl" / "tables.py"))


def test_the_page_says_what_the_csv_files_say() -> None:
    text = tables.PAGE.read_text(encoding="utf-8")
    assert text == tables.page(text), "run python run_configs/htfl/tables.py"
    for name in tables.BENCHMARKS:
        assert tables.BEGIN.format(name) in text
        assert f"tables.py {name} --data" in text


@pytest.mark.slow
def test_a_command_makes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"rounds": 2, "clients": 8, "local-epochs": 1, "samples-per-client": 20}
    tiny = tables.Benchmark("local/digits.toml", keys, ("local", "mu=fedprox", "label-spreading"), "local", "costs")
    page = tmp_path / "README.md"
    page.write_text("before\n" + tables.BEGIN.format("tiny") + tables.END.format("tiny") + "after\n")
    for name, value in {"BENCHMARKS": {"tiny": tiny}, "RESULTS": tmp_path, "PAGE": page, "SEEDS": (0, 1, 2)}.items():
        monkeypatch.setattr(tables, name, value)
    tables.run("tiny", tmp_path, tmp_path / "runs")
    text = tables.page(page.read_text())
    before, *lines, after = text.splitlines()
    assert (before, after) == ("before", "after")
    cells = [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    rows = {name: values for name, *values in cells}
    assert [*rows][2:] == ["local", "mu", "label-spreading"]
    headings = rows["method"]
    with (tmp_path / "tiny_rounds.csv").open() as file:
        best = [float(row["accuracy"]) for row in csv.DictReader(file) if row["method"] == "mu"]
    assert len(best) == 3
    found = dict(zip(headings, rows["mu"], strict=True))
    assert found["best test round\\*"] == f"{sum(best) / 3:.3f}"
    assert float(found["last round"].split()[0]) <= float(found["best test round\\*"])
    assert found["minus local"].startswith(("+", "-"))
    assert found["up"] == found["down"] != "0 B"
    assert rows["local"][headings.index("up")] == "0 B"
    assert tables.page(text) == text
