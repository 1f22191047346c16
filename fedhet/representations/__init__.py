"""Representations of networks: features and heads, CKA, and the peers' target that FedHeNN aligns a client with."""

from fedhet.representations.alignment import Alignment as Alignment
from fedhet.representations.alignment import Rows as Rows
from fedhet.representations.cka import debiased_linear_cka as debiased_linear_cka
from fedhet.representations.cka import linear_cka as linear_cka
from fedhet.representations.cka import procrustes_distance as procrustes_distance
from fedhet.representations.cka import rbf_cka as rbf_cka
from fedhet.representations.features import Captured as Captured
from fedhet.representations.features import Capturing as Capturing
from fedhet.representations.features import Output as Output
from fedhet.representations.features import RandomStream as RandomStream
from fedhet.representations.features import Representation as Representation
from fedhet.representations.features import head_name as head_name
from fedhet.representations.features import isolated as isolated
