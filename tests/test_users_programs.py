"""Programs as users write them, with random labels: at chance, with equal numbers however they are run."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from PIL import Image
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from torchvision import datasets, transforms

import fedhet
from fedhet.config import configuration
from fedhet.engines.running import run_locally
from fedhet.flower.messages import read_request
from fedhet.results.history import read_history
from fedhet.server.app import serve

CLIENTS, EACH, CLASSES = 3, 80, 4
G = torch.Generator().manual_seed(7)
INPUTS, LABELS = torch.randn(CLIENTS * EACH, 12, generator=G), torch.randint(CLASSES, (CLIENTS * EACH,), generator=G)
MAPS = torch.randint(CLASSES, (CLIENTS * EACH, 2, 2), generator=G)
BACKBONE = nn.Sequential(nn.Linear(12, 64), nn.ReLU())
for each in BACKBONE.parameters():  # as of a file, the same in every process
    nn.init.normal_(each, std=0.3, generator=G)
SETTINGS = {
    **{"preset": "", "method": "local", "clients": CLIENTS, "rounds": 2, "local-epochs": 8, "learning-rate": 0.2},
    **{"momentum": 0.9, "report": False},
}


def mine(partition_id: int) -> torch.Tensor:
    return torch.arange(partition_id, CLIENTS * EACH, CLIENTS)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def fine_tuned(client: Any) -> nn.Module:
    return nn.Sequential(BACKBONE, nn.Linear(64, CLASSES))


def segmenting() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Conv2d(64, CLASSES, 1))


def load_data(partition_id: int, num_partitions: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """A tutorial of Flower's: an unseeded split, loaders that shuffle."""
    rows = mine(partition_id)
    train, test = random_split(TensorDataset(INPUTS[rows], LABELS[rows]), [0.5, 0.5])
    return DataLoader(train, batch_size=10, shuffle=True), DataLoader(test, batch_size=10)


class Partition:
    """Rows as Hugging Face's data sets have them, whose split draws from NumPy's generator."""

    def __init__(self, rows: Any) -> None:
        self.rows = [int(row) for row in rows]
        self.column_names = ["features", "label"]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        if key in self.column_names:
            return [self[place][key] for place in range(len(self))]
        return {"features": INPUTS[self.rows[key]].tolist(), "label": int(LABELS[self.rows[key]])}

    def train_test_split(self, test_size: float) -> dict[str, "Partition"]:
        order = np.random.permutation(self.rows)
        cut = int(len(order) * test_size)
        return {"train": Partition(order[cut:]), "test": Partition(order[:cut])}


def hugging_face(client: Any) -> dict[str, Partition]:
    return Partition(mine(client.partition_id)).train_test_split(test_size=0.5)


def frame(client: Any) -> tuple[Any, Any]:
    """Columns and scikit-learn's unseeded split, as in notebooks of Kaggle."""
    rows = mine(client.partition_id)
    columns = [INPUTS[rows, number].numpy() for number in range(12)]
    x_train, x_test, y_train, y_test = train_test_split(np.stack(columns, 1), LABELS[rows].numpy(), test_size=0.5)
    return (x_train, y_train), (x_test, y_test)


