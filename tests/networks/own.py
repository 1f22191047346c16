"""Networks for text, tables, series, graphs and segmentation, as users write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TextCNN(nn.Module):
    """Convolutions of three widths over words, the largest value of each filter, a head (Kim, 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.filters = nn.ModuleList(nn.Conv1d(12, 6, width) for width in (2, 3, 4))
        self.head = nn.Linear(18, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.words(tokens).transpose(1, 2)
        return self.head(torch.cat([each(words).relu().amax(2) for each in self.filters], 1))


class Recurrent(nn.Module):
    """A recurrent layer over words or over a series, and a head for the mean of its outputs."""

    def __init__(self, kind: type[nn.RNNBase], words: bool, **options: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8) if words else nn.Identity()
        self.layer = kind(8, 10, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(10 * (1 + options.get("bidirectional", False)), 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(self.words(inputs))[0].mean(1))


class Padded(nn.Module):
    """PyTorch's transformer over words, with a mask for padding (word 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Parameter(torch.randn(1, 12, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        encoded = self.encoder(self.words(tokens) + self.places, src_key_padding_mask=tokens == 0)
        return self.head(encoded[:, 0])


class Conv1D(nn.Module):
    """A linear layer with its weight transposed, as in GPT-2."""

    def __init__(self, fan_out: int, fan_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_in, fan_out) * 0.02)
        self.bias = nn.Parameter(torch.zeros(fan_out))

    def forward(self, values: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, values.reshape(-1, values.shape[-1]), self.weight)
        return flat.view(*values.shape[:-1], -1)


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attend, self.project = Conv1D(48, 16), Conv1D(16, 16)
        self.up, self.down = Conv1D(32, 16), Conv1D(16, 32)

    def forward(self, values: Tensor) -> Tensor:
        heads = self.attend(self.ln_1(values)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        values = values + self.project(attended.transpose(1, 2).flatten(2))
        return values + self.down(F.gelu(self.up(self.ln_2(values))))


class GPT(nn.Module):
    """A small GPT-2 that classifies a text by its last word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Parameter(torch.randn(1, 12, 16) * 0.02)
        self.blocks, self.norm, self.head = nn.Sequential(GPTBlock(), GPTBlock()), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places))[:, -1])


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, values: Tensor) -> Tensor:
        return values * (values.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.gain


class Gated(nn.Module):
    """A residual network for tables, with gates and a normalisation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(9, 16), nn.Linear(16, 5)
        self.norms = nn.ModuleList(RMSNorm(16) for _ in range(3))
        self.ups, self.downs = (
            nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(3)) for sizes in ((16, 48), (24, 16))
        )

    def forward(self, rows: Tensor) -> Tensor:
        values = self.first(rows)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            values = values + down(F.glu(up(norm(values))))
        return self.head(values)


class FTTransformer(nn.Module):
    """A token for each column of a table, and PyTorch's transformer layers (Gorishniy et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(9, 16) * 0.3), nn.Parameter(torch.randn(9, 16) * 0.3)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, rows: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(rows), -1, -1), rows[..., None] * self.scale + self.shift], 1)
        return self.head(self.norm(self.layers(tokens)[:, 0]))


class DenseGCN(nn.Module):
    """Graph convolutions A X W over one graph, whose nodes' values are an example (Kipf and Welling, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(7) * 0.5 + torch.roll(torch.eye(7), 1, 0) * 0.5)
        self.first, self.second, self.head = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, nodes: Tensor) -> Tensor:
        nodes = (self.adjacency @ self.first(nodes)).relu()
        return self.head((self.adjacency @ self.second(nodes)).relu().mean(1))


class DenseGIN(nn.Module):
    """An MLP after each sum of a node's values with all nodes', without normalisation (Xu et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()) for width in (4, 24, 24)
        )
        self.head = nn.Linear(24, 5)

    def forward(self, nodes: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = layer(nodes + nodes.sum(1, keepdim=True))
        return self.head(nodes.sum(1))


class EdgeGCN(nn.Module):
    """Messages along the edges of one graph, summed at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 0]]))
        self.own, self.others, self.head = nn.Linear(4, 12), nn.Linear(4, 12), nn.Linear(12, 5)

    def forward(self, nodes: Tensor) -> Tensor:
        sent = self.others(nodes).index_select(1, self.edges[0])
        summed = torch.zeros_like(sent).index_add(1, self.edges[1], sent)
        return self.head((self.own(nodes) + summed).relu().mean(1))


class UNet(nn.Module):
    """Two scales with a connection between equal sizes, and a class for each pixel (Ronneberger et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        down = self.down(images).relu()
        up = self.up(self.middle(F.max_pool2d(down, 2)).relu())
        return self.head(self.last(torch.cat([down, up], 1)).relu())


def series() -> nn.Module:
    """Return a convolutional network over a series, (n, 8, 16)."""
    return nn.Sequential(
        *(nn.Conv1d(8, 12, 3, padding=1), nn.BatchNorm1d(12), nn.PReLU(12), nn.MaxPool1d(2)),
        *(nn.Conv1d(12, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 5)),
    )


def table() -> nn.Module:
    """Return an MLP for tables with BatchNorm."""
    return nn.Sequential(
        *(nn.BatchNorm1d(9), nn.Linear(9, 24), nn.BatchNorm1d(24), nn.ReLU()),
        *(nn.Linear(24, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 5)),
    )


class Calibrated(nn.Module):
    """A classifier with a layer behind it that calibrates its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier, self.calibration = nn.Linear(64, 5), nn.Linear(5, 5)
        nn.init.eye_(self.calibration.weight)

    def forward(self, images: Tensor) -> Tensor:
        return self.calibration(self.classifier(self.body(images)))


class WeightNorm(nn.Module):
    """Convolutions over a series, whose weights are a direction and a norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.first, self.second = (norm(nn.Conv1d(width, 16, 3, padding=1)) for width in (8, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.second(self.first(values).relu()).relu().mean(2))
