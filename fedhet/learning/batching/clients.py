"""The loop that batches clients: passes of networks that are built alike are run as one batch of networks.

What is drawn at random is each client's own. Sums within a kernel may be taken in another order, so results agree with
those of one client after the other up to rounding.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from timeit import repeat
from typing import Literal, TypeVar

import torch
from torch import nn

from fedhet.files import write_text
from fedhet.learning.batching.joint import fits, together
from fedhet.learning.batching.layouts import Unfit, first_difference, kind, layout
from fedhet.learning.batching.passes import Backward, BatchedClient, Forward, Passed
from fedhet.machine import describe
from fedhet.representations import RandomStream
from fedhet.rows import grouped
from fedhet.text import log

S = TypeVar("S")
T = TypeVar("T")

CPU = torch.device("cpu")
AUTO = 16
"""Clients side by side with `client-batching = auto`: each holds a network and its activations."""

ROWS = 2048
"""Examples that are passed at once at most, in all networks together: larger batches have nothing to gain."""

LIMIT = 0.9
"""The part of the time of one network after the other below which a batch of networks is worth it."""


Verdict = Literal["one by one", "equal sizes", "any sizes"]
"""Which passes of a kind are run as one: none, those of batches of one size, or all, smaller batches filled up."""


class ClientBatching:
    """Runs the work of several clients side by side, and knows which passes are worth running as one.

    Args:
        size: clients at a time.
        measure: whether a kind of pass is run as one only if that is faster here; else whenever it can be.
        device: where clients train.
    """

    def __init__(self, size: int, measure: bool = False, device: torch.device = CPU) -> None:
        self.size, self._measure, self._device = size, measure, device
        self._verdicts: dict[tuple[object, ...], Verdict] = {}
        self._logged: set[object] = set()

    @classmethod
    def of(cls, setting: str, device: torch.device = CPU) -> "ClientBatching | None":
        """Return what the key `client-batching` asks for on a device: gpu, auto, off, or clients at a time."""
        if setting == "off" or (setting == "gpu" and device.type != "cuda"):
            return None
        measure = setting in ("gpu", "auto")
        return cls(AUTO if measure else int(setting), measure, device)

    def run(self, functions: Iterable[Callable[[], T]]) -> list[T | Exception]:
        """Call the functions of several clients; return the result or the exception of each."""
        gpus = {self._device} if self._device.type == "cuda" else set[torch.device]()
        if gpus:
            torch.cuda.init()  # before clients draw there
        clients = [BatchedClient(function, gpus) for function in functions]
        try:
            for client in clients:
                client.resume()
            while waiting := [client for client in clients if not client.dead]:
                if forward := [(c, c.waits_for) for c in waiting if isinstance(c.waits_for, Forward)]:
                    self._forward(forward)
                else:
                    _backward(waiting)
        finally:
            for client in clients:
                if not client.dead:
                    client.throw()  # this loop was interrupted: clients let go of what they hold
            layout.cache_clear()
        return [client.outcome for client in clients]

    def _forward(self, waiting: Sequence[tuple[BatchedClient, Forward]]) -> None:
        kinds = grouped(((kind(each[1]), layout(each[1].model).momenta), each) for each in waiting)
        if len(kinds) == len(waiting) > 1:
            self._log_unlike([asked.model for _, asked in waiting])
        for (which, _), alike in kinds.items():
            verdict = self._verdict(which, alike)
            for group in [alike] if verdict == "any sizes" else _by_size(alike):
                at_once = 1 if verdict == "one by one" else _most_at_once([asked for _, asked in group])
                for start in range(0, len(group), at_once):
                    self._pass(which, group[start : start + at_once])

    def _pass(self, which: tuple[object, ...], group: Sequence[tuple[BatchedClient, Forward]]) -> None:
        clients, passes = [client for client, _ in group], [asked for _, asked in group]
        answers: Sequence[object] = [None] * len(group)
        if len(group) > 1:
            try:
                answers = together(passes, [asked.stream or client.stream for client, asked in group])
            except Unfit as error:
                self._verdicts[which] = self._refuse(passes[0], str(error))
            else:
                if passes[0].learns:
                    graph = list({id(other): other for client in clients for other in client.graph}.values())
                    for client in graph:
                        client.graph = graph
        for client, answer in zip(clients, answers, strict=True):
            client.resume(answer)

    def _verdict(self, which: tuple[object, ...], alike: Sequence[tuple[BatchedClient, Forward]]) -> Verdict:
        """Found out once for each kind, when two are there."""
        if which not in self._verdicts:
            first, same = alike[0][1], [asked for _, asked in max(_by_size(alike), key=len)]
            if not which:
                obscure = layout(first.model).obscure
                return self._refuse(first, f"it cannot be told whether two of them compute the same, with {obscure}")
            if len(same) < 2:
                return "one by one"
            try:
                verdict: Verdict = "any sizes" if fits([same[0], same[-1]]) else "equal sizes"
                passes = [asked for _, asked in alike] if verdict == "any sizes" else same
                ratio = _measured_ratio(which, passes[: _most_at_once(passes)]) if self._measure else 0.0
                if ratio > LIMIT:
                    raise Unfit(f"as a batch of networks they take {ratio:.2f} of the time")
            except Unfit as error:
                verdict = self._refuse(first, str(error))
            self._verdicts[which] = verdict
        return self._verdicts[which]

    def _log_unlike(self, models: Sequence[nn.Module]) -> None:
        """Log of networks of one class that no two of them can be run as one, and how two of them differ."""
        for kind_of, alike in grouped((type(model), model) for model in models).items():
            texts = [layout(model).built for model in alike]
            if kind_of not in self._logged and len(alike) > 1 and all(texts) and len(set(texts)) == len(texts):
                difference = first_difference(*alike[:2])
                self._log(kind_of, alike[0], f"no two are built alike, {difference}")

    def _refuse(self, asked: Forward, reason: str) -> Verdict:
        self._log((asked.model._get_name(), reason), asked.model, reason)
        return "one by one"

    def _log(self, subject: object, model: nn.Module, reason: str) -> None:
        """Log once for each subject why networks are run one by one."""
        if subject not in self._logged:
            self._logged.add(subject)
            log.info("client-batching: networks of class %s are passed one by one: %s", model._get_name(), reason)


def _backward(clients: Sequence[BatchedClient]) -> None:
    """Gradients, at once for all who share a graph."""
    graphs = {id(client.graph): client.graph for client in clients}
    for graph in graphs.values():
        group = [client for client in graph if not client.dead]
        for client in group:
            client.graph = [client]
        if len(group) == 1:
            group[0].resume(None)
            continue
        try:
            asked = [client.waits_for for client in group]
            torch.autograd.backward([each.loss for each in asked if isinstance(each, Backward)])
        except Exception as error:
            for client in group:
                client.fail(error)
        else:
            for client in group:
                client.resume(True)


def _most_at_once(passes: Sequence[Forward]) -> int:
    """How many of the passes may be one."""
    return max(1, ROWS // max(1, *(len(each.inputs) for each in passes)))


def _by_size(these: Sequence[tuple[S, Forward]]) -> list[list[tuple[S, Forward]]]:
    return list(grouped((len(each[1].inputs), each) for each in these).values())


def _measured_ratio(which: tuple[object, ...], passes: Sequence[Forward]) -> float:
    """Return the time of batched passes of a kind over that of single ones, measured once on a machine.

    So that runs on a machine stay alike, what was measured is kept in `~/.fedhet/client-batching.json`.
    """
    kept = Path.home() / ".fedhet" / "client-batching.json"
    device, sizes = passes[0].inputs.device, (len(passes).bit_length(), len(passes[0].inputs).bit_length())
    here = (describe(device), torch.__version__, torch.get_num_threads(), *sizes)
    key = hashlib.sha256(repr((which, here)).encode()).hexdigest()
    if key in (known := _read(kept)):
        return known[key]
    passes = [replace(each, stream=RandomStream(0)) for each in passes]
    streams = [RandomStream(0) for _ in passes]
    joint = _seconds(lambda: _differentiate(passes, together(passes, streams)), device)
    one_by_one = _seconds(lambda: _differentiate(passes, [each.run() for each in passes]), device)
    measured = round(joint / one_by_one, 3)
    with suppress(OSError):  # a home that cannot be written: this process remembers
        write_text(kept, json.dumps(_read(kept) | {key: measured}, indent=1))
    return measured


def _read(path: Path) -> dict[str, float]:
    try:
        return {key: float(value) for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    def finished() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    finished()
    return min(repeat(finished, number=1, repeat=2))


def _differentiate(passes: Sequence[Forward], passed: Sequence[Passed]) -> None:
    if passes[0].learns:
        parameters = [p for each in passes for p in each.model.parameters() if p.requires_grad]
        torch.autograd.grad([outputs.sum() for outputs, _ in passed], parameters, allow_unused=True)
