import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhet.config import configuration
from fedhet.config.configuration import parse, read, resolve
from fedhet.config.toml import parse_setting, parse_settings, to_toml
from fedhet.errors import ConfigError
from fedhet.methods import registry
from fedhet.methods.options import Config, Options, checked, fields_of, option, takes


def problems(**settings):
    with pytest.raises(ConfigError) as caught:
        resolve({key.replace("_", "-"): value for key, value in settings.items()})
    return str(caught.value).splitlines()


def test_defaults_of_every_method_are_valid():
    for method in registry.methods():
        config = resolve({"method": method})
        assert config.method == method
        assert type(config.options) is registry.method(method).Options


def test_order_of_precedence():
    paper = resolve({"method": "fedhenn"})
    assert (paper.rounds, paper.options.eta0, paper.alpha) == (200, 3.0, Config.alpha)
    preset, file = resolve({"preset": "fedhenn/digits"}), configuration.preset_settings("fedhenn/digits")
    assert (preset.rounds, preset.options.eta0) == (file["rounds"], file["fedhenn.eta0"])
    assert (preset.rounds, preset.options.eta0) != (paper.rounds, paper.options.eta0)
    for key in registry.method("fedhenn").common.keys() - file.keys():
        assert preset.flat()[key] == paper.flat()[key]
    assert paper.weight_decay == 1e-4 != Config.weight_decay
    user = resolve({"preset": "fedhenn/digits", "rounds": 3, "fedhenn.eta0": 0.5})
    assert (user.rounds, user.options.eta0, user.learning_rate) == (3, 0.5, preset.learning_rate)
    assert user.chosen == {"rounds", "fedhenn.eta0", "preset"}


def test_each_value_carries_its_origin(tmp_path):
    (tmp_path / "mine.toml").write_text('preset = "fedavg/digits"\nrounds = 3\nseed = 1\n')
    config = configuration.configure(tmp_path / "mine.toml", {"seed": 2})
    origins = {key: config.origins.get(key) for key in ("rounds", "seed", "local-epochs", "timeout")}
    assert origins == {"rounds": "file", "seed": "command", "local-epochs": "preset", "timeout": None}
    assert config.chosen == {"preset", "rounds", "seed"}
    assert configuration.changed(config, {"rounds": 4}, "code").origins["rounds"] == "code"
    at_node = configuration.at_node(config.text, (("batch-size", 7),), here=True)
    assert (at_node.origins["batch-size"], at_node.origins["rounds"]) == ("node", "run")


def test_every_preset_is_complete():
    for path in (configuration.run_configs() / f"{name}.toml" for name in configuration.presets()):
        assert tomllib.loads(path.read_text())["preset"] == ""
        resolve(read(path), strict=False)  # those of comparisons have keys of several methods


def test_the_cases_of_the_regression_have_an_effect():
    lines = (Path(__file__).parent / "regression" / "cases.txt").read_text(encoding="utf-8").splitlines()
    for preset, *settings in (line.split() for line in lines if line and not line.startswith("#")):
        chosen = parse_settings(settings)
        resolve(configuration.settings_of(preset), over=chosen)


def test_an_empty_text_is_not_chosen():
    config = resolve({"method": "fedavg", "rounds": "", "fedprox.mu": "", "seed": "", "data": ""})
    assert config == resolve({"method": "fedavg"})
    assert config.chosen == {"method"}


