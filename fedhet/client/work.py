"""A client's work for a message, in stages: restore the network, load arrays, evaluate, train, evaluate, save.

`train`, `evaluate` and `join` answer the messages of a `Group` of clients. What a client does by itself is a function
of its `Job`; the trainings and evaluations of all clients are values, which the group's backend computes. A client that
fails has no further stages and does not disturb the others. Since other clients work between two stages, global random
generators are seeded where a stage may draw from them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedhet.client.client import AnySide
from fedhet.client.estimators import fit, fit_again
from fedhet.client.job import Group, Job, Streams
from fedhet.client.state import EVALUATE, EXAMPLE, PREDICTOR, ROUND, WIDTH, only_evaluates
from fedhet.data import Examples, resident
from fedhet.errors import ConfigError, FedhetError, ModelError, Refused
from fedhet.messages import Payload, to_arrays
from fedhet.messages.protocol import STARTS, WHOLE, Measured, further, names_text
from fedhet.models.copies import load_state
from fedhet.models.representation import isolated
from fedhet.setup import client_setup
from fedhet.tasks import LARGEST, direction
from fedhet.training import Evaluation, Phase, Scored, Trained, Training
from fedhet.utils.files import BEST, BEST_ROUND, round_folder
from fedhet.utils.inputs import for_each, parts_of
from fedhet.utils.randomness import derive_seed, seed_everything
from fedhet.utils.text import log

Predictor = Callable[[Tensor], Tensor]
"""A network, or another function from transformed inputs to outputs."""


def train(group: Group) -> None:
    """Answer training messages: do the clients' work for one round."""
    group.run(restore)
    group.run(begin)
    measure(group, "received")
    group.run(partial(_write_model, when="received"))
    group.run(partial(_write_best, when="received"))
    run_phases(group, _phases)
    group.run(_end)
    measure(group, "trained")
    group.run(keep)
    group.run(partial(_write_model, when="trained"))
    group.run(partial(_write_best, when="trained"))


def evaluate(group: Group) -> None:
    """Answer evaluation messages: evaluate received and personal models, and save the latter at the run's end."""
    group.run(restore)
    weights = group.run(_personal_weights)
    group.run(begin)
    measure(group, "received")
    group.run(partial(_write_best, when="received"))
    personal = [job for job in weights if job.side.traits.keeps == "model"]
    group.run(lambda job: load_state(job.client.model, weights[job]), [job for job in personal if weights[job]])
    measure(group, "trained", personal)
    group.run(partial(_write_best, when="trained"), personal)
    group.run(_write_model, [job for job in group.jobs if job.client.request.final])


def join(group: Group, jobs: Sequence[Job]) -> None:
    """Train and evaluate clients that join after the last round, from received weights and from random weights.

    Both trainings re-estimate BatchNorm's statistics, then use the same batches for `unseen-epochs` epochs. The network
    is evaluated before the first epoch and after each epoch; `measured` of the reply gets the results.
    """
    jobs = [job for job in jobs if job.policy.tells_metrics and not job.client.privacy]
    group.run(_check_evaluations, jobs)
    epochs = max((job.client.config.unseen_epochs for job in jobs), default=-1)
    # The received network may have other widths, so it comes last.
    for start in reversed(STARTS):
        group.run(partial(_begin_newcomer, start=start), jobs)
        for epoch in range(epochs + 1):
            if epoch:
                run_phases(group, partial(_newcomer_phases, start=start, epoch=epoch), jobs)
            score(group, f"{start}-{epoch}", {job: job.client.model for job in jobs})


def first(job: Job) -> Payload:
    """Return common initial weights as a payload: of the whole network, even if clients train parts of it."""
    if job.client.part is None:
        job.redraw("all")
        return job.side.share()
    whole = job.build("all").state_dict()
    shared = {key: whole[name] for name, key in job.side.shared_names().items()}
    return Payload({WHOLE: to_arrays(shared)})


# ---- a client's stages


def restore(job: Job) -> None:
    """Restore the network and the method's tensors (`client.memory`) from the saved state that the server expects."""
    client = job.client
    side = job.side
    expected = client.request.expected
    saved: dict[str, Tensor] = {}
    fits = side.trains_network and client.estimator
    if expected >= 0 and (side.remembers or fits or _lasting(side)):
        saved = client.store.load(expected) or {}
        if not saved:
            job.reply.report.lost_state = expected
            log.warning("client %s lost its state of round %d and starts afresh", client.name, expected)
    received = job.payload.arrays.get("model", {})
    names = {name for name, key in side.shared_names().items() if key in received}
    names |= {name.removeprefix("model/") for name in saved}
    if not names.issuperset(client.names):
        job.redraw(client_setup.owner_of_weights(client.config, client.name))
    tensors = client.tensors if saved else {}
    with torch.no_grad():
        for name, tensor in saved.items():
            group, _, key = name.partition("/")
            if group == "model":
                tensors[key].copy_(tensor)
            else:
                client.memory[key] = tensor.to(client.device)
    if client.estimator:
        fit_again(client)


