"""Habits of Flower's users, one small app each: fedhet's strategies behave as Flower's own do in the same app."""

import inspect
import logging
import math
import re

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.server import Server, SimpleClientManager
from flwr.serverapp import strategy as flower
from torch import nn

import fedhet
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower.grid import LocalGrid
from fedhet.flower.messages import decode_arrays
from fedhet.server import flower_loop

pytestmark = pytest.mark.usefixtures("home", "no_report")
COUNTS = 10, 20, 30


def network():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def hospital(
    train_metrics=None, eval_metrics=None, change=None, seen=None, mods=None, train_mods=None, evaluate_as=None
):
    """A ClientApp whose client i adds i + 1 to each array; `change` alters its reply to a training message.

    `evaluate_as` returns a client's metrics for an evaluation message.
    """
    app = ClientApp(mods=mods)

    def note(kind, msg):
        if seen is not None:
            seen.append((kind, {name: dict(record) for name, record in msg.content.config_records.items()}))

    @app.train(mods=train_mods)
    def train(msg, context):
        note("train", msg)
        client = context.node_config["partition-id"]
        (name, arrays), *_ = msg.content.array_records.items()
        moved = {key: tensor + client + 1 for key, tensor in arrays.to_torch_state_dict().items()}
        metrics = {"train_loss": 1.0, "num-examples": COUNTS[client], **(train_metrics or {})}
        reply = RecordDict({name: ArrayRecord(moved), "metrics": MetricRecord(metrics)})
        return change(msg, reply) if change else Message(reply, reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        note("evaluate", msg)
        metrics = {"eval_loss": 0.5, "eval_acc": 0.75, "num-examples": 10, **(eval_metrics or {})}
        if evaluate_as:
            metrics = evaluate_as(context.node_config["partition-id"], msg)
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

    return app


def first():
    return ArrayRecord({name: torch.zeros_like(tensor) for name, tensor in network().state_dict().items()})


def wrapped(*arguments, **options):
    return fedhet.wrap(hospital(*arguments, **options), network)


def ours(app, strategy=None, clients=3, num_rounds=1, arrays=True, **more):
    strategy = strategy or fedhet.FedAvg()
    return strategy.start(LocalGrid(app, clients), first() if arrays else None, num_rounds=num_rounds, **more)


def theirs(app, strategy=None, clients=3, num_rounds=1, **more):
    return (strategy or flower.FedAvg()).start(LocalGrid(app, clients), first(), num_rounds=num_rounds, **more)


def level(result):
    """Return the value of all entries of the global model: the sum over rounds of the clients' weighted mean."""
    (value,) = {round(float(each), 4) for array in decode_arrays(result.arrays).values() for each in array.ravel()}
    return value


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="flwr")
    return caplog


# ---- runs


def test_every_start_is_a_run_from_the_given_arrays_and_prints_its_rounds(capsys):
    strategy, other = fedhet.FedAvg(), flower.FedAvg()
    for rounds in (1, 2):
        one, two = ours(wrapped(), strategy, num_rounds=rounds), theirs(hospital(), other, num_rounds=rounds)
        assert level(one) == pytest.approx(level(two)) == pytest.approx(rounds * 14 / 6, abs=1e-3)
        assert set(one.train_metrics_clientapp) == set(two.train_metrics_clientapp) == {*range(1, rounds + 1)}
    assert re.findall(r"round (./.): 3 clients", capsys.readouterr().out) == ["1/1", "1/2", "2/2"]
    earlier = strategy.state.run
    strategy.state = strategy.state  # to continue
    assert level(ours(wrapped(), strategy, num_rounds=3)) == pytest.approx(3 * 14 / 6, abs=1e-3)
    assert (strategy.state.round, strategy.state.run) == (3, earlier)


@pytest.mark.parametrize("where", ["server", "client"])
def test_epsilon_adds_up_over_all_starts(tiny, where):
    pytest.importorskip("dp_accounting")
    initial, strategy = ArrayRecord(tiny.model().state_dict()), fedhet.FedAvg(rounds=1)
    mods = [LocalDpMod(0.1, 0.2, 4.0, 1e-5)] if where == "client" else None
    started = flower.DifferentialPrivacyServerSideFixedClipping(strategy, 2.0, 0.1, 3) if mods is None else strategy
    spent = []
    for _ in range(2):
        started.start(LocalGrid(tiny.app(mods=mods), 3), initial, num_rounds=1)
        spent.append(strategy.run.privacy.spent())
    assert [each["rounds"] for each in spent] == [1, 2]
    assert spent[0]["epsilon"] < spent[1]["epsilon"]
    del started
    strategy.start(LocalGrid(tiny.app(), 3), initial, num_rounds=1)  # without the wrapper or the mod
    assert strategy.run.privacy.spent()["note"] == "a later run adds no noise"


