"""The claims of run_configs/deployment/README.md about how well a server guesses which examples a client trained on."""

import pytest

from .membership import KINDS, attack

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_report")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_guesses_is_right_more_often_than_a_coin_and_far_from_always(kind):
    area, accuracy = attack(kind, seed=0)
    assert 0.55 < area < 0.75
    assert accuracy > 0.75, "networks that learnt little have little to give away"
