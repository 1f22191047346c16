"""The walk of run_configs/deployment/README.md on one machine: TLS, registered keys, nodes that come and go."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fedhet
from fedhet import config as configuration
from fedhet.engines.processes import _free_port, command, end, environment_of_commands
from fedhet.results.history import read_history
from fedhet.testing import Stop

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("deployment")]

SETTINGS: dict[str, Any] = {
    "method": "lg-fedavg",
    "architectures": "cnn-2-2,cnn-3-2",
    "rounds": 2,
    "samples-per-client": 30,
    "learning-rate": 0.1,
    "wait-for-clients": 60.0,
    "timeout": 120.0,
}


@dataclass
class Federation:
    """A SuperLink with certificates and keys, and how nodes are started.

    Attributes:
        work: where everything lies; node n's home is `node-n` in it.
        port: of the SuperLink.
        environment: of all commands.
    """

    work: Path
    port: int
    environment: dict[str, str]

    def do(self, *words: str) -> str:
        """What a command prints."""
        done = subprocess.run(words, cwd=self.work, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def started(self, name: str, *words: str, home: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """A process that ends with this context."""
        environment = self.environment | ({"HOME": str(home), "FLWR_HOME": str(home / ".flwr")} if home else {})
        with (self.work / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                words, cwd=self.work, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                yield process
            finally:
                end(process)

    def node(self, number: int, of: int = 3) -> Any:
        """A SuperNode, with a state of its own."""
        home = self.work / f"node-{number}"
        home.mkdir(exist_ok=True)
        own = f'partition-id={number} num-partitions={of} state-dir="{home / "state"}"'
        return self.started(
            f"node-{number}",
            *(command("flower-supernode"), "--root-certificates", "ca.crt", "--superlink", f"127.0.0.1:{self.port}"),
            *("--port", str(_free_port()), "--auth-supernode-private-key", f"keys/client_{number}"),
            *("--node-config", own),
            home=home,
        )


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    work = tmp_path_factory.mktemp("deployment")
    port, home = _free_port(), work / "flower"
    root = str(Path(fedhet.__file__).resolve().parent.parent)
    environment = environment_of_commands() | {"FLWR_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    federation = Federation(work, port, environment)
    home.mkdir()
    (work / "keys").mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "hospital"\n\n[superlink.hospital]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{work / "ca.crt"}"\n'
    )
    certify(federation)
    for number in range(4):
        federation.do("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"keys/client_{number}")
    with federation.started(
        "superlink",
        *(command("flower-superlink"), "--host", "127.0.0.1", "--port", str(port), "--ssl-ca-certfile", "ca.crt"),
        *("--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--enable-supernode-auth"),
        "--disable-runtime-dependency-installation",
    ) as superlink:
        patience = time.monotonic() + 60
        while superlink.poll() is None and time.monotonic() < patience:
            listed = subprocess.run(
                [command("flwr"), "list", "hospital"], cwd=work, env=environment, capture_output=True, check=False
            )
            if listed.returncode == 0:
                break
            time.sleep(1)
        for number in range(3):  # client_3 is nobody's
            federation.do(command("flwr"), "supernode", "register", f"keys/client_{number}.pub", "hospital")
        yield federation


def certify(federation: Federation) -> None:
    """A certificate authority, and a certificate of it for this host."""
    (federation.work / "names.cnf").write_text("subjectAltName = DNS:localhost, IP:127.0.0.1\n")
    request = ("openssl", "req", "-nodes", "-newkey", "rsa:2048")
    federation.do(*request, "-x509", "-days", "30", "-subj", "/CN=fedhet-ca", "-keyout", "ca.key", "-out", "ca.crt")
    federation.do(*request, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
    signed = ("-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30")
    federation.do("openssl", "x509", "-req", *signed, "-extfile", "names.cnf", "-out", "server.pem")


def repeatable(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "timing"} for row in read_history(folder)]


def test_a_federation_with_certificates_and_keys(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three registered nodes give the history of a local run; a fourth stays out; a server that died is resumed."""
    monkeypatch.setenv("FLWR_HOME", federation.environment["FLWR_HOME"])
    monkeypatch.setenv("PYTHONPATH", federation.environment["PYTHONPATH"])
    local = tmp_path / "local"
    fedhet.run(SETTINGS | {"clients": 3}, out=local)
    with ExitStack() as nodes:
        for number in range(3):
            nodes.enter_context(federation.node(number))
        nodes.enter_context(federation.node(3, of=4))
        out = tmp_path / "run"
        with pytest.raises(KeyboardInterrupt):  # `flwr stop`, which ends the ServerApp
            fedhet.run(SETTINGS, out=out, engine="hospital", observers=[Stop(1)])
        assert [row["round"] for row in read_history(out)][:2] == [0, 1]
        fedhet.run(resume=out)
        assert repeatable(out) == repeatable(local)
        assert "Receiving" in (federation.work / "node-0.log").read_text()
        assert "Receiving" not in (federation.work / "node-3.log").read_text(), "an unregistered node is given nothing"
    models = sorted(federation.work.glob("node-*/state/*/models/*.safetensors"))
    assert [path.stem for path in models] == ["0", "1", "2"]
    assert {path.stem: path.read_bytes() for path in models} == {
        path.stem: path.read_bytes() for path in (local / "models").iterdir()
    }
    assert configuration.read(out / "config.toml")["engine"] == "hospital"
    assert os.listdir(out / "checkpoint")
