"""Flower's pool of actors on a Ray cluster that loses machines."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from flwr.simulation.ray_transport.ray_actor import BasicActorPool

from fedhet.flower.cluster import cluster_machine, leave_dead_actors_out


class Actor:
    """Stands in for Ray's: does its job at once, if it lives."""

    def __init__(self) -> None:
        self.lives = True
        self.__ray_ready__ = SimpleNamespace(remote=lambda: self)


class Job:
    """Stands in for what Ray returns for a job."""

    def __init__(self, actor: Actor, *_: int) -> None:
        self.actor = actor


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Flower's pool, of two actors."""

    def get(actor: Actor) -> None:
        if not actor.lives:
            raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "get", get)
    for name in ("submit", "add_actor_back_to_pool"):  # put back behind the test
        monkeypatch.setattr(BasicActorPool, name, getattr(BasicActorPool, name))
    leave_dead_actors_out()
    pool: Any = BasicActorPool.__new__(BasicActorPool)
    pool.pool, pool._future_to_actor, pool.num_actors = [Actor(), Actor()], {}, 2
    return pool


def test_a_dead_actor_gets_no_further_message_and_the_others_go_on(pool: Any) -> None:
    first, second = pool.submit(Job, (1, 2, 3, 4)), pool.submit(Job, (1, 2, 3, 4))
    second.actor.lives = False
    pool.add_actor_back_to_pool(second)
    waiting = threading.Thread(target=pool.submit, args=(Job, (1, 2, 3, 4)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "Flower has as many threads as there were actors"
    pool.add_actor_back_to_pool(first)
    waiting.join(10)
    assert [*pool._future_to_actor.values()] == [first.actor]


def test_without_any_actor_a_message_fails(pool: Any) -> None:
    for future in [pool.submit(Job, (1, 2, 3, 4)) for _ in range(2)]:
        future.actor.lives = False
        pool.add_actor_back_to_pool(future)
    with pytest.raises(RuntimeError, match="no machine of the Ray cluster is left"):
        pool.submit(Job, (1, 2, 3, 4))


def test_a_process_of_no_cluster_has_no_machine_of_one() -> None:
    assert cluster_machine() == ""
