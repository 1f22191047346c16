"""Built-in models, access to models by name, and the assignment of models to clients."""

from fedhet.models import families as families
from fedhet.models import networks as networks
from fedhet.models.registry import FAMILIES as FAMILIES
from fedhet.models.registry import build as build
from fedhet.models.registry import build_auxiliary as build_auxiliary
from fedhet.models.registry import deal as deal
from fedhet.models.registry import expand as expand
from fedhet.models.registry import names as names
from fedhet.models.registry import place_before as place_before
from fedhet.models.registry import register_model as register_model
from fedhet.models.registry import spread as spread
