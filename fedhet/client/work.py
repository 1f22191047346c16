"""A client's work for one message: restore its state, load received arrays, evaluate, train, evaluate, save its state.

The work is a generator that yields each training phase and evaluation before it is computed, so that several clients
can be trained in one batch. Other clients may work at a yield, so global random generators are seeded again after it.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedhet.client.client import AnySide, Client
from fedhet.client.policy import Policy
from fedhet.client.secret import NodeSecret
from fedhet.client.state import EXAMPLE, PREDICTOR, ROUND, WIDTH
from fedhet.data import Examples, resident
from fedhet.errors import ConfigError, ModelError, Refused
from fedhet.messages import Payload, to_arrays
from fedhet.messages.protocol import STARTS, WHOLE, Measured, names_text
from fedhet.models.copies import load_state
from fedhet.models.representation import isolated
from fedhet.setup import client_setup
from fedhet.tasks import LARGEST
from fedhet.training import Computation, Evaluation, Phase, Training
from fedhet.utils.inputs import for_each, parts_of
from fedhet.utils.randomness import SecretStream, derive_seed, seed_everything, torch_generator
from fedhet.utils.text import log

T = TypeVar("T")

ClientWork = Generator[Computation, None, T]
"""A generator that yields each training phase and evaluation before it is computed, and returns the work's result."""


class Loop(Protocol):
    """A user's own training and evaluation of a client's network, which replace fedhet's training loop."""

    def train(self, job: "Job") -> None:
        """Train the network of `job.client` in place, for the message `job`."""

    def measure(self, job: "Job", when: str) -> None:
        """Evaluate `job.client`'s network and set `job.measured[when]`: `received` before, `trained` after training."""


@dataclass
class Job:
    """A message, and the client that answers it by the method's client side (`side`).

    Attributes:
        side: the method's client side, with the client as its attribute `client`.
        payload: the arrays and values that the server sent.
        policy: the rules of the client's node.
        build: function that builds the whole network with the initial weights of a client (its name), or `all` clients.
        redraw: function that loads such initial weights into the client's network.
        loop: the user's own training and evaluation; None for fedhet's training loop.
        measured: the client's evaluations so far, by name, such as `received` or `common-trained`.
        lost: whether the state that the server expects is missing.
        further: metrics that the user's own train function returned, by name.
        evaluated: metrics that the user's own evaluate function returned, by name.
        scored: the fine-tuned personal model's tensors at the run's last evaluation; empty without fine-tuning.
        examples: number of training examples (`test_examples`: test examples) by the user's own functions, or None.
        weight: the client's weight from the user's own train function; 0 for the number of training examples.
        records: records by name that the user's own train function adds to its reply, for hooks of a user's strategy.
        remarks: messages for the server's log.
        account: the node's secret, whose privacy account training is charged to; None without `dp-noise`.
        batches: the random generator for the order of examples and augmentation.
        order: the secret stream for the order of examples, if the node has a secret; else None.
    """

    side: AnySide
    payload: Payload
    policy: Policy
    build: Callable[[str], nn.Module]
    redraw: Callable[[str], None]
    loop: Loop | None = None
    measured: dict[str, Measured] = field(default_factory=dict)
    lost: bool = False
    further: dict[str, float] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    scored: dict[str, Tensor] = field(default_factory=dict)
    examples: int | None = None
    test_examples: int | None = None
    weight: float = 0.0
    records: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    account: NodeSecret | None = None
    batches: torch.Generator = field(init=False)
    order: SecretStream | None = field(init=False)

    def __post_init__(self) -> None:
        self.client: Client = self.side.client
        self.batches = self.client.generator("batches")
        self.order = self.client.order("batches")

    def say(self, remark: str) -> None:
        """Add a remark for the server's log, unless it was added before."""
        if remark and remark not in self.remarks:
            self.remarks.append(remark)


def train(job: Job) -> ClientWork[Payload]:
    """Answer a training message `job`: do the client's work for one round, and return the reply's payload."""
    side, client = job.side, job.client
    restore(job)
    begin(job)
    if client.request.evaluate:
        yield from measure(job, "received")
    every, round = client.config.save_every, client.request.round
    saved = side.traits.scored if every and round % every == 0 else ""
    if saved == "received":
        _write_model(job, round)
    seed_everything(client.seed("dropout"))
    phases = [] if job.loop else side.phases(job.payload)
    if client.privacy and not phases:
        raise Refused(
            f"this node trains with differential privacy (dp-noise), but {client.config.method_name} does not train by "
            "fedhet's training loop: choose another method, or an app without fedhet.wrap"
        )
    if job.loop:
        job.loop.train(job)
    yield from run_phases(job, phases, client.seed("dropout"))
    seed_everything(client.seed("end"))
    reply = side.end(job.payload)
    if client.privacy:
        job.further["epsilon"] = client.privacy.epsilon
    if client.request.evaluate:
        yield from measure(job, "trained")
    keep(job)
    if saved == "trained":
        _write_model(job, round)
    return reply


