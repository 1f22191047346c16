"""Methods of other people keep the contract, without a line of theirs in fedhet."""

from pathlib import Path
from typing import ClassVar

import pytest

from fedhet.methods.method import Method, Traits
from fedhet.methods.sharing import HEAD
from fedhet.testing import MethodContract

from ..contract.further import Contract


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


class TestByReference(Contract):
    method = "someone:slow"
    settings: ClassVar = {"slow.inertia": 0.1}


@pytest.mark.slow
class TestGiven(MethodContract):
    method = Method("heads", traits=Traits(shares=HEAD, keeps="model", common_init=True))
    architectures = "mlp"
