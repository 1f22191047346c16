"""A client's own state on disk: keyed by client and round, written atomically, the last two kept.

The server names the round that it expects. A client whose answer was lost goes back to the state before it, one that
died in mid-round trains again from where it was, and none ever trains twice on top of itself.
"""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


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
        """The state after `round`, or None where it is lost."""
        return read_tensors(self._path(round))

    def _path(self, round: int) -> Path:
        return self.folder / f"{round}.safetensors"


def read_tensors(path: Path) -> dict[str, torch.Tensor] | None:
    """The tensors of a safetensors file, or None where there is no such file."""
    return load_file(path) if path.is_file() else None


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors to a safetensors file, whole or not at all; tensors that share memory are written apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, temporary)
    os.replace(temporary, path)
