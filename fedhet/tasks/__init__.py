"""Tasks: the loss, the metric and the meaning of a network's outputs."""

from fedhet.tasks.outputs import IGNORED as IGNORED
from fedhet.tasks.outputs import LARGEST as LARGEST
from fedhet.tasks.outputs import Outputs as Outputs
from fedhet.tasks.task import Score as Score
from fedhet.tasks.task import Task as Task
from fedhet.tasks.task import as_task as as_task