def begin(job: Job) -> None:
    """Load the received arrays; if `batch-norm = re-estimate`, re-estimate BatchNorm's running statistics for them.

    Without rounds, raise a ConfigError if not the network of `start-from` alone would be evaluated.
    """
    client = job.client
    loaded = not job.side.traits.whole and only_evaluates(client.config)
    before = {name: tensor.clone() for name, tensor in client.tensors.items()} if loaded else {}
    job.seed()
    job.side.begin(job.payload)
    replaced = any(not torch.equal(client.tensors[name], tensor) for name, tensor in before.items())
    scored = job.side.traits.scored
    if replaced or (loaded and (job.side.refine(scored) or job.side.evaluate(scored) is not client.model)):
        method = client.config.method_name
        raise ConfigError(f"rounds = 0 evaluates the network of start-from, but {method} predicts by more: {EVALUATE}")
    if client.config.batch_norm == "re-estimate" and "model" in job.payload.arrays:
        client.reestimate()


def _personal_weights(job: Job) -> dict[str, Tensor]:
    """Return the personal model's tensors; empty if there is none, or if the received model is the client's own."""
    client = job.client
    # Until a client has trained, the received model is its own.
    trained = job.side.traits.keeps == "model" and client.request.expected >= 0 and job.reply.report.lost_state < 0
    return {name: tensor.clone() for name, tensor in client.tensors.items()} if trained else {}


def _phases(job: Job) -> Sequence[Phase]:
    client = job.client
    seed_everything(client.seed("dropout"))
    phases = job.side.phases(job.payload)
    if client.privacy and not phases:
        raise Refused(
            f"this node trains with differential privacy (dp-noise), but {client.config.method_name} does not train by "
            "fedhet's training loop: choose another method"
        )
    return phases


def _end(job: Job) -> None:
    client = job.client
    seed_everything(client.seed("end"))
    job.reply.payload = job.side.end(job.payload)
    if client.privacy:
        job.reply.further["epsilon"] = client.privacy.epsilon


def _check_evaluations(job: Job) -> None:
    if len(STARTS) * (job.client.config.unseen_epochs + 1) > job.policy.hourly:
        raise Refused("max-per-hour in its node config allows fewer evaluations in an hour: reduce unseen-epochs")


def _begin_newcomer(job: Job, start: str) -> None:
    client = job.client
    if start == "scratch":
        job.redraw(client.name)
    else:
        restore(job)
        job.seed()
        job.side.begin(job.payload)
    client.reestimate()
    job.streams = Streams(client.generator("newcomer", lasting=True), client.order("newcomer"), 0)


def _newcomer_phases(job: Job, start: str, epoch: int) -> Sequence[Phase]:
    client = job.client
    config = client.config
    rate = config.learning_rate
    if start == "received":
        rate = config.unseen_learning_rate or rate
    job.streams = job.streams._replace(dropout=derive_seed(client.root, "newcomer dropout", client.name, epoch))
    optimisation = replace(client.optimisation(), learning_rate=rate, schedule=None)
    return [Phase(1, optimisation, continues=epoch > 1)]


def keep(job: Job) -> None:
    """Save the tensors that the job's client keeps between rounds."""
    client = job.client
    request = client.request
    kept = {f"model/{name}": tensor for name, tensor in _lasting(job.side).items()}
    if client.memory and not (kept or job.side.remembers or client.estimator):
        raise FedhetError(f"{type(job.side).__name__} sets client.memory, which would be lost: set remembers = True")
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


def _write_model(job: Job, when: str = "") -> None:
    """Save the client's personal model at the run's end or, if given, the scored model `when` after every n-th round.

    A client that trains no network, or has only the global model, saves none.
    """
    side = job.side
    client = job.client
    every = client.config.save_every
    round = client.request.round if when else 0
    if when and (side.traits.scored != when or not every or round % every):
        return
    estimated = client.config.batch_norm != "aggregate" and "statistic" in side.kinds.values()
    differs = side.traits.keeps == "model" or not _shares_all(side) or client.part is not None
    if side.trains_network and not client.estimator and (differs or estimated):
        _save_model(job, round_folder(round))


