"""FD against plain computations."""

import numpy as np
import torch
import torch.nn.functional as F

from fedhet.setup import client_setup

OWN = {"partition": "classes", "classes_per_client": 6, "architectures": "mlp,cnn-1-1"}


def test_mean_logits_of_peers(federate):
    done = federate("fd", rounds=3, **OWN)
    assert done.failures == []
    held = {client: set(done.sent[1, client]["prototypes"]["classes"].tolist()) for client in "012"}
    assert len({frozenset(classes) for classes in held.values()}) > 1
    assert all(done.received[1, client] == {} for client in "012")
    for round in (2, 3):
        for client in "012":
            peers = [done.sent[round - 1, peer]["prototypes"] for peer in "012" if peer != client]
            received = done.received[round, client]["prototypes"]
            assert received["classes"].tolist() == sorted(set().union(*(own["classes"].tolist() for own in peers)))
            for label, mean in zip(received["classes"], received["means"], strict=True):
                # Every peer that has the class counts the same, however many examples it has.
                of = [own["means"][own["classes"] == label][0] for own in peers if label in own["classes"]]
                np.testing.assert_allclose(mean, np.mean(of, axis=0), rtol=1e-5, atol=1e-6)


def test_step_of_distillation(federate, phases):
    settings = {"local_epochs": 1, "batch_size": 64, "fd.weight": 0.5, "architectures": "mlp", "learning_rate": 0.2}
    done = federate("fd", **settings)
    transform = client_setup.dataset_of(done.config).transform
    for client, (_, before, after) in zip("012", phases[3:], strict=True):
        model, train = client_setup.model_of(done.info(client)), client_setup.data_of(done.info(client)).train
        model.load_state_dict(before)
        received = done.received[2, client]["prototypes"]
        logits = torch.zeros(10, 10)
        logits[torch.tensor(received["classes"])] = torch.tensor(received["means"])
        counted = torch.tensor([int(label) in received["classes"] for label in train.labels])
        outputs = model(transform(train.inputs))
        distilled = F.cross_entropy(outputs[counted], logits[train.labels[counted]].softmax(1))
        (F.cross_entropy(outputs, train.labels) + 0.5 * distilled).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(after[name], parameter.detach() - 0.2 * parameter.grad, rtol=1e-4, atol=1e-6)
