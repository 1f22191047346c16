"""A user's own Flower ClientApp under fedhet's strategies (`fedhet.wrap`)."""

import logging

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.functional import cross_entropy

import fedhet
from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.errors import FedhetError
from fedhet.flower.grid import LocalGrid
from fedhet.results.history import read_run
from fedhet.results.report import write_report

pytestmark = pytest.mark.usefixtures("home", "no_report")
EXAMPLES = 24


def load(partition_id):
    generator = torch.Generator().manual_seed(partition_id)
    inputs = torch.randn(EXAMPLES + 12, 4, generator=generator, dtype=torch.float64)
    return inputs, (inputs[:, 0] > 0).long()


def network(partition_id=0):
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def hospital(seen=None, net=network, wrong=None, trained=(), scored="eval_acc"):
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
            scored: (scores.argmax(1) == labels).double().mean().item(),
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


FEW = {"rounds": 1, "local-epochs": 2, "learning-rate": 0.5, "clients": 3, "workers": 1}


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
        (lambda: fedhet.wrap(hospital(), network, accuracy="eval_rmse"), "a metric of which higher values are better"),
    ],
)
def test_it_is_told_what_is_wrong(do, why):
    with pytest.raises(FedhetError, match=why):
        do()


def test_a_run_of_an_app_is_not_continued_with_other_clients(tmp_path):
    """Its configuration, which names digits, alone makes clients with fedhet's data and networks."""
    start(fedhet.wrap(hospital(), network), out=str(tmp_path / "run"))
    write_report(tmp_path / "run")
    for file in ("models.md", "config.toml"):
        assert "digits" not in (tmp_path / "run" / file).read_text()
    assert fedhet.load_model(tmp_path / "run", 0, model=network)
    with pytest.raises(FedhetError, match=r"used arguments of your own: pass data=\.\.\."):
        fedhet.evaluate(tmp_path / "run", model=network)
    with pytest.raises(FedhetError, match="of a Flower app, which continues the run with resume = true"):
        fedhet.run({"rounds": 4}, resume=tmp_path / "run")


@pytest.mark.parametrize("changed", [{"momentum": 0.5}, {"seed": 3}, {"fraction_train": 0.5}])
def test_a_strategy_resumes_with_the_same_settings(changed, tmp_path):
    start(fedhet.wrap(hospital(), network), out=str(tmp_path / "run"))
    with pytest.raises(FedhetError, match="has other values of [a-z-]*, which a resumed run cannot change"):
        fedhet.FedAvg(**{**SETTINGS, "rounds": 4, **changed}, out=str(tmp_path / "run"), resume=True).start(
            LocalGrid(fedhet.wrap(hospital(), network), 3)
        )
    again = fedhet.FedAvg(**{**SETTINGS, "rounds": 4}, out=str(tmp_path / "run"), resume=True)
    again.start(LocalGrid(fedhet.wrap(hospital(), network), 3))
    assert again.state.round == 4


def test_a_score_by_another_name(caplog):
    start(fedhet.wrap(hospital(), network, accuracy="auc"))
    assert "returned no metric 'auc', so there is no score; it returned eval_acc, eval_loss, sens" in caplog.text


@pytest.mark.parametrize(("name", "called"), [("eval_auc", "auc"), ("dice", "dice"), ("balanced_accuracy",) * 2])
def test_a_score_has_the_name_of_its_metric(name, called, tmp_path, caplog):
    app = fedhet.wrap(hospital(scored=name), network, accuracy=name)
    config = configuration.resolve({"method": "fedavg", **FEW}, supplied={"model", "data", "split"}, strict=False)
    run_locally(config, tmp_path / "run", app=app)
    called = called.replace("_", "-")
    summary = read_run(tmp_path / "run").summary
    assert summary["metric"] == called
    assert (tmp_path / "run" / "clients.csv").read_text().splitlines()[0].split(",")[4] == called
    assert summary[f"personal_{called}"]["weighted"] >= 0.5
    assert "results call accuracy" not in caplog.text


def test_a_score_that_fedhet_does_not_know_is_named(caplog):
    start(fedhet.wrap(hospital(), network, accuracy="sensitivity"))
    assert "its score is the metric sensitivity, which results call accuracy" in caplog.text


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


@pytest.mark.parametrize("allow", ["weights", "weights,metrics"])
def test_a_server_that_names_the_weight_gets_no_other_metric(allow, started):
    """The weight of a reply is a metric that the server names, such as the loss."""
    app = fedhet.wrap(hospital(), network)
    replies = []

    def at_a_node(message, context):
        context.node_config["allow"] = allow
        replies.append(app(message, context).content)
        return Message(replies[-1], reply_to=message)

    strategy = fedhet.FedAvg(**SETTINGS, weighted_by_key="train_loss")
    if "metrics" not in allow:
        with pytest.raises(FedhetError):
            started(strategy, at_a_node)
        refusals = [str(reply["report"]["refusal"]) for reply in replies if "refusal" in reply["report"]]
        assert {refusal.partition(":")[0] for refusal in refusals} == {
            "this node sends no metrics (allow in its node config), and so no weight but num-examples"
        }
        return
    started(strategy, at_a_node)
    weights = [reply["metrics"]["train_loss"] for reply in replies if "train_loss" in reply.get("metrics", {})]
    assert weights == [float(f"{weight:.4g}") for weight in weights] != []


