"""Digests of what a client's numbers depend on, which a run that goes on compares with those of its beginning.

They lie with the client's state and are never sent: the server hears only that something has changed.
"""

from contextlib import suppress

import torch
from torch import Tensor, nn

from fedhet.client.jobs import Job
from fedhet.client.policy import Refused
from fedhet.data import Examples
from fedhet.data.examples import digest
from fedhet.data.reading import LazyInputs
from fedhet.randomness import seeded

ROWS = 4
"""The first examples of each part, whose inputs are compared."""

PARTS = {
    "train": "training examples",
    "test": "test examples",
    "validation": "validation examples",
    "common": "common test set",
}


def check_unchanged(job: Job) -> None:
    """Check that a client has the task, the network and the examples with which the run began, or note them.

    Raises:
        Refused: it has others, which would give the rounds before and after the change one name.
    """
    store = job.client.store
    with seeded(job.client.config.seed, "beginning", job.client.name):
        now = depends_on(job)
    if not job.client.request.begun or not (then := store.beginning()):
        store.note_beginning(now)
    elif changed := [name for name, value in now.items() if then.get(name, value) != value]:
        raise Refused(
            f"its {', '.join(changed)} changed since this run began: bring back the same task, model and data, or "
            "start another run"
        )


def depends_on(job: Job) -> dict[str, str]:
    """Return digests of the task, the network's structure and each part of the examples, by name."""
    client, inputs = job.client, job.client.data.train.inputs
    task, found = str(client.task), dict[str, str]()
    if client.task.own_loss is not None:
        outputs, labels = client.read(inputs[:ROWS]), client.data.train.labels[:ROWS]
        classes = client.task.outputs.scores(outputs).shape[-1] if client.task.outputs.meaning == "classes" else 2
        made_up = torch.rand(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
        made_up_labels = (torch.arange(labels.numel()) % classes).reshape(labels.shape).to(labels)
        with suppress(Exception):  # a loss may take no such outputs
            task += f" {client.task.evaluate(made_up, made_up_labels).loss:.4g}"
    found["task"] = digest(task)
    found["network"] = digest(_structure(client.model, sized=client.size is not None), client.config.head)
    for name, words in PARTS.items():
        part: Examples | None = getattr(client.data, name)
        if part is not None:
            read = len(part) and job.loop is None  # a user's own functions read their examples themselves
            found[words] = digest(len(part), part.labels, *(_first(part.inputs) if read else ()))
    return found


def _first(inputs: Tensor | LazyInputs) -> list[Tensor]:
    """Return the first inputs; none if they are other ones each time, as of random transforms."""
    first = inputs[:ROWS]
    return [first] if torch.equal(first, inputs[:ROWS]) else []


def _structure(model: nn.Module, *, sized: bool) -> str:
    """Return modules and arrays of a network in words; if clients have parts of it, the modules without widths."""
    lines = [f"{name} {type(m).__name__} {'' if sized else m.extra_repr()}" for name, m in model.named_modules()]
    arrays = {} if sized else model.state_dict(keep_vars=True)
    lines += [f"{name} {each.dtype} {list(each.shape)} {each.requires_grad}" for name, each in arrays.items()]
    return "\n".join(lines)
