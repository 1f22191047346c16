"""Tasks: the loss, the metric and the prediction for each kind of output."""
