"""Similarity of representations: CKA and Procrustes distance (`fedhet.algorithms.alignment.cka`)."""

import sys

from fedhet.algorithms.alignment import cka as cka
from fedhet.algorithms.alignment.cka import *  # noqa: F403

sys.modules["fedhet.representations.cka"] = cka
