"""Tuning before a comparison: what is tried, how it is chosen, and that test parts have no say."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from stand_in import SETTINGS

import fedhet
from fedhet.comparing import Tuning
from fedhet.comparing.tuning import Search, Trial, rows, validation_accuracies
from fedhet.config import configuration
from fedhet.data import Examples
from fedhet.errors import ConfigError
from fedhet.setup import client_setup
from fedhet.tasks import direction
from fedhet.utils.statistics import Metric

pytestmark = pytest.mark.usefixtures("in_this_process")
RATES = {"learning-rate": [0.1, 0.2, 0.4]}
GRID = RATES | {"fedhenn.eta0": [0.0, 0.1]}


def tried(comparison, method):
    """The rows of `tuning.csv` of a method."""
    with (comparison.folder / "tuning.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["method"] == method]


def rates(comparison, method):
    return [float(row["learning-rate"]) for row in tried(comparison, method)]


def chosen(comparison, method, key="learning-rate"):
    (row,) = (row for row in tried(comparison, method) if row["result"] == "chosen")
    return float(row[key])


def settings_of(folder):
    return configuration.read(folder / "config.toml")


def test_the_best_mean_is_chosen(comparison):
    text = comparison.go(seeds=(0,), tuning=Tuning(GRID, (1000, 1001), runs=6))
    assert (chosen(comparison, "fedhenn"), chosen(comparison, "fedhenn", "fedhenn.eta0")) == (0.1, 0.0)
    assert (chosen(comparison, "fedavg"), chosen(comparison, "local")) == (0.4, 0.2)
    assert "local: learning-rate = 0.2 (validation 0.899, 6 tried, 3 beyond its grid)" in text
    rows = tried(comparison, "local")
    assert len(rows) == 6
    assert float(rows[0]["seed 1000"]) > float(rows[0]["seed 1001"])


def test_reported_runs_use_whole_training_parts(comparison):
    comparison.go(methods=("fedavg", "local"), seeds=(0, 1), tuning=Tuning(RATES, (7,)))
    tuned = [settings_of(path.parent) for path in sorted((comparison.folder / "tuning").glob("*/config.toml"))]
    assert {each["validation"] for each in tuned} == {0.2}
    assert not {each["seed"] for each in tuned} & {0, 1}
    assert len([each for each in tuned if each["seed"] == 7]) == 3 + 3
    for seed in (0, 1):
        for method, rate in (("fedavg", 0.4), ("local", 0.2)):
            settings = settings_of(comparison.folder / f"{method}-seed{seed}")
            assert (settings["validation"], settings["learning-rate"]) == (0.0, rate)
    assert {row["seed"] for row in comparison.rows() if row["method"] == "fedavg"} >= {"0", "1"}
    assert "7" not in {row["seed"] for row in comparison.rows()}


def test_one_method_may_have_values_of_its_own(comparison):
    tuning = Tuning(RATES | {"local:learning-rate": [0.05, 0.8]}, (9,))
    comparison.go(methods=("fedavg", "local"), seeds=(0,), tuning=tuning)
    assert rates(comparison, "local")[:2] == [0.05, 0.8]
    assert rates(comparison, "fedavg")[:3] == [0.1, 0.2, 0.4]
    with pytest.raises(ConfigError, match="fedprox:learning-rate: fedprox is not among the compared methods"):
        comparison.go(methods=("local",), tuning=Tuning({"fedprox:learning-rate": [0.1]}, (9,)))


@pytest.mark.parametrize(("runs", "expected"), [(2, 2), (None, 6)])
def test_equal_numbers_of_configurations(comparison, runs, expected):
    text = comparison.go(methods=("fedhenn", "local"), seeds=(0,), tuning=Tuning(GRID, (9,), runs))
    assert f"configurations to try: {expected} for fedhenn, {expected} for local" in text
    assert len({json.dumps(row) for row in tried(comparison, "fedhenn")}) == expected
    if runs is None:  # halfway between, and beyond both ends
        assert rates(comparison, "local") == [0.1, 0.2, 0.4, 0.141, 0.283, 0.05]


def test_a_best_value_at_the_edge_is_told(comparison):
    tuning = Tuning({"learning-rate": [0.01, 0.2, 0.3]}, (9, 10))
    text = comparison.go(methods=("local", "fedavg"), seeds=(0,), tuning=tuning)
    assert "fedavg: learning-rate = 0.3 (validation 0.800, 3 tried of 3); learning-rate at the edge" in text
    assert "local: learning-rate = 0.2 (validation 0.900, 3 tried of 3)\n" in text


def test_a_value_of_its_own_that_was_not_tried_is_told(comparison):
    """The advice gives the method a grid with it."""
    grid = {"learning-rate": [0.1, 0.2]}
    settings = SETTINGS | {"preset": "local/digits"}
    text = comparison.go(("local", "flha-ghn"), (0,), settings, tuning=Tuning(grid, (9,)))
    usual = configuration.preset_settings("flha-ghn/digits")["learning-rate"]
    advice = f"its usual {usual} was not tried: set a grid of its own, flha-ghn:learning-rate"
    assert text.count("was not tried") == text.count(advice) > 0
    comparison.folder = comparison.folder / "again"
    own = Tuning(grid | {"flha-ghn:learning-rate": [usual, 0.1]}, (9,))
    assert "was not tried" not in comparison.go(("local", "flha-ghn"), (0,), settings, tuning=own)


def test_validation_on_the_common_labels(comparison):
    tuning = Tuning({"learning-rate": [0.1, 0.2, 0.3]}, (9, 10))
    comparison.go(("local",), (0,), SETTINGS | {"test-on": "global"}, tuning=tuning)
    tuned = [settings_of(path.parent) for path in (comparison.folder / "tuning").glob("*/config.toml")]
    assert {each["validation-on"] for each in tuned} == {"common"}
    assert settings_of(comparison.folder / "local-seed0")["validation"] == 0
    comparison.folder = comparison.folder / "again"
    comparison.go(("local",), (0,), tuning=tuning)
    tuned = [settings_of(path.parent) for path in (comparison.folder / "tuning").glob("*/config.toml")]
    assert {each["validation-on"] for each in tuned} == {"own"}


def test_failed_configurations_are_not_chosen(comparison):
    comparison.order("tuning/local,learning-rate=0.2,seed=10", "refuse")
    comparison.go(methods=("local",), seeds=(0,), tuning=Tuning(RATES, (9, 10)))
    assert chosen(comparison, "local") == 0.1
    failed = tried(comparison, "local")[1]
    assert (failed["learning-rate"], failed["validation_accuracy"]) == ("0.2", "")
    assert failed["result"] == "client 3: its model has no head"


def test_diverged_clients_count_as_0(comparison):
    """One of six clients is left, with an accuracy of 1, where the others diverged."""
    comparison.order("tuning/local,learning-rate=0.1,seed=9", "diverge")
    comparison.go(methods=("local",), seeds=(0,), tuning=Tuning(RATES, (9,)))
    assert float(tried(comparison, "local")[0]["validation_accuracy"]) == pytest.approx(1 / 14)
    assert chosen(comparison, "local") == 0.2


def test_a_method_without_a_completed_configuration(comparison):
    for rate in RATES["learning-rate"]:
        comparison.order(f"tuning/local,learning-rate={rate},seed=9", "refuse")
    comparison.go(methods=("local", "fedavg"), seeds=(0,), tuning=Tuning(RATES, (9,)))
    reason = "no configuration of local completed with all tuning seeds: client 3: its model has no head"
    assert comparison.done.failed == {"local-seed0": reason}
    assert not (comparison.folder / "local-seed0").exists()
    assert (comparison.folder / "fedavg-seed0" / "summary.json").is_file()


def test_a_method_without_a_score_names_no_metric():
    scored = Search("local", 1, [Trial({"momentum": 0.5}, {9: 0.2})], {}, "rmse")
    failed = Search("fedavg", 1, [Trial({"momentum": 0.5}, failed={9: "it diverged"})], {})
    assert next(rows([scored, failed])) == ["method", "momentum", "seed 9", "validation_rmse", "result"]
    assert next(rows([failed]))[-2] == "validation_accuracy"


@pytest.mark.parametrize(
    ("tuning", "settings", "message"),
    [
        (Tuning(RATES, (1, 0)), {}, r"seeds \[0\] are used for tuning and reported"),
        (Tuning({"fedproto.weight": [1.0]}), {}, "fedproto is not among the methods compared"),
        (Tuning({"clients": [3, 4]}), {}, "clients is equal for all methods"),
        (Tuning({"learning-rate": [-1]}), {}, "learning-rate = -1"),
        (Tuning({"learnin-rate": [1.0]}), {}, "did you mean"),
        (Tuning(RATES, ()), {}, "at least one seed"),
        (Tuning({"momentum": [0.0, 0.9]}), {"optimizer": "adam"}, "momentum has no effect with optimizer = adam"),
        (Tuning({"momentum": [0.9]}), {"optimizer": "adam"}, "momentum has no effect with optimizer = adam"),
    ],
)
def test_invalid_tuning_is_refused(comparison, tuning, settings, message):
    with pytest.raises(ConfigError, match=message):
        comparison.go(methods=("local",), seeds=(0,), settings=SETTINGS | settings, tuning=tuning)
    assert not comparison.folder.exists()


@pytest.mark.slow
def test_test_labels_do_not_matter(comparison, monkeypatch):
    settings = {"architectures": "mlp", "clients": 2, "rounds": 5, "samples-per-client": 40, "batch-size": 4}
    folder, right = comparison.folder, client_setup.data_of

    def wrong(client):
        data = right(client)
        return replace(data, test=Examples(data.test.inputs, (data.test.labels + 1) % 10))

    records, accuracies = [], []
    for data_of in (right, wrong):
        monkeypatch.setattr(client_setup, "data_of", data_of)
        comparison.folder = folder / data_of.__name__
        tuning = Tuning({"learning-rate": [0.01, 0.1]}, (5,))
        comparison.go(("local", "fedavg", "fedproto"), (0,), settings, fedhet.run, tuning=tuning)
        records.append([tried(comparison, method) for method in ("local", "fedavg", "fedproto")])
        accuracies.append([float(row["personal_accuracy"]) for row in comparison.rows() if row["seed"] == "0"])
    assert records[0] == records[1]
    assert all(right > wrong for right, wrong in zip(*accuracies, strict=True))


def test_a_key_without_effect_on_one_method(comparison):
    tuning = Tuning(RATES | {"momentum": [0.5, 0.9]}, (9,))
    text = comparison.go(methods=("local", "adam=fedavg,optimizer=adam"), seeds=(0,), tuning=tuning)
    assert "chosen for adam: learning-rate = 0.4 (" in text
    assert "; momentum has no effect with optimizer = adam" in text
    assert {row["momentum"] for row in tried(comparison, "local")} == {"0.5", "0.9"}


def test_fixed_keys_are_not_tuned(comparison):
    variants = ("fedavg", "slow=fedavg,learning-rate=0.05", "local")
    comparison.go(methods=variants, seeds=(0,), tuning=Tuning(RATES, (9,)), baseline="slow")
    assert (chosen(comparison, "fedavg"), chosen(comparison, "local")) == (0.4, 0.2)
    assert settings_of(comparison.folder / "slow-seed0")["learning-rate"] == 0.05
    assert [row["method"] for row in comparison.rows() if row["seed"] == "0"] == ["fedavg", "slow", "local"]


def test_a_setting_that_loses_a_client_does_not_win_by_it(comparison):
    """At 0.3, client 5 fails, on which the accuracy is lowest, so that the mean over the others is highest."""
    comparison.order("tuning/local,learning-rate=0.3,seed=9", "lose")
    comparison.go(methods=("local",), seeds=(0,), tuning=Tuning({"learning-rate": [0.1, 0.2, 0.3]}, (9,)))
    assert float(tried(comparison, "local")[2]["validation_accuracy"]) == pytest.approx(0.95 * 5 / 14)
    assert chosen(comparison, "local") == 0.2


@pytest.mark.parametrize(("metric", "scores"), [("r2", (-3.0, -2.0)), ("rmse", (5.0, 4.0)), ("auc", (0.3, 0.2))])
def test_a_lost_client_counts_as_the_worst_value(metric, scores):
    """The second run lost the client with the worse score: R2 = 0 in its place were better than those of the first."""

    def run(values):
        clients = {name: Metric((value,), (10.0,)) for name, value in values.items()}
        total = Metric.total(clients.values()).value
        return SimpleNamespace(metric=metric, scored="trained", by_client=lambda *_: clients, accuracy=lambda _: total)

    both, lacking = dict(zip("01", scores, strict=True)), {"1": scores[1]}
    first, second = validation_accuracies({"first": run(both), "second": run(lacking)}).values()
    assert direction(metric) * first > direction(metric) * second
