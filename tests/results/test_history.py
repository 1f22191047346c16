import json
import logging
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_runs import history_row as row

from fedhet.errors import FedhetError
from fedhet.results.history import final_clients, learning_curve, read_clients, read_history, read_run
from fedhet.results.report import write_report
from fedhet.server.reporter import statistics
from fedhet.utils.statistics import STATISTICS, Metric, client_order, summarise


def accuracy_of(value, examples):
    """The accuracy of one client."""
    return Metric((value,), (float(examples),))


def test_summarise_agrees_with_numpy():
    rng = np.random.default_rng(0)
    metric, loss, examples = rng.random(7), rng.random(7) * 3, rng.integers(1, 90, 7)
    result = summarise({str(i): (accuracy_of(metric[i], examples[i]), loss[i], int(examples[i])) for i in range(7)})
    assert result["clients"] == 7
    for name, values in (("accuracy", metric), ("loss", loss)):
        expected = {
            "weighted": np.average(values, weights=examples),
            "mean": values.mean(),
            "std": values.std(),
            "min": values.min(),
            "max": values.max(),
        }
        assert result[name] == pytest.approx(expected, rel=1e-14)


EVALUATED = st.tuples(st.floats(0, 1), st.floats(0, 1e6), st.integers(1, 10**6)).map(
    lambda drawn: (accuracy_of(drawn[0], drawn[2]), drawn[1], drawn[2])
)


@given(st.dictionaries(st.text(), EVALUATED, min_size=1), st.randoms(use_true_random=False))
def test_statistics_do_not_depend_on_order(values, shuffler: random.Random):
    shuffled = list(values.items())
    shuffler.shuffle(shuffled)
    result = summarise(values)
    assert result == summarise(dict(shuffled))
    slack = 1e-9
    for block in (result["accuracy"], result["loss"]):
        for name in ("weighted", "mean"):
            assert block["min"] * (1 - slack) - slack <= block[name] <= block["max"] * (1 + slack) + slack


def test_undefined_metrics_and_diverged_losses():
    result = summarise(
        {
            "a": (Metric((math.nan,), (0.0,)), 0.5, 10),
            "b": (accuracy_of(0.7, 30), math.inf, 30),
            "c": (accuracy_of(0.2, 0), 0.1, 0),
        }
    )
    assert result["accuracy"]["weighted"] == result["accuracy"]["max"] == 0.7
    assert result["loss"] == dict.fromkeys(STATISTICS)
    assert result["clients"] == 2
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert summarise({}) is None
    assert summarise({"a": (accuracy_of(0.5, 0), 0.5, 0)}) is None
    undefined = summarise({"a": (Metric((math.nan,), (0.0,)), 0.5, 10)})
    assert undefined["accuracy"] == dict.fromkeys(STATISTICS)
    assert undefined["loss"]["weighted"] == 0.5


def test_rounds_of_learning_curves():
    rows = [
        {"round": 0, "bytes_up": 1},
        row(1, received=0.1, trained=0.4),
        row(2),
        row(3, received=0.5, trained=0.6),
        row(4, received=0.55, trained=0.7, final=True),
    ]
    assert learning_curve(rows, "received") == [(0, 0.1), (2, 0.5), (3, 0.55)]
    # The closing evaluation replaces the one made in the last training round.
    assert learning_curve(rows, "trained") == [(1, 0.4), (3, 0.7)]
    assert learning_curve(rows[:1]) == learning_curve([]) == []


def test_curves_by_statistic_and_test_set():
    rows = [row(1, trained=0.4), row(2, common={"received": {"accuracy": 0.3, "loss": 2.0}, "trained": None})]
    rows[0]["trained"]["accuracy"] |= {"min": 0.2, "max": None}
    assert learning_curve(rows, "trained", "min") == [(1, 0.2)]
    assert learning_curve(rows, "trained", "max") == []
    assert learning_curve(rows, "received", test="common") == [(1, 0.3)]
    assert learning_curve(rows, "received", "std", test="common") == [(1, 0.0)], "one value for all clients"
    assert learning_curve(rows, "trained", test="common") == []


