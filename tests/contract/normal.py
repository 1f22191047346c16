"""The properties that every method must have when nothing goes wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedhet.client.app import make_client_app
from fedhet.engines.workers import WorkerGrid
from fedhet.errors import FedhetError
from fedhet.flower import ArrayRecord, Strategy
from fedhet.flower.grid import LocalGrid
from fedhet.flower.messages import decode_arrays
from fedhet.messages.payload import LEFT, RIGHT
from fedhet.methods import registry
from fedhet.models.registry import _BUILDERS
from fedhet.models.representation import head_name
from fedhet.server import FederatedStrategy
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo
from fedhet.testing import PARTIAL, Case, Run, run
from fedhet.training import vectorised, verification
from fedhet.utils import process
from fedhet.utils.files import read_tensors

from .runs import RecordedRuns, differing, strategy_of


def special_network(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network with running statistics, tied weights and a frozen layer."""
    hidden = [nn.Linear(16, 16) for _ in range(4)]
    hidden[1].weight = hidden[0].weight
    hidden[2].requires_grad_(False)
    body = [layer for each in hidden for layer in (nn.ReLU(), each)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), *body, nn.ReLU(), nn.Linear(16, classes))


def draws_every_round(case: Case) -> bool:
    """Whether clients are drawn round by round; in a method of passes, they are drawn and evaluated once a pass."""
    return strategy_of(case).participants is FederatedStrategy.participants