def evaluate(job: Job) -> ClientWork[Payload]:
    """Evaluate the received and personal model, save the latter at the run's end, and return an empty payload."""
    side, client = job.side, job.client
    restore(job)
    # Until a client has trained, the received model is its own.
    personal = side.traits.keeps == "model"
    trained = personal and client.request.expected >= 0 and not job.lost
    weights = {name: tensor.clone() for name, tensor in client.tensors.items()} if trained else {}
    begin(job)
    yield from measure(job, "received")
    if personal:
        if trained:
            load_state(client.model, weights)
        yield from measure(job, "trained")
    if client.request.final:
        _write_model(job)
    return Payload()


def join(job: Job) -> ClientWork[Payload]:
    """Train and evaluate a client that joins after the last round, from received weights and from random weights.

    Both trainings re-estimate BatchNorm's statistics, then use the same batches for `unseen-epochs` epochs. The network
    is evaluated before the first epoch and after each epoch; `job.measured` gets the results, and the payload is empty.
    """
    client, config = job.client, job.client.config
    if not job.policy.tells_metrics or client.privacy:
        return Payload()
    rates = {"received": config.unseen_learning_rate or config.learning_rate, "scratch": config.learning_rate}
    for start in reversed(STARTS):  # the received network may have other widths
        optimisation = replace(client.optimisation(), learning_rate=rates[start], schedule=None)
        if start == "scratch":
            job.redraw(client.name)
        else:
            restore(job)
            job.side.begin(job.payload)
        client.reestimate()
        job.batches = torch_generator(client.root, "newcomer", client.name)
        job.order = client.order("newcomer")
        for epoch in range(config.unseen_epochs + 1):
            if epoch:
                seed = derive_seed(client.root, "newcomer dropout", client.name, epoch)
                yield from run_phases(job, [Phase(1, optimisation, continues=epoch > 1)], seed)
            yield from _score(job, f"{start}-{epoch}", client.model)
    return Payload()


def first(job: Job) -> Payload:
    """Return common initial weights as a payload: of the whole network, even if clients train parts of it."""
    if job.client.part is None:
        job.redraw("all")
        return job.side.share()
    whole = job.build("all").state_dict()
    shared = {key: whole[name] for name, key in job.side.shared_names().items()}
    return Payload({WHOLE: to_arrays(shared)})


def restore(job: Job) -> None:
    """Restore the network and the method's tensors (`client.memory`) from the saved state that the server expects."""
    client, side, expected = job.client, job.side, job.client.request.expected
    saved: dict[str, Tensor] = {}
    if expected >= 0 and (side.remembers or _lasting(side)):
        saved = client.store.load(expected) or {}
        job.lost = not saved
        if job.lost:
            log.warning("client %s lost its state of round %d and starts afresh", client.name, expected)
    sent = job.payload.arrays.get("model", {})
    known = {name for name, key in side.shared_names().items() if key in sent}
    known |= {name.removeprefix("model/") for name in saved}
    if not known.issuperset(client.names):
        job.redraw(client_setup.owner_of_weights(client.config, client.name))
    tensors = client.tensors if saved else {}
    with torch.no_grad():
        for name, tensor in saved.items():
            group, _, key = name.partition("/")
            if group == "model":
                tensors[key].copy_(tensor)
            else:
                client.memory[key] = tensor.to(client.device)


def begin(job: Job) -> None:
    """Load the received arrays; if `batch-norm = re-estimate`, re-estimate BatchNorm's running statistics for them."""
    job.side.begin(job.payload)
    if job.client.config.batch_norm == "re-estimate" and "model" in job.payload.arrays:
        if job.loop and "statistic" in job.side.kinds.values():
            raise ConfigError("fedhet.wrap does not support batch-norm = re-estimate: set batch-norm = local")
        job.client.reestimate()


def run_phases(job: Job, phases: Iterable[Phase], seed: int) -> ClientWork[None]:
    """Train the client's network in the given `phases`, in order; `seed` seeds dropout."""
    client, phases = job.client, [phase for phase in phases if phase.epochs or phase.steps]
    for number, phase in enumerate(phases):
        computation = Training(
            model=client.model,
            phase=phase,
            examples=client.data.train,
            task=client.task,
            prepare=client.prepare,
            generator=job.batches,
            order=job.order,
            seed=derive_seed(seed, number) if number else seed,
            before=client.trained,
            privacy=None if phase.public else client.privacy,
            alone=any(each.continues for each in phases)
            or (client.augment is not None and phase.examples is None)
            or phase.augmented,
        )
        yield computation
        client.trained = computation.result()  # trains now, unless a batch of clients was trained


def keep(job: Job) -> None:
    """Save the tensors that the job's client keeps between rounds."""
    client, request = job.client, job.client.request
    kept = {f"model/{name}": tensor for name, tensor in _lasting(job.side).items()}
    kept |= {f"memory/{name}": tensor for name, tensor in client.memory.items()}
    if kept:
        client.store.save(request.round, kept, after=request.expected, closing=request.closing)


def _lasting(side: AnySide) -> dict[str, Tensor]:
    shared = side.shared_names() if side.traits.keeps == "rest" else {}
    if side.traits.keeps == "nothing" or len(shared) == len(side.client.names):
        return {}
    return {name: tensor for name, tensor in side.client.tensors.items() if name not in shared}


