"""Several threads that use one multitude, as in a web server."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import multitudes as mt
from multitudes.networks.calls import one_thread, plain_attention
from tests.zoo import cases, drawing_cases

THREADS, INPUTS = 4, 14


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    """Threads that take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


CASES = [("deep_ensemble", False), ("batch_ensemble", True), ("masksembles", False), ("mimo", False)]
CASES += [("mc_dropout", True), ("patched", False)]


@pytest.mark.parametrize(("method", "training"), CASES)
def test_threads_get_the_same_predictions_as_one_thread(method: str, training: bool) -> None:
    drawing = method in drawing_cases.LEARNING
    net = drawing_cases.build(method, "mlp") if drawing else cases.build(method, cases.NETWORKS["mlp"].model(), "mlp")
    net.train(training)
    inputs = [cases.NETWORKS["mlp"].batch(1 + i % 7, seed=i)[0] for i in range(INPUTS)]
    options = {"draws": 3, "seed": 1} if drawing else {}
    wanted = [net.predict(x, **options).predictions for x in inputs]

    def largest_error(_: int) -> float:
        pairs = zip(inputs, wanted, strict=True)
        errors = [net.predict(x, **options).predictions - want for x, want in pairs]
        pairs = zip(inputs[-4:], wanted[-4:], strict=True)
        errors += [mt.predict(net, [x], progress=False, **options).predictions - want for x, want in pairs]
        return max(float(error.abs().max()) for error in errors)

    with ThreadPoolExecutor(THREADS) as pool:
        assert max(pool.map(largest_error, range(THREADS))) < 1e-5
    assert net.training == training and net.network.training == training


class Fused(TorchDispatchMode):
    """Counts the calls of torch's fused attention in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.endswith(("_transformer_encoder_layer_fwd", "_native_multi_head_attention"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["layer", "attention"])
def test_plain_attention_does_not_affect_other_threads(kind: str) -> None:
    layer: Any = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)

    @torch.no_grad()
    def fused() -> int:
        with Fused() as calls:
            layer(x) if kind == "layer" else layer.self_attn(x, x, x)
        return calls.count

    assert fused() == 1
    inside, leave, counts = threading.Event(), threading.Event(), []

    def first() -> None:
        with plain_attention(), plain_attention(layer):
            inside.set()
            leave.wait(10)
            counts.append(fused())

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    assert fused() == 1
    with plain_attention(layer):
        leave.set()
        thread.join()
        assert fused() == 0
    assert counts == [0] and fused() == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_while_a_network_runs_can_run_it() -> None:
    net = mt.deep_ensemble(cases.NETWORKS["mlp"].model(), 2).eval()
    x: Tensor = cases.NETWORKS["mlp"].batch(3)[0]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with one_thread(net.network):
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    child = os.fork()
    if child == 0:
        with one_thread(net.network):
            os._exit(0)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert net.predict(x).predictions.shape[:2] == (2, 3)
