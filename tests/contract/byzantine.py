"""Byzantine answers: those of a recorded run, changed at random, for a server side that talks with nobody.

A `Recording` holds what the clients of an ordinary run answered. A server side gets these answers again, one of them
changed, and goes through handshake, opening, checking and aggregation without anybody training.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedhet.flower import ClientApp, ConfigRecord, Error, Message, RecordDict
from fedhet.flower.grid import FIRST_NODE, LocalGrid
from fedhet.flower.messages import read_request
from fedhet.messages.protocol import FIRST, HANDSHAKE
from fedhet.server import FederatedStrategy, State
from fedhet.server.loop import finish
from fedhet.setup import client_setup
from fedhet.testing import PARTIAL, Case

from .changes import Change, changes
from .runs import RecordedRun, differing, infinite, strategy_of, where

Place = tuple[int, str, str, str]
"""Round, kind, question and client of an answer."""
Strategy = FederatedStrategy[Any, Any]


def silence(content: RecordDict) -> None:
    """The change of an answer to none at all."""
    raise LookupError("says nothing")


class Replayed(LocalGrid):
    """A grid whose nodes answer as those of a recorded run did, but for some changes."""

    def __init__(self, answers: Mapping[Place, RecordDict], clients: int, changes: Mapping[Place, Change]) -> None:
        super().__init__(ClientApp(), clients)
        self._answers, self._changes = answers, changes

    def _handle(self, batch: Sequence[Message]) -> None:
        self._complete(batch, [self._reply(message) for message in batch])

    def _reply(self, message: Message) -> Message:
        client = str(message.metadata.dst_node_id - FIRST_NODE)
        place = (*where(message), read_request(message.content)[0].question, client)
        try:
            content = self._answer(place)
            self._changes.get(place, bool)(content)
            return Message(content, reply_to=message)
        except LookupError as error:
            return Message(Error(2, str(error)), reply_to=message)

    def _answer(self, place: Place) -> RecordDict:
        """The recorded reply; the first weights are the same of all, and were asked of one."""
        if place in self._answers or place[2] != FIRST:
            return _copied(self._answers[place])
        other = next(each for each in self._answers if each[2] == FIRST)
        content, own = _copied(self._answers[other]), self._answers[0, "query", HANDSHAKE, place[3]]
        content["report"], content["metrics"] = ConfigRecord({"client": place[3]}), own["metrics"]
        return content


def _copied(content: RecordDict) -> RecordDict:
    """The same values in records of their own; Flower would look at each value again."""
    copied = RecordDict()
    for name, record in content.items():
        copied[name] = copy.copy(record)
        copied[name].__dict__["_data"] = dict(record.items())
    return copied


@dataclass
class Recording:
    """The recorded replies of a run's clients, and the server's side as it was before each round.

    Attributes:
        answers: by place.
        clients: how many there are.
        before: the server side before each round, from 0, the handshake; the last one is the evaluation at the end.
    """

    answers: Mapping[Place, RecordDict]
    clients: int
    before: list[Strategy] = field(default_factory=list)
    _silent: dict[Place, State] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, run: RecordedRun) -> "Recording":
        """That of an ordinary run (`PARTIAL`), whose server's part is gone through once more."""
        answers = {}
        for sent, reply in run.exchanges:
            round, kind = where(reply)
            client = str(reply.content["report"]["client"])
            answers[round, kind, read_request(sent)[0].question, client] = reply.content
        config = case.config(PARTIAL)
        strategy = strategy_of(case)(config, public=client_setup.public_dataset(config))
        recording = cls(answers, config.clients)
        for _ in run.rows:
            recording.before.append(strategy)
            strategy = recording.after(len(recording.before) - 1, {})
        return recording

    @property
    def names(self) -> set[str]:
        """Of the clients."""
        return {client for *_, client in self.answers}

    def after(self, round: int, changes: Mapping[Place, Change], start: Strategy | None = None) -> Strategy:
        """The server side after a round in which some answers were changed.

        Args:
            round: its number.
            changes: of answers in it.
            start: the server side before it; as it was recorded, if left out.
        """
        strategy = start or self.before[round]
        run, grid = strategy.run, Replayed(self.answers, self.clients, changes)
        kept = (run.method, run.config, run.traits, run.public, strategy.federation.grid)
        strategy = copy.deepcopy(strategy, {id(each): each for each in kept})
        strategy.federation.grid = grid
        if not round:
            strategy.handshake(grid)
        elif round > strategy.run.last_round:
            finish(strategy)
        else:
            strategy.run_round(round)
        return strategy

    def without(self, place: Place) -> State:
        """The state after a round in which there was no answer at a place."""
        if place not in self._silent:
            self._silent[place] = self.after(place[0], {place: silence}).state
        found: State = self._silent[place]
        return found


# ---- attacks


def attack(recording: Recording, examples: int, *, repeat: bool = True) -> Counter[str]:
    """Change one answer after the other; no change may end the run, and a refusal comes to the same as silence.

    Args:
        recording: of a run.
        examples: how many changes are tried.
        repeat: whether they are the same in every call.

    Returns:
        How many answers were `refused`, and how many `taken`.
    """
    found, places = Counter[str](), list(recording.answers)

    @reproducible(examples, repeat=repeat)
    @given(st.sampled_from(places), changes())
    def one(place: Place, change: Change) -> None:
        strategy = recording.after(place[0], {place: change})
        admitted = not place[0] and place[3] in strategy.state.clients  # and perhaps refused later in the same round
        if any(called != name for name, called in strategy.federation.claimed.items()):  # another has the name, too
            found["taken"] += 1
        elif admitted or all(client != place[3] and client in recording.names for client in failed(strategy)):
            found["taken"] += 1
            assert infinite(strategy.state) == []
        else:
            found["refused"] += 1
            assert differing(recording.without(place), strategy.state) == []

    one()
    return found


def failed(strategy: Strategy) -> list[str]:
    """The clients, and nodes without a name, that did not do what they were asked in the last round."""
    return [failure["client"] for failure in strategy.run.round.failures]


def reproducible(examples: int, *, repeat: bool) -> settings:
    """So many examples, the same in every call if they are to `repeat`."""
    return settings(
        max_examples=examples,
        derandomize=repeat,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