def test_the_metric_of_a_users_evaluate_fn_is_found_by_name():
    for metrics, expected in (({"loss": 1.7, "accuracy": 0.6}, [(0, 0.6)]), ({"loss": 1.7, "hours": 3.0}, [])):
        rows = [{"round": 1, **statistics({}, metrics, "accuracy")}]
        assert learning_curve(rows, "received", test="common") == expected
        assert learning_curve(rows, "received", test="common", measure="loss") == [(0, 1.7)]


def test_a_torn_last_line_is_ignored_with_a_warning(make_run, caplog):
    folder = make_run(rounds=3)
    whole_rows, whole_clients = read_history(folder), read_clients(folder)
    for name in ("history.jsonl", "clients.csv"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        assert read_history(folder) == whole_rows[:-1]
        assert read_clients(folder) == whole_clients[:-1]
    assert "history.jsonl: the last line is incomplete" in caplog.text
    assert "clients.csv: the last line is incomplete" in caplog.text


def test_a_history_without_rounds_is_complete(tmp_path, caplog):
    (tmp_path / "history.jsonl").touch()  # as a run leaves it that is refused in the handshake
    assert read_history(tmp_path) == []
    assert caplog.text == ""


def test_errors_name_file_and_line(make_run):
    folder = make_run(rounds=3)
    history = folder / "history.jsonl"
    lines = history.read_text().splitlines()
    lines[1] = lines[1][:40]
    history.write_text("\n".join(lines))
    with pytest.raises(FedhetError, match=r"history\.jsonl, line 2: damaged"):
        read_history(folder)
    (folder / "clients.csv").write_text("round,client\nthree,0\n")
    with pytest.raises(FedhetError, match=r"clients\.csv, line 2: damaged"):
        read_clients(folder)


def test_clients_sort_by_number_then_by_name():
    assert sorted(["10", "hospital", "2", "0", "clinic"], key=client_order) == ["0", "2", "10", "clinic", "hospital"]


def test_a_run_reads_back(make_run):
    folder = make_run(rounds=3, clients=12, settings={"fedhenn.eta0": 0.1})
    run = read_run(folder)
    assert [r["round"] for r in run.rows] == [0, 1, 2, 3, 4]
    assert run.settings["fedhenn.eta0"] == 0.1
    assert run.versions == {"torch": "2.15.0", "fedhet": "0.1.0"}
    assert (run.personal, run.has_global, run.metric) == ("trained", False, "accuracy")
    final = final_clients(run.clients)
    assert [client.client for client in final] == [str(i) for i in range(12)]
    assert {client.round for client in final} == {4}
    # The final row's statistics are those of the clients' own lines.
    values = {c.client: (Metric((c.accuracy,), (float(c.examples),)), c.loss, c.examples) for c in final}
    assert summarise(values)["accuracy"] == pytest.approx(run.summary["personal_accuracy"])


def test_nested_tables_read_as_dotted_keys(make_run):
    folder = make_run()
    (folder / "config.toml").write_text('method = "fedhenn"\n[fedhenn]\neta0 = 0.2\n[versions]\ntorch = "2"\n')
    assert read_run(folder).settings == {"method": "fedhenn", "fedhenn.eta0": 0.2}
    (folder / "config.toml").write_text('method = "fedhenn"\n"fedhenn.eta0" = 0.2\n')
    assert read_run(folder).settings == {"method": "fedhenn", "fedhenn.eta0": 0.2}


def test_a_folder_that_is_no_run_is_named(tmp_path):
    for read in (read_run, write_report):
        with pytest.raises(FedhetError, match=f"{tmp_path} is not the directory of a run"):
            read(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FedhetError, match="no such folder"):
        read_run(tmp_path / "missing")
