"""Any command line ends with an exit code and, where it is refused, a sentence: a fuzzer of `fedhet`'s commands.

Nothing is trained: a run ends as its server would start, a comparison's jobs are not carried out. All before that is
as it is for users: settings, data, models, folders.
"""

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedhet import cli, data
from fedhet.client.policy import KINDS
from fedhet.comparing import recommending, runs
from fedhet.config import configuration
from fedhet.engines import children, flower
from fedhet.methods import registry
from fedhet.server import FederatedStrategy

Words = st.SearchStrategy[list[str]]
Text = st.SearchStrategy[str]

ALL = list(configuration.keys())
TAKES = {key: [str(default), str(default).lower(), *takes.split(" | ")] for key, default, takes, _ in ALL}
DIGITS = [name for name in configuration.presets() if name.endswith("/digits")]
LARGE = 60
"""More clients, or larger images, would only take long: data and models are made before a run starts."""

ODD = [
    *("", " ", "=", "==", "-", "--", "nan", "inf", "-inf", "1e400", "-1e400", "1e-320", "-0.0", "0x10", "1_000"),
    *("true", "True", "none", "[]", "[1, 2]", "{a = 1}", "{", "[[" * 5000, "'", '"', '""', "\\", "#", "a#b", "{}"),
    *("2026-01-31", "2026-01-31T00:00:00Z", "12:00:00", "9999-99-99", "9" * 5000, "0x" + "f" * 5000, "1e308"),
    *(str(2**63 - 1), str(2**63), str(-(2**63) - 1), "-1", "0", "1", "2", ".5", "1.0", "1e3", "a,b", ",", ",,", "1,2"),
    *("\x1b[2J", '"\\u001b[2J"', '"\\u0000"', "\x00", "\n", "\u202e", "\udcff", "é" * 200, "a" * 5000, "%s", "*"),
    *(
        "..",
        "../..",
        "a:b",
        "os:system",
        "fedhet.strategies.local:Local",
        "fedhet:nothing",
        "torchvision/",
        "timm/x",
    ),
    *("$^$", "[red]", "=HYPERLINK()"),
]
JUNK: Text = st.text(max_size=12) | st.integers().map(str) | st.floats().map(str) | st.sampled_from(ODD)
PLACE: Text = JUNK.filter(lambda text: not text.startswith(("/", "~")) and ".." not in text) | st.sampled_from(
    ["here", "a/b", "file", "file/below", "x" * 300, ".", "run"]
)
NAMES = {
    "method": registry.methods(),
    "preset": DIGITS,
    "dataset": ["digits"],
    "partition": data.partitions(),
    "architectures": ["cnn", "mlp", "cnn-family", "mlp-widths", "cnn,mlp"],
    "engine": ["local", "ray"],
    "log": ["tensorboard", "wandb", "mlflow"],
}


def value(key: str) -> Text:
    """Junk for a key, or what it takes."""
    if key in ("out", "state-dir", "data"):
        return PLACE
    good = st.sampled_from([*TAKES.get(key, ["text"]), *NAMES.get(key, ())])
    number = st.integers(-2, LARGE).map(str) | st.floats(-1, 2, width=16).map(str)
    return good | number | (JUNK.filter(_small) if key in ("clients", "input-size") else JUNK)


def _small(text: str) -> bool:
    with contextlib.suppress(ValueError, OverflowError):
        return float(text) <= LARGE
    return True


def options(**known: Text) -> Words:
    """Some options with values, maybe twice."""
    each = [strategy.map(lambda value, name=name: [f"--{name}", value]) for name, strategy in known.items()]
    return words_of(st.lists(st.one_of(each), max_size=3))


def words_of(parts: "st.SearchStrategy[Any]") -> Words:
    """The words of several parts of a command line."""
    return parts.map(lambda found: list(chain.from_iterable(found)))


