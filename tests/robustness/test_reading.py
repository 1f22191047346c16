"""A server that chooses weights reads no image out of losses that a node does not tell."""

import pytest
import torch
from sklearn.datasets import load_digits

from .reading import Victim, correlation, last_batch, nearest, one_example, pixel_by_pixel
from .unmixing import from_runs, unmixed

pytestmark = pytest.mark.usefixtures("home", "in_a_run")

SINGLE = {"samples-per-client": 2, "validation": 0.5, "clients": 2}
"""Settings with which a validation part is one image."""


@pytest.mark.parametrize("allow", ["prototypes", ""])
@pytest.mark.parametrize("attack", [pixel_by_pixel, one_example])
def test_a_node_that_keeps_metrics_refuses(attack, allow, tmp_path):
    victim = Victim(0, tmp_path, SINGLE, own_data=False, allow=allow)
    assert attack(victim) in (None, (None, None))
    (reason,) = {*victim.refusals}
    assert "this node allows" in reason


@pytest.mark.parametrize("allow", ["weights", "weights,metrics", None])
def test_a_part_of_one_image_tells_no_loss(allow, tmp_path):
    victim = Victim(0, tmp_path, SINGLE, own_data=False, **({} if allow is None else {"allow": allow}))
    assert pixel_by_pixel(victim, "validation-received") is None
    (reason,) = {*victim.refusals}
    assert (
        "the client has 1 training examples, but its node requires at least 10 examples behind every number" in reason
    )


def test_losses_reveal_at_most_the_mean(tmp_path):
    """Pixel by pixel, what is read is no nearer to a private image than the mean of the node's images is."""
    victim = Victim(0, tmp_path)
    read, mean = pixel_by_pixel(victim), victim.evaluated.mean(0)
    assert correlation(read, mean) > 0.9
    better = [correlation(read, image) - correlation(mean, image) for image in victim.evaluated]
    assert sum(better) / len(better) < 0.02


@pytest.mark.slow
def test_chosen_weights_with_metrics_reveal_an_example(tmp_path):
    """The figure of the deployment page: whoever lets metrics out trusts the server not to ask in this way."""
    read, image = one_example(Victim(0, tmp_path))
    assert correlation(read, image) > 0.9


@pytest.mark.slow
def test_scores_reveal_the_last_batch_without_a_policy(tmp_path):
    assert nearest(*last_batch(0, tmp_path)).max() > 0.9


MARKS = {"posteriors": pytest.mark.slow, "features": pytest.mark.long, "descriptors": pytest.mark.long}


@pytest.mark.parametrize("kind", ["weights", *(pytest.param(kind, marks=mark) for kind, mark in MARKS.items())])
def test_rounds_reveal_at_most_means_of_groups(kind, tmp_path):
    """Even a server that is told the node's secret reads groups, and without a policy it reads single images."""
    read, images, _ = unmixed(0, tmp_path / "open", kind, 60)
    assert nearest(read, images).mean() > 0.98
    allow = f"{kind},public-training" if kind == "descriptors" else kind
    read, images, groups = unmixed(0, tmp_path / "closed", kind, 60, allow=allow)
    means = torch.stack([images[rows].mean(0) for rows in groups])
    assert all(len(rows) >= 10 for rows in groups)
    assert nearest(read, images).mean() < nearest(means, images).mean() + 0.005


def test_runs_with_one_example_more_are_refused(tmp_path):
    read = from_runs(0, tmp_path / "open", 150, 152)
    assert nearest(torch.tensor(load_digits().data / 16), read).min() > 0.999
    assert from_runs(0, tmp_path / "closed", 150, 152, allow="prototypes") is None


def test_losses_have_four_digits_elsewhere(tmp_path):
    loss = Victim(0, tmp_path).loss(torch.ones(4, 64) / 7, torch.zeros(4), torch.randn(10, 4))
    assert loss == float(f"{loss:.4g}")
