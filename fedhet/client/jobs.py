"""A client's work for a message: it trains, is evaluated, or joins after the last round.

A job has a network and random streams of its own.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fedhet import learning, population
from fedhet.client.client import Client
from fedhet.client.policy import Policy
from fedhet.client.side import AnySide
from fedhet.data import Examples, resident
from fedhet.errors import ModelError
from fedhet.learning import Phase
from fedhet.machine import peak_memory
from fedhet.randomness import derive_seed, seed_everything, seeded, torch_generator
from fedhet.task import LARGEST, Task
from fedhet.text import log
from fedhet.wire import Payload, to_arrays
from fedhet.wire.protocol import STARTS, WHOLE, Measured


class Tried(NamedTuple):
    """The findings about a client's network and data.

    Attributes:
        task: the task of its data.
        outputs: number of outputs of a prediction; for one logit two, the scores of both classes.
        note: a remark on the network for the log; may be empty.
        tokens: number of tokens of an example with predictions; 1 if predictions are not for tokens.
    """

    task: Task
    outputs: int
    note: str = ""
    tokens: int = 1


class Loop(Protocol):
    """A user's own functions that train and evaluate a client's network in the place of fedhet's."""

    def train(self, job: "Job") -> None:
        """Train the network."""

    def measure(self, job: "Job", when: str) -> None:
        """Evaluate the network, of what it `received` or `trained`."""


@dataclass
class Job:
    """One client with a request.

    Attributes:
        side: the method's client side.
        payload: what the server sent.
        policy: the rules of its node.
        build: builds the client's whole configured network, with the initial weights of a client or of `all`.
        redraw: loads such weights into a network.
        tried: the findings about its network and data.
        measured: its evaluations so far.
        lost: whether the state that the server expects is missing.
        loop: the user's own training and evaluation, which replaces fedhet's; None for fedhet's.
        further: the user's own metrics, by name.
        batches: the random stream for the order of examples.
    """

    side: AnySide
    payload: Payload
    policy: Policy
    build: Callable[[str], nn.Module]
    redraw: Callable[[nn.Module, str], None]
    tried: Tried
    measured: dict[str, Measured] = field(default_factory=dict)
    lost: bool = False
    loop: Loop | None = None
    further: dict[str, float] = field(default_factory=dict)
    batches: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        """Derive the stream from client and round."""
        self.batches = self.client.generator("batches")

    @property
    def client(self) -> Client:
        """The client."""
        return self.side.client


def train(job: Job) -> Payload:
    """Load the payload, train the method's phases, save lasting tensors, and return the reply."""
    side, client = job.side, job.client
    restore(job)
    begin(job)
    if client.request.evaluate:
        measure(job, "received")
    phases = [] if job.loop else side.phases(job.payload)
    seed_everything(client.seed("dropout"))
    if job.loop:
        job.loop.train(job)
    _run(job, phases)
    reply = side.end(job.payload)
    if client.request.evaluate:
        measure(job, "trained")
    kept = {f"model/{name}": tensor for name, tensor in _lasting(side).items()}
    kept |= {f"memory/{name}": tensor for name, tensor in client.memory.items()}
    if kept:
        request = client.request
        client.store.save(request.round, kept, after=request.expected, closing=request.closing)
    return reply


def step_memory(job: Job) -> int:
    """Return the bytes that a step of training takes at most, or an evaluation; the step changes the network."""
    client = job.client

    def step() -> None:
        for phase in job.side.phases(job.payload)[:1]:
            one, generator = replace(phase, epochs=0, steps=1), client.generator("size")
            learning.train(client.model, one, client.data.train, client.task, client.prepare, generator=generator)
        client.read(client.data.train.inputs[: learning.BATCH])

    return peak_memory(step)


def evaluate(job: Job) -> Payload:
    """Measure the received model and, if clients keep models, the client's own, which is saved at the end of a run."""
    side, client = job.side, job.client
    restore(job)
    # Until a client has trained, the received model is its own.
    personal = side.traits.keeps == "model"
    trained = personal and client.request.expected >= 0 and not job.lost
    weights = {name: tensor.clone() for name, tensor in client.tensors.items()} if trained else {}
    begin(job)
    measure(job, "received")
    if personal:
        if trained:
            client.model.load_state_dict(weights)
        measure(job, "trained")
    # If only a part of the network is shared, without statistics too, each client has its own, whatever it keeps.
    shares_all = side.traits.whole and len(side.shared_names()) == len(client.names)
    if client.request.final and (personal or not shares_all):
        client.store.write_model(side.personal())
    return side.finish(job.payload) if client.request.final else Payload()


def join(job: Job) -> Payload:
    """Measure what an unseen client achieves by local training, from the received weights and from scratch.

    Its network is trained for `unseen-epochs` with the task's loss, on the same batches from both starts, each with its
    own rate, after BatchNorm's statistics are re-estimated. It is evaluated before the first epoch and after each.
    Nothing is computed at a node that tells no metrics.
    """
    client, config = job.client, job.client.config
    if not job.policy.tells_metrics:
        return Payload()
    rates = {"received": config.unseen_learning_rate or config.learning_rate, "scratch": config.learning_rate}
    for start in reversed(STARTS):  # the received network may have other widths
        optimisation = replace(client.optimisation(), learning_rate=rates[start], schedule=None)
        if start == "scratch":
            initialise(job, client.name)
        else:
            restore(job)
            job.side.begin(job.payload)
        client.reestimate()
        job.batches = torch_generator(client.root, "newcomer", client.name)
        seed_everything(derive_seed(client.root, "newcomer dropout", client.name))
        for epoch in range(config.unseen_epochs + 1):
            if epoch:
                _run(job, [Phase(1, optimisation, continues=epoch > 1)])
            with _evaluating(client):
                _score(job, f"{start}-{epoch}", client.model)
    return Payload()


