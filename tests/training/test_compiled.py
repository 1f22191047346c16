"""Compiled steps of a batch of networks compute what the batch computes."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhet.config.configuration import resolve
from fedhet.errors import ConfigError
from fedhet.training import Batches, Optimisation, Term, compiled, vectorised
from tests.engines.test_client_batching import run
from tests.training.test_vectorised import clients, states, trained

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "_STEPS", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))


def with_dropout(outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 12), nn.LayerNorm(12), nn.Dropout(0.3), nn.Linear(12, outputs))


def all_steps():
    """The compiled steps; None for kinds that are not compiled."""
    return [*compiled._STEPS.values()]


def test_compiled_steps_compute_what_a_batch_computes():
    own = Optimisation("sgd", 0.1, momentum=0.9, weight_decay=0.1, batch_size=8)
    eager = [*clients(own=own)]
    quick = [replace(training, compiled=True) for training in clients(own=own)]
    expected = trained(eager, Batches())[0]
    for mine, other in zip(trained(quick, Batches())[0], expected, strict=True):
        assert mine[:2] == pytest.approx(other[:2], rel=1e-12)
        assert mine[2:] == other[2:]
    torch.testing.assert_close(states(quick), states(eager), rtol=1e-9, atol=1e-12)
    (steps,) = all_steps()
    assert len(steps) == 1, "the last mini-batch of fewer examples is padded"


class Adapted(nn.Module):
    """A product whose gradients PyTorch computes transposed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 5))
        self.second = nn.Parameter(torch.randn(12, 4))

    def forward(self, inputs):
        return F.linear(F.linear(inputs.flatten(1), self.first), self.second)


def with_adapter(outputs):
    return nn.Sequential(Adapted(), nn.ReLU(), nn.Linear(12, outputs))


@pytest.mark.parametrize("compiler", [torch.compile, lambda function, **_: function])
@pytest.mark.parametrize("build", [with_dropout, with_adapter])
def test_other_compiled_networks(build, compiler, monkeypatch):
    monkeypatch.setattr(torch, "compile", compiler)

    def without_terms():
        own = Optimisation("sgd", 0.1, momentum=0.9, batch_size=8)
        return [replace(each, phase=replace(each.phase, terms=())) for each in clients(own=own, build=build)]

    eager = without_terms()
    quick = [replace(training, compiled=True) for training in without_terms()]
    Batches().train(eager)
    Batches().train(quick)
    torch.testing.assert_close(states(quick), states(eager), rtol=1e-9, atol=1e-12)
    (steps,) = all_steps()
    assert len(steps) == 1


def rising(step):
    """A loss term with another weight in each step."""
    return step.mean(step.outputs.square().mean(1)) * step.number


def last(step):
    """A loss term of some steps."""
    return step.mean(step.outputs.square().mean(1)) if step.number > 1 else None


@pytest.mark.parametrize("function", [rising, last])
def test_a_loss_term_that_reads_the_number_of_the_step_is_not_compiled(function, caplog):
    def with_term(training):
        phase = replace(training.phase, terms=(*training.phase.terms, Term(function, weighted=True)))
        return replace(training, phase=phase)

    eager = [with_term(training) for training in clients()]
    quick = [replace(with_term(training), compiled=True) for training in clients()]
    trained(eager, Batches())
    with caplog.at_level(logging.INFO, "flwr"):
        trained(quick, Batches())
    assert [text for text in caplog.messages if "compiled" in text] == [
        "a batch of networks is not compiled: a loss term reads the number of the step"
    ]
    torch.testing.assert_close(states(quick), states(eager), rtol=1e-9, atol=1e-12)


def test_without_a_compiler_a_batch_is_not_compiled(caplog):
    from torch._inductor import config

    eager = [*clients()]
    quick = [replace(training, compiled=True) for training in clients()]
    trained(eager, Batches())
    with caplog.at_level(logging.INFO, "flwr"), config.patch({"cpp.cxx": ("no-such-compiler",)}):
        trained(quick, Batches())
    assert all_steps() == [None]
    assert len([text for text in caplog.messages if text.startswith("a batch of networks is not compiled: ")]) == 1
    torch.testing.assert_close(states(quick), states(eager), rtol=1e-9, atol=1e-12)


