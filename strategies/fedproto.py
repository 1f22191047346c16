"""FedProto, server side: prototypes of classes are averaged, no weights (Tan et al., AAAI 2022, equation 6)."""

from fedhet.methods import fedproto

from ._classes import ByClass, ClassState  # noqa: TID251 - this folder is fedhet.strategies


class FedProto(ByClass[fedproto.FedProtoParameters, ClassState]):
    """Averages the clients' mean representation of each class."""

    method = fedproto.method
    vectors = "representation"
    way_out = "set fedproto.width, to which all are then projected"
