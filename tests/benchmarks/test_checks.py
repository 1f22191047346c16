"""The cost of looking at every field and every number of what clients sent, as a share of a round."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.methods import registry
from fedhet.results.observers import Observer, RoundReport, RunInfo
from fedhet.server import federation

pytestmark = pytest.mark.benchmark


class Spent(Observer):
    """Of each round that trains the share of its seconds that went into functions which this one is put around."""

    def __init__(self) -> None:
        self.checking, self.last = 0.0, time.perf_counter()
        self.shares: list[float] = []

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.checking += time.perf_counter() - start

        return timed

    def round(self, run: RunInfo, report: RoundReport) -> None:
        now = time.perf_counter()
        if report.row["round"] and not report.row.get("final"):
            self.shares.append(self.checking / (now - self.last))
        self.checking, self.last = 0.0, time.perf_counter()


@pytest.mark.parametrize("preset", ["fedavg/digits", "fedhenn/digits", "fedma/digits", "flha-ghn/digits"])
def test_checks_take_at_most_a_fiftieth_of_a_round(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a reply, which reads every field and decodes the arrays, and checking it, also by the method itself."""
    torch.set_num_threads(1)
    spent, config = Spent(), configuration.resolve({"preset": preset, "workers": 1, "rounds": 8}, strict=False)
    monkeypatch.setattr(federation, "read_reply", spent.around(federation.read_reply))
    monkeypatch.setattr(federation.Federation, "_check", spent.around(federation.Federation._check))
    strategy = registry.strategy(config.method_name)
    monkeypatch.setattr(strategy, "check_reply", spent.around(strategy.check_reply))
    monkeypatch.setattr("fedhet.results.recorder.write_report", lambda folder: None)
    run_locally(config, tmp_path / "run", observers=[spent])
    share = statistics.median(spent.shares[1:])
    print(f"\n{preset}: checks are {100 * share:.2f} % of a round")
    assert share <= 0.02