def _write_best(job: Job, when: str) -> None:
    """Save the client's own scored model, evaluated as `when`, if its validation metric is the best so far.

    Of equal ones, the last is kept: with few validation examples, many rounds are equal.
    """
    side = job.side
    client = job.client
    config = client.config
    request = client.request
    if not config.keep_best or when != side.traits.scored or not side.trains_network or client.estimator:
        return
    measured = job.reply.measured.get(f"validation-{when}")
    if measured is None or not side.traits.models_of_clients(config.batch_norm):
        return
    value = measured.metric.value
    sign = direction(client.task.metric)
    if math.isnan(value) or (request.improvable and sign * (value - request.best) < 0):
        return
    _save_model(job, BEST)


def _save_model(job: Job, folder: str) -> None:
    """Save the client's scored model in `folder` of the run's models; a file in `best` has the number of its round."""
    side = job.side
    client = job.client
    tensors = job.scored or side.personal()
    part = client.part if tensors.keys() == client.tensors.keys() else None
    beside = {f"{PREDICTOR}{key}": tensor for key, tensor in side.beside().items()}
    if beside or part:
        # Of the inputs, only the shape is saved.
        inputs = client.transform(client.data.train.inputs[:2])
        beside |= parts_of(for_each(inputs, torch.ones_like), EXAMPLE)
        width = torch.tensor(part.width if part else 1.0, dtype=torch.float64)
        beside |= {WIDTH: width, ROUND: torch.tensor(client.request.round)}
    if folder == BEST:
        beside[BEST_ROUND] = torch.tensor(client.request.round)
    client.store.write_model(tensors | beside, folder, names_text(client.data.names))


# ---- stages of all clients


def run_phases(group: Group, phases_of: Callable[[Job], Sequence[Phase]], jobs: Iterable[Job] | None = None) -> None:
    """Train the networks of `jobs` (default: all) in the phases that `phases_of` returns, in order."""

    def phases_to_run(job: Job) -> list[Phase]:
        phases = [phase for phase in phases_of(job) if phase.epochs or phase.steps]
        if phases and job.client.estimator:
            job.say(fit(job.client, phases))
            return []
        return phases

    def keep_result(job: Job, training: Training, trained: Trained) -> None:
        job.client.trained = trained

    plans = group.run(phases_to_run, jobs)
    for number in range(max(map(len, plans.values()), default=0)):
        trainings = {job: _training(job, phases, number) for job, phases in plans.items() if number < len(phases)}
        group.compute(group.backend.train, trainings, keep_result)


def _training(job: Job, phases: Sequence[Phase], number: int) -> Training:
    client = job.client
    phase = phases[number]
    return Training(
        model=client.model,
        phase=phase,
        examples=client.data.train,
        task=client.task,
        prepare=partial(client.prepare, augment=phase.augment) if phase.augment else client.prepare,
        generator=job.streams.batches,
        order=job.streams.order,
        seed=derive_seed(job.streams.dropout, number) if number else job.streams.dropout,
        before=client.trained,
        privacy=None if phase.public else client.privacy,
        alone=phase.augment is not None,
        augments=phase.augmented or bool(phase.augment) or (client.augment is not None and phase.examples is None),
        compiled=client.config.compiles,
    )


def measure(group: Group, when: str, jobs: Iterable[Job] | None = None) -> None:
    """Evaluate the networks of `jobs` (default: all) for the reply, unless the policy forbids it.

    `when` is `received` before training, `trained` after it. Evaluation does not influence training: its random numbers
    have their own seed, the same in every round, and buffers that a network changes in evaluation mode are restored.
    """
    with ExitStack() as contexts:
        possible = group.run(partial(_predictor, when=when, contexts=contexts), jobs)
        predictors = {job: predictor for job, predictor in possible.items() if predictor is not None}
        run_phases(group, lambda job: job.side.refine(when), predictors)
        score(group, when, predictors)
        group.run(partial(_keep_scored, when=when), predictors)


def _predictor(job: Job, when: str, contexts: ExitStack) -> Predictor | None:
    """Return what predicts in the evaluation `when`, or None; the end of `contexts` restores the network."""
    client = job.client
    side = job.side
    if not (client.request.evaluate and job.policy.tells_metrics):
        return None
    # Under `dp-noise`, only common test examples are evaluated, by a network that no private example has changed since.
    if client.privacy and side.refine(when):
        return None
    seed_everything(derive_seed(client.root, "evaluation", client.name))
    contexts.enter_context(isolated(client.model))
    predictor = side.evaluate(when)
    if predictor is not None and side.refine(when):
        contexts.enter_context(_refinement(job, when))
    return predictor


