"""Data only at the nodes must do: the server needs no data set unless it evaluates or sends a public dataset."""

import pytest

from fedhet import data
from fedhet.errors import DataError
from fedhet.flower import Context, RecordDict
from fedhet.flower.grid import LocalGrid
from fedhet.methods import registry
from fedhet.server.app import make_server_app

pytestmark = pytest.mark.usefixtures("home", "no_report")


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedma", "pfedhn"])
def test_server_without_data_set(method, tiny, tmp_path, monkeypatch):
    def load(*arguments, **keywords):
        raise DataError("there are no images here")

    monkeypatch.setattr(data, "load", load)
    settings = {"method": method, "dataset": "chestxray14", "public-samples": 100, "local-epochs": 1}
    rounds = {} if registry.method(method).settles_rounds else {"rounds": 1}
    run_config = {**settings, **rounds, "out": str(tmp_path / "run")}
    make_server_app()(LocalGrid(tiny.app(), 2), Context(1, 1, {}, RecordDict(), run_config))
    assert (tmp_path / "run" / "summary.json").is_file()
