"""Public names of `fedhet.algorithms.alignment.cka`: similarity of representations (CKA, Procrustes distance)."""

import sys

from fedhet.algorithms.alignment import cka as cka
from fedhet.algorithms.alignment.cka import *  # noqa: F403

sys.modules["fedhet.representations.cka"] = cka
