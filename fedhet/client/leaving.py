"""What may leave a node: kinds of what methods send, and the one place where all of it passes."""

from fedhet.client.half import AnyHalf
from fedhet.errors import FedhetError
from fedhet.sharing import is_statistic
from fedhet.wire import Payload

KINDS = ("weights", "statistics", "features", "posteriors", "prototypes", "descriptors", "hypernetwork")
"""What methods send: arrays of a network or their changes; numbers of examples by class and BatchNorm's statistics;
representations of shared examples; class scores, of shared examples or means; mean representations of classes;
descriptors of shared images; a hypernetwork's parameters. Metrics and numbers of examples always leave."""


def check_all(half: AnyHalf, allowed: frozenset[str] | None) -> None:
    """Find out in the greeting whether a node lets out what a method sends.

    Args:
        half: the method's.
        allowed: kinds that may leave; None for all.

    Raises:
        FedhetError: it sends something else.
    """
    if allowed is not None:
        kinds = {*half.traits.tells.values(), *(_kind_of("model", name, half) for name in half.shared())}
        _refuse(half, sorted(kinds - allowed), allowed)


def check(payload: Payload, half: AnyHalf, allowed: frozenset[str] | None) -> None:
    """Check what is about to leave, array by array.

    Raises:
        FedhetError: it is of a kind that may not, or of none.
    """
    if allowed is not None:
        kinds = {_kind_of(group, name, half) for group, arrays in payload.arrays.items() for name in arrays}
        _refuse(half, sorted(kinds - allowed), allowed)


def _kind_of(group: str, name: str, half: AnyHalf) -> str:
    kind = half.traits.tells.get(group, "weights" if group == "model" else f"a kind that it does not tell ({group})")
    return "statistics" if kind == "weights" and is_statistic(name) else kind


def _refuse(half: AnyHalf, kinds: list[str], allowed: frozenset[str]) -> None:
    if kinds:
        way_out = "; batch-norm = local keeps statistics" if kinds == ["statistics"] else ""
        method, out = half.client.config.prefix, ", ".join(sorted(allowed)) or "nothing"
        raise FedhetError(f"this node lets out only {out} (allow), and {method} sends {', '.join(kinds)}{way_out}")
