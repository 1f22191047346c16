"""A user's own Flower ClientApp under fedhet's strategies (`fedhet.wrap`)."""

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.functional import cross_entropy

import fedhet
from fedhet.errors import FedhetError
from fedhet.flower.grid import LocalGrid

pytestmark = pytest.mark.usefixtures("home", "no_report")
EXAMPLES = 24


def load(partition_id):
    generator = torch.Generator().manual_seed(partition_id)
    inputs = torch.randn(EXAMPLES + 12, 4, generator=generator, dtype=torch.float64)
    return inputs, (inputs[:, 0] > 0).long()


def network(partition_id=0):
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def hospital(seen=None, net=network, wrong=None, trained=()):
    """The ClientApp of Flower's PyTorch tutorial."""
    app = ClientApp()

    @app.train()
    def train(msg, context):
        model, config = net(), msg.content["config"]
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        if seen is not None:
            seen.append(dict(config))
        inputs, labels = (part[:EXAMPLES] for part in load(context.node_config["partition-id"]))
        start = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        for _ in range(config["local-epochs"]):
            loss = cross_entropy(model(inputs), labels)
            if mu := config.get("proximal-mu", 0.0):
                pairs = zip(model.parameters(), start, strict=True)
                loss = loss + mu / 2 * sum((now - then).square().sum() for now, then in pairs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"train_loss": loss.item(), "hours": 2.0, "num-examples": EXAMPLES, **dict(trained)})
        arrays = ArrayRecord((wrong or model).state_dict())
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        inputs, labels = (part[EXAMPLES:] for part in load(context.node_config["partition-id"]))
        scores = model(inputs)
        metrics = {
            "eval_loss": cross_entropy(scores, labels).item(),
            "eval_acc": (scores.argmax(1) == labels).double().mean().item(),
            "sensitivity": 0.75,
            "num-examples": len(labels),
        }
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

    return app


def fedhets_own():
    """The same clients by fedhet's own loop."""
    parts = [slice(EXAMPLES), slice(EXAMPLES, None)]
    return fedhet.make_client_app(
        lambda partition_id: network(), lambda partition_id: [tuple(p[s] for p in load(partition_id)) for s in parts]
    )


SETTINGS = {"rounds": 3, "local_epochs": 2, "learning_rate": 0.5, "batch_size": EXAMPLES, "momentum": 0.0, "clients": 3}


@pytest.fixture
def started(new_watch):
    """Runs a strategy on three nodes; returns Flower's result, and the rows of the history."""

    def started(strategy, app):
        strategy.reporter.observers.append(watch := new_watch())
        return strategy.start(LocalGrid(app, 3)), watch.rows

    return started


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("FedAvg", {}),
        ("FedProx", {"fedprox.mu": 0.5}),
        ("LGFedAvg", {}),
        ("LayerAverage", {"layer-average.by": "max-common"}),
    ],
)
def test_own_functions_agree_with_fedhets_loop(name, more, started):
    """With the same steps, a full batch each, the shared arrays and every evaluation agree."""
    ours, theirs = (
        started(getattr(fedhet, name)(**{**SETTINGS, **more}), app)
        for app in (fedhets_own(), fedhet.wrap(hospital(), network))
    )
    mine, own = (result.arrays.to_torch_state_dict() for result, _ in (ours, theirs))
    torch.testing.assert_close(mine, own, rtol=0, atol=1e-12)
    for one, other in zip(ours[1], theirs[1], strict=True):
        for which in ("received", "trained"):
            assert (one[which] is None) == (other[which] is None)
            if one[which]:
                assert one[which]["loss"]["mean"] == pytest.approx(other[which]["loss"]["mean"], abs=1e-9)
                assert one[which]["accuracy"] == other[which]["accuracy"]


def test_fedrep_keeps_heads(started):
    sent = []
    strategy = fedhet.FedRep(**SETTINGS | {"local_epochs": 3, "closing_epochs": 0})
    result, rows = started(strategy, fedhet.wrap(hospital(sent), network))
    assert set(result.arrays) == {"0.weight", "0.bias"}
    assert [row["bytes_up"] for row in rows[1:4]] == [3 * 8 * (4 * 5 + 5)] * 3  # float64
    assert {config["body-epochs"] for config in sent} == {1}  # its function may heed them
    assert rows[-1]["received"]["accuracy"]["mean"] > 0.6


@pytest.mark.parametrize("name", ["FedHeNN", "HeteroFL"])
def test_methods_that_need_fedhets_loop(name):
    strategy = getattr(fedhet, name)(**SETTINGS)
    with pytest.raises(FedhetError, match=f", but {strategy.config.method_name} needs fedhet's training loop"):
        strategy.start(LocalGrid(fedhet.wrap(hospital(), network), 3))


def start(app, **more):
    fedhet.FedAvg(**SETTINGS, **more).start(LocalGrid(app, 3))


WRONG = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (
            lambda: start(fedhet.wrap(hospital(wrong=WRONG), network)),
            r"that the app's train function returned: array 0\.weight is float64\[6, 4\]",
        ),
        (
            lambda: start(fedhet.wrap(hospital(), network), validation=0.2),
            "validation needs fedhet's training loop",
        ),
        (lambda: fedhet.wrap("app", network), r"app must be a flwr\.clientapp\.ClientApp .*, not str"),
        (lambda: fedhet.wrap(hospital(), None), "needs the model that the app"),
    ],
)
def test_it_is_told_what_is_wrong(do, why):
    with pytest.raises(FedhetError, match=why):
        do()


def test_a_score_by_another_name(caplog):
    start(fedhet.wrap(hospital(), network, accuracy="auc"))
    assert "returned no metric 'auc', so there is no score; it returned eval_acc, eval_loss, sens" in caplog.text


@pytest.mark.parametrize("node", [{"allow": "weights"}, {"min-examples": 13}])
def test_a_node_that_allows_no_metrics(node, started, caplog):
    app = fedhet.wrap(hospital(), network)

    def at_a_node(message, context):
        context.node_config |= node
        return app(message, context)

    _, rows = started(fedhet.FedAvg(**SETTINGS), at_a_node)
    assert rows[-1]["received"] is None
    assert "eval_acc" not in rows[-1]["metrics"]
    assert (rows[1]["train_loss"] is None) == ("allow" in node)
    assert ("has 12 examples for the metric" in caplog.text) == ("min-examples" in node)
