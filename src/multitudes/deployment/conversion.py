"""`deploy`: a trained network becomes one that answers as fast as its machine can."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, moved, tensors_in, tile
from multitudes.core.checks import check_choice, check_count, plural
from multitudes.core.copying import copied
from multitudes.core.devices import milliseconds
from multitudes.core.draws.adaptive import answers_apart
from multitudes.core.draws.stochastic import stochastic_layers
from multitudes.core.multitude import Multitude, evaluating
from multitudes.core.predictor import multitude_of
from multitudes.deployment.deployed import Deployed
from multitudes.deployment.engines import Engine, Plain, Proven, Reference
from multitudes.deployment.graphs import Graphs
from multitudes.deployment.onnx_engine import OnnxRuntime
from multitudes.deployment.preparing import check_repeats, prepared
from multitudes.deployment.quality import check_quality
from multitudes.evaluation.calibrate import Calibrated

__all__ = ["deploy"]

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def deploy(
    net: Multitude | Calibrated | nn.Module,
    example: Input,
    *,
    precision: str | None = None,
    batch_sizes: Iterable[int] = (),
    targets: Tensor | None = None,
) -> Deployed:
    """A trained network that answers as fast as its machine can, with the same `predict`; `net` is left as it was.

    Members that share weights are folded into plain networks, unless they share most of what they compute; batch norms
    become part of the layers beside them. On a GPU convolutions are fused with what comes after them, or the network is
    compiled, and all of it captured as CUDA graphs, for the size of the example, for `batch_sizes`, and for sizes that
    come twice. On a CPU it is run by ONNX Runtime where that is faster. What cannot be done so is left to torch, and
    layers that draw go on drawing. `precision` is "float32", "float16", "bfloat16" or, on a CPU, "int8"; by default
    bfloat16 on a GPU and the network's own on a CPU.

    The predictions must be those of the network on the example, up to the rounding of the precision; if they are not,
    that is an error. For "int8" the example is what the ranges of values are taken from, so that it should be a few
    hundred inputs, and quality is what must stay: accuracy within 0.01 and negative log-likelihood within 0.02 of the
    network's, on `targets` where they are given, or against its own predictions. `summary()` says what was done, how
    far the predictions are off, and the times before and after.

    >>> from multitudes.methods.deep_ensemble import deep_ensemble
    >>> net = deep_ensemble(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), members=4)
    >>> deployed = deploy(net, torch.randn(16, 4))
    >>> deployed.predict(torch.randn(5, 4))
    Predictive(task='classification', members=4, inputs=5, outputs=[3])
    """
    calibration = net.calibration if isinstance(net, Calibrated) else None
    multitude = multitude_of(net.net if isinstance(net, Calibrated) else net)
    device = next((parameter.device for parameter in multitude.parameters()), torch.device("cpu"))
    dtype = _dtype(precision, multitude, device)
    sizes = [check_count("batch_sizes", size) for size in batch_sizes]
    example = _example(example, device)
    own = copied(multitude).eval()
    by_formula = own.without_draws(own.draws) if stochastic_layers(own.network) else None
    own = own if by_formula is None else by_formula.eval()
    options = {"draws": 2, "seed": 0} if stochastic_layers(own.network) else {}
    with torch.no_grad():
        check_repeats(own, example, options)
        plain = Plain(own, own(example, **options).dtype if dtype == torch.int8 else dtype, example)
    reference = Reference(own, plain, options)
    quick, rows = prepared(own, example, options)
    if device.type == "cuda" and not options:
        apart = _rows_apart(own, example)
        engine: Engine = Graphs(Plain(quick, dtype, example), plain, reference, example, sizes, apart)
    else:
        engine = _by_libraries(quick, plain, reference, example, dtype == torch.int8)
    deployed = Deployed(engine, own, calibration, str(dtype).removeprefix("torch."), rows)
    if dtype == torch.int8:
        rows += check_quality(deployed.predict(example), _was(net, multitude).predict(example), targets)
    else:
        rows += _proven(*reference.off(deployed, example))
    rows += _times(multitude, deployed, example)
    return deployed


def _was(net: Any, multitude: Multitude) -> Any:
    return net if isinstance(net, Calibrated) else multitude


def _example(example: Input, device: torch.device) -> Input:
    tensors = tensors_in(example)
    if not tensors or not tensors[0].dim() or not len(tensors[0]):
        raise ValueError("example must be one batch of inputs, of one input at least")
    return moved(example, device)


def _dtype(precision: str | None, net: Multitude, device: torch.device) -> torch.dtype:
    own = next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)
    if precision is None:
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else own
    check_choice("precision", precision, PRECISIONS)
    if precision == "int8" and device.type != "cpu":
        raise ValueError(f"precision='int8' is for networks on the CPU, and this one is on {device}")
    if precision == "int8" and stochastic_layers(net.network):
        raise ValueError("precision='int8' is for networks that draw nothing: pass mt.freeze(net)")
    return PRECISIONS[precision]


def _rows_apart(net: Multitude, example: Input) -> bool:
    """Whether a row's prediction does not depend on the other rows, so that a batch may be padded."""
    twice = tile(example, 2) if len(tensors_in(example)[0]) == 1 else example
    return answers_apart(net, twice)