def test_all_problems_are_reported():
    told = problems(
        method="fedavgg",
        dataset="digit",
        partition="clases",
        rounds=-1,
        alpha="much",
        fraction_train=1.5,
        augment=1,
        optimizer="sdg",
        learning_rat=0.1,
        seed=True,
        **{"fedprox.muu": 1, "fedpox.mu": 1},
    )
    text = "\n".join(told)
    for expected in (
        "unknown method 'fedavgg'; did you mean 'fedavg'?",
        "unknown dataset 'digit'; did you mean 'digits'?",
        "unknown partition 'clases'; did you mean 'classes'?",
        "rounds = -1: must be at least 0",
        "alpha = 'much': must be a number",
        "fraction-train = 1.5: must be at most 1",
        "augment = 1: must be true or false",
        "optimizer = 'sdg': must be one of sgd, adam, amsgrad, adamw",
        "unknown key 'learning-rat'; did you mean 'learning-rate'?",
        "seed = True: must be a whole number",
        "unknown key 'fedprox.muu'; did you mean 'fedprox.mu'?",
        "fedpox.mu: unknown method 'fedpox'; did you mean 'fedprox'?",
    ):
        assert expected in text
    assert len(told) == 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": "cnn33"}, "unknown model 'cnn33'"),
        ({"architectures": ","}, "the key architectures has no model"),
        (
            {"task": "regression"},
            "task is not a key but an argument of fedhet.run, fedhet.compare and fedhet.make_client_app: pass task=",
        ),
        ({"model": "net"}, "model is not a key but an argument of fedhet.run"),
        ({"assign": "round-robbin"}, "assign = 'round-robbin': must be one of round-robin, blocks, random"),
        ({"clients": 2, "min-clients": 3}, "min-clients = 3: must be at most clients = 2"),
        ({"clients": 2, "unseen-clients": 2}, "unseen-clients = 2: must be fewer than clients = 2"),
        ({"unseen-clients": 0, "unseen-epochs": 3}, "unseen-epochs has no effect with unseen-clients = 0"),
        (
            {"method": "fedmd", "unseen-clients": 2},
            "unseen-clients = 2: fedmd has no weights for clients that join after",
        ),
        ({"clients": 0}, "clients = 0: must be at least 1"),
        ({"rounds": 2.0}, "rounds = 2.0: must be a whole number"),
        ({"rounds": "2"}, "rounds = '2': must be a whole number"),
        ({"learning-rate": float("nan")}, "must be finite"),
        ({"learning-rate": float("inf")}, "must be finite"),
        ({"learning-rate": 0}, "learning-rate = 0.0: must be above 0"),
        ({"dataset": True}, "dataset = True: must be text"),
        ({"metrics": ["auc", "macro-f1"]}, "must be text, such as 'auc,macro-f1'"),
        ({"preset": "fedhen/digits"}, "did you mean 'fedhenn/digits'?"),
        ({"lr": 1}, "did you mean 'learning-rate'? known: learning-rate, log, clip-norm, lr-schedule, alpha and 6"),
        ({"test-on": "globl"}, "must be one of local, global, both"),
        ({"rounds": [1]}, "rounds = [1]: must be a whole number"),
        ({"momentum": 1}, "momentum = 1.0: must be below 1"),
        ({"seed": 2**63}, "seed: must be a whole number of at most 64 bits, but has 64"),
        ({"alpha": 10**400}, "alpha: must be a whole number of at most 64 bits, but has 1329"),
        ({"method": 2**20000}, "method must be a string: give a name"),
        ({"preset": 2**20000}, "preset must be a string"),
        ({"head": "\x1b[2J"}, "head = '\\x1b[2J': must be text without control characters"),
        ({"head": "\udcff"}, "must be text without control characters"),
    ],
)
def test_messages_about_wrong_values(settings, message):
    with pytest.raises(ConfigError) as caught:
        resolve({"method": "fedavg", **settings})
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@dataclass(frozen=True)
class Quoted(Options):
    # As in a module with `from __future__ import annotations`.
    mode: "Literal['fast', 'slow']" = option("fast", "speed")  # noqa: RUF009 - it is a field


def test_a_literal_type_lists_the_accepted_values():
    key = fields_of(Quoted)["mode"]
    assert takes(key) == "fast | slow"
    assert checked("mine.mode", "slow", key) == "slow"
    with pytest.raises(ConfigError, match="mine.mode = 'other': must be one of fast, slow"):
        checked("mine.mode", "other", key)


