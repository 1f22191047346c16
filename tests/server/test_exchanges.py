"""Replies in order of the messages, and how many of them are held at once."""

import gc
import weakref
from itertools import count
from types import SimpleNamespace

import pytest

import fedhet
from fedhet.flower.grid import LocalGrid
from fedhet.server import federation
from fedhet.server.federation import Federation, by_node
from fedhet.server.roster import Roster
from fedhet.server.run import Round


def asked(*nodes):
    """A round that has asked these nodes; the message to node n has the id of the same name."""
    return Round(3, sent={node: SimpleNamespace(metadata=SimpleNamespace(message_id=str(node))) for node in nodes})


def reply(source, replied_to="?"):
    return SimpleNamespace(metadata=SimpleNamespace(src_node_id=source, reply_to_message_id=replied_to))


def test_early_replies_wait():
    events = []

    def coming(*nodes):
        for node in nodes:
            events.append(f"{node} came")
            yield reply(node)

    for node, _ in by_node(coming(12, 13, 11, 14), asked(11, 12, 13, 14), Roster(), 5.0):
        events.append(f"{node} taken")
    assert events == ["12 came", "13 came", "11 came", "11 taken", "12 taken", "13 taken", "14 came", "14 taken"]


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


class Slow:
    """A grid whose nodes answer when they are asked for the so-many-th time; 0 for never."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def push_messages(self, messages):
        self.held = messages
        return [str(message) for message in messages]

    def pull_messages(self, keys):
        (key,) = keys
        self.asked.append(key)
        return [f"reply of {key}"] if self.asked.count(key) == self.answers[key] else []


class Asked(str):
    """A message that is known by its text."""

    content: object = "large"


def one_by_one(grid, timeout):
    federation = Federation(SimpleNamespace(config=SimpleNamespace(timeout=timeout)))
    federation.grid, federation.one_by_one = grid, True
    return federation


def test_replies_are_fetched_one_by_one(monkeypatch):
    monkeypatch.setattr(federation, "POLL", 0.001)
    grid = Slow(a=3, b=1)
    messages = [Asked("a"), Asked("b")]
    replies = one_by_one(grid, 60.0).send(messages)
    assert grid.asked == []
    assert not any(message.content for message in messages), "what was sent is not held"
    assert all(message.content == "large" for message in grid.held), "but a grid may keep the messages that it got"
    assert next(replies) == "reply of a"
    assert grid.asked == ["a"] * 3
    assert next(replies) == "reply of b"
    assert list(replies) == []


@pytest.mark.parametrize("one_by_one", [True, False])
def test_streaming_holds_one_reply_at_a_time(around, one_by_one, home):
    made, held, order = [], [], count()

    class OneByOne(fedhet.FedAvg):
        streams_replies = one_by_one

        def consume_reply(self, round, reply):
            gc.collect()
            assert reply.client == str(next(order))
            held.append(sum(each() is not None for each in made))
            del reply.arrays["model"]

        def check_reply(self, reply):
            if not one_by_one:
                held.append(sum(each() is not None for each in made))

        def aggregate_fit(self, round, replies):
            assert list(replies) == [str(client) for client in range(3)]
            return {}

    def after(where, reply):
        if where[1] == "train":
            made.append(weakref.ref(reply))

    OneByOne(rounds=1).start(LocalGrid(around(after=after), 3))
    if one_by_one:
        assert held == [1] * 3
    else:
        assert max(held) == 3, "the test can tell"
