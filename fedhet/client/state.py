"""The files of a client: its state after each round, its personal model, and public datasets.

The server names the round whose state it expects. A client whose reply was lost returns to the state before that round,
and a client that stopped within a round repeats the round from the same state.
"""

import json
import shutil
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from fedhet.config.toml import from_json
from fedhet.data import PublicDataset
from fedhet.errors import FedhetError, in_words
from fedhet.messages import LostState
from fedhet.utils.files import file_name, read_tensors, round_folder, state_folder, write_tensors, write_text
from fedhet.utils.inputs import from_parts, parts_of
from fedhet.utils.text import log

KEPT_DAYS = 90
"""Runs and public datasets that were not used for so many days are removed from a node's folder by a new run."""

BEGINNING = "beginning"
"""Folder of a run with digests of what its clients' numbers depend on."""


class ClientStore:
    """The files of one client in one run, written atomically.

    `run` is the run's identity, which names a subfolder of `state_dir`; empty if the folder belongs to one run.
    """

    def __init__(self, state_dir: str | Path, run: str, client: str) -> None:
        self._base, self._run, self._client = state_folder(state_dir, ""), run, client
        self._states = self._base / run / "clients" / file_name(client)
        self._beginning = self._base / run / BEGINNING / f"{file_name(client)}.json"

    def make_room(self) -> None:
        """Remove old runs and public datasets, if several runs share the state folder."""
        if self._run:
            for path in remove_old(self._base, KEPT_DAYS):
                log.info("%s was not used for %d days and is removed", path, KEPT_DAYS)

    def save(self, round: int, tensors: dict[str, torch.Tensor], *, after: int, closing: bool = False) -> None:
        """Save the state after `round`, and remove earlier states except the state after round `after`.

        The server returns to the state after round `after` if this reply is lost. A `closing` round removes no state,
        since a run that is resumed with more rounds continues from the state before it.
        """
        try:
            write_tensors(self._states / f"{round}.safetensors", tensors)
        except OSError as error:
            raise FedhetError(
                f"the client's state cannot be saved: {in_words(error)}; free disk space and resume the run (--resume)"
            ) from error
        for path in self._states.glob("*.safetensors"):
            if not closing and path.stem not in (str(round), str(after)):
                path.unlink(missing_ok=True)

    def load(self, round: int) -> dict[str, torch.Tensor] | None:
        """Return the state after `round`, or None if it is missing or damaged."""
        try:
            return read_tensors(self._states / f"{round}.safetensors")
        except FedhetError as error:
            log.warning("%s", error)
            return None

    def note_beginning(self, digests: Mapping[str, str]) -> None:
        """Save digests of the client's task, network and examples at the beginning of the run."""
        write_text(self._beginning, json.dumps(digests))

    def beginning(self) -> dict[str, str]:
        """Return the digests that `note_beginning` saved, or an empty dict; raise a ConfigError for a damaged file."""
        if not self._beginning.is_file():
            return {}
        return from_json(self._beginning.read_text(encoding="utf-8"), str(self._beginning))

    def write_model(self, tensors: dict[str, torch.Tensor], round: int = 0) -> None:
        """Save the client's personal model after `round` or, if it is 0, at the end of the run."""
        path = self._base / self._run / "models" / round_folder(round) / f"{file_name(self._client)}.safetensors"
        write_tensors(path, tensors)
        if self._run:  # else the server collects it
            log.info("client %s: its personal model is %s", self._client, path)

    def keep(self, public: PublicDataset) -> None:
        """Save a public dataset that the server sent."""
        try:
            self.public_dataset(public.digest)
        except LostState:
            labels = {} if public.labels is None else {"labels": public.labels}
            write_tensors(self._public(public.digest), {**parts_of(public.inputs, "public"), **labels})

    def public_dataset(self, digest: str) -> PublicDataset:
        """Return the stored public dataset with this digest; raises `LostState` if it is missing."""
        path = self._public(digest)
        try:
            return _read_public(path, path.stat().st_mtime_ns)
        except (FileNotFoundError, LookupError) as error:
            raise LostState(f"client {self._client} has no public dataset {digest} (any more)") from error

    def _public(self, digest: str) -> Path:
        return self._base / "public" / f"{digest}.safetensors"


@lru_cache(maxsize=4)
def _read_public(path: Path, modified: int) -> PublicDataset:
    """Read a public dataset from a file; each process caches it until the file's modification time changes."""
    try:
        tensors = read_tensors(path) or {}
        return PublicDataset(from_parts(tensors, "public"), tensors.get("labels"))
    except (FedhetError, KeyError, ValueError) as error:
        log.warning("%s: it is removed, and asked for again", error)
        path.unlink(missing_ok=True)
        raise LookupError from error


def remove_old(base: Path, days: float) -> list[Path]:
    """Remove runs and public datasets from a node's folder that were not written to for `days` days; return them.

    Folders that contain other files are not removed.
    """
    oldest, removed = time.time() - 86400 * days, []
    runs = {path.parent for name in (BEGINNING, "clients") for path in base.glob(f"*/{name}")}
    parts, root = {BEGINNING, "clients", "models"}, base.resolve()
    ours = [run for run in runs if not run.is_symlink() and {path.name for path in run.iterdir()} <= parts]
    for path in sorted([*base.glob("public/*.safetensors"), *ours]):
        if not path.resolve().is_relative_to(root):  # behind a link to another place
            continue
        files = [path, *path.rglob("*")]
        if max((each.stat().st_mtime for each in files if each.is_file()), default=0) < oldest:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed.append(path)
    return removed
