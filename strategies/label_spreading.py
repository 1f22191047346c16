"""Label spreading (Zhou et al., 2003): labels spread over a k-NN graph of private and public inputs."""

from dataclasses import replace

from fedhet.methods.method import method

from .families.classifiers import ONE_ROUND, TRAITS, Classifiers, Keys


@method(
    "label-spreading",
    replace(TRAITS, public="inputs"),
    Keys,
    client="fedhet.client_apps.label_spreading:LabelSpreading",
    common=ONE_ROUND,
    own=ONE_ROUND,
)
class LabelSpreading(Classifiers):
    """Label spreading: a client spreads its labels over a k-NN graph of private and public inputs."""
