"""`keep-best` and `patience`: a plain loop over saved models chooses the same rounds, resumed and with any workers."""

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import fedhet
from fedhet.cli import app
from fedhet.client import work
from fedhet.errors import FedhetError
from fedhet.results.observers import Observer
from fedhet.results.state import State
from fedhet.server.best import choose
from fedhet.server.run import Round
from fedhet.setup.client_setup import ClientInfo

pytestmark = pytest.mark.usefixtures("home", "no_report")

SETTINGS = {
    "clients": 3,
    "rounds": 6,
    "validation": 0.3,
    "keep-best": True,
    "save-every": 1,
    "learning-rate": 0.3,
    "batch-size": 8,
    "local-epochs": 3,
}


def data(client):
    place = client.partition_id
    generator = torch.Generator().manual_seed(place)
    inputs = torch.randn(160, 6, generator=generator)
    labels = (inputs[:, :3] + torch.randn(160, 3, generator=generator)).argmax(1)
    return {
        "train": (inputs[:60], labels[:60]),
        "validation": (inputs[60:100], labels[60:100]),
        "test": (inputs[100:], labels[100:]),
    }


def model(client):
    return nn.Sequential(nn.Linear(6, 4 + client.partition_id), nn.ReLU(), nn.Linear(4 + client.partition_id, 3))


def equal_model(client):
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


MODELS = {"local": model, "fedproto": model, "fedrep": equal_model, "fedavg": equal_model}


def run(method, out, **more):
    networks = (
        equal_model
        if MODELS[method] is equal_model
        else (
            lambda client: nn.Sequential(
                nn.Linear(6, 4 + client.partition_id),
                nn.ReLU(),
                nn.Linear(4 + client.partition_id, 5),
                nn.ReLU(),
                nn.Linear(5, 3),
            )
        )
    )
    resume = {"resume": more.pop("resume")} if "resume" in more else {"out": out}
    settings = {} if "resume" in resume else {"method": method, **SETTINGS}
    observers = more.pop("observers", ())
    return fedhet.run(
        {**settings, **more} or None, model=networks, data=data, progress=False, observers=observers, **resume
    ), networks


def part(place, name):
    inputs, labels = data(ClientInfo(str(place), place, 3, None, {}))[name]
    return inputs, labels


def accuracy(network, place, name):
    inputs, labels = part(place, name)
    with torch.no_grad():
        return float((network(inputs).argmax(1) == labels).double().mean())


@pytest.mark.parametrize("method", ["local", "fedproto"])
def test_each_clients_best_round_is_that_of_a_plain_loop(tmp_path, method):
    result, networks = run(method, tmp_path / "run")
    best = result.summary["best"]
    tests = []
    for place in range(3):
        by_round = [
            accuracy(
                fedhet.load_model(tmp_path / f"run/models/round-{number}", place, model=networks), place, "validation"
            )
            for number in range(1, 7)
        ]
        last = fedhet.load_model(tmp_path / "run", place, model=networks)  # with the server's last prototypes
        by_round.append(accuracy(last, place, "validation"))
        chosen = min(7 - int(np.argmax(by_round[::-1])), 6)  # the last of equal ones
        reported = best["clients"][str(place)]
        assert (reported["round"], reported["validation"]) == (chosen, pytest.approx(max(by_round)))
        kept = fedhet.load_model(tmp_path / "run/models/best", place, model=networks)
        assert accuracy(kept, place, "test") == pytest.approx(reported["test"]), (
            "a loaded model predicts what is reported"
        )
        tests.append(reported["test"])
    assert best["accuracy"]["mean"] == pytest.approx(np.mean(tests))


def test_the_best_global_model_is_that_of_a_plain_loop(tmp_path):
    result, networks = run("fedavg", tmp_path / "run")
    best = result.summary["best"]
    weighted = []
    for number in range(1, 7):
        network = fedhet.load_model(tmp_path / f"run/models/round-{number}", 0, model=networks)
        weighted.append(np.mean([accuracy(network, place, "validation") for place in range(3)]))
    equal = [number for number, value in enumerate(weighted, 1) if value == pytest.approx(max(weighted))]
    assert best["round"] in (0, *equal)
    assert best["round"] == 0 or best["validation_accuracy"] == pytest.approx(max(weighted))
    kept = fedhet.load_model(tmp_path / "run/models/best", 0, model=networks)
    assert np.mean([accuracy(kept, place, "test") for place in range(3)]) == pytest.approx(best["accuracy"]["weighted"])


class Stop(Observer):
    def round(self, info, report):
        if report.row["round"] == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["fedproto", "fedrep", "fedavg"])
