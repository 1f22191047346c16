"""The files of run_configs/deployment: image, rehearsal and service units, without a container engine."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedhet.engines.superlink import _free_port, end, environment_of_commands
from fedhet.results.history import read_history

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "run_configs/deployment"
COMPOSE: dict[str, Any] = yaml.safe_load((KIT / "compose.yaml").read_text())["services"]


def test_units_are_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    for unit in (KIT / "systemd").iterdir():
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/fedhet/bin", str(Path(sys.executable).parent)))
    words = ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_has_its_schema() -> None:
    pytest.importorskip("check_jsonschema")
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(KIT / "compose.yaml")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_the_rehearsal_ends_in_a_finished_run(tmp_path: Path) -> None:
    """The commands of the Dockerfile in a new environment, then those of compose.yaml with its programs."""
    image = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", str(image)], check=True)
    base = environment_of_commands() | {"PATH": f"{image / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    base.pop("PYTHONPATH", None)
    index = subprocess.run(["pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False)
    installed = re.findall(r"^RUN (pip .*)$", (KIT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(installed) == 2
    for line in installed:
        line = line.replace("--no-cache-dir ", "").replace("/src", str(ROOT))
        torch = index.stdout.strip() or "https://pypi.org/simple"
        subprocess.run(["bash", "-c", line], env=base | {"TORCH": torch}, check=True)

    port, processes = str(_free_port()), {}
    folders = {name: tmp_path / name for name in ("secrets", "superlink", "results", "north", "south")}
    for folder in folders.values():
        folder.mkdir()

    def start(name: str, words: list[str] | str) -> subprocess.Popen[bytes]:
        volumes = dict(each.split(":")[:2][::-1] for each in COMPOSE[name]["volumes"])
        own = {inside: str(folders[volume]) for inside, volume in volumes.items()}
        own |= {"/srv/fedhet": str(folders["results"]), "superlink:9093": f"127.0.0.1:{port}", "9093": port, "$$": "$"}
        own |= {"127.0.0.1:9094": f"127.0.0.1:{ports.get(name)}", "0.0.0.0": "127.0.0.1"}

        def here(text: str) -> str:
            for inside, outside in own.items():
                text = text.replace(inside, outside)
            return text

        words = [here(word) for word in (shlex.split(words) if isinstance(words, str) else words)]
        words += ["--port", ports[name]] if words[0] == "flower-supernode" else []
        environment = {key: here(value) for key, value in COMPOSE[name].get("environment", {}).items()}
        home = folders.get(name, folders["secrets"])
        return subprocess.Popen(words, cwd=home, env=base | {"HOME": str(home)} | environment, start_new_session=True)

    def healthy(name: str) -> bool:
        test = COMPOSE[name]["healthcheck"]["test"]
        return start(name, test[1:]).wait() == 0

    ports = {name: str(_free_port()) for name in ("north", "south")}
    try:
        for name, conditions in ((name, each.get("depends_on", {})) for name, each in COMPOSE.items()):
            for other, condition in conditions.items():
                if condition["condition"] == "service_completed_successfully":
                    assert processes[other].wait(120) == 0
                patience = time.monotonic() + 120
                while condition["condition"] == "service_healthy" and not healthy(other):
                    assert time.monotonic() < patience, other
                    time.sleep(1)
            processes[name] = start(name, COMPOSE[name]["command"])
        assert processes["run"].wait(300) == 0
    finally:
        for process in processes.values():
            end(process)
    history = read_history(folders["results"] / "first")
    assert [row["failures"] for row in history] == [[]] * len(history)
    assert history[-1]["trained"]["accuracy"]["mean"] > 0.5
    assert {path.stem for path in tmp_path.glob("*/state/*/models/*.safetensors")} == {"north", "south"}
