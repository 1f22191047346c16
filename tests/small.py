"""Settings that methods need for small networks."""

from typing import Any

SMALL: dict[str, dict[str, Any]] = {
    "depthfl": {"depthfl.depths": "2,1"},
    "scalefl": {"scalefl.depths": "2,1", "scalefl.widths": "1,0.7"},
    "inclusivefl": {"inclusivefl.depths": "2,1", "inclusivefl.blocks": "body.5", "architectures": "cnn-3-2"},
}
"""By method; of a network with two hidden layers no client can have four blocks, nor are these alike."""
