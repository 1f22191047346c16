"""Label spreading (Zhou et al., 2003): labels spread over a k-NN graph of private and public inputs."""

from dataclasses import replace

from .families.classifiers import TRAITS, Classifiers, classifier


@classifier("label-spreading", "fedhet.client_apps.label_spreading:LabelSpreading", replace(TRAITS, public="inputs"))
class LabelSpreading(Classifiers):
    """Label spreading: a client spreads its labels over a k-NN graph of private and public inputs."""
