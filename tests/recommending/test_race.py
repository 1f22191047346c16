"""The race of `fedhet recommend`, with a made-up runner and clock: budget, halving, resuming, limits, verdict."""

import csv
import io
import json
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "results"))

from synthetic_runs import write_run

from fedhet import config as configuration
from fedhet import population, recommending, running
from fedhet.comparing import runs
from fedhet.errors import ConfigError, FedhetError
from fedhet.recommending import race, recommend
from fedhet.recommending.race import FINALISTS, SEEDS, TRIES, configurations
from fedhet.recommending.serving import Candidates
from fedhet.recommending.verdict import still_learning

SETTINGS = {"preset": "fedhenn/digits", "clients": 2, "rounds": 3}
ALONE = {"local", "label-spreading", "logistic-regression", "nearest-neighbour"}
METHODS = ("fedhenn", "fedmd", "fedproto", "layer-average", "fedavg")
SECONDS = 10.0
"""Of a made-up run, of which two go on at once."""


class Races:
    """A folder that races are run in, and a clock that only their runs move on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.printed = folder, 0.0, ""
        self.levels = {"fedhenn": 0.9, "fedmd": 0.7, "local": 0.6}
        self.sent = {"layer-average": 5000}
        self.started: list[str] = []
        self.page: list[str] = []

    def run(self, settings, *, out, engine, resume=None):
        """In place of `fedhet.run`."""
        self.started.append(out.name)
        level = self.levels.get(settings["method"], 0.5)
        names = ("clients", "rounds", "seed")
        write_run(out, settings=settings, level=level, **{name: settings[name] for name in names})
        summary = json.loads((out / "summary.json").read_text())
        off = abs(math.log(settings["learning-rate"] / 0.003)) if settings["optimizer"] == "adam" else 5
        summary |= {"seconds": SECONDS - race.OVERHEAD, "validation_accuracy": {"weighted": level - off / 1000}}
        (out / "summary.json").write_text(json.dumps(summary))
        sent = self.sent.get(settings["method"], 0)
        clients = (out / "clients.csv").read_text().replace(",321000,540000", f",{sent},0")
        (out / "clients.csv").write_text(clients)

    def run_jobs(self, jobs, at_once, deadline):
        for job in jobs:
            if self.now + SECONDS / at_once > deadline:
                return
            job.call()
            self.now += SECONDS / at_once
            yield job.name, None

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
    return recommending.ask(
        [*ALONE, *METHODS], dict(SETTINGS), recommending.Supplied(), seed=0, allow=None, labels=False
    )


@pytest.fixture
def races(tmp_path, monkeypatch, found):
    made = Races(tmp_path / "race")
    clock = SimpleNamespace(monotonic=lambda: made.now)
    for module in (runs, race, recommending):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(runs, "run_jobs", made.run_jobs)
    monkeypatch.setattr(running, "run", made.run)
    monkeypatch.setattr(recommending, "ask", lambda names, *_, **__: found)
    monkeypatch.setattr(population, "check", lambda *_, **__: None)
    monkeypatch.setattr("fedhet.comparing.save_png", lambda figure, path: None)
    monkeypatch.setattr("fedhet.comparing.write_together", lambda path, *_, notes, **__: made.page.extend(notes))
    return made


def record(races):
    return json.loads((races.folder / "recommend.json").read_text())


def test_the_best_wins_after_equal_tries_and_halving(races):
    done = races.go()
    assert (done.method, done.beats_alone) == ("fedhenn", True)
    assert "fedhenn wins with" in done.verdict
    first, *later = SEEDS
    tries = {seed: Counter() for seed in SEEDS}
    for name in races.started:
        if int(name.rpartition("=")[2]) in tries:
            tries[int(name.rpartition("=")[2])][name.partition(",")[0]] += 1
            if not tries[later[0]]:
                before_edges = dict(tries[first])
    networks = {"local", "fedhenn", "fedmd", "fedproto", "layer-average"}
    assert {before_edges[name] for name in networks} == {TRIES}
    assert [len(set(tries[seed]) - ALONE) for seed in later] == [FINALISTS] * 3
    assert all(tries[seed]["local"] == tries[seed]["fedhenn"] for seed in SEEDS[2:])
    assert all(tries[seed].keys() >= ALONE for seed in SEEDS), "those without exchange stay to the end"
    assert {"fedproto", "layer-average"} == set(record(races)["left"])
    assert record(races)["race"]["local"]["chosen"]["learning-rate"] == 0.003
    compared = {path.parent.name.partition(",")[0] for path in (races.folder / "compared").glob("*/summary.json")}
    assert compared == ALONE | {"fedhenn", "fedmd"}


def test_the_settings_to_go_on_with_are_those_that_won(races):
    done = races.go()
    file = configuration.read(races.folder / "recommended.toml")
    assert file == done.settings
    assert f"Go on with these settings ({races.folder / 'recommended.toml'}):" in races.printed
    config = configuration.resolve(file)
    assert (config.method, config.clients, config.validation) == ("fedhenn", 2, 0.0)
    assert config.flat().items() >= record(races)["race"]["fedhenn"]["chosen"].items()
    assert "fedhenn.eta0" in record(races)["race"]["fedhenn"]["chosen"]
    with (races.folder / "comparison.csv").open() as rows:
        assert {row["seed"] for row in csv.DictReader(rows) if row["method"] == "local"} >= set("01234")


@pytest.mark.parametrize("budget", ["150s", "5m"])
def test_the_budget_is_kept_and_what_had_no_time_is_told(races, budget):
    done = races.go(budget)
    assert races.now <= recommending.parsed("budget", budget, {"s": 1, "m": 60}, "")
    assert {each.variant for each in done.comparison.results} >= ALONE
    assert record(races)["notes"]
    told = races.printed
    if "of 5 seeds" in told:
        assert re.search(r"the same command goes on, and the others take about \d+", told)
    assert re.search(r"Each method tried at most \d of 6 configurations", told) or "of 4 seeds" in told


def test_methods_that_had_no_turn_are_named(races):
    races.go("50s")
    assert "fedproto, layer-average left the race: there was no time to try it within the budget" in races.printed


def test_what_runs_and_the_time_left_are_told(races):
    races.go()
    told = races.printed
    assert "configuration 1 of 6, seed 1000, 8 runs: local, " in told
    assert (
        "configuration 5 of 6, seed 1000, 5 runs: local, fedhenn, fedmd, fedproto, layer-average; 36 min 35 s" in told
    )
    assert re.search(r"race, seed 1001, 18 runs: .*fedhenn.*; 35 min 45 s left for the race\n", told)
    assert re.search(r"comparison on test parts, 5 seeds at most: local, fedhenn, .*; 51 min 15 s left\n", told)
    assert told.count(": completed\n") == 8, "one in half a minute"


def test_methods_that_are_still_learning_are_named():
    def result(variant, *accuracies):
        files = SimpleNamespace(curve=[*enumerate(accuracies)])
        run = SimpleNamespace(settings=SimpleNamespace(method_name=variant))
        return SimpleNamespace(variant=variant, outcomes=[SimpleNamespace(files=files, run=run)])

    few, many = result("fedhenn", 0.1, 0.2, 0.35), result("local", *(min(each / 20, 0.8) for each in range(30)))
    (line,) = still_learning([few, many, result("pfnm", 0.1, 0.8), result("nearest-neighbour", 0.9)])
    assert line == "Still learning in the last rounds: fedhenn (+0.150). Set rounds higher."
    assert not [*still_learning([many])]


def test_little_time_is_for_both_sides_of_the_comparison(races):
    done = races.go("130s", methods=["fedhenn"])
    compared = [each.variant for each in done.comparison.results if each.outcomes]
    assert {"local", "fedhenn"} <= {*compared}
    told = [line for line in races.printed.splitlines() if line.startswith("No time to compare")]
    assert len(compared) + len(told) == len(ALONE) + FINALISTS


def test_little_time_is_for_a_verdict_on_the_best(races):
    done = races.go("5m")
    assert "fedhenn wins with" in done.verdict, "three seeds, and so an interval"
    assert "No time to compare fedmd as well: a larger budget does." in races.printed
    races.go("1h")
    assert {path.name.partition(",")[0] for path in (races.folder / "compared").glob("fedmd*")}


def test_no_result_of_a_federated_method_is_no_verdict_on_it(races, found):
    alone = Candidates({name: found.settings[name] for name in ALONE}, ALONE, found.sends, found.refused)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recommending, "ask", lambda *_, **__: alone)
        assert "No federated method can serve these clients as they are" in races.go().verdict
    races.folder = races.folder.with_name("again")
    races.now = 0.0
    assert "No federated method came to a result" in races.go("40s").verdict


def test_a_budget_too_short_for_anything_says_so(races):
    with pytest.raises(FedhetError, match="give --budget more"):
        races.go("12s")
    assert races.now <= 12


def test_a_race_that_is_run_again_repeats_nothing(races):
    first = races.go()
    assert races.started
    again = races.go()
    assert races.started == []
    assert again.settings == first.settings


def test_a_longer_budget_goes_on_where_a_short_one_ended(races):
    races.go("5m")
    before = set(races.started)
    races.go("1h")
    assert races.started
    assert not before & set(races.started)


def test_a_round_above_the_limit_is_a_reason(races):
    races.sent["fedhenn"] = 2_000_000
    done = races.go(max_bytes="1 MB")
    assert done.method == "fedmd"
    reason = "a round costs a client 2.00 MB, above the limit of 1.00 MB (max-bytes)"
    assert done.refused["fedhenn"] == record(races)["left"]["fedhenn"] == reason
    assert f"fedhenn left the race: {reason}" in races.printed
    assert "layer-average" not in done.refused


def test_nothing_beats_training_alone(races):
    races.levels["local"] = 0.95
    done = races.go()
    assert (done.method, done.beats_alone) == ("local", False)
    assert done.verdict.startswith("Nothing beats training alone here: alone, the best is local")
    assert "With fedhenn, 2 of 2 clients have less than with local" in done.verdict
    assert races.page[0] in done.verdict, "the page begins with it"
    assert configuration.read(races.folder / "recommended.toml")["method"] == "local"


def test_where_no_network_is_best_the_best_network_is_told_too(races):
    races.levels["nearest-neighbour"] = 0.97
    done = races.go()
    assert done.method == "nearest-neighbour"
    assert "nearest-neighbour trains no network. Of the methods that do, fedhenn has most, " in done.verdict
    assert configuration.read(races.folder / "recommended_network.toml")["method"] == "fedhenn"


def test_one_seed_gives_no_verdict(races):
    done = races.go(seeds=[0])
    assert not done.beats_alone
    assert done.verdict.startswith("Too few seeds for an interval, so there is no verdict: alone, the best is")


def test_what_is_not_clear_is_not_said_to_win(races):
    races.levels["local"] = races.levels["fedhenn"]
    done = races.go()
    assert not done.beats_alone
    assert done.verdict.startswith("Nothing clearly beats training alone here")


def test_a_run_that_fails_is_no_tie_and_no_winner(races):
    made = races.run

    def run(settings, *, out, **more):
        if settings["method"] == "fedhenn":
            races.started.append(out.name)
            raise FedhetError("client 1: no head")
        made(settings, out=out, **more)

    races.run_jobs = lambda jobs, at_once, deadline: ((job.name, _outcome(job)) for job in jobs)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(running, "run", run)
        patched.setattr(runs, "run_jobs", races.run_jobs)
        done = races.go()
    assert done.method == "fedmd"
    assert "client 1: no head" in record(races)["left"]["fedhenn"]


def _outcome(job):
    try:
        job.call()
    except FedhetError as error:
        return str(error)
    return None


def test_own_settings_take_turns_with_optimisers_and_rates():
    tried = configurations([{"weight": 1}, {"weight": 2}], "sgd", 0.05)
    assert tried[0] == {"optimizer": "sgd", "learning-rate": 0.05, "weight": 1}
    assert len({json.dumps(each) for each in tried}) == TRIES
    both = {(each["optimizer"], each["weight"]) for each in tried}
    assert both == {("sgd", 1), ("sgd", 2), ("adam", 1), ("adam", 2)}
    assert {each["optimizer"] for each in configurations([{}], "adamw", 0.01)} == {"adamw", "sgd"}


@pytest.mark.parametrize("budget", ["", "0", "-1m", "soon", "5 days", "1e3s", math.nan])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ConfigError, match="write a number above 0 and one of s, m, h"):
        recommend(SETTINGS, budget=budget)


def test_sizes_have_units():
    assert recommending.parsed("max-bytes", "1.5 mb", recommending._BYTES, "") == 1_500_000
    assert recommending.parsed("max-bytes", 2000, recommending._BYTES, "") == 2000


@pytest.mark.slow
def test_jobs_end_at_the_deadline(tmp_path):
    """In processes, as they are."""
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
