"""Networks for texts of (characters,)."""

from torch import Tensor, nn

from fedhet.errors import ModelError
from fedhet.models.registry import register_model


class CharLSTM(nn.Module):
    """FedMA's character LSTM (table 5), predicting the next character; 293,584 parameters for a vocabulary of 80."""

    def __init__(self, vocabulary: int, embedding: int = 8, units: int = 256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, units, batch_first=True)
        self.head = nn.Linear(units, vocabulary)

    def forward(self, texts: Tensor) -> Tensor:
        """Logits (n, vocabulary) of the character after each text, of texts (n, steps) int64."""
        states, _ = self.lstm(self.embedding(texts))
        return self.head(states[:, -1])


@register_model("char-lstm")
def char_lstm(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedMA's character LSTM over a vocabulary of `classes`."""
    if len(input_shape) != 1:
        raise ModelError(f"takes texts of (characters,), such as shakespeare's, not inputs of {input_shape}")
    return CharLSTM(classes)
