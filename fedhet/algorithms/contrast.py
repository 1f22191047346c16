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
