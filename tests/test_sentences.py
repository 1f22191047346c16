"""A person never reads Python's own words: whatever is wrong, one sentence says what, where, and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedhet
from fedhet.errors import FedhetError
from fedhet.population import ClientInfo


def data(client: ClientInfo) -> Any:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(client.partition_id or 0))
    return (inputs, torch.arange(16) % 2), (inputs[:4], torch.arange(4) % 2)


def many(client: ClientInfo) -> Any:
    return ((torch.ones(9, 4), torch.arange(9)),) * 2


def broken(client: ClientInfo) -> Any:
    return Path("nofile").read_bytes() if client.partition_id == 1 else data(client)


def model(client: ClientInfo) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def run(model: Any = model, data: Any = data, **settings: Any) -> fedhet.RunResult:
    common = {"clients": 2, "workers": 1, "report": False, "method": "fedavg", "rounds": 1}
    if settings.get("method") == "nearest-neighbour":
        del common["rounds"]
    return fedhet.run(common | settings, model=model, data=data, progress=False)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a state-dir that is a file": (lambda: run(**{"state-dir": __file__}), "cannot be a folder to write to"),
    "method ..": (lambda: run(method=".."), "unknown method '..'"),
    "method .x:y": (lambda: run(method=".x:y"), "method = '.x:y': cannot be imported"),
    "methods as one text": (lambda: fedhet.compare("fedhenn"), "methods = 'fedhenn': must be a list, such as"),
    "methods that are no list": (lambda: fedhet.compare(3), "methods = 3: must be a list, such as"),  # type: ignore[arg-type]
    "seeds that are no list": (lambda: fedhet.compare(["local"], seeds=3), "seeds = 3: must be a list, such as"),  # type: ignore[arg-type]
    "seeds of texts": (lambda: fedhet.recommend(seeds=["a"]), "seeds = ['a']: must be a list, such as"),  # type: ignore[list-item]
    "settings of a run": (lambda: fedhet.run(3), "config = 3 is a int: must be"),  # type: ignore[arg-type]
    "settings of a comparison": (lambda: fedhet.compare(["local"], 3), "config = 3 is a int: must be a dict"),  # type: ignore[arg-type]
    "settings of a recommendation": (lambda: fedhet.recommend(3), "config = 3 is a int: must be a dict"),  # type: ignore[arg-type]
    "a folder of another kind": (lambda: fedhet.run("fedavg", out=3), "out = 3 is a int: must be a text"),  # type: ignore[arg-type]
    "an engine of another kind": (lambda: fedhet.run("fedavg", engine=3), "engine = 3 is a int: must be a text"),  # type: ignore[arg-type]
    "a budget without a unit": (lambda: fedhet.recommend(budget="x"), "budget = x: write a number above 0"),
    "a preset that is none": (lambda: fedhet.run("nosuch/preset"), "unknown method or preset 'nosuch/preset'"),
    "resnet18": (lambda: fedhet.run({"architectures": "resnet18"}), "torchvision/resnet18 is torchvision's"),
    "a model that is a name": (lambda: run("mlp"), "model must be a function of a client"),
    "labels beyond outputs": (
        lambda: run(lambda client: nn.Linear(4, 1), many),
        "outputs",
    ),
    "data that raise": (
        lambda: run(data=lambda c: 1 / 0),
        "2 clients (0, 1): the data function raised ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_sentence_says_what_is_wrong(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.chdir(tmp_path)
    attempt, words = WRONG[what]
    with pytest.raises(FedhetError) as raised:
        attempt()
    assert words in str(raised.value)
    assert not any(word in str(raised.value) for word in ("Traceback", "NoneType", "failed: "))


def test_a_client_whose_data_function_raises_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by the number of a node; the file and the line are those of the user's function."""
    monkeypatch.chdir(tmp_path)
    (failure,) = run(data=broken, clients=3).history[0]["failures"]
    assert failure["client"] == "1"
    assert "the data function raised FileNotFoundError" in failure["reason"]
    assert "(test_sentences.py, line " in failure["reason"]


@pytest.mark.parametrize("method", ["nearest-neighbour", "logistic-regression"])
def test_networks_of_bfloat16_are_no_hindrance_to_classical_methods(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"clients": 2, "workers": 1, "report": False, "method": method}
    done = fedhet.run(settings, model=lambda client: model(client).bfloat16(), data=data, progress=False)
    assert done.summary["failures"] == 0
