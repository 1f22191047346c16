"""Does this tree compute what an earlier commit did? Both run the same cases on this machine, results are compared.

    python tests/regression/compare_with.py COMMIT [--data FOLDER] [--only PATTERN] [--jobs 2] [--tree PATH]

Cases are COMMIT's presets on digits and mnist, with ten rounds at most, and the lines of `cases.txt`. Runs of COMMIT
are kept in `--cache`, so that a second call repeats only the present tree's. Everything must be equal to the last bit
but times; values that only the present tree writes are told apart, and so are checkpoints, whose layout may change.
The exit code is 1 where a result differs. pytest does not collect this: it takes minutes and a commit to compare with.
"""

import argparse
import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
MOST_ROUNDS = 10
FAILED = "failed.txt"

RENAMED = {
    **{f"shared-{name}": f"public-{name}" for name in ("samples", "dataset", "data", "steps")},
    **{f"newcomer-{name}": f"unseen-{name}" for name in ("epochs", "learning-rate")},
    **{
        "newcomers": "unseen-clients",
        "hostile": "byzantine",
        "update-bound": "clip-norm",
        "local.pool": "local.public",
        "pool-batch": "public-batch",
    },
}
"""Keys of earlier commits, and what they are called now."""

REPLACED = {
    **dict.fromkeys(('peers = "selected"', "last-weight-decay = 1e-4", "last-learning-rate = 1.0"), ""),
    "last-learning-rate = 0.1": "last-learning-rate = 0.001",  # of a rate of 0.01
    "student-learning-rate = 0.3": "student-learning-rate = 0.03",  # of a rate of 0.1
}
"""Lines of earlier presets, and what they are now; nothing where it is always so."""

# The report's figures take longer than many of these runs, and are not compared.
LAUNCHER = """
import sys
from pathlib import Path
import fedhet
assert Path(fedhet.__file__).is_relative_to(Path(sys.argv[1])), f"{fedhet.__file__} is not the tree under test"
del sys.argv[1]
try:
    from fedhet.results import recorder
    recorder.write_report = lambda folder: folder
except ImportError:
    pass
from fedhet.cli import main
main()
"""


@dataclass(frozen=True)
class Case:
    """A preset of the baseline and what is set on top of it."""

    preset: str
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.preset, *self.settings))

    @property
    def folder(self) -> str:
        return self.name.replace("/", "-").replace(" ", "__")


@dataclass
class Difference:
    """How two runs of a case differ.

    Attributes:
        first: the first place that differs, with both values.
        columns: what differs, and by how much.
        new: columns that only the present tree writes.
        checkpoint: how many tensors of the checkpoints differ.
        missing: why the baseline has no run to compare with.
    """

    first: str = ""
    columns: dict[str, float] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)
    checkpoint: int = 0
    missing: str = ""

    def __bool__(self) -> bool:
        return bool(self.first)


