"""`fedhet.compare` with models and data of one's own, and what it and a run give to notebooks."""

import pytest

import fedhet

pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.slow
def test_a_comparison_with_ones_own_model_and_data(tiny, tmp_path):
    def data(client):  # of this function alone: other processes get it all the same
        return tiny.data(client)

    settings = {"clients": 2, "rounds": 2, "learning_rate": 0.2}
    done = fedhet.compare(
        ["fedavg", "local"], settings, seeds=(0,), model=tiny.model, data=data, out=tmp_path / "here", jobs=1
    )
    assert [result.variant for result in done.results] == ["fedavg", "local"]
    page = (tmp_path / "here" / "comparison.html").read_text()
    assert "fedavg, local on own data" in page
    assert 'href="local-seed0/report.html"' in page
    assert done._repr_html_().count("<tr>") == 3
    assert done.plot().axes


def test_a_run_shows_itself_in_a_notebook(tiny, tmp_path):
    settings = {"method": "fedavg", "clients": 2, "rounds": 2, "closing_epochs": 0}
    done = fedhet.run(settings, model=tiny.model, data=tiny.data, out=tmp_path / "run")
    shown = done._repr_html_()
    assert "fedavg: global accuracy" in shown
    assert "<svg" in shown
    assert "<svg" in done.plot()._repr_svg_()
