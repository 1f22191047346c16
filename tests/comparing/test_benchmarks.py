"""Comparisons on pages (`run_configs/tables.py`): a table is made by one command, and says what its csv files say."""

import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fedhet.comparing import Tuning
from fedhet.config import run_configs
from fedhet.registry import module_of

tables: ModuleType = module_of(str(run_configs() / "tables.py"))
SCRIPTS = ("fedharm/tables.py", "fedhenn/tables.py", "fedma/tables.py", "htfl/tables.py", "papers/scaled.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_says_what_the_csv_files_say(script: str) -> None:
    pages = module_of(str(run_configs() / script)).TABLES
    text = pages.page.read_text(encoding="utf-8")
    assert text == pages.written(text), f"run python run_configs/{script}"
    summarised = {name for summary in pages.summaries.values() for name in summary.rows}
    for name in pages.benchmarks:
        assert name in summarised or tables.BEGIN.format(name) in text
        assert f"{Path(script).name} {name} --data" in text
        assert pages.benchmarks[name].rates_of in ("", *pages.benchmarks)
        run = {row["method"] for row in pages.rows_of(name)}
        listed = {variant.name for variant in tables.variants_of(pages.benchmarks[name].variants)}
        assert run in (set(), listed), f"results/{name}.csv is of another comparison"


@pytest.mark.slow
def test_a_command_makes_a_table(tmp_path: Path) -> None:
    keys = {"rounds": 2, "clients": 8, "local-epochs": 1, "samples-per-client": 20}
    tiny = tables.Benchmark(
        "local/digits.toml",
        keys,
        ("local", "mu=fedprox", "label-spreading"),
        "local",
        seeds=(0, 1, 2),
        costs="costs",
    )
    pages = tables.Tables(tmp_path, {"tiny": tiny})
    pages.page.write_text("before\n" + tables.BEGIN.format("tiny") + tables.END.format("tiny") + "after\n")
    assert "Not run so far." in pages.written(pages.page.read_text())
    pages.run("tiny", tmp_path, tmp_path / "runs")
    text = pages.written(pages.page.read_text())
    before, *lines, after = text.splitlines()
    assert (before, after) == ("before", "after")
    rows = cells(lines)
    assert [*rows][2:] == ["local", "mu", "label-spreading"]
    headings = rows["method"]
    found = dict(zip(headings, rows["mu"], strict=True))
    assert found["minus local"].startswith(("+", "-"))
    assert found["up"] == found["down"] != "0 B"
    pairs = [("label-spreading", "local"), ("label-spreading", "mu"), ("mu", "other")]
    summary = pages.summary(tables.Summary({"tiny": "a row"}, ("mu",), pairs))
    cell, gain, other, none = cells(summary.splitlines())["a row"]
    assert cell == found["last round"]
    assert gain.strip("*") == rows["label-spreading"][headings.index("minus local")]
    assert other not in ("", gain)
    assert none == "", "a variant that the benchmark does not have"
    assert rows["local"][headings.index("up")] == "0 B"
    assert pages.written(text) == text


@pytest.mark.slow
def test_a_table_has_the_rates_that_another_one_chose_and_what_a_paper_prints(tmp_path: Path) -> None:
    keys = {"rounds": 1, "clients": 8, "local-epochs": 1, "samples-per-client": 20, "evaluate-every": 1}
    same = {
        "preset": "local/digits.toml",
        "variants": ("local", "mu=fedprox,fedprox.mu=0.5"),
        "baseline": "local",
        "seeds": (0, 1, 2),
        "scores": {"personal_accuracy": "personal", "global_accuracy": "global"},
        "printed": {"mu": "53.8"},
    }
    tuning = Tuning({"learning-rate": (0.01, 0.1)}, (10,))
    first, then = tables.Benchmark(keys=keys, tuning=tuning, **same), {**keys, "partition": "dirichlet"}
    pages = tables.Tables(tmp_path, {"first": first, "then": tables.Benchmark(keys=then, rates_of="first", **same)})
    with pytest.raises(FileNotFoundError, match="run first first"):
        pages.run("then", tmp_path, tmp_path / "then")
    pages.run("first", tmp_path, tmp_path / "first")
    chosen = {row["method"]: row["learning-rate"] for row in pages.rows_of("first_tuning") if row["result"] == "chosen"}
    pages.run("then", tmp_path, tmp_path / "then")
    for method, rate in chosen.items():
        settings = tomllib.loads((tmp_path / "then" / f"{method}-seed0" / "config.toml").read_text())
        assert settings["learning-rate"] == float(rate)
    rows = cells(pages.table("then").splitlines())
    found = dict(zip(rows["method"], rows["mu"], strict=True))
    assert found["in the paper"] == "53.8"
    assert " ± " in found["global"]
    assert dict(zip(rows["method"], rows["local"], strict=True))["global"] == ""


@pytest.mark.slow
def test_a_table_of_unseen_clients_has_the_start_from_scratch_of_another_variant(tmp_path: Path) -> None:
    keys = {"rounds": 1, "clients": 3, "samples-per-client": 20, "unseen-clients": 1, "unseen-epochs": 2}
    names = "architectures=flha-small-0"
    tiny = tables.Benchmark(
        "flha-ghn/digits.toml",
        {**keys, "evaluate-every": 1},
        (f"one=flha-ghn,{names}", f"one{tables.SCRATCH}=local,learning-rate=0.02,{names}"),
        "one",
        seeds=(0, 1, 2),
        unseen=True,
        printed={"one": "0.8; from scratch 0.7"},
    )
    pages = tables.Tables(tmp_path, {"tiny": tiny})
    pages.run("tiny", tmp_path, tmp_path / "runs")
    rows = cells(pages.table("tiny").splitlines())
    assert [*rows][2:] == ["one"]
    ends: dict[tuple[str, str], list[float]] = {}
    for row in pages.rows_of("tiny_unseen"):
        if row["epoch"] == "2":
            ends.setdefault((row["method"], row["start"]), []).append(float(row["accuracy"]))
    received, scratch = ends["one", "received"], ends["one-scratch", "scratch"]
    assert scratch != ends["one", "scratch"], "at the rate of the other variant"
    expected = [sum(received) / 3, sum(scratch) / 3, (sum(received) - sum(scratch)) / 3]
    found = [float(rows["one"][place].split()[0]) for place in (1, 2, 3)]
    assert found == pytest.approx(expected, abs=6e-4)
    assert rows["one"][4] == "0.8; from scratch 0.7"


def cells(lines: list[str]) -> dict[str, list[str]]:
    """The cells of a table's lines by the first one, without back quotes."""
    split = [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return {name: values for name, *values in split}


def test_clients_of_disjoint_labels_share_neither_labels_nor_images() -> None:
    disjoint = module_of(str(run_configs() / "fedhenn" / "disjoint.py"))
    clients = [SimpleNamespace(partition_id=client, config=SimpleNamespace(seed=3)) for client in range(20)]
    parts = [disjoint.data(client) for client in clients]
    public = {bytes(row.numpy()) for row in parts[0]["public"]}
    seen: set[bytes] = set()
    for client, part in zip(clients, parts, strict=True):
        assert torch.equal(part["public"], parts[0]["public"])
        labels = disjoint.LABELS[client.partition_id % 3]
        assert set(part["train"][1].tolist()) | set(part["test"][1].tolist()) == set(range(len(labels)))
        train, test = ({bytes(row.numpy()) for row in part[name][0]} for name in ("train", "test"))
        assert len(train) == len(part["train"][0]) == disjoint.EXAMPLES
        assert not train & (test | public | seen)
        seen |= train
        assert disjoint.model(client)(part["train"][0]).shape == (disjoint.EXAMPLES, len(labels))
    benchmark = module_of(str(run_configs() / "fedhenn" / "tables.py")).TABLES.benchmarks["disjoint"]
    assert benchmark.keys["test-split"] == "given", "the parts are drawn by the data function"