def _by_libraries(quick: Multitude, plain: Plain, reference: Reference, example: Input, int8: bool) -> Engine:
    """What runs a network without CUDA graphs: ONNX Runtime where that can and is faster, and torch elsewhere."""
    draws = bool(reference.options)
    own = Plain(quick, plain.dtype, example)
    if draws or plain.dtype not in (torch.float32, torch.float64) or plain.device.type != "cpu":
        return Proven(own, plain, reference, draws)
    try:
        runtime = OnnxRuntime(quick, example, int8)
    except (ImportError, ValueError) as refusal:
        if int8:
            raise
        return Proven(own, plain, reference, draws, f"ONNX Runtime is not used: {refusal}")
    if int8:
        return Proven(runtime, plain, None, draws)
    times = _in_turns({"torch": lambda: own(example), "onnx": lambda: runtime(example)}, plain.device)
    if times["onnx"] < times["torch"]:
        return Proven(runtime, plain, reference, draws)
    return Proven(own, plain, reference, draws, f"ONNX Runtime took {times['onnx'] / times['torch']:.2f} x as long")


# -- what is said of it -------------------------------------------------------------------------------------


def _proven(found: float, own: float, bound: float) -> list[tuple[str, str]]:
    """The row of the summary on the distance from the network's own predictions; an error where it is too large."""
    if not found <= bound:
        raise ValueError(
            f"the deployed predictions differ from the network's on the example by {found:.1e} of how much these vary, "
            f"and rounding alone gives {bound:.1e} at most: pass precision='float32'"
        )
    return [("error", f"{found:.1e} of how much predictions vary; {own:.1e} of the network itself in this precision")]


def _times(multitude: Multitude, deployed: Deployed, example: Input) -> list[tuple[str, str]]:
    """The row of the summary on the times of the network as it was and now, in turns."""

    def before() -> None:
        with evaluating(multitude), torch.no_grad():
            multitude(example)

    times = _in_turns({"was": before, "is": lambda: deployed(example)}, deployed.device)
    was, now = times["was"], times["is"]
    rows = len(tensors_in(example)[0])
    return [("time", f"{now:.3g} ms for {plural(rows, 'row')}; {was:.3g} ms as it was, {now / was:.2f} x")]


def _in_turns(functions: dict[str, Callable[[], Any]], device: torch.device, turns: int = 3) -> dict[str, float]:
    """Median milliseconds of a call of each function."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            times[name].append(_milliseconds(function, device))
    return {name: statistics.median(each) for name, each in times.items()}


def _milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        return milliseconds(function, warmups=1)
    function()
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)
