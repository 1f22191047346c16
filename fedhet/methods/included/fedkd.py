"""FedKD (Wu et al., "Communication-efficient federated learning via knowledge distillation", 2022)."""

from dataclasses import replace

from fedhet.methods.included.fml import TRAITS, AuxiliaryOptions
from fedhet.methods.method import Method

FIRST, LAST = 0.95, 0.98
"""Fraction of the squared singular values of a matrix's change that is sent before the first and in the last round."""


def energy(round: int, rounds: int) -> float:
    """Return the fraction of energy (sum of squared singular values) sent in a round (from 1); it grows linearly."""
    return FIRST + min(round / max(rounds, 1), 1.0) * (LAST - FIRST)


method = Method(
    "fedkd",
    traits=replace(TRAITS, other_arrays="entries", sends={"model": "weights", "update": "weights"}),
    Options=AuxiliaryOptions,
)