def test_a_start_after_hooks_that_left_a_round_open_is_a_new_run():
    strategy, grid = fedhet.FedAvg(rounds=1), LocalGrid(wrapped(), 3)
    messages = strategy.configure_train(1, first(), ConfigRecord(), grid)
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    result = ours(wrapped(), strategy, num_rounds=1)
    assert set(result.train_metrics_clientapp) == {1}
    assert level(result) == pytest.approx(14 / 6, abs=1e-3)


def test_flowers_older_server_is_refused_with_the_way_out():
    server = Server(client_manager=SimpleClientManager(), strategy=fedhet.FedAvg())
    with pytest.raises(ConfigError, match=r"FedAvg cannot run in a server_fn, .* FedAvg\(\).start\(grid\)"):
        server.fit(num_rounds=1, timeout=None)


def decaying(base):
    class Decaying(base):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            self.calls = []

        def configure_train(self, server_round, arrays, config, grid):
            config["lr"] *= 0.5
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            doubled = {name: 2 * tensor for name, tensor in arrays.to_torch_state_dict().items()}
            return ArrayRecord(doubled), metrics

        def configure_evaluate(self, server_round, arrays, config, grid):
            self.calls.append((server_round, round(float(arrays.to_numpy_ndarrays()[1][0]), 3)))
            return super().configure_evaluate(server_round, arrays, config, grid)

        def aggregate_evaluate(self, server_round, replies):
            metrics = super().aggregate_evaluate(server_round, list(replies))
            metrics["mine"] = 1.0
            return metrics

        def summary(self):
            self.calls.append("summary")
            super().summary()

    return Decaying()


def test_overridden_hooks_are_called_as_in_flower():
    found = []
    for base, run, app in ((fedhet.FedAvg, ours, wrapped), (flower.FedAvg, theirs, hospital)):
        seen, strategy = [], decaying(base)
        result = run(app(seen=seen), strategy, num_rounds=2, train_config=ConfigRecord({"lr": 0.8}))
        rates = [record["config"]["lr"] for kind, record in seen if kind == "train"]
        means = [result.evaluate_metrics_clientapp[round]["mine"] for round in (1, 2)]
        found.append((level(result), rates, means, strategy.calls))
    assert found[0] == found[1]
    assert found[0] == (14.0, [0.4] * 3 + [0.2] * 3, [1.0, 1.0], ["summary", (1, 4.667), (2, 14.0)])


def test_a_hook_of_evaluation_costs_no_decoding(monkeypatch):
    decoded = []
    monkeypatch.setattr(flower_loop, "decode_arrays", lambda arrays: decoded.append(1) or decode_arrays(arrays))

    class Training(fedhet.FedAvg):
        def configure_train(self, *arguments):
            return super().configure_train(*arguments)

    class Evaluating(Training):
        def configure_evaluate(self, *arguments):
            return super().configure_evaluate(*arguments)

    counts = []
    for strategy in (Training(), Evaluating()):
        decoded.clear()
        ours(wrapped(), strategy, num_rounds=2)
        counts.append(len(decoded))
    assert counts[0] == counts[1]


def test_should_stop_ends_training_as_in_flower():
    asked = []

    def should_stop(round, result):
        asked.append((round, len(result.evaluate_metrics_clientapp[round]) > 0))
        return round == 2

    for strategy, scored, rounds in ((fedhet.FedAvg(), "received", 3), (fedhet.Ensemble(), "trained", 2)):
        asked.clear()
        result = ours(wrapped(), strategy, num_rounds=5, arrays=scored == "received", should_stop=should_stop)
        assert strategy.run.traits.scored == scored
        assert set(result.train_metrics_clientapp) == {*range(1, rounds + 1)}
        assert strategy.state.stopped == strategy.state.round == rounds
        assert asked == [(1, True), (2, True)]
    if "should_stop" not in inspect.signature(flower.FedAvg.start).parameters:
        with pytest.raises(ConfigError, match=r"should_stop of a strategy that overrides .* needs Flower 1\.43"):
            ours(wrapped(), decaying(fedhet.FedAvg), num_rounds=5, should_stop=should_stop)
        return
    asked.clear()
    for base, run, app in ((fedhet.FedAvg, ours, wrapped), (flower.FedAvg, theirs, hospital)):
        result = run(app(), decaying(base), num_rounds=5, should_stop=should_stop, train_config=ConfigRecord({"lr": 1}))
        assert set(result.evaluate_metrics_clientapp) == {1, 2}
    assert asked == [(1, True), (2, True)] * 2


