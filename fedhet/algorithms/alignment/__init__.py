"""Representations of networks: features and heads, CKA, and the peers' target that FedHeNN aligns a client with."""

from fedhet.algorithms.alignment.cka import debiased_linear_cka as debiased_linear_cka
from fedhet.algorithms.alignment.cka import linear_cka as linear_cka
from fedhet.algorithms.alignment.cka import procrustes_distance as procrustes_distance
from fedhet.algorithms.alignment.cka import rbf_cka as rbf_cka
from fedhet.algorithms.alignment.term import Alignment as Alignment
from fedhet.algorithms.alignment.term import Rows as Rows
from fedhet.models.representation import Captured as Captured
from fedhet.models.representation import Capturing as Capturing
from fedhet.models.representation import Output as Output
from fedhet.models.representation import RandomStream as RandomStream
from fedhet.models.representation import Representation as Representation
from fedhet.models.representation import head_name as head_name
from fedhet.models.representation import isolated as isolated
