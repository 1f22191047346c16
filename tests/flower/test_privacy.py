"""Runs under Flower's wrappers for differential privacy: what is recorded of them, and the epsilon that they report."""

import math
import re
import sys

import pytest
from flwr.app import ArrayRecord
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping as ClientSide
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping as Adaptive
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as ServerSide

import fedhet
from fedhet.errors import ConfigError
from fedhet.flower import privacy
from fedhet.flower.grid import LocalGrid
from fedhet.flower.messages import decode_arrays
from fedhet.methods import registry
from fedhet.results.report import write_report
from fedhet.testing import Run
from fedhet.utils.files import read_arrays

pytestmark = pytest.mark.usefixtures("home", "no_report")
NORM = 0.05


@pytest.fixture
def first(tiny):
    return ArrayRecord(tiny.model().state_dict())


@pytest.fixture
def wrapped(tiny, first, tmp_path):
    """Runs a method under one of Flower's wrappers on three clients, and returns the files of the run."""

    def wrapped(wrapper, app=None, rounds=1, method=fedhet.FedAvg, initial=first, **settings):
        strategy = method(**{"out": str(tmp_path / "run"), "rounds": rounds, **settings})
        wrapper(strategy).start(LocalGrid(app or tiny.app(), 3), initial, num_rounds=rounds)
        return Run(tmp_path / "run")

    return wrapped


def noisy(strategy, noise=1.0):
    return ServerSide(strategy, noise, NORM, 3)


def expected(*noise_multipliers):
    """Epsilon of Gaussian mechanisms, by dp-accounting itself."""
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant()
    for each in noise_multipliers:
        accountant.compose(dp_accounting.GaussianDpEvent(each))
    return accountant.get_epsilon(1e-5)


def test_equal_clients_spend_the_noise_multipliers_epsilon(tiny, wrapped, tmp_path, caplog):
    epsilon = expected(1.5, 1.5)
    equal = tiny.app(data=lambda client: tuple((x[-14:], y[-14:]) for x, y in tiny.data(client)))
    with caplog.at_level("INFO", logger="flwr"):
        spent = wrapped(lambda strategy: noisy(strategy, 1.5), equal, rounds=2).summary["privacy"]
    assert spent["epsilon"] == pytest.approx(epsilon)
    assert (spent["delta"], spent["rounds"]) == (1e-5, 2)
    assert spent["note"].startswith("for all examples of a client; covers the model, not metrics")
    assert f"privacy: epsilon = {epsilon:.4g} at delta = 1e-05 (rounds: 2)" in caplog.text
    assert (
        f"<dd>epsilon {epsilon:.4g}<small>delta 1e-05; for all examples" in write_report(tmp_path / "run").read_text()
    )


@pytest.mark.parametrize(
    ("method", "wrapper", "mods"), [("FedAvg", ServerSide, None), ("FedRep", ClientSide, [fixedclipping_mod])]
)
def test_more_examples_mean_less_privacy(tiny, wrapped, method, wrapper, mods):
    epsilon = expected(2.0 / 3 * (14 + 18 + 22) / 22)
    shared = {k: v for k, v in tiny.model().state_dict().items() if method == "FedAvg" or k.startswith("0")}
    given = {"method": getattr(fedhet, method), "initial": ArrayRecord(shared)}
    done = wrapped(lambda strategy: wrapper(strategy, 2.0, NORM, 3), tiny.app(mods=mods), **given)
    spent = done.summary["privacy"]
    assert spent["epsilon"] == pytest.approx(epsilon)
    assert ("the shared part of the model" in spent["note"]) == (method == "FedRep")


def test_noise_at_the_clients_adds_up(tiny, tmp_path, caplog):
    epsilon = expected(*[math.sqrt(2 * math.log(1.25 / 1e-5)) / 2] * 3)
    app = tiny.app(mods=[LocalDpMod(clipping_norm=NORM, sensitivity=2 * NORM, epsilon=4.0, delta=1e-5)])
    settings = {"out": str(tmp_path / "run"), "closing_epochs": 0}
    with caplog.at_level("INFO", logger="flwr"):
        fedhet.FedAvg(**settings).start(LocalGrid(app, 3), num_rounds=2)
        fedhet.FedAvg(**settings, resume=True).start(LocalGrid(app, 3), num_rounds=3)
    spent = Run(tmp_path / "run").summary["privacy"]
    assert spent["epsilon"] == pytest.approx(epsilon)
    assert (spent["wrapper"], spent["rounds"]) == ("LocalDpMod", 3)
    assert spent["note"].startswith("for all examples of a client, from the server, too; covers the model, not metrics")
    assert f"privacy: epsilon = {epsilon:.4g} at delta = 1e-05 (rounds: 3)" in caplog.text


