"""Alignment of clients' representations: similarities such as CKA, FedHeNN's proximal term, and alignment targets."""

from fedhet.algorithms.alignment.cka import Alignment as Alignment
from fedhet.algorithms.alignment.cka import distance_to as distance_to
from fedhet.algorithms.alignment.cka import linear_cka as linear_cka
