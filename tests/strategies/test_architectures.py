"""Methods that match or cut hidden units, on a ViT and a GRU, and networks that they refuse."""

import pytest
import torch
from torch import nn

from fedhet.algorithms.graphs import architecture_graph, resize
from fedhet.algorithms.graphs.permutations import permutation_groups
from fedhet.algorithms.graphs.states import widths
from fedhet.errors import FedhetError

torchvision = pytest.importorskip("torchvision")


class Coloured(nn.Module):
    """Grey images in three colours."""

    def forward(self, x):
        return x.expand(-1, 3, -1, -1)


class Written(nn.Module):
    """Heads of attention by hand, whose number is written into the code."""

    def __init__(self, heads=2, size=-1):
        super().__init__()
        self.qkv, self.head, self.heads, self.size = nn.Linear(8, 24), nn.Linear(8, 10), heads, size

    def forward(self, x):
        heads = self.qkv(x[:, 0]).unflatten(-1, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return self.head(attended.transpose(1, 2).flatten(2).mean(1))


def transformer():
    return nn.Sequential(Coloured(), torchvision.models.VisionTransformer(8, 4, 1, 2, 8, 12, num_classes=10))


@pytest.mark.parametrize("method", ["fedma", "heterofl"])
def test_a_transformer(federate, method):
    own = {"rounds": 0, "fedma.passes": 1} if method == "fedma" else {"rounds": 1}
    if method == "heterofl":
        own[f"{method}.widths"] = "1,0.5,0.3"
    done = federate(method, model=lambda client: transformer(), local_epochs=1, samples_per_client=20, **own)
    assert done.failures == []
    groups = permutation_groups(architecture_graph(transformer(), torch.zeros(2, 1, 8, 8)))
    found = widths(done.state.model, groups)
    if method == "fedma":  # the global model is wider than the clients' networks
        assert all(a >= b for a, b in zip(found, groups.widths, strict=True))
        assert found != groups.widths
        merged = resize(transformer(), {key: torch.from_numpy(array) for key, array in done.state.model.items()})
        assert merged.eval()(torch.zeros(2, 1, 8, 8)).isfinite().all()
    else:
        assert found == groups.widths
        parts = widths(done.sent[1, "2"]["model"], groups)
        assert all(1 <= a < b for a, b in zip(parts, groups.widths, strict=True))


def test_fixed_width(federate):
    with pytest.raises(FedhetError, match=r"(?s)Written cannot have other numbers of hidden units: .*from its tensors"):
        federate("fedma", model=lambda client: Written())
    settings = {"rounds": 1, "heterofl.widths": "0.5"}
    assert federate("heterofl", "other", model=lambda client: Written(-1, 4), **settings).failures == []


class Words(nn.Module):
    """A head that is tied to the embedding."""

    def __init__(self, bias=True):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(6, 8), nn.Linear(8, 8), nn.Linear(8, 6, bias)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.body(self.embedding(words).mean(1)).relu())


def test_tied_weights(federate):
    def words(client):
        rows = torch.randint(0, 6, (20, 5), generator=torch.Generator().manual_seed(int(client.name)))
        return {"train": (rows, rows[:, 0] % (2 + int(client.name))), "test": (rows, rows[:, 0])}

    settings = {"model": lambda client: Words(), "data": words, "test_on": "local"}
    saved = federate("heterofl", **{"heterofl.widths": "1,0.5"}, **settings).saved("global")
    torch.testing.assert_close(saved["head.weight"], saved["embedding.weight"])
    with pytest.raises(FedhetError, match="the head 'head' shares weights with another layer: give the head its own"):
        federate("fedma", "matched", **settings | {"model": lambda client: Words(bias=False)})


def test_a_convolution_as_head(federate):
    def network(client):
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    with pytest.raises(FedhetError, match="fedmrl needs an nn.Linear as head, but '1' is a Conv2d: replace it"):
        federate("fedmrl", model=network)
