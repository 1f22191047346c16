"""The example with flwr-datasets, on a local file in place of a data set from the hub."""

import importlib
import json

import pytest
import torch
from torch import nn

import fedhet
from tests.test_readme import blocks

pytest.importorskip("flwr_datasets")
pytestmark = pytest.mark.usefixtures("home", "no_report")


def test_partitions_of_flwr_datasets(tmp_path, monkeypatch):
    rows = [{"x": [float(row % 3 == place) for place in range(4)], "label": row % 3} for row in range(90)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = blocks()["partitions"]
    local = code.replace('dataset="ylecun/mnist"', f'dataset="json", data_files={str(tmp_path / "rows.jsonl")!r}')
    assert local != code
    (tmp_path / "local_partitions.py").write_text(local.replace("alpha=0.5", "alpha=100.0"))
    monkeypatch.syspath_prepend(str(tmp_path))
    data = importlib.import_module("local_partitions").my_data

    def model(client):
        return nn.Linear(4, 3)

    settings = {"method": "fedavg", "clients": 3, "rounds": 3, "learning-rate": 0.5, "workers": 1}
    run = fedhet.run(settings, model=model, data=data, out=tmp_path / "run", progress=False)
    assert run.summary["failures"] == 0
    assert run.summary["personal_accuracy"]["weighted"] == 1
    assert torch.is_tensor(fedhet.load_model(run, 0, model=model).weight)
