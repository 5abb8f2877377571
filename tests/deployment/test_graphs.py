"""The choice of CUDA graphs to keep, tested with functions in place of graphs."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.deployment import cuda_graphs as graphs
from multitudes.deployment.cuda_capture import Plan
from multitudes.deployment.engines import Reference, TorchEngine
from multitudes.deployment.operation_graph import CannotTrace
from tests.zoo import drawing_cases


class StandIn:
    """A function with a fixed number of rows, like a graph."""

    nbytes = 0

    def __init__(self, plain: TorchEngine, x: Tensor, draws: int) -> None:
        self.plain, self.rows, self.draws = plain, len(x), draws
        self.plan = Plan(plain, "", (), [])

    def __call__(self, x: Tensor, rows: int, seed: int | None = None) -> Tensor:
        assert rows == len(x) <= self.rows
        padded = x[torch.arange(self.rows) % rows]
        options = {"draws": self.draws, "seed": seed} if self.draws else {}
        return self.plain(padded, **options)[:, :rows]

    def size(self) -> str:
        return str(self.rows)


class Done:
    def record(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Replace captures on a GPU; count them by rows and draws."""
    made: Counter[tuple[int, int]] = Counter()

    def capture(plain: TorchEngine, x: Tensor, batched: Any, pool: Any, like: Any, draws: int) -> StandIn:
        made[len(x), draws] += 1
        if len(x) == 13:
            raise CannotTrace("it is a baker's dozen")
        return StandIn(plain, x, draws)

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Event", Done)
    monkeypatch.setattr(torch.cuda, "current_stream", Done)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return made


def engine(may_pad: bool, sizes: tuple[int, ...] = ()) -> tuple[graphs.CudaGraphEngine, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.randn(4, 4)
    plain = TorchEngine(mt.Multitude(model), None, x)
    return graphs.CudaGraphEngine(plain, plain, Reference(plain.net, plain, {}), x, sizes, may_pad), model


def predict(quick: graphs.CudaGraphEngine, model: nn.Module, rows: int, times: int = 1) -> None:
    for _ in range(times):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(quick(x)[0], model(x).detach())


def kept(quick: graphs.CudaGraphEngine) -> set[int]:
    return {graph.rows for graph in quick.graphs.values() if graph is not None}


def test_frequent_sizes_replace_rare_ones(captured: Counter[tuple[int, int]]) -> None:
    quick, model = engine(may_pad=False)
    for rows, times, expected in (
        (5, 6, {4, 5}), (6, 6, {4, 5, 6}),
        (7, 2, {5, 6, 7}),  # the example's size never occurred
        (8, 4, {5, 6, 7}), (8, 1, {5, 6, 8}),
    ):  # fmt: skip
        predict(quick, model, rows, times)
        assert kept(quick) == expected
    assert set(captured.values()) == {1}
    captured.clear()
    quick, model = engine(may_pad=False)
    for _ in range(30):
        for rows in (4, 5, 6, 7, 8, 9):  # equally frequent sizes do not replace each other
            predict(quick, model, rows)
    assert captured.total() <= 4 and len(kept(quick)) == 3


def test_a_failed_capture_is_not_repeated(captured: Counter[tuple[int, int]]) -> None:
    quick, model = engine(may_pad=False)
    predict(quick, model, 13, 5)
    assert captured[13, 0] == 1 and quick.reasons() == ["it is a baker's dozen"]


def test_batches_are_padded_to_powers_of_two_or_requested_sizes(captured: Counter[tuple[int, int]]) -> None:
    quick, model = engine(may_pad=True, sizes=(24,))
    for rows in (1, 3, 4, 17, 20, 24, 900):
        predict(quick, model, rows, 2)
    assert set(captured) <= {(4, 0), (24, 0), (1, 0), (512, 0)}


def test_counts_of_many_shapes_are_dropped(captured: Counter[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_SHAPES", 10)
    quick, model = engine(may_pad=False)
    for rows in range(1, 60):
        predict(quick, model, rows)
    predict(quick, model, 13, 2)
    assert max(len(quick.seen), len(quick.graphs), len(quick.agreed)) <= 12 and 4 in kept(quick)


def test_each_number_of_draws_has_a_graph(captured: Counter[tuple[int, int]]) -> None:
    net = drawing_cases.build("mc_dropout", "mlp").eval()
    net.draws = 3
    x = torch.randn(5, 6)
    plain = TorchEngine(net, None, x)
    quick = graphs.CudaGraphEngine(plain, plain, Reference(net, plain, {"draws": 2, "seed": 0}), x, (), False)
    options: list[dict[str, Any]] = [{"seed": 1}, {"seed": 1, "draws": 4}, {"seed": 2, "draws": 4}, {"draws": 0}]
    for each in (*options, {"seed": 3, "memory": "1GB"}):
        torch.testing.assert_close(quick(x, **each), net(x, **each).detach())
    assert dict(captured) == {(5, 3): 1, (5, 4): 1}
