"""Mixed precision in training, with every method."""

from typing import Any

import pytest

from fedhet import registry
from tests.small import SMALL


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", sorted({*registry.own_methods()} - {"nearest-neighbour", "logistic-regression", "label-spreading"})
)
def test_every_method_trains_in_mixed_precision_near_what_it_does_without(federate: Any, method: str) -> None:
    keys: dict[str, Any] = {"public_samples": 64, "learning_rate": 0.01, "local_epochs": 2}
    keys["architectures"] = "fedharm-small" if method == "fedharm" else "mlp"
    keys |= {"input_size": 16} if method == "fedharm" else {}
    keys |= SMALL.get(method, {})
    keys |= {"rounds": 0} if method == "fedma" else {}  # as many as a pass needs
    mixed, plain = (federate(method, name, precision=name, **keys) for name in ("bf16", "float32"))
    assert mixed.failures == []
    losses, plainly = ([row["train_loss"] for row in done.rows if row.get("train_loss")] for done in (mixed, plain))
    assert losses == pytest.approx(plainly, rel=0.2)  # FedMD's mean absolute error follows signs
    assert losses != plainly
