"""Who is refused in the handshake, and why."""

import pytest

from fedhet.errors import FedhetError
from fedhet.messages import Payload, Reply, Report
from fedhet.server.roster import Roster

WEIGHT = {"w": ((2, 3), "float32")}


def handshake(client, spec=None, metric="accuracy"):
    return Reply(client, 14, Payload(), Report(client, metric=metric, spec=WEIGHT if spec is None else spec))


def roster_with(*replies):
    roster = Roster()
    for node, reply in enumerate(replies, start=1):
        roster.admit(reply, node)
    return roster


def refused(roster, reply, *, networks="any", averaged=True):
    with pytest.raises(FedhetError) as caught:
        roster.check("fedthis", reply, networks=networks, averaged=averaged)
    return str(caught.value)


def test_clients_are_ordered_by_name():
    roster = Roster()
    for node, name in ((7, "10"), (8, "2"), (9, "north")):
        roster.check("fedthis", handshake(name), networks="equal", averaged=True)
        roster.admit(handshake(name), node)
    roster.sort()
    assert list(roster.nodes.items()) == [("2", 8), ("10", 7), ("north", 9)]
    assert roster.specs["north"] == WEIGHT


def test_different_tasks_are_refused():
    reason = refused(roster_with(handshake("3", metric="auc")), handshake("4", metric="accuracy"))
    assert reason == (
        "the client's task is measured by accuracy, and client 3's by auc: all clients of a run need the same task; "
        "set it with task="
    )


def test_different_architectures_are_refused():
    roster, other = roster_with(handshake("3"), handshake("1")), handshake("4", {"w": ((4, 3), "float32")})
    assert refused(roster, other, networks="equal") == (
        "fedthis needs equal architectures, and this client's differs from client 1's: "
        "its w has shape [4, 3], not [2, 3]"
    )
    assert "it lacks w" in refused(roster, handshake("4", {}), networks="equal")
    roster.check("fedthis", other, networks="any", averaged=False)


def test_different_widths():
    roster, wider = roster_with(handshake("3")), handshake("4", {"w": ((4, 5), "float32")})
    roster.check("fedthis", wider, networks="widths", averaged=True)
    for spec, told in (
        ({"w": ((2, 3, 1), "float32")}, "its w has 3 axes, not 2"),
        ({"v": ((2, 3), "float32")}, "it alone has v"),
        ({}, "it lacks w"),
    ):
        reason = refused(roster, handshake("4", spec), networks="widths")
        assert reason.startswith(
            "fedthis needs equal architectures except for their widths, and this client's differs from client 3's: "
            + told
        )


def test_averaged_arrays_must_be_alike():
    roster = roster_with(handshake("0", {}), handshake("3"), handshake("5", {"v": ((1,), "float32")}))
    told = "shared arrays must have equal shapes and dtypes"
    assert refused(roster, handshake("4", {"w": ((4, 3), "float32")})) == (
        f"fedthis averages w over clients, but this client's is float32[4, 3] and client 3's is float32[2, 3]: {told}"
    )
    assert "is float64[1] and client 5's is float32[1]" in refused(roster, handshake("4", {"v": ((1,), "float64")}))
    roster.check("fedthis", handshake("4", {"u": ((9,), "float32")}), networks="any", averaged=True)
    roster.check("fedthis", handshake("4", {"w": ((4, 3), "float32")}), networks="any", averaged=False)


class Present:
    """A grid of which it only counts which nodes are there."""

    def __init__(self, *nodes):
        self.nodes = nodes

    def get_node_ids(self):
        return self.nodes


def test_name_claimed_by_new_nodes():
    roster = Roster()
    assert roster.rivals({7: "3", 8: "3", 9: "3", 10: "4"}) == {7: [8, 9], 8: [7, 9], 9: [7, 8]}
    assert roster.contest("3", [8, 9]).startswith(
        "the client's name '3' is also claimed by nodes 8, 9: none is admitted"
    )
    roster.refused |= dict.fromkeys((7, 8, 9), "3")
    assert roster.rivals({11: "3"}) == {11: [7, 8, 9]}, "one that comes later is no better"
    assert roster.new_nodes(Present(7, 8, 9), unseen_clients=False) == []
    assert roster.new_nodes(Present(8), unseen_clients=False) == [8]
