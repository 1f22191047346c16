"""FedHeNN end to end on a few digits: what it reduces to, what it optimises, what each option does, what goes wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet import FedHeNN
from fedhet.algorithms.alignment import targets
from fedhet.algorithms.alignment.cka import linear_cka, procrustes_distance, rbf_kernel
from fedhet.algorithms.alignment.targets import unpack
from fedhet.client.app import make_client_app
from fedhet.client_apps.families.scores import public_rows
from fedhet.config.configuration import resolve
from fedhet.data import load
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower.grid import LocalGrid
from fedhet.messages import WireError
from fedhet.models.representation import Representation
from fedhet.results.history import Row, read_history
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo
from fedhet.strategies.families.scores import packed_rows
from fedhet.training import read
from fedhet.utils.files import read_tensors

TINY = {
    "method": "fedhenn",
    "dataset": "digits",
    "partition": "classes",
    "classes-per-client": 4,
    "clients": 3,
    "samples-per-client": 20,
    "public-samples": 96,
    "architectures": "mlp,cnn",
    "rounds": 3,
    "fraction-train": 1.0,
    "local-epochs": 1,
    "batch-size": 10,
    "learning-rate": 0.05,
    "momentum": 0.5,
    "weight-decay": 0.0,
    "closing-epochs": 0,
    "fedhenn.target": "kernel",
    "fedhenn.eta0": 0.3,
}


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features travel whole, and in float32."""
    monkeypatch.setattr(targets, "ERROR", 0.0)
    monkeypatch.setitem(targets.DTYPES, "values", "float32")


Federate = Callable[..., Any]


@pytest.fixture
def run(federate: Federate) -> Federate:
    """Runs FedHeNN, or another method, with the settings above and some more."""

    def run(settings: dict[str, Any], name: str = "run", **own: Any) -> Any:
        chosen = TINY | settings
        if chosen["method"] != "fedhenn":
            chosen = {key: value for key, value in chosen.items() if not key.startswith("fedhenn.")}
        if "model" in own:
            del chosen["architectures"]
        if "data" in own:
            chosen = {key: value for key, value in chosen.items() if "per-client" not in key and key != "partition"}
        return federate(chosen.pop("method"), name, **chosen, **own)

    return run


def public_of(done: Any) -> Tensor:
    public = client_setup.public_dataset(done.config)
    assert public is not None
    return public.inputs


def phi_of(done: Any, model: nn.Module, inputs: Tensor) -> Tensor:
    return read(model, inputs, client_setup.dataset_of(done.config).transform, until=Representation(model))


class Noisy(nn.Module):
    """A network with dropout and BatchNorm."""

    def __init__(self, width: int = 24, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(1), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, width)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images).relu())
        return logits


def accuracies(rows: list[Row]) -> list[Any]:
    return [(row["round"], row["received"], row["trained"], row["train_loss"]) for row in rows]


# ---- what it reduces to


@pytest.mark.parametrize(("setting", "other"), [("homogeneous", "fedavg"), ("heterogeneous", "local")])
def test_no_term_is_fedavg_or_local(setting: str, other: str, run: Federate) -> None:
    def model(client: ClientInfo) -> nn.Module:
        return Noisy(24 if setting == "homogeneous" else 16 + 4 * int(client.name))

    expected = run({"method": other}, other, model=model)
    none, least = (
        run({"fedhenn.setting": setting, "fedhenn.eta0": eta0}, str(eta0), model=model) for eta0 in (0.0, 1e-30)
    )

    names = ["global"] if setting == "homogeneous" else ["0", "1", "2"]
    for name in names:
        there, same, near = (r.folder / "models" / f"{name}.safetensors" for r in (expected, none, least))
        assert same.read_bytes() == there.read_bytes()
        for key, tensor in load_file(there).items():
            torch.testing.assert_close(load_file(near)[key], tensor, rtol=0, atol=1e-6)
    assert accuracies(none.rows[:-1]) == accuracies(expected.rows[:-1])
    for near, row in zip(least.rows[1:], expected.rows[1:], strict=True):
        assert near["received"]["accuracy"] == row["received"]["accuracy"]
    assert all("alignment" in row["metrics"] for row in least.rows[2:-1])
    assert not any(row["metrics"] for row in none.rows)
    assert none.rows[0]["bytes_down"] == expected.rows[0]["bytes_down"]


