"""What a run gives to notebooks."""

import pytest

import fedhet

pytestmark = pytest.mark.usefixtures("home")


def test_a_run_shows_itself_in_a_notebook(tiny, tmp_path):
    settings = {"method": "fedavg", "clients": 2, "rounds": 2, "closing_epochs": 0}
    done = fedhet.run(settings, model=tiny.model, data=tiny.data, out=tmp_path / "run")
    shown = done._repr_html_()
    assert "fedavg: global accuracy" in shown
    assert "<svg" in shown
    assert "<svg" in done.plot()._repr_svg_()
