"""Networks deployed on a GPU: graphs for every size of batch, whose predictions are the network's."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.deployment import cuda_graphs as graphs
from multitudes.deployment.cuda_capture import capturing
from multitudes.deployment.deploy import deploy
from tests.deployment.test_deploy import Branching, OfAnySize, trained_mlp
from tests.zoo import cases, drawing_cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


BOUNDS = {"bfloat16": 0.05, "float16": 0.01, "float32": 0.01}


def off(got: Tensor, want: Tensor) -> float:
    spread = want - want.mean((1, 2), keepdim=True)
    return float(((got.float() - want.float()).flatten(1).norm(dim=1) / spread.flatten(1).norm(dim=1)).max())


@pytest.mark.parametrize("precision", list(BOUNDS))
@pytest.mark.parametrize("method", list(cases.METHODS))
def test_deployed_members_predict_as_the_network_does(method: str, precision: str) -> None:
    network = {"tabm": "mlp", "heads": "cnn", "lora": "separable"}.get(method, "resnet")
    case = cases.NETWORKS[network]
    net = cases.build(method, case.model(), network, 4).cuda().eval()
    deployed = deploy(net, case.batch(16)[0].cuda(), precision=precision)
    for size in (1, 3, 3, 16, 40, 700):
        x = case.batch(size, seed=size)[0]
        with torch.no_grad():
            want = net(x.cuda())
        assert off(deployed(x), want) < BOUNDS[precision] * (1 if size > 3 else 4)  # of few rows, by chance more
    assert "CUDA graphs" in deployed.summary() and "none" not in deployed.summary()


def test_transformers_are_compiled_and_captured() -> None:
    torch.manual_seed(0)
    net = mt.packed(mt.models.vit(depth=2, width=64, heads=4), 4, 2, example=torch.zeros(2, 3, 32, 32)).cuda().eval()
    deployed = deploy(net, torch.randn(32, 3, 32, 32, device="cuda"))
    x = torch.randn(20, 3, 32, 32, device="cuda")
    with torch.no_grad():
        assert off(deployed(x), net(x)) < 0.1
    assert "compiled" in deployed.summary() and "of 32" in deployed.summary()


@pytest.mark.parametrize("method", ["mc_dropout", "drop_connect", "patched", "variance", "laplace"])
@pytest.mark.parametrize("precision", list(BOUNDS))
@torch.no_grad()
def test_draws_go_on_with_their_seeds(method: str, precision: str) -> None:
    net = drawing_cases.build(method, "resnet").cuda().eval()
    net.draws = 6
    deployed = deploy(net, cases.NETWORKS["resnet"].batch(8)[0].cuda(), precision=precision)
    assert "8 (x 6 draws)" in deployed.summary()
    for size, options in ((8, {}), (8, {}), (3, {}), (3, {}), (8, {"draws": 5}), (8, {"draws": 5}), (700, {})):
        x = cases.NETWORKS["resnet"].batch(size, seed=size)[0].cuda()
        got, want = deployed(x, seed=size, **options), net(x, seed=size, **options)
        bound = BOUNDS[precision] * (1 if size > 3 else 4)
        assert off(got, want) < bound
        assert off(deployed(x, seed=size, **options), want) < bound < off(deployed(x, seed=0, **options), want)
    assert "3 (x 6 draws), 8 (x 5 draws)" in deployed.summary()
    torch.manual_seed(3)
    got = deployed(x := cases.NETWORKS["resnet"].batch(8, seed=1)[0].cuda())
    assert not torch.equal(got, deployed(x))
    torch.manual_seed(3)
    assert off(got, net(x)) < BOUNDS[precision]
    torch.testing.assert_close(deployed(x, draws=0), net(x, draws=0), rtol=0.1, atol=0.1)


@torch.no_grad()
def test_members_that_draw_have_graphs() -> None:
    net = mt.deep_ensemble(drawing_cases.build("mc_dropout", "cnn"), 3).cuda().eval()
    net.draws = 4
    x = cases.NETWORKS["cnn"].batch(8)[0].cuda()
    deployed = deploy(net, x, precision="float32")
    assert "8 (x 4 draws)" in deployed.summary()
    assert off(deployed(x, seed=2), net(x, seed=2)) < 0.01


@torch.no_grad()
def test_draws_without_shared_computation_run_without_graphs() -> None:
    net = drawing_cases.build("swag", "mlp").cuda().eval()
    x = cases.NETWORKS["mlp"].batch(8)[0].cuda()
    deployed = deploy(net, x, precision="float32")
    assert "CUDA graphs  none: its draws share no computation" in deployed.summary()
    assert off(deployed(x, seed=2), net(x, seed=2)) < 0.01


def test_a_capture_that_fails_leaves_random_numbers_memory_and_stream_as_they_were() -> None:
    stream = torch.cuda.current_stream()
    for _ in range(2):
        torch.cuda.manual_seed(0)
        want = torch.randn(4, device="cuda")
        torch.cuda.manual_seed(0)
        with (
            pytest.raises(RuntimeError),
            capturing(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()),
        ):
            torch.ones(3, device="cuda").sum().item()
        assert torch.cuda.current_stream() == stream
        assert torch.equal(torch.randn(4, device="cuda"), want)
        with pytest.raises(ZeroDivisionError), capturing(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()):
            raise ZeroDivisionError
        assert torch.cuda.current_stream() == stream
        torch.randn(4, device="cuda")
    graph, x = torch.cuda.CUDAGraph(), torch.ones(3, device="cuda")
    with capturing(graph, torch.cuda.graph_pool_handle()):
        y = 2 * x
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [8, 8, 8]


@pytest.mark.parametrize("kind", ["item", "nonzero", "copies"])
def test_what_waits_for_values_has_no_graph_and_spoils_nothing(kind: str) -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            if kind == "item":
                return y * (1 + float(y.sum() > 1e9))
            if kind == "nonzero":
                return y + y[y > 0].sum() * 0
            return y + torch.arange(3.0).to(y.device)

    model = Waits().cuda().eval()
    deployed = deploy(model, torch.randn(8, 4).cuda(), precision="float32")
    assert ("CUDA graphs  none" in deployed.summary()) == (kind != "copies")  # which is of a constant
    for _ in range(3):
        x = torch.randn(8, 4, device="cuda")
        torch.testing.assert_close(deployed(x)[0], model(x), rtol=1e-2, atol=1e-2)


def test_code_that_looks_at_values_has_no_graph_and_is_right() -> None:
    model = Branching().cuda().eval()
    deployed = deploy(model, torch.ones(3, 4).cuda(), precision="float32")
    for x in (torch.ones(3, 4), -torch.ones(3, 4)):
        torch.testing.assert_close(deployed(x)[0], model(x.cuda()), rtol=1e-2, atol=1e-2)
    assert "CUDA graphs  none" in deployed.summary()


def test_other_sizes_get_graphs_when_they_come_again_and_no_more_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    net = mt.deep_ensemble(OfAnySize(), 2).cuda().eval()
    deployed = deploy(net, torch.randn(4, 3, 8, 8, device="cuda"), batch_sizes=[2], precision="float32")
    for _ in range(3):
        for side in (8, 10, 12, 14):
            x = torch.randn(4, 3, side, side, device="cuda")
            with torch.no_grad():
                assert off(deployed(x), net(x)) < 0.01
    made = [graph for graph in deployed._engine.graphs.values() if graph is not None]  # type: ignore[attr-defined]
    assert len(made) == 3


def test_threads_with_streams_of_their_own_get_their_own_answers() -> None:
    model = trained_mlp().cuda()
    deployed = deploy(model, torch.randn(64, 4).cuda(), precision="float32")
    wrong: list[int] = []

    def ask(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            x = torch.full((64, 4), float(number), device="cuda")
            want = model(x)
            for _ in range(50):
                got = deployed(x)[0]
                torch.cuda.current_stream().synchronize()
                if not torch.allclose(got, want, rtol=1e-2, atol=1e-2):
                    wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_batches_whose_rows_see_each_other_are_not_padded() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0))

    model = Centred().cuda().eval()
    deployed = deploy(model, torch.randn(8, 4).cuda(), precision="float32")
    for size in (3, 5, 5, 5, 8, 600):
        x = torch.randn(size, 4, device="cuda")
        torch.testing.assert_close(deployed(x)[0], model(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("runner", ["packed", "loop", "vmapped"])
@torch.no_grad()
def test_code_that_takes_one_memory_layout_alone_is_right_whichever_way_members_run(runner: str) -> None:
    case = cases.NETWORKS["cnn"]  # which has x.view
    net = cases.build("deep_ensemble", case.model(), "cnn").cuda().eval()
    deployed = deploy(net, case.batch(16)[0].cuda(), precision="float32")
    plain = deployed._engine.otherwise  # type: ignore[attr-defined]
    plain.net.runner = runner
    x = case.batch(600, seed=1)[0].cuda()
    assert off(plain(x), net(x)) < 0.01