def test_best_models_are_the_same_resumed_and_with_any_workers(tmp_path, method):
    whole, _ = run(method, tmp_path / "whole", workers=1)
    several, _ = run(method, tmp_path / "several", workers=2)
    with pytest.raises(KeyboardInterrupt):
        run(method, tmp_path / "stopped", observers=[Stop()])
    resumed, _ = run(method, None, resume=tmp_path / "stopped")
    assert whole.summary["best"] == several.summary["best"] == resumed.summary["best"]
    files = sorted(path.name for path in (tmp_path / "whole/models/best").iterdir())
    assert files == (["global.safetensors"] if method == "fedavg" else [f"{place}.safetensors" for place in range(3)])
    for name in files:
        first = load_file(tmp_path / "whole/models/best" / name)
        for other in ("several", "stopped"):
            second = load_file(tmp_path / other / "models/best" / name)
            assert first.keys() == second.keys()
            assert all(torch.equal(first[key], second[key]) for key in first)


def test_patience_ends_training_where_a_plain_loop_does(tmp_path):
    whole, _ = run("local", tmp_path / "whole", rounds=12)
    curve = [row["validation"]["trained"]["accuracy"]["weighted"] for row in whole.history if row["participants"]]
    best, waited, end = -1.0, 0, None
    for number, value in enumerate(curve, 1):
        best, waited = (value, 0) if value > best else (best, waited + 1)
        if waited == 2:
            end = number
            break
    assert end is not None
    stopped, _ = run("local", tmp_path / "stopped", rounds=12, patience=2)
    assert stopped.summary["rounds"] == end
    assert stopped.summary["best"]["validation_accuracy"] == best
    with pytest.raises(FedhetError, match="start-from"):
        run("local", None, rounds=13, resume=tmp_path / "stopped")
    assert run("local", None, rounds=12, resume=tmp_path / "stopped")[0].summary["rounds"] == end
    for name, advice in [("whole", "--set rounds=MORE"), ("stopped", "a run with start-from")]:
        said = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / name)]).output
        assert said.endswith(f": to train further, {advice}\n")


FAILED, LEFT = math.nan, None


@pytest.mark.parametrize(
    ("of_the_second", "chosen"),
    [
        (([0.2, FAILED, 0.3], [0.6, 0.7, 0.7]), 3),
        (([0.2, FAILED, 0.1], [0.6, 0.7, 0.6]), 1),
        (([0.2, LEFT, LEFT], [0.6, 0.9, 0.8]), 2),
        (([0.2, LEFT, 0.2], [0.6, 0.7, 0.6]), 2),  # it comes back
        (([LEFT, 0.2, 0.2], [0.6, 0.7, 0.6]), 2),  # it joins late
    ],
)
def test_rounds_are_compared_over_the_same_clients(of_the_second, chosen):
    """A client without a score counts as the worst if it was asked to evaluate, also if its metric is undefined."""
    state = State()
    for number, (first, second) in enumerate(zip(of_the_second[1], of_the_second[0], strict=True), 1):
        defined = {"0": first} if second is LEFT or math.isnan(second) else {"0": first, "1": second}
        run = SimpleNamespace(
            config=SimpleNamespace(keep_best=True, patience=0),
            state=state,
            traits=SimpleNamespace(scored="received", whole=True),
            round=Round(number, down=Counter({0: 1} if second is LEFT else {0: 1, 1: 1})),
            metric="accuracy",
            clients={0: "0", 1: "1"},
        )
        mean = {"accuracy": {"weighted": np.mean([*defined.values()])}, "clients": len(defined)}
        scores = {"validation-received": {client: [[value], [10.0]] for client, value in defined.items()}}
        choose(run, {}, {"validation": {"received": mean}, "scores": scores}, {"round": np.array(number)})
        state.best_scores = json.loads(json.dumps(state.best_scores))  # as in a checkpoint
    assert state.best[""][0] == state.best_model["round"] == chosen


def test_a_round_that_a_hard_client_misses_is_not_the_best(tmp_path, monkeypatch):
    def hard(client):
        parts = data(client)
        if client.partition_id < 2:
            return {name: (inputs, inputs[:, :3].argmax(1)) for name, (inputs, _) in parts.items()}
        return {name: (inputs, labels.flip(0)) for name, (inputs, labels) in parts.items()}

    def begin(job):
        if job.client.name == "2" and job.client.request.round == 3:
            raise RuntimeError("no network")
        return original(job)

    original = work.begin
    monkeypatch.setattr(work, "begin", begin)
    settings = {**SETTINGS, "method": "fedavg", "workers": 1, "save-every": 0}
    result = fedhet.run(settings, model=equal_model, data=hard, out=tmp_path / "run", progress=False)
    means = {row["round"]: row["validation"]["received"] for row in result.history if row["round"]}
    assert {number for number, mean in means.items() if mean["clients"] < 3} == {3}
    assert max(means, key=lambda number: means[number]["accuracy"]["weighted"]) == 3
    assert result.summary["best"]["clients"].keys() == {"0", "1", "2"}


def test_without_validation_examples_nothing_can_be_chosen():
    with pytest.raises(FedhetError, match="keep-best"):
        fedhet.run({"method": "local", "keep-best": True}, progress=False)