def test_code_that_computes_other_values_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args: [1.1 * x for x in function(*args)])
    quick = [replace(training, compiled=True) for training in clients()]
    eager = [*clients()]
    trained(eager, Batches())
    trained(quick, Batches())
    assert all_steps() == [None]
    torch.testing.assert_close(states(quick), states(eager), rtol=1e-9, atol=1e-12)


def test_a_learning_rate_that_changes_in_every_round_compiles_once(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    run(tmp_path / "run", workers=1, client_batching="4", compile=True, lr_schedule="cosine", fraction_train=1.0)
    assert len(all_steps()) == 1


@pytest.mark.parametrize(
    ("value", "rounds", "compiles"), [("auto", 666, False), ("auto", 667, True), (False, 667, False)]
)
def test_auto_compiles_long_runs(value, rounds, compiles):
    config = resolve({"compile": value, "rounds": rounds, "local-epochs": 3, "method": "fedavg"})
    assert config.compiles == compiles
    assert resolve(config.flat()).compiles == compiles


def test_what_cannot_be_compiled_is_refused_or_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(vectorised, "_said", set())
    with pytest.raises(ConfigError, match="leave client-batching = off out, or compile"):
        run(tmp_path / "off", client_batching="off", compile=True)
    with caplog.at_level(logging.INFO, "flwr"):
        run(tmp_path / "run", workers=1, compile=True, precision="bf16")
    assert caplog.messages.count("clients that are trained one by one are not compiled") == 1


def test_any_number_of_workers_gives_the_same_bytes(tmp_path):
    own = {"client_batching": "4", "compile": True}
    one = run(tmp_path / "1", workers=1, **own)
    assert all(all_steps())
    assert one == run(tmp_path / "2", workers=2, **own)


OF_METHODS = {
    "fedgen": {"architectures": "mlp-20"},
    "depthfl": {"architectures": "cnn", "depthfl.depths": "4,2", "depthfl.ramp-up": 4},
    "fedhenn": {"architectures": "mlp", "fedhenn.target": "kernel", "public-samples": 100, "learning-rate": 0.3},
}


@pytest.mark.parametrize("method", OF_METHODS)
def test_networks_are_of_one_kind_in_all_rounds(method, tmp_path, monkeypatch, caplog):
    """Numbers in loss terms, such as weights that rise, are no reason to verify and compile again."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(vectorised, "_said", set())
    own = {"clients": 4, "rounds": 5, "local-epochs": 2, "samples-per-client": 60, "partition": "iid"}
    with caplog.at_level(logging.INFO, "flwr"):
        run(tmp_path, workers=1, compile=True, fraction_train=1.0, **own, **OF_METHODS[method], method=method)
    # Of two depths, or with and without a loss term.
    assert len(all_steps()) == 2
    # Of two sizes of a mini-batch's or a target's arrays.
    assert sum(map(len, all_steps())) <= 3
    assert not [text for text in caplog.messages if "one by one" in text]


def test_code_is_compiled_once_for_each_shape(tmp_path, monkeypatch):
    """PyTorch compiles again, without a word, for arguments of another layout or `requires_grad`."""
    kinds: dict[int, set[tuple[object, ...]]] = {}

    def recording(function, **_):
        def recorded(*arguments):
            kind = tuple((argument.stride(), argument.requires_grad) for argument in arguments)
            kinds.setdefault(id(function), set()).add(kind)
            return function(*arguments)

        return recorded

    monkeypatch.setattr(torch, "compile", recording)
    run(tmp_path, workers=1, client_batching="4", compile=True, fraction_train=0.5, clients=8)
    assert [len(each) for each in kinds.values()] == [1]
