"""Methods, models and data sets by name (`fedhet.methods.registry`)."""

from fedhet.methods.registry import *  # noqa: F403
