"""Logistic regression on a client's own examples: a baseline without networks or communication."""

from fedhet.methods.included._classical import classical

method = classical("logistic-regression")