def test_a_client_without_noise_leaves_epsilon_unknown():
    pytest.importorskip("dp_accounting")
    noise = {"0": 1.0}
    ledger = privacy.mod_ledger(noise, registry.method("fedavg").traits, 0)
    ledger.spend({}, {}, {})
    assert ledger.spent()["epsilon"] == pytest.approx(expected(1.0))
    noise["late"] = 0.0
    ledger.spend({}, {}, {})
    assert ledger.spent()["epsilon"] is None
    assert ledger.unknown.startswith("client late adds no noise: make its ClientApp with mods=[LocalDpMod(...)]")


@pytest.mark.parametrize(
    ("wrapper", "settings", "why"),
    [
        (lambda strategy: Adaptive(strategy, 0.25, 3), {}, "the noise of adaptive clipping depends on a norm"),
        (lambda strategy: ServerSide(strategy, 0.0, NORM, 3), {}, "noise_multiplier is 0"),
        (lambda strategy: ServerSide(strategy, 1.0, NORM, 3), {"clip_norm": 2.0}, "does not take the mean of"),
        (lambda strategy: ClientSide(strategy, 1.0, 1e-4, 3), {}, r"client \d has norm .* mods=\[fixedclipping_mod\]"),
    ],
)
def test_why_no_epsilon_is_known(wrapped, tmp_path, caplog, wrapper, settings, why):
    pytest.importorskip("dp_accounting")
    spent = wrapped(wrapper, local_epochs=3, learning_rate=0.5, **settings).summary["privacy"]
    assert spent["epsilon"] is None
    assert re.search(why, spent["note"])
    assert f"privacy: no epsilon is known: {spent['note']}" in caplog.text
    assert "no epsilon is known" in write_report(tmp_path / "run").read_text()


def test_aggregation_other_than_the_mean_is_detected(wrapped):
    pytest.importorskip("dp_accounting")

    class Momentum(fedhet.FedAvg):
        def aggregate_fit(self, round, replies):
            before = self.state.model
            super().aggregate_fit(round, replies)
            self.state.model = {key: 2 * array - before[key] for key, array in self.state.model.items()}
            return {}

    assert wrapped(noisy, method=Momentum, learning_rate=0.5).summary["privacy"]["note"] == privacy.NO_MEAN


def test_other_arrays_get_no_noise():
    ledger = privacy.wrapper_ledger(noisy(fedhet.FedAvg()), registry.method("fedgen").traits, mean=True)
    assert ledger.unknown == "clients also send classes, which gets no noise"


