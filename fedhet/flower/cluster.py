"""Flower's simulation on a Ray cluster of several machines; nothing here does anything on one machine alone."""

import platform
import sys
import threading
import time
from typing import Any

_counting = threading.Lock()


def cluster_machine() -> str:
    """Return this machine's name, in a process that simulates clients on a Ray cluster of several; else empty."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return ""
    return platform.node() if sum(node["Alive"] for node in ray.nodes()) > 1 else ""


def leave_dead_actors_out() -> None:
    """Have Flower's simulation in this process go on without the actors of a machine that is gone.

    Flower puts an actor back into its pool, dead or alive, and takes the one that came back last: a dead one fails one
    message after the other, at once, in all rounds to come. Here it is left out, and messages wait for the others.
    """
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool

    pools: Any = BasicActorPool
    pools.submit, pools.add_actor_back_to_pool = _submit, _put_back


def _submit(pool: Any, call: Any, job: tuple[Any, ...]) -> Any:
    """Have an idle actor of a pool do a job, as soon as there is one; a RuntimeError if none is left."""
    while True:
        try:
            actor = pool.pool.pop()
            break
        except IndexError:
            if not pool.num_actors:
                raise RuntimeError("no machine of the Ray cluster is left that simulates clients") from None
            time.sleep(0.05)
    future = call(actor, *job)
    pool._future_to_actor[future] = actor
    return future


def _put_back(pool: Any, future: Any) -> None:
    """Put the actor that did a job back into its pool, if it lives."""
    import ray

    actor = pool._future_to_actor.pop(future)
    try:
        ray.get(actor.__ray_ready__.remote())
    except ray.exceptions.RayActorError:
        with _counting:
            pool.num_actors -= 1
    else:
        pool.pool.append(actor)
