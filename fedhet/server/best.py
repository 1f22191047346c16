"""The best models by validation metrics (key `keep-best`), and the end of a run without improvement (`patience`)."""

import math
from collections.abc import Mapping
from typing import Any

from fedhet.messages import Arrays, Reply
from fedhet.results.history import client_scores
from fedhet.server.run import Run
from fedhet.tasks import direction, worst
from fedhet.utils.statistics import Metric, as_statistics, metric_in, over_same_clients
from fedhet.utils.text import log

ALL = ""
"""The key of the entry in `State.best` for the weighted mean over clients."""


def choose(run: Run, replies: Mapping[str, Reply], evaluated: dict[str, Any], model: Arrays) -> None:
    """Keep the best round and its global model in the state; end training if `patience` evaluations were not better.

    Of equal rounds, the last is kept: with few validation examples, many rounds are equal.

    Args:
        run: the run, in the round of the evaluation.
        replies: the clients' replies by client.
        evaluated: the round's record, with statistics over clients and their scores.
        model: the shared arrays that clients evaluated as `received`.
    """
    config = run.config
    if not (config.keep_best or config.patience):
        return
    state = run.state
    scored = run.traits.scored
    number = run.round.number
    sign = direction(run.metric)
    nothing = [0, -sign * math.inf]
    for client, reply in replies.items():
        if measured := reply.measured.get(f"validation-{scored}"):
            reached = measured.metric.value  # NaN, if it is undefined, is not better
            if sign * reached >= sign * state.best.get(client, nothing)[1]:
                state.best[client] = [number, reached]
    mean = as_statistics(metric_in((evaluated.get("validation") or {}).get(scored))).get("weighted")
    if mean is None:
        return
    scores = client_scores(evaluated, scored, "validation")
    best_scores = {client: Metric(*map(tuple, pair)) for client, pair in state.best_scores.items()}
    now, best = mean, state.best.get(ALL, nothing)[1]
    if scores and best_scores:
        # A client that should have evaluated and has no score counts as the worst; one that has left counts as before.
        asked = {run.clients[node] for node in run.round.down if node in run.clients}
        left = {client: metric for client, metric in best_scores.items() if client not in asked}
        scores, best_scores = over_same_clients([left | scores, best_scores], worst(run.metric))
        now, best = Metric.total(scores.values()).value, Metric.total(best_scores.values()).value
    state.without_better = 0 if sign * now > sign * best else state.without_better + 1
    if sign * now >= sign * best:
        state.best[ALL] = [number, mean]
        state.best_scores = {client: [metric.values, metric.weights] for client, metric in scores.items()}
        if config.keep_best and run.traits.whole:
            state.best_model = model
    if 0 < config.patience <= state.without_better and run.round.number < run.training_rounds:
        state.stopped = run.round.number
        round, reached = state.best[ALL]
        round -= scored == "received"
        log.info(
            "training ends after round %d, since validation %s did not improve on round %d (%.3f) in %d evaluations",
            *(state.stopped, run.metric, round, reached, state.without_better),
        )
