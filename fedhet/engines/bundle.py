"""A Flower app of the code that runs here, so that server and clients cannot come from another checkout."""

import shutil
from pathlib import Path

from fedhet import config as configuration
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
