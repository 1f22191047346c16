"""The settings that methods of a comparison share, and where their own keys come from."""

import pytest
import torch

from fedhet.comparing.runs import check
from fedhet.comparing.settings import shared_settings, variants_of
from fedhet.config import configuration
from fedhet.config.toml import to_toml
from fedhet.errors import ConfigError
from fedhet.methods import registry
from fedhet.methods.method import Traits, method
from fedhet.server import FederatedStrategy
from fedhet.setup.user_functions import UserFunctions

FEDMA = {"preset": "fedma/digits", "clients": 2, "fedma.passes": 2}


def shared(methods, config=FEDMA, functions=UserFunctions()):  # noqa: B008
    return shared_settings(variants_of(methods), seeds=(0,), config=config, functions=functions)


def test_rounds_count_for_all():
    found = shared(("fedma", "fedavg", "pfnm"), FEDMA | {"rounds": 4})
    assert {found.settings(method, 0).rounds for method in ("fedma", "fedavg", "pfnm")} == {4}
    assert found.notes == []
    found = shared(("fedma", "fedavg,rounds=6"))
    assert [found.settings(method, 0).rounds for method in ("fedma", "fedavg")] == [0, 6]
    for order in (("fedavg", "fedma"), ("fedma", "fedavg")):
        with pytest.raises(ConfigError, match="rounds = 0: fedavg does not determine the number"):
            shared(order)


@pytest.mark.parametrize(("chosen", "equalised"), [("cnn-1-1,cnn-2-1", {"fedavg"}), ("cnn-2-1", set())])
def test_settings_that_all_share(chosen, equalised):
    own = {"architectures": chosen, "fedhenn.eta0": 0.1, "local-epochs": 3, "public-samples": 64}
    found = shared(("fedhenn", "fedavg", "local"), {"preset": "", **own})
    flat = {name: found.settings(name, 4).flat() for name in found.own}
    assert found.equalised == equalised
    assert flat["fedavg"]["architectures"] == ("cnn" if equalised else chosen)
    keys = [key for key in flat["local"] if "." not in key and len({each[key] for each in flat.values()}) > 1]
    assert keys == ["method", "architectures"][: 1 + bool(equalised)]
    assert (flat["local"]["seed"], flat["local"]["local-epochs"], flat["fedhenn"]["fedhenn.eta0"]) == (4, 3, 0.1)
    assert not any(key.startswith("fedhenn.") for key in flat["local"])


class TestVariants:
    def test_own_settings_take_precedence(self):
        texts = ["fedavg", "mild=fedprox,fedprox.mu=0.5,architectures=mlp,cnn,local-epochs=3"]
        found = shared(texts, {"preset": "fedavg/digits", "fedprox.mu": 2.0})
        plain, mild = (found.settings(name, 0) for name in ("fedavg", "mild"))
        assert (mild.method_name, mild.options.mu, mild.local_epochs) == ("fedprox", 0.5, 3)
        assert (plain.method_name, plain.local_epochs) == (
            "fedavg",
            configuration.resolve({"preset": "fedavg/digits"}).local_epochs,
        )
        assert found.equalised == {"mild"}  # it asked for two networks, and needs equal ones
        assert mild.architectures == "cnn"
        same = ("dataset", "partition", "samples_per_client", "public_samples", "rounds", "clients", "seed")
        assert all(getattr(plain, key) == getattr(mild, key) for key in same)

    def test_the_same_method_can_stand_there_twice(self):
        few, many = variants_of(["few=fedavg,rounds=2", "fedavg"])
        assert (few.name, few.method, few.settings, many.name) == ("few", "fedavg", {"rounds": 2}, "fedavg")
        assert variants_of(["local", "local"]) == variants_of(["local"])

    def test_a_strategy_stands_for_its_method(self, monkeypatch):
        monkeypatch.setattr(registry, "_registered", {})

        @method("half", Traits())
        class Half(FederatedStrategy):
            pass

        local, half = variants_of(["local", Half])
        assert (local.name, half.name, half.method) == ("local", "half", "half")
        assert variants_of([registry.method("half")]) == [half]

        class Undeclared(FederatedStrategy):
            pass

        with pytest.raises(ConfigError, match="list of texts, .* a method of your own is a strategy that fedhet"):
            variants_of(["local", Undeclared])

    @pytest.mark.parametrize(
        ("texts", "reason"),
        [
            (["fedavg", "fedavg=fedprox"], "several methods have the name fedavg: rename all but one with NAME=METHOD"),
            (["a=fedavg,alpha=.1,rounds=3"], "a: set alpha for all methods at once"),
            (["a=fedavg,fedprox.mu=1"], r"a: fedprox\.mu is not a key of fedavg"),
            (["a=fedavgg"], "fedavgg"),
            (["a=b=fedavg"], "a=b=fedavg names no method: write METHOD or YOURNAME=METHOD,KEY=VALUE"),
            (["my name=fedavg"], "my name=fedavg names no method: .* .YOURNAME has letters, digits"),
        ],
    )
    def test_invalid_variants(self, texts, reason):
        with pytest.raises(ConfigError, match=reason):
            variants_of(texts)


