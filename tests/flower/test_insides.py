"""Tests of each part of Flower's insides on which fedhet relies: a release of Flower that changes one fails here."""

import importlib
import inspect
import logging
import re
import socket
import sys
from importlib.metadata import entry_points
from itertools import count
from pathlib import Path
from unittest.mock import MagicMock

import flwr
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import message_size_mod
from flwr.serverapp import strategy as flower
from flwr.superlink.grid.inmemory_grid import InMemoryGrid
from typer.testing import CliRunner

import fedhet
from fedhet.engines import superlink as commands
from fedhet.errors import ConfigError
from fedhet.flower import insides


@pytest.fixture
def message():
    insides.be_server()
    return Message(RecordDict(), dst_node_id=7, message_type="train")


def test_an_array_of_parts_is_one_of_flowers():
    numbers = np.arange(6.0).reshape(2, 3)
    theirs = Array(numbers)
    ours = insides.array_of(theirs.dtype, theirs.shape, theirs.stype, theirs.data)
    assert (ours.dtype, ours.shape, ours.stype, ours.data) == (theirs.dtype, theirs.shape, theirs.stype, theirs.data)
    assert np.array_equal(ours.numpy(), numbers)
    assert ours.object_id == theirs.object_id  # by which Flower sends it


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ArrayRecord, {"a": Array(np.ones(2)), "b": Array(np.zeros(3))}),
        (MetricRecord, {"a": 0.5, "b": [1, 2]}),
        (ConfigRecord, {"a": "text", "b": True, "c": b"bytes"}),
    ],
)
def test_a_filled_record_is_one_of_flowers(kind, values):
    ours = insides.filled(kind(), values)
    assert ours == kind(values)
    assert ours.object_id == kind(values).object_id  # by which Flower sends it
    assert all(ours[name] is value for name, value in values.items())


def test_a_client_app_without_the_handler_says_so(message):
    insides.identify(message, count(1))
    context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(ValueError, match="train") as error:
        ClientApp()(message, context)
    assert insides.no_handler(str(error.value))
    assert not insides.no_handler("division by zero")


def test_mods_around_the_train_function_are_found():
    def first(message, context, call_next):
        return call_next(message, context)

    app = ClientApp(mods=[first])
    assert insides.mods_of(app) == [first]
    app.train(mods=[message_size_mod])(lambda message, context: message)
    assert insides.mods_of(app) == [first, message_size_mod]


@pytest.mark.parametrize("kind", ["Fixed", "Adaptive"])
@pytest.mark.parametrize("side", ["Server", "Client"])
def test_the_wrapper_that_calls_a_strategy_is_found(side, kind):
    class Strategy(fedhet.FedAvg):
        def configure_train(self, *_):
            return [insides.private_wrapper_of(self)]

    strategy = Strategy()
    wrap = getattr(flower, f"DifferentialPrivacy{side}Side{kind}Clipping")
    wrapped, another = (wrap(strategy, 0.0, *norm, 1) for norm in [([1.0] if kind == "Fixed" else [])] * 2)
    assert [*wrapped.configure_train(1, ArrayRecord(), ConfigRecord(), None)] == [wrapped]
    assert [*another.configure_train(1, ArrayRecord(), ConfigRecord(), None)] == [another]
    assert strategy.configure_train() == [None]


def test_the_grid_of_a_simulation_goes_by_this_name():
    assert insides.simulated(object.__new__(InMemoryGrid))
    assert not insides.simulated(None)


def test_the_number_of_a_started_run_is_read(tmp_path):
    assert "Successfully started run " in inspect.getsource(importlib.import_module("flwr.cli.run.run"))
    for text, number in (("INFO: Successfully started run 1234\n", "1234"), ("INFO: building\n", None)):
        (tmp_path / "output").write_text(text)
        assert commands.started_run(tmp_path / "output") == number


