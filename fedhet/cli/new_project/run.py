"""Compare local training with a federated method on the same clients: python run.py."""

from data import my_data
from model import my_model

import fedhet

SETTINGS = {"clients": 10, "rounds": 10}  # `fedhet keys` shows what there is to set

if __name__ == "__main__":
    fedhet.compare(["local", "fedhenn"], SETTINGS, seeds=[0, 1, 2], model=my_model, data=my_data, out="runs/first")
