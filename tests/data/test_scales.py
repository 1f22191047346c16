"""Scales of inputs: bytes beside values that are not scaled, and values in other units, are refused or named."""

from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedhet
from fedhet.data.reading import LazyInputs
from fedhet.data.scales import BEYOND, BYTES, COLUMN, SIGNED, TARGET, UNIT, check_scales, scales_of
from fedhet.errors import FedhetError
from fedhet.messages import WireError
from fedhet.messages.protocol import scales_in
from fedhet.utils.inputs import Inputs

pytestmark = pytest.mark.usefixtures("home", "no_report")

IMAGES = torch.randint(256, (40, 1, 4, 4), generator=torch.Generator().manual_seed(0)).byte()
LABELS = torch.arange(40) % 3
SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "bytes": lambda images: images,
    "unit": lambda images: images / 255,
    "normalised": lambda images: (images / 255 - 0.5) / 0.25,
    "floats of bytes": lambda images: images.float(),
}
UNLIKE = {
    ("bytes", "normalised"): "are bytes, which are scaled to [0, 1], but",
    ("bytes", "floats of bytes"): "are bytes, which are scaled to [0, 1], but",
    ("unit", "normalised"): "are values in [0, 1], but",
    ("unit", "floats of bytes"): "times as large as",
    ("normalised", "floats of bytes"): "times as large as",
}
"""Pairs of scales, and words that name the difference; `bytes` and `unit` are the same inputs."""


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def run(folder: Path, data: Any, **settings: Any) -> str:
    """Run with two clients, and return the error message or all warnings."""
    given = {"method": "fedavg", "clients": 2, "rounds": 1, "learning-rate": 1e-3, **settings}
    try:
        run = fedhet.run(given, model=network, data=data, out=folder, progress=False)
    except FedhetError as error:
        return str(error)
    return " ".join(run.summary.get("warnings", []))


def part(name: str) -> tuple[Tensor, Tensor]:
    return SCALES[name](IMAGES), LABELS


def by_client(one: str, other: str) -> Callable[[Any], Any]:
    return lambda client: (part((one, other)[client.partition_id]), part((one, other)[client.partition_id]))


def in_parts(one: str, other: str) -> Callable[[Any], Any]:
    return lambda client: (part(one), part(other))


@pytest.mark.parametrize(("one", "other"), UNLIKE)
@pytest.mark.parametrize("data", [by_client, in_parts])
@pytest.mark.parametrize("swapped", [False, True])
def test_other_scales_are_named(tmp_path: Path, one: str, other: str, data: Any, swapped: bool) -> None:
    scales = (other, one) if swapped else (one, other)
    assert UNLIKE[one, other] in run(tmp_path / "run", data(*scales))


@pytest.mark.parametrize("data", [by_client, in_parts])
def test_bytes_are_values_in_the_unit_interval(tmp_path: Path, data: Any) -> None:
    text = run(tmp_path / "run", data("bytes", "unit"))
    assert not any(words in text for words in UNLIKE.values())


def test_clients_that_share_no_layers_may_have_their_own_scales(tmp_path: Path) -> None:
    text = run(tmp_path / "run", by_client("bytes", "normalised"), method="local")
    assert not any(words in text for words in UNLIKE.values())


@pytest.mark.parametrize(("one", "other"), UNLIKE)
@pytest.mark.parametrize("swapped", [False, True])
def test_new_examples_of_another_scale_are_named(tmp_path: Path, one: str, other: str, swapped: bool) -> None:
    old, new = (other, one) if swapped else (one, other)
    run(tmp_path / "run", in_parts(old, old))
    try:
        result = fedhet.evaluate(tmp_path / "run", model=network, data={"test": part(new)})
    except FedhetError as error:
        text = str(error)
    else:
        text = result.warnings[0]
        assert text in " ".join(unescape((tmp_path / "run" / "evaluation.html").read_text()).split())
    assert UNLIKE[one, other] in text
    before = {"start-from": str(tmp_path / "run"), "method": "local"}
    assert UNLIKE[one, other] in run(tmp_path / "next", in_parts(new, new), **before)


@pytest.mark.parametrize(("method", "told"), [("fedavg", True), ("lg-fedavg", True), ("local", False)])
def test_targets_of_another_scale_are_named(tmp_path: Path, method: str, told: bool) -> None:
    def data(client: Any) -> Any:
        inputs = torch.randn(40, 16, generator=torch.Generator().manual_seed(client.partition_id))
        targets = inputs[:, :3] * (1, 100)[client.partition_id]
        return (inputs[:30], targets[:30]), (inputs[30:], targets[30:])

    said = "targets are" in run(tmp_path / "run", data, method=method, **{"local-epochs": 3})
    assert said == told


def test_the_name_of_a_client_stays_in_a_sentence() -> None:
    targets = {f"client {name}'s": {"target 0": (TARGET, size)} for name, size in (("inputs", 1.0), ("b", 100.0))}
    words = "target 0: client b's targets are 100 times as large as client inputs's targets"
    assert check_scales(targets).startswith(words)


def test_scales() -> None:
    table = torch.linspace(-3, 3, 60).view(10, 6)
    inputs = Inputs({"ids": torch.arange(10), "image": IMAGES[:10], "table": table, "unit": table.sigmoid()})
    scales = scales_of(inputs, {})
    assert {name: kind for name, (kind, _) in scales.items()} == {
        **{"inputs.ids": BEYOND, "inputs.image": BYTES},
        **{"inputs.table": SIGNED, "inputs.unit": UNIT},
    }
    assert scales["inputs.ids"][1] == 0
    assert scales_of(table.masked_fill(table == -3, torch.nan), {})["inputs"][0] == SIGNED  # a missing value
    assert scales["inputs.image"][1] == pytest.approx(float((IMAGES[:10] / 255).square().mean().sqrt()))
    columns = torch.tensor([[0, 255, 51], [0, 0, 51], [0, 255, 51], [0, 0, 153]]).byte()
    named = {"columns": ("none", "rare", "value")}
    for table in (columns, columns / 255):
        for least, rare in ((2, 1), (3, 0)):
            scales = scales_of(table, named, least=least)
            sizes = {name: size for name, (kind, size) in scales.items() if kind == COLUMN}
            assert sizes == pytest.approx({"column none": 0, "column rare": rare, "column value": 0.2})
    rows = torch.full((5000, 2), 7.0)
    rows[:100, 1] = 1
    lazy = LazyInputs(TensorDataset(rows, torch.zeros(5000)), None, torch.arange(5000))
    assert scales_of(lazy, {"columns": ("a", "b")})["column b"] == (COLUMN, 7.0)  # the first rows are no sample
    assert {*scales_of(lazy, {})} == {"inputs"}
    prices = torch.tensor([[0.0, 1], [3, 1], [5, -1], [-4, 1e6]])
    assert {name: one for name, one in scales_of(columns, {}, prices).items() if "target" in name} == {
        **{"target 0": (TARGET, 4.0), "target 1": (TARGET, 1.0)},
    }
    assert scales_in("table\tbytes\t0.5") == {"table": (BYTES, 0.5)}
    for damaged in ("table\tbytes", "table\tbytes\tx", "table\tbytes\t1\t1"):
        with pytest.raises(WireError, match="the scales of the client's inputs are damaged"):
            scales_in(damaged)
