"""Runs in Flower's simulation on Ray."""

from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

import fedhet
from fedhet.methods.options import Config
from fedhet.server.app import serve
from fedhet.setup.user_functions import UserFunctions


def run_on_ray(folder: Path, config: Config, **arguments: Any) -> None:
    """Execute a run on Ray; `arguments` are the user's model, data and task, and `folder` gets the run's files."""
    app, functions = ServerApp(), UserFunctions(**arguments)
    public = functions.public_dataset(config)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        own = config.replace(state_dir=str(folder / "state"))
        serve(own, grid, folder, engine="ray", public=public, functions=functions)

    client_app = fedhet.make_client_app(**arguments)
    run_simulation(app, client_app, config.clients, backend_config={"client_resources": {"num_cpus": 1}})
