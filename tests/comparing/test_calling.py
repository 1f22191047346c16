"""`fedhet.compare` with models and data of one's own, and what it and a run give to notebooks."""

import sys
from types import SimpleNamespace

import pytest

import fedhet
from fedhet.errors import FedhetError

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def lines_of(monkeypatch):
    """A frame's lines, with a stand-in for pandas, which not everybody has."""

    def lines_of(make):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
            return make()

    return lines_of


@pytest.mark.slow
def test_a_comparison_with_ones_own_model_and_data(tiny, tmp_path, lines_of):
    def data(client):  # of this function alone: other processes get it all the same
        return tiny.data(client)

    settings = {"clients": 2, "rounds": 2, "learning_rate": 0.2}
    done = fedhet.compare(
        ["fedavg", "local"], settings, seeds=(0,), model=tiny.model, data=data, out=tmp_path / "here", jobs=1
    )
    assert [result.variant for result in done.results] == ["fedavg", "local"]
    frame = lines_of(done.frame)
    assert [(line["method"], line["seed"]) for line in frame[:2]] == [("fedavg", 0), ("local", 0)]
    page = (tmp_path / "here" / "comparison.html").read_text()
    assert "fedavg, local on own data" in page
    assert 'href="local-seed0/report.html"' in page
    assert done._repr_html_().count("<tr>") == 3
    assert done.plot().axes


def test_a_run_shows_itself_in_a_notebook(tiny, tmp_path, lines_of):
    settings = {"method": "fedavg", "clients": 2, "rounds": 2, "closing_epochs": 0}
    done = fedhet.run(settings, model=tiny.model, data=tiny.data, out=tmp_path / "run")
    assert [line["round"] for line in lines_of(done.frame)] == [0, 1, 2, 3]
    assert lines_of(done.frame)[-1]["received/accuracy/weighted"] == done.summary["personal_accuracy"]["weighted"]
    assert {line["client"] for line in lines_of(done.clients)} == {"0", "1"}
    shown = done._repr_html_()
    assert "fedavg: global accuracy" in shown
    assert "<svg" in shown
    assert "<svg" in done.plot()._repr_svg_()


def test_without_pandas_the_way_to_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FedhetError, match="pip install pandas"):
        fedhet.RunResult(tmp_path, {}).frame()


def test_the_public_names_are_listed():
    assert {"run", "compare", "make_client_app", "FedHeNN", "FedAvg"} <= set(dir(fedhet))
