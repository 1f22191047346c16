"""Averages with Byzantine clients in them."""

import json

import numpy as np
import pytest

import fedhet
from fedhet.flower.messages import decode_arrays, encode_arrays
from fedhet.server.aggregation import average_shared
from fedhet.testing import Case, Tampering, run
from fedhet.utils.files import read_tensors

HONEST = [{"w": np.array([1.0, 2, 3, 4], np.float32) + k / 10, "n": np.array(7)} for k in range(4)]
FAR = {"w": np.array([1e8, -1e8, 1e8, 0], np.float32), "n": np.array(10**6)}


def of(groups, rule):
    models = {str(number): group for number, group in enumerate(groups)}
    return average_shared(models, dict.fromkeys(models, 1.0), rule, byzantine=0.2)


def test_weighted_mean():
    rng = np.random.default_rng(0)
    groups = {n: {"w": rng.normal(size=3).astype(np.float32), "n": np.array(int(n))} for n in "237"}
    weights = dict(zip("237", (1, 2, 4), strict=True))
    mean = average_shared(groups, weights)
    expected = np.average([group["w"].astype(np.float64) for group in groups.values()], axis=0, weights=[1, 2, 4])
    np.testing.assert_allclose(mean["w"], expected, rtol=0, atol=1e-6)
    assert (mean["n"], mean["n"].dtype, mean["w"].dtype) == (5, np.int64, np.float32)
    wide = {name: {"w": group["w"].astype(np.float64)} for name, group in groups.items()}
    np.testing.assert_allclose(average_shared(wide, weights)["w"], expected, rtol=1e-14)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum"])
def test_robust_rules_ignore_an_outlier(rule):
    for place in range(5):
        found = of([*HONEST[:place], FAR, *HONEST[place:]], rule)
        assert np.abs(found["w"] - [1.15, 2.15, 3.15, 4.15]).max() < 0.2
        assert (found["n"], found["n"].dtype, found["w"].dtype) == (7, np.int64, np.float32)
    assert np.abs(of([*HONEST, FAR], "mean")["w"]).max() > 1e7, "the mean does"


def test_updates_are_clipped_to_the_median_norm():
    before = {"w": np.ones(4, np.float32), "n": np.array(3)}
    models = {str(k): {"w": before["w"] + step, "n": np.array(9)} for k, step in enumerate((1, -1, 1, 30))}
    aggregator = fedhet.FedAvg(clip_norm=2.0).aggregator
    made, (cut,) = aggregator.clipped(models, dict.fromkeys(models, before)), aggregator.run.round.cuts
    assert (cut["client"], round(cut["norm"]), round(cut["to"])) == ("3", 30, 2)
    assert np.allclose(made["3"]["w"], 3)
    assert made["3"]["n"] == 9
    assert made["0"] is models["0"]
    aggregator = fedhet.FedAvg(aggregation="norm-clipped").aggregator
    found = aggregator.average(models, before=before)
    assert np.allclose(found["w"], 1 + (1 - 1 + 1 + 1) / 4)


def test_without_a_bound_only_absurd_updates_are_clipped():
    before = {"w": np.ones(4, np.float32)}
    for far, cuts in ((9.0, 0), (11.0, 1)):  # most clients hardly move: a multiple of the median alone says little
        models = {str(k): {"w": before["w"] + step} for k, step in enumerate((1e-6, 1e-6, far))}
        aggregator = fedhet.FedAvg().aggregator
        made = aggregator.clipped(models, dict.fromkeys(models, before))
        assert len(aggregator.run.round.cuts) == cuts
        assert np.allclose(made["2"]["w"], 1 + (1e-6 if cuts else far))


@pytest.mark.parametrize("method", ["FedAvg", "LGFedAvg", "FedProto", "LayerAverage"])
@pytest.mark.parametrize("rule", ["median", "krum"])
def test_robust_runs_with_a_byzantine_client(method, rule, around, tiny, home, new_watch):
    from fedhet.flower.grid import LocalGrid

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


@pytest.mark.parametrize(("method", "own"), [("fedma", {}), ("pfnm", {}), ("fedhenn", {"fedhenn.target": "kernel"})])
def test_clipping_of_matching_and_alignment(method, own, tmp_path, no_report):
    def spoil(message, client, reply):
        for name in ("model", "update", "features"):
            if client == "2" and message.metadata.message_type == "train" and name in reply.content:
                arrays = decode_arrays(reply.content[name])
                if "exponent" in arrays:
                    arrays["exponent"] = arrays["exponent"] + np.int16(9)
                else:
                    arrays = {k: a * np.float32(500) for k, a in arrays.items()}
                reply.content[name] = encode_arrays(arrays)

    settings = Case.of(method, own).settings(rounds=3, clip_norm=3.0)
    done = run(tmp_path / "run", settings, app=Tampering(after=spoil))
    assert done.failures == []
    assert {cut["client"] for row in done.rows for cut in row.get("cut", ())} == {"2"}
    tensors = read_tensors(done.folder / "models" / "global.safetensors") or {}
    assert all(tensor.abs().max() < 30 for tensor in tensors.values())


def test_history_names_clipped_updates(around, home, watch):
    from fedhet.flower.grid import LocalGrid

    def after(where, reply):
        if where == (2, "train", "1"):
            group = decode_arrays(reply.content["model"])
            reply.content["model"] = encode_arrays({k: a + 50 for k, a in group.items()})

    fedhet.FedAvg(rounds=2, learning_rate=0.1, clip_norm=5, observers=[watch]).start(LocalGrid(around(after=after), 4))
    assert "cut" not in watch.rows[1]
    (cut,) = json.loads(json.dumps(watch.rows[2]["cut"]))
    assert cut["client"] == "1"
    assert 49 < cut["norm"] < 51 > 1 > cut["to"]


def test_scalars_are_clipped():
    models = {c: {"scale": np.array(value, np.float32)} for c, value in {"a": 1.0, "b": 1.5, "c": 5.0}.items()}
    aggregator = fedhet.FedAvg(clip_norm=1.0).aggregator
    made = aggregator.clipped(models, {c: {"scale": np.array(0.5, np.float32)} for c in models})
    assert [cut["client"] for cut in aggregator.run.round.cuts] == ["c"]
    assert (made["c"]["scale"].shape, made["c"]["scale"].dtype, float(made["c"]["scale"])) == ((), np.float32, 1.5)
