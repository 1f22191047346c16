"""pFedHN's hypernetwork: what it writes, and from what."""

import torch

from fedhet import models
from fedhet.algorithms.hypernets.personal import PersonalHypernetwork

CIFAR10 = (3, 32, 32)


def shapes_of(name, input_shape=CIFAR10):
    return {key: tuple(own.shape) for key, own in models.build(name, input_shape, 10).named_parameters()}


def hypernetwork(seed=0, **settings):
    return PersonalHypernetwork({}, seed, 4, **settings)


def test_head_is_a_product_over_chunks():
    shapes = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (2, 5)}
    own = hypernetwork(hidden=6, layers=1, chunk=8)
    written = own.write("x", shapes)
    tensors = own.tensors
    first = tensors["embedding/x"] @ tensors["mlp/0/weight"] + tensors["mlp/0/bias"]
    features = (first.relu() @ tensors["mlp/1/weight"] + tensors["mlp/1/bias"])[0]
    chunks = next(tensor for name, tensor in tensors.items() if name.startswith("chunks/"))
    assert chunks.shape == (4, 6), "30 weights are four chunks of eight"
    # The paper's head, (weights, features), is written out: row (j, c) is C_j * W_c.
    whole = (chunks[:, None, :] * tensors["head"].T[None]).reshape(32, 6)[:30]
    flat = whole @ features
    torch.testing.assert_close(written["a.weight"], (2 / 3) ** 0.5 * flat[:15].view(5, 3))
    torch.testing.assert_close(written["a.bias"], 0.1 * flat[15:20])
    torch.testing.assert_close(written["b.weight"], (2 / 5) ** 0.5 * flat[20:].view(2, 5))


def test_initial_values_depend_on_the_seed():
    shapes = shapes_of("mlp"), shapes_of("cnn-2-2")
    one, other, third = hypernetwork(), hypernetwork(), hypernetwork(seed=1)
    one.write("a", shapes[0])
    first, second = (each.write("b", shapes[1]) for each in (one, other))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(third.write("b", shapes[1])["head.weight"], first["head.weight"])


def test_gradients_of_one_client():
    own, small, large = hypernetwork(), shapes_of("mlp", (1, 4, 4)), shapes_of("cnn-1-1", (1, 4, 4))
    own.write("b", large)
    sum(w.square().sum() for w in own.write("a", small).values()).backward()
    reached = {name for name, tensor in own.tensors.items() if tensor.grad is not None}
    left = own.tensors.keys() - reached
    assert {name.partition("/")[0] for name in left} == {"embedding", "chunks"}
    assert "embedding/b" in left
    assert {"embedding/a", "head", "mlp/0/weight", "mlp/3/bias"} <= reached