# ---- what it optimises


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("setting", "kernel"),
    [("heterogeneous", "linear"), ("homogeneous", "rbf"), ("homogeneous", "linear"), ("homogeneous", "procrustes")],
)
def test_round_follows_the_equation(setting: str, kernel: str, run: Federate) -> None:
    eta0, rate = 0.7, 0.2
    done = run(
        {
            "fedhenn.setting": setting,
            "fedhenn.kernel": kernel,
            "fedhenn.eta0": eta0,
            "fedhenn.rad-size": 50,
            **({} if kernel == "procrustes" else {"fedhenn.rad-batch": 0}),
            "architectures": "mlp" if setting == "homogeneous" else "mlp,cnn",
            "rounds": 2,
            "local-epochs": 2,
            "batch-size": 20,
            "learning-rate": rate,
            "momentum": 0.0,
        },
    )
    dataset = client_setup.dataset_of(done.config)
    rad = public_of(done)[torch.from_numpy(np.array(done.received[2, "0"]["rad"]["rows"])).long()]
    assert len(rad) == 50
    assert done.values[2, "0"]["eta"] == eta0
    h = torch.eye(50, dtype=torch.float64) - 1 / 50

    def k(features: Tensor) -> Tensor:
        features = features.double()
        kernel_ = rbf_kernel(features) if kernel == "rbf" else features @ features.T
        return h @ kernel_ @ h

    peers = {client: done.network(client, done.kept(client, 1)) for client in "012"}
    mean = sum((k(phi_of(done, model, rad)) / 3 for model in peers.values()), torch.zeros(()))
    for client, model in peers.items():
        if setting == "homogeneous":
            sent = done.received[2, client]["model"]
            model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in sent.items()})
            reference = phi_of(done, model, rad)
            mean = k(reference)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        train = client_setup.data_of(done.info(client)).train
        plain = nn.Sequential(*model.children())
        distance = torch.zeros(())
        for _ in range(2):
            own = plain[:-1](dataset.transform(rad))
            if kernel == "procrustes":
                distance = procrustes_distance(own, reference)
            else:
                distance = 1 - (k(own) * mean).sum() / torch.sqrt((k(own) ** 2).sum() * (mean**2).sum())
            loss = F.cross_entropy(plain(dataset.transform(train.inputs)), train.labels) + eta0 * distance
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= rate * parameter.grad
        expected = nn.utils.parameters_to_vector(model.parameters()).detach() - before
        trained = done.network(client, done.kept(client, 2))
        change = nn.utils.parameters_to_vector(trained.parameters()).detach() - before
        assert (change - expected).norm() < 1e-4 * expected.norm()
        assert float(distance.detach()) > 1e-4


def test_clients_with_different_labels_align(run: Federate) -> None:
    digits = load("digits")
    label_sets = {"0": [0, 1, 2], "1": [3, 4, 5, 6], "2": [7, 8, 9, 0, 4]}

    def data(client: ClientInfo) -> dict[str, Any]:
        def part(examples: Any, count: int) -> tuple[Tensor, Tensor]:
            own = label_sets[client.name]
            rows = torch.cat([(examples.labels == label).nonzero()[:count, 0] for label in own])
            labels = torch.tensor([own.index(int(label)) for label in examples.labels[rows]])
            return examples.inputs[rows].float() / 16, labels

        return {"train": part(digits.train, 6), "test": part(digits.test, 5), "public": public}

    def model(client: ClientInfo) -> nn.Module:
        return Noisy(20 + 6 * int(client.name), len(label_sets[client.name]))

    public = digits.train.inputs[-100:].float() / 16
    settings = {"rounds": 5, "local-epochs": 4, "public-samples": 0, "fedhenn.rad-batch": 50}
    done = run(settings, "together", model=model, data=data)
    alone = run({**settings, "method": "local"}, "alone", model=model, data=data)
    assert not any(row["failures"] for row in done.rows)

    def agreement(of: Any) -> float:
        features = []
        for client, labels in label_sets.items():
            network = model(done.info(client))
            network.load_state_dict(of.saved(client))
            assert network.head.out_features == len(labels)
            images, phi = digits.test.inputs.float() / 16, Representation(network)
            features.append(read(network, images, lambda x: x, until=phi))
        return float(np.mean([float(linear_cka(features[i], features[j])) for i, j in ((0, 1), (0, 2), (1, 2))]))

    assert agreement(done) > agreement(alone)