@contextmanager
def _refinement(job: Job, when: str) -> Iterator[None]:
    """Context manager in which an evaluation's fine-tuning has its own random streams; restores all that it changes."""
    client = job.client
    weights = {name: tensor.clone() for name, tensor in client.tensors.items()}
    streams = job.streams
    trained = client.trained
    job.streams = Streams(
        client.generator("refinement", when),
        client.order("refinement", when),
        client.seed("refinement dropout", when),
    )
    yield
    job.streams = streams
    client.trained = trained
    load_state(client.model, weights)


def _keep_scored(job: Job, when: str) -> None:
    if when == job.side.traits.scored and job.side.refine(when):
        job.scored = {name: tensor.clone() for name, tensor in job.side.personal().items()}


def score(group: Group, when: str, predictors: Mapping[Job, Predictor]) -> None:
    """Evaluate each client's predictor on its test part, the common test set and its validation part."""
    plans = group.run(lambda job: _evaluations(job, when, predictors[job]), predictors)
    for prefix in ("", "common-", "validation-"):
        evaluations = {job: plan[prefix] for job, plan in plans.items() if prefix in plan}
        group.compute(group.backend.evaluate, evaluations, partial(_record, when=when))


def _evaluations(job: Job, when: str, predictor: Predictor) -> dict[str, Evaluation]:
    """Return the evaluations of the model `when`, by the prefix of their names in `measured` of the reply."""
    client = job.client
    sets: dict[str, Examples | None] = {}
    if client.config.test_on != "global" and not client.privacy:
        sets[""] = client.data.test
    if client.config.test_on != "local":
        sets["common-"] = _common(job, when)
    if client.config.validation and not client.privacy:
        sets["validation-"] = client.data.validation
    seed = derive_seed(client.root, "evaluation", client.name)
    return {
        prefix: Evaluation(predictor, examples, client.task, client.transform, client.model, seed, f"{prefix}{when}")
        for prefix, examples in sets.items()
        if examples is not None and enough(job, client.task.behind(examples.labels), f"{prefix}{when}")
    }


def _record(job: Job, evaluation: Evaluation, score: Scored | None, *, when: str) -> None:
    # A user's own app may return no metrics.
    if score is None:
        return
    client = job.client
    if not abs(score.loss) <= LARGEST:
        raise ModelError(
            f"the loss of the {when} model is {score.loss:.3g}: the network returns values that are not finite for "
            f"some example, inputs or targets are large (divide them, for example by their standard deviation), or "
            f"training diverged; a lower learning-rate than {client.config.learning_rate:g} may help"
        )
    weight = job.policy.loss_weight(client.task, evaluation.examples.labels)
    for number, (name, metric) in enumerate(score.metrics.items()):
        sent = job.policy.metric(metric, by_class=client.task.counts_classes(name))
        place = further(evaluation.name, name) if number else evaluation.name
        job.reply.measured[place] = Measured(sent, job.policy.rounded(score.loss), weight)


def enough(job: Job, count: int, metric: str) -> bool:
    """Return whether the node's policy allows a metric of `count` examples; if not, log a warning naming `metric`."""
    if 0 < count < job.policy.least:
        log.warning(
            "client %s has %d examples for the metric %s, and its node requires at least %d (min-examples): "
            "the metric is not sent",
            *(job.client.name, count, metric, job.policy.least),
        )
    return count >= job.policy.least


def _common(job: Job, when: str) -> Examples | None:
    """Return the test set that all clients share, or None if the model `when` is not to be evaluated on it.

    Only the model by which the method is scored is, by the server itself if it is global and fedhet has the data.
    """
    client = job.client
    if when in ("received", "trained") and when != job.side.traits.scored:
        return None
    if client.own_data or (client.privacy and client.config.data):  # files in a node's folder are private
        return None if client.privacy else client.data.common
    if when == "received" and _shares_all(job.side):
        return None
    whole = client_setup.dataset_of(client.config).test
    if job.policy.least > 1 and not client.privacy and len(whole) != len(client.data.test):
        job.say("no metric on the common test set is sent: with that on the client's part, it tells that on the others")
        return None
    return resident(whole, client.device)
