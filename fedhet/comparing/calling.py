"""`fedhet.compare`: a comparison from Python, and what it came to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from fedhet import comparing, running
from fedhet import config as configuration
from fedhet.comparing.outcome import Comparison
from fedhet.comparing.tuning import Tuning
from fedhet.given import Given


@dataclass(frozen=True)
class _Run:
    """`fedhet.run` with a user's own model and data, which travel to other processes even from a notebook."""

    own: bytes

    def __call__(self, config: Any, **settings: Any) -> object:
        own: Given = cloudpickle.loads(self.own)
        return running.run(config, model=own.model, data=own.data, task=own.task, progress=False, **settings)


def compare(
    methods: Sequence[str],
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    model: Any = None,
    data: Any = None,
    task: str | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    baseline: str | None = None,
    tuning: Tuning | None = None,
) -> Comparison:
    """Run several methods on the same clients and data, as `fedhet compare` does.

    Args:
        methods: in order of the table: names, or `NAME=METHOD,KEY=VALUE,...` for one with settings of its own.
        config: settings for all, as for `fedhet.run`.
        seeds: every method runs once with each.
        model: the clients' networks, as for `fedhet.run`.
        data: the clients' data, as for `fedhet.run`.
        task: of data of one's own.
        out: folder of the comparison; one in `runs/` that is named by the methods if left out.
        jobs: runs at a time, each in a process of its own; as many as cores, or as a GPU has room for, if left out.
        baseline: the arm that differences are to; the first if left out.
        tuning: what each method's settings are chosen from before.

    Raises:
        FedhetError: as `fedhet.comparing.compare`; not where some runs completed, see `Comparison.failed`.
    """
    own = Given(model, data, task)
    return comparing.compare(
        methods,
        seeds=seeds,
        config=configuration.completed(config, own.words.keys()),
        out=None if out is None else Path(out),
        jobs=jobs,
        baseline=baseline,
        tuning=tuning,
        own=own,
        run=_Run(cloudpickle.dumps(own)) if own else running.run,
    )