def main() -> int:
    arguments = parse_arguments()
    tree = arguments.tree.resolve()
    commit = git(tree, "rev-parse", "--verify", f"{arguments.commit}^{{commit}}").decode().strip()
    baseline = arguments.cache.resolve() / commit
    if not (baseline / "tree").is_dir():
        # Files only: a work tree would be registered in the repository for as long as the cache is kept.
        with tarfile.open(fileobj=io.BytesIO(git(tree, "archive", commit))) as archive:
            archive.extractall(baseline / "tree", filter="data")
    cases = [case for case in all_cases(baseline / "tree", arguments.data) if fnmatch(case.name, arguments.only)]
    (baseline / "runs").mkdir(exist_ok=True)
    present = Path(tempfile.mkdtemp(prefix="present-", dir=arguments.cache))
    started = time.perf_counter()

    def compare(case: Case) -> Difference | str:
        kept = baseline / "runs" / case.folder
        # Under another name until it is complete: two of these may fill one cache.
        if not kept.is_dir():
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=baseline) as partial:
                out = Path(partial) / "run"
                if problem := run(case, baseline / "tree", baseline / "tree", out, arguments.data):
                    out.mkdir(exist_ok=True)
                    (out / FAILED).write_text(problem, encoding="utf-8")
                if not kept.is_dir():
                    out.rename(kept)
        if (kept / FAILED).exists():
            return Difference(missing=(kept / FAILED).read_text(encoding="utf-8"))
        if arguments.baseline_only:
            return Difference()
        if problem := run(case, tree, baseline / "tree", present / case.folder, arguments.data):
            return problem
        return difference(kept, present / case.folder, arguments.ignore)

    counts, new = Counter[str](), set[str]()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for case, found in zip(cases, pool.map(compare, cases), strict=True):
            verdict = "DIFFERS" if found else "ran" if arguments.baseline_only else "equal"
            if isinstance(found, Difference):
                new |= found.new
                verdict = "-" if found.missing else verdict
            counts[verdict] += 1
            print("\n    ".join([f"{verdict:8}{case.name}", *told(found)]), flush=True)
    if new:
        print(f"new, only in the present tree: {', '.join(sorted(new))}")
    told_counts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(
        f"{len(cases)} cases beside {commit[:9]} (-: fails there): {told_counts}; {time.perf_counter() - started:.0f} s"
    )
    if counts["DIFFERS"]:
        print(f"runs of the present tree: {present}")
        return 1
    shutil.rmtree(present)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", metavar="COMMIT", help="what to compare with")
    parser.add_argument("--data", type=Path, help="folder of MNIST/raw/*.gz; no cases on mnist without it")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases to run, such as 'fedma/*' or '*adam*'")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="the present tree, if not this one")
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help="columns such as '*bytes*'")
    parser.add_argument("--baseline-only", action="store_true", help="run what the cache lacks, compare nothing")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "fedhet-regression", help="keeps COMMIT's runs"
    )
    return parser.parse_args()


def git(tree: Path, *command: str) -> bytes:
    return subprocess.run(["git", "-C", tree, *command], check=True, stdout=subprocess.PIPE).stdout


def all_cases(baseline: Path, data: Path | None) -> list[Case]:
    """The baseline's presets on digits and (with data) mnist, and the lines of `cases.txt`."""
    cases = []
    for path in sorted((baseline / "run_configs").glob("*/*.toml")):
        preset = tomllib.loads(path.read_text(encoding="utf-8"))
        if preset["dataset"] == "digits" or (preset["dataset"] == "mnist" and data):
            rounds = min(preset["rounds"], MOST_ROUNDS)
            name = path.relative_to(baseline / "run_configs").with_suffix("").as_posix()
            cases.append(Case(name, (f"rounds={rounds}",)))
    lines = (line.split() for line in (HERE / "cases.txt").read_text(encoding="utf-8").splitlines())
    return cases + [Case(line[0], tuple(line[1:])) for line in lines if line and line[0] != "#"]


