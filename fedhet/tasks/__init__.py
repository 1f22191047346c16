"""Tasks: the loss, the metric and the meaning of a network's outputs."""

from fedhet.tasks.outputs import LARGEST, Outputs
from fedhet.tasks.task import Score, Task, as_task

__all__ = ["LARGEST", "Outputs", "Score", "Task", "as_task"]
