"""`fedhet node check`."""

import json
import math
import os
import re
import ssl
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedhet.cli import app
from fedhet.client import audit
from fedhet.client.node import check_node
from fedhet.client.secret import NodeSecret
from fedhet.config import configuration
from fedhet.data.examples import LOADED
from fedhet.errors import ConfigError
from fedhet.flower.insides import node_config
from fedhet.messages import Payload, Request
from tests.robustness.reading import Victim

FIRST_ROUND = "privacy: a first round (epochs = 1, batch-size = 32)"
CONFIG = configuration.resolve({"method": "local", "dataset": "digits"})


def checked(node: dict[str, Any], superlink: str | None = None, ca: Path | None = None) -> tuple[list[str], list[str]]:
    """What passed, and faults."""
    rows = list(check_node(node, CONFIG, superlink, ca))
    return [sentence for passed, sentence in rows if passed], [sentence for passed, sentence in rows if not passed]


def test_examples_of_a_node_without_partitions(tmp_path: Path) -> None:
    passed, faults = checked({"name": "north", "state-dir": str(tmp_path), "allow": "metrics"})
    assert faults == []
    assert "policy: the node may send metrics, from at least 10 examples, without dp-noise" in passed[0]
    assert any("the node trains on 1442 of 1442 examples (0: 143, 1: 146" in line for line in passed)


def test_faults(tmp_path: Path) -> None:
    base = {"name": "north", "state-dir": str(tmp_path), "allow": "metrics", "min-examples": 145}
    faults = checked(base | {"partition-id": 0, "num-partitions": 2})[1]
    assert "trains on 0 of 1442 examples" in faults[0]
    assert "class 0 has 7" in faults[1]
    assert "did you mean 'allow'" in checked(base | {"alow": "metrics"})[1][0]
    assert "which must be a valid file name" in checked(base | {"name": "a/b"})[1][0]
    assert "did you mean 'data'" in checked(base | {"dta": "x"})[1][0]
    assert "does not exist" in checked(base | {"dataset": "mnist", "data": str(tmp_path / "no")})[1][0]
    (fault,) = checked({**base, "min-examples": 10}, "localhost:9", tmp_path / "ca.crt")[1]
    assert fault == f"certificate: {tmp_path / 'ca.crt'} does not exist: correct the path of ca.crt"
    noise = {**base, "dp-noise": 1.0, "dp-clip": 1.0, "min-examples": 10}
    assert "dp-noise 1, no limit of epsilon (dp-epsilon)" in checked(noise)[0][0]
    assert "dp-noise 1, epsilon at most 5" in checked(noise | {"dp-epsilon": 5.0})[0][0]


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        ({"allow": ""}, "allow is empty, with which the node serves no message"),
        ({"state-dir": "state"}, "state-dir: state depends on the folder in which the node starts"),
        ({"data": "/no/images"}, "data: /no/images does not exist, or this user cannot read it"),
        (
            {"allow": "weights", "method": "fedproto"},
            "this node allows only weights (allow in its node config), but fed",
        ),
        ({"memory-limit": "8"}, "the node's memory-limit is '8', but must be a number"),
        ({"memory-limit": 0.5}, "the node's memory-limit is 0.5, but must be a number of at least 1"),
        ({"architecture": "nope"}, "unknown model 'nope'"),
        ({"width": 7.0}, "the node's width"),
        ({"partition-id": "a"}, "the node's partition-id is 'a', but must be a whole number"),
        (
            {"partition-id": 2, "num-partitions": 2},
            "the node's partition-id is 2, but must be below num-partitions = 2",
        ),
        ({"num-partitions": 0}, "the node's num-partitions is 0, but must be a whole number of at least 1"),
        ({"split-seed": "x"}, "the node's split-seed is 'x', but must be a whole number"),
        ({"batch-size": 2}, "batch-size is 2, but the client's node requires at least 10 examples"),
        ({"dp-noise": 1e-6, "dp-clip": 1.0}, FIRST_ROUND + " spends epsilon = 9.986e+11"),
        ({"dp-noise": 1.0, "dp-clip": 1.0, "dp-epsilon": 0.01}, FIRST_ROUND + " spends epsilon"),
        ({"dp-noise": math.inf, "dp-clip": 1.0}, "the node's dp-noise is inf, but must be a number"),
        ({"dp-noise": 1.0, "dp-clip": 1.0, "dp-delta": 0}, "the node's dp-delta is 0, but must be a number"),
        ({"dp-noise": 1.0, "dp-clip": 1.0, "partition": "classes"}, "partition = classes makes the number of"),
    ],
)
def test_what_a_run_would_refuse_is_a_fault(node: dict[str, Any], fault: str, tmp_path: Path) -> None:
    method = node.get("method", "heterofl" if "width" in node else "local")
    node = {key: value for key, value in node.items() if key != "method"}
    config = configuration.resolve({"method": method, "dataset": "digits"})
    results = [*check_node({"name": "north", "state-dir": str(tmp_path), **node}, config, None, None)]
    faults = [sentence for passed, sentence in results if not passed]
    assert [told for told in faults if told.startswith(fault)], faults
    assert len(faults) == 1