class NormalRuns:
    """Tests of runs in which nothing goes wrong, and of what goes to disk."""

    def test_all_clients_are_evaluated_when_due(self, case: Case, cache: RecordedRuns) -> None:
        """Every second round, the closing one if the method has one, and the evaluation at the end."""
        done = cache("normal")
        which = done.summary["personal"]
        closing = [5] if case.config(PARTIAL).closing_epochs else []
        final = 5 + len(closing)
        assert [row["round"] for row in done.rows] == [0, 1, 2, 3, 4, *closing, final]
        assert [len(row["participants"]) for row in done.rows] == [0, 3, 3, 3, 3, *[4 for _ in closing], 0]
        evaluated = [row["round"] for row in done.rows if row["received"]]
        at_the_end = [*closing, final]
        assert evaluated == [2, 4, *at_the_end] or (
            not draws_every_round(case) and evaluated[-len(at_the_end) :] == at_the_end
        )
        assert all(done.row(number)["received"]["clients"] == 4 for number in evaluated)
        assert done.rows[-1]["final"]
        assert done.rows[-1][which]["clients"] == 4

    @pytest.mark.slow
    def test_worker_processes_give_the_same_bytes(
        self, case: Case, cache: RecordedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(WorkerGrid, "patience", 0)  # workers from the first message on
        assert run(tmp_path / "run", case.settings(PARTIAL, workers=2)).files == cache("normal").files

    def test_participation_is_the_same_for_all_methods(self, case: Case, cache: RecordedRuns) -> None:
        mine, alone = (
            [row["participants"] for row in RecordedRuns(each, cache.folders)("normal").rows]
            for each in (case, Case("local"))
        )
        closing = bool(case.config(PARTIAL).closing_epochs)
        rounds = (7 if closing else 5) if draws_every_round(case) else 2
        assert mine[:rounds] == alone[:rounds]

    def test_models_of_a_run_are_whole_and_finite(self, case: Case, cache: RecordedRuns) -> None:
        done, config = cache("normal"), case.config(PARTIAL)
        for path in (done.folder / "models").glob("*.safetensors"):
            tensors = read_tensors(path)
            assert tensors is not None
            number = int(path.stem) if path.stem.isdigit() else 0
            model = client_setup.model_of(ClientInfo(path.stem, number, config.clients, config))
            side = registry.client_side(case.method.name)
            head = side.head_of(config) or head_name(side.adapt(model, config))
            assert tensors[f"{head}.weight"].shape[0] == 10
            assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())

    @pytest.mark.parametrize("loop", [pytest.param("own", marks=pytest.mark.slow), "Flower's"])
    def test_it_starts_as_flowers_strategies_do(self, case: Case, loop: str, tmp_path: Path) -> None:
        config = case.config(state_dir=str(tmp_path / "state"))
        strategy = strategy_of(case)(config, public=client_setup.public_dataset(config))
        side = registry.client_side(case.method.name)
        model = side.adapt(client_setup.model_of(ClientInfo("0", 0, 3, config)), config)
        first = ArrayRecord(model.state_dict())
        start = Strategy.start if loop == "Flower's" else strategy_of(case).start
        given = first if loop == "Flower's" or case.traits.shares.averaged else None
        result = start(strategy, LocalGrid(make_client_app(), 3), initial_arrays=given, num_rounds=3, timeout=5)
        assert set(result.train_metrics_clientapp) == {1, 2, 3}
        assert all(_number(metrics["train-loss"]) for metrics in result.train_metrics_clientapp.values())
        evaluated = result.evaluate_metrics_clientapp[3]
        assert 0 <= _number(evaluated["received-accuracy"]) <= 1
        assert strategy.state.round == 3
        if case.traits.whole:
            assert [name for name in result.arrays if name in first] == list(first)
            head = side.head_of(config) or head_name(model)
            assert decode_arrays(result.arrays)[f"{head}.weight"].dtype == np.float32

    @pytest.mark.parametrize("special", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_batches_of_clients_compute_what_each_client_computes(
        self, case: Case, special: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In float64, with missing clients and unequal sizes; weights are sent as float32."""
        monkeypatch.setitem(_BUILDERS, "special", special_network)
        changes = {"architectures": "special"} if special else {}
        unequal: dict[str, Any] = {
            "clients": 8,
            "fraction-train": 0.75,
            "partition": "dirichlet",
            "samples-per-client": 0,
        }
        monkeypatch.setitem(process.STANDARD, "dtype", torch.float64)
        said: set[str] = set()
        monkeypatch.setattr(vectorised, "_said", said)
        verification.VERIFIED.clear()
        try:
            alone, batches = (
                run(tmp_path / size, case.settings(unequal | changes, client_batching=size)) for size in ("off", "4")
            )
        except FedhetError as error:
            if not special or "the client failed" in str(error):
                raise
            pytest.skip(f"the method cannot take such networks: {error}")
        contrast = ("fedhenn.target", "contrast") in case.own  # whose targets have as many columns as took part before
        assert special or contrast or not said, "a batch failed, and its clients were computed one by one"
        assert batches.summary["work"] == alone.summary["work"]
        for mine, other in zip(_tensors(batches), _tensors(alone), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)

    @pytest.mark.slow
    def test_a_clip_norm_that_clips_nothing_changes_nothing(self, case: Case, tmp_path: Path) -> None:
        """Clients have unequal numbers of examples, and share some arrays with few others."""
        if not case.traits.bounded:
            pytest.skip("the method has no clip-norm")
        unequal: dict[str, Any] = {"clients": 4, "rounds": 3, "partition": "dirichlet", "samples-per-client": 0}
        without, loose = (
            run(tmp_path / f"{norm:g}", case.settings(unequal, clip_norm=norm, optimizer="sgd")) for norm in (0.0, 1e9)
        )
        for mine, other in zip(_tensors(loose), _tensors(without), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)

    # ---- on disk and over the wire

    def test_the_state_is_the_same_from_disk(self, case: Case, cache: RecordedRuns, tmp_path: Path) -> None:
        done = cache("normal")
        (name,) = done.checkpoint
        loaded = strategy_of(case).state_class.load(done.folder / "checkpoint" / name)
        assert done.state is not None
        assert type(loaded) is type(done.state)
        assert differing(done.state, loaded) == []
        loaded.save(tmp_path / "checkpoint" / name)
        assert Run(tmp_path).checkpoint == done.checkpoint


def _tensors(done: Run) -> list[dict[str, torch.Tensor]]:
    return [_products(read_tensors(path) or {}) for path in sorted(done.folder.rglob("*.safetensors"))]


def _products(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with the products of low-rank factors, whose signs depend on rounding, in place of the factors."""
    pairs = [(name, name.removesuffix(LEFT) + RIGHT) for name in tensors if name.endswith(LEFT)]
    products = {left.removesuffix(LEFT): tensors.pop(left) @ tensors.pop(right) for left, right in pairs}
    return tensors | products


def _number(value: Any) -> float:
    assert isinstance(value, int | float)
    return float(value)