def test_replies_are_pulled_by_the_ids_of_their_messages():
    grid = LocalGrid(wrapped(), 3)
    messages = [grid.create_message(RecordDict(), "query", node, "") for node in grid.get_node_ids()]
    one, two, three = grid.push_messages(messages)

    def answered(replies):
        return {reply.metadata.reply_to_message_id for reply in replies}

    assert answered(grid.pull_messages(message_ids=[])) == set()
    assert answered(grid.pull_messages(reply_to_message_ids=[two])) == {two}
    assert answered(grid.pull_messages()) == {one, three}


def test_hooks_without_a_use_are_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"Mine defines _construct_messages, which .* override one of configure_train"
    ):
        type("Mine", (fedhet.FedAvg,), {"_construct_messages": lambda self: []})

    class Alone(fedhet.FedAvg):
        def aggregate_train(self, server_round, replies):
            return first(), MetricRecord()

    with pytest.raises(ConfigError, match=r"aggregate_train of Alone must call super\(\)\.aggregate_train"):
        ours(wrapped(), Alone())

    class Other(fedhet.FedProto):
        def aggregate_train(self, server_round, replies):
            return first(), super().aggregate_train(server_round, replies)[1]

    class Same(fedhet.FedDF):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    settings = {"clients": 2, "dataset": "digits", "architectures": "mlp", "public": torch.ones(32, 1, 8, 8)}
    result = Same(**settings).start(LocalGrid(fedhet.make_client_app(), 2), num_rounds=2)
    assert set(result.train_metrics_clientapp) == {1, 2}
    with pytest.raises(ConfigError, match="aggregate_train returned changed arrays, but clients of fedproto share no"):
        Other(clients=2, dataset="digits").start(LocalGrid(fedhet.make_client_app(), 2), num_rounds=1)


# ---- settings


def test_train_config_and_evaluate_config_arrive_unchanged():
    train = {"momentum": 0.9, "optimizer": "rmsprop", "local_epochs": 7, "seed": 3, "settings": "mine", "sizes": [1, 2]}
    evaluate = {"batch-size": 512, "local-epochs": 9}
    configs = {"train_config": ConfigRecord(train), "evaluate_config": ConfigRecord(evaluate)}
    found = {}
    strategy = fedhet.FedProx(local_epochs=2, batch_size=8, proximal_mu=0.5)
    for run, app, each in ((ours, wrapped, strategy), (theirs, hospital, None)):
        seen = []
        run(app(seen=seen), each, **{name: ConfigRecord(dict(record)) for name, record in configs.items()})
        found[run] = {kind: records["config"] for kind, records in seen}
    own = {"local-epochs": 2, "batch-size": 8, "lr": 0.01, "mu": 0.5, "proximal-mu": 0.5}
    assert found[ours]["train"] == own | found[theirs]["train"]
    assert found[ours]["evaluate"].items() >= found[theirs]["evaluate"].items()
    assert {"momentum", "local_epochs"} & found[ours]["evaluate"].keys() == set()
    assert (strategy.config.local_epochs, strategy.config.batch_size, strategy.config.seed) == (2, 8, 0)


def test_train_config_sets_fedhets_training_loop_and_evaluate_config_does_not(tiny, said, tmp_path):
    strategy = fedhet.FedAvg(out=str(tmp_path / "run"))
    configs = {"train_config": ConfigRecord({"lr": 0.25}), "evaluate_config": ConfigRecord({"batch-size": 3})}
    strategy.start(LocalGrid(tiny.app(), 2), num_rounds=1, **configs)
    assert (strategy.config.learning_rate, strategy.config.batch_size) == (0.25, 32)
    assert "learning-rate = 0.25" in (tmp_path / "run" / "config.toml").read_text()
    for wrong, why in (({"seed": 3}, "train_config cannot set 'seed'"), ({"learning-rat": 1}, "did you mean")):
        with pytest.raises(ConfigError, match=why):
            fedhet.FedAvg().start(LocalGrid(tiny.app(), 2), num_rounds=1, train_config=ConfigRecord(wrong))


@pytest.mark.parametrize("entry", [{"method": "fedprox"}, {"rounds": 9}, {"num-server-rounds": 9}])
@pytest.mark.parametrize("argument", ["train_config", "evaluate_config"])
def test_method_and_rounds_are_no_entries(entry, argument):
    with pytest.raises(ConfigError, match=f"{argument} cannot set '{next(iter(entry))}'"):
        ours(wrapped(), **{argument: ConfigRecord(entry)})


