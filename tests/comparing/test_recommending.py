"""`fedhet recommend` with a made-up runner and clock: trials, budget, resuming, limits, verdict."""

import csv
import io
import json
import math
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "results"))

from synthetic_runs import write_run

from fedhet.comparing import recommending, runs
from fedhet.comparing.measures import CONTROLS
from fedhet.comparing.recommending import SEED, recommend
from fedhet.config import configuration
from fedhet.engines import running
from fedhet.errors import ConfigError, FedhetError
from fedhet.results.history import read_run
from fedhet.setup import client_setup

SETTINGS = {"preset": "fedhenn/digits", "clients": 2, "rounds": 3}
METHODS = ("fedhenn", "fedmd", "fedproto", "layer-average", "fedavg")
SECONDS = 10.0
"""Of a made-up run, of which two go on at once."""


class Recommendations:
    """A folder for runs, and a clock that only these runs move on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.printed = folder, 0.0, ""
        self.levels = {"fedhenn": 0.9, "fedmd": 0.7, "local": 0.6}
        self.sent = {"layer-average": 5000}
        self.steps: dict[str, int] = {}
        self.started: list[str] = []
        self.page: list[str] = []

    def run(self, settings, *, out, engine, resume=None):
        """In place of `fedhet.run`."""
        self.started.append(out.name)
        if settings["method"] == "fedproto":
            raise FedhetError("client 1: no head")
        level = self.levels.get(settings["method"], 0.5)
        names = ("clients", "rounds", "seed")
        write_run(out, settings=settings, level=level, **{name: settings[name] for name in names})
        summary = json.loads((out / "summary.json").read_text())
        summary |= {"seconds": SECONDS, "validation_accuracy": {"weighted": level}}
        summary["work"]["private_steps"] = self.steps.get(settings["method"], 120)
        (out / "summary.json").write_text(json.dumps(summary))
        sent = self.sent.get(settings["method"], 0)
        clients = (out / "clients.csv").read_text().replace(",321000,540000", f",{sent},0")
        (out / "clients.csv").write_text(clients)

    def run_jobs(self, jobs, at_once, deadline):
        for job in jobs:
            if self.now + SECONDS / at_once > deadline:
                return
            try:
                job.call()
                reason = None
            except FedhetError as error:
                reason = str(error)
            self.now += SECONDS / at_once
            yield job.name, reason

    def go(self, budget="1h", methods=METHODS, **options):
        console = Console(file=io.StringIO(), width=400)
        options |= {"out": self.folder, "jobs": 2, "console": console, "methods": methods, "budget": budget}
        self.started = []
        try:
            return recommend(SETTINGS, **options)
        finally:
            self.printed = console.file.getvalue()


@pytest.fixture(scope="module")
def found():
    """The answers of the methods, once for all tests."""
    return recommending.ask([*CONTROLS, *METHODS], dict(SETTINGS), recommending.UserFunctions(), allow=None)


@pytest.fixture
def made(tmp_path, monkeypatch, found):
    made = Recommendations(tmp_path / "which")
    clock = SimpleNamespace(monotonic=lambda: made.now)
    for module in (runs, recommending):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(runs, "run_jobs", made.run_jobs)
    monkeypatch.setattr(running, "run", made.run)
    monkeypatch.setattr(recommending, "ask", lambda names, *_, **__: tuple(map(dict, found)))
    monkeypatch.setattr(client_setup, "check", lambda *_, **__: None)
    monkeypatch.setattr("fedhet.comparing.save_figure", lambda figure, path: None)
    monkeypatch.setattr("fedhet.comparing.write_together", lambda *given: made.page.append(given[-1]))
    return made


def record(made):
    return json.loads((made.folder / "recommend.json").read_text())


def test_the_best_wins_after_one_try_each(made):
    done = made.go()
    assert (done.method, done.beats_alone) == ("fedhenn", True)
    assert done.verdict.startswith("fedhenn beats training alone: alone, the best is local")
    tries = Counter(name.partition(",")[0] for name in made.started if name.endswith(f"seed={SEED}"))
    assert {tries[name] for name in ("fedhenn", "fedmd", "layer-average")} == {1}
    assert tries["local"] == 2, "one of them of one round, to know how long runs take"
    compared = {path.parent.name.partition(",")[0] for path in (made.folder / "compared").glob("*/summary.json")}
    assert compared == {*CONTROLS, "fedhenn", "fedmd"}
    assert "not compared" not in done.verdict
    assert "client 1: no head" in record(made)["refused"]["fedproto"]
    file = configuration.read(made.folder / "recommended.toml")
    assert {"preset": "", **file} == done.settings
    config = configuration.resolve(configuration.settings_of(done.settings, {"model", "data"}))
    assert config == configuration.resolve(file)
    assert (config.method, config.clients, config.validation) == ("fedhenn", 2, 0.0)
    with (made.folder / "comparison.csv").open() as rows:
        assert {row["seed"] for row in csv.DictReader(rows) if row["method"] == "local"} >= set("01234")


def test_the_verdict_says_if_the_best_method_trains_longer(made):
    assert "gradient steps" not in made.go().verdict
    made.steps["fedhenn"], made.folder = 420, made.folder / "longer"
    assert made.go().verdict.endswith("fedhenn takes 3.5 times local's gradient steps on own examples.")


@pytest.mark.parametrize("budget", ["110s", "150s"])
def test_the_budget_is_kept(made, budget):
    done = made.go(budget)
    assert made.now <= recommending.parsed("budget", budget, {"s": 1, "m": 60}, "")
    compared = {each.variant: len(each.outcomes) for each in done.comparison.results}
    assert compared["local"] >= 3
    assert f"({recommending.LATE})" in made.printed
    names = done.verdict.partition("Training without exchange, too, but not compared (validation): ")[2]
    missing = [name for name in CONTROLS if name not in compared]
    assert [name.partition(" (0.")[0] for name in names.removesuffix(".").split(", ")] == missing


def test_no_federated_method_has_a_result(made, found):
    with pytest.MonkeyPatch.context() as patched:
        alone = {name: found[0][name] for name in CONTROLS}, {}
        patched.setattr(recommending, "ask", lambda *_, **__: alone)
        assert "so it is open whether one beats training alone: alone, the best is" in made.go().verdict


def test_a_reason_is_one_line():
    error = FedhetError("only client 0 was admitted; correct the others:\n  client 1: it has\n  client 2: it lacks")
    assert (
        recommending._line(error)
        == "only client 0 was admitted; correct the others: client 1: it has; client 2: it lacks"
    )


def test_a_budget_that_is_too_short(made):
    with pytest.raises(FedhetError, match=r"too short to compare methods: set --budget 5m"):
        made.go("5s")
    assert made.now <= 5
    assert made.started == [f"local,rounds=1,local-epochs=1,seed={SEED}"]


@pytest.mark.parametrize(
    ("budget", "fewer"),
    [pytest.param("130s", "2 rounds of 5 epochs", marks=pytest.mark.slow), ("80s", "2 rounds of 1 epoch")],
)
def test_a_short_budget_is_enough_for_fewer_rounds(made, monkeypatch, budget, fewer):
    long = [{"round": 1, "timing": {"seconds": SECONDS / 10}}]
    monkeypatch.setattr(recommending, "read_run", lambda folder: replace(read_run(folder), rows=long))
    with pytest.raises(FedhetError, match="or at least --budget 2m for only 2 rounds of 1 epoch"):
        made.go("20s")
    done = made.go(budget)
    assert f"the time budget allows {fewer} per run (configured: 3 rounds of 5 epochs)" in made.printed
    assert f"enough for {fewer} only: a larger one" in done.verdict
    assert done.verdict.endswith("recommended.toml has the rounds and epochs as configured.")
    config = configuration.resolve(done.settings)
    assert (config.rounds, config.local_epochs) == (3, 5)
    kept = set(made.started)
    made.go(budget)
    assert not kept & set(made.started) - {name for name in made.started if name.startswith("fedproto")}


@pytest.mark.long
def test_the_same_command_continues(made):
    made.go("5m")
    before = set(made.started)
    first = made.go("1h")
    assert made.started
    assert not before & set(made.started) - {name for name in made.started if name.startswith("fedproto")}
    again = made.go("1h")
    assert {name.partition(",")[0] for name in made.started} == {"fedproto"}, "which fails each time"
    assert again.settings == first.settings


def test_a_round_above_the_limit_is_a_reason(made):
    made.sent["fedhenn"] = 2_000_000
    done = made.go(max_bytes="1 MB")
    assert done.method == "fedmd"
    reason = "a round costs 2.00 MB, above max-bytes = 1.00 MB"
    assert done.refused["fedhenn"] == record(made)["refused"]["fedhenn"] == reason
    assert f"fedhenn ({reason})" in made.printed
    assert "layer-average" not in done.refused


def test_nothing_beats_training_alone(made):
    made.levels["local"] = 0.95
    done = made.go()
    assert (done.method, done.beats_alone) == ("local", False)
    assert done.verdict.startswith("Nothing clearly beats training alone here: alone, the best is local")
    assert made.page[0] == done.verdict
    assert configuration.read(made.folder / "recommended.toml")["method"] == "local"


def test_one_seed_gives_no_verdict(made):
    done = made.go(seeds=[0])
    assert not done.beats_alone
    assert done.verdict.startswith(
        "There is no verdict with fewer than 3 seeds (the same command goes on with further seeds): alone, "
    )


@pytest.mark.parametrize("budget", ["", "0", "-1m", "soon", "5 days", "1e3s", math.nan])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ConfigError, match=r"write a number above 0 and a unit \(s, m, h"):
        recommend(SETTINGS, budget=budget)


def test_sizes_have_units():
    assert recommending.parsed("max-bytes", "1.5 mb", recommending._BYTES, "") == 1_500_000
    assert recommending.parsed("max-bytes", 2000, recommending._BYTES, "") == 2000


@pytest.mark.slow
def test_jobs_end_at_the_deadline(tmp_path):
    jobs = [runs.Job(f"job {number}", Sleep(seconds), tmp_path / "log") for number, seconds in enumerate((0, 600, 0))]
    began = time.monotonic()
    assert list(runs.run_jobs(jobs, 1, began + 8)) == [("job 0", None)]
    assert time.monotonic() - began < 60


class Sleep:
    """A job."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self):
        time.sleep(self.seconds)


@pytest.mark.long
def test_five_networks_and_a_public_dataset(tmp_path):
    """With real training; a slow machine completes fewer runs in the budget."""
    settings = {"preset": "fedhenn/digits", "clients": 5, "samples-per-client": 30, "partition": "iid", "rounds": 2}
    console = Console(file=io.StringIO(), width=200)
    done = recommend(settings, methods=["fedhenn", "fedmd"], seeds=[0, 1, 2], out=tmp_path, console=console, budget=40)
    assert not done.beats_alone, "networks learn little in two rounds"
    assert done.method in CONTROLS
    assert any(verdict in console.file.getvalue() for verdict in ("Nothing", "There is no verdict"))
    config = configuration.resolve(configuration.read(tmp_path / "recommended.toml"))
    assert (config.method, config.clients, config.test_split) == (done.method, 5, "drawn")
    assert (tmp_path / "comparison.html").is_file()
