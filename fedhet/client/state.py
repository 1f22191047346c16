"""A client's lasting state: by round, its personal model, and public datasets.

The server names the round that it expects. A client whose answer was lost goes back to the state before it, one that
died in mid-round trains again from where it was, and none ever trains twice on top of itself.
"""

import logging
import shutil
import time
from functools import cached_property
from pathlib import Path

import torch

from fedhet.client.side import AnySide, LostState
from fedhet.data import PublicDataset
from fedhet.errors import FedhetError
from fedhet.files import read_tensors, state_home, write_tensors

KEPT_DAYS = 90
"""Runs and public datasets not touched for so long are removed from a node's own folder when a new run begins there."""

_log = logging.getLogger("flwr").getChild("fedhet")


class Written:
    """States that this process wrote last: their files need not be read while they are the ones that it wrote.

    Attributes:
        limit: bytes that are kept at most; those that were written first go first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bytes = 0
        self._kept: dict[Path, tuple[object, dict[str, torch.Tensor]]] = {}

    def keep(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Keep what was just written to a file."""
        self.forget(path)
        self._kept[path] = _version(path), tensors
        self._bytes += _size(tensors)
        while self._bytes > self.limit:
            self.forget(next(iter(self._kept)))

    def find(self, path: Path) -> dict[str, torch.Tensor] | None:
        """Return a file's tensors, not to be written into; None where they are not kept."""
        version, tensors = self._kept.get(path, (None, None))
        return tensors if version is not None and version == _version(path) else None

    def forget(self, path: Path) -> None:
        """Let go of what was kept of a file."""
        _, tensors = self._kept.pop(path, (None, {}))
        self._bytes -= _size(tensors)


def _version(path: Path) -> object:
    """A value that changes whenever another file takes a file's place; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


_written = Written(limit=2**27)


class ClientStore:
    """The state of one client in a folder of its own: keyed by round, written atomically, the last two kept.

    What this process wrote itself is not read again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, round: int, tensors: dict[str, torch.Tensor], *, after: int) -> None:
        """Write the state after `round`, and keep beside it only the one it came from.

        Args:
            round: the round that was trained.
            tensors: the state.
            after: the round whose state this one started from: what the server goes back to if this answer is lost.
        """
        _written.keep(self._path(round), write_tensors(self._path(round), tensors))
        for path in self.folder.glob("*.safetensors"):
            if path.stem != str(round):
                _written.forget(path)
            if path.stem not in (str(round), str(after)):
                path.unlink(missing_ok=True)

    def load(self, round: int) -> dict[str, torch.Tensor] | None:
        """The state after `round`, not to be written into; None where it is lost: missing, or damaged."""
        path = self._path(round)
        try:
            return _written.find(path) or read_tensors(path)
        except FedhetError as error:
            _log.warning("%s", error)
            return None

    def _path(self, round: int) -> Path:
        return self.folder / f"{round}.safetensors"


