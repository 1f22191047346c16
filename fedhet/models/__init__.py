"""Built-in models, access to models by name, and the assignment of models to clients."""

from fedhet.models import families, networks
from fedhet.models.registry import FAMILIES, build, build_auxiliary, deal, expand, names, place_before, register_model

__all__ = ["FAMILIES", "build", "build_auxiliary", "deal", "expand", "families", "names", "networks", "place_before"]
__all__ += ["register_model"]
