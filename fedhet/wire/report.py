"""The client report: a client's description of itself, beside a method's reply."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fedhet.keys import kebab
from fedhet.machine import memory
from fedhet.wire.arrays import DTYPES, Spec, WireError
from fedhet.wire.fields import LONGEST, Fields, Name, shortened

ROOM = 4
"""A handshake of more than this part of the machine's memory is refused before anything is made of that size."""
MOST_PARTITIONS = 100_000
"""As many as `clients` can be."""
MOST_ARRAYS = 2**15
"""Arrays that a client shares at most; a network of a thousand layers has some thousands."""


@dataclass
class Report:
    """A client's description of itself; all but its name and `lost_state` travel in the handshake only.

    Attributes:
        client: its name.
        lost_state: the round whose state was expected of it and is lost; -1 if none is.
        metric: name of its task's metric.
        labels: how many numbers its metric has: one, or one for each of several labels.
        architecture: the architecture's name, empty where it is not disclosed.
        partition: its partition id and the number of partitions, None where the node has none.
        own_data: whether its data are not the configured data set's.
        common_test: whether it has the common test set.
        spec: names, shapes and dtypes of what is shared of its network.
        public: digest of the public dataset that it has itself, empty without one.
        public_size: examples in that public dataset.
        device: where it computes, in words.
        note: what is to be told of it once, shortened on the way.
        outputs: how many outputs a prediction of its network has; 0 where it does not say.
    """

    client: Name
    lost_state: int = -1
    metric: str = ""
    labels: int = field(default=1, metadata={"at_least": 1, "at_most": 2**16})
    architecture: str = ""
    partition: tuple[int, int] | None = None
    own_data: bool = False
    common_test: bool = True
    spec: Spec = field(default_factory=dict)
    public: Name = ""
    public_size: int = 0
    device: str = ""
    note: str = ""
    outputs: int = field(default=0, metadata={"at_most": 2**31})

    def fields(self) -> dict[str, Any]:
        """Return the fields as they travel; those that are as by default are left out."""
        own = vars(self) | {"partition": list(self.partition or ()), "note": self.note[:LONGEST]}
        specified = {f"spec.{name}": ",".join([dtype, *map(str, shape)]) for name, (shape, dtype) in self.spec.items()}
        plain = [each for each in fields(self) if each.name != "spec" and own[each.name] not in (each.default, [])]
        return {kebab(each.name): own[each.name] for each in plain} | specified

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Report":
        """Return the report that a record holds, or raise a WireError for a field that is not what it must be."""
        report = Fields(record)
        pair = None
        if "partition" in report:
            partition = report.counts("partition")
            if not (len(partition) == 2 and partition[0] < partition[1] <= MOST_PARTITIONS):
                raise WireError(
                    f"its reply is damaged: partition is {partition[:3]}, must be an id and a larger number up to "
                    f"{MOST_PARTITIONS}"
                )
            pair = partition[0], partition[1]
        return cls(**report.plain(cls), partition=pair, spec=_spec(record))


def _spec(record: Mapping[str, Any]) -> Spec:
    """Return the specification of the shared arrays, each written as `"float32,2,3"` under its name.

    Raises:
        WireError: that is no array that holds anything, or more than this machine has room for.
    """
    keys = [key for key in record if key.startswith("spec.")]
    if len(keys) > MOST_ARRAYS:
        raise WireError(f"it shares {len(keys)} arrays, and the server takes up to {MOST_ARRAYS} of a client")
    spec: Spec = {}
    for key in keys:
        dtype, *lengths = Fields(record).text(key).split(",")
        name, damaged = key.removeprefix("spec."), f"its reply is damaged: {shortened(key)}"
        if dtype not in DTYPES or len(lengths) > 32:
            raise WireError(f"{damaged} is {dtype!r} of {len(lengths)} axes")
        if not name.isprintable() or not 0 < len(name) <= 10 * LONGEST:
            raise WireError(f"{damaged} is no name of an array")
        if not all(length.isdecimal() and length.isascii() and int(length) for length in lengths):
            raise WireError(f"{damaged} has no shape {','.join(lengths)!r}: what is shared has axes of at least 1")
        spec[name] = (tuple(map(int, lengths)), dtype)
    size, most = sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype in spec.values()), memory() / ROOM
    if size > most:
        raise WireError(f"it shares {size / 1e9:.3g} GB, and the server has room for {most / 1e9:.3g} GB a client")
    return spec