def first(job: Job) -> Payload:
    """Return the weights from which all clients start; those of the whole network if clients have parts of it."""
    if job.client.size is None:
        initialise(job, "all")
        return job.side.share()
    whole = job.build("all").state_dict()
    shared = {key: whole[name] for name, key in job.side.shared_names().items()}
    return Payload({WHOLE: to_arrays(shared, job.client.config.wire_dtype)})


def restore(job: Job) -> None:
    """Restore the model and the method's memory to the state that the server expects."""
    client, side, expected = job.client, job.side, job.client.request.expected
    saved: dict[str, Tensor] | None = {}
    if expected >= 0 and (side.remembers or _lasting(side)):
        saved = client.store.load(expected)
        if saved is None:
            job.lost = True
            log.warning("client %s lost its state of round %d and starts afresh", client.name, expected)
    saved = saved or {}
    sent = job.payload.arrays.get("model", {})
    known = {name for name, key in side.shared_names().items() if key in sent}
    known |= {name.removeprefix("model/") for name in saved}
    if not known.issuperset(client.names):
        initialise(job, population.owner_of_weights(client.config, client.name))
    tensors = client.tensors if saved else {}
    with torch.no_grad():
        for name, tensor in saved.items():
            group, _, key = name.partition("/")
            if group == "model":
                tensors[key].copy_(tensor)
            else:
                client.memory[key] = tensor.to(client.device)


def _lasting(side: AnySide) -> dict[str, Tensor]:
    """Return the network's tensors that the client keeps between rounds."""
    if side.traits.keeps == "nothing":
        return {}
    shared = side.shared_names() if side.traits.keeps == "rest" else {}
    own = [name for name in side.client.names if name not in shared]
    tensors = side.client.tensors if own else {}
    return {name: tensors[name] for name in own}


def initialise(job: Job, name: str) -> None:
    """Draw initial weights: those of the client of this name, or with `all` those common to all clients."""
    job.redraw(job.client.model, name)


def begin(job: Job) -> None:
    """Load the payload; re-estimate BatchNorm's statistics if that is configured and weights were received."""
    job.side.begin(job.payload)
    if job.client.config.batch_norm == "re-estimate" and "model" in job.payload.arrays:
        job.client.reestimate()


def measure(job: Job, when: str) -> None:
    """Measure metric and loss on the configured parts; training by `refine` is undone afterwards."""
    if not job.policy.tells_metrics:
        return
    with _evaluating(job.client):
        if job.loop:
            job.loop.measure(job, when)
        else:
            _measure(job, when)


def _evaluating(client: Client) -> AbstractContextManager[None]:
    """Return a context in which user code draws the same in every evaluation of a client; training is not affected."""
    return seeded(client.root, "evaluation", client.name)


def _measure(job: Job, when: str) -> None:
    client, outputs = job.client, job.side.evaluate(when)
    if outputs is None:
        return
    phases = job.side.refine(when)
    if not phases:
        _score(job, when, outputs)
        return
    before = {name: tensor.clone() for name, tensor in client.tensors.items()}
    batches, trained = job.batches, client.trained
    job.batches = client.generator("refinement", when)
    seed_everything(client.seed("refinement dropout", when))
    _run(job, phases)
    _score(job, when, outputs)
    job.batches, client.trained = batches, trained
    client.model.load_state_dict(before)


def _score(job: Job, when: str, outputs: Callable[[Tensor], Tensor]) -> None:
    client = job.client
    sets = {"": client.data.test} if client.config.test_on != "global" else {}
    if client.config.test_on != "local" and (common := _common(job, when)) is not None:
        sets["common-"] = common
    if client.config.validation and client.data.validation is not None:
        sets["validation-"] = client.data.validation
    for prefix, examples in sets.items():
        if 0 < len(examples) < job.policy.least:
            log.warning(
                "client %s has %d examples for the metric %s%s, which at least %d must be behind (min-examples)",
                *(client.name, len(examples), prefix, when, job.policy.least),
            )
            continue
        score = learning.evaluate(client.model, examples, client.task, client.transform, scores=outputs)
        if score is not None:
            if not abs(score.loss) <= LARGEST:
                if client.request.round <= 1 and when == "received" and not math.isfinite(score.loss):
                    raise ModelError(
                        f"the loss of what it received is {score.loss:.3g} before anybody has trained: for some test "
                        "example its network returns no finite numbers"
                    )
                raise ModelError(
                    f"the loss of what it {when} is {score.loss:.3g}: training diverged, a lower learning-rate than "
                    f"{client.config.learning_rate:g} may help"
                )
            behind, ranked = score.examples_behind, client.task.metric == "auc"
            job.measured[f"{prefix}{when}"] = job.policy.measured(
                score.metric, score.loss, examples=len(examples), ranked=ranked, behind=behind
            )


def _common(job: Job, when: str) -> Examples | None:
    """Return the common test set if the client evaluates on it; None if the server does.

    The server evaluates a global model, unless BatchNorm's statistics stay with the clients.
    """
    client, traits = job.client, job.side.traits
    if when in ("received", "trained") and when != traits.scored:
        return None
    if client.own_data:
        return client.data.common
    if when == "received" and traits.whole and len(job.side.shared_names()) == len(client.names):
        return None
    return resident(population.dataset_of(client.config).test, client.device)


def _run(job: Job, phases: Iterable[Phase]) -> None:
    client = job.client
    for phase in phases:
        if phase.epochs or phase.steps:
            client.trained = learning.train(
                client.model,
                phase,
                client.data.train,
                client.task,
                client.prepare,
                generator=job.batches,
                before=client.trained,
            )
        if phase.measured and client.request.evaluate:
            measure(job, phase.measured)