# ---- what its options do


def test_schedule(run: Federate) -> None:
    for schedule, factors in (("sqrt", [0, 1, 2**0.5]), ("linear", [0, 1, 2]), ("constant", [1, 1, 1])):
        own = resolve({**TINY, "fedhenn.eta0": 0.1, "fedhenn.schedule": schedule}).options
        assert [own.eta(round) for round in (1, 2, 3)] == pytest.approx([0.1 * factor for factor in factors])
    done = run({"rounds": 1, "closing-epochs": 1, "fraction-train": 0.3, "fedhenn.schedule": "linear"})
    assert [len(row["participants"]) for row in done.rows] == [0, 1, 3, 0]
    assert "alignment" not in done.rows[1]["metrics"]
    assert {round for (round, _), values in done.values.items() if "eta" in values} == {2}
    assert [done.values[2, client]["eta"] for client in "012"] == [0.3] * 3


def test_rad_of_a_round(run: Federate) -> None:
    done = run({"fedhenn.rad-size": 40})
    for round in (1, 2):
        asked = done.received[round, "0"]["next-rad"]["rows"]
        assert asked.dtype == np.int32
        assert len(np.unique(asked)) == len(asked) == 40
        assert asked.max() < 96
        for client in "012":
            np.testing.assert_array_equal(done.received[round + 1, client]["rad"]["rows"], asked)
        assert len(unpack(done.sent[round, "0"]["features"])) == 40
    assert {*done.received[2, "0"]["rad"]["rows"]} != {*done.received[3, "0"]["rad"]["rows"]}


def test_rad_source(run: Federate) -> None:
    held_out, union = (run({"fedhenn.rad-source": source}, source) for source in ("held-out", "train-union"))
    parts = [client_setup.data_of(union.info(client)).train.inputs for client in "012"]
    for done, expected in ((held_out, public_of(held_out)), (union, torch.cat(parts))):
        (path,) = (done.folder / "state" / "public").iterdir()
        assert any(torch.equal(tensor, expected) for tensor in (read_tensors(path) or {}).values())


@pytest.mark.parametrize(("batch", "every", "passes"), [(0, 1, [96] * 4), (16, 3, [16] * 2)])
def test_rad_batch_and_rad_every(batch: int, every: int, passes: list[int], run: Federate) -> None:
    seen: list[int] = []

    class Counting(Noisy):
        def forward(self, images: Tensor) -> Tensor:
            if self.training:
                seen.append(len(images))
            return super().forward(images)

    settings = {"rounds": 2, "local-epochs": 2, "fedhenn.rad-batch": batch, "fedhenn.rad-every": every}
    run(settings, model=lambda client: Counting())
    # Each of the three clients' networks is also checked with two and with eight examples.
    assert [rows for rows in seen if rows not in (2, 8, 10)] == passes * 3


def test_rarer_term_has_more_weight(run: Federate) -> None:
    one_step = {"rounds": 2, "batch-size": 20, "fedhenn.rad-batch": 0}
    often = run({**one_step, "fedhenn.eta0": 0.4}, "often")
    rare = run({**one_step, "fedhenn.eta0": 0.2, "fedhenn.rad-every": 2}, "rare")
    for client in "012":
        torch.testing.assert_close(rare.kept(client, 2), often.kept(client, 2), rtol=0, atol=1e-6)


# ---- what goes wrong


def failing(*places: tuple[int, str]) -> Callable[[int, str], None]:
    """Clients that fail in some rounds."""

    def before(round: int, client: str) -> None:
        if (round, client) in places:
            raise RuntimeError("out of order")

    return before


