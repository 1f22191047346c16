"""Keys of methods whose clients differ in a whole number: the rank of their adapters, or the number of their blocks."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from fedhet.errors import ConfigError
from fedhet.methods.options import Options, listed


class CountedOptions(Options):
    """Base of the keys of methods whose clients have a size, a whole number; the whole network has the largest size.

    Attributes:
        counted: the key that lists the sizes, such as `lora.ranks`. A node's own size has the singular name, `rank`, in
            its node config.
    """

    counted: ClassVar[str]
    uses = ("assign",)

    @cached_property
    def all_sizes(self) -> tuple[int, ...]:
        """Return the sizes to assign to clients; raises a ConfigError if a size is invalid."""
        sizes = getattr(self, self.counted.rpartition(".")[2])
        return tuple(self._size(each, self.counted) for each in listed(sizes) or [""])

    @property
    def size_name(self) -> str:  # type: ignore[override]
        """Return the name of the setting in a node's config, such as `rank`."""
        return self.counted.rpartition(".")[2].removesuffix("s")

    @property
    def sizes(self) -> tuple[float, ...]:
        """Return the sizes that a node may choose, the largest first."""
        return tuple(sorted({*self.all_sizes}, reverse=True))

    @property
    def all_widths(self) -> tuple[float, ...]:
        """Return the sizes to assign to clients as fractions of the largest."""
        return tuple(size / max(self.all_sizes) for size in self.all_sizes)

    def width_at(self, node_config: Mapping[str, Any]) -> float | None:
        """Return the size in a node's config as a fraction of the largest, or None."""
        name, most = self.size_name, max(self.all_sizes)
        return self._size(node_config[name], f"the node's {name}", most) / most if name in node_config else None

    def _size(self, value: object, name: str, most: int = 2**16) -> int:
        """Parse a size from 1 to `most`; raises a ConfigError that names the setting for any other value."""
        text = str(value)
        if not (text.isdecimal() and text.isascii() and 0 < int(text) <= most):
            raise ConfigError(
                f"{name}: {value!r} is not a valid {self.size_name}: it must be a whole number from 1 to {most}"
            )
        return int(text)
