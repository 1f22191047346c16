"""Comparisons of result pages (`run_configs/studies`): each can be run, and the pages have what their csv files say."""

import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


@pytest.mark.slow
def test_a_comparison_is_kept_and_tabulated(tmp_path: Path) -> None:
    keys = {"rounds": 1, "clients": 8, "local-epochs": 1, "samples-per-client": 20, "evaluate-every": 1}
    same = {
        "preset": "local/digits",
        "variants": ("local", "mu=fedprox,fedprox.mu=0.5"),
        "seeds": (0, 1, 2),
        "scores": {"personal_accuracy": "personal", "global_accuracy": "global"},
        "printed": {"mu": "53.8"},
    }
    first = comparisons.Comparison(set=keys, tune={"learning-rate": (0.01, 0.1)}, tune_seeds=(10,), **same)
    then = comparisons.Comparison(
        set={**keys, "partition": "dirichlet", "classes-per-client": ""}, settings_of="first", **same
    )
    page = comparisons.Page("fedma")
    page.comparisons, page.results = {"first": first, "then": then}, tmp_path / "results"
    with pytest.raises(FileNotFoundError, match="run first first"):
        page.run("then", tmp_path, tmp_path / "then")
    for name in ("first", "then"):
        page.run(name, tmp_path, tmp_path / name)
    chosen = {row["method"]: row["learning-rate"] for row in page.rows_of("first_tuning") if row["result"] == "chosen"}
    for method, rate in chosen.items():
        settings = tomllib.loads((tmp_path / "then" / f"{method}-seed0" / "config.toml").read_text())
        assert settings["learning-rate"] == float(rate)
    rows = cells(page.table("then"))
    found = dict(zip(rows["method"], rows["mu"], strict=True))
    assert found["in the paper"] == "53.8"
    assert found["minus local"].strip("*").startswith(("+", "-"))
    assert " ± " in found["global"]
    assert dict(zip(rows["method"], rows["local"], strict=True))["global"] == ""


def cells(table: str) -> dict[str, list[str]]:
    """The cells of a table's lines by the first one, without back quotes."""
    split = [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {name: values for name, *values in split}


def test_clients_with_disjoint_labels() -> None:
    disjoint = module_of(str(STUDIES / "disjoint.py"))
    clients = [SimpleNamespace(partition_id=client, config=SimpleNamespace(seed=3)) for client in range(20)]
    seen: set[bytes] = set()
    for client in clients:
        part = disjoint.data(client)
        labels = disjoint.LABELS[client.partition_id % 3]
        assert set(part["train"][1].tolist()) | set(part["test"][1].tolist()) == set(range(len(labels)))
        train, test = ({bytes(row.numpy()) for row in part[name][0]} for name in ("train", "test"))
        assert not train & (test | {bytes(row.numpy()) for row in part["public"]} | seen)
        seen |= train
        assert disjoint.model(client)(part["train"][0]).shape == (disjoint.EXAMPLES, len(labels))
