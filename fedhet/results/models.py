"""Store the models of a run's clients in the run directory."""

import shutil
from pathlib import Path

from fedhet.results.observers import RunInfo
from fedhet.utils.files import round_folder, state_home, write_arrays

MODELS = "models"
"""Folder of models in the folder of a run, and in that of clients' states."""


def collect(folder: Path, state_dir: str, run: RunInfo, round: int = 0) -> None:
    """Move the models that clients wrote into their state folder to the run's folder, and write the global model.

    The models of clients on other machines stay there. `round` is 0 for the models at the end of the run.
    """
    name = Path(MODELS, round_folder(round))
    places = [Path(state_dir or folder / "state"), *([state_home()] if run.state.run else [])]
    for place in places:
        for path in sorted((place / run.state.run / name).glob("*.safetensors")):
            (folder / name).mkdir(parents=True, exist_ok=True)
            shutil.move(path, folder / name / path.name)
    if (run.traits.whole or run.state.serves) and run.state.model:
        write_arrays(folder / name / "global.safetensors", run.state.model)


def remove_after(folder: Path, round: int) -> None:
    """Remove the models in a run's folder that were written after a round."""
    kept = {round_folder(number) for number in range(1, round + 1)}
    present = [*(folder / MODELS).glob("*")]
    for path in present:
        if path.is_file():
            path.unlink()
        elif path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
    if not kept.intersection(path.name for path in present):
        shutil.rmtree(folder / MODELS, ignore_errors=True)
