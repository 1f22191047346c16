"""Comparisons of result pages (`run_configs/studies`): each can be run, and the pages have what their csv files say."""

from pathlib import Path
from types import ModuleType

import pytest

from fedhet.comparing.settings import shared_settings, variants_of
from fedhet.config.configuration import run_configs
from fedhet.methods.registry import module_of

STUDIES = run_configs() / "studies"
comparisons: ModuleType = module_of(str(STUDIES / "comparisons.py"))
grid: ModuleType = module_of(str(STUDIES / "grid.py"))
costs: ModuleType = module_of(str(STUDIES / "costs.py"))


@pytest.mark.parametrize("name", comparisons.PAGES)
def test_a_page_has_what_its_csv_files_say(name: str) -> None:
    page = comparisons.Page(name)
    text = page.file.read_text(encoding="utf-8")
    assert text == page.written(text), f"run python run_configs/studies/comparisons.py {name}"
    for comparison, declared in page.comparisons.items():
        run = {row["method"] for row in page.rows_of(comparison)}
        listed = {variant.name for variant in variants_of(declared.variants)}
        assert run in (set(), listed), f"results/{comparison}.csv is of another comparison"


def test_the_grid_and_its_costs_have_what_their_csv_files_say() -> None:
    made = grid.Grid()
    text = made.page.file.read_text(encoding="utf-8")
    assert text == made.written(text), "run python run_configs/studies/grid.py"
    rows = comparisons.read_csv(made.page.file.parent / "costs.csv")
    assert costs.table(rows) in text, "run python run_configs/studies/costs.py"


@pytest.mark.parametrize(
    ("page", "name"),
    [
        *(("fedma", "own"), ("fedharm", "no-labels"), ("fedhenn", "hundred-clients"), ("htfl", "mnist-two-classes")),
        *(("papers", "fedma-domains"), ("papers", "flha-4"), ("grid", "digits-30-dirichlet-mixed")),
        ("grid", "cifar10-200-iid-equal"),
    ],
)
def test_a_comparison_can_be_run(page: str, name: str) -> None:
    read = comparisons.Page(page)
    comparison = read.comparisons[name]
    variants = variants_of(read.variants(comparison))
    shared = shared_settings(variants, seeds=comparison.seeds, config=read.settings(comparison, Path()))
    for variant in variants:
        shared.settings(variant.name, comparison.seeds[0])
