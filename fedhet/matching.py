"""Public names of `fedhet.algorithms.matching`: matching of neurons, channels and LSTM states."""

from fedhet.algorithms.matching import *  # noqa: F403