def test_an_error_of_the_evaluate_function_stays_in_the_nodes_log(started, caplog, home, tmp_path):
    inner, own = hospital(), ClientApp()
    own.train()(lambda message, context: inner(message, context))

    @own.evaluate()
    def evaluate(message, context):
        raise KeyError("patient 4711")

    app = fedhet.wrap(own, network)

    def at_a_node(message, context):
        context.node_config |= {"allow": "weights,metrics", "state-dir": str(tmp_path / "state")}
        return app(message, context)

    _, rows = started(fedhet.FedAvg(**SETTINGS), at_a_node)
    assert [row["failures"] for row in rows] == [[]] * len(rows)
    tracebacks = [logging.Formatter().format(record) for record in caplog.records if record.exc_info]
    assert all("its evaluate function failed" in text and "patient 4711" in text for text in tracebacks)
    assert tracebacks
    assert not (home / ".fedhet" / "clients.log").exists()


class Adapted(nn.Module):
    """A frozen network with an adapter, of which only the adapter is shared."""

    def __init__(self):
        super().__init__()
        self.body, self.adapter = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()


def returning(change):
    """An app whose train function returns `change(state dict of the received arrays)`."""
    app = ClientApp()

    @app.train()
    def train(msg, context):
        arrays = ArrayRecord(change(msg.content["arrays"].to_torch_state_dict()))
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 4})}), reply_to=msg)

    return app


def test_a_part_of_the_network_is_shared_by_wrapping_a_module_of_this_part():
    def part(arrays):
        return {name: tensor + 1 for name, tensor in arrays.items() if "body" not in name}

    why = r"arrays missing \['body.bias', 'body.weight'\].* pass fedhet.wrap a module that has only these"
    with pytest.raises(FedhetError, match=why):
        start(fedhet.wrap(returning(part), Adapted))
    with pytest.raises(FedhetError, match="Return the whole state dict of the model that fedhet.wrap got"):
        start(fedhet.wrap(returning(lambda arrays: {f"net.{name}": t for name, t in arrays.items()}), network))
    adapter = fedhet.wrap(returning(part), lambda: nn.ModuleDict({"adapter": nn.Linear(4, 2).double()}))
    result = fedhet.FedAvg(**SETTINGS).start(LocalGrid(adapter, 3))
    assert set(result.arrays) == {"adapter.weight", "adapter.bias"}


def test_statistics_stay_at_the_clients_with_batch_norm_local():
    def normalised():
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    app = fedhet.wrap(returning(lambda arrays: arrays), normalised)
    result = fedhet.FedAvg(**SETTINGS, batch_norm="local").start(LocalGrid(app, 3))
    assert "1.weight" in result.arrays
    assert "1.running_mean" not in result.arrays
    lacking = fedhet.wrap(returning(lambda arrays: {n: a for n, a in arrays.items() if "running" not in n}), normalised)
    with pytest.raises(FedhetError, match="also BatchNorm's statistics, which batch-norm = local keeps"):
        fedhet.FedAvg(**SETTINGS, batch_norm="local").start(LocalGrid(lacking, 3))


def test_random_numbers_differ_by_round_and_splits_do_not():
    drawn, splits = {}, {}

    def change(arrays):
        drawn.setdefault("train", []).append((*torch.rand(2).tolist(),))
        splits.setdefault("torch", set()).add((*torch.randperm(9).tolist(),))
        splits.setdefault("numpy", set()).add((*np.random.permutation(9).tolist(),))
        return arrays

    for _ in range(2):
        fedhet.FedAvg(rounds=3, clients=1).start(LocalGrid(fedhet.wrap(returning(change), network), 1))
    assert len(set(drawn["train"][:3])) == 3
    assert drawn["train"][:3] == drawn["train"][3:], "the same in each run"
    assert {name: len(found) for name, found in splits.items()} == {"torch": 1, "numpy": 1}


def test_a_client_whose_training_fails_is_evaluated(started):
    inner = hospital()
    app = ClientApp()

    @app.train()
    def train(msg, context):
        if context.node_config["partition-id"] == 1 and msg.content["config"]["server-round"] == 2:
            raise RuntimeError("out of order")
        return inner(msg, context)

    app.evaluate()(lambda msg, context: inner(msg, context))
    _, rows = started(fedhet.FedAvg(**SETTINGS), fedhet.wrap(app, network))
    assert [row["received"]["clients"] for row in rows[1:]] == [3, 3, 3, 3]
    assert [row["participants"] for row in rows[1:4]] == [["0", "1", "2"], ["0", "2"], ["0", "1", "2"]]
    assert [failure["client"] for failure in rows[2]["failures"]] == ["1"]


@pytest.mark.parametrize("every", [1, 3])
def test_metrics_of_both_functions_keep_their_names(every, started):
    """Also in rounds without an evaluation."""
    app = fedhet.wrap(hospital(trained=[("accuracy", 0.25)]), network)
    _, rows = started(fedhet.FedAvg(**SETTINGS, evaluate_every=every), app)
    assert [row["metrics"].get("train_accuracy") for row in rows[1:4]] == [0.25] * 3
    assert not any("accuracy" in row["metrics"] for row in rows)
