"""Whether a batch of networks is faster here than one network after the other: measured once, and remembered."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from timeit import repeat

import torch

from fedhet.files import write_text
from fedhet.learning.batching.joint import together
from fedhet.learning.batching.passes import Forward, Passed
from fedhet.machine import describe
from fedhet.representations import RandomStream

LIMIT = 0.9
"""The part of the time of one network after the other below which a batch of networks is worth it."""


def ratio(which: tuple[object, ...], passes: Sequence[Forward]) -> float:
    """Seconds of the passes as one, over those of one after the other; as measured when this machine first met them.

    So that runs on a machine stay alike, what was measured is kept in `~/.fedhet/client-batching.json`.

    Args:
        which: their kind.
        passes: two or more; no trace is left in their networks.
    """
    kept = Path.home() / ".fedhet" / "client-batching.json"
    device, sizes = passes[0].inputs.device, (len(passes).bit_length(), len(passes[0].inputs).bit_length())
    here = (describe(device), torch.__version__, torch.get_num_threads(), *sizes)
    key = hashlib.sha256(repr((which, here)).encode()).hexdigest()
    if key in (known := _read(kept)):
        return known[key]
    passes = [replace(each, stream=RandomStream(0)) for each in passes]
    joint, one_by_one = partial(_joint, passes), partial(_one_by_one, passes)
    measured = round(_seconds(joint, device) / _seconds(one_by_one, device), 3)
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


def _joint(passes: Sequence[Forward]) -> None:
    _differentiate(passes, together(passes, [RandomStream(0) for _ in passes]))


def _one_by_one(passes: Sequence[Forward]) -> None:
    for each in passes:
        _differentiate([each], [each.run()])


def _differentiate(passes: Sequence[Forward], passed: Sequence[Passed]) -> None:
    if passes[0].learns:
        parameters = [p for each in passes for p in each.model.parameters() if p.requires_grad]
        torch.autograd.grad([outputs.sum() for outputs, _ in passed], parameters, allow_unused=True)
