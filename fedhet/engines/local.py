"""The local engine, which runs strategy and clients in one process, with worker processes for long runs."""

import multiprocessing
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from fedhet.client.app import make_client_app
from fedhet.config.user_functions import UserFunctions
from fedhet.flower import ClientApp
from fedhet.flower.grid import LocalGrid
from fedhet.methods.options import Config
from fedhet.results.observers import Observer
from fedhet.server.app import serve
from fedhet.utils.machine import cores, device_of, process_restored, room_on


def run_locally(
    config: Config,
    folder: Path,
    *,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    app: ClientApp | None = None,
    functions: UserFunctions = UserFunctions(),  # noqa: B008 - it is frozen
) -> None:
    """Run a complete configuration on this machine; raises a FedhetError if the run fails.

    `app` is by default fedhet's, with the user's model and data.
    """
    if not config.state_dir:
        config = config.replace(state_dir=str(folder / "state"))
    app = app or make_client_app(functions.model, functions.data, task=functions.task)
    device = device_of(config.device)
    workers = config.workers or (1 if device.type == "mps" else cores())
    with ExitStack() as stack:
        stack.enter_context(process_restored())
        if workers > 1 and not multiprocessing.current_process().daemon:  # each of several runs has one core
            from fedhet.engines.workers import WorkerGrid

            workers_grid = WorkerGrid(
                app,
                config.clients,
                workers=workers,
                timeout=config.timeout,
                at_once=config.timeout < Config().timeout,
                datasets=(config.dataset, config.public_dataset) if functions.data is None else (),
                room=partial(room_on, device) if device.type == "cuda" and not config.workers else None,
            )
            grid: LocalGrid = stack.enter_context(workers_grid)
        else:
            grid = LocalGrid(app, config.clients)
        serve(
            config,
            grid,
            folder,
            engine="local",
            resume=resume,
            public=functions.public_dataset(config),
            functions=functions,
            observers=observers,
        )
