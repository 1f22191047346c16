"""Calls in processes of their own, a few at a time: one that dies takes no other with it.

`concurrent.futures` gives up on every call of a pool once one of its processes is killed, hence this module.
"""

import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from fedhet.engines import children, parcels
from fedhet.errors import FedhetError


@dataclass(frozen=True)
class Job:
    """A call `function(*arguments, **keywords)`, all of it picklable, with a name and a file for what it prints."""

    name: str
    function: Callable[..., object]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    log: Path


def run_jobs(jobs: Iterable[Job], *, workers: int) -> Iterator[tuple[str, str | None]]:
    """Run each job in a fresh process with one thread, `workers` at a time, in order.

    They are forked from a process of one thread that has imported what runs need, seconds each else.

    Processes that still run when the iteration is left (Ctrl-C, an error of the caller) are ended.

    Yields:
        As jobs end: the job's name, and why it failed or None.
    """
    waiting = deque(jobs)
    running: dict[Connection, tuple[Job, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                job.log.parent.mkdir(parents=True, exist_ok=True)
                process, receiver = children.start(_call, job, name=job.name)
                running[receiver] = (job, process)
            for ready in wait(list(running)):
                receiver = cast(Connection, ready)
                job, process = running.pop(receiver)
                try:
                    reason = parcels.receive(receiver, patience=parcels.PATIENCE)
                except parcels.DamagedError as error:
                    process.kill()
                    reason = f"its process was ended: {error}; see {job.log}"
                except (EOFError, OSError):
                    process.join()
                    reason = f"its process ended with exit code {process.exitcode}; see {job.log}"
                process.join()
                receiver.close()
                yield job.name, reason
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _call(result: Connection, job: Job) -> None:
    with job.log.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        job.function(*job.arguments, **job.keywords)
        parcels.send(result, None)
    except FedhetError as error:
        parcels.send(result, str(error))
    except Exception as error:  # whatever it is, it is this job's failure and is reported as such
        traceback.print_exc()
        parcels.send(result, f"{type(error).__name__}: {error} (see {job.log})")