def run(case: Case, tree: Path, baseline: Path, out: Path, data: Path | None) -> str:
    """Run a case in a process of its own; what the baseline's preset says counts in both. Returns what went wrong."""
    preset = baseline / "run_configs" / f"{case.preset}.toml"
    if tree != baseline:
        translated = out.parent / f"{case.folder}.toml"
        translated.write_text(in_present_words(preset.read_text(encoding="utf-8")), encoding="utf-8")
        preset = translated
    command = [sys.executable, "-c", LAUNCHER, str(tree), "run", str(preset)]
    for setting in (*case.settings, "device=cpu"):
        command += ["--set", setting]
    command += ["--out", str(out), *(["--data", str(data.resolve())] if data else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    # Not in a tree: the current folder comes before PYTHONPATH.
    ended = subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True)
    shutil.rmtree(out / "state", ignore_errors=True)
    return "" if ended.returncode == 0 else f"exit code {ended.returncode}: {ended.stderr.strip()[-600:]}"


def in_present_words(preset: str) -> str:
    """A preset of an earlier commit with the keys of this one."""
    for before, now in RENAMED.items():
        preset = re.sub(rf"(?m)^{before} =", f"{now} =", preset)
    return "\n".join(REPLACED.get(line.strip(), line) for line in preset.splitlines())


def difference(old: Path, new: Path, ignore: list[str]) -> Difference:
    """Compare two run directories, value by value."""
    found = Difference()
    before, after = results(old), results(new)
    for place, value in before.items():
        column = column_of(place)
        if same(value, after.get(place)) or any(fnmatch(column, pattern) for pattern in ignore):
            continue
        found.first = found.first or f"{place}: {shown(value)} -> {shown(after.get(place))}"
        found.columns[column] = max(found.columns.get(column, 0.0), relative(value, after.get(place)))
    columns = {column_of(place) for place in before}
    for place in after.keys() - before.keys():
        if column_of(place) not in columns:
            found.new.add(column_of(place))
        elif not any(fnmatch(column_of(place), pattern) for pattern in ignore):  # a row or a model more
            found.first = found.first or f"{place}: none -> {shown(after[place])}"
            found.columns[column_of(place)] = math.inf
    before, after = checkpoint(old), checkpoint(new)
    found.checkpoint = sum(not same(before.get(name), after.get(name)) for name in before.keys() | after.keys())
    return found


def results(folder: Path) -> dict[str, Any]:
    """Every value of a run by its place: file, row or tensor, column."""
    values: dict[str, Any] = {}
    for number, line in enumerate((folder / "history.jsonl").read_text(encoding="utf-8").splitlines()):
        values |= leaves(f"history.jsonl[{number}]", json.loads(line) | {"timing": None})
    with (folder / "clients.csv").open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            values |= leaves(f"clients.csv[{number}]", row)
    values |= leaves("summary.json", json.loads((folder / "summary.json").read_text(encoding="utf-8")) | {"seconds": 0})
    if (folder / "matrices.json").exists():
        values |= leaves("matrices.json", json.loads((folder / "matrices.json").read_text(encoding="utf-8")))
    for path in sorted((folder / "models").glob("*.safetensors")):
        values |= {f"models[{path.stem}].{name}": tensor for name, tensor in load_file(path).items()}
    return values


def leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain values of nested objects and lists, each under its place."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(f"{place}.{key}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(f"{place}[{number}]", inner)
    else:
        yield place, value


def checkpoint(folder: Path) -> dict[str, Any]:
    """The tensors of the last checkpoint."""
    paths = sorted((folder / "checkpoint").glob("*.safetensors"), key=lambda path: int(path.stem))
    return dict(load_file(paths[-1])) if paths else {}


def column_of(place: str) -> str:
    """A place without the numbers of rows, entries and models."""
    return "".join(part.partition("]")[2] if number else part for number, part in enumerate(place.split("[")))


def same(old: Any, new: Any) -> bool:
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return old.dtype == new.dtype and old.shape == new.shape and old.tobytes() == new.tobytes()
    return type(old) is type(new) and (old == new or (old != old and new != new))


def relative(old: Any, new: Any) -> float:
    """The largest difference in units of the largest old value; infinite where the two cannot be subtracted."""
    try:
        first, second = np.asarray(old, dtype=np.float64), np.asarray(new, dtype=np.float64)
        scale = float(np.abs(first).max(initial=0.0))
        return float(np.abs(first - second).max(initial=0.0)) / scale if scale else math.inf
    except (TypeError, ValueError):
        return math.inf


def shown(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else json.dumps(value)


def told(found: Difference | str) -> list[str]:
    """The lines under a case's name."""
    if isinstance(found, str):
        return found.splitlines()
    lines = found.missing.splitlines()[-1:]
    if found:
        worst = sorted(found.columns.items(), key=lambda column: -column[1])
        more = f" and {len(worst) - 6} more" if len(worst) > 6 else ""
        lines = [found.first, ", ".join(f"{name} ({by:.2g})" for name, by in worst[:6]) + more]
    if found.checkpoint:
        lines.append(f"checkpoint: {found.checkpoint} tensors differ or are in one only")
    return lines


if __name__ == "__main__":
    sys.exit(main())