class Keeping:
    """Where one client's lasting things are in one run, and which they are.

    Attributes:
        lost: whether the state that the server expects is not there.
    """

    def __init__(self, state_dir: str, run: str, client: str) -> None:
        self._base = Path(state_dir) if state_dir else state_home()
        self._run, self._client = run, client
        self.lost = False

    def make_room(self) -> None:
        """Remove what is old, where several runs keep their state in one folder."""
        if self._run:
            for path in remove_old(self._base, KEPT_DAYS):
                _log.info("%s was not used for %d days and is removed", path, KEPT_DAYS)

    @property
    def public_datasets(self) -> Path:
        """Folder of the public datasets, by digest."""
        return self._base / "public"

    @cached_property
    def store(self) -> ClientStore:
        """The client's own state."""
        return ClientStore(self._base / self._run / "clients" / self._client)

    def write_model(self, tensors: dict[str, torch.Tensor]) -> None:
        """Save the client's personal model."""
        path = self._base / self._run / "models" / f"{self._client}.safetensors"
        write_tensors(path, tensors)
        if self._run:  # else the server collects it
            _log.info("client %s: its personal model is %s", self._client, path)

    def restored(self, side: AnySide) -> dict[str, torch.Tensor]:
        """The state that the server expects, by `model/NAME` and `memory/NAME`; nothing where there is none yet."""
        expected = side.client.request.expected
        if expected < 0 or not (side.remembers or _lasting(side)):
            return {}
        found = self.store.load(expected)
        self.lost = found is None
        if self.lost:
            _log.warning("client %s lost its state of round %d and starts afresh", side.client.name, expected)
        return found or {}

    def save(self, side: AnySide) -> None:
        """Save what is to last: of the network what the method keeps, and its memory."""
        kept = {f"model/{name}": tensor for name, tensor in _lasting(side).items()}
        kept |= {f"memory/{name}": tensor for name, tensor in side.client.memory.items()}
        if kept:
            self.store.save(side.client.request.round, kept, after=side.client.request.expected)


def _lasting(side: AnySide) -> dict[str, torch.Tensor]:
    keeps, tensors = side.traits.keeps, side.client.tensors
    if keeps == "nothing":
        return {}
    shared = side.shared_names() if keeps == "rest" else {}
    return {name: tensor for name, tensor in tensors.items() if name not in shared}


def remove_old(base: Path, days: float) -> list[Path]:
    """Remove what was not written to for so many days: state and models of whole runs, and public datasets.

    Args:
        base: a node's folder of state.
        days: since the newest file of a run was written, or the public dataset was.

    Returns:
        What was removed.
    """
    oldest, removed = time.time() - 86400 * days, []
    for path in sorted([*base.glob("public/*"), *(run for run in base.glob("*") if (run / "clients").is_dir())]):
        files = [path, *path.rglob("*")]
        if max((each.stat().st_mtime for each in files if each.is_file()), default=0) < oldest:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed.append(path)
    return removed


class PublicDatasets:
    """The public datasets that this process has seen, and those on disk."""

    KEPT = 4

    def __init__(self) -> None:
        self._known: dict[str, PublicDataset] = {}

    def keep(self, public: PublicDataset, folder: Path) -> None:
        """Keep a public dataset that the server sent, on disk too."""
        path = folder / f"{public.digest}.safetensors"
        if public.digest not in self._known and self._read(public.digest, folder) is None:
            labels = {} if public.labels is None else {"labels": public.labels}
            write_tensors(path, {"public": public.inputs, **labels})
        self._remember(public.digest, public)

    def find(self, digest: str, folder: Path, own: PublicDataset | None, client: str) -> PublicDataset:
        """The public dataset with this digest: the client's own, or one that was kept.

        Raises:
            LostState: it is not here (any more).
        """
        for public in (own, own and own.unlabelled):
            if public is not None and public.digest == digest:
                return public
        if digest not in self._known:
            found = self._read(digest, folder) if digest else None
            if found is None:
                raise LostState(f"client {client} has no public dataset {digest} (any more)")
            self._remember(digest, found)
        return self._known[digest]

    @staticmethod
    def _read(digest: str, folder: Path) -> PublicDataset | None:
        """The public dataset on disk; None where there is none, or one that is damaged, which is removed."""
        path = folder / f"{digest}.safetensors"
        try:
            found = read_tensors(path)
            public = PublicDataset(found["public"], found.get("labels")) if found else None
            if public is None or public.digest == digest:
                return public
            raise FedhetError(f"{path} is another public dataset")
        except (FedhetError, LookupError, ValueError) as error:
            _log.warning("%s: it is removed, and asked for again", error)
            path.unlink(missing_ok=True)
            return None

    def _remember(self, digest: str, public: PublicDataset) -> None:
        self._known.setdefault(digest, public)
        while len(self._known) > self.KEPT:
            del self._known[next(iter(self._known))]
