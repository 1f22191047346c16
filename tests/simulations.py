"""Runs in Flower's simulation on Ray."""

from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

import fedhet
from fedhet.methods.options import Config
from fedhet.server.app import serve


def run_on_ray(folder: Path, config: Config, public: Any = None, **functions: Any) -> None:
    """Execute a run with all its clients, which have the user's `functions`, on Ray; `folder` gets its files."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(config.replace(state_dir=str(folder / "state")), grid, folder, engine="ray", public=public)

    client_app = fedhet.make_client_app(**functions)
    run_simulation(app, client_app, config.clients, backend_config={"client_resources": {"num_cpus": 1}})
