"""Variances of a layer, estimated so that shared neurons merge and foreign ones do not."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .layer import match_layer


def estimate_variances(
    weights: Sequence[npt.ArrayLike],
    *,
    gamma: float = 1.0,
    prior_mean: npt.ArrayLike = 0.0,
    iterations: int = 5,
    **options: Any,
) -> dict[str, float]:
    """Estimates `sigma2` and `sigma0_2` of a layer from what matches in it.

    With FedMA's sigma2 = sigma0_2 = 1 the weights of a usual network are small against the prior, and its size grows by
    about a row per client whatever the weights are. Here sigma0_2 is the variance v of all rows around the prior mean.
    BBP-MAP's values lack the Gaussians' normalisers, so that two rows of correlation r gain from merging where
    r > sigma0_2 / (sigma0_2 + sigma2): with the residual variance e of the matches itself as sigma2, a typical match
    would only break even. So sigma2 puts the break-even correlation halfway between foreign rows (0) and the matches
    found (1 - e / v), which gives sigma2 = v (v + e) / (v - e); matching and estimating alternate until sigma2 stays,
    from sigma2 = v. That is also the answer where nothing merges, or only what is no closer than e = v / 2: in rows of
    few columns some foreign ones are alike by chance.

    Args:
        weights: One array (L_j, D) per client.
        gamma: As in `match_layer`. The smaller, the fewer rows are opened because of the prior alone.
        prior_mean: As in `match_layer`.
        iterations: The most matchings to try.
        options: Further ones of `match_layer`; rows that merge for want of room (`max_rows`) count as matches.

    Returns:
        `sigma2` and `sigma0_2`, for `match_layer(weights, **variances)`.

    Raises:
        ValueError: As `match_layer`.
    """
    clients = [np.asarray(rows, dtype=np.float64) for rows in weights]
    mean = np.asarray(prior_mean, dtype=np.float64)
    total = sum(rows.size for rows in clients)
    spread = sum(float(np.square(rows - mean).sum()) for rows in clients) / max(total, 1)
    if not spread > 0:
        return {"sigma2": 1.0, "sigma0_2": 1.0}
    sigma2 = spread
    for _ in range(iterations):
        match = match_layer(
            weights, sigma2=sigma2, sigma0_2=spread, gamma=gamma, prior_mean=prior_mean, average="mean", **options
        )
        merged = sum(len(rows) for rows in clients) - len(match.counts)
        if merged == 0:
            break
        residuals = sum(
            float(np.square(rows - match.weights[assignment]).sum())
            for rows, assignment in zip(clients, match.assignments, strict=True)
        )
        within = residuals / (merged * clients[0].shape[1])
        if within > spread / 2:
            return {"sigma2": spread, "sigma0_2": spread}
        previous, sigma2 = sigma2, spread * (spread + within) / (spread - within)
        if np.isclose(sigma2, previous, rtol=1e-3):
            break
    return {"sigma2": sigma2, "sigma0_2": spread}
