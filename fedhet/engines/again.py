"""Repeat a run with its saved configuration (`fedhet run --again`), and compare what both wrote, byte by byte."""

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.config import configuration
from fedhet.errors import ConfigError
from fedhet.methods.options import Config
from fedhet.results.history import Row, RunFiles, read_run
from fedhet.utils.files import read_arrays


def config_of(folder: Path, changes: Mapping[str, Any]) -> Config:
    """Return the configuration to repeat the run in `folder`, with `changes` of where it runs (`data`, `engine`).

    Raises a ConfigError if the run is not complete, used objects that the user passed in Python, or ran on nodes.
    """
    run = read_run(folder)
    if run.summary.get("status") != "completed":
        raise ConfigError(f"the run in {folder} is not complete: continue it with fedhet run --resume {folder}")
    config = configuration.of_run(folder, changes=changes).replace(state_dir="")
    if config.engine not in ("local", "ray"):
        raise ConfigError(
            f"the run in {folder} ran on nodes (engine = {config.engine}), which keep their models: add --engine local "
            "if its data set is on this machine"
        )
    return config


def difference(one: Path, other: Path) -> str:
    """Return a sentence on the first round and array in which two runs differ, or an empty string if none differs.

    Compared are the histories without `timing`, the saved models and the arrays of checkpoints.
    """
    first, second = read_run(one), read_run(other)
    parts = [part for part in (_history(first, second), next(_arrays(one, other), "")) if part]
    if not parts:
        return ""
    ran = [
        f"{name} {theirs} (now {now})"
        for kind in ("versions", "ran")
        for name, theirs in getattr(first, kind).items()
        if name != "command" and (now := getattr(second, kind).get(name)) != theirs
    ]
    made = f" It ran with {', '.join(ran)}." if ran else ""
    return f"{'; '.join(parts)}.{made}"


def _history(one: RunFiles, other: RunFiles) -> str:
    nothing: Row = {}
    for theirs, now in zip_longest(one.rows, other.rows, fillvalue=nothing):
        row = theirs or now
        for name in dict.fromkeys([*theirs, *now]):
            # As texts, since NaN differs from itself.
            if name != "timing" and json.dumps(theirs.get(name)) != json.dumps(now.get(name)):
                words = "the evaluation after the last round" if row.get("final") else f"round {row['round']}"
                return f"the histories differ first in {words}, in {name}"
    return ""


def _arrays(one: Path, other: Path) -> Iterator[str]:
    names = {
        path.relative_to(run)
        for run in (one, other)
        for path in run.rglob("*.safetensors")
        if path.relative_to(run).parts[0] in ("models", "checkpoint")
    }
    for name in sorted(names):
        if not all((run / name).is_file() for run in (one, other)):
            yield f"only one has {name}"
            continue
        theirs, _ = read_arrays(one / name)
        now, _ = read_arrays(other / name)
        for array in dict.fromkeys([*theirs, *now]):
            before, after = theirs.get(array), now.get(array)
            if before is None or after is None or before.shape != after.shape or before.dtype != after.dtype:
                yield f"the first array that differs is {array} of {name}, in its shape or kind"
            elif before.tobytes() != after.tobytes():
                largest = np.abs(before.astype(float) - after.astype(float)).max()
                yield f"the first array that differs is {array} of {name}, by up to {largest:.2g}"
