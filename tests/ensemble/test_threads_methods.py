"""Eight threads convert, run, train and predict with eight networks by all methods, and leave nothing behind."""

from __future__ import annotations

import builtins
import copy
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from tests.zoo import cases, drawing_cases
from tests.zoo.cases import NETWORKS

THREADS = ("mlp", "cnn", "resnet", "group_norm", "separable", "transformer", "vit", "tabular")
DRAWING = {**drawing_cases.LEARNING, **drawing_cases.SAMPLED}
METHODS = (*cases.METHODS, *DRAWING)
RUNNERS = ("packed", "vmapped")
"""The runners that deep ensembles are set to, beside their own choice."""


@dataclass
class MethodRun:
    """One method on one network, and everything that came of it."""

    network: str
    method: str
    runner: str = ""
    net: Any = None
    """The multitude as it was converted."""
    found: Any = None
    error: BaseException | None = None

    def convert(self) -> mt.Multitude:
        model, (x, _) = NETWORKS[self.network].build().eval(), NETWORKS[self.network].batch(2)
        if self.method in DRAWING:
            return DRAWING[self.method](model, x, 0)
        net = cases.build(self.method, model, self.network)
        if self.runner:
            net.runner = self.runner
        return net

    def run(self) -> None:
        """Convert, and keep a copy to run again."""
        try:
            net = self.convert()
            self.net = copy.deepcopy(net)
            self.found = results(net, NETWORKS[self.network].batch(6), self.method)
        except BaseException as error:
            self.error = error


def results(net: mt.Multitude, batch: tuple[Tensor, Tensor], method: str) -> dict[str, Tensor]:
    """Predictions, and what a training step makes of the network, where no random numbers are drawn in training."""
    x, y = batch
    options = {"draws": 3, "seed": 1} if method in DRAWING else {}
    with torch.no_grad():
        found = {"forward": net.eval()(x, **options)}
    found["probabilities"] = net.predict(x, **options).probs
    loss = net.train().loss(x, y)
    loss.backward()
    if method in DRAWING or method == "mimo":  # which shuffles its inputs
        assert loss.isfinite()
        return found
    found["loss"] = loss.detach()
    found |= {f"gradient of {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in net.named_buffers()}
    return found | {"predictions after it": net.eval().predict(x).predictions}


def method_runs() -> list[list[MethodRun]]:
    """The method_runs of each thread: each method meets a quarter of the networks."""
    work = []
    for number, network in enumerate(THREADS):
        methods = [method for place, method in enumerate(METHODS) if (place + number) % 4 == 0]
        own = [MethodRun(network, m) for m in methods if m != "tabm" or network in ("mlp", "cnn", "tabular")]
        work.append([*own, MethodRun(network, "deep_ensemble", RUNNERS[number % 2])])
    return work


def process_wide() -> dict[str, Any]:
    """All that threads share: the names of torch's modules and of Python's own, and torch's switches."""
    modules = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "torch" and type(m) is ModuleType}
    held: dict[str, Any] = {**modules, "builtins": builtins, "math": math, "warnings": warnings, "Module": nn.Module}
    names = {f"{name}.{key}": value for name, module in held.items() for key, value in dict(vars(module)).items()}
    switches = torch.backends.cuda
    return names | {
        "filters": list(warnings.filters),
        "flash": switches.flash_sdp_enabled(),
        "efficient": switches.mem_efficient_sdp_enabled(),
        "math kernel": switches.math_sdp_enabled(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def in_threads(functions: list[Callable[[], None]]) -> None:
    """Run functions in threads that take turns a hundred times as often as usual."""
    threads = [threading.Thread(target=function) for function in functions]
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)


@dataclass
class Ran:
    work: list[list[MethodRun]]
    before: dict[str, Any]
    after: dict[str, Any]


@pytest.fixture(scope="module")
def ran() -> Ran:
    """Eight threads at work, after one has done the same: then all is imported, and cached."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for own in method_runs():
            for one in own:
                one.run()
                assert one.error is None, f"{one.method} on {one.network}, alone: {one.error!r}"
        work, before = method_runs(), process_wide()
        in_threads([lambda own=own: [one.run() for one in own] for own in work])  # type: ignore[misc]
        return Ran(work, before, process_wide())


def test_eight_threads_leave_every_name_of_torch_and_of_python_as_it_was(ran: Ran) -> None:
    assert ran.after.keys() == ran.before.keys()
    same = {name: ran.after[name] is value or _equal(ran.after[name], value) for name, value in ran.before.items()}
    assert not [name for name, is_same in same.items() if not is_same]


def _equal(one: Any, other: Any) -> bool:
    """Whether plain values are equal; all others must be the same objects."""
    return isinstance(one, (int, float, str, list, dict)) and type(one) is type(other) and one == other


def test_eight_threads_with_eight_networks_get_what_one_gets(ran: Ran) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = [message for own in ran.work for one in own for message in differences(one)]
    assert not wrong, "\n".join(wrong)


def differences(one: MethodRun) -> Iterator[str]:
    """What differs from the same multitude run by one thread."""
    place = f"{one.method} {one.runner} on {one.network}"
    if one.error is not None:
        yield f"{place}: {type(one.error).__name__}: {one.error}"
        return
    want = results(one.net, NETWORKS[one.network].batch(6), one.method)
    wrong = [name for name in want if name not in one.found or not _close(want[name], one.found[name])]
    if wrong or want.keys() != one.found.keys():
        yield f"{place}: {len(wrong)} of {len(want)} results: {', '.join(wrong[:3])}"


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6)
