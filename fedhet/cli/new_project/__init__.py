"""`fedhet new`: copy the files in this folder to a new project."""

import shutil
from pathlib import Path

from fedhet.errors import ConfigError

HERE = Path(__file__).resolve().parent
PARTS = ("model.py", "data.py")
PROGRAM = ("run.py",)
APP = ("client_app.py", "server_app.py", "pyproject.toml")


def write(folder: Path, *, flower: bool) -> list[str]:
    """Copy a Flower app (with `flower`) or a script to an empty or new folder; return the names of the files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = "is not empty" if folder.is_dir() else "exists as a file"
        raise ConfigError(f"the folder {folder} {problem}: give the name of a new one, since no files are overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    names = [*PARTS, *(APP if flower else PROGRAM)]
    for name in names:
        shutil.copyfile(HERE / name, folder / name)
    return names
