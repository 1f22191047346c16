"""The clients' data: tensors, NumPy arrays, or datasets of PyTorch and Hugging Face (fedhet/data/README.md)."""

from sklearn.datasets import load_digits
from torch import tensor


def my_data(client):
    """Return train and test examples (inputs, labels) of a client (`client.partition_id`), and public inputs."""
    digits = load_digits()
    inputs = tensor(digits.data / 16).float()
    labels = tensor(digits.target)
    mine = range(300 + client.partition_id, len(labels), client.num_partitions)
    train = mine[60:90]
    test = mine[:60]
    return {"train": (inputs[train], labels[train]), "test": (inputs[test], labels[test]), "public": inputs[:300]}
