"""A client's own state on disk: keyed by client and round, written atomically, the last two kept.

The server names the round that it expects. A client whose answer was lost goes back to the state before it, one that
died in mid-round trains again from where it was, and none ever trains twice on top of itself.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file

from fedhet.errors import FedhetError

_log = logging.getLogger("flwr").getChild("fedhet")


class ClientStore:
    """The state of one client in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, round: int, tensors: dict[str, torch.Tensor], *, after: int) -> None:
        """Write the state after `round`, and keep beside it only the one it came from.

        Args:
            round: the round that was trained.
            tensors: the state.
            after: the round whose state this one started from: what the server goes back to if this answer is lost.
        """
        write_tensors(self._path(round), tensors)
        for path in self.folder.glob("*.safetensors"):
            if path.stem not in (str(round), str(after)):
                path.unlink(missing_ok=True)

    def load(self, round: int) -> dict[str, torch.Tensor] | None:
        """The state after `round`, or None where it is lost: missing, or damaged."""
        try:
            return read_tensors(self._path(round))
        except FedhetError as error:
            _log.warning("%s", error)
            return None

    def _path(self, round: int) -> Path:
        return self.folder / f"{round}.safetensors"


def read_tensors(path: Path) -> dict[str, torch.Tensor] | None:
    """The tensors of a safetensors file, or None where there is no such file.

    Raises:
        FedhetError: the file is damaged.
    """
    if not path.is_file():
        return None
    try:
        return load_file(path)
    except SafetensorError as error:
        raise FedhetError(f"{path} is damaged: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a safetensors file, whole or not at all; tensors that share memory are written apart."""
    write_arrays(path, {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()})


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray[Any, Any]], *, metadata: dict[str, str] | None = None
) -> None:
    """Write arrays, and text beside them, to a safetensors file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    whole = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    save_file(whole, temporary, metadata=metadata)
    os.replace(temporary, path)
