"""An audit of `dp-noise` by canaries: what an attacker finds out stays below the epsilon of the node's account.

The node has 40 examples, and all but one are blank images, which change nothing in a linear network. The attacker knows
all examples, chooses the weights, and guesses from a reply whether the first example is the canary or blank, too. A
lower bound of epsilon follows from how often the guesses are right (Jagielski et al., NeurIPS 2020).
"""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import beta
from torch import Tensor

from fedhet.client.secret import epsilon_of
from fedhet.flower.messages import decode_arrays
from fedhet.messages import Payload, Request, to_arrays
from fedhet.utils.randomness import seed_everything

from .reading import TRAIN, Victim
from .unmixing import linear

pytestmark = [pytest.mark.usefixtures("home", "in_a_run"), pytest.mark.long]

TRIALS = 200
DELTA = 1 / (10 * TRAIN)
CANARY, LABEL = torch.ones(1, 8, 8), 3


def moved(folder: Path, noise: float, size: int, *, member: bool) -> float:
    """Return how far a message of training moves the weights along the canary's gradient."""
    seed_everything(0)  # all seeds that there are, as the attacker knows them
    settings = {"method": "fedavg", "batch-size": size, "learning-rate": 1.0, "momentum": 0.0, "optimizer": "sgd"}
    node = {"dp-noise": noise, "dp-clip": 1.0}
    victim = Victim(0, folder, settings, network=linear, **node)
    victim.inputs = torch.zeros(len(victim.inputs), 1, 8, 8)
    victim.labels[0] = LABEL
    if member:
        victim.inputs[0] = CANARY
    start = torch.zeros(10, 64)
    sent = Payload({"model": to_arrays({"1.weight": start})})
    reply = victim.ask("train", sent, Request(round=1, epochs=1))
    assert reply is not None, victim.refusals
    change = torch.tensor(decode_arrays(reply["model"])["1.weight"]) - start
    gradient = torch.outer(F.one_hot(torch.tensor(LABEL), 10) - 0.1, CANARY.flatten())
    return float((change * gradient).sum() / gradient.norm())


def bound(with_canary: Tensor, without: Tensor) -> float:
    """Return a lower bound of epsilon at a confidence of 95%; half of the trials choose the threshold."""

    def of(threshold: float, ones: Tensor, others: Tensor) -> float:
        found, false = int((ones > threshold).sum()), int((others > threshold).sum())
        least = float(beta.ppf(0.025, found, len(ones) - found + 1)) if found else 0.0
        most = float(beta.ppf(0.975, false + 1, len(others) - false)) if false < len(others) else 1.0
        return math.log((least - DELTA) / most) if least > DELTA else 0.0

    half = len(with_canary) // 2
    thresholds = torch.cat([with_canary, without]).tolist()
    chosen = max(thresholds, key=lambda threshold: of(threshold, with_canary[:half], without[:half]))
    return of(chosen, with_canary[half:], without[half:])


@pytest.mark.parametrize(("noise", "size"), [(0.5, 40), (0.4, 10)])
def test_the_account_bounds_what_is_found_out(noise: float, size: int, tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in range(10**6))
    one, other = (
        torch.tensor([moved(next(folders), noise, size, member=member) for _ in range(TRIALS)])
        for member in (True, False)
    )
    # Whoever knows the seeds subtracts what a node without the canary sends: noise from these seeds would vanish.
    twin = moved(next(folders), noise, size, member=False)
    spent = json.loads((tmp_path / "0" / "account.json").read_text())["spent"]
    epsilon = epsilon_of(spent, DELTA)
    assert 0.2 < bound(one, other) < epsilon
    assert bound((one - twin).abs(), (other - twin).abs()) < epsilon
    assert len(other.unique()) == TRIALS
