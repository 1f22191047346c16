"""Models by name, and how they are dealt to clients."""

from fedhet.models import fedharm, flha, images, text
from fedhet.models.pooled import place_before
from fedhet.models.registry import (
    ASSIGNMENTS,
    FAMILIES,
    build,
    build_beside,
    deal,
    expand,
    names,
    register_model,
    spread,
)

__all__ = [
    "ASSIGNMENTS",
    "FAMILIES",
    "build",
    "build_beside",
    "deal",
    "expand",
    "fedharm",
    "flha",
    "images",
    "names",
    "place_before",
    "register_model",
    "spread",
    "text",
]
