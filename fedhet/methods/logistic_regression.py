"""Logistic regression on a client's own examples: a control without networks or peers."""

from dataclasses import dataclass

from fedhet.method import Method, Traits
from fedhet.methods._classical import ClassicalParameters
from fedhet.options import option


@dataclass(frozen=True)
class LogisticRegressionParameters(ClassicalParameters):
    """Its keys, with scikit-learn's values."""

    c: float = option(1.0, "inverse strength of the L2 penalty", above=0)


method = Method(
    "logistic-regression",
    traits=Traits(keeps="model", scored="trained", public="none", alone=True),
    Parameters=LogisticRegressionParameters,
    server="fedhet.strategies.logistic_regression:LogisticRegression",
    client="fedhet.client_apps.logistic_regression:LogisticRegression",
    common={"rounds": 1},
)
