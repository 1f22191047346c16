"""A user's own method with drawn loss terms, which clients trained in one batch and one by one must learn alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from fedhet.client import ClientSide, Loss, Payload, Step, Term
from fedhet.methods.sharing import EVERYTHING
from fedhet.models.representation import RandomStream, Representation
from fedhet.server import FederatedStrategy, Options, State, Traits, method, option
from tests.relations.outcomes import run
from tests.relations.programs import COLUMNS, Program
from tests.relations.relations import Draw, complete, models_agree, relation

READS = ("outputs", "labels", "captured", "received", "rows", "represented", "parameters")
ROWS = ("none", "each", "fixed", "varying", "odd steps", "late")


@dataclass(frozen=True)
class Keys(Options):
    """Keys of a loss term: what it `reads`, which `rows` it draws, by a generator in which `state`, and its flags."""

    reads: Literal["outputs", "labels", "captured", "received", "rows", "represented", "parameters"] = option(
        "outputs", ""
    )
    rows: Literal["none", "each", "fixed", "varying", "odd steps", "late"] = option("none", "")
    count: int = option(7, "")
    public: bool = option(False, "")
    state: Literal["variable", "argument", "attribute"] = option("variable", "")
    records: bool = option(False, "")


class Client(ClientSide[Keys]):
    """Adds one term, with a weight and rows that differ between clients."""

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        """Return the term that the keys describe."""
        client, keys = self.client, self.options
        generator = client.generator("own rows")
        draws: dict[str, Callable[[int, int], Mapping[str, Any] | None]] = {
            "variable": lambda number, examples: rows(number, examples, generator, keys),
            "argument": partial(rows, generator=generator, keys=keys),
            "attribute": Rows(generator, keys),
        }
        phi = client.representation
        constants: dict[str, Any] = {
            "weight": 0.01 * (1 + client.seed("own weight") % 3),
            "reads": keys.reads,
            "records": keys.records,
            "head": client.head,
            "phi": phi,
            "stream": RandomStream(client.seed("own dropout")),
            "received": {name: tensor.detach().clone() for name, tensor in client.model.named_parameters()},
        }
        draw = None if keys.rows == "none" else draws[keys.state]
        return (Term(apart, draw=draw, captures={"phi": phi}, weighted=True, public=keys.public, **constants),)


@dataclass
class Rows:
    """What a term draws, with its generator as an attribute."""

    generator: torch.Generator
    keys: Keys

    def __call__(self, number: int, examples: int) -> Mapping[str, Any] | None:
        """Return rows for a step."""
        return rows(number, examples, self.generator, self.keys)


def rows(number: int, examples: int, generator: torch.Generator, keys: Keys) -> Mapping[str, Any] | None:
    """Return what a term draws in a step, or None."""
    if (keys.rows == "odd steps" and number % 2 == 0) or (keys.rows == "late" and number < 2):
        return None
    count = {"each": examples, "varying": keys.count + number % 2}.get(keys.rows, keys.count)
    return {"drawn": torch.randn(count, len(COLUMNS), generator=generator)}


def apart(
    step: Step,
    weight: float,
    reads: str,
    records: bool,
    head: str,
    phi: Representation,
    stream: RandomStream,
    received: Mapping[str, Tensor],
    drawn: Tensor | None = None,
) -> Any:
    """Return a loss by `reads`, and that of `drawn` rows if there are any."""
    outputs = step.outputs
    losses = {
        "outputs": lambda: step.mean(outputs.square().flatten(1).mean(1)),
        "labels": lambda: step.loss(2 * outputs),
        "captured": lambda: step.mean(step.captured["phi"].square()),
        "received": lambda: step.divergence(outputs, step.by(received)),
        "parameters": lambda: sum((step.parameters[name] - array).square().sum() for name, array in received.items()),
    }
    if drawn is not None and reads == "represented":
        loss = step.mean(step.represent(drawn.to(outputs.dtype), phi, stream).square())
    elif drawn is not None:
        loss = step.mean(drawn.to(outputs.dtype)[:, 0].square()) * step.parameters[f"{head}.weight"].square().sum()
    else:
        loss = torch.zeros((), dtype=outputs.dtype)
    if reads in losses:
        loss = loss + losses[reads]()
    return (weight * loss, {"apart": loss}) if records else weight * loss


@method("own", Traits(networks="equal", shares=EVERYTHING, common_init=True), Keys, client=Client)
class Own(FederatedStrategy[Keys, State]):
    """FedAvg with such a term."""


OF_ROWS = ("rows", "represented", "parameters")
"""What a public term may read: drawn rows and parameters."""


@relation(
    method="fedavg",
    network=("mlp", "dropout", "start", "convolutional", "recurrent"),
    form="tensors",
    clients=(3, 4),
    sizes="unequal",
)
def own_loss_terms_in_batches(draw: Draw, program: Program, folder: Path) -> None:
    """Clients with a user's loss term get in a batch what they get one by one."""
    public = draw(st.booleans())
    settings = {
        "own.reads": draw(st.sampled_from(OF_ROWS if public else READS)),
        "own.rows": draw(st.sampled_from(("fixed", *ROWS))),
        "own.count": draw(st.sampled_from((6, 7, 7, 30))),  # 7 is the batch size
        "own.public": public,
        "own.state": draw(st.sampled_from(("variable", "argument", "attribute"))),
        "own.records": draw(st.booleans()),
        "local-epochs": 3,
        **draw(st.sampled_from(({}, {"batch-size": 30}))),
    }
    either = replace(program, method=f"{__name__}:Own", settings={**program.settings, **settings})
    first = complete(either.having(client_batching="off"), folder)
    models_agree(first, run(either.having(client_batching=str(draw(st.sampled_from((2, 10))))), folder))
