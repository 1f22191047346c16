"""Networks for texts, which are given as characters (characters,), words (words,) or word vectors (words, width)."""

from functools import partial

import torch
from torch import Tensor, nn

from fedhet.errors import ModelError
from fedhet.models.registry import register_model
from fedhet.utils.inputs import parts_of

VOCABULARY = 10_000
"""Number of indices of words."""


class CharLSTM(nn.Module):
    """FedMA's LSTM (table 5), which predicts the next character; 293,584 parameters for a vocabulary of 80."""

    def __init__(self, vocabulary: int, embedding: int = 8, units: int = 256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, units, batch_first=True)
        self.head = nn.Linear(units, vocabulary)

    def forward(self, texts: Tensor) -> Tensor:
        """Return logits (n, vocabulary) of the next character for int64 texts (n, characters)."""
        states, _ = self.lstm(self.embedding(texts))
        return self.head(states[:, -1])


@register_model("char-lstm")
def char_lstm(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return FedMA's character LSTM for a vocabulary of `classes` characters."""
    if len(input_shape) != 1:
        raise ModelError(f"the model needs texts (characters,), such as shakespeare, got inputs of shape {input_shape}")
    return CharLSTM(classes)


class WordLSTM(nn.Module):
    """An LSTM with two fully connected layers (FedHeNN, section 4.1), with the widths of LEAF's code.

    Words of texts (words,) are embedded; word vectors (words, width) are passed to the LSTM directly.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, layers: int, units: int = 100, hidden: int = 30):
        super().__init__()
        if len(input_shape) not in (1, 2):
            raise ModelError(f"the model needs texts (words,) or (words, width), got inputs of shape {input_shape}")
        words = len(input_shape) == 1
        self.embedding = nn.Embedding(VOCABULARY, units) if words else nn.Identity()
        self.lstm = nn.LSTM(units if words else input_shape[1], units, num_layers=layers, batch_first=True)
        self.hidden = nn.Sequential(nn.Linear(units, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Return logits (n, classes) for int64 texts (n, words) or word vectors (n, words, width)."""
        states, _ = self.lstm(self.embedding(texts))
        return self.head(self.hidden(states[:, -1]))


for _layers in (1, 2):
    register_model(f"word-lstm-{_layers}", family="word-lstm-family")(partial(WordLSTM, layers=_layers))


@register_model("token-bag")
class TokenBag(nn.Module):
    """A linear classifier of the mean embedding of a text's tokens, whose ids are taken modulo `embeddings`.

    If inputs have an `attention_mask`, the mean is over the tokens where it is 1.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, embeddings: int = 4096, width: int = 32):
        super().__init__()
        if len(input_shape) != 1:
            raise ModelError(f"the model needs texts (tokens,), got inputs of shape {input_shape}")
        self.embedding = nn.Embedding(embeddings, width)
        self.head = nn.Linear(width, classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Return logits (n, classes) for int64 texts (n, tokens), or for `Inputs` whose first tensor has the texts."""
        tokens = next(iter(parts_of(texts).values()))
        mask = parts_of(texts).get("inputs.attention_mask", torch.ones_like(tokens))[:, :, None]
        vectors = self.embedding(tokens % self.embedding.num_embeddings)
        return self.head((vectors * mask).sum(1) / mask.sum(1).clamp_min(1))
