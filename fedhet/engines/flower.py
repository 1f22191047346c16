"""Flower's own engines: Ray, behind a SuperLink of the run's own, and SuperLinks that somebody else runs.

Everything goes through the `flwr` command, as a user's own runs would, with a Flower app of the code that runs here, so
that server and clients cannot come from another checkout.
"""

import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedhet import config as configuration
from fedhet import registry
from fedhet.engines.commands import SIMULATION, environment_of_commands, flwr_home, follow, superlink
from fedhet.errors import ConfigError, nearest
from fedhet.machine import cores, device_of
from fedhet.observing import Observer
from fedhet.options import Config
from fedhet.results.recorder import check_folder
from fedhet.signals import ended_by_signals
from fedhet.version import __version__

_BESIDE = ("strategies", "client_apps", "run_configs")
_PROJECT = """[project]
name = "fedhet"
version = "{version}"
description = "A copy of fedhet, made for one run"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fedhet"

[tool.flwr.app.components]
serverapp = "fedhet.server_app:app"
clientapp = "fedhet.client_app:app"

"""


def run_on_flower(config: Config, folder: Path, *, resume: bool, observers: Sequence[Observer] = ()) -> None:
    """Run a configuration through `flwr run`.

    Args:
        config: the complete configuration; its engine is `ray`, which is simulated here, or the name of a SuperLink
            connection in Flower's own config.
        folder: the run directory, absolute; at a remote SuperLink it lies where the server runs.
        resume: go on with the run in the folder.
        observers: told of every round whose history can be read here.

    Raises:
        FedhetError: there is no such connection, or the run failed; with its reason.
    """
    simulated = config.engine == SIMULATION
    if config.method_name not in registry.installed_methods():
        raise ConfigError(
            f"method {config.method_name!r} is known in this process only, and engine = {config.engine!r} has others: "
            f"install it with an entry point of the group {registry.GROUP}, or run a Flower app of your own that gives "
            "it to make_client_app and make_server_app"
        )
    if simulated:
        check_folder(folder, resume=resume)
        federation = _federation(config)
        (folder / "summary.json").unlink(missing_ok=True)  # of an earlier, failed attempt
    else:
        known = connections()
        if config.engine not in known:
            raise ConfigError(nearest("engine", config.engine, ["local", SIMULATION, *known]))
        federation = []
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="fedhet-") as temporary:
        work = Path(temporary)
        run_config = work / "run.toml"
        run_config.write_text(configuration.to_toml(_run_config(config, folder, resume, simulated)), encoding="utf-8")
        arguments = [str(make_app(work / "app")), config.engine, "--stream", "--run-config", str(run_config)]
        if not simulated:
            # Flower may start a SuperLink of its own that stays, so its folder must stay and hold no code.
            follow([*arguments, *federation], flwr_home(), environment_of_commands(), config, folder, work, observers)
            return
        home = work / "flower"
        environment = environment_of_commands() | {
            "FLWR_HOME": str(home),
            "OMP_NUM_THREADS": str(config.threads_per_client),
        }
        try:
            with superlink(home, work, environment):
                follow([*arguments, *federation], work / "empty", environment, config, folder, work, observers)
        finally:
            if folder.is_dir() and (work / "run.log").is_file():
                shutil.copyfile(work / "run.log", folder / "flower.log")


def connections() -> list[str]:
    """Names of the SuperLink connections in Flower's config."""
    path = flwr_home() / "config.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
    except FileNotFoundError:
        return []
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    return [name for name, value in table.items() if isinstance(value, Mapping)]


def _run_config(config: Config, folder: Path, resume: bool, simulated: bool) -> dict[str, Any]:
    settings = config.flat() | {"preset": "", "out": str(folder), "resume": resume}
    if config.method_name not in registry.own_methods():  # whose keys Flower's table cannot declare
        own = {key: settings.pop(key) for key in list(settings) if key.startswith(f"{config.family}.")}
        settings[configuration.EXTRA] = configuration.to_toml(own)
    if simulated:
        settings["state-dir"] = str(Path(config.state_dir).resolve()) if config.state_dir else str(folder / "state")
        settings["data"] = str(Path(config.data).expanduser().resolve()) if config.data else ""
        return settings
    del settings["state-dir"]  # a node's own
    return settings if "clients" in config.chosen else {k: v for k, v in settings.items() if k != "clients"}


def _federation(config: Config) -> list[str]:
    share = config.num_gpus
    if not share and device_of(config.device).type == "cuda":
        at_once = max(1, min(config.clients, cores() // config.threads_per_client))
        share = int(1000 * torch.cuda.device_count() / at_once) / 1000
    return [
        "--federation-config",
        f"num-supernodes={config.clients} client-resources-num-cpus={config.threads_per_client} "
        f"client-resources-num-gpus={float(share)}",
    ]


def app_table() -> str:
    """The `[tool.flwr.app.config]` table: every key, `""` for not chosen, but for the preset."""
    keys, *_ = zip(*configuration.keys(outside=False), strict=True)
    declared = dict.fromkeys((*keys, configuration.EXTRA), "")
    lines = configuration.to_toml({"preset": configuration.DEFAULT_PRESET, **declared}).splitlines()
    inner = [f"[tool.flwr.app.config.{line[1:]}" if line.startswith("[") else line for line in lines]
    return "\n".join(["[tool.flwr.app.config]", *inner]) + "\n"


def make_app(app: Path) -> Path:
    """A Flower app of the code that runs here."""
    package = Path(__file__).resolve().parents[1]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, app / "fedhet", ignore=ignored)
    for name in _BESIDE:
        if not (package / name).is_dir():
            shutil.copytree(package.parent / name, app / name, ignore=ignored)
    (app / "pyproject.toml").write_text(_PROJECT.format(version=__version__) + app_table(), encoding="utf-8")
    return app