def image_folder(root: Path) -> Callable[[Any], tuple[Any, Any]]:
    """Images in folders of classes, random transforms for training, and a list that Python shuffles."""
    for number, (pixels, label) in enumerate(zip(INPUTS, LABELS, strict=True)):
        (root / str(int(label))).mkdir(parents=True, exist_ok=True)
        array = (pixels.sigmoid() * 255).byte().reshape(2, 2, 3).numpy()
        Image.fromarray(array).save(root / str(int(label)) / f"{number:03}.png")

    def data(client: Any) -> tuple[Any, Any]:
        flipped = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()])
        rows = list(range(client.partition_id, CLIENTS * EACH, CLIENTS))
        random.shuffle(rows)
        train = datasets.ImageFolder(str(root), transform=flipped)
        test = datasets.ImageFolder(str(root), transform=transforms.ToTensor())
        return Subset(train, rows[: EACH // 2]), Subset(test, rows[EACH // 2 :])

    return data


def segmented(client: Any) -> Any:
    rows = mine(client.partition_id)
    return random_split(TensorDataset(INPUTS[rows], MAPS[rows]), [EACH // 2, EACH // 2])


def permuted(client: Any) -> Any:
    rows = np.random.permutation(mine(client.partition_id))
    return [(INPUTS[half], LABELS[half]) for half in np.split(rows, 2)]


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "flower": (mlp, load_data),
    "hugging face": (mlp, hugging_face),
    "kaggle": (mlp, frame),
    "image folder": (mlp, None),
    "segmentation": (segmenting, segmented),
    "fine-tuned": (fine_tuned, permuted),
}


def made(name: str, folder: Path) -> dict[str, Any]:
    """Return a program's functions."""
    model, data = PROGRAMS[name]
    return {"model": model, "data": data or image_folder(folder / "images")}


@pytest.fixture(params=PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def program(name: str, tmp_path: Path) -> dict[str, Any]:
    return made(name, tmp_path)


def numbers(folder: Path) -> tuple[Any, dict[str, bytes]]:
    """Return the history and the networks of a run, without what must differ."""
    rows = [
        {key: row[key] for key in ("participants", "received", "trained", "train_loss")} for row in read_history(folder)
    ]
    return rows, {path.name: path.read_bytes() for path in (folder / "models").glob("*.safetensors")}


def resumed(out: Path, program: dict[str, Any], **settings: Any) -> Path:
    fedhet.run({**SETTINGS, **settings, "rounds": 1}, **program, out=out)
    return fedhet.run({"rounds": 2}, **program, resume=out).folder


def test_at_chance_and_equal_when_resumed(program: dict[str, Any], tmp_path: Path) -> None:
    before = [parameter.clone() for parameter in BACKBONE.parameters()]
    done = fedhet.run({**SETTINGS, "workers": 1}, **program, out=tmp_path / "one")
    assert 0.1 < done.summary["personal_accuracy"]["weighted"] < 0.45
    assert numbers(resumed(tmp_path / "resumed", program, workers=1)) == numbers(done.folder)
    assert all(map(torch.equal, before, BACKBONE.parameters())), "the user's network stays"


AVERAGING = {**SETTINGS, "method": "fedrep", "local-epochs": 2, "timeout": 600.0}
"""Bodies are averaged, heads stay, and a round closes the run; with such a timeout, workers start at once."""


def generator_without_seed(client: Any) -> Any:
    rows = np.random.default_rng().permutation(mine(client.partition_id).numpy())
    return [(INPUTS[half], LABELS[half]) for half in np.split(rows, 2)]


SPLITS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda client: load_data(client.partition_id, CLIENTS),
    "numpy": permuted,
    "sklearn": frame,
    "generator": generator_without_seed,
}


def wrapped(split: str) -> ClientApp:
    """A tutorial's ClientApp, whose train function makes its network before, and evaluate after, an unseeded split."""
    app = ClientApp()

    def loaders(context: Context) -> list[DataLoader[Any]]:
        parts = SPLITS[split](SimpleNamespace(partition_id=context.node_config["partition-id"]))
        held = (
            each.dataset if isinstance(each, DataLoader) else TensorDataset(*map(torch.as_tensor, each))
            for each in parts
        )
        return [DataLoader(each, 10, shuffle=number == 0) for number, each in enumerate(held)]

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = mlp()
        model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        optimizer, first = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9), loaders(context)[0]
        order = []
        for inputs, labels in (batch for _ in range(8) for batch in first):
            order.append(inputs[0, 0].item())
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        metrics = MetricRecord({"first": order[0], "num-examples": EACH // 2})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        last, model = loaders(context)[1], mlp()
        model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        right = sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in last)
        metrics = MetricRecord({"eval_acc": right / (EACH // 2), "eval_loss": 1.0, "num-examples": EACH // 2})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return fedhet.wrap(app, mlp)


@pytest.mark.parametrize("split", SPLITS)
def test_wrapped_apps_are_at_chance_and_equal_when_resumed(split: str, tmp_path: Path) -> None:
    config = configuration.resolve({**SETTINGS, "method": "lg-fedavg", "dataset": "own", "workers": 1, "rounds": 3})
    run_locally(config, tmp_path / "one", app=wrapped(split))
    rows = read_history(tmp_path / "one")
    assert 0.1 < rows[-1]["trained"]["accuracy"]["mean"] < 0.4
    assert len({row["metrics"]["first"] for row in rows[1:4]}) == 3, "each round has its own order"
    run_locally(config.replace(rounds=1), tmp_path / "resumed", app=wrapped(split))
    run_locally(config, tmp_path / "resumed", app=wrapped(split), resume=True)
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "one")


@pytest.mark.long
def test_wrapped_apps_are_equal_however_they_are_run(on_ray: Path, tmp_path: Path) -> None:
    config = configuration.resolve({**AVERAGING, "dataset": "own", "seed": len(PROGRAMS)})
    for workers in (1, 3):
        run_locally(config.replace(workers=workers), tmp_path / f"{workers}", app=wrapped("torch"))
        assert numbers(tmp_path / f"{workers}") == numbers(on_ray / "wrapped")


class Chosen(ClientApp):
    """The client apps of all programs, chosen by the seed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.apps = [*(fedhet.make_client_app(**made(name, folder)) for name in PROGRAMS), wrapped("torch")]

    def __call__(self, message: Message, context: Context) -> Message:
        return self.apps[configuration.parse(read_request(message.content)[1]).seed](message, context)


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all programs' runs on Ray, whose start takes long."""
    folder, app = tmp_path_factory.mktemp("ray"), ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for seed, name in enumerate([*PROGRAMS, "wrapped"]):
            config = configuration.resolve({**AVERAGING, "dataset": "own", "seed": seed})
            serve(config.replace(state_dir=str(folder / f"{seed}")), grid, folder / name, engine="ray")

    run_simulation(app, Chosen(folder), CLIENTS, backend_config={"client_resources": {"num_cpus": 1}})
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS, indirect=True)
def test_equal_however_they_are_run(name: str, program: dict[str, Any], on_ray: Path, tmp_path: Path) -> None:
    settings = {**AVERAGING, "seed": [*PROGRAMS].index(name)}
    one = numbers(fedhet.run({**settings, "workers": 1}, **program, out=tmp_path / "1").folder)
    assert numbers(resumed(tmp_path / "resumed", program, **{**settings, "workers": 3})) == one
    shared = {key: value for key, value in settings.items() if key != "seed"}
    fedhet.compare(["fedrep"], shared, seeds=[settings["seed"]], **program, out=tmp_path / "compared")
    assert numbers(tmp_path / "compared" / f"fedrep-seed{settings['seed']}") == one
    # On Ray, clients are trained one by one.
    alone = fedhet.run({**settings, "workers": 1, "client-batching": "off"}, **program, out=tmp_path / "alone")
    assert numbers(on_ray / name) == numbers(alone.folder)
