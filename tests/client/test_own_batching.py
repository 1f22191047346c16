"""A user's own networks are passed as one batch of networks like the configured ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from torch import nn

from fedhet import config as configuration
from fedhet.client.app import make_client_app
from fedhet.engines.local import run_locally
from fedhet.learning.batching import clients
from fedhet.population import ClientInfo
from fedhet.supplied import Supplied

pytestmark = pytest.mark.usefixtures("no_report")


class Net(nn.Module):
    """From images of digits to a tuple, whose first is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, str]:
        return self.head(self.body(inputs.flatten(1)).relu()), "beside"


def of_client(client: ClientInfo) -> nn.Module:
    return Net()


def of_scale(client: ClientInfo) -> nn.Module:
    network = Net()
    network.scale = torch.rand(1)  # type: ignore[assignment] # no buffer
    return network


SETTINGS = {
    **{"method": "fedavg", "clients": 3, "rounds": 2, "samples-per-client": 24, "batch-size": 8, "local-epochs": 1},
    **{"workers": 1, "client-batching": "4"},
}


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many networks each joint pass had."""
    seen, together = [], clients.together

    def spying(passes: Any, streams: Any) -> Any:
        seen.append(len(passes))
        return together(passes, streams)

    monkeypatch.setattr(clients, "together", spying)
    return seen


@pytest.mark.parametrize("model", [of_client, Net, Net()], ids=["function", "class", "network"])
def test_own_networks_are_one_batch(model: Any, joint: list[int], tmp_path: Path) -> None:
    run_locally(configuration.resolve(SETTINGS), tmp_path / "run", supplied=Supplied(model=model))
    assert max(joint) == 3


def test_what_cannot_be_one_batch_is_told_once_with_the_reason(
    joint: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flwr.fedhet")
    run_locally(configuration.resolve(SETTINGS), tmp_path / "run", supplied=Supplied(model=of_scale))
    assert joint == []
    (line,) = [line for line in caplog.messages if "one by one" in line]
    assert "networks of class Net" in line
    assert "with a Tensor among its attributes" in line


def test_the_default_is_one_after_the_other(joint: list[int], tmp_path: Path) -> None:
    config = configuration.resolve({key: value for key, value in SETTINGS.items() if key != "client-batching"})
    assert config.client_batching == "off"
    run_locally(config, tmp_path / "run", supplied=Supplied(model=Net))
    assert joint == []


def test_clients_behind_mods_are_batched_as_well(joint: list[int], tmp_path: Path) -> None:
    seen = []

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        seen.append(message.metadata.message_type)
        return reply

    run_locally(configuration.resolve(SETTINGS), tmp_path / "run", app=make_client_app(Net, mods=[mod]))
    assert max(joint) == 3
    assert seen.count("train") == 6