def test_what_earlier_runs_spent_counts(tmp_path: Path) -> None:
    node = {"name": "north", "state-dir": str(tmp_path), "dp-noise": 1.0, "dp-clip": 1.0, "dp-epsilon": 3.0}
    assert checked(node)[1] == []
    NodeSecret(tmp_path, "north", "digits").spend(1.0, 1.0, 1, 9.0)
    assert checked(node)[1][0].startswith(f"{FIRST_ROUND}, with earlier runs, spends epsilon = ")


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("fedavg", {}),
        ("fedproto", {}),
        ("fedmd", {"architectures": "mlp", "public-samples": 40, "fedmd.public-epochs": 0}),  # 25 epochs, and 2 later
    ],
)
def test_the_epsilon_that_is_foretold_is_what_a_round_spends(method: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """The settings are those of the run's preset."""
    node = {"name": "north", "state-dir": str(tmp_path), "dp-noise": 1.0, "dp-clip": 1.0}
    settings = configuration.preset_settings(f"{method}/digits") | keys
    (tmp_path / "run.toml").write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items()))
    words = " ".join(f"{key}={value!r}" for key, value in node.items())
    command = ["node", "check", str(tmp_path / "run.toml"), "--node-config", words]
    foretold = CliRunner().invoke(app, command).output
    victim = Victim(0, tmp_path, settings, own_data=False, network=None, **node)
    victim.context.node_config.pop("partition-id")
    victim.context.node_config.pop("num-partitions")
    request = Request(round=1, run="a", epochs=victim.config.local_epochs)
    assert victim.ask("train", Payload(), request), victim.refusals
    (told,) = re.findall(r"spends epsilon = (\S+) at delta", foretold)
    (line,) = re.findall(r"epsilon (\S+)", "\n".join(audit.summary(tmp_path, audit.since("today"))))
    assert float(told) == float(line)


