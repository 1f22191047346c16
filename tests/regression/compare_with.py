"""Does this tree compute what an earlier commit did? Both run the same cases on this machine, results are compared.

    python tests/regression/compare_with.py COMMIT [--data FOLDER] [--only PATTERN] [--jobs 2] [--ignore PATTERN]

Cases are COMMIT's presets on digits and mnist, with ten rounds at most, and the lines of `cases.txt`. Runs of COMMIT
are kept in `--cache`. Everything must be equal to the last bit but times and values that only one tree writes; the exit
code is 1 where a result differs. pytest does not collect this: it takes minutes and a commit to compare with.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
MOST_ROUNDS = 10

# The report's figures take longer than many of these runs, and are not compared.
LAUNCHER = """
import fedhet
from fedhet.cli import main
from fedhet.results import recorder

recorder.write_report = lambda folder: folder
main()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", metavar="COMMIT", help="what to compare with")
    parser.add_argument("--data", type=Path, help="folder of MNIST/raw/*.gz; no cases on mnist without it")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases to run, such as 'fedma/*' or '*adam*'")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help="places such as '*bytes*'")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "fedhet-regression")
    arguments = parser.parse_args()
    git = ["git", "-C", str(TREE)]
    commit = subprocess.check_output([*git, "rev-parse", "--verify", f"{arguments.commit}^{{commit}}"], text=True)
    kept = arguments.cache.resolve() / commit.strip()
    if not (kept / "tree").is_dir():
        (kept / "tree").mkdir(parents=True)
        archive = subprocess.check_output([*git, "archive", commit.strip()])
        subprocess.run(["tar", "-x", "-C", kept / "tree"], input=archive, check=True)

    with tempfile.TemporaryDirectory() as present, ThreadPoolExecutor(arguments.jobs) as pool:

        def compared(case: str) -> list[str]:
            old, new = (place / case.replace("/", "-").replace(" ", "__") for place in (kept / "runs", Path(present)))
            for tree, out in ((kept / "tree", old), (TREE, new)):
                if not out.is_dir() and (problem := run(case, kept / "tree", tree, out, arguments.data)):
                    return [f"fails in {tree}: {problem}"]
            before, after = results(old), results(new)
            differing = [place for place in before.keys() & after.keys() if not same(before[place], after[place])]
            return sorted(place for place in differing if not any(fnmatch(place, each) for each in arguments.ignore))

        cases = [case for case in all_cases(kept / "tree", arguments.data) if fnmatch(case, arguments.only)]
        failed = 0
        for case, found in zip(cases, pool.map(compared, cases), strict=True):
            more = [f"and {len(found) - 5} more"] if len(found) > 5 else []
            print("\n    ".join([f"{'DIFFERS' if found else 'equal':8}{case}", *found[:5], *more]), flush=True)
            failed += bool(found)
    print(f"{failed} of {len(cases)} cases differ from {commit[:9]}")
    return int(failed > 0)


def all_cases(baseline: Path, data: Path | None) -> Iterator[str]:
    """The baseline's presets on digits and (with data) mnist, and the lines of `cases.txt`."""
    for path in sorted((baseline / "run_configs").glob("*/*.toml")):
        preset = tomllib.loads(path.read_text(encoding="utf-8"))
        if preset["dataset"] == "digits" or (preset["dataset"] == "mnist" and data):
            name = path.relative_to(baseline / "run_configs").with_suffix("").as_posix()
            yield f"{name} rounds={min(preset['rounds'], MOST_ROUNDS)}"
    lines = (HERE / "cases.txt").read_text(encoding="utf-8").splitlines()
    yield from (line for line in lines if line and line[0] != "#")


def run(case: str, baseline: Path, tree: Path, out: Path, data: Path | None) -> str:
    """Run a case of the baseline in a process of its own; what its preset says counts in both. Returns the error."""
    preset, *settings = case.split()
    keys = tomllib.loads((baseline / "run_configs" / f"{preset}.toml").read_text(encoding="utf-8"))
    keys = {key: value for key, value in keys.items() if key == keys["method"] or not isinstance(value, dict)}
    with tempfile.TemporaryDirectory() as folder:  # not in a tree: the current folder comes before PYTHONPATH
        Path(folder, "preset.toml").write_text(tomli_w.dumps(keys), encoding="utf-8")  # without other methods' keys
        command = [sys.executable, "-c", LAUNCHER, "run", "preset.toml"]
        for setting in (*settings, "device=cpu"):
            command += ["--set", setting]
        command += ["--out", f"{folder}/run"]
        command += ["--data", str(data.resolve())] if data and keys["dataset"] != "digits" else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if ended.returncode:
            return ended.stderr.strip()[-600:] or f"exit code {ended.returncode}"
        shutil.copytree(f"{folder}/run", out)
    return ""


def results(folder: Path) -> dict[str, Any]:
    """Every value of a run by its place: file, row or tensor, column."""
    history = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    values = dict(leaves("history.jsonl", [json.loads(line) | {"timing": None} for line in history]))
    with (folder / "clients.csv").open(encoding="utf-8", newline="") as file:
        values |= leaves("clients.csv", list(csv.DictReader(file)))
    measured = dict.fromkeys(("seconds", "cpu_seconds", "peak_memory", "ran"), 0)  # earlier commits lack the constant
    if (summary := folder / "summary.json").exists():
        values |= leaves(summary.name, json.loads(summary.read_text(encoding="utf-8")) | measured)
    values["models"] = sorted(path.name for path in (folder / "models").glob("*.safetensors"))
    for path in (folder / "models").glob("*.safetensors"):
        values |= {f"models[{path.stem}].{name}": tensor for name, tensor in load_file(path).items()}
    return values


def leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain values of nested objects and lists, each under its place; of a list also its length."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(f"{place}.{key}", inner)
    elif isinstance(value, list):
        yield f"{place}.length", len(value)
        for number, inner in enumerate(value):
            yield from leaves(f"{place}[{number}]", inner)
    else:
        yield place, value


def same(old: Any, new: Any) -> bool:
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return old.dtype == new.dtype and old.shape == new.shape and old.tobytes() == new.tobytes()
    return type(old) is type(new) and (old == new or (old != old and new != new))


if __name__ == "__main__":
    sys.exit(main())
