"""Contrastive losses of representations, by the cosine of two vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor


def contrast(anchors: Tensor, positives: Tensor, *negatives: Tensor, temperature: float) -> Tensor:
    """Return for each example a = `anchors`[k] the loss -log(exp(cos(a, p) / T) / sum_z exp(cos(a, z) / T)), (n,).

    T is the `temperature`, p = `positives`[k], and z is p or the k-th vector of one of the `negatives`; all arguments
    have shape (n, d). This is the model-contrastive loss of MOON (Li et al., CVPR 2021, equation 3).
    """
    others = torch.stack([positives, *negatives], 1)
    similarities = F.cosine_similarity(anchors[:, None], others, dim=2) / temperature
    return similarities.logsumexp(1) - similarities[:, 0]


def nt_xent(first: Tensor, second: Tensor, temperature: float, others: Tensor | None = None) -> Tensor:
    """Return the NT-Xent loss of two views (n, d) each of n examples (Chen et al., ICML 2020, equation 1), a scalar.

    Each of the 2n views has to be recognised among the 2n - 1 other views, by cosines divided by the `temperature`, as
    the one of the same example. `others` (m, d) are further vectors that no view belongs to.
    """
    views = F.normalize(torch.cat([first, second]), dim=1)
    similarities = views @ views.T / temperature
    itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
    similarities = similarities.masked_fill(itself, -torch.inf)
    if others is not None:
        similarities = torch.cat([similarities, views @ F.normalize(others, dim=1).T / temperature], 1)
    partners = torch.arange(len(views), device=views.device).roll(len(first))
    return F.cross_entropy(similarities, partners)


def negative_cosine(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return minus the mean cosine of `predictions` (n, d) and `targets` (n, d), which get no gradients, a scalar.

    This is D of SimSiam (Chen and He, CVPR 2021, equation 1) with its stop-gradient.
    """
    return -F.cosine_similarity(predictions, targets.detach(), dim=1).mean()
