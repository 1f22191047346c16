from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedhet.data import Examples
from fedhet.data.own import as_input
from fedhet.data.reading import LazyInputs
from fedhet.models.representation import Representation
from fedhet.setup.user_functions import model_function
from fedhet.tasks import Task
from fedhet.training import Evaluation, evaluation
from fedhet.training.evaluation import read

TASK = Task("classification")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def examples_of(count):
    generator = torch.Generator().manual_seed(0)
    return Examples(torch.randn(count, 5, generator=generator), torch.randint(3, (count,), generator=generator))


@pytest.mark.parametrize("batch", [1, 7, 20, 100])
def test_score_does_not_depend_on_batches(batch, monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", batch)
    model, examples = network(), examples_of(20)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    score = Evaluation(model, examples, TASK, lambda inputs: inputs * 2).result()
    outputs = model.eval()(examples.inputs * 2)
    assert score.value == (outputs.argmax(1) == examples.labels).double().mean().item()
    assert score.loss == pytest.approx(nn.functional.cross_entropy(outputs, examples.labels).item(), rel=1e-5)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_in_place_networks_and_losses():
    class InPlace(nn.Linear):
        def forward(self, inputs):
            inputs -= 1
            return super().forward(inputs)

    def loss(outputs, labels):
        return nn.functional.binary_cross_entropy_with_logits(outputs.mul_(2), labels.mul_(0.8).add_(0.1))

    model = model_function(InPlace(5, 3))(SimpleNamespace(name="0"))
    inputs, task = examples_of(20).inputs, Task("multi-label", loss=loss)
    examples = Examples(inputs.clone(), (inputs[:, :3] > 0).float())
    score = Evaluation(model, examples, task, partial(as_input, dtype=torch.float32)).result()
    read(model, examples.inputs, lambda inputs: inputs, until=Representation(model, ""))
    outputs = nn.functional.linear(inputs - 1, model.weight, model.bias).detach()
    assert torch.equal(examples.inputs, inputs)
    assert torch.equal(examples.labels, (inputs[:, :3] > 0).float())
    assert score.value == Task("multi-label").evaluate(outputs, examples.labels).value
    assert score.loss == pytest.approx(task.loss(outputs, examples.labels).item())


@pytest.mark.parametrize("lazy", [False, True])
def test_batches_are_bounded_by_memory(lazy, monkeypatch):
    examples, sizes = examples_of(200), []
    before = Evaluation(network(), examples, TASK, lambda batch: batch).result()
    if lazy:
        dataset = TensorDataset(examples.inputs, examples.labels)
        examples = Examples(LazyInputs(dataset, None, torch.arange(200)), examples.labels)
    monkeypatch.setattr(evaluation, "MEMORY", 3 * 8 * 4 * 50)  # fifty examples of the widest layer, three times
    model = network()
    state = torch.get_rng_state()
    model.register_forward_pre_hook(lambda _module, inputs: sizes.append(len(inputs[0])))
    after = Evaluation(model, examples, TASK, lambda batch: batch).result()
    assert sizes == [2, 50, 50, 50, 50]
    assert torch.equal(state, torch.get_rng_state())
    assert (after.metrics, after.loss) == (before.metrics, pytest.approx(before.loss))
    assert len(read(model, examples.inputs, lambda batch: batch)) == 200
    assert sizes[5:] == [50, 50, 50, 50]
    Evaluation(lambda batch: model(batch), examples, TASK, lambda batch: batch, model).result()
    assert sizes[9:] == [50, 50, 50, 50]
