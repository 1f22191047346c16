"""Tests of fedhet's own methods beyond the contract: random answers, the wire, processes and imports."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedhet.config import configuration
from fedhet.engines import running as local
from fedhet.engines.workers import WorkerGrid
from fedhet.flower import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from fedhet.flower.grid import FIRST_NODE
from fedhet.flower.messages import (
    STYPE,
    Encoder,
    decode,
    decode_arrays,
    read_reply,
    read_request,
    write_reply,
    write_request,
)
from fedhet.messages import to_tensor
from fedhet.testing import (
    Case,
    MethodContract,
    Run,
    RunCache,
    Tampering,
    assert_same_but_for_the_fault,
    at,
    raising,
    run,
)

from .byzantine import Recording, attack
from .failures import Failures
from .normal import NormalRuns
from .privacy import Privacy
from .runs import REPLIES, RecordedRuns, differing, run_on, where

ATTACKS = [(40, 4), pytest.param(5000, 0, marks=pytest.mark.long)]
"""Numbers of changes, and how many must at least be refused and accepted; thousands of changes differ in each call."""


class Contract(NormalRuns, Failures, Privacy, MethodContract):
    test_a_reply_with_nan_is_refused = None  # type: ignore[assignment]  # test_a_bad_reply_equals_silence has it

    @pytest.fixture
    def cache(self, case: Case, tmp_path_factory: pytest.TempPathFactory) -> RunCache:
        """Runs that several tests look at, recorded."""
        return RecordedRuns(case, tmp_path_factory)

    # ---- the wire and the run directory

    def test_bytes_agree(self, cache: RecordedRuns) -> None:
        done = cache("normal")
        for row in done.rows:
            own = [client for client in done.clients if client.round == row["round"]]
            assert row["bytes_up"] == sum(client.bytes_up for client in own)
            assert row["bytes_down"] == sum(client.bytes_down for client in own)
        assert done.summary["bytes_up"] == sum(_sent_bytes(reply.content) for _, reply in done.exchanges)
        assert done.summary["bytes_down"] == sum(_sent_bytes(sent) for sent, _ in done.exchanges)

    def test_requests_and_replies_round_trip(self, cache: RecordedRuns) -> None:
        exchanges = cache("normal").exchanges
        assert exchanges
        for sent, answer in exchanges:
            again = Encoder()(decode(sent))
            request, settings = read_request(sent)
            write_request(again, request, settings)
            assert dict(again) == dict(sent)
            assert configuration.parse(settings).text == settings
            assert dict(write_reply(read_reply(answer))) == dict(answer.content)
            assert _kinds(sent) | _kinds(answer.content) <= {STYPE}

    # ---- Byzantine answers

    def test_a_bad_reply_equals_silence(self, case: Case, cache: RecordedRuns) -> None:
        recording, faults = _recording(case, cache), list(REPLIES.values())
        answers = recording.answers.items()
        places = [place for place, answer in answers if place[1] == "train" and answer.array_records]
        for number in range(max(len(places), len(faults)) if places else 0):
            place = places[number % len(places)]
            spoilt = recording.after(place[0], {place: faults[number % len(faults)]})
            assert [failure["client"] for failure in spoilt.run.round.failures] == [place[3]]
            assert differing(recording.without(place), spoilt.state) == []

    @pytest.mark.parametrize(("examples", "least"), ATTACKS)
    def test_no_reply_ends_a_run(self, case: Case, examples: int, least: int, cache: RecordedRuns) -> None:
        """It is refused, which comes to the same as silence, or taken; honest clients are admitted."""
        logging.disable(logging.CRITICAL)  # thousands of warnings, of no use to anybody
        try:
            found = attack(_recording(case, cache), examples, repeat=examples < 1000)
        finally:
            logging.disable(logging.NOTSET)
        assert min(found["refused"], found["taken"]) >= least, "the attack can tell"

    # ---- clients apart from each other

    def test_a_client_that_lost_the_public_dataset(self, case: Case, cache: RecordedRuns, tmp_path: Path) -> None:
        """It says that its answer is lost for want of it, and gets it once more."""

        def forget(message: Message, client: str, reply: Message) -> None:
            if at([2], "1")(message, client):
                reply.content.clear()
                reply.content["report"] = ConfigRecord({"client": "1", "refusal": "no public dataset", "lost": True})

        done, crash = run(tmp_path / "run", case.settings(rounds=4), app=Tampering(after=forget)), cache("crash")
        assert done.row(2)["failures"] == [{"client": "1", "reason": "no public dataset; its handshake is repeated"}]
        assert done.row(4)["participants"] == ["0", "1", "2"]
        assert done.models == crash.models

        def received(of: Run, *rounds: int) -> int:
            return sum(row.bytes_down for row in of.clients if row.client == "1" and row.round in rounds)

        assert received(done, 3, 4) - received(crash, 3, 4) == received(done, 0)

    @pytest.mark.slow
    def test_dropped_replies_undo_the_training(
        self, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        crash = Tampering(before=raising(at([2, 3], "1"), RuntimeError("out of order")))
        expected = run(tmp_path / "expected", case.settings(rounds=4), app=crash)
        monkeypatch.setattr(local, "WorkerGrid", dropping(FIRST_NODE + 1, [2, 3]))
        done = run(tmp_path / "run", case.settings(rounds=4))
        assert "no reply within" in done.row(2)["failures"][0]["reason"]
        assert_same_but_for_the_fault(done, expected)

    @pytest.mark.slow
    def test_each_client_has_its_own_message(self, case: Case, tmp_path: Path) -> None:

        def scribble(message: Message, client: str, reply: Message) -> None:
            for group in message.content.array_records.values():
                for name, array in list(group.items()):
                    to_tensor(decode_arrays(ArrayRecord({name: array}))[name]).zero_()
                    group[name] = Array(np.zeros(3))
            message.content.config_records.clear()

        done = run(tmp_path / "run", case.settings(), app=Tampering(after=scribble))
        assert done.rows == run(tmp_path / "clean", case.settings()).rows

    def test_two_nodes_with_one_name(self, case: Case, tmp_path: Path) -> None:
        """Both take part, and the second one keeps its name and its state when the first is gone."""
        done = run_on(tmp_path / "run", case.settings(), [0, 1, 0], between={0: (0, 1), 2: (1, 99)})
        assert [row["participants"] for row in done.rows[1:4]] == [["0", "1", "0 (2)"], *[["1", "0 (2)"]] * 2]
        assert not [row["lost_state"] for row in done.rows if "lost_state" in row]


def dropping(node: int, rounds: Iterable[int]) -> type[WorkerGrid]:
    """A grid that loses what a node answers to the training messages of some rounds."""
    hits = [(number, "train") for number in rounds]

    class Dropping(WorkerGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
            messages = list(messages)
            lost = any(message.metadata.dst_node_id == node and where(message) in hits for message in messages)
            replies = super().send_and_receive(messages, timeout=timeout)
            return (reply for reply in replies if not (lost and reply.metadata.src_node_id == node))

    return Dropping


_recordings: dict[Case, Recording] = {}


def _recording(case: Case, cache: RecordedRuns) -> Recording:
    """The recording of a case's ordinary run, made once."""
    if case not in _recordings:
        _recordings[case] = Recording.of(case, cache("normal"))
    return _recordings[case]


def _kinds(content: RecordDict) -> set[str]:
    return {array.stype for group in content.array_records.values() for array in group.values()}


def _sent_bytes(content: RecordDict) -> int:
    return sum(len(array.data) for group in content.array_records.values() for array in group.values())
