"""Nearest neighbour on a client's own examples: a control without networks or peers."""

from fedhet.methods.included._classical import classical

method = classical("nearest-neighbour")
