"""FedAvg against plain computations, and what all methods have from the base."""

import json

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedhet import FedAvg, make_client_app, models
from fedhet.flower.grid import LocalGrid
from fedhet.utils.files import read_tensors


def test_weighted_mean_of_models(federate):
    done = federate("fedavg", rounds=1, partition="dirichlet", alpha=0.5, samples_per_client=0)
    models, examples = [done.sent[1, client]["model"] for client in "012"], [done.examples[c] for c in "012"]
    assert len(set(examples)) > 1
    for name, tensor in done.saved("global").items():
        own = np.stack([model[name].astype(np.float64) for model in models])
        expected = np.average(own, axis=0, weights=examples)
        # Three products and two sums of float32 err by less than five units in the last place of the largest.
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=0, atol=5 * 2**-24 * np.abs(own).max())
    assert {row.client: row.examples for row in done.clients} == done.examples


def test_shared_and_own_initial_weights(federate, phases):
    federate("fedavg", "one", rounds=1)
    starts = [before["head.weight"] for _, before, _ in phases]
    assert all(torch.equal(start, starts[0]) for start in starts)
    phases.clear()
    federate("fedavg", "own", rounds=1, shared_init=False)
    assert not torch.equal(phases[0][1]["head.weight"], phases[1][1]["head.weight"])


@pytest.mark.parametrize(("statistics", "travel"), [("aggregate", True), ("local", False)])
def test_batchnorm_statistics(federate, statistics, travel):
    own = {"architectures": "resnet8", "local_epochs": 1, "test_on": "global", "batch_norm": statistics}
    done = federate("fedavg", rounds=2, **own)
    assert (done.global_model is not None) == travel
    assert done.rows[-1]["common"]["received"].get("clients") == (None if travel else 3)
    names = set(done.sent[1, "0"]["model"])
    assert ("body.1.running_mean" in names) == travel
    assert "body.1.weight" in names
    saved = (done.folder / "state" / "clients").glob("*/2.safetensors")
    kept = {path.parent.name: read_tensors(path) for path in saved}
    if travel:
        assert kept == {}
        counter = done.state.model["body.1.num_batches_tracked"]
        assert (counter.dtype, int(counter)) == (np.int64, 4)
    else:
        assert {name.rpartition(".")[2] for name in kept["0"]} == {"running_mean", "running_var", "num_batches_tracked"}
        assert not torch.equal(kept["0"]["model/body.1.running_mean"], kept["1"]["model/body.1.running_mean"])


def test_examples_of_a_client_that_never_trains_are_not_counted(federate):
    def fail(round, client):
        if client == "1" or (client, round) == ("2", 1):
            raise ValueError("out of order")

    done = federate("fedavg", before=fail)
    assert done.summary["never_took_part"].keys() == {"1"}
    assert done.summary["examples"]["labelled"] == 2 * 32


def test_no_closing_round_in_flowers_loop(tmp_path):
    asked, app = [], make_client_app()

    def spying(message, context):
        if message.metadata.message_type == "train":
            request = json.loads(message.content["request"]["request"])
            asked.append((request["round"], request["epochs"], request["evaluate"]))
        return app(message, context)

    settings = {"dataset": "digits", "architectures": "mlp", "clients": 3, "samples_per_client": 32, "local_epochs": 1}
    strategy = FedAvg(state_dir=str(tmp_path), **settings, rounds=2, closing_epochs=5, fraction_train=0.34)
    first = ArrayRecord(models.build("mlp", (1, 8, 8), 10).state_dict())
    result = Strategy.start(strategy, LocalGrid(spying, 3), initial_arrays=first, num_rounds=2, timeout=5)
    assert asked == [(1, 1, True), (2, 1, True)]
    assert {*result.train_metrics_clientapp} == {*result.evaluate_metrics_clientapp} == {1, 2}
