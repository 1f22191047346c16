"""Six hospitals with unlike columns: three networks, two forests and a logistic regression, alone and together."""

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from torch import Tensor, nn

import fedhet

ROWS, LABELS = load_breast_cancer(return_X_y=True)
ROWS = (ROWS - ROWS.mean(0)) / ROWS.std(0)


def columns(hospital: int) -> list[int]:
    """Return the ten of the thirty columns that a hospital has."""
    return sorted(np.random.default_rng(hospital).choice(30, 10, replace=False).tolist())


class Network(nn.Module):
    """A network that reads a hospital's own columns."""

    def __init__(self, hospital: int, width: int) -> None:
        super().__init__()
        self.columns = columns(hospital)
        self.layers = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits (n, 2) for rows (n, 30)."""
        return self.layers(rows[:, self.columns])


def my_model(client):
    """Return a hospital's model, which reads the hospital's own columns."""
    number = client.partition_id
    if number < 3:
        return Network(number, 16 * (number + 1))
    estimator = LogisticRegression() if number == 5 else RandomForestClassifier()
    return make_pipeline(ColumnTransformer([("own", "passthrough", columns(number))]), estimator)


if __name__ == "__main__":
    settings = {
        "clients": 6,
        "rounds": 10,
        "samples-per-client": 25,
        "public-samples": 150,
        "test-split": "drawn",
        "test-share": 0.5,
    }
    fedmd = {"fedmd.public-epochs": 0, "feddf.teach": True}
    fedhet.compare(
        ["local", "fedmd", "feddf"],
        settings | fedmd,
        seeds=[0, 1, 2],
        model=my_model,
        data=(ROWS, LABELS),
        out="runs/hospitals",
    )
