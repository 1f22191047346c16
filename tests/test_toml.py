import tomllib

from flwr.common.config import parse_config_args
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedhet.config import toml

WORDS = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
TABLES = st.from_regex(r"[A-Z][a-z]{0,4}", fullmatch=True)  # never the name of a key that is no table
KEYS = st.one_of(WORDS, st.builds("{}.{}".format, TABLES, WORDS))
ODD = ['"', "'", "\\", "\n", "\r\n", "\t", "\0", "\x7f", "\x85", " ", "#", "[a]", "é", "😀", "#", '"""', "a = 1"]
STRINGS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.lists(st.sampled_from(ODD)).map("".join)
)
FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([1e-30, 5e-324, 1e16, 1e300, -0.0, 0.1 + 0.2])
)
VALUES = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), FLOATS, STRINGS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(KEYS, VALUES))
def test_values_round_trip_also_in_flower(tmp_path, flat):
    path = tmp_path / "config.toml"
    path.write_text(toml.to_toml(flat), encoding="utf-8")
    there = {key: value for key, value in flat.items() if value != ""}
    assert repr(sorted(toml.chosen(toml.load(path)).items())) == repr(sorted(there.items()))
    assert repr(sorted(parse_config_args([str(path)]).items())) == repr(sorted(flat.items()))


@given(VALUES)
def test_a_single_value_reads_back(value):
    text = toml.toml_value(value)
    assert "\n" not in text
    assert repr(tomllib.loads(f"key = {text}")["key"]) == repr(value)


def test_order_of_keys_and_tables():
    flat = {"seed": 1, "fedrep.b": 2, "method": "fedrep", "fedavg.c": 3, "fedrep.a": 4}
    assert toml.to_toml(flat) == 'seed = 1\nmethod = "fedrep"\n\n[fedavg]\nc = 3\n\n[fedrep]\na = 4\nb = 2\n'
