"""What single clients say that would cost all others the run: sizes, places and first weights."""

import json

import numpy as np
import pytest

import fedhet
from fedhet.engines.grid import LocalGrid
from fedhet.engines.local import run_locally
from fedhet.testing import Case, Run, Tampering
from fedhet.wire import decode_arrays, encode_arrays

pytestmark = pytest.mark.usefixtures("home", "no_report")


def saying(client, **said):
    """A client app in which one client's greeting says something else of it."""

    def change(message, name, reply):
        if name == client and message.metadata.message_type == "query" and reply.has_content():
            reply.content["report"].update(said)

    return Tampering(after=change)


@pytest.mark.parametrize(("place", "refused"), [([5, 10**15], True), ([5, 99_999], False), ([1, 7], False)])
def test_a_client_that_names_another_partition_ends_no_run(place, refused, tmp_path):
    """Who has which classes, which it is for, is then not known."""
    config = Case.of("fedavg", {}).config(rounds=1)
    run_locally(config, tmp_path / "run", app=saying("1", partition=place))
    done = Run(tmp_path / "run")
    assert done.summary["status"] == "completed"
    assert [client for _, client in done.failures] == ["1"] * refused
    if place == [5, 99_999]:
        assert not (tmp_path / "run" / "partition.json").exists()


def test_a_network_that_no_server_has_room_for_is_refused_in_the_greeting(tmp_path, monkeypatch):
    """Before the hypernetwork makes arrays of that size."""
    monkeypatch.setattr("fedhet.wire.report.memory", lambda: 4 * 10**9)
    said = {"spec.body.1.weight": "float32,20000,20000"}
    config = Case.of("pfedhn", {}).config(rounds=1)
    run_locally(config, tmp_path / "run", app=saying("1", **said))
    (failure,) = Run(tmp_path / "run").rows[0]["failures"]
    assert failure["client"] == "1"
    assert "GB, and the server has room for 1 GB a client" in failure["reason"]


def test_what_an_array_is_like_is_what_most_say_whoever_comes_first(tmp_path):
    """Where networks may differ, one that comes first with arrays of other shapes has nobody else refused."""
    config = Case.of("lg-fedavg", {}).config(rounds=1)
    run_locally(config, tmp_path / "run", app=saying("0", **{"spec.head.bias": "float32,11"}))
    (failure,) = Run(tmp_path / "run").rows[0]["failures"]
    assert (failure["client"], failure["reason"][:41]) == ("0", "lg-fedavg averages head.bias over clients")


def test_the_first_weights_are_not_one_clients_word_where_hostile_ones_are_reckoned_with(around):
    """They are those of an honest client, whoever comes first."""

    def after(where, reply):
        if where[1:] == ("first", "0"):
            group = decode_arrays(reply.content["model"])
            reply.content["model"] = encode_arrays({k: (a + 1) * np.float32(1e6) for k, a in group.items()})

    def first(rule, hostile):
        strategy = fedhet.FedAvg(rounds=1, aggregation=rule)
        strategy.go(LocalGrid(around(after=after if hostile else None), 4), 0)
        return strategy.state.model

    honest = first("mean", hostile=False)
    for rule in ("median", "krum", "norm-clipped"):
        found = first(rule, hostile=True)
        assert json.dumps({k: a.tolist() for k, a in found.items()}) == json.dumps(
            {k: a.tolist() for k, a in honest.items()}
        )
    assert max(np.abs(array).max() for array in first("mean", hostile=True).values()) > 1e5, "the test can tell"
