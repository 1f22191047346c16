"""Methods by name: ours, those of installed packages, those that were given, and those in the working folder."""

import json
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fedhet.config import configuration
from fedhet.errors import ConfigError
from fedhet.flower.grid import LocalGrid
from fedhet.methods import registry
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Options, option
from fedhet.methods.sharing import HEAD
from fedhet.server.app import make_server_app

MODULE = """
from dataclasses import dataclass

from fedhet.methods.method import Method
from fedhet.methods.options import Options, option

@dataclass(frozen=True)
class MyOptions(Options):
    weight: float = option(0.5, "of mine", at_least=0)

method = Method("mine", Options=MyOptions, common={"rounds": 7})
something_else = 3
"""


@pytest.fixture(autouse=True)
def _only_ours(monkeypatch):
    """Methods that a test gives or installs are forgotten after it."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("of_mine", "evil"):
        sys.modules.pop(name, None)
    for kept in (registry._installed, registry._loaded, configuration.parse):
        kept.cache_clear()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module with a method, in a folder that is the working folder."""
    (tmp_path / "of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return "of_mine"


@pytest.fixture
def install(module, monkeypatch):
    """Announces methods as installed packages do."""

    def install(**announced):
        points = [EntryPoint(name, value, registry.GROUP) for name, value in announced.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
        monkeypatch.syspath_prepend(str(Path.cwd()))
        registry._installed.cache_clear()
        registry._loaded.cache_clear()

    return install


def test_message_about_an_unknown_name():
    with pytest.raises(ConfigError) as caught:
        registry.method("fedavgg")
    assert "unknown method 'fedavgg'; did you mean 'fedavg'?" in str(caught.value)
    assert "FILE.py:NAME, install it with an entry point of the group fedhet.methods" in str(caught.value)


class TestInstalled:
    def test_a_method_of_an_installed_package(self, install):
        install(mine="of_mine:method")
        assert "of_mine" not in sys.modules
        assert "mine" in registry.methods()
        assert "mine" not in registry.own_methods()
        assert "of_mine" not in sys.modules, "names need no import"
        config = configuration.resolve({"method": "mine", "mine.weight": 2})
        assert (config.options.weight, config.rounds, config.method_name) == (2.0, 7, "mine")
        assert configuration.parse(config.text).options == config.options
        assert ("mine.weight", 0.5, "number, >= 0", "of mine") in list(configuration.keys(method="mine"))
        assert "mine.weight" not in [key for key, *_ in configuration.keys(outside=False)]
        with pytest.raises(ConfigError, match="did you mean 'mine.weight'"):
            configuration.resolve({"method": "mine", "mine.wight": 2})

    @pytest.mark.parametrize(
        ("announced", "message"),
        [
            ({"mine": "nowhere:method"}, r"'mine' of an installed package \(nowhere:method\) cannot be imported: "),
            ({"mine": "of_mine:nothing"}, r"\(of_mine:nothing\) cannot be imported: .*nothing"),
            ({"mine": "of_mine:something_else"}, "installed package .* is 3, which is no method: name a strategy"),
            ({"yours": "of_mine:method"}, "the entry point 'yours' is a method named 'mine': give both the same name"),
        ],
    )
    def test_an_unusable_entry_point(self, install, announced, message):
        install(**announced)
        with pytest.raises(ConfigError, match=message):
            registry.method(*announced)


class TestWorkingFolder:
    def test_a_method_of_the_working_folder(self, module):
        config = configuration.resolve({"method": "of_mine:method", "mine.weight": 2})
        assert (config.options.weight, config.rounds, config.method_name) == (2.0, 7, "mine")
        assert config.flat()["method"] == "of_mine:method", "a resumed run finds it again"
        assert json.loads(config.text)["method"] == "mine", "clients are told its name"
        assert registry.method("mine") is registry.method("of_mine:method")
        assert "mine" in registry.methods()

    @pytest.mark.parametrize(
        ("reference", "message"),
        [
            ("nowhere:method", "method = 'nowhere:method': cannot be imported: No module named 'nowhere'"),
            ("of_mine:nothing", "method = 'of_mine:nothing': cannot be imported: .*nothing"),
            ("of_mine:something_else", "is 3, which is no method: name a strategy"),
            (":method", "write package.module:name"),
            ("nowhere.py:mine", "cannot be imported: .*No such file"),
            ("bad.py:mine", "cannot be imported: .*syntax"),
            ("of_mine.py:nothing", "cannot be imported: .*nothing"),
        ],
    )
    def test_messages_about_unusable_references(self, module, reference, message):
        Path("bad.py").write_text("this is no Python")
        with pytest.raises(ConfigError, match=message):
            configuration.resolve({"method": reference})

    @pytest.mark.parametrize("reference", ["evil:method", "evil.py:method", "of_mine:method"])
    def test_names_in_messages_and_data_are_not_imported(self, module, reference):
        Path("evil.py").write_text("raise SystemExit('imported')")
        for told in ({"method": reference}, {"method": "fedavg", f"{reference}.weight": 1}):
            for _ in range(2):
                with pytest.raises(ConfigError, match=f"unknown method '{reference}'"):
                    configuration.parse(json.dumps(told))
        for named in (reference, reference.replace("evil.py", str(Path("evil.py").resolve()))):
            with pytest.raises(ConfigError, match="unknown method"):
                registry.client_side(named)
            with pytest.raises(ConfigError, match="code is not imported without your consent"):
                registry.check_known(named, Path("runs/somebody/config.toml"))
        assert not {"evil", "of_mine"} & sys.modules.keys()


class TestFiles:
    CONTROLS = """
from fedhet.strategies.fedprox import FedProx

class Mine(FedProx):
    pass

mine = FedProx.method.variant("fedprox-mine", server=Mine, common={"rounds": 7})
"""

    def test_a_method_of_a_file(self, module, monkeypatch):
        Path("some").mkdir()
        file = Path("some/con-trols.py")
        file.write_text(self.CONTROLS)
        config = configuration.resolve({"method": f"{file}:mine", "fedprox.mu": 0.7})
        assert (config.method_name, config.family, config.rounds, config.options.mu) == (
            "fedprox-mine",
            "fedprox",
            7,
            0.7,
        )
        with pytest.raises(ConfigError, match="fedprox-mine.mu has no effect with .*: set fedprox.mu, or leave"):
            configuration.resolve({"method": f"{file}:mine", "fedprox-mine.mu": 0.7})
        assert registry.strategy("fedprox-mine").__name__ == "Mine"
        assert configuration.parse(config.text).options == config.options
        assert json.loads(config.text)["method"] == "fedprox-mine", "clients are told its name"
        named = configuration.settings_of(f"{file}:mine")
        assert named == {"preset": "fedprox/digits", "method": f"{file}:mine"}
        monkeypatch.chdir("some")
        assert registry.method("con-trols.py:mine") is registry.method("fedprox-mine"), "a file is imported once"


class TestSides:
    @pytest.mark.parametrize(
        ("half", "why"),
        [
            ("nowhere:Half", "cannot be imported"),
            ("fedhet.server:Nothing", "cannot be imported"),
            ("fedhet.server", "lacks a module or a name: write package.module:name"),
        ],
    )
    def test_a_missing_side(self, half, why):
        registry.register(Method("broken", server=half, client=half))
        for which, find in (("server", registry.strategy), ("client", registry.client_side)):
            with pytest.raises(ConfigError, match=f"the {which} side of method 'broken', '{half}', {why}"):
                find("broken")


class TestName:
    @pytest.mark.parametrize("name", ["", "a/b", "a.b", "two words", "seed", "local-epochs"])
    def test_one_that_is_no_prefix_of_keys_is_refused(self, name):
        with pytest.raises(ConfigError, match=f"method '{name}': a method's name is the prefix of its keys"):
            Method(name)


class TestKeys:
    def test_of_a_class_that_is_no_dataclass_are_refused(self):
        class Undecorated(Options):
            weight: float = option(0.5, "of mine")

        with pytest.raises(ConfigError, match=r"method 'mine': .*Undecorated has options, but is no dataclass"):
            Method("mine", Options=Undecorated)


class TestRegistered:
    def test_installed_methods_cannot_be_replaced(self, install):
        install(mine="of_mine:method")
        for name in ("fedavg", "mine"):
            with pytest.raises(
                ConfigError, match=f"a method named '{name}' is installed already: give yours another name"
            ):
                registry.register(Method(name))

    def test_apps_with_methods(self, tiny, watch, home):
        @dataclass(frozen=True)
        class HeadsOptions(Options):
            weight: float = option(0.5, "of mine")

        heads = Method("heads", Traits(shares=HEAD, keeps="model", common_init=True), HeadsOptions)
        app = tiny.app(methods=[heads])
        make_server_app(methods=[heads])
        config = configuration.resolve({"method": "heads", "rounds": 2, "heads.weight": 2})
        strategy = registry.strategy("heads")(config, observers=[watch])
        strategy.start(LocalGrid(app, 3))
        assert (strategy.method.name, strategy.options.weight) == ("heads", 2.0)
        assert [row["failures"] for row in watch.rows] == [[]] * 4
        assert strategy.state.model.keys() == {"head.weight", "head.bias"}
