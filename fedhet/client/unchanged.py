"""The check that a client's task, network and examples stay as they are at the beginning of a run."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from fedhet.client.job import Job
from fedhet.client.model_check import PARTS
from fedhet.data import Examples
from fedhet.data.examples import digest
from fedhet.data.reading import LazyInputs
from fedhet.errors import Refused
from fedhet.messages.protocol import HANDSHAKE
from fedhet.utils.randomness import seeded, torch_generator

ROWS = 16
"""Number of examples that are read on demand, from a part's first to its last, whose inputs must not change."""


def check_unchanged(job: Job, owners: dict[tuple[str, str], str] | None = None) -> None:
    """Check that a client's task, network and examples are as in the run's first handshake; raise `Refused` otherwise.

    `job` has the client. The first handshake saves digests (hashes) in the client's files, which are never sent. Later
    messages check the examples only, since another process may have split the client's data differently. `owners` has
    the first client with given training examples (run and digest); another one with the same is told so.
    """
    store, request = job.client.store, job.client.request
    asked = request.question == HANDSHAKE
    with seeded(job.client.config.seed, "beginning", job.client.name):
        now = _digests_of_examples(job) | (_digests(job) if asked else {})
    then = store.first("digests", now, anew=asked and not request.begun)
    then = then if asked else {name: value for name, value in then.items() if name in PARTS.values()}
    names = [name for name, value in then.items() if value != now.get(name)]
    # A user's model is the client's network, before the method adds to it.
    if changed := dict.fromkeys("network" if name == "model" else name for name in names):
        remedy = "restore the same task, model and data, or start another run"
        if not asked:
            remedy = "draw from the global generators of torch, NumPy and Python, which are seeded for each client"
            remedy += ", and save what your program draws or trains when it is imported, as each worker process does"
        raise Refused(f"the client's {', '.join(changed)} changed since this run began: {remedy}")
    if owners is not None and job.client.own_data and isinstance(job.client.data.train.inputs, Tensor):
        first = owners.setdefault((request.run, now[PARTS["train"]]), job.client.name)
        if first != job.client.name:
            job.say(f"its training examples are those of client {first}: give each client its own, by partition_id")


def _digests_of_examples(job: Job) -> dict[str, str]:
    digests = dict[str, str]()
    for name, words in PARTS.items():
        part: Examples | None = getattr(job.client.data, name)
        if part is not None:
            rows = [part.inputs] if isinstance(part.inputs, Tensor) else []
            if isinstance(part.inputs, LazyInputs) and len(part):
                spread = torch.linspace(0, len(part) - 1, min(ROWS, len(part))).long()
                rows = _repeatable(job, f"reading its {words}", partial(part.inputs.__getitem__, spread))
            digests[words] = digest(len(part), part.labels, *rows)
    return digests


def _digests(job: Job) -> dict[str, str]:
    client = job.client
    config = job.client.config
    augmented = list[Tensor]()
    if client.augment and client.own_data:
        batch = client.data.train.inputs[:ROWS]
        augmented = _repeatable(job, "its augment function", lambda: client.prepare(batch, torch_generator(0)))
    arrays = client.model.state_dict(keep_vars=True).items()
    if client.part:  # its sizes may change, and arrays may be missing
        network = str([(name, type(module)) for name, module in client.model.named_modules()])
    else:
        network = f"{client.model} {[(name, array.dtype, array.shape, array.requires_grad) for name, array in arrays]}"
    digests = {
        "task": digest(_task(job)),
        "network": digest(network, config.head),
        "model": digest(client.described) if client.described else "",
        "augmentation": digest(client.own_data and client.augment is not None, *augmented),
        "settings": digest(config.local_epochs, config.learning_rate, config.batch_size, client.data.batch_size),
    }
    if (public := client.data.public) is not None and job.side.traits.public != "none":
        digests["public dataset"] = public.digest
    return digests


def _repeatable(job: Job, doing: str, read: Callable[[], Tensor]) -> list[Tensor]:
    values = []
    for _ in range(2):
        with seeded(0, "repeats"):
            values.append(read())
    first, second = values
    if torch.equal(first.nan_to_num(), second.nan_to_num()):
        return values[:1]
    job.say(
        f"{doing} gives other values each time, although torch, NumPy and Python are seeded: it has a state or a "
        "generator of its own, so results depend on the number of workers; draw from the global generators instead"
    )
    return []


def _task(job: Job) -> str:
    """Return a text that identifies a client's task; a user's loss is identified by its value for fixed outputs."""
    client = job.client
    task = job.client.task
    if task.own_loss is not None:
        like = client.read(client.data.train.inputs[:ROWS])
        labels = client.data.train.labels[:ROWS]
        outputs = torch.rand(like.shape, generator=torch.Generator().manual_seed(0)).to(like)
        with suppress(Exception):  # a loss may take no such outputs
            return f"{task} {task.evaluate(outputs, torch.zeros_like(labels)).loss:.4g}"
    return str(task)
