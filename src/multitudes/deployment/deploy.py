"""`deploy`: make a trained network as fast as possible on its machine."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from multitudes.base.checks import check_choice, check_count, plural
from multitudes.deployment.cuda_graphs import CudaGraphEngine
from multitudes.deployment.deployed_network import Deployed
from multitudes.deployment.engines import Engine, Reference, TorchEngine, VerifiedEngine
from multitudes.deployment.int8_check import check_quality
from multitudes.deployment.onnx_engine import OnnxEngine
from multitudes.deployment.preparation import check_repeatable, prepare_network
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.predictor import multitude_of
from multitudes.evaluation.calibrate import Calibrated
from multitudes.files.onnx_exporter import check_example
from multitudes.networks.calls import Input, mapped, moved, tensors_in
from multitudes.networks.copies import copied
from multitudes.networks.devices import device_in
from multitudes.networks.stochastic import stochastic_layers
from multitudes.networks.verification import rows_interact

TIMED_SECONDS = 0.02
"""Seconds over which calls are timed."""

FASTER = 0.95
"""Maximum share of the time for a faster engine; a smaller gain may be chance."""

INT8 = 0.5
"""Maximum error of 8-bit predictions for any input; `check_quality` measures their quality."""

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def deploy(
    net: Multitude | Calibrated | nn.Module,
    example: Input,
    *,
    precision: str | None = None,
    batch_sizes: Iterable[int] = (),
    targets: Tensor | None = None,
) -> Deployed:
    """Make a trained network as fast as possible on its machine, with the same `predict`; `net` is not changed.

    Members that share weights are folded into plain networks, unless they share most of their computation; batch norms
    are folded into neighbouring layers. On a GPU, convolutions are fused with the operations after them, or the network
    is compiled, and it is captured as CUDA graphs, for the size of the example, for `batch_sizes`, and for sizes that
    occur twice. On a CPU, ONNX Runtime is used if it is faster. Anything else falls back to torch. Stochastic layers
    keep drawing, and a seed gives the same draws as the network. `precision` is "float32", "float16", "bfloat16" or, on
    a CPU, "int8"; the default is bfloat16 on a GPU and the network's own on a CPU.

    The predictions on the example must match the network's, up to rounding; otherwise this raises. For "int8" the
    example calibrates the value ranges, so it should have a few hundred inputs, and quality must be kept instead:
    accuracy within 0.01 and negative log-likelihood within 0.02 of the network's, measured on `targets` if given, or
    against its own predictions. `summary()` reports what was done, the error of the predictions, and the times before
    and after.

    >>> from multitudes.methods.deep_ensemble import deep_ensemble
    >>> net = deep_ensemble(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), members=4)
    >>> deployed = deploy(net, torch.randn(16, 4))
    >>> deployed.predict(torch.randn(5, 4))
    Predictive(task='classification', members=4, inputs=5, outputs=[3])
    """
    calibration = net.calibration if isinstance(net, Calibrated) else None
    multitude = multitude_of(net.net if isinstance(net, Calibrated) else net)
    device = device_in(multitude)
    before = _allocated_bytes(device)
    dtype = _dtype(precision, multitude, device)
    if not isinstance(batch_sizes, Iterable) or isinstance(batch_sizes, str):
        raise ValueError(f"batch_sizes must be a list of whole numbers, got {batch_sizes!r}")
    sizes = [check_count("batch_sizes", size) for size in batch_sizes]
    check_example(example)
    example = mapped(lambda tensor: tensor.detach().clone(), moved(example, device))
    _check_targets(targets, dtype, example)
    was = copied(multitude).eval()
    by_formula = was.without_draws(was.draws) if stochastic_layers(was.network) else None
    own = was if by_formula is None else by_formula.eval()
    options = {"draws": 2, "seed": 0} if stochastic_layers(own.network) else {}
    with torch.no_grad():
        check_repeatable(own, example, options)
    int8 = dtype == torch.int8
    plain = TorchEngine(own, None if int8 else dtype, example, None if own is was else was)
    reference = Reference(own, plain, options, INT8 if int8 else None)
    quick, rows = prepare_network(own, example, options)
    if device.type == "cuda":
        folded = TorchEngine(quick, dtype, example)
        otherwise = VerifiedEngine(folded, plain, reference) if options else plain
        may_pad = not options and not rows_interact(own.network, own._predictions, example)
        engine: Engine = CudaGraphEngine(folded, otherwise, reference, example, sizes, may_pad)
    else:
        engine = _fastest_on_cpu(quick, plain, reference, example, int8)
    if isinstance(engine, VerifiedEngine) and engine.quick is plain:
        rows = []  # nothing that was done is used
    deployed = Deployed(engine, own, calibration, str(dtype or _weight_dtype(own)).removeprefix("torch."), rows)
    if int8:
        rows += check_quality(
            deployed.predict(example), (net if isinstance(net, Calibrated) else multitude).predict(example), targets
        )
    else:
        draws = (
            {"draws": own.draws} if isinstance(engine, CudaGraphEngine) and options else {}
        )  # as many as its graphs have
        rows += _error_row(*reference.compare(deployed, example, **draws))
    rows += _time_row(was, deployed, example, {"seed": 0} if options else {})
    if device.type == "cuda":
        del quick
        gc.collect()  # frees activations of trials: Python does not know their size
        rows.append(
            (
                "weights",
                f"{(_allocated_bytes(device) - before) / 2**20:.0f} MiB: its own, in this precision, and folded",
            )
        )
    return deployed


def _allocated_bytes(device: torch.device) -> int:
    """Return the bytes of GPU memory held by tensors."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _check_targets(targets: Tensor | None, dtype: torch.dtype | None, example: Input) -> None:
    rows = len(tensors_in(example)[0])
    if targets is None:
        return
    if dtype != torch.int8:
        raise ValueError("targets are for precision='int8', whose quality they measure")
    if not isinstance(targets, Tensor) or targets.shape[:1] != (rows,):
        got = list(targets.shape) if isinstance(targets, Tensor) else repr(targets)
        raise ValueError(f"targets must be a tensor with one for each of the {rows} rows of example, got {got}")


