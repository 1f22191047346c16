"""Settings that methods need for small networks."""

from typing import Any

SMALL: dict[str, dict[str, Any]] = {"depthfl": {"depthfl.depths": "2,1"}}
"""By method; of a network with two hidden layers no client can have four blocks."""
