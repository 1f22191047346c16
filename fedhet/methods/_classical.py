"""The methods without networks: keys of training have no effect."""

from fedhet.options import Config, Parameters

TRAINING = (
    *("optimizer", "learning-rate", "lr-schedule", "momentum", "weight-decay", "batch-size", "augment", "precision"),
    *("local-epochs", "closing-epochs"),
)


class ClassicalParameters(Parameters):
    """Keys of a method of scikit-learn."""

    def idle(self, config: Config) -> dict[str, str]:
        """No network is trained."""
        return dict.fromkeys(TRAINING, "method")
