"""A node's memory limit, and the largest size (width, depth or rank) of a client's network that fits in it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fedhet import training
from fedhet.client.clients import Clients
from fedhet.client.job import Job
from fedhet.client.policy import SIZE, Policy, number_in
from fedhet.config.client_setup import ClientInfo
from fedhet.errors import ConfigError, Refused
from fedhet.flower import ConfigRecord, Context
from fedhet.messages import Payload, Request
from fedhet.methods import registry
from fedhet.utils.machine import data_in_use, out_of_memory, peak_memory


@contextmanager
def memory_limited(context: Context) -> Iterator[None]:
    """Limit this process's memory (`RLIMIT_DATA`) to the node's `memory-limit` within the context, on Linux only.

    Raises `Refused` if the process needs more memory.
    """
    if "memory-limit" not in context.node_config:
        yield
        return
    import resource  # which not every system has

    limit, most = context.node_config["memory-limit"], memory_limit(context.node_config)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    except Exception as error:  # of whichever library runs out of memory
        if not out_of_memory(error):
            raise
        raise Refused(
            f"the client needs more memory than its node allows (memory-limit = {limit} GB): raise the limit or choose "
            "a smaller model"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def memory_limit(node_config: Mapping[str, Any]) -> int:
    """Return `memory-limit` in bytes; raises a ConfigError if it is not a valid number of GB."""
    return int(1e9 * number_in(node_config, "memory-limit", 0, at_least=1e-6, at_most=1e9))


def with_measured_size(
    clients: Clients, info: ClientInfo, request: Request, policy: Policy, payload: Payload, context: Context
) -> ClientInfo:
    """Return `info` with the largest size that fits in the node's memory limit, if it is `auto` in the node config.

    A size is the width, depth or rank of the part of the network that a client trains. It is measured once in
    a run, and stored in Flower's context. Raises `Refused` if the smallest size is too large.
    """
    name = info.config.options.size_name
    if info.node_config.get(name) != "auto" or registry.client_side(info.config.method_name).parts is None:
        return info
    if "memory-limit" not in info.node_config:
        raise ConfigError(
            f"the node's {name} is 'auto', the largest that fits in its memory-limit, but the node has no "
            f"memory-limit: set memory-limit (GB), or set {name} to a number"
        )
    most, sizes, largest = memory_limit(info.node_config), info.config.options.sizes, None
    for size in reversed(sizes):  # from the smallest, so that a trial leaves little memory behind for the next
        sized = replace(info, node_config={**info.node_config, name: size})
        try:
            with clients.job(sized, request, policy, payload) as job:
                assert job.client.part is not None
                groups, itemsize = job.client.part.groups, next(iter(job.client.tensors.values())).itemsize
                whole = itemsize * sum(map(math.prod, groups.shapes(groups.widths).values()))
                room = most - data_in_use() - 3 * whole  # the whole network is built before the part is cut out
                fits = room > 0 and step_memory(job) <= room
        except Exception as error:  # of whichever library runs out of memory
            if not out_of_memory(error):
                raise
            fits = False
        clients.forget_networks()
        if not fits:
            break
        largest = sized
    if largest is None:
        raise Refused(
            f"training with the smallest {name}, {sizes[-1]:g}, needs more memory than the client's node allows "
            f"(memory-limit = {most / 1e9:g} GB): raise the limit"
        )
    context.state[SIZE] = ConfigRecord({name: largest.node_config[name]})
    return largest


def step_memory(job: Job) -> int:
    """Return the peak memory in bytes of one training step and one evaluation; the step changes the weights."""
    client = job.client

    def step() -> None:
        for phase in job.side.phases(job.payload)[:1]:
            one, generator = replace(phase, epochs=0, steps=1), client.generator("size")
            training.train(client.model, one, client.data.train, client.task, client.prepare, generator=generator)
        client.read(client.data.train.inputs[: training.BATCH])

    return peak_memory(step)
