"""The rules that README.md names hold what it says of them."""

import pytest

from .attacks import ATTACKS, accuracy

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_report")]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedrep", "flha-ghn"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_with_multi_krum_the_honest_end_within_two_points_of_where_they_do_alone(method, attack):
    alone = accuracy(method, "mean", None, honest_only=True)
    assert accuracy(method, "multi-krum", ATTACKS[attack]) > alone - 0.02


@pytest.mark.parametrize("method", ["fd", "fedmd"])
@pytest.mark.parametrize("attack", ["tenfold", "flipped"])
def test_scores_stand_these_attacks_with_the_mean_as_well(method, attack):
    alone = accuracy(method, "mean", None, honest_only=True)
    assert abs(accuracy(method, "mean", ATTACKS[attack]) - alone) < 0.02


@pytest.mark.parametrize("method", ["fedharm", "fedhenn", "fedhenn-kernel", "lg-fedavg"])
@pytest.mark.parametrize("attack", ["tenfold", "flipped"])
def test_clients_that_keep_networks_of_their_own_stand_these_attacks_with_the_mean(method, attack):
    alone = accuracy(method, "mean", None, honest_only=True)
    assert accuracy(method, "mean", ATTACKS[attack]) > alone - 0.02


def test_flipped_weights_carry_what_is_matched_away_and_a_bound_does_not_keep_it():
    alone = accuracy("fedma", "mean", None, honest_only=True)
    for rule in ("mean", "norm-clipped"):
        assert accuracy("fedma", rule, ATTACKS["flipped"]) < alone - 0.1


def test_the_mean_does_not_stand_updates_of_ten_times_the_norm():
    alone = accuracy("fedavg", "mean", None, honest_only=True)
    assert accuracy("fedavg", "mean", ATTACKS["tenfold"]) < alone - 0.2
