"""The contract of a method at the server: its hooks."""

import inspect

import pytest

from fedhet import registry
from fedhet.server import FederatedStrategy, Hooks

OF_ALL = {"method", "state_class", "takes_in", "copies"}
VALUES = {"config", "parameters", "traits", "state"}
HOOKS = {name for name in vars(Hooks) if not name.startswith("_")} - OF_ALL - VALUES - {"role"}


def test_there_are_seventeen_hooks_and_each_says_what_it_is():
    assert len(HOOKS) == 17
    assert all(inspect.getdoc(getattr(Hooks, name)) for name in HOOKS)


@pytest.mark.parametrize("name", registry.own_methods())
def test_a_method_overrides_hooks_and_nothing_else_of_the_base(name):
    """All else that it has is its own."""
    base = {name for each in FederatedStrategy.__mro__ for name in vars(each) if not name.startswith("__")}
    for each in registry.strategy(name).__mro__:
        if each is FederatedStrategy:
            break
        assert vars(each).keys() & base <= HOOKS | OF_ALL | {"_abc_impl", "_is_protocol"}
