"""Which methods can serve clients: asked of the registry, the methods and the clients, with nothing listed by hand."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedhet.comparing.measures import CONTROLS
from fedhet.comparing.recommending import ask
from fedhet.config import configuration, validation
from fedhet.errors import ConfigError
from fedhet.methods import registry
from fedhet.setup.user_functions import UserFunctions

DIGITS = {"preset": "fedhenn/digits", "clients": 2, "public-samples": 20, "samples-per-client": 30}


def asked(*methods, base=DIGITS, functions=UserFunctions(), allow=None):  # noqa: B008 - it is frozen
    choices, refused = ask(methods, base, functions, allow=allow)
    return SimpleNamespace(choices=choices, refused=refused)


def test_controls_are_the_methods_without_exchange():
    configs = {name: configuration.resolve({"method": name}) for name in registry.own_methods()}
    assert {name for name, config in configs.items() if not registry.traits(config).communicates} == {*CONTROLS}


def test_every_method_serves_or_says_why_not():
    found = asked(*registry.methods())
    assert found.choices.keys() | found.refused.keys() == {*registry.methods()}
    assert not found.choices.keys() & found.refused.keys()
    assert {"local", "fedhenn", "fedmd", "layer-average"} <= found.choices.keys()
    assert "needs equal architectures, not cnn-1-1" in found.refused["fedavg"]
    assert "needs labels of the public dataset" in asked("fedharm", allow="descriptors").refused["fedharm"]
    assert "head.weight" in found.refused["lg-fedavg"]


def test_equal_networks_serve_more():
    found = asked("fedavg", "local", base=DIGITS | {"architectures": "cnn"})
    assert found.choices == {"fedavg": {}, "local": {}}


def test_keys_changed_at_need():
    found = asked("fedharm").choices["fedharm"]  # no labels, and too few blocks for descriptors
    assert found == {"fedharm.align": "spectral", "fedharm.alpha": 0.0}


def test_representations_get_one_width():
    base = {"preset": "", "dataset": "digits", "clients": 5, "architectures": "cnn-family"}
    alike = base | {"architectures": "cnn"}
    for name in ("fedproto", "fedtgp", "fedgh", "fedgen"):
        key = f"{name}.width"
        assert asked(name, base=base).choices[name] == {key: 64}
        for served in (base | {key: 16}, alike):
            assert asked(name, base=served).choices[name] == {}


def test_methods_that_need_a_public_dataset():
    found = asked("fedhenn", "label-spreading", "local", "fedproto", base=DIGITS | {"public-samples": 0})
    assert set(found.choices) == {"local", "fedproto"}
    assert "public-samples = 500" in found.refused["fedhenn"]


def test_what_may_leave_the_clients_decides():
    found = asked("fedmd", "fedproto", "layer-average", "local", allow="posteriors")
    assert set(found.choices) == {"fedmd", "local"}
    assert (
        "only posteriors (allow in its node config), but layer-average needs weights" in found.refused["layer-average"]
    )
    found = asked("fedavg", base=DIGITS | {"architectures": "torchvision/resnet18"}, allow="weights")
    assert "fedavg needs statistics" in found.refused["fedavg"]
    with pytest.raises(ConfigError, match="unknown kind in the node's allow 'everything'"):
        asked("local", allow="everything")


def three_networks(client):
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    cnn = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    rows, attention = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (8, 8))), nn.TransformerEncoderLayer(8, 2, 16, 0.0)
    return [mlp, cnn, nn.Sequential(rows, attention, nn.Flatten(), nn.Linear(64, 10))][client.partition_id % 3]


def some_data(client):
    generator = torch.Generator().manual_seed(client.partition_id)
    images, labels = torch.rand(40, 1, 8, 8, generator=generator), torch.arange(40) % 10
    return {"train": (images[:30], labels[:30]), "test": (images[30:], labels[30:])}


def test_three_networks_without_a_public_dataset():
    functions = UserFunctions(three_networks, some_data)
    serving = {"local", "fd", "logistic-regression"}
    refused = ("fedhenn", "fedmd", "label-spreading", "fedavg")
    found = asked(*serving, *refused, base={"preset": "fedhenn/digits", "clients": 3}, functions=functions)
    assert found.choices.keys() == serving
    for name in ("fedhenn", "fedmd", "label-spreading"):
        assert "public" in found.refused[name], name
    assert "equal architectures" in found.refused["fedavg"]
    assert not [why for why in found.refused.values() if "no client can take part" in why or "\n" in why]


def one_layer_on(*shape: int) -> UserFunctions:
    """Clients with a linear network on inputs of a shape."""
    return UserFunctions(
        lambda client: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        lambda client: {name: (part[0].reshape(-1, *shape), part[1]) for name, part in some_data(client).items()},
    )


def test_shared_networks_for_rows_of_numbers():
    served = asked("fedkd", "fml", "flha-distillation", functions=one_layer_on(64)).choices
    assert served.keys() >= {"fedkd", "fml", "flha-distillation"}


def test_refusals_of_a_users_networks():
    refused = asked("fedkd", "fml", "lora", "flha-distillation", functions=one_layer_on(16, 4)).refused
    reason = (
        "the model needs images (channels, height, width) of 4 x 4 pixels or more, not shape (16, 4); "
        "set a model for the client's inputs"
    )
    assert refused["flha-distillation"] == f"2 clients (0, 1): key flha-distillation.teacher: {reason}"
    assert refused["lora"].startswith(
        "2 clients (0, 1): lora adapts nn.Linear layers, but Sequential has none except its head '"
    )
    assert refused["fml"] == f"2 clients (0, 1): key fml.shared-model: {reason}"


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("local", {"architectures", "assign"}),
        ("fml", {"assign"}),
        ("feddf", {"assign"}),
        ("heterofl", {"architectures"}),
    ],
)
def test_users_networks_replace_architectures(method, keys):
    config = configuration.resolve({"method": method})
    assert {*validation.ineffective(config, registry.traits(config), {"model"})} & {"architectures", "assign"} == keys


def test_feddf_is_tried_with_a_server_that_teaches():
    assert asked("feddf").choices["feddf"] == {"feddf.teach": True}


def test_methods_are_asked_until_a_federated_one_can_train_the_clients():
    """A regression, which the methods that are asked first refuse, was left with training alone and time to spare."""
    names = ["local", "fedavg", "gradient-boosting", "layer-average", "fedhenn"]
    late = "the budget left no time to check whether it can train the clients"
    choices, refused = ask(names, DIGITS, UserFunctions(), allow=None, deadline=0.0)
    assert [*choices] == ["local", "gradient-boosting", "layer-average"]
    assert "needs equal architectures" in refused["fedavg"]
    assert refused["fedhenn"] == late
    logging.disable(logging.INFO)
    choices, refused = ask(names, DIGITS, UserFunctions(), allow=None, deadline=0.0, latest=0.0)
    assert logging.root.manager.disable == logging.INFO, "as the caller set it"
    logging.disable(logging.NOTSET)
    assert [*choices] == ["local"]
    assert {*refused.values()} == {late}
