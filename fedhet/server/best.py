"""The choice of the best models by validation metrics (`keep-best`), and the end of a run without improvement."""

import math
from collections.abc import Mapping
from typing import Any

from fedhet.messages import Arrays, Reply
from fedhet.server.run import Run
from fedhet.tasks import direction
from fedhet.utils.text import log

ALL = ""
"""The key of the entry in `State.best` for the weighted mean over clients."""


def choose(run: Run, replies: Mapping[str, Reply], evaluated: Mapping[str, Any], model: Arrays) -> None:
    """Keep the best round and its global model in the state; end training if `patience` evaluations were not better.

    Args:
        run: the run, in the round of the evaluation.
        replies: the clients' replies by client.
        evaluated: the statistics over clients in the round's record, such as `validation`.
        model: the shared arrays that clients evaluated as `received`.
    """
    config = run.config
    if not (config.keep_best or config.patience):
        return
    state, scored = run.state, run.traits.scored
    number = run.round.number
    for client, reply in replies.items():
        if measured := reply.measured.get(f"validation-{scored}"):
            improves(state.best, client, number, measured.metric.value, run.metric)
    accuracy = ((evaluated.get("validation") or {}).get(scored) or {}).get("accuracy")
    value = accuracy.get("weighted") if isinstance(accuracy, Mapping) else accuracy
    if value is None:
        return
    better = improves(state.best, ALL, number, value, run.metric)
    state.without_better = 0 if better else state.without_better + 1
    if config.keep_best and run.traits.whole and state.best[ALL][0] == number:
        state.best_model = model
    if 0 < config.patience <= state.without_better and run.round.number < run.training_rounds:
        state.stopped = run.round.number
        best, reached = state.best[ALL]
        best -= scored == "received"
        log.info(
            "training ends after round %d, since validation %s did not improve on round %d (%.3f) in %d evaluations",
            *(state.stopped, run.metric, best, reached, state.without_better),
        )


def improves(best: dict[str, list[Any]], name: str, round: int, value: float, metric: str) -> bool:
    """Return whether `value` is better than that of `name` in `best` (see `State.best`), and replace it if not worse.

    Of equal values, the last is kept: with few validation examples, many rounds are equal.
    """
    if math.isnan(value):
        return False
    change = direction(metric) * (value - best[name][1]) if name in best else math.inf
    if change >= 0:
        best[name] = [round, value]
    return change > 0
