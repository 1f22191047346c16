"""FedProto (Tan et al., AAAI 2022): clients with different networks share prototypes, mean representations of classes.

    client i:  w_i = argmin_w  L_i(w) + lambda mean_(x, j) ||Phi_w(x) - C^j||^2 / d                      (equation 7)
    client i:  sends C_i^j, the mean of Phi_w(x) over its |D_ij| examples of class j                     (equation 3)
    server:    C^j = sum_i |D_ij| C_i^j / sum_i |D_ij|                                                   (equation 6)

Phi_w(x) is the representation (the head's input, of width d) of example x. A client predicts by the nearest prototype.
"""

from dataclasses import dataclass, replace
from typing import Literal

from fedhet.server import method, option

from .families.by_class import PROTOTYPES, ByClass, ClassState, WidthKeys

BY_NEAREST = replace(PROTOTYPES, predicts="the nearest prototype")


@dataclass(frozen=True)
class Keys(WidthKeys):
    weight: float = option(1.0, "lambda, the weight of the distance to the global prototypes", at_least=0)
    predict: Literal["prototype", "all-prototypes", "head"] = option(
        "prototype", "prediction by the nearest prototype of the client's classes or of all classes, or by the head"
    )


@method(
    "fedproto",
    lambda keys: replace(PROTOTYPES if keys.predict == "head" else BY_NEAREST, other_arrays="entries"),
    Keys,
    client="fedhet.client_apps.fedproto:FedProto",
    own={"fedproto.width": 32},
)
class FedProto(ByClass[Keys, ClassState]):
    """FedProto: the average of the clients' prototypes (mean representations) of each class."""
