"""The files of run_configs/deployment: image, rehearsal and service units, without a container engine."""

import http.client
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
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
        text = unit.read_text().replace("/opt/fedhet/bin", str(Path(sys.executable).parent))
        (tmp_path / unit.name).write_text(text.replace("/usr/sbin/nginx", sys.executable))
    words = ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_has_its_schema() -> None:
    pytest.importorskip("check_jsonschema")
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(KIT / "compose.yaml")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_each_party_sees_its_own_secrets_only() -> None:
    mounted = {name: {each.split(":")[0] for each in service.get("volumes", ())} for name, service in COMPOSE.items()}
    for party in ("superlink", "north", "south", "starter"):
        users = {name for name, volumes in mounted.items() if f"{party}-secrets" in volumes} - {"secrets"}
        assert users == ({"register", "run"} if party == "starter" else {party})
    assert [name for name, volumes in mounted.items() if "authority" in volumes] == ["secrets"]


@pytest.mark.long
def test_the_proxy_stops_the_control_and_runtime_api(tmp_path: Path, printed: Callable[[str, str], list[str]]) -> None:
    """Whoever has ca.crt, and is not listed, registers no keys and starts nothing; nodes and the listed go through."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("no nginx here")
    environment = environment_of_commands()
    for line in printed("run_configs/deployment/README.md", "(openssl|echo)"):
        line = line.replace("DNS:flower.example.org", "DNS:localhost").replace("/etc/fedhet", str(tmp_path))
        subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, capture_output=True)
    inside, outside = str(_free_port()), str(_free_port())
    text = (KIT / "nginx.conf").read_text()
    for ours, here in {
        "/etc/fedhet": tmp_path,
        "/var/log/nginx": tmp_path,
        "/run": tmp_path,
        "flower.example.org": "localhost",
    }.items():
        text = text.replace(ours, str(here))
    (tmp_path / "nginx.conf").write_text(text.replace("9092", inside).replace("9093", outside))
    starters = tmp_path / "starters"
    starters.write_text("allow 192.0.2.7;\n")
    (line,) = printed("run_configs/deployment/README.md", "flower-superlink")
    words = shlex.split(line.replace("9092", inside))
    processes = [subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True)]
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")

    def status(path: str, method: str = "POST") -> int:
        connection = http.client.HTTPSConnection("localhost", int(outside), context=context, timeout=20)
        connection.request(method, path, body=b"")
        return connection.getresponse().status

    def reachable() -> bool:
        try:
            return status("/health", "GET") == 200
        except OSError:
            return False

    def nginx_starts() -> subprocess.Popen[bytes]:
        words = [nginx, "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;"]
        return subprocess.Popen(words, start_new_session=True)

    try:
        processes.append(nginx_starts())
        patience = time.monotonic() + 120
        while not reachable():
            assert time.monotonic() < patience
            time.sleep(1)
        control = "/v1/control/list-runs"
        tricks = ["//v1/control/list-runs", "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs"]
        tricks += ["/v1/fleet/..%2fcontrol/list-runs", "/V1/control/list-runs", "/v1/%63ontrol/list-runs", "/docs"]
        for path in (control, "/v1/control/register-node", "/v1/runtime/get-nodes", *tricks):
            assert status(path) == 403, path
        assert status("/v1/fleet/pull-messages") not in (403, 404, 502)
        starters.write_text("allow 127.0.0.1;\n")
        end(processes.pop())
        proxy = nginx_starts()
        processes.append(proxy)
        while not reachable():
            time.sleep(0.5)
        (tmp_path / "flower").mkdir()
        connection = (
            f'[superlink.hospitals]\naddress = "localhost:{outside}"\nroot-certificates = "{tmp_path}/ca.crt"\n'
        )
        (tmp_path / "flower/config.toml").write_text(connection)
        environment["FLWR_HOME"] = str(tmp_path / "flower")
        subprocess.run(["ssh-keygen", "-t", "ecdsa", "-b", "384", "-N", "", "-f", "node_key"], cwd=tmp_path, check=True)
        words = ["flwr", "supernode", "register", "node_key.pub", "hospitals"]
        subprocess.run(words, cwd=tmp_path, env=environment, check=True)
        words = ["flower-supernode", "--root-certificates", "ca.crt", "--superlink", f"localhost:{outside}"]
        words += ["--auth-supernode-private-key", "node_key", "--port", str(_free_port())]
        words += ["--node-config", f"name='north' state-dir='{tmp_path}/state'"]
        with (tmp_path / "node.log").open("wb") as log:
            node = subprocess.Popen(
                words, cwd=tmp_path, env=environment, start_new_session=True, stdout=log, stderr=log
            )
        processes.append(node)
        words = ["flwr", "supernode", "list", "hospitals", "--format", "json"]
        patience = time.monotonic() + 120
        while '"online"' not in subprocess.run(words, env=environment, capture_output=True, text=True).stdout:
            assert time.monotonic() < patience
            time.sleep(2)

        # Neither the node nor who follows the run misses anything if the proxy restarts, as its unit says.
        words = shlex.split("local --engine hospitals --set clients=1 --set rounds=3 --set wait-for-clients=60 --out")
        words = [sys.executable, "-m", "fedhet", "run", *words, str(tmp_path / "run")]
        run = subprocess.Popen(words, env=environment, start_new_session=True)
        processes.append(run)
        while "Receiving: train message" not in (tmp_path / "node.log").read_text():
            assert run.poll() is None
            time.sleep(1)
        unit = (KIT / "systemd/fedhet-proxy.service").read_text()
        (stop,) = re.findall(r"^KillSignal=(\w+)$", unit, re.MULTILINE)
        proxy.send_signal(getattr(signal, stop))
        time.sleep(5)
        end(proxy)
        processes.append(nginx_starts())
        assert run.wait(300) == 0
        history = read_history(tmp_path / "run")
        assert [row["failures"] for row in history] == [[]] * len(history)
        assert history[-1]["trained"]["accuracy"]["mean"] > 0.5
    finally:
        for process in processes:
            end(process)


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
    folders = {name: tmp_path / name for name in yaml.safe_load((KIT / "compose.yaml").read_text())["volumes"]}
    for folder in folders.values():
        folder.mkdir()
    secrets = tmp_path / "secrets"  # for a name that a command puts behind /secrets/
    secrets.mkdir()
    for party in ("superlink", "north", "south", "starter"):
        (secrets / party).symlink_to(folders[f"{party}-secrets"])

    def start(name: str, words: list[str] | str) -> subprocess.Popen[bytes]:
        volumes = dict(each.split(":")[:2][::-1] for each in COMPOSE[name]["volumes"])
        own = {inside: str(folders[volume]) for inside, volume in volumes.items()}
        own |= {
            "/secrets/$": f"{secrets}/$",
            "/srv/fedhet": str(folders["results"]),
            "superlink:9093": f"127.0.0.1:{port}",
            "9093": port,
            "$$": "$",
        }
        own |= {"127.0.0.1:9094": f"127.0.0.1:{ports.get(name)}", "0.0.0.0": "127.0.0.1"}

        def here(text: str) -> str:
            for inside, outside in own.items():
                text = text.replace(inside, outside)
            return text

        words = [here(word) for word in (shlex.split(words) if isinstance(words, str) else words)]
        words += ["--port", ports[name]] if words[0] == "flower-supernode" else []
        environment = {key: here(value) for key, value in COMPOSE[name].get("environment", {}).items()}
        home = folders.get(name, folders["authority"])
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