def test_numbers_of_nodes_have_flowers_meaning(monkeypatch):
    for options, count in (({}, 2), ({"fraction_train": 0.1, "min_train_nodes": 3}, 3)):
        trained = []
        for run, app, base in ((ours, wrapped, fedhet), (theirs, hospital, flower)):
            seen = []
            run(app(seen=seen), base.FedAvg(**({"fraction_train": 0.67, "min_train_nodes": 2} | options)))
            trained.append(sum(kind == "train" for kind, _ in seen))
        assert trained == [count, count]
    monkeypatch.setattr("fedhet.server.federation.GRACE", 0.0)
    with pytest.raises(FedhetError, match="only 3 nodes are connected, and 4 are needed"):
        ours(wrapped(), fedhet.FedAvg(min_available_nodes=4))


# ---- replies


@pytest.mark.parametrize("key", ["num-examples", "importance", "own-metric", "received-loss"])
def test_the_number_in_the_reply_weighs(key):
    def change(msg, reply):
        client = int(decode_arrays(next(iter(reply.array_records.values())))["0.bias"][0] - 1)
        if key != "num-examples":
            reply["metrics"][key] = [3, 2, 1][client]
        return Message(reply, reply_to=msg)

    app = hospital(None, {key: 10 if key == "num-examples" else 1}, change)
    strategies = fedhet.FedAvg(weighted_by_key=key), flower.FedAvg(weighted_by_key=key)
    result = ours(fedhet.wrap(app, network), strategies[0])
    assert (
        level(result) == level(theirs(app, strategies[1])) == pytest.approx(14 / 6 if key[0] == "n" else 10 / 6, 1e-3)
    )


def test_records_go_by_the_strategys_names():
    seen = []
    strategy = fedhet.FedAvg(arrayrecord_key="weights", configrecord_key="how")
    assert level(ours(wrapped(seen=seen), strategy)) == pytest.approx(14 / 6, abs=1e-3)
    assert {name for _, records in seen for name in records} == {"how"}


@pytest.mark.parametrize("kind", ["ArrayRecord", "MetricRecord"])
def test_several_records_are_refused(kind):
    def change(msg, reply):
        reply["more"] = first() if kind == "ArrayRecord" else MetricRecord({"a": 1})
        return Message(reply, reply_to=msg)

    with pytest.raises(FedhetError, match=f"returned 2 {kind}s: return exactly one"):
        ours(wrapped(change=change))
    with pytest.raises(Exception, match=f"exactly one {kind}"):
        theirs(hospital(change=change))


