import pytest

from fedhet.errors import FedhetError
from fedhet.results.history import final_clients, read_run
from fedhet.results.report import write_report
from fedhet.utils.statistics import Metric, summarise


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