def test_numbers_are_converted():
    config = resolve({"method": "fedavg", "timeout": 5, "dataset": "mnist", "data": 3})
    assert (config.timeout, type(config.timeout), config.data) == (5.0, float, "3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning-rate=.05", ("learning-rate", 0.05)),
        ("a=-.5", ("a", -0.5)),
        ("data=.hidden", ("data", ".hidden")),
        ("rounds=12", ("rounds", 12)),
        ("alpha = 1e-3", ("alpha", 0.001)),
        ("augment=true", ("augment", True)),
        ("architectures=cnn,mlp", ("architectures", "cnn,mlp")),
        ('dataset="digits"', ("dataset", "digits")),
        ("out=runs/a=b", ("out", "runs/a=b")),
        ("out=2026-01-31", ("out", "2026-01-31")),
        ("fedhenn.schedule=[1]", ("fedhenn.schedule", "[1]")),
        ("rounds=", ("rounds", "")),
        ("augment=True", ("augment", "True")),
    ],
)
def test_a_setting_of_the_command_line(text, expected):
    assert parse_setting(text) == expected
    assert type(parse_setting(text)[1]) is type(expected[1])


@given(
    data=st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=20),
    rate=st.floats(1e-30, 1e30),
    seed=st.integers(0, 2**62),
    shared=st.booleans(),
    mu=st.floats(0, 1e9),
)
def test_toml_and_text_round_trip(data, rate, seed, shared, mu):
    chosen = {
        "method": "fedprox",
        "dataset": "mnist",
        "data": data,
        "learning-rate": rate,
        "seed": seed,
        "shared-init": shared,
    }
    config = resolve({**chosen, "fedprox.mu": mu})
    assert resolve(tomllib.loads(to_toml(config.flat()))).replace(remarks=config.remarks) == config
    assert parse(config.text).replace(remarks=config.remarks) == config


