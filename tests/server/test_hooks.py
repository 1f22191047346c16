"""The contract of a method at the server: its hooks."""

import pytest

from fedhet.methods import registry
from fedhet.server import FederatedStrategy, Hooks

OF_ALL = {"method", "state_class", "copies"}
VALUES = {"config", "options", "traits", "state"}
HOOKS = {name for name in vars(Hooks) if not name.startswith("_")} - OF_ALL - VALUES - {"role", "run_round"}


@pytest.mark.parametrize("name", registry.own_methods())
def test_methods_override_only_hooks(name):
    base = {name for each in FederatedStrategy.__mro__ for name in vars(each) if not name.startswith("__")}
    for each in registry.strategy(name).__mro__:
        if each is FederatedStrategy:
            break
        assert vars(each).keys() & base <= HOOKS | OF_ALL | {"_abc_impl", "_is_protocol"}
