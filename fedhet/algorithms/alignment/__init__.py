"""Alignment of representations: similarities such as CKA, FedHeNN's proximal term, and the targets."""

from fedhet.algorithms.alignment.cka import debiased_linear_cka as debiased_linear_cka
from fedhet.algorithms.alignment.cka import linear_cka as linear_cka
from fedhet.algorithms.alignment.cka import procrustes_distance as procrustes_distance
from fedhet.algorithms.alignment.cka import rbf_cka as rbf_cka
from fedhet.algorithms.alignment.term import Alignment as Alignment
from fedhet.algorithms.alignment.term import distance_to as distance_to