def test_a_file_that_is_missing_or_no_toml(tmp_path):
    with pytest.raises(ConfigError, match="the configuration file .*nothing.toml does not exist"):
        read(tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(ConfigError, match="bad.toml is not a TOML file"):
        read(tmp_path / "bad.toml")
    (tmp_path / "marked.toml").write_text("rounds = 3", encoding="utf-8-sig")
    assert read(tmp_path / "marked.toml")["rounds"] == 3
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        read(tmp_path / "binary.toml")


def test_every_key_is_listed_once():
    listed = list(configuration.keys())
    names = [name for name, *_ in listed]
    assert len(set(names)) == len(names)
    assert all(takes and meaning for _, _, takes, meaning in listed)
    (mu,) = [takes for key, _, takes, _ in configuration.keys(method="fedprox") if key == "fedprox.mu"]
    assert mu == "number, >= 0"
    own = [f"{m}.{f.name}".replace("_", "-") for m in registry.methods() for f in fields(registry.method(m).Options)]
    assert set(own) <= set(names)
    assert {"method", "learning-rate", "seed"} <= set(names)
    assert not {"options", "chosen", "prefix", "remarks"} & set(names)


INEFFECTIVE = [
    ({"method": "fedavg", "optimizer": "adam", "momentum": 0.9}, "momentum", "optimizer", 0.0, "set optimizer = sgd"),
    ({"method": "fedavg", "dataset": "digits", "augment": True}, "augment", "dataset", False, ""),
    ({"method": "fedavg", "dataset": "digits", "data": "/files"}, "data", "dataset", "", ""),
    ({"method": "fedma", "closing-epochs": 3}, "closing-epochs", "method", 0, ""),
    ({"method": "fedavg", "fedprox.mu": 1.0}, "fedprox.mu", "method", None, "set method = fedprox"),
    ({"partition": "classes", "alpha": 0.3}, "alpha", "partition", 0.5, "set partition = dirichlet"),
    ({"validation": 0.0, "validation-on": "common"}, "validation-on", "validation", "own", "set validation"),
    ({"engine": "ray", "workers": 3}, "workers", "engine", 0, "set engine = local"),
    (
        {"method": "fedharm", "fedharm.alpha": 1.0, "fedharm.divide": True},
        "fedharm.divide",
        "fedharm.alpha",
        False,
        "set fedharm.alpha above 0 and below 1",
    ),
    (
        {"method": "fedhenn", "fedhenn.target": "spectral", "fedhenn.kernel": "rbf"},
        "fedhenn.kernel",
        "fedhenn.target",
        "linear",
        "set fedhenn.target = kernel",
    ),
]


@pytest.mark.parametrize(("settings", "key", "reason", "default", "remedy"), INEFFECTIVE)
def test_a_users_key_without_effect_is_refused(settings, key, reason, default, remedy):
    advice = f"{remedy}, or leave {key} out" if remedy else "leave it out"
    sentence = f"{key} has no effect with {reason} = {settings[reason]}: {advice}"
    assert problems(**settings) == [sentence]
    # Where a run's parts tell each other, nobody chose anything.
    config = resolve(settings, strict=False)
    assert (config.flat().get(key), config.remarks) == (default, ((key, sentence),))


@pytest.mark.parametrize(("settings", "key", "reason", "default", "remedy"), INEFFECTIVE)
def test_a_presets_key_without_effect_is_reset(settings, key, reason, default, remedy, tmp_path, monkeypatch):
    preset = {name: value for name, value in settings.items() if name != reason}
    (tmp_path / "of").mkdir()
    (tmp_path / "of/mine.toml").write_text(to_toml(preset))
    monkeypatch.setattr(configuration, "run_configs", lambda: tmp_path)
    for config in (
        resolve({"preset": "of/mine", reason: settings[reason]}),
        resolve(preset, over={reason: settings[reason]}),
        resolve(configuration.settings_of(tmp_path / "of/mine.toml"), over={reason: settings[reason]}),
    ):
        assert (config.flat().get(key), config.remarks) == (default, ())
        assert key not in config.chosen
        assert resolve(config.flat()).remarks == ()
    # The user's own key is refused whatever set the one that it belongs to.
    (tmp_path / "of/mine.toml").write_text(to_toml({name: settings[name] for name in settings if name != key}))
    assert problems(preset="of/mine", **{key: settings[key]})[0].startswith(f"{key} has no effect")
    with pytest.raises(ConfigError, match=f"{key} has no effect"):
        resolve(settings, over={key: settings[key]})


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        ({"byzantine": 0.2}, "byzantine", "aggregation = mean"),
        ({"byzantine": 0.2, "aggregation": "median"}, "byzantine", "aggregation = median"),
        ({"unseen-epochs": 10}, "unseen-epochs", "unseen-clients = 0"),
        ({"data": "here"}, "data", "dataset = digits"),
        ({"method": "fedhenn", "shared-init": False}, "shared-init", "method = fedhenn"),
        ({"method": "fedmd", "batch-norm": "local"}, "batch-norm", "method = fedmd"),
        ({"method": "fedhenn", "fedhenn.kernel": "linear"}, "fedhenn.kernel", "fedhenn.target = spectral"),
    ],
)
def test_a_users_default_without_effect_is_refused(settings, key, reason):
    settings = {"method": "fedavg", **settings}
    with pytest.raises(ConfigError, match=f"{key} has no effect with {reason}: "):
        resolve(settings)
    whole = resolve(settings, strict=False).flat()  # as a run writes it: nobody chose the defaults in it
    assert resolve(whole).remarks == ()


def test_defaults_of_zero_are_accepted():
    nothing = {"momentum": 0.0, "optimizer": "adam", "unseen-clients": 0, "clip-norm": 0.0, "augment": False}
    assert resolve({"method": "local", **nothing}).remarks == ()


def test_extra_keys():
    text = '"fedprox.mu" = 0.25\nrounds = 4\n[fedprox]\n'
    config = resolve({"method": "fedprox", "extra-keys": text})
    assert (config.options.mu, config.rounds) == (0.25, 4)
    assert config == resolve({"method": "fedprox", "fedprox.mu": 0.25, "rounds": 4})
    assert resolve({"method": "fedprox", "extra-keys": ""}) == resolve({"method": "fedprox"})
    assert "extra-keys" not in config.flat()
    with pytest.raises(ConfigError, match="extra-keys = 'mu is 3': must be TOML"):
        resolve({"method": "fedprox", "extra-keys": "mu is 3"})
    with pytest.raises(ConfigError, match="did you mean 'fedprox.mu'"):
        resolve({"method": "fedprox", "extra-keys": "fedprox.muu = 1"})