def test_the_status_of_a_run_is_read_from_flowers_list():
    listing = importlib.import_module("flwr.cli.ls")
    row = MagicMock(fab_id="a/b", status_text="finished:failed", details="no clients")
    numbers = [name for name in inspect.signature(listing.RunRow).parameters if name not in ("details", "status_text")]
    row.configure_mock(**dict.fromkeys({*numbers} - {"fab_id"}, 0))
    assert commands.status_of_run(listing._to_json([row])) == ("finished:failed", "no clients")
    assert commands.status_of_run("Error") == commands.status_of_run("") == ("unknown", "")


def test_options_of_flowers_commands_exist(monkeypatch, capsys):
    scripts = {point.name: point for point in entry_points(group="console_scripts")}
    runner, wide = CliRunner(), {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}
    taken = {"run": ["--stream", "--run-config", "--federation-config"], "list": ["--run-id", "--format"], "stop": []}
    for word, options in taken.items():
        shown = runner.invoke(scripts["flwr"].load(), [word, "--help"], env=wide)
        assert shown.exit_code == 0, word
        assert [option for option in options if option not in shown.output] == [], word
    monkeypatch.setattr(sys, "argv", ["flower-superlink", "--help"])
    with pytest.raises(SystemExit):
        scripts["flower-superlink"].load()()
    given = set(re.findall(r"--[a-z-]+", inspect.getsource(commands.superlink)))
    assert {"--simulation", "--isolation", "--host"} <= given
    shown = capsys.readouterr().out
    assert [option for option in sorted(given) if option not in shown] == []


def test_environment_variables_and_health_exist():
    names = {name for name in commands._QUIET if name.startswith("FLWR_")} | {"FLWR_HOME", "/health"}
    sources = (path.read_text(encoding="utf-8") for path in Path(flwr.__file__).parent.rglob("*.py"))
    assert sorted(names - {name for source in sources for name in names if f'"{name}"' in source}) == []


def test_flowers_logger_has_this_name():
    assert importlib.import_module("flwr.common.logger").FLOWER_LOGGER is logging.getLogger("flwr")


@pytest.mark.parametrize(("terminal", "colours"), [(True, 1), (False, 0)])
def test_flowers_log_has_colours_on_a_terminal_only(monkeypatch, terminal, colours):
    handler = importlib.import_module("flwr.common.logger").console_handler
    monkeypatch.setattr(handler, "colored", not terminal)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    insides.colour_terminals_only()
    line = handler.format(logging.LogRecord("flwr", logging.INFO, "", 0, "a round", None, None))
    assert line.count("\x1b[92m") == colours


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_does_not_answer_is_refused(monkeypatch, tmp_path, scheme):
    monkeypatch.setattr("fedhet.flower.insides.ANSWERED", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"{scheme}127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        message = f"no Ray cluster answers at RAY_ADDRESS = {address}: start it (ray start --head) and set its"
        with pytest.raises(ConfigError, match=re.escape(message)):
            fedhet.run({"method": "local", "engine": "ray"}, out=tmp_path / "run", progress=False)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    insides.check_cluster()


@pytest.mark.parametrize("address", ["auto", "127.0.0.1", "cluster"])
def test_an_address_without_a_port_of_no_cluster_is_refused(monkeypatch, address):
    monkeypatch.setattr("fedhet.flower.insides.ANSWERED", 0.3)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at RAY_ADDRESS = {address}: "):
        insides.check_cluster()


def test_a_strategy_in_a_simulation_without_its_cluster_says_so_and_ends_the_simulation(monkeypatch, caplog):
    ended = []
    monkeypatch.setattr("fedhet.flower.insides.ANSWERED", 0.3)
    monkeypatch.setattr("_thread.interrupt_main", lambda: ended.append(True))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match="no Ray cluster answers"):
            fedhet.FedAvg().start(object.__new__(InMemoryGrid))
    assert ended
    assert "no Ray cluster answers" in caplog.text
