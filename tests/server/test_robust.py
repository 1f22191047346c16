"""Averages with hostile clients in them."""

import json

import numpy as np
import pytest

import fedhet
from fedhet import config as configuration
from fedhet.errors import ConfigError
from fedhet.options import AGGREGATIONS
from fedhet.server.robust import Rule, combined, cut_to_bound, put_together

SPEC = {"w": ((4,), "float32"), "n": ((), "int64")}
HONEST = [{"w": np.array([1.0, 2, 3, 4], np.float32) + k / 10, "n": np.array(7)} for k in range(4)]
FAR = {"w": np.array([1e8, -1e8, 1e8, 0], np.float32), "n": np.array(10**6)}


def of(groups, name, **how):
    return combined(groups, [1.0] * len(groups), SPEC, Rule(name, hostile=0.2, **how))


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum"])
def test_one_of_five_that_is_far_off_moves_nothing_far(rule):
    for place in range(5):
        found = of([*HONEST[:place], FAR, *HONEST[place:]], rule)
        assert np.abs(found["w"] - [1.15, 2.15, 3.15, 4.15]).max() < 0.2
        assert (found["n"], found["n"].dtype, found["w"].dtype) == (7, np.int64, np.float32)
    assert np.abs(of([*HONEST, FAR], "mean")["w"]).max() > 1e7, "the mean does"


@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_of_equal_clients_every_rule_gives_what_they_sent(rule):
    for count in (1, 2, 3, 5):
        found = of([HONEST[0]] * count, rule)
        assert np.allclose(found["w"], HONEST[0]["w"])
        assert found["n"] == 7


def test_an_update_is_cut_to_the_median_norm_and_named():
    before = {"w": np.ones(4, np.float32), "n": np.array(3)}
    models = {str(k): {"w": before["w"] + step, "n": np.array(9)} for k, step in enumerate((1, -1, 1, 30))}
    made, (cut,) = cut_to_bound(models, before, 2.0)
    assert (cut.client, round(cut.norm), round(cut.to)) == ("3", 30, 2)
    assert np.allclose(made["3"]["w"], 3)
    assert made["3"]["n"] == 9
    assert made["0"] is models["0"]
    specs = dict.fromkeys(models, SPEC)
    found, _ = put_together(models, dict.fromkeys(models, 1.0), specs, before, Rule("norm-clipped", bound=1.0))
    assert np.allclose(found["w"], 1 + (1 - 1 + 1 + 1) / 4)


@pytest.mark.parametrize("method", ["FedAvg", "LGFedAvg", "FedProto", "LayerAverage"])
@pytest.mark.parametrize("rule", ["median", "krum"])
def test_a_hostile_fifth_leaves_no_trace_in_a_run(method, rule, around, tiny, home, new_watch):
    from fedhet.engines.grid import LocalGrid
    from fedhet.wire import decode_arrays, encode_arrays

    def after(where, reply):
        if where[1] == "train" and where[2] == "2":
            for name, group in reply.content.array_records.items():
                far = {k: a * 1e6 if a.dtype.kind == "f" else a for k, a in decode_arrays(group).items()}
                reply.content[name] = encode_arrays(far)

    settings = {"rounds": 2, "learning_rate": 0.1, "aggregation": rule}
    strategy = getattr(fedhet, method)(**settings)
    strategy.start(LocalGrid(around(after=after), 5))
    arrays = strategy.state.prototypes["means"] if method == "FedProto" else strategy.state.model.values()
    assert max(np.abs(array).max() for array in arrays) < 100


def test_what_was_cut_stands_in_the_history(around, home, watch):
    from fedhet.engines.grid import LocalGrid
    from fedhet.wire import decode_arrays, encode_arrays

    def after(where, reply):
        if where == (2, "train", "1"):
            group = decode_arrays(reply.content["model"])
            reply.content["model"] = encode_arrays({k: a + 50 for k, a in group.items()})

    fedhet.FedAvg(rounds=2, learning_rate=0.1, update_bound=5, observers=[watch]).start(
        LocalGrid(around(after=after), 4)
    )
    assert "cut" not in watch.rows[1]
    (cut,) = json.loads(json.dumps(watch.rows[2]["cut"]))
    assert cut["client"] == "1"
    assert 49 < cut["norm"] < 51 > 1 > cut["to"]


def test_a_rule_that_has_no_meaning_is_refused():
    for settings in ({"method": "local", "aggregation": "krum"}, {"method": "fedma", "update-bound": 3.0}):
        with pytest.raises(ConfigError, match="has no effect with method"):
            configuration.resolve(settings)
    with pytest.raises(ConfigError, match="hostile has no effect with aggregation = median"):
        configuration.resolve({"method": "fedavg", "aggregation": "median", "hostile": 0.3})
    with pytest.raises(ConfigError, match="leave one of them out"):
        configuration.resolve({"method": "fedavg", "aggregation": "krum", "fedavg.last-layer": "classes"})
