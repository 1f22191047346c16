"""Methods are comparable: the same steps and the same tests for all, and local training beside them."""

import numpy as np
import pytest
import torch

from fedhet.config import client_setup
from fedhet.methods import registry
from fedhet.training import evaluate
from fedhet.utils.files import read_tensors
from tests.small import SMALL

OF_METHOD = SMALL | {
    "ensemble": {"test_on": "local"},
    "fedharm": {"fedharm.blocks": "body.1,body.2,head", "fedharm.slots": "32,32,10"},
    "fedmd": {"fedmd.public-epochs": 1, "fedmd.private-epochs": 0},
    "flha-ghn": {"learning-rate": 0.01},
}


# FedMA trains less and less of a network, and some train none.
OTHERS = {"fedma", "nearest-neighbour", "logistic-regression", "label-spreading"}


@pytest.mark.parametrize("method", sorted(set(registry.own_methods()) - OTHERS))
def test_equal_numbers_of_steps(federate, method):
    """Also with networks in float64, which stay so."""
    own = OF_METHOD.get(method, {})
    model = lambda client: client_setup.model_of(client).double()  # noqa: E731
    done = federate(method, model=model, rounds=1, local_epochs=3, public_samples=64, **own)
    assert done.failures == []
    assert done.rows[1]["work"]["private_steps"] == 3 * 3 * 2
    saved = [read_tensors(path) for path in (done.folder / "models").glob("[0-9]*.safetensors")]
    own = {each.dtype for tensors in saved for name, each in tensors.items() if not name.startswith("shared.")}
    assert own <= {torch.float64}


@pytest.mark.parametrize("test_on", ["local", "global", "both"])
@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_test_sets(federate, method, test_on):
    done = federate(method, test_on=test_on)
    last, which = done.rows[-1], "received" if method == "fedavg" else "trained"
    assert (last[which] is not None) == (test_on != "global")
    assert (last["common"] is not None) == (test_on != "local")
    assert done.summary["personal_accuracy"] is not None or method == "fedavg"
    if test_on == "local":
        return
    dataset = client_setup.dataset_of(done.config)
    names = ["global"] if method == "fedavg" else ["0", "1", "2"]
    scores = []
    for name in names:
        model = client_setup.model_of(done.info())
        model.load_state_dict(done.saved(name))
        scores.append(evaluate(model, dataset.test, dataset.task, dataset.transform).value)
    found = last["common"][which]["accuracy"]
    assert (found["mean"] if isinstance(found, dict) else found) == pytest.approx(np.mean(scores))
