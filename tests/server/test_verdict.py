"""The warnings of a run that completed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedhet
from fedhet.config import configuration
from fedhet.engines.running import RunResult, run_locally
from fedhet.errors import FedhetError
from fedhet.results.absences import absences
from fedhet.results.history import read_run
from fedhet.results.report import compare_folders, write_report
from fedhet.results.terminal import headline
from fedhet.testing import COMMON
from fedhet.utils.statistics import Metric, never_took_part

pytestmark = pytest.mark.usefixtures("home", "no_report")


def test_clients_that_never_took_part() -> None:
    failed = [[{"client": "1", "reason": "first"}, {"client": "2", "reason": "late"}], [], []]
    failed[1].append({"client": "1", "reason": "then"})
    trained = [["0"], ["0"], ["0", "2"]]
    rows = [{"participants": clients, "failures": each} for clients, each in zip(trained, failed, strict=True)]
    assert never_took_part(rows) == {"1": "then"}


def test_clients_that_failed_before_the_last_evaluation_are_named() -> None:
    scores = {"trained": {"0": [1.0, 1.0], "1": [1.0, 1.0]}}
    failure = {"client": "1", "reason": "training diverged"}
    rows = [
        {"participants": ["0", "1"], "failures": [], "scores": {}},
        {"participants": ["0"], "failures": [failure], "scores": {}},
        {"participants": [], "failures": [], "scores": scores, "trained": {"clients": 2}},
    ]
    line = "1 of 2 clients failed in a round, but are scored: client 1: training diverged"
    assert [*absences(rows, "trained", shared=False)] == [line]


def test_clients_without_the_metric_are_named() -> None:
    """An r2 over two of four clients looked like one over all."""
    last = {"scores": {"trained": {"0": [[0.9], [9]], "1": [[0.8], [9]]}}, "undefined": {"trained": ["2"]}}
    last |= {"final": True, "participants": [], "failures": [], "trained": {"r2": {"weighted": 0.85}, "clients": 3}}
    rows = [{"participants": ["0", "1", "2", "3"], "failures": [], "scores": {}}, last]
    line = (
        "2 of 4 clients have no r2: client 2: undefined on the test examples, or not sent; client 3: no evaluation (no "
        "test examples, metrics not allowed, or the node is gone)"
    )
    assert [*absences(rows, "trained", shared=False)] == [line]
    last["common"] = {"received": {"r2": 0.9}}
    assert [*absences(rows, "received", shared=True)] == [], "the server scored the global model"


def ran(folder: Path, method: str, **settings: Any) -> dict[str, Any]:
    keys = {key.replace("_", "-"): value for key, value in settings.items()}
    base = {"method": method, "architectures": "mlp-30", **COMMON, "public-samples": 0, "clients": 2, "local-epochs": 2}
    run_locally(configuration.resolve({**base, **keys}), folder)
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.mark.parametrize(("method", "said"), [("local", True), ("fedrep", True), ("fedavg", False)])
def test_clients_that_never_trained_but_are_scored_are_named(tmp_path: Path, method: str, said: bool) -> None:
    ran(tmp_path, method, clients=4, rounds=1, fraction_train=0.5)
    run = read_run(tmp_path)
    (trained,) = (row["participants"] for row in run.rows if row["participants"])
    others = ", ".join(client for client in "0123" if client not in trained)
    line = f"2 of 4 clients never trained, but are scored: clients {others}: raise fraction-train or rounds"
    assert run.absences == [line] * said
    assert ("; 2 of 4 clients never trained, but are scored; " in headline(run) + "; ") == said


def test_warning_about_refused_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs, labels = torch.randn(20, 4), torch.arange(20) % 3
    widths = [5, 5, 6, 6, 7, 7]

    def ran_by(method: str) -> RunResult:
        return fedhet.run(
            {"method": method, "clients": 6, "rounds": 1, "learning-rate": 0.01},
            model=lambda partition_id: nn.Sequential(
                nn.Linear(4, widths[partition_id]), nn.Linear(widths[partition_id], 3)
            ),
            data=lambda client: ((inputs, labels), (inputs, labels)),
            out=tmp_path / method,
        )

    result = ran_by("fedavg")
    (line,) = [line for line in caplog.messages if "took no part" in line]
    assert line.startswith("4 of 6 clients took no part: 2 clients (2, 3): fedavg needs equal architectures, and this")
    assert line.endswith("; use layer-average, or fedproto with fedproto.width, for different networks")
    run = read_run(result.folder)
    assert "; 4 of 6 clients took no part; failures: 4" in headline(run)
    refused = "4 of 6 clients took no part: clients 2, 3: fedavg needs equal architectures, and this"
    assert refused in capsys.readouterr().out.strip().splitlines()[-1]
    page = write_report(run.folder).read_text()
    assert page.index('<p class="bad">4 of 6 clients took no part: clients 2, 3: ') < page.index("<dl>")
    page = compare_folders([run.folder], tmp_path / "page.html").read_text()
    assert page.index('<p class="bad">fedavg: 4 of 6 clients took no part: clients 2, 3: ') < page.index("<svg")
    assert run.accuracy("personal") == Metric.total(run.by_client("received", "own").values()).value
    assert (result.summary["status"], len(result.summary["never_took_part"])) == ("completed", 4)
    for method in ("layer-average", "fedproto"):
        assert ran_by(method).summary["clients"] == 6


@pytest.mark.parametrize("rounds", [2, 3])
def test_diverged_hypernetwork_fails_the_run(tmp_path: Path, rounds: int) -> None:
    with pytest.raises(FedhetError, match=f"all rounds after round 1 of {rounds}"):
        ran(tmp_path / "run", "pfedhn", rounds=rounds, **{"pfedhn.server-learning-rate": 1e30})
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
