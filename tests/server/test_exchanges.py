"""Replies in the order of the messages."""

from types import SimpleNamespace

from fedhet.server.federation import by_node
from fedhet.server.roster import Roster
from fedhet.server.run import Round


def asked(*nodes):
    """A round that has asked these nodes; the message to node n has the id of the same name."""
    return Round(3, sent={node: SimpleNamespace(metadata=SimpleNamespace(message_id=str(node))) for node in nodes})


def reply(source, replied_to="?"):
    return SimpleNamespace(metadata=SimpleNamespace(src_node_id=source, reply_to_message_id=replied_to))


def test_replies_come_in_the_order_of_the_messages():
    coming = [reply(node) for node in (12, 13, 11, 14)]
    assert [node for node, _ in by_node(coming, asked(11, 12, 13, 14), Roster(), 5.0)] == [11, 12, 13, 14]


def test_missing_reply_is_a_failure():
    round, roster = asked(11, 12, 13), Roster(nodes={"0": 11, "1": 12})
    found = [node for node, _ in by_node([reply(13), reply(12)], round, roster, 5.0)]
    assert found == [12, 13]
    assert round.failures == [{"client": "0", "reason": "no reply within 5 s"}]
    assert round.sent == {}
    silent = asked(14)
    assert list(by_node([], silent, roster, 0.5)) == []
    assert silent.failures == [{"client": "at node 14", "reason": "no reply within 0.5 s"}]


def test_replies_from_the_superlink():
    round = asked(11, 12)
    found = [node for node, _ in by_node([reply(1, "12"), reply(99), reply(11)], round, Roster(), 5.0)]
    assert found == [11, 12]
    assert round.failures == []
