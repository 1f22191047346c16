"""What networks represent: features and heads, CKA, and the peers' target that FedHeNN aligns a client with."""

from fedhet.representations.features import Representation, head_name

__all__ = ["Representation", "head_name"]
