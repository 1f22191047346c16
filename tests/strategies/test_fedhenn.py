"""FedHeNN end to end on a few digits: what it reduces to, what it optimises, what each option does, what goes wrong."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet import FedHeNN, make_client_app
from fedhet.algorithms.alignment import linear_cka, packing, procrustes_distance, targets
from fedhet.algorithms.alignment.cka import rbf_kernel
from fedhet.algorithms.alignment.packing import pack, unpack
from fedhet.config import client_setup
from fedhet.config.client_setup import ClientInfo
from fedhet.config.configuration import resolve
from fedhet.data import load
from fedhet.engines.running import run_locally
from fedhet.errors import ConfigError, FedhetError
from fedhet.flower import decode, encode_arrays
from fedhet.messages import Arrays, Payload
from fedhet.methods.options import Config
from fedhet.models.representation import Representation
from fedhet.results.history import Row, read_history
from fedhet.training import read

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
    "fedhenn.probe": 0,
}


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features travel whole, and in float32."""
    monkeypatch.setattr(targets, "ERROR", 0.0)
    monkeypatch.setattr(packing, "DTYPE", "float32")


@dataclass
class Exchange:
    """A message to a client and its answer."""

    kind: str
    client: str
    round: int
    question: str
    sent: Payload
    answered: Payload


