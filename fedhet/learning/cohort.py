"""Cohorts: the work of several clients side by side, so that networks that are built alike are passed as one batch.

Each client's work pauses at its passes (`fedhet.learning.passes`). Forward passes of one kind are run as one; when
everybody waits for gradients, those are taken. A client that has fewer batches is done earlier. What is drawn at
random is each client's own; sums within a kernel may be taken in another order, so results agree with those of one
client after the other up to rounding, and not to the last bit.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from fedhet.learning import worth
from fedhet.learning.joint import Unfit, first_difference, fits, kind, layout, together
from fedhet.learning.passes import Backward, Forward, Pausing
from fedhet.representations import RandomStream

S = TypeVar("S")
T = TypeVar("T")

CPU = torch.device("cpu")
AUTO = 16
"""Clients side by side with `client-batching = auto`: each holds a network and its activations."""

ROWS = 2048
"""Examples that are passed at once at most, in all networks together: larger batches have nothing to gain."""

_log = logging.getLogger("flwr").getChild("fedhet")


@dataclass(frozen=True)
class _Verdict:
    """Whether passes of a kind are run as one, and whether batches of different sizes may be filled up for it."""

    joins: bool
    fills: bool = False


class Cohort:
    """Runs the work of several clients side by side, and knows which passes are worth running as one.

    Args:
        size: clients at a time.
        measure: whether a kind of pass is run as one only if that is faster here, which is measured once on each
            machine; else whenever it can be.
        device: where clients train.
    """

    def __init__(self, size: int, measure: bool = False, device: torch.device = CPU) -> None:
        self.size, self._measure, self._device = size, measure, device
        self._gpus = {device} if device.type == "cuda" else set[torch.device]()
        self._verdicts: dict[tuple[object, ...], _Verdict] = {}
        self._told: set[str] = set()
        self._unlike: set[type] = set()

    @classmethod
    def of(cls, setting: str, device: torch.device = CPU) -> "Cohort | None":
        """What the key `client-batching` says of clients on a device: gpu, auto, off, or clients at a time."""
        if setting == "off" or (setting == "gpu" and device.type != "cuda"):
            return None
        measure = setting in ("gpu", "auto")
        return cls(AUTO if measure else int(setting), measure, device)

    def __reduce__(self) -> tuple[object, ...]:
        """Another process finds out for itself what is worth it."""
        return Cohort, (self.size, self._measure, self._device)

    def run(self, works: Iterable[Pausing[T]]) -> list[T | Exception]:
        """Do all of the work; what each returned, or what it raised: one that fails fails alone."""
        if self._gpus:
            torch.cuda.init()  # before members draw there
        members = [_Member(work, self._gpus) for work in works]
        for member in members:
            member.go_on(None)
        try:
            while waiting := [member for member in members if not member.done]:
                if forward := [member for member in waiting if isinstance(member.asked, Forward)]:
                    self._forward(forward)
                else:
                    _backward(waiting)
        finally:
            layout.cache_clear()
        return [member.outcome for member in members]

    def _forward(self, members: Sequence["_Member[T]"]) -> None:
        kinds: dict[tuple[tuple[object, ...], object], list[_Member[T]]] = {}
        for member in members:
            kinds.setdefault((kind(member.forward), layout(member.forward.model).momenta), []).append(member)
        if len(kinds) == len(members) > 1:
            self._tell_unlike([member.forward.model for member in members])
        for (which, _), alike in kinds.items():
            verdict = self._verdict(which, [member.forward for member in alike])
            groups = [alike] if verdict.fills else _by_size(alike, lambda member: member.forward)
            for group in groups:
                at_once = len(_at_once([member.forward for member in group])) if verdict.joins else 1
                for start in range(0, len(group), at_once):
                    self._pass(which, group[start : start + at_once])

    def _pass(self, which: tuple[object, ...], group: Sequence["_Member[T]"]) -> None:
        try:
            forward, streams = [member.forward for member in group], [member.stream for member in group]
            answers = together(forward, streams) if len(group) > 1 else []
        except Unfit as error:
            self._verdicts[which] = self._refuse(group[0].forward, str(error))
            answers = []
        if not answers:
            for member in group:
                member.run_alone()
            return
        learns = group[0].forward.learns
        graph = list({id(other): other for member in group for other in member.graph}.values())
        for member in graph if learns else ():
            member.graph = graph
        for member, answer in zip(group, answers, strict=True):
            member.go_on(answer)

    def _verdict(self, which: tuple[object, ...], passes: Sequence[Forward]) -> _Verdict:
        """Found out once for each kind, when two are there."""
        if which in self._verdicts:
            return self._verdicts[which]
        if not which:
            obscure = layout(passes[0].model).obscure
            self._refuse(passes[0], f"it cannot be told whether two of them compute the same, with {obscure}")
            return _Verdict(False)
        same = max(_by_size(passes, lambda asked: asked), key=len)
        if len(same) < 2:
            return _Verdict(False)
        try:
            fills = fits([same[0], same[-1]])
        except Unfit as error:
            verdict = self._refuse(passes[0], str(error))
        else:
            verdict = _Verdict(True, fills)
            ratio = worth.ratio(which, _at_once(passes if fills else same)) if self._measure else 0.0
            if ratio > worth.LIMIT:
                verdict = self._refuse(passes[0], f"as a batch of networks they take {ratio:.2f} of the time")
        self._verdicts[which] = verdict
        return verdict

    def _tell_unlike(self, models: Sequence[nn.Module]) -> None:
        """Say of networks of one class that no two of them can be passed as one, and in what two of them differ."""
        by_class: dict[type, list[nn.Module]] = {}
        for model in models:
            by_class.setdefault(type(model), []).append(model)
        for kind_of, alike in by_class.items():
            texts = [layout(model).built for model in alike]
            if len(alike) > 1 and all(texts) and len(set(texts)) == len(texts) and kind_of not in self._unlike:
                self._unlike.add(kind_of)
                difference = first_difference(*alike[:2])
                _log.info(
                    "client-batching: %s are passed one by one: no two are built alike, %s",
                    _class(alike[0]),
                    difference,
                )

    def _refuse(self, asked: Forward, reason: str) -> _Verdict:
        told = f"{_class(asked.model)} are passed one by one: {reason}"
        if told not in self._told:
            self._told.add(told)
            _log.info("client-batching: %s", told)
        return _Verdict(False)


class _Member(Generic[T]):
    """One client's work.

    Attributes:
        asked: the pass at which it paused.
        stream: its torch's global generators.
        done: whether it has come to its end,
        outcome: and what it returned or raised there.
        graph: those who share a graph with its next loss, itself among them.
    """

    asked: Forward | Backward
    outcome: T | Exception

    def __init__(self, work: Pausing[T], gpus: set[torch.device]) -> None:
        self._work, self.stream, self._gpus = work, RandomStream(0), gpus
        self.done = False
        self.graph: list[_Member[T]] = [self]

    @property
    def forward(self) -> Forward:
        """The forward pass at which it paused."""
        assert isinstance(self.asked, Forward)
        return self.asked

    def go_on(self, answer: object) -> None:
        """Until the next pause, or the end."""
        self._resume(lambda: self._work.send(answer))

    def fail(self, error: Exception) -> None:
        """Raise what the pass raised, where the work paused."""
        self._resume(lambda: self._work.throw(error))

    def run_alone(self) -> None:
        """Run the pass at which it paused by itself."""
        try:
            with self.stream.active(self._gpus):
                answer = self.asked.run()
        except Exception as error:
            self.fail(error)
        else:
            self.go_on(answer)

    def _resume(self, step: Callable[[], Forward | Backward]) -> None:
        try:
            with self.stream.active(self._gpus):  # torch's global generators are as this client left them
                self.asked = step()
        except StopIteration as end:
            self.done, self.outcome = True, end.value
        except Exception as error:
            self.done, self.outcome = True, error


def _backward(members: Sequence[_Member[T]]) -> None:
    """Gradients, at once for all who share a graph."""
    graphs = {id(member.graph): member.graph for member in members}
    for graph in graphs.values():
        group = [member for member in graph if not member.done]
        for member in group:
            member.graph = [member]
        try:
            torch.autograd.backward([member.asked.loss for member in group if isinstance(member.asked, Backward)])
        except Exception as error:
            for member in group:
                member.fail(error)
        else:
            for member in group:
                member.go_on(None)


def _class(model: nn.Module) -> str:
    return f"networks of class {type(model).__name__}"


def _at_once(passes: Sequence[Forward]) -> Sequence[Forward]:
    """The first passes, as many as may be one."""
    most = max(len(each.inputs) for each in passes)
    return passes[: max(1, ROWS // max(1, most))]


def _by_size(these: Sequence[S], pass_of: Callable[[S], Forward]) -> list[list[S]]:
    sizes: dict[int, list[S]] = {}
    for each in these:
        sizes.setdefault(len(pass_of(each).inputs), []).append(each)
    return list(sizes.values())