@pytest.mark.usefixtures("exact")
def test_target_of_the_clients_that_replied(run: Federate) -> None:
    done = run({"rounds": 2}, before=failing((1, "1")))
    assert done.rows[2]["participants"] == ["0", "1", "2"]
    answers = [unpack(done.sent[1, client]["features"]) for client in "02"]
    expected = torch.stack([a @ a.T for a in answers]).mean(0)
    target = unpack(done.received[2, "1"]["target"])
    torch.testing.assert_close(target @ target.T, expected, rtol=1e-4, atol=1e-5)


def test_no_target_after_a_lost_round(run: Federate) -> None:
    done = run({"rounds": 4}, before=failing(*((2, client) for client in "012")))
    assert [len(row["failures"]) for row in done.rows] == [0, 0, 3, 0, 0, 0]
    assert "target" not in done.received[3, "0"]
    assert "eta" not in done.values[3, "0"]
    assert "target" in done.received[4, "0"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"public-samples": 0}, "no public dataset, but the method needs it: set public-samples"),
        ({"public-samples": 5}, "the public dataset has 5 examples, but at least 8"),
    ],
)
def test_too_small_public_dataset(settings: dict[str, Any], message: str, run: Federate, tmp_path: Path) -> None:
    with pytest.raises(FedhetError, match=message):
        run(settings)
    assert len(read_history(tmp_path / "run")) <= 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


PUBLIC = torch.randn(20, 4, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("settings", [{"public": PUBLIC}, {"public": PUBLIC, "public_samples": 30}, {"dataset": "own"}])
def test_train_union_with_other_data(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="train-union takes the public examples from the training examples"):
        FedHeNN(rad_source="train-union", **settings)


class Read(nn.Sequential):
    """A network whose forward reads the weights of its head, and does not call it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(self[1](self[0](inputs)), self[2].weight, self[2].bias)


def test_a_head_that_is_not_called_is_refused_before_training(run: Federate) -> None:
    with pytest.raises(FedhetError, match=r"no client can take part:\n.*did not compute the input of head '2' of Read"):
        run({}, model=lambda client: Read(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10)))


def test_train_union_of_own_data(run: Federate) -> None:
    examples = torch.rand(20, 1, 8, 8), torch.arange(20) % 2
    with pytest.raises(FedhetError, match="fedhenn.rad-source = train-union takes .* must be of a configured data set"):
        run(
            {"fedhenn.rad-source": "train-union", "public-samples": 0},
            data=lambda client: {"train": examples, "test": examples},
            model=lambda client: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)),
        )


def test_a_continued_run_says_which_round_has_no_target(caplog: pytest.LogCaptureFixture) -> None:
    """Clients send nothing for a round after the last one."""
    settings = {key.replace("fedhenn.", "").replace("-", "_"): value for key, value in TINY.items() if key != "method"}
    strategy: Any = FedHeNN(**settings)
    grid = LocalGrid(make_client_app(), 3)
    strategy.start(grid, num_rounds=2)
    assert "no target" not in caplog.text
    strategy.state = strategy.state
    strategy.start(grid, num_rounds=4)
    assert [line[:26] for line in caplog.messages if "no target" in line] == ["round 3 has no target: the"]


@pytest.mark.parametrize("row", [-1, 10])
def test_rows_beyond_the_public_dataset(row: int) -> None:
    with pytest.raises(WireError, match="rows of the public dataset that are not distinct numbers from 0 to"):
        public_rows({"rows": np.array([0, row])}, torch.zeros(10, 4))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("features", torch.full((8, 3), 1e10)),
        ("features", torch.zeros(8, 0)),
        ("posteriors", torch.full((8, 3), 0.5)),
        ("scores", torch.zeros(7, 3)),
    ],
)
def test_values_of_public_examples_that_no_target_can_use(name: str, values: Tensor) -> None:
    """Such a reply counts as failed; in the target, it would end the run of two clients."""
    reply: Any = SimpleNamespace(arrays={name: targets.pack(values)})
    with pytest.raises(WireError, match=f"array {name} cannot be used"):
        packed_rows(reply, name, rows=8)