def _weight_dtype(net: Multitude) -> torch.dtype:
    return next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)


def _dtype(precision: str | None, net: Multitude, device: torch.device) -> torch.dtype | None:
    """Return the requested dtype; None keeps the network's own."""
    own = _weight_dtype(net)
    if precision is None:
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    check_choice("precision", precision, PRECISIONS)
    if precision == "int8" and device.type != "cpu":
        raise ValueError(f"precision='int8' is for networks on the CPU, and this one is on {device}")
    if precision == "int8" and stochastic_layers(net.network):
        raise ValueError("precision='int8' is for networks that draw nothing: pass mt.freeze(net)")
    if precision == "int8" and own != torch.float32:
        raise ValueError(f"precision='int8' is for networks of float32, got one of {own}: pass net.float()")
    return None if PRECISIONS[precision] == own and device.type == "cpu" else PRECISIONS[precision]


def _fastest_on_cpu(quick: Multitude, plain: TorchEngine, reference: Reference, example: Input, int8: bool) -> Engine:
    """Choose the fastest engine without CUDA graphs: ONNX Runtime, torch, or torch with the original network."""
    own = TorchEngine(quick, plain.dtype, example)
    if reference.options or plain.dtype is not None or plain.device.type != "cpu":
        return VerifiedEngine(own, plain, reference)
    engines: dict[str, Engine] = {"was": plain, "torch": own}
    note = ""
    try:
        runtime = OnnxEngine(quick, example, own, int8)
        off, _, bound = reference.compare(runtime, example)
        if off > bound:
            raise ValueError(f"its predictions differ from the network's by {off:.1e} of how much these vary")
        engines["onnx"] = runtime
    except torch.OutOfMemoryError:
        raise
    except (ImportError, ValueError, RuntimeError) as refusal:
        if int8:
            raise ValueError(f"precision='int8' cannot be had here: {refusal}") from refusal
        note = f"ONNX Runtime is not used: {refusal}"
    if int8:
        return VerifiedEngine(runtime, plain, reference)
    times = _median_times({name: partial(engine, example) for name, engine in engines.items()})
    best = min(times, key=lambda name: times[name])
    best = best if times[best] < FASTER * times["was"] else "was"
    if best != "onnx" and not note:
        note = f"ONNX Runtime took {times['onnx'] / times[best]:.2f} x as long"
    return VerifiedEngine(engines[best], plain, reference, note)


# -- rows of the summary ------------------------------------------------------------------------------------


def _error_row(found: float, own: float, bound: float) -> list[tuple[str, str]]:
    """Return the summary's row on the error relative to the network's predictions; raise if it is too large."""
    if not found <= bound:
        raise ValueError(
            f"the deployed predictions differ from the network's on the example by {found:.1e} of how much these vary, "
            f"and rounding alone gives {bound:.1e} at most: pass precision='float32'"
        )
    return [("error", f"{found:.1e} of how much predictions vary; {own:.1e} of the network itself in this precision")]


def _time_row(net: Multitude, deployed: Deployed, example: Input, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary's row on the times before and after deployment, measured in turns."""
    with torch.no_grad():
        times = _median_times({"was": lambda: net(example, **options), "is": lambda: deployed(example, **options)})
    was, now = times["was"], times["is"]
    rows = len(tensors_in(example)[0])
    return [("time", f"{now:.3g} ms for {plural(rows, 'row')}; {was:.3g} ms as it was, {now / was:.2f} x")]


def _median_times(functions: dict[str, Callable[[], Any]], turns: int = 5) -> dict[str, float]:
    """Return the median milliseconds per call of each function."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
            times[name].append(1e3 * timer.blocked_autorange(min_run_time=TIMED_SECONDS).median)
    return {name: statistics.median(each) for name, each in times.items()}
