"""Survival: Cox's partial likelihood and the concordance index, against loops over events and pairs, and lifelines."""

import math

import pytest
import torch
from torch import nn

import fedhet
from fedhet.client.policy import Policy
from fedhet.errors import FedhetError
from fedhet.setup.client_setup import ClientInfo
from fedhet.tasks import Task

pytestmark = pytest.mark.usefixtures("home", "no_report")
TASK = Task("survival")


def drawn(number, seed=0):
    """Log hazards (n, 1), and times with many ties and events (n, 2)."""
    generator = torch.Generator().manual_seed(seed)
    times = torch.randint(1, 12, (number,), generator=generator).float()
    events = (torch.rand(number, generator=generator) < 0.6).float()
    return torch.randn(number, 1, generator=generator), torch.stack([times, events], 1)


def by_hand(risks, labels):
    """Efron's negative log partial likelihood, by a loop over times and their events."""
    pairs = [(float(t), bool(e), float(r)) for (t, e), r in zip(labels, risks[:, 0], strict=True)]
    total, count = 0.0, 0
    for time in sorted({t for t, e, _ in pairs if e}):
        tied = [r for t, e, r in pairs if e and t == time]
        at_risk = sum(math.exp(r) for t, _, r in pairs if t >= time)
        for k, risk in enumerate(tied):
            total -= risk - math.log(at_risk - k / len(tied) * sum(map(math.exp, tied)))
        count += len(tied)
    return total, count


def pairs_by_hand(risks, labels):
    won, count = 0.0, 0
    rows = [(float(t), bool(e), float(r)) for (t, e), r in zip(labels, risks[:, 0], strict=True)]
    for t, e, r in rows:
        for other, event, risk in rows:
            if e and (t < other or (t == other and not event)):
                won += (r > risk) + 0.5 * (r == risk)
                count += 1
    return won / count


def test_loss_and_concordance_equal_plain_loops_in_any_batches():
    risks, labels = drawn(70)
    risks = (4 * risks).round() / 4
    total, events = by_hand(risks, labels)
    parts = [TASK.evaluate(*part) for part in zip(risks.split(16), labels.split(16), strict=True)]
    score = sum(parts[1:], parts[0])
    assert score.loss == pytest.approx(total / events, rel=1e-6)
    assert score.value == pytest.approx(pairs_by_hand(risks, labels))
    assert float(TASK.loss(risks, labels)) == pytest.approx(total / events, rel=1e-6)


def test_lifelines_has_the_same_values():
    lifelines = pytest.importorskip("lifelines")
    pandas = pytest.importorskip("pandas")
    risks, labels = drawn(60)
    table = pandas.DataFrame({"x": risks[:, 0], "time": labels[:, 0], "event": labels[:, 1]})
    fitted = lifelines.CoxPHFitter().fit(table, "time", "event")
    found = torch.tensor(fitted.params_["x"] * risks.numpy())
    assert -float(TASK.loss(found.double(), labels.double()) * labels[:, 1].sum()) == pytest.approx(
        fitted.log_likelihood_, rel=1e-6
    )
    index = lifelines.utils.concordance_index(labels[:, 0], -found[:, 0], labels[:, 1])
    assert TASK.evaluate(found, labels).value == pytest.approx(index)


def test_the_gradient_is_that_of_finite_differences():
    risks, labels = drawn(20)
    risks = risks.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda r: TASK.loss(r, labels), risks)


def test_a_policy_withholds_the_index_of_few_events():
    risks, labels = drawn(40)
    labels[:, 1] = (torch.arange(40) < 9).float()
    metric = TASK.evaluate(risks, labels).metrics["concordance"]
    assert Policy(None, 10, deployed=True).metric(metric).weights == (0.0,)
    assert Policy(None, 9, deployed=True).metric(metric).weights == (40.0,)


def model(client):
    return nn.Sequential(nn.Linear(5, 4 + client.partition_id), nn.ReLU(), nn.Linear(4 + client.partition_id, 1))


def data(client):
    """Exponential times with hazard e^x_0, censored at random."""
    generator = torch.Generator().manual_seed(client.partition_id)
    inputs = torch.randn(160, 5, generator=generator)
    times = torch.empty(160).exponential_(1.0, generator=generator) / inputs[:, 0].exp()
    censored = torch.empty(160).exponential_(0.3, generator=generator)
    labels = torch.stack([torch.minimum(times, censored), (times <= censored).float()], 1)
    return {"train": (inputs[:100], labels[:100]), "test": (inputs[100:], labels[100:])}


@pytest.mark.parametrize("settings", [{"method": "local"}, {"method": "fedhenn", "fedhenn.target": "kernel"}])
def test_clients_learn_hazards(tmp_path, settings):
    public = torch.randn(32, 5, generator=torch.Generator().manual_seed(9))
    settings = settings | {"clients": 3, "rounds": 5, "local-epochs": 5, "batch-size": 50, "learning-rate": 0.3}
    run = fedhet.run(
        settings,
        model=model,
        data=lambda client: data(client) | {"public": public},
        task="survival",
        out=tmp_path / "run",
        progress=False,
    )
    assert run.summary["metric"] == "concordance"
    assert run.summary["personal_concordance"]["weighted"] > 0.65
    inputs, labels = data(ClientInfo("0", 0, 3, None, {}))["test"]
    with torch.no_grad():
        risks = fedhet.load_model(run, 0, model=model)(inputs)
    assert run.history[-1]["scores"]["trained"]["0"][0] == [pytest.approx(pairs_by_hand(risks, labels))]


def test_columns_of_labels_in_another_order_are_told(tmp_path):
    def run(name, change):
        parts = lambda client: {part: (x, change(y)) for part, (x, y) in data(client).items()}  # noqa: E731
        settings = {"method": "local", "clients": 2, "rounds": 1}
        return fedhet.run(settings, model=model, data=parts, task="survival", out=tmp_path / name, progress=False)

    with pytest.raises(FedhetError, match="event of 0 or 1 in the second column of its labels: swap its columns"):
        run("swapped", lambda labels: labels[:, [1, 0]])
    with pytest.raises(FedhetError, match="needs times of 0 or more in the first column"):
        run("negative", lambda labels: labels * torch.tensor([-1, 1]))
    told = run("unclear", lambda labels: (labels > 0.5).float()).summary["warnings"]
    assert any("all times of the client's labels are 0 or 1" in line for line in told)


def test_labels_and_methods_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(FedhetError, match="needs labels \\(n, 2\\) of time and event"):
        fedhet.run(
            {"method": "local", "clients": 2},
            model=model,
            data=lambda client: {name: (x, y[:, 0]) for name, (x, y) in data(client).items()},
            task="survival",
            out=tmp_path / "a",
            progress=False,
        )
    with pytest.raises(FedhetError, match="task is survival|of a survival"):
        fedhet.run(
            {"method": "fedproto", "clients": 2},
            model=model,
            data=data,
            task="survival",
            out=tmp_path / "b",
            progress=False,
        )