def _shares_all(side: AnySide) -> bool:
    return side.traits.whole and len(side.shared_names()) == len(side.client.names)


def _write_model(job: Job, round: int = 0) -> None:
    """Save the client's personal model after `round` (0: the last), unless it has none or only the global model."""
    side, client = job.side, job.client
    estimated = client.config.batch_norm != "aggregate" and "statistic" in side.kinds.values()
    differs = side.traits.keeps == "model" or not _shares_all(side) or client.part is not None
    if side.traits.trains_network and (differs or estimated):
        tensors = job.scored or side.personal()
        part = client.part if tensors.keys() == client.tensors.keys() else None
        beside = {f"{PREDICTOR}{key}": tensor for key, tensor in side.beside().items()}
        if beside or part:
            inputs = client.transform(client.data.train.inputs[:2])
            beside |= parts_of(for_each(inputs, torch.ones_like), EXAMPLE)  # of the inputs, only the shape
            width = torch.tensor(part.width if part else 1.0, dtype=torch.float64)
            beside |= {WIDTH: width, ROUND: torch.tensor(client.request.round)}
        client.store.write_model(tensors | beside, round, names_text(client.data.names))


def measure(job: Job, when: str) -> ClientWork[None]:
    """Evaluate the network and store the result in `job.measured[when]`, unless the node's policy forbids metrics.

    `when` is `received` before training, `trained` after it. Evaluation does not influence training: its random numbers
    have their own seed, the same in every round, and buffers that a network changes in evaluation mode are restored.
    """
    client = job.client
    # Under `dp-noise`, only common test examples are evaluated, by a network that no private example has changed since.
    if not job.policy.tells_metrics or (client.privacy and (job.loop or job.side.refine(when))):
        return
    seed_everything(derive_seed(client.root, "evaluation", client.name))
    with isolated(client.model):
        if job.loop:
            return job.loop.measure(job, when)
        if (outputs := job.side.evaluate(when)) is None:
            return
        if not (phases := job.side.refine(when)):
            return (yield from _score(job, when, outputs))
        before = {name: tensor.clone() for name, tensor in client.tensors.items()}
        batches, order, trained = job.batches, job.order, client.trained
        job.batches = client.generator("refinement", when)
        job.order = client.order("refinement", when)
        yield from run_phases(job, phases, client.seed("refinement dropout", when))
        yield from _score(job, when, outputs)
        if when == job.side.traits.scored:
            job.scored = {name: tensor.clone() for name, tensor in job.side.personal().items()}
        job.batches = batches
        job.order = order
        client.trained = trained
        load_state(client.model, before)


def _score(job: Job, when: str, outputs: Callable[[Tensor], Tensor]) -> ClientWork[None]:
    client = job.client
    sets = {"": client.data.test} if client.config.test_on != "global" and not client.privacy else {}
    if client.config.test_on != "local" and (common := _common(job, when)) is not None:
        sets["common-"] = common
    if client.config.validation and client.data.validation is not None and not client.privacy:
        sets["validation-"] = client.data.validation
    for prefix, examples in sets.items():
        if not enough(job, len(examples), f"{prefix}{when}"):
            continue
        seed = derive_seed(client.root, "evaluation", client.name)
        computation = Evaluation(outputs, examples, client.task, client.transform, client.model, seed)
        yield computation
        score = computation.result()
        assert score is not None  # there are examples
        if not abs(score.loss) <= LARGEST:
            rate = client.config.learning_rate
            raise ModelError(
                f"the loss of the {when} model is {score.loss:.3g}: the network returns values that are not finite for "
                f"some example, or training diverged; a lower learning-rate than {rate:g} may help"
            )
        behind, ranked = score.examples_behind, client.task.metric == "auc"
        job.measured[f"{prefix}{when}"] = measured = job.policy.measured(
            score.metric, score.loss, examples=len(examples), ranked=ranked, behind=behind
        )
        measured.weight = job.policy.loss_weight(client.task, examples.labels)


def enough(job: Job, count: int, metric: str) -> bool:
    """Return whether the node's policy allows a metric of `count` examples; if not, log a warning naming `metric`."""
    if 0 < count < job.policy.least:
        log.warning(
            "client %s has %d examples for the metric %s, and its node requires at least %d (min-examples): "
            "the metric is not sent",
            *(job.client.name, count, metric, job.policy.least),
        )
    return count >= max(job.policy.least, 1)


def _common(job: Job, when: str) -> Examples | None:
    """Return the test set that all clients share, or None if the model `when` is not to be evaluated on it.

    `when` is `received` (before training) or `trained` (after it). Only the model by which the method is scored is
    evaluated on this test set, by the server if it is the global model and the data are not the user's own.
    """
    client, traits = job.client, job.side.traits
    if when in ("received", "trained") and when != traits.scored:
        return None
    if client.own_data:
        return client.data.common if client.privacy is None else None
    if when == "received" and _shares_all(job.side):
        return None
    return resident(client_setup.dataset_of(client.config).test, client.device)