@dataclass
class Wire:
    """A Flower mod that keeps all exchanges; `spoil(client, round, reply)` may change a training reply on its way."""

    spoil: Callable[[str, int, Message], None] | None = None
    log: list[Exchange] = field(default_factory=list)

    def __call__(self, message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        client, request = str(context.node_config["partition-id"]), json.loads(message.content["request"]["request"])
        number, question, kind = request["round"], request.get("question", ""), message.metadata.message_type
        reply = call_next(message, context)
        if self.spoil is not None and kind == "train":
            self.spoil(client, number, reply)
        answered = decode(reply.content) if reply.has_content() else Payload()
        self.log.append(Exchange(kind, client, number, question, decode(message.content), answered))
        return reply

    def training(self, round: int) -> dict[str, Exchange]:
        return {e.client: e for e in self.log if e.kind == "train" and e.round == round}

    def asked(self, question: str) -> list[Exchange]:
        return [e for e in self.log if e.question == question]


@dataclass
class Run:
    """A finished run."""

    folder: Path
    config: Config
    wire: Wire

    @property
    def rows(self) -> list[Row]:
        return read_history(self.folder)

    @property
    def public(self) -> Tensor:
        public = client_setup.public_dataset(self.config)
        assert public is not None
        return public.inputs

    def info(self, client: str) -> ClientInfo:
        return ClientInfo(client, int(client), self.config.clients, self.config)

    def state(self, client: str, round: int) -> dict[str, Tensor]:
        """A client's own state after a round; only that of the last two rounds is kept."""
        saved = load_file(self.folder / "state" / "clients" / client / f"{round}.safetensors")
        return {name.removeprefix("model/"): tensor for name, tensor in saved.items()}

    def network(self, client: str, tensors: dict[str, Tensor] | Arrays) -> nn.Module:
        model = client_setup.model_of(self.info(client))
        model.load_state_dict({name: torch.as_tensor(np.array(value)) for name, value in tensors.items()})
        return model

    def phi(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return read(model, inputs, client_setup.dataset_of(self.config).transform, until=Representation(model))


def run(
    folder: Path,
    settings: dict[str, Any] | None = None,
    *,
    model: Callable[[ClientInfo], nn.Module] | None = None,
    data: Callable[[ClientInfo], Any] | None = None,
    spoil: Callable[[str, int, Message], None] | None = None,
) -> Run:
    config, wire = resolve({**TINY, **(settings or {})}, strict=False), Wire(spoil)
    config = config.replace(chosen=frozenset({"clients"}), remarks=())
    run_locally(config, folder, app=make_client_app(model, data, mods=[wire]))
    return Run(folder, config, wire)


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
def test_no_term_is_fedavg_or_local(setting: str, other: str, tmp_path: Path) -> None:
    def model(client: ClientInfo) -> nn.Module:
        return Noisy(24 if setting == "homogeneous" else 16 + 4 * int(client.name))

    expected = run(tmp_path / other, {"method": other}, model=model)
    none = run(tmp_path / "none", {"fedhenn.setting": setting, "fedhenn.eta0": 0.0}, model=model)
    least = run(tmp_path / "least", {"fedhenn.setting": setting, "fedhenn.eta0": 1e-30}, model=model)

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
    [("heterogeneous", "linear"), ("heterogeneous", "rbf"), ("homogeneous", "linear"), ("homogeneous", "procrustes")],
)
def test_round_follows_the_equation(setting: str, kernel: str, tmp_path: Path) -> None:
    eta0, rate = 0.7, 0.2
    done = run(
        tmp_path,
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
    dataset, second = client_setup.dataset_of(done.config), done.wire.training(2)
    rad = done.public[torch.from_numpy(np.array(second["0"].sent.arrays["rad"]["rows"])).long()]
    assert len(rad) == 50
    assert second["0"].sent.values["eta"] == eta0
    h = torch.eye(50, dtype=torch.float64) - 1 / 50

    def k(features: Tensor) -> Tensor:
        features = features.double()
        kernel_ = rbf_kernel(features) if kernel == "rbf" else features @ features.T
        return h @ kernel_ @ h

    peers = {client: done.network(client, done.state(client, 1)) for client in ("0", "1", "2")}
    mean = sum((k(done.phi(model, rad)) / 3 for model in peers.values()), torch.zeros(()))
    for client, exchange in second.items():
        model = peers[client]
        if setting == "homogeneous":
            model = done.network(client, exchange.sent.arrays["model"])
            reference = done.phi(model, rad)
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
        trained = done.network(client, done.state(client, 2))
        change = nn.utils.parameters_to_vector(trained.parameters()).detach() - before
        assert (change - expected).norm() < 1e-4 * expected.norm()
        assert float(distance.detach()) > 1e-4


def test_clients_with_different_labels_align(tmp_path: Path) -> None:
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
    settings = {"rounds": 5, "local-epochs": 4, "public-samples": 0, "fedhenn.probe": 64, "fedhenn.rad-batch": 50}
    done = run(tmp_path / "together", settings, model=model, data=data)
    alone = run(tmp_path / "alone", {**settings, "method": "local"}, model=model, data=data)
    assert not any(row["failures"] for row in done.rows)
    assert not any("public" in exchange.sent.arrays for exchange in done.wire.log)

    def agreement(of: Run) -> float:
        features = []
        for client, labels in label_sets.items():
            network = model(done.info(client))
            network.load_state_dict(load_file(of.folder / "models" / f"{client}.safetensors"))
            assert network.head.out_features == len(labels)
            images, phi = digits.test.inputs.float() / 16, Representation(network)
            features.append(read(network, images, lambda x: x, until=phi))
        return float(np.mean([float(linear_cka(features[i], features[j])) for i, j in ((0, 1), (0, 2), (1, 2))]))

    assert agreement(done) > agreement(alone)


# ---- what its options do


def test_schedule(tmp_path: Path) -> None:
    for schedule, factors in (("sqrt", [0, 1, 2**0.5]), ("linear", [0, 1, 2]), ("constant", [1, 1, 1])):
        own = resolve({**TINY, "fedhenn.eta0": 0.1, "fedhenn.schedule": schedule}).options
        assert [own.eta(round) for round in (1, 2, 3)] == pytest.approx([0.1 * factor for factor in factors])
    done = run(tmp_path, {"rounds": 1, "closing-epochs": 1, "fraction-train": 0.3, "fedhenn.schedule": "linear"})
    assert [len(row["participants"]) for row in done.rows] == [0, 1, 3, 0]
    assert "alignment" not in done.rows[1]["metrics"]
    assert not any("eta" in exchange.sent.values for exchange in done.wire.training(1).values())
    assert [exchange.sent.values["eta"] for exchange in done.wire.training(2).values()] == [0.3] * 3


def test_rad_of_a_round(tmp_path: Path) -> None:
    done = run(tmp_path, {"fedhenn.rad-size": 40})
    rounds = {round: done.wire.training(round) for round in (1, 2, 3)}
    for round in (1, 2):
        asked = rounds[round]["0"].sent.arrays["next-rad"]["rows"]
        assert asked.dtype == np.int32
        assert len(np.unique(asked)) == len(asked) == 40
        assert asked.max() < 96
        for exchange in rounds[round + 1].values():
            np.testing.assert_array_equal(exchange.sent.arrays["rad"]["rows"], asked)
        assert len(unpack(rounds[round]["0"].answered.arrays["features"])) == 40
    assert set(rounds[2]["0"].sent.arrays["rad"]["rows"]) != set(rounds[3]["0"].sent.arrays["rad"]["rows"])


def test_rad_source(tmp_path: Path) -> None:
    held_out, union = run(tmp_path / "one"), run(tmp_path / "two", {"fedhenn.rad-source": "train-union"})
    sent = held_out.wire.asked("handshake")[0].sent.arrays["public"]["inputs"]
    np.testing.assert_array_equal(sent, held_out.public.numpy())
    sent = union.wire.asked("handshake")[0].sent.arrays["public"]["inputs"]
    parts = [client_setup.data_of(union.info(client)).train.inputs for client in ("0", "1", "2")]
    np.testing.assert_array_equal(sent, torch.cat(parts).numpy())


@pytest.mark.parametrize(("batch", "every", "passes"), [(0, 1, [96] * 4), (16, 3, [16] * 2)])
def test_rad_batch_and_rad_every(batch: int, every: int, passes: list[int], tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(Noisy):
        def forward(self, images: Tensor) -> Tensor:
            if self.training:
                seen.append(len(images))
            return super().forward(images)

    settings = {"rounds": 2, "local-epochs": 2, "fedhenn.rad-batch": batch, "fedhenn.rad-every": every}
    run(tmp_path, settings, model=lambda client: Counting())
    assert [rows for rows in seen if rows not in (2, 10)] == passes * 3  # clients, each tried with two examples


def test_rarer_term_has_more_weight(tmp_path: Path) -> None:
    one_step = {"rounds": 2, "batch-size": 20, "fedhenn.rad-batch": 0}
    often = run(tmp_path / "often", {**one_step, "fedhenn.eta0": 0.4})
    rare = run(tmp_path / "rare", {**one_step, "fedhenn.eta0": 0.2, "fedhenn.rad-every": 2})
    for client in ("0", "1", "2"):
        for name, tensor in often.state(client, 2).items():
            torch.testing.assert_close(rare.state(client, 2)[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("exact")
def test_target_is_the_mean_kernel(tmp_path: Path) -> None:
    unlike = {"rounds": 2, "partition": "dirichlet", "samples-per-client": 0, "local-epochs": 0}
    done = run(tmp_path, {**unlike, "fedhenn.rad-batch": 0})
    features = [unpack(exchange.answered.arrays["features"]) for exchange in done.wire.training(1).values()]
    expected = torch.zeros(96, 96)
    for own in features:
        values = own - own.mean(0)
        expected += values @ values.T / 3
    target = unpack(done.wire.training(2)["0"].sent.arrays["target"])
    target = target @ target.T
    torch.testing.assert_close(target, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.usefixtures("exact")
def test_peers_are_the_last_clients(tmp_path: Path) -> None:
    done = run(tmp_path, {"rounds": 3, "fraction-train": 0.3})
    assert not any("model" in e.sent.arrays or "model" in e.answered.arrays for e in done.wire.log)

    def kernel(arrays: Arrays) -> Tensor:
        values = unpack(arrays)
        return values @ values.T

    (sent,) = (e.sent.arrays["target"] for e in done.wire.training(2).values())
    (answer,) = (e.answered.arrays["features"] for e in done.wire.training(1).values())
    torch.testing.assert_close(kernel(sent), kernel(answer), rtol=1e-4, atol=1e-5)


def test_probe(tmp_path: Path) -> None:
    done = run(tmp_path / "with", {"fedhenn.probe": 64, "rounds": 6, "local-epochs": 2})
    found = json.loads((done.folder / "matrices.json").read_text())["cka"]
    assert found["clients"] == ["0", "1", "2"]
    assert found["architectures"] == ["mlp", "cnn", "mlp"]
    for when in ("before", "after"):
        matrix = np.array(found[when])
        np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)
        np.testing.assert_allclose(np.diag(matrix), 1, atol=1e-6)
    networks = [load_file(done.folder / "models" / f"{c}.safetensors") for c in "02"]
    features = [done.phi(done.network(c, tensors), done.public) for c, tensors in zip("02", networks, strict=True)]
    assert found["after"][0][2] == pytest.approx(float(linear_cka(*features)), abs=0.1)
    assert not (run(tmp_path / "without").folder / "matrices.json").exists()


# ---- what goes wrong


def _with_features(reply: Message, features: Arrays) -> None:
    reply.content["features"] = encode_arrays(features)


def _one_row_less(reply: Message) -> None:
    _with_features(reply, pack(torch.randn(95, 4)))


def test_no_target_after_a_lost_round(tmp_path: Path) -> None:
    def spoil(client: str, round: int, reply: Message) -> None:
        if round == 2:
            _one_row_less(reply)

    done = run(tmp_path, {"rounds": 4}, spoil=spoil)
    assert [len(row["failures"]) for row in done.rows] == [0, 0, 3, 0, 0, 0]
    assert "target" not in done.wire.training(3)["0"].sent.arrays
    assert "eta" not in done.wire.training(3)["0"].sent.values
    assert "target" in done.wire.training(4)["0"].sent.arrays


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fedhenn.kernel": "procrustes"}, "it needs fedhenn.setting = 'homogeneous'"),
        ({"fedhenn.rad-batch": 3}, "must be 0 .all rows. or at least 8"),
        ({"fedhenn.rad-size": 4}, "fedhenn.rad-size = 4: must be at least 8"),
        ({"fedhenn.schedule": "cubic"}, "must be one of auto, sqrt, linear, constant"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({**TINY, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"public-samples": 0}, "no public dataset to align on: set public-samples"),
        ({"public-samples": 5}, "the public dataset has 5 examples, and at least 8"),
    ],
)
def test_too_small_public_dataset(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FedhetError, match=message):
        run(tmp_path, settings)
    assert len(read_history(tmp_path)) <= 1
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def own_data(client: ClientInfo) -> dict[str, Any]:
    """Data that are not the configured ones, and a public dataset of them."""
    generator = torch.Generator().manual_seed(int(client.name))
    inputs = torch.randn(24, 4, generator=generator)
    train, test = ((part, part[:, :3].argmax(1)) for part in (inputs[:16], inputs[16:]))
    return {"train": train, "test": test, "public": PUBLIC}


def own_model(client: ClientInfo) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6 + int(client.name)), nn.ReLU(), nn.Linear(6 + int(client.name), 3))


PUBLIC = torch.randn(20, 4, generator=torch.Generator().manual_seed(9))


def test_train_union_with_a_public_dataset() -> None:
    with pytest.raises(
        ConfigError, match="'train-union' draws the alignment examples .* from the clients' training data: leave"
    ):
        FedHeNN(rad_source="train-union", public=PUBLIC)


def test_train_union_with_own_data(tmp_path: Path) -> None:
    settings = {"fedhenn.rad-source": "train-union", "public-samples": 0}
    with pytest.raises(FedhetError, match="clients .*: fedhenn.rad-source = 'train-union' is the union of the"):
        run(tmp_path, settings, model=own_model, data=own_data)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
