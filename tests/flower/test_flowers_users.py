"""The code of Flower's users: their server code, arrays, names, wrappers and mods, around fedhet's strategies."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp import strategy as flower

import fedhet
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower.grid import LocalGrid
from fedhet.utils.text import log_once

pytestmark = pytest.mark.usefixtures("home")
NORM = 0.05


def distance(one: ArrayRecord, other: ArrayRecord) -> float:
    pairs = zip(one.to_numpy_ndarrays(), other.to_numpy_ndarrays(), strict=True)
    return float(np.sqrt(sum(np.square(a - b).sum() for a, b in pairs)))


@pytest.mark.parametrize(
    ("kind", "method"),
    [("server", "FedAvg"), ("server", "FedRep"), ("client", "FedAvg"), ("adaptive server", "FedAvg")],
)
def test_flowers_wrappers_clip_and_add_noise(tiny, kind, method):
    first = tiny.model().state_dict()
    shared = ArrayRecord({k: v for k, v in first.items() if method != "FedRep" or k.startswith("0")})
    mods = [fixedclipping_mod] if kind == "client" else None
    wrapper = getattr(
        flower, f"DifferentialPrivacy{kind.split()[-1].title()}Side{'Adaptive' if 'ada' in kind else 'Fixed'}Clipping"
    )
    norms = {"initial_clipping_norm": NORM} if "ada" in kind else {"clipping_norm": NORM}

    def result(noise):
        strategy = getattr(fedhet, method)(rounds=1, local_epochs=3, learning_rate=0.5)
        wrapped = wrapper(strategy, noise_multiplier=noise, num_sampled_clients=3, **norms)
        return wrapped.start(LocalGrid(tiny.app(mods=mods), 3), shared, num_rounds=1).arrays

    quiet = result(1e-6)
    assert 0.5 * NORM < distance(quiet, shared) < 1.01 * NORM  # what is learnt in three epochs goes further
    assert distance(result(0.25), quiet) > 0.2 * NORM


@pytest.mark.parametrize(
    ("strategy", "arrays", "why"),
    [
        (lambda: fedhet.FedProto(), {}, "method fedproto has no model that all clients share .*: use fedavg"),
        (lambda: fedhet.FedRep(), {"0": 1, "2": 1}, r"must be the arrays that clients of fedrep .*leave out 2.weight"),
    ],
)
def test_unsuitable_wrappers_are_refused_before_training(tiny, around, strategy, arrays, why):
    trained = []
    app = around(before=lambda where, message: trained.append(where[1]))
    given = ArrayRecord({k: v for k, v in tiny.model().state_dict().items() if k[0] in arrays})
    wrapper = flower.DifferentialPrivacyServerSideFixedClipping(strategy(), 0.0, NORM, 3)
    with pytest.raises(ConfigError, match=why):
        wrapper.start(LocalGrid(app, 3), given, num_rounds=1)
    assert "train" not in trained


def test_a_noisy_mod_under_fedhets_loop(tiny):
    first = ArrayRecord(tiny.model().state_dict())
    noise = LocalDpMod(clipping_norm=NORM, sensitivity=1e-6, epsilon=1.0, delta=1e-5)

    def moved(mods):
        strategy = fedhet.FedAvg(local_epochs=3, learning_rate=0.5)
        return distance(strategy.start(LocalGrid(tiny.app(mods=mods), 2), first, num_rounds=1).arrays, first)

    assert moved([noise]) < 1.01 * NORM < moved(None)
    for strategy, name in ((fedhet.FedProto(), "fedproto"), (fedhet.FedKD(shared_model="mlp-20"), "fedkd")):
        with pytest.raises(FedhetError, match=f"method {name} has no model .*, which a mod of Flower's needs"):
            strategy.start(LocalGrid(tiny.app(mods=[noise]), 2), num_rounds=1)


def test_free_keys_of_a_train_config_reach_the_mods(tiny):
    seen = []

    def mod(message, context, call_next):
        seen.append(dict(message.content["request"]).get("secret"))
        return call_next(message, context)

    fedhet.Local().start(LocalGrid(tiny.app(mods=[mod]), 1), num_rounds=1, train_config=ConfigRecord({"secret": 7}))
    assert set(seen) == {7}


def test_flowers_strategy_with_fedhets_client_app(tiny, caplog):
    log_once.cache_clear()  # it is told once a process
    first = ArrayRecord(tiny.model().state_dict())
    with caplog.at_level("INFO", logger="flwr"):
        result = flower.FedAvg().start(LocalGrid(tiny.app(), 2), first, num_rounds=1)
    assert (
        caplog.text.count("start a fedhet strategy in the ServerApp, such as fedhet.FedAvg") >= 3
    )  # client, each reply
    assert "Traceback" not in caplog.text
    assert "Inconsistent" not in caplog.text
    assert not result.train_metrics_clientapp