def test_config_records_of_a_reply_arrive():
    def change(msg, reply):
        reply["about"] = ConfigRecord({"scanner": "B"})
        reply["report"] = ConfigRecord({"client": "other"})
        return Message(reply, reply_to=msg)

    found = []

    class Reading(fedhet.FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            found.extend(reply.content["about"]["scanner"] for reply in replies)
            return super().aggregate_train(server_round, replies)

    assert level(ours(wrapped(change=change), Reading())) == pytest.approx(14 / 6, abs=1e-3)
    assert found == ["B"] * 3


def test_metrics_keep_their_names(watch):
    mine = {"train-loss": 5.0, "eval_acc": 7.0, "received-accuracy": 6.0, "confusion": [1.0, 2.0]}
    app = wrapped(train_metrics=mine, eval_metrics={"received-accuracy": 3.0, "hours": 2.0})
    result = ours(app, fedhet.FedAvg(observers=[watch]))
    got = dict(result.train_metrics_clientapp[1])
    expected = {"train_train-loss": 5.0, "train_eval_acc": 7.0, "train_received-accuracy": 6.0, "confusion.0": 1.0}
    expected |= {"confusion.1": 2.0, "evaluate_received-accuracy": 3.0, "hours": 2.0, "eval_acc": 0.75}
    assert got | expected | {"eval_acc": 7.0} == got
    assert (got["train-loss"], got["received-accuracy"]) == (1.0, 0.75)
    assert watch.rows[1]["metrics"] | expected == watch.rows[1]["metrics"]


def test_a_metric_of_both_functions_counts_at_a_client_whose_evaluation_fails():
    def change(msg, reply):
        reply["metrics"]["hours"] = float(reply["metrics"]["num-examples"])
        return Message(reply, reply_to=msg)

    def evaluate(client, msg):
        if client == 0:
            raise RuntimeError("no test part")
        return {"eval_loss": 0.5, "eval_acc": 0.75, "hours": 90.0, "num-examples": 10}

    result = ours(wrapped(change=change, evaluate_as=evaluate))
    got = dict(result.train_metrics_clientapp[1])
    expected = sum(count**2 for count in COUNTS) / sum(COUNTS)
    assert (got["train_hours"], got["hours"]) == pytest.approx((expected, expected))
    assert result.evaluate_metrics_clientapp[1]["hours"] == 90.0


def test_a_metric_with_the_prefix_train_is_not_that_of_the_evaluate_function():
    app = wrapped(
        train_metrics={"train_hours": 1.0, "train_acc": 2.0, "acc": 3.0}, eval_metrics={"hours": 4.0, "acc": 5.0}
    )
    result = ours(app)
    got = dict(result.train_metrics_clientapp[1])
    assert (got["train_hours"], got["hours"], got["train_acc"], got["acc"]) == (1.0, 4.0, 2.0, 3.0)
    assert result.evaluate_metrics_clientapp[1]["acc"] == 5.0


@pytest.mark.parametrize("accuracy", [87.5, 1.0000001, -0.5, math.nan])
def test_a_metric_that_is_none_is_dropped_and_the_arrays_count(accuracy, said):
    result = ours(wrapped(eval_metrics={"eval_acc": accuracy}, train_metrics={"train_loss": math.inf}))
    assert level(result) == pytest.approx(14 / 6, abs=1e-3)
    assert "received-accuracy" not in result.train_metrics_clientapp[1]
    assert "3 clients (0, 1, 2): " in said.text
    assert "train_loss of its train function is not a finite number up to 1e+09, and is left out" in said.text
    assert re.search("eval_acc (is .* must be from 0 to 1|of its evaluate function is not a finite number)", said.text)


@pytest.mark.parametrize("missing", [True, False])
def test_an_app_whose_evaluate_function_fails_trains(missing, said, home):
    inner, app = hospital(), ClientApp()
    app.train()(lambda msg, context: inner(msg, context))
    if not missing:
        app.evaluate()(lambda msg, context: 1 / 0)
    assert level(ours(fedhet.wrap(app, network))) == pytest.approx(14 / 6, abs=1e-3)
    why = "your ClientApp has no function for evaluate: add one with @app.evaluate()"
    log = home / ".fedhet" / "clients.log"
    why = why if missing else f"its evaluate function raised ZeroDivisionError: division by zero (traceback in {log}"
    assert f"3 clients (0, 1, 2): {why}" in said.text
    assert missing or log.read_text().count("1 / 0") >= 3


# ---- mods and wrappers


@pytest.mark.parametrize("place", ["mods", "train_mods"])
@pytest.mark.parametrize("mod", [LocalDpMod(0.1, 0.0, 1.0, 1e-5), fixedclipping_mod, adaptiveclipping_mod])
def test_mods_of_a_wrapped_app(mod, place, said):
    norms = []
    for app, base in ((wrapped, fedhet), (hospital, flower)):
        strategy = base.FedAvg(**({"rounds": 1} if base is fedhet else {}))
        if mod is fixedclipping_mod:
            strategy = flower.DifferentialPrivacyClientSideFixedClipping(strategy, 0.0, 0.1, 3)
        elif mod is adaptiveclipping_mod:
            strategy = flower.DifferentialPrivacyClientSideAdaptiveClipping(strategy, 0.0, 3)
        result = strategy.start(LocalGrid(app(**{place: [mod]}), 3), first(), num_rounds=1)
        norms.append(np.sqrt(sum(np.square(array).sum() for array in decode_arrays(result.arrays).values())))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert 0.05 < norms[0] < 0.1001
    if place == "mods":  # such a mod answers evaluation with an error, as in Flower
        assert "evaluate function of your ClientApp failed: " in said.text


def test_a_mod_leaves_replies_without_arrays_as_they_are(tiny, said):
    """Those are a closing round's, in which heads are trained, and refusals."""
    app = tiny.app(mods=[LocalDpMod(1.0, 0.1, 5.0, 1e-5)])
    result = fedhet.FedRep(model=tiny.model, closing_epochs=1).start(LocalGrid(app, 2), num_rounds=1)
    assert set(result.train_metrics_clientapp) == {1, 2}
    assert "failed" not in said.text


@pytest.mark.parametrize("name", ["strategy", "inner"])
@pytest.mark.parametrize("method", ["FedHeNN", "FedMA"])
def test_a_wrapper_of_ones_own(name, method):
    class Outer(flower.Strategy):
        def __init__(self, inner):
            setattr(self, name, inner)
            for hook in ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary"):
                setattr(self, hook, getattr(inner, hook))

    Outer.__abstractmethods__ = frozenset()
    settings = {"dataset": "digits", "architectures": "mlp", "samples_per_client": 32}
    public = {"public": torch.ones(32, 1, 8, 8), "rad_size": 32} if method == "FedHeNN" else {}
    strategy = getattr(fedhet, method)(**settings, **public, rounds=3)
    result = Outer(strategy).start(LocalGrid(fedhet.make_client_app(), 3), ArrayRecord(), num_rounds=3)
    assert set(result.train_metrics_clientapp) == {1, 2, 3}


# ---- arrays and evaluations at the server


def test_evaluate_fn_is_called_or_the_run_says_why_not(tiny, said):
    found = {}

    def evaluate_fn(round, arrays):
        found.setdefault(name, []).append([*arrays])
        return MetricRecord({"a": 1.0})

    for name in ("FedAvg", "FedRep", "Ensemble"):
        getattr(fedhet, name)(rounds=1).start(LocalGrid(tiny.app(), 2), evaluate_fn=evaluate_fn)
    keys = [*tiny.model().state_dict()]
    assert found == {"FedAvg": [keys, keys], "Ensemble": [[f"{client}/{key}" for client in "01" for key in keys]]}
    assert said.text.count("evaluate_fn is not called, since fedrep has no global model") == 1


def test_the_advice_for_a_method_without_public_dataset_works():
    small = {"samples_per_client": 20, "architectures": "mlp", "rounds": 1}
    with pytest.raises(FedhetError, match="there is no public dataset, .*: set public-samples and dataset, or have"):
        fedhet.FedHeNN(**small).start(LocalGrid(fedhet.make_client_app(), 2))
    strategy = fedhet.FedHeNN(**small, dataset="digits", public_samples=30)
    strategy.start(LocalGrid(fedhet.make_client_app(), 2))
    assert strategy.state.public_size == 30


def test_the_grown_network_of_fedma(tiny):
    widths = []

    def evaluate_fn(round, arrays):
        network = strategy.global_model()
        network.load_state_dict(arrays.to_torch_state_dict())
        widths.append(network[0].out_features)

    strategy = fedhet.FedMA(model=tiny.model)
    strategy.start(LocalGrid(tiny.app(), 2), evaluate_fn=evaluate_fn)
    assert widths
    assert min(widths) >= 6


def test_initial_arrays_are_used_or_refused(tiny, said):
    arrays = ArrayRecord(tiny.model().state_dict())
    for name in ("Ensemble", "PFedHN"):
        with pytest.raises(ConfigError, match="has no shared model that initial_arrays could set: leave them out"):
            getattr(fedhet, name)().start(LocalGrid(tiny.app(), 2), arrays, num_rounds=1)
    fedhet.FedProto().start(LocalGrid(tiny.app(), 2), arrays, num_rounds=1)
    assert "initial_arrays have no effect, since clients of fedproto share no model" in said.text
    (strategy := fedhet.FedRep(learning_rate=1e-12)).start(LocalGrid(tiny.app(), 2), arrays, num_rounds=1)
    assert all(np.allclose(array, decode_arrays(arrays)[name]) for name, array in strategy.state.model.items())
    assert "initial arrays that no client shares are ignored: 2.bias, 2.weight" in said.text


# ---- where a run is recorded


def test_every_run_has_a_folder_of_its_own(home, tmp_path, monkeypatch, capsys, said):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        ours(wrapped(), fedhet.FedAvg(out="runs/mine"))
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mine", "mine-2"]
    monkeypatch.setattr("fedhet.server.run.LocalGrid", int)  # as in Flower's runtime, which works elsewhere
    ours(wrapped(), fedhet.FedAvg(out="runs/mine"))
    assert (home / ".fedhet" / "runs" / "mine" / "summary.json").is_file()
    assert f"results go to {home / '.fedhet' / 'runs' / 'mine'}" in said.text


# ---- the same result as with Flower's strategy


def evaluations(run, app, base):
    """Rounds, names and means (weighted by the numbers of examples) of evaluations, and what `server-round` says."""
    rounds = []

    def evaluate_as(client, msg):
        weight = float(msg.content["arrays"].to_numpy_ndarrays()[0][0, 0])
        rounds.append((msg.content["config"]["server-round"], round(weight, 2)))
        return {"eval_loss": weight, "eval_acc": client / 4, "hours": 2.0 * client, "num-examples": 3 - client}

    result = run(app(evaluate_as=evaluate_as), base.FedAvg(), num_rounds=3).evaluate_metrics_clientapp
    means = {
        at: {name: round(row[name], 3) for name in ("eval_loss", "eval_acc", "hours")} for at, row in result.items()
    }
    assert not any("num-examples" in row for row in result.values())
    return means, {(1, 2.33), (2, 4.67), (3, 7.0)} <= {*rounds}


def replies_of_hooks(run, app, base):
    """Metrics that a subclass reads in the replies of its clients, and its attributes."""
    read = []

    class Reader(base.FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            read.extend(
                (r.content["metrics"]["train_loss"], r.content["metrics"][self.weighted_by_key]) for r in replies
            )
            return super().aggregate_train(server_round, replies)

        def aggregate_evaluate(self, server_round, replies):
            replies = list(replies)
            read.extend((r.content["metrics"]["eval_acc"], r.content["metrics"]["num-examples"]) for r in replies)
            return super().aggregate_evaluate(server_round, replies)

    strategy = Reader(fraction_train=1.0, min_train_nodes=3)
    names = set(run(app(), strategy).evaluate_metrics_clientapp[1])
    return sorted(read), {"eval_acc", "eval_loss"} <= names, (strategy.fraction_train, strategy.min_train_nodes)


def own_messages(run, app, base):
    """Answers of a client's other functions, and a run of Flower's own strategy with the same ClientApp."""
    inner = hospital()
    inner.query()(lambda msg, context: Message(RecordDict({"c": ConfigRecord({"a": 1})}), reply_to=msg))
    inner.train("warm")(lambda msg, context: Message(RecordDict({"c": ConfigRecord({"a": 2})}), reply_to=msg))
    grid = LocalGrid(inner if app is hospital else fedhet.wrap(inner, network), 3)
    asked = [Message(RecordDict(), dst_node_id=100, message_type=kind) for kind in ("query", "train.warm")]
    return [m.content["c"]["a"] for m in grid.send_and_receive(asked)], level(flower.FedAvg().start(grid, first(), 1))


def lists_of_arrays(run, app, base):
    """A run from a list of arrays, whose clients return lists of arrays."""

    def change(msg, reply):
        (name, arrays), *_ = reply.array_records.items()
        reply[name] = ArrayRecord(arrays.to_numpy_ndarrays())
        return Message(reply, reply_to=msg)

    grid, initial = (
        LocalGrid(app(change=change), 3),
        ArrayRecord([np.ones_like(a) for a in first().to_numpy_ndarrays()]),
    )
    return level(base.FedAvg().start(grid, initial, 2))


def replying(numbers):
    """A run in which client i returns `numbers[i]` as `num-examples`."""

    def change(msg, reply):
        client = int(decode_arrays(next(iter(reply.array_records.values())))["0.bias"][0] - 1)
        reply["metrics"]["num-examples"] = numbers[client]
        return Message(reply, reply_to=msg)

    return lambda run, app, base: level(run(app(change=change), base.FedAvg()))


def weights_in_hooks(key):
    """Runs of subclasses that read and set the clients' weights; the train function returns them as `key`."""

    def change(msg, reply):
        client = int(decode_arrays(next(iter(reply.array_records.values())))["0.bias"][0] - 1)
        reply["metrics"][key] = (10.5, 0.5, 3.0)[client]
        return Message(reply, reply_to=msg)

    def result(run, app, base):
        read = []

        class Squared(base.FedAvg):
            def aggregate_train(self, server_round, replies):
                for reply in (replies := [*replies]):
                    read.append(reply.content["metrics"][key])
                    reply.content["metrics"][key] = self.changed(read[-1])
                return super().aggregate_train(server_round, replies)

            def changed(self, number):
                return number * number

        class Equal(Squared):
            def changed(self, number):
                return 1

        runs = [run(app(None, {key: 10}, change), kind(weighted_by_key=key)) for kind in (Squared, Equal)]
        return [level(each) for each in runs], sorted(read)

    return result


def weights_of_evaluations(run, app, base):
    """A run of a subclass that gives each client's evaluation the square of its weight."""

    class Squared(base.FedAvg):
        def aggregate_evaluate(self, server_round, replies):
            for reply in (replies := [*replies]):
                reply.content["metrics"]["num-examples"] **= 2
            return super().aggregate_evaluate(server_round, replies)

    def evaluated(client, message):
        return {"eval_loss": float(client), "eval_acc": client / 4, "num-examples": client + 2}

    result = run(app(evaluate_as=evaluated), Squared())
    return {name: round(result.evaluate_metrics_clientapp[1][name], 9) for name in ("eval_loss", "eval_acc")}


@pytest.mark.parametrize("claimant", [0, 1, 2])
def test_claims_of_evaluations_are_limited_with_hooks_and_without(claimant):
    """Also those of a client that does not train in the round."""

    class Hooked(fedhet.FedAvg):
        def aggregate_evaluate(self, server_round, replies):
            return super().aggregate_evaluate(server_round, replies)

    def evaluated(client, message):
        return {"eval_loss": float(client), "eval_acc": 0.5, "num-examples": 10**6 if client == claimant else 10}

    mean = (10 * 3 + 90 * claimant) / (100 + 10 + 10)
    for kind in (fedhet.FedAvg, Hooked):
        result = ours(wrapped(evaluate_as=evaluated), kind(clip_norm=5.0, fraction_train=0.67))
        assert result.evaluate_metrics_clientapp[1]["eval_loss"] == pytest.approx(mean)


def evaluating(**metrics):
    """A run whose evaluations have these metrics."""

    def result(run, app, base):
        found = run(app(evaluate_as=lambda client, msg: {**metrics, "num-examples": 2}), base.FedAvg())
        return level(found), {**found.evaluate_metrics_clientapp[1]}

    return result


def without_some_messages(run, app, base):
    """Subclasses that ask fewer clients, leave out replies, and give all clients one weight."""

    class Fewer(base.FedAvg):
        def configure_train(self, *arguments):
            return sorted(super().configure_train(*arguments), key=lambda message: message.metadata.dst_node_id)[:2]

    class Larger(base.FedAvg):
        def aggregate_train(self, server_round, replies):
            large = [reply for reply in replies if reply.content["metrics"]["num-examples"] > 15]
            return super().aggregate_train(server_round, large)

    class Equal(base.FedAvg):
        def aggregate_train(self, server_round, replies):
            for reply in (replies := [*replies]):
                reply.content["metrics"]["num-examples"] = 1
            return super().aggregate_train(server_round, replies)

    equal = run(app(train_metrics={"hours": 1.0}, eval_metrics={"hours": 2.0}), Equal())
    hours = [round[1]["hours"] for round in (equal.train_metrics_clientapp, equal.evaluate_metrics_clientapp)]
    return level(run(app(), Fewer())), level(run(app(), Larger())), level(equal), hours


@pytest.mark.parametrize(
    "result",
    [
        evaluations,
        replies_of_hooks,
        own_messages,
        lists_of_arrays,
        without_some_messages,
        weights_of_evaluations,
        pytest.param(weights_in_hooks("num-examples"), id="fractions of examples in hooks"),
        pytest.param(weights_in_hooks("importance"), id="weights in hooks"),
        pytest.param(replying((10.5, 0.5, 1)), id="fractions of examples"),
        pytest.param(evaluating(eval_loss=2.0), id="no accuracy"),
        pytest.param(evaluating(auc=0.5), id="another score"),
    ],
)
def test_the_same_result_as_in_flower(result):
    mine, right = result(ours, wrapped, fedhet), result(theirs, hospital, flower)
    assert mine == right


# ---- sentences


def plain():
    return hospital(), "add the line app = fedhet.wrap\\(app, model\\)"


def legacy():
    from flwr.client import NumPyClient

    return ClientApp(lambda context: NumPyClient().to_client()), "made from a client_fn .* fedhet.wrap\\(app, model\\)"


@pytest.mark.parametrize("make", [plain, legacy])
def test_an_app_of_flowers_is_told_the_line_to_write(make):
    app, why = make()
    with pytest.raises(FedhetError, match=why):
        ours(app)


def none(msg, reply):
    return None


def of_context(context):
    return network()


class Skipping(fedhet.FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        return []


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (lambda: fedhet.FedAvg(0.5), r"pass settings by keyword, such as FedAvg\(fraction_train=0.5\)"),
        (
            lambda: fedhet.FedAvg(train_metrics_aggr_fn=len),
            "train_metrics_aggr_fn is not supported: .* override aggregate_train in a sub",
        ),
        (lambda: fedhet.FedAvg(min_train_nodes="3"), "min_train_nodes = '3': must be of type int"),
        (lambda: fedhet.make_client_app(mods=fixedclipping_mod), "mods must be a list of Flower mods"),
        (lambda: fedhet.make_client_app(mods=[secaggplus_mod]), "secaggplus_mod needs the workflow of Flower's older"),
        (lambda: wrapped(mods=[secaggplus_mod]), "secaggplus_mod needs the workflow of Flower's older"),
        (lambda: wrapped(train_mods=[secaggplus_mod]), "secaggplus_mod needs the workflow of Flower's older"),
        (
            lambda: setattr(fedhet.FedAvg(), "fraction_train", 0.5),
            r"only when the .* created: FedAvg\(fraction_train=0.5",
        ),
        (lambda: fedhet.FedAvg().start(None, network().state_dict()), "initial_arrays must be a flwr.app.ArrayRecord"),
        (
            lambda: fedhet.FedAvg().start(LocalGrid(wrapped(), 2), ArrayRecord({"a": torch.ones(1)}), 1),
            "initial_arrays has none of the arrays that clients share .0.weight, 0.bias, .*, but has a: pass",
        ),
        (lambda: ours(wrapped(), Skipping()), r"configure_train of Skipping must call super\(\)"),
        (lambda: fedhet.wrap(legacy()[0], network), "is made from a client_fn .*: move fit and evaluate into"),
        (
            lambda: ours(wrapped(), evaluate_fn=lambda round, arrays: (0.5, {})),
            "MetricRecord or None, but returned a tup",
        ),
        (lambda: ours(wrapped(change=none)), r"returned NoneType: end it with return Message\(content, reply_to=msg\)"),
        (lambda: fedhet.make_client_app(of_context), r"its arguments \(context\) is the client"),
    ],
)
def test_a_sentence_each(do, why):
    with pytest.raises(FedhetError, match=why):
        do()
