import io
import re
import shutil
import statistics
from pathlib import Path

import pytest
from rich.console import Console
from stand_in import ALL, SETTINGS
from torch import nn

from fedhet.comparing import Tuning, compare
from fedhet.config import configuration
from fedhet.errors import ConfigError, FedhetError


@pytest.mark.usefixtures("in_this_process")
def test_mean_and_spread_of_the_last_round(comparison):
    text = comparison.go()
    personal = [summary["personal_accuracy"]["weighted"] for summary in comparison.summaries("fedhenn", (0, 1))]
    assert f"{statistics.fmean(personal):.3f} ± {statistics.stdev(personal):.3f}" in text
    assert "fedavg *" in text
    assert "* needs equal architectures: every client got cnn." in text
    assert "5 models" in text
    assert (comparison.folder / "comparison.md").read_text().count("\n|") == 5

    rows = comparison.rows()
    assert [(row["method"], row["seed"]) for row in rows[:2]] == [("fedhenn", "0"), ("fedhenn", "1")]
    assert [float(row["personal_accuracy"]) for row in rows[:2]] == personal
    mean, spread = (next(r for r in rows if r["method"] == "fedhenn" and r["seed"] == kind) for kind in ("mean", "std"))
    assert float(mean["personal_accuracy"]) == pytest.approx(statistics.fmean(personal))
    assert float(spread["personal_accuracy"]) == pytest.approx(statistics.stdev(personal))
    assert mean["global_accuracy"] == ""
    assert {row["method"] for row in rows if row["equal_architectures"] == "True"} == {"fedavg"}


@pytest.mark.usefixtures("in_this_process")
def test_completed_runs_are_kept(comparison):
    comparison.order("fedavg-seed0", "refuse")
    comparison.go(seeds=(0,))
    table = (comparison.folder / "comparison.csv").read_bytes()
    comparison.calls()
    (comparison.folder / "fedhenn-seed0" / "summary.json").unlink()
    (comparison.folder / "fedavg-seed0.does").unlink()
    assert "1 of 6 runs were completed before" in comparison.go(seeds=(0, 1))
    started = [f"{name} started 1" for name in ("fedavg-seed0", *(f"{method}-seed1" for method in ALL))]
    assert comparison.calls() == sorted([*started, "fedhenn-seed0 resumed 1"])
    assert set(table.splitlines()[1:3]) <= set((comparison.folder / "comparison.csv").read_bytes().splitlines())

    comparison.go(seeds=(0, 1))
    assert comparison.calls() == []


