"""A disk that is full ends a simulation before the round counts, and the resumed run equals an undisturbed one."""

import errno
import json
import os
from contextlib import contextmanager

import pytest

import fedhet
from fedhet.engines.workers import WorkerGrid
from fedhet.errors import FedhetError
from fedhet.results.history import MEASURED, read_history
from fedhet.utils import files

pytestmark = pytest.mark.usefixtures("no_report", "home")

# Clients keep their heads, and save their models after each round.
SETTINGS = {
    "method": "fedrep",
    "clients": 2,
    "rounds": 2,
    "workers": 1,
    "save-every": 1,
    "local-epochs": 2,
    "fedrep.body-epochs": 1,
}
FULL = os.strerror(errno.ENOSPC)


def content(folder):
    """All of a run that does not depend on time."""
    rows = [{key: value for key, value in row.items() if key != "timing"} for row in read_history(folder)]
    summary = json.loads((folder / "summary.json").read_text()) | dict.fromkeys(MEASURED, 0)
    tensors = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")}
    checkpoints = {path for path in tensors if path.parts[0] == "checkpoint"}  # with the history's digests
    models = {path: tensors[path] for path in tensors.keys() - checkpoints}
    return rows, summary, models, checkpoints, (folder / "clients.csv").read_text()


class Disk:
    """Counts what is written where; `full` is the number of the write that fails, after it wrote to a table."""

    def __init__(self, monkeypatch):
        self.full, self.written = 0, []
        monkeypatch.setattr(files, "writing", self.writing)

    @contextmanager
    def writing(self, path):
        self.written.append(path)
        fails = len(self.written) == self.full
        if fails and path.suffix not in (".csv", ".jsonl"):
            raise files.WriteError(errno.ENOSPC, FULL, str(path))
        yield
        if fails:
            raise files.WriteError(errno.ENOSPC, FULL, str(path))


def test_a_full_disk_at_every_write(tmp_path, tiny, monkeypatch):
    disk, own = Disk(monkeypatch), {"model": tiny.model, "data": tiny.data, "progress": False}
    fedhet.run(SETTINGS, out=tmp_path / "whole", **own)
    whole, places = content(tmp_path / "whole"), [path.relative_to(tmp_path / "whole") for path in disk.written]
    last = {path: number for number, path in enumerate(places, 1) if path.name != "config.toml"}
    assert {path.parts[0] for path in last} == {
        *("state", "models", "history.jsonl", "clients.csv", "checkpoint", "summary.json")
    }
    for path, number in last.items():
        folder = tmp_path / f"{number}"
        disk.written, disk.full = [], number
        with pytest.raises(FedhetError) as raised:
            fedhet.run(SETTINGS, out=folder, **own)
        said = str(raised.value)
        assert f"{folder / path} cannot be written or read: {FULL}; complete rounds are saved" in said
        assert said.endswith(f"continue with fedhet.run(resume={str(folder)!r}, model=..., data=...)")
        disk.full = 0
        rows = [row["round"] for row in read_history(folder) if not row.get("final")]
        kept = [int(path.stem) for path in (folder / "checkpoint").glob("*.safetensors")]
        assert kept == rows[-1:], "what is half written does not count"
        fedhet.run(resume=folder, **own)
        assert content(folder) == whole, path


def test_a_worker_that_cannot_write_a_clients_state(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(WorkerGrid, "patience", 0.0)
    own = {"model": tiny.model, "data": tiny.data, "progress": False}
    settings = SETTINGS | {"workers": 2}
    fedhet.run(settings, out=tmp_path / "whole", **own)
    folder = tmp_path / "run"
    blocked = folder / "state" / "clients" / "1" / "1.safetensors"
    blocked.mkdir(parents=True)  # a file cannot take a folder's place
    with pytest.raises(FedhetError, match=f"stopped, since client 1: {blocked} cannot be written or read: "):
        fedhet.run(settings, out=folder, **own)
    assert [row["round"] for row in read_history(folder)] == [0]
    blocked.rmdir()
    fedhet.run(resume=folder, **own)
    assert content(folder) == content(tmp_path / "whole")
