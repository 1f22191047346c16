"""The version of fedhet."""

__version__ = "0.1.0"