def test_changed_images_are_named_before_a_run_refuses_them(tmp_path: Path) -> None:
    places = {"state-dir": str(tmp_path / "state"), "data": str(tmp_path / "data")}
    node = {"name": "north", "allow": "prototypes", **places}
    keys = {"method": "local", "dataset": "folder", "public-samples": 0, "input-size": 8}
    folder = configuration.resolve(keys, strict=False)
    files = [tmp_path / "data" / name / f"{number}.png" for name in ("ill", "well") for number in range(20)]
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 6 * number, np.uint8)).save(file)

    def faults() -> list[str]:
        return [sentence for passed, sentence in check_node(node, folder, None, None) if not passed]

    settings = {"method": "fedproto", "dataset": "folder", "public-samples": 0, "input-size": 8, "architectures": "mlp"}
    victim = Victim(0, tmp_path / "state", settings, own_data=False, network=None)
    victim.context.node_config = node
    asked = Request(round=1, run="a", epochs=1)
    assert victim.ask("train", Payload(), asked), victim.refusals
    assert faults() == []
    for file in files:  # as tar restores them
        os.utime(file, (int(file.stat().st_mtime),) * 2)
    LOADED.clear()
    assert faults() == []
    Image.fromarray(np.full((9, 9), 3, np.uint8)).save(files[3])
    os.utime(files[3], (10**9, 10**9))  # not in the second in which the first image was written
    LOADED.clear()
    for told in (faults(), [victim.ask("train", Payload(), asked) or victim.refusals[-1]]):
        (fault,) = told
        assert "but files changed (nodes/north.json): restore the data, or let the node's owner run" in fault
        assert "fedhet node accept-data north" in fault
    assert CliRunner().invoke(app, ["node", "accept-data", "north", "--state-dir", node["state-dir"]]).exit_code == 0
    assert faults() == []


def test_a_node_config_is_read_as_flower_reads_it(tmp_path: Path) -> None:
    assert node_config("name='north' allow='' min-examples=20") == {"name": "north", "allow": "", "min-examples": 20}
    (tmp_path / "node.toml").write_text("name = 'north'\nmin-examples = 20\n")
    assert node_config(str(tmp_path / "node.toml")) == {"name": "north", "min-examples": 20}
    # A key with `_` is another key for Flower, and so is a fault.
    assert "did you mean 'min-examples'" in checked(node_config("name='north' min_examples=20"))[1][0]
    for refused in ("name=north", "name='north' name='south'"):
        with pytest.raises(ConfigError, match="Flower cannot read it; write KEY='TEXT'"):
            node_config(refused)
    with pytest.raises(ConfigError, match="Flower would ignore 'min-examples = 20'"):
        node_config("name='north' min-examples = 20")


def test_another_users_state_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's check would leave files that the service's user cannot read."""
    state = tmp_path / "state"
    node = {"name": "north", "state-dir": str(state), "allow": "metrics"}
    assert checked(node)[1] == []
    state.mkdir(exist_ok=True)
    monkeypatch.setattr(os, "geteuid", lambda: state.stat().st_uid + 1)
    before = [*state.rglob("*")]
    (fault,) = checked(node)[1]
    assert (
        fault == f"state-dir {state} belongs to the user {state.owner()}: run this command, and the node, as that user"
    )
    result = CliRunner().invoke(app, ["node", "accept-data", "north", "--state-dir", str(state)])
    assert (result.exit_code, "belongs to the user" in result.output) == (2, True)
    assert [*state.rglob("*")] == before


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[Any]:
    """A function that starts a server with a certificate and a clock that is some seconds late."""
    words = ["openssl", "req", "-nodes", "-newkey", "rsa:2048", "-x509", "-days", "90", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "ca.crt"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    servers = []

    def start(late: float) -> str:
        class Handler(BaseHTTPRequestHandler):
            def date_time_string(self, timestamp: float | None = None) -> str:
                return formatdate((datetime.now() - timedelta(seconds=late)).timestamp(), usegmt=True)

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"localhost:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()


def test_clock_and_certificate(superlink: Any, tmp_path: Path) -> None:
    node, ca = {"name": "north", "state-dir": str(tmp_path)}, tmp_path / "ca.crt"
    passed, faults = checked(node, superlink(0), ca)
    assert faults == []
    assert any("certificate: valid from" in line for line in passed)
    for late in (20, -400):
        (fault,) = checked(node, superlink(late), ca)[1]
        assert fault.startswith(f"clock: {late:+d} s from the SuperLink's")
    (fault,) = checked(node, superlink(0))[1]
    assert "self-signed certificate: renew it, or correct the path of ca.crt" in fault
