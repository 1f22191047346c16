"""Generated files are current."""

from pathlib import Path

import pytest

import fedhet
from fedhet.methods.registry import module_of

generate = module_of(str(Path(__file__).resolve().parents[1] / ".ci" / "generate.py"))


def test_generated_files_are_current():
    old = [str(path) for path, text in generate.generated().items() if path.read_text(encoding="utf-8") != text]
    assert old == [], "run `python .ci/generate.py`"


def test_the_stub_has_all_strategies_and_keys():
    stub = generate.stub()
    assert "class FedHeNN(FederatedStrategy[Any, Any]):" in stub
    assert 'schedule: Literal["auto", "sqrt", "linear", "constant"]' in stub
    assert stub.count("**settings: Unpack[") == len(generate.registry.own_methods())


def test_the_stub_has_the_public_names():
    stub = generate.stub()
    assert [name for name in fedhet.__all__ if f" as {name}\n" not in stub] == []


@pytest.mark.slow
def test_the_handshake_takes_heads_as_the_table_says():
    assert {name: generate.heads_taken(name) for name in generate.registry.own_methods()} == generate.heads_so_far()
