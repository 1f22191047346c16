"""Matching of neurons, channels and LSTM states (`fedhet.algorithms.matching`)."""

from fedhet.algorithms.matching import *  # noqa: F403