def test_the_missing_extra_is_named(wrapped, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    summary = wrapped(noisy).summary
    assert summary["status"] == "completed"
    assert summary["privacy"]["note"].endswith("pip install 'fedhet[dp]'")


# ---- what is recorded


def test_a_wrapped_run_is_recorded_like_any_other(tiny, first, wrapped, tmp_path):
    """Without noise and clipping, the wrapper changes nothing."""
    settings = {"local_epochs": 2, "learning_rate": 0.5, "closing_epochs": 0}
    fedhet.FedAvg(out=str(tmp_path / "plain"), **settings).start(LocalGrid(tiny.app(), 3), first, num_rounds=3)
    rows = wrapped(lambda strategy: ServerSide(strategy, 0.0, 1e6, 3), rounds=3, **settings).rows
    plain = Run(tmp_path / "plain").rows
    assert [(row["round"], row["participants"]) for row in rows] == [(r["round"], r["participants"]) for r in plain]
    for row, other in zip(rows, plain, strict=True):
        assert row["failures"] == []
        for which in ("received", "trained"):
            assert (row[which] is None) == (other[which] is None)
            if row[which]:
                assert row[which]["loss"]["weighted"] == pytest.approx(other[which]["loss"]["weighted"], rel=1e-4)
    assert rows[-1]["final"]
    assert Run(tmp_path / "run").summary["rounds"] == 3
    assert "rounds = 3" in (tmp_path / "run" / "config.toml").read_text()


def test_evaluations_have_the_wrappers_noise(tiny, around, first, tmp_path):
    seen = []

    def before(where, message):
        if where[1] == "evaluate":
            seen.append(decode_arrays(message.content["model"]))

    strategy = fedhet.FedAvg(out=str(tmp_path / "run"), rounds=1, learning_rate=0.01)
    result = ServerSide(strategy, 100.0, NORM, 2).start(LocalGrid(around(before=before), 2), first, num_rounds=1)
    noisy = decode_arrays(result.arrays)
    assert len(seen) == 4  # Flower's evaluation of two clients, and that at the end
    assert all((arrays[key] == noisy[key]).all() for arrays in seen for key in noisy)
    saved, _ = read_arrays(tmp_path / "run" / "models" / "global.safetensors")
    assert all((saved[key] == noisy[key]).all() for key in noisy)


class Silent:
    """Hooks of Flower's evaluation that do not call `super()`."""

    def configure_evaluate(self, server_round, arrays, config, grid):
        return []

    def aggregate_evaluate(self, server_round, replies):
        return None


class HalvedAndSilent(Silent, fedhet.FedAvg):
    """A strategy that also changes the arrays."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return ArrayRecord({name: tensor / 2 for name, tensor in arrays.to_torch_state_dict().items()}), metrics


@pytest.mark.parametrize("wrapper", [lambda strategy: strategy, noisy])
def test_hooks_that_do_not_call_super_leave_a_whole_record(wrapper, tiny, first, tmp_path, caplog):
    strategy = HalvedAndSilent(out=str(tmp_path / "run"), rounds=2, local_epochs=1)
    result = wrapper(strategy).start(LocalGrid(tiny.app(), 3), first, num_rounds=2)
    run = Run(tmp_path / "run")
    assert [len(row["participants"]) for row in run.rows] == [0, 3, 3, 0]
    assert (run.summary["rounds"], run.summary["status"]) == (2, "completed")
    saved, _ = read_arrays(tmp_path / "run" / "models" / "global.safetensors")
    assert all((saved[key] == array).all() for key, array in decode_arrays(result.arrays).items())


def test_a_skipped_round_is_recorded(failing, wrapped):
    rows = wrapped(noisy, failing((2, "train", "1")), rounds=3).rows
    assert [len(row["participants"]) for row in rows] == [0, 3, 0, 3, 0]
    assert "all replies of this round were discarded" in rows[2]["failures"][0]["reason"]


def test_closing_epochs_and_resume_need_fedhets_loop(wrapped, caplog):
    assert [row["round"] for row in wrapped(noisy, closing_epochs=2).rows] == [0, 1, 2]
    assert "closing-epochs has no effect in Flower's loop" in caplog.text
    with pytest.raises(ConfigError, match="cannot be resumed"):
        wrapped(noisy, resume=True)


def test_an_interrupted_loop_is_recorded_as_failed(tiny, first, tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr("atexit.register", at_exit.append)

    class Interrupted(LocalGrid):
        sent = 0

        def send_and_receive(self, *arguments, **more):
            self.sent += 1
            if self.sent == 4:  # the handshake, and training and evaluation of the first round
                raise KeyboardInterrupt
            return super().send_and_receive(*arguments, **more)

    strategy = fedhet.FedAvg(out=str(tmp_path / "run"), rounds=2)
    wrapped = ServerSide(strategy, 1.0, NORM, 3)
    with pytest.raises(KeyboardInterrupt):
        wrapped.start(Interrupted(tiny.app(), 3), first, num_rounds=2)
    assert not (tmp_path / "run" / "summary.json").exists()
    [end] = at_exit
    end()
    summary = Run(tmp_path / "run").summary
    assert (summary["status"], summary["rounds"]) == ("failed", 1)
    assert summary["error"].startswith("Flower's loop ended after round 1: set rounds of the strategy (2) and")
    wrapped.start(LocalGrid(tiny.app(), 3), first, num_rounds=2)
    assert Run(tmp_path / "run-2").summary["status"] == "completed"


def test_a_wrapper_that_runs_more_rounds_is_refused(tiny, first):
    wrapped = noisy(fedhet.FedAvg(rounds=1))
    with pytest.raises(ConfigError, match=r"loop reached round 2: set rounds of the strategy \(1\) and num_rounds"):
        wrapped.start(LocalGrid(tiny.app(), 3), first, num_rounds=2)
