"""The rules that README.md names hold what it says of them."""

import pytest

from .attacks import ATTACKS, accuracy

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_report")]


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_with_multi_krum_the_honest_end_within_two_points_of_where_they_do_alone(method, attack):
    alone = accuracy(method, "mean", None, honest_only=True)
    assert accuracy(method, "multi-krum", ATTACKS[attack]) > alone - 0.02


@pytest.mark.parametrize("method", ["fd", "fedmd"])
@pytest.mark.parametrize("attack", ["tenfold", "flipped"])
def test_scores_stand_these_attacks_with_the_mean_as_well(method, attack):
    alone = accuracy(method, "mean", None, honest_only=True)
    assert abs(accuracy(method, "mean", ATTACKS[attack]) - alone) < 0.02


def test_the_mean_does_not_stand_updates_of_ten_times_the_norm():
    alone = accuracy("fedavg", "mean", None, honest_only=True)
    assert accuracy("fedavg", "mean", ATTACKS["tenfold"]) < alone - 0.2
