"""Steps of training do not wait for a GPU: on `meta`, whose tensors have no values, reading one raises."""

import pytest
import torch
from torch import nn

from fedhet.algorithms.alignment.cka import distance_to
from fedhet.data import Examples
from fedhet.data.examples import Normalise, crop_and_flip, flip_crop_brighten_blur
from fedhet.models.representation import RandomStream, Representation
from fedhet.tasks import Task
from fedhet.training import Optimisation, Phase, Training, batches
from fedhet.utils.machine import brought

META, TASK = torch.device("meta"), Task("classification")


class Plain(Optimisation):
    """torch has no fused optimiser for `meta`."""

    def build(self, model, parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


def network():
    with META:
        return nn.Sequential(
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1)),
            *(nn.Linear(144, 10), nn.ReLU(), nn.Linear(10, 3)),
        )


def alignment(model):
    public = torch.zeros(30, 3, 8, 8, dtype=torch.uint8, device=META)
    target = torch.zeros(30, 5, device=META)
    phi, stream = Representation(model, "7"), RandomStream(1)

    def distance(step):
        rows = brought(torch.randperm(30)[:8], META)
        value = distance_to(step.represent(normalise(public[rows]), phi, stream), target[rows], kind=("linear", True))
        return value, {"distance": value}

    return distance


normalise = Normalise(255.0, (0.1, 0.2, 0.3), (1.0, 1.0, 1.0))


@pytest.mark.parametrize("augment", [crop_and_flip, flip_crop_brighten_blur])
def test_steps_read_nothing_back(augment):
    model, seen = network(), []
    with META:
        examples = Examples(torch.zeros(20, 3, 8, 8, dtype=torch.uint8), torch.zeros(20, dtype=torch.int64))

    def counted(step):
        seen.append(step.number)
        return 0.1 * step.outputs.sum()

    def prepare(inputs, generator):
        return normalise(augment(inputs, generator))

    phase = Phase(2, Plain(batch_size=8), terms=(alignment(model), counted))
    with pytest.raises(NotImplementedError, match="no data"):  # losses are read when all steps are done
        Training(model, phase, examples, TASK, prepare, generator=torch.Generator()).result()
    assert seen == [0, 1, 2, 3, 4, 5]


def test_order_on_the_device():
    order = list(batches(20, 8, torch.Generator(), META))
    assert [(len(rows), rows.device) for rows in order] == [(8, META), (8, META), (4, META)]
