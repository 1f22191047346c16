"""Data only at the nodes must do: the server needs no data set unless it evaluates or sends a public dataset."""

import pytest

from fedhet import config as configuration
from fedhet import data, registry, serving
from fedhet.errors import DataError
from fedhet.flower.grid import LocalGrid

pytestmark = pytest.mark.usefixtures("home", "no_report")


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedma", "pfnm", "lg-fedavg", "pfedhn", "local", "fd"])
def test_a_server_without_the_data_set_serves_clients_that_have_it(method, tiny, tmp_path, monkeypatch):
    def load(*arguments, **keywords):
        raise DataError("there are no images here")

    monkeypatch.setattr(data, "load", load)
    settings = {"method": method, "dataset": "chestxray14", "public-samples": 100, "local-epochs": 1}
    rounds = {} if registry.method(method).settles_rounds else {"rounds": 1}
    config = configuration.resolve({**settings, **rounds}, strict=False)
    public = serving._configured_public(config)
    serving.serve(config, LocalGrid(tiny.app(), 2), tmp_path / "run", engine="flwr", public=public)
    assert public is None
    assert (tmp_path / "run" / "summary.json").is_file()
