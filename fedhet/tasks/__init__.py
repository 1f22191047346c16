"""Tasks: the loss, the metrics and the meaning of a network's outputs."""

from fedhet.tasks.metrics import LARGEST
from fedhet.tasks.outputs import OUTPUTS, Outputs, direction, worst
from fedhet.tasks.task import Score, Task, as_task

__all__ = ["LARGEST", "OUTPUTS", "Outputs", "Score", "Task", "as_task", "direction", "worst"]