def test_own_keys_come_from_presets():
    texts = ["fedhenn", "fedproto", "rep=fedrep", "narrow=fedproto,fedproto.width=8"]
    for base in ({"preset": "fedhenn/digits"}, {"preset": "local/digits", "fedproto.weight": 0.5}):
        settings = shared(texts, base)
        found = {variant: settings.settings(variant, 0).options for variant in settings.own}
        alone = configuration.resolve(base | {"preset": "fedproto/digits"})
        assert found["fedproto"] == alone.options
        assert found["fedproto"].width == 32
        assert found["narrow"].width == 8
        assert found["rep"].body_epochs == 2
        assert found["fedhenn"] == configuration.resolve({"preset": "fedhenn/digits"}).options
    complete = configuration.resolve({"preset": "fedhenn/digits"}).flat()  # a file has all that counts
    assert shared(["fedproto"], complete).settings("fedproto", 0).options.width == 0


def test_hypernetworks_have_their_own_optimiser():
    own = 'optimizer = "adam", learning-rate = 0.005'

    def training(methods, config):
        found = shared(methods, configuration.settings_of(config))
        settings = [found.settings(name, 0) for name in found.own]
        return [(each.optimizer, each.learning_rate) for each in settings], found.notes

    for methods in (["local", "flha-ghn"], ["flha-ghn", "local"]):
        values, notes = training(methods, {})
        assert dict(zip(methods, values, strict=True)) == {"local": ("sgd", 0.05), "flha-ghn": ("adam", 0.005)}
        assert [note for note in notes if note.startswith(f"flha-ghn: its clients train a hypernetwork, with {own}")]
    assert training(["local", "flha-ghn,learning-rate=.003"], {})[0][1] == ("adam", 0.003)
    values, notes = training(["local", "flha-ghn"], {"learning-rate": 0.1})
    assert values == [("sgd", 0.1), ("adam", 0.1)]
    assert training(["local", "flha-ghn"], {"preset": "flha-ghn/cifar10"}) == ([("sgd", 0.009)] * 2, [])


def test_ineffective_keys_are_noted():
    assert shared(["local", "nearest-neighbour"], {"preset": "local/digits"}).notes == []
    chosen = shared(["local", "nearest-neighbour"], {"preset": "local/digits", "learning_rate": 0.2})
    assert chosen.notes == ["nearest-neighbour: learning-rate has no effect with method = nearest-neighbour"]


def test_keys_without_effect_are_refused():
    for methods, chosen, sentence in (
        (
            ["fedavg", "local"],
            {"fedprox.mu": 1.0},
            "fedprox.mu has no effect with method = fedavg: set method = fedprox",
        ),
        (["fedavg", "local"], {"partition": "iid", "alpha": 0.3}, "alpha has no effect with partition = iid: set"),
        (["fedavg", "local"], {"workers": 3}, "workers has no effect here, since a comparison sets it for each run"),
        (["fedma", "local"], {"preset": "fedma/digits"}, "local: rounds = 0 trains nothing: set rounds for"),
        (["fedavg", "local,aggregation=median"], {}, "local: aggregation has no effect with method = local: leave it"),
    ):
        with pytest.raises(ConfigError, match=f"^{sentence}[^\n]*$"):
            shared(methods, chosen)
    found = shared(["fedprox", "local"], {"fedprox.mu": 1.0, "report": False})
    assert (found.notes, found.settings("local", 0).report) == ([], False)
    assert found.settings("fedprox", 0).options.mu == 1.0
    whole = found.settings("fedprox", 5).flat()  # the file of a run
    assert shared(["fedavg", "local"], whole).settings("local", 0).seed == 0


def test_each_variant_suits_a_users_models_and_data():
    part = (torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
    functions = UserFunctions(model=lambda client: None, data=lambda client: (part, part, part[0]))
    found = shared(["local", "flha-ghn"], {"preset": "fedhenn/digits"}, functions)
    assert {found.settings(variant, 0).dataset for variant in found.own} == {"own"}
    assert {found.settings(variant, 0).partition for variant in found.own} == {"iid"}
    assert found.settings("flha-ghn", 0).options.head == "tiled"
    keys = [note.partition(" = ")[0] for note in found.notes if "hypernetwork" not in note]
    assert keys == ["flha-ghn: learning-rate", "flha-ghn: flha-ghn.head"]


def test_folders_of_users_data(tmp_path):
    functions = UserFunctions(model=torch.nn.Linear(4, 3), data=lambda client: None)
    run = shared(["local"], {"preset": "local/digits"}, functions).plan("local", 0, tmp_path)
    before = run.settings.flat() | {"dataset": "digits", "partition": "classes", "public-samples": 9}
    (tmp_path / "config.toml").write_text(to_toml(before))
    check([run], functions)
    (tmp_path / "config.toml").write_text(to_toml(before | {"batch-size": 7}))
    with pytest.raises(ConfigError, match=r"other settings \(batch-size = 7 instead of \d+\)"):
        check([run], functions)


@pytest.mark.parametrize("order", [["label-spreading", "local", "fedavg"], ["fedavg", "label-spreading", "local"]])
def test_keys_without_effect_for_the_first_variant(order):
    chosen = {"preset": "fedavg/digits", "aggregation": "median", "local-epochs": 3, "batch-size": 7, "momentum": 0.5}
    found = shared(order, chosen | {"learning-rate": 0.07, "clip-gradients": 2.0})
    for variant in ("local", "fedavg"):
        config = found.settings(variant, 0)
        kept = config.local_epochs, config.batch_size, config.momentum, config.learning_rate
        assert kept == (3, 7, 0.5, 0.07), variant
        assert config.clip_gradients == 2.0
    assert found.settings("label-spreading", 0).clip_gradients == 0.0, "it trains no network"
    assert (found.settings("fedavg", 0).aggregation, found.settings("local", 0).aggregation) == ("median", "mean")
