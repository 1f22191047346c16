"""FLHA-distillation: FedAvg of the teacher, then students that learn from it on their own data alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedhet import models
from fedhet.setup import client_setup
from fedhet.training import Step
from fedhet.training.evaluation import forward

OWN = {"architectures": "cnn-1-1,mlp", "rounds": 4}


def teacher_of(done, arrays, name="cnn-1-1"):
    dataset = client_setup.dataset_of(done.config)
    teacher = models.build(name, dataset.input_shape, dataset.classes)
    teacher.load_state_dict({key: torch.from_numpy(array.copy()) for key, array in arrays.items()})
    return teacher.eval()


def test_first_rounds_are_fedavg(federate):
    done = federate("flha-distillation", **OWN)
    assert done.failures == []
    dataset = client_setup.dataset_of(done.config)
    own = models.build("cnn-1-1", dataset.input_shape, dataset.classes).state_dict()
    sizes = {name: tensor.shape for name, tensor in own.items()}
    for client in "012":
        assert {name: array.shape for name, array in done.sent[1, client]["model"].items()} == sizes
    for name in sizes:
        mean = np.mean([done.sent[1, client]["model"][name] for client in "012"], axis=0, dtype=np.float64)
        np.testing.assert_allclose(done.received[2, "0"]["model"][name], mean, rtol=1e-5, atol=1e-7)
    # What is evaluated is the teacher as it came.
    teacher = teacher_of(done, done.received[2, "0"]["model"])
    found = [client_setup.data_of(done.info(client)).test for client in "012"]
    right = [(teacher(dataset.transform(own.inputs)).argmax(1) == own.labels).sum().item() for own in found]
    row = next(row for row in done.rows if row["round"] == 2)
    assert row["received"]["accuracy"]["weighted"] == pytest.approx(sum(right) / sum(map(len, found)))


def test_final_teacher(federate):
    done = federate("flha-distillation", **OWN)
    for client in "012":
        final = done.received[3, client]["model"]
        assert all(np.array_equal(final[name], array) for name, array in done.state.model.items())
        assert "model" not in done.received[4, client]
        assert all("model" not in done.sent[round, client] for round in (3, 4))
    assert [row["bytes_up"] for row in done.rows if row["round"] in (3, 4)] == [0, 0]


def test_a_client_that_lost_the_teacher_gets_it_again(federate, tmp_path):
    def lose(round, client):
        if (round, client) == (4, "1"):
            for file in (tmp_path / "run" / "state" / "clients" / "1").iterdir():
                file.unlink()

    done = federate("flha-distillation", before=lose, **OWN | {"rounds": 5, "flha-distillation.teacher-rounds": 0.4})
    assert done.failures == [(4, "1", "its state of round 3 is lost; its handshake is repeated")]
    assert ["model" in done.received[round, "1"] for round in (3, 4, 5)] == [True, False, True]


def test_loss_of_the_student(federate, phases):
    done = federate("flha-distillation", clients=1, **OWN)
    phase, *_ = phases[2]
    assert phase.task_weight == pytest.approx(0.3)
    data, transform = client_setup.data_of(done.info()), client_setup.dataset_of(done.config).transform
    inputs = transform(data.train.inputs[:8])
    # Far from the teacher: between outputs that are nearly equal, a temperature of 20 leaves the divergence few digits.
    outputs = 20 * torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    none = torch.empty(0)
    _, captured = forward(phase.module.train(), inputs, phase.captures)
    step = Step(0, phase.module, {}, inputs, none, none, outputs, captured)
    teacher = teacher_of(done, done.received[3, "0"]["model"])
    assert not any(phase.trains(f"small.{name}") for name, _ in teacher.named_parameters())
    p, log_q = (teacher(inputs) / 20).softmax(1), (outputs / 20).log_softmax(1)
    expected = 0.7 * F.kl_div(log_q, p, reduction="batchmean") * 2 * 20**2
    torch.testing.assert_close(phase.terms[0](step), expected, rtol=1e-4, atol=1e-5)


def test_schedules(federate, phases):
    federate("flha-distillation", clients=1, lr_schedule="cosine", **OWN)
    rates = [phase.optimisation.learning_rate for phase, *_ in phases]
    assert rates == pytest.approx([0.1, 0.05, 0.01, 0.005])


@pytest.mark.parametrize("statistics", ["aggregate", pytest.param("local", marks=pytest.mark.slow)])
def test_teacher_with_batch_norm(federate, statistics):
    done = federate(
        "flha-distillation",
        architectures="mlp",
        batch_norm=statistics,
        samples_per_client=0,
        rounds=2,
        **{"flha-distillation.teacher": "flha-small-cnn-4", "flha-distillation.teacher-rounds": 1.0},
    )
    assert ("body.0.1.running_mean" in done.sent[1, "0"]["model"]) == (statistics == "aggregate")
    row = next(row for row in done.rows if row["round"] == 2)
    assert row["received"]["accuracy"]["weighted"] > 0.6
