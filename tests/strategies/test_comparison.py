"""Methods are comparable: the same steps and the same precision for all."""

import pytest
import torch

from fedhet.methods import registry
from fedhet.setup import client_setup
from fedhet.utils.files import read_tensors
from tests.small import SMALL

OF_METHOD = SMALL | {
    "ensemble": {"test_on": "local"},
    "fedharm": {"fedharm.blocks": "body.1,body.2,head", "fedharm.slots": "32,32,10"},
    "fedmd": {"fedmd.public-epochs": 1, "fedmd.private-epochs": 0},
    "flha-ghn": {"learning-rate": 0.01},
}


# FedMA trains less and less of a network, FENS on a part of the examples, and some train no network. The servers of
# FedCA and FedCon train networks, which `federate` does not give them.
CLASSICAL = {"nearest-neighbour", "logistic-regression", "label-spreading", "gradient-boosting"}
OTHERS = {"fedma", "fens", "fedca", "fedcon", *CLASSICAL}


@pytest.mark.parametrize("method", sorted(set(registry.own_methods()) - OTHERS))
def test_equal_numbers_of_steps(federate, method):
    """Also with networks in float64, which stay so."""
    own = OF_METHOD.get(method, {})
    model = lambda client: client_setup.model_of(client).double()  # noqa: E731
    done = federate(method, model=model, rounds=1, local_epochs=3, public_samples=64, **own)
    assert done.failures == []
    assert done.rows[1]["work"]["private_steps"] == 3 * 3 * 2
    saved = [read_tensors(path) for path in (done.folder / "models").glob("[0-9]*.safetensors")]
    own = [each for tensors in saved for name, each in tensors.items() if not name.startswith("method/")]
    assert {each.dtype for each in own if each.is_floating_point()} <= {torch.float64}


KINDS_OF_TRAINING = {
    *("fedprox", "fedrep", "fedproto", "fedmd", "fedhenn", "fedharm", "fedma", "flha-ghn", "fml", "fedgen", "lora"),
    "fjord",
}


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(KINDS_OF_TRAINING))
def test_training_in_mixed_precision_is_near_what_it_is_without(federate, method):
    keys = {"public_samples": 64, "learning_rate": 0.01, "local_epochs": 2, "architectures": "mlp"}
    keys |= {"architectures": "fedharm-small", "input_size": 16} if method == "fedharm" else {}
    keys |= {"rounds": 0} if method == "fedma" else {}  # as many as a pass needs
    mixed, plain = (federate(method, name, precision=name, **keys) for name in ("bf16", "float32"))
    assert mixed.failures == []
    losses, plainly = ([row["train_loss"] for row in done.rows if row.get("train_loss")] for done in (mixed, plain))
    assert losses == pytest.approx(plainly, rel=0.2)  # FedMD's mean absolute error follows signs
    assert losses != plainly