def test_failed_runs_are_named(comparison):
    """In processes, which have one thread, a log each, and may die."""
    orders = {"fedhenn-seed0": "die", "fedavg-seed1": "refuse", "local-seed0": "stumble", "local-seed1": "fail"}
    for name, order in orders.items():
        comparison.order(name, order)
    comparison.go()
    assert comparison.calls() == sorted(f"{method}-seed{seed} started 1" for method in ALL for seed in (0, 1))
    message = comparison.done.failure
    assert message.startswith("4 of 6 runs failed; the same command tries them again:")
    assert comparison.done.failed.keys() == orders.keys()
    assert [len(result.outcomes) for result in comparison.done.results] == [1, 1, 0]
    assert "local-seed1: 3 of 10 clients replied, 5 are needed</pre>" in comparison.done._repr_html_()
    for page in ("comparison.md", "comparison.html"):
        assert "fedavg-seed1: client 3: its model has no head" in (comparison.folder / page).read_text()
    assert "fedhenn-seed0: the process 'fedhet run' ended with exit code 137" in message
    assert "fedavg-seed1: client 3: its model has no head" in message
    assert "local-seed0: ZeroDivisionError: no clients in round 4" in message
    assert "local-seed1: 3 of 10 clients replied, 5 are needed" in message
    logs = comparison.folder / "logs"
    assert "Traceback" in (logs / "local-seed0.log").read_text()
    assert "training fedavg-seed0" in (logs / "fedavg-seed0.log").read_text()
    assert (comparison.folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "1 of 2" in comparison.printed
    runs = [(row["method"], row["seed"]) for row in comparison.rows() if row["seed"].isdigit()]
    assert runs == [("fedhenn", "1"), ("fedavg", "0")]


@pytest.mark.usefixtures("in_this_process")
def test_all_runs_fail(comparison):
    for name in ("local-seed0", "local-seed1"):
        comparison.order(name, "refuse")
    why = "client 3: its model has no head"
    with pytest.raises(FedhetError, match=rf"2 of 2 runs failed.*\n  local-seed0, local-seed1: {why}"):
        comparison.go(methods=("local",), settings=SETTINGS)
    assert comparison.printed.count(why) == 1
    assert re.search(r"\[2/2\] local-seed(.): failed as local-seed(?!\1). did", comparison.printed)
    assert (comparison.folder / "comparison.csv").is_file()


@pytest.mark.usefixtures("in_this_process")
def test_runs_with_other_settings_stay(comparison):
    comparison.go(methods=("local",), seeds=(0,))
    before = {path: path.read_bytes() for path in (comparison.folder / "local-seed0").iterdir()}
    (comparison.folder / "fedavg-seed0").mkdir()
    (comparison.folder / "fedavg-seed0" / "thesis.tex").write_text("precious")
    comparison.calls()
    with pytest.raises(ConfigError) as caught:
        comparison.go(methods=("local", "fedavg", "fedhenn"), seeds=(0,), settings=SETTINGS | {"local-epochs": 5})
    assert "local-seed0: holds a run with other settings (" in str(caught.value)
    assert "local-epochs = 3 instead of 5" in str(caught.value)
    assert "fedavg-seed0: exists and is not a run directory" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
    assert comparison.calls() == []


@pytest.mark.usefixtures("in_this_process")
def test_a_comparison_with_other_settings_has_a_folder_of_its_own(comparison, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for epochs, name in ((3, "compare-local"), (5, "compare-local-2"), (3, "compare-local"), (5, "compare-local-2")):
        comparison.go(methods=("local",), seeds=(0,), settings=SETTINGS | {"local-epochs": epochs}, out=None)
        assert comparison.done.folder == Path("runs", name)
    with Path("runs/compare-local/local-seed0/config.toml").open("a") as file:
        file.write('[own]\ndata = "my_data"\n')
    comparison.go(methods=("local",), seeds=(0,), settings=SETTINGS | {"local-epochs": 3}, out=None)
    assert comparison.done.folder == Path("runs/compare-local-3")


@pytest.mark.usefixtures("in_this_process")
def test_data_may_move(comparison, stand_ins, tmp_path):
    settings = SETTINGS | {"dataset": "mnist", "partition": "iid", "public-samples": 8, "data": stand_ins}
    settings |= {"classes-per-client": ""}
    comparison.order("local-seed1", "fail")
    comparison.go(methods=("local",), settings=settings)
    (comparison.folder / "local-seed1.does").unlink()
    shutil.copytree(stand_ins, moved := tmp_path / "moved")
    assert "1 of 2 runs were completed" in comparison.go(methods=("local",), settings=settings | {"data": str(moved)})
    assert configuration.read(comparison.folder / "local-seed1" / "config.toml")["data"] == str(moved)


def unlike_networks(client):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8 + client.partition_id), nn.Linear(8 + client.partition_id, 10))


def test_the_plan_is_printed_before_the_first_tuning_run(tmp_path):
    console = Console(file=io.StringIO(), width=200, soft_wrap=True)
    settings = {"clients": 2, "rounds": 1, "public-samples": 0, "report": False, "architectures": "cnn"}
    tuning = Tuning({"learning-rate": [0.05, 0.1]}, seeds=(9,))
    compare(["local", "fedavg"], settings, seeds=[0], tuning=tuning, out=tmp_path / "a", jobs=2, console=console)
    printed = console.file.getvalue()
    assert "plan: 4 runs for tuning and 2 runs to report, 2 at a time: about" in printed
    assert printed.index("fedavg serves all 2 clients") < printed.index("plan: ") < printed.index("[1/4]")
    assert re.search(r"\[1/4\] .*: completed, about .* left", printed)


def test_an_interrupted_comparison_says_how_to_go_on(monkeypatch, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedhet.comparing.announce", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        compare(["local"], SETTINGS | {"fedhenn.eta0": ""}, seeds=[0], out=tmp_path / "stopped")
    assert caught.value.__notes__ == ["stopped; the same command continues where it was"]


def test_a_method_that_cannot_serve_is_named_before_any_run(tmp_path):
    settings = {"clients": 2, "rounds": 1}
    with pytest.raises(ConfigError, match="fedavg cannot train these clients: (.|\n)*leave it out"):
        compare(["local", "fedavg"], settings, seeds=[0], model=unlike_networks, out=tmp_path / "none")
    assert not [*tmp_path.rglob("config.toml")]