KEYS = st.sampled_from([*TAKES, "preset", "extra-keys"])
SET: Text = KEYS.flatmap(lambda key: value(key).map(lambda text: f"{key}={text}"))
ANY_SET: Text = SET | st.tuples(JUNK, JUNK).map("=".join) | JUNK
NUMBER: Text = st.sampled_from(["0", "0,1", "0,0", "1", "2", "1,", "-1", ""]) | JUNK
METHOD: Text = st.sampled_from([*registry.methods(), "a=local,rounds=1", "a=fedavg", "a=local,rounds=", "b=,"])
CONFIG: Text = st.sampled_from([*DIGITS, *registry.methods(), "file", "."])
COMMANDS: dict[str, Words] = {
    "run": words_of(
        st.tuples(
            st.lists(CONFIG, max_size=1) | st.lists(PLACE, max_size=1),
            words_of(st.lists(SET.map(lambda text: ["--set", text]), max_size=2)),
            options(set=ANY_SET, seed=NUMBER, out=PLACE, data=PLACE, engine=value("engine"), resume=PLACE),
        )
    ),
    "compare": words_of(
        st.tuples(
            st.lists(METHOD, min_size=1, max_size=2) | st.lists(METHOD | JUNK, max_size=2),
            options(
                **{"set": ANY_SET, "config": CONFIG | PLACE, "seeds": NUMBER, "out": PLACE, "jobs": NUMBER},
                **{"tune": ANY_SET, "tune-runs": NUMBER, "tune-seeds": NUMBER, "baseline": METHOD, "data": PLACE},
            ),
        )
    ),
    "recommend": words_of(
        st.tuples(
            st.lists(CONFIG | PLACE, max_size=1),
            options(
                **{"set": ANY_SET, "allow": JUNK | st.sampled_from(KINDS), "max-bytes": NUMBER | st.just("5 KB")},
                **{"budget": NUMBER | st.just("30m"), "out": PLACE, "jobs": NUMBER, "data": PLACE},
            ),
        )
    ),
    "report": words_of(st.tuples(st.lists(PLACE, max_size=3), options(out=PLACE))),
    "results": words_of(st.tuples(PLACE, options(engine=JUNK, out=PLACE))),
    "clean": options(**{"days": NUMBER, "state-dir": PLACE}),
    "node": options(superlink=JUNK, **{"node-config": JUNK, "set": ANY_SET}).map(lambda words: ["check", *words]),
    "keys": st.lists(METHOD | JUNK, max_size=2),
    "list": st.lists(JUNK, max_size=1),
}


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_trained() -> Iterator[None]:
    def not_here(*_: object, **__: object) -> Any:
        raise urllib.error.URLError("nothing is downloaded here")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FederatedStrategy, "start", lambda *_, **__: None)
        patched.setattr(flower.superlink, "superlink", lambda *_: contextlib.nullcontext())
        patched.setattr(flower, "make_app", lambda app: app)
        patched.setattr(flower, "_follow", lambda *_: None)
        patched.setattr(runs, "run_jobs", lambda jobs, at_once, deadline: [(job.name, "not here") for job in jobs])
        patched.setattr(children, "prepare", lambda *_: None)
        patched.setattr(recommending, "_refusal", lambda *_: "nobody is asked here")
        patched.setattr(urllib.request, "urlopen", not_here)
        yield


def ends_in_words(command: list[str]) -> None:
    """Asserts that a command ends with an exit code and, if it is not 0, in words; refused, a run writes nothing."""
    with TemporaryDirectory() as home, contextlib.chdir(home), pytest.MonkeyPatch.context() as patched:
        for name in ("HOME", "FLWR_HOME", "XDG_CACHE_HOME"):
            patched.setenv(name, home)
        Path("file").touch()
        result = CliRunner().invoke(cli.app, command, prog_name="fedhet")
        assert result.exception is None or isinstance(result.exception, SystemExit), command
        assert "Traceback" not in result.output
        assert result.exit_code in (0, 1, 2)
        if result.exit_code:
            program, _, said = result.stderr.partition(": ")
            assert program in ("fedhet", "Usage")
            assert said.strip()
            assert program == "Usage" or "".join(said.splitlines()).isprintable()
        if result.exit_code == 2 and command[0] in ("run", "compare", "recommend"):
            # A comparison asks the clients first, whose processes have the user's key.
            assert {path.name for path in Path().iterdir()} <= {"file", ".fedhet"}


def any_command(*names: str, examples: int) -> Any:
    """Runs a test with command lines of these commands."""
    lines = st.sampled_from(names).flatmap(lambda name: COMMANDS[name].map(lambda words: [name, *words]))
    limits = settings(
        max_examples=examples, derandomize=examples < 1000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    return lambda test: limits(given(command=lines)(test))


@any_command("run", examples=40)
def test_any_run_ends_in_words(command: list[str]) -> None:
    ends_in_words(command)


@any_command("compare", "recommend", examples=15)
def test_any_comparison_ends_in_words(command: list[str]) -> None:
    ends_in_words(command)


@any_command("report", "results", "clean", "node", "keys", "list", examples=30)
def test_any_other_command_ends_in_words(command: list[str]) -> None:
    ends_in_words(command)


@pytest.mark.long
@any_command(*COMMANDS, examples=5000)
def test_many_commands_end_in_words(command: list[str]) -> None:
    ends_in_words(command)


@pytest.mark.parametrize("text", ["[1]", "9" * 5000, "\x1b", "-1e400", "0x" + "f" * 5000, "[[" * 5000, "=", "'"])
def test_all_keys_with_a_value_that_few_take(text: str) -> None:
    ends_in_words(["run", *chain.from_iterable(("--set", f"{key}={text}") for key in TAKES if key != "resume")])
