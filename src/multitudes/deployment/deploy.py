"""`deploy`: choose and verify the fastest engine for a trained network."""

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
from multitudes.networks.calls import Input, map_tensors, tensors_in, to_device
from multitudes.networks.copies import copied
from multitudes.networks.devices import device_in
from multitudes.networks.stochastic import stochastic_layers
from multitudes.networks.verification import rows_interact

TIMED_SECONDS = 0.02
"""Minimum seconds of a time measurement."""

FASTER = 0.95
"""An engine replaces torch if it takes at most this share of the time; a smaller gain may be chance."""

INT8 = 0.5
"""Maximum error of 8-bit predictions for any input; `check_quality` measures their average quality."""

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def deploy(
    net: Multitude | Calibrated | nn.Module,
    example: Input,
    *,
    precision: str | None = None,
    batch_sizes: Iterable[int] = (),
    targets: Tensor | None = None,
) -> Deployed:
    """Return a fast copy of a trained network with the same `predict`.

    Members that share weights become separate networks, unless they share most of their computation, and batch norms
    are folded into neighboring layers. A GPU then runs CUDA graphs of fused or compiled code, for the batch size of the
    example, for `batch_sizes`, and for sizes that occur twice. A CPU runs ONNX Runtime if it is faster. Everything else
    runs in torch. Layers that draw keep drawing, and a seed gives the same draws as in the network.

    Args:
        net: A multitude, calibrated or not, or a plain network; it does not change.
        example: One batch of inputs. For `"int8"` it also calibrates the ranges of values, so it should have a few
            hundred inputs.
        precision: `"float32"`, `"float16"`, `"bfloat16"` or, on a CPU, `"int8"`; default: bfloat16 on a GPU, the
            network's own precision on a CPU.
        batch_sizes: More batch sizes to prepare for, on a GPU.
        targets: Targets of the example, which measure the quality of `"int8"`; default: the network's own predictions.

    Returns:
        A `Deployed`. Its `summary()` lists the changes, the error of its predictions, and the times before and after.

    Raises:
        ValueError: The predictions on the example differ from the network's by more than rounding; or, for `"int8"`,
            accuracy falls by more than 0.01 or the negative log-likelihood rises by more than 0.02.

    Example:
        >>> from multitudes.methods.deep_ensemble import deep_ensemble
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        >>> deployed = deploy(deep_ensemble(model, members=4), torch.randn(16, 4))
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
    example = map_tensors(lambda tensor: tensor.detach().clone(), to_device(example, device))
    _check_targets(targets, dtype, example)
    original = copied(multitude).eval()
    by_formula = original.without_draws(original.draws) if stochastic_layers(original.network) else None
    base = original if by_formula is None else by_formula.eval()
    options = {"draws": 2, "seed": 0} if stochastic_layers(base.network) else {}
    with torch.no_grad():
        check_repeatable(base, example, options)
    int8 = dtype == torch.int8
    plain = TorchEngine(base, None if int8 else dtype, example, None if base is original else original)
    reference = Reference(base, plain, options, INT8 if int8 else None)
    quick, rows = prepare_network(base, example, options)
    if device.type == "cuda":
        folded = TorchEngine(quick, dtype, example)
        otherwise = VerifiedEngine(folded, plain, reference) if options else plain
        may_pad = not options and not rows_interact(base.network, base._predictions, example)
        engine: Engine = CudaGraphEngine(folded, otherwise, reference, example, sizes, may_pad)
    else:
        engine = _fastest_on_cpu(quick, plain, reference, example, int8)
    if isinstance(engine, VerifiedEngine) and engine.quick is plain:
        rows = []  # the changes are not used
    deployed = Deployed(engine, base, calibration, str(dtype or _weight_dtype(base)).removeprefix("torch."), rows)
    if int8:
        rows += check_quality(
            deployed.predict(example), (net if isinstance(net, Calibrated) else multitude).predict(example), targets
        )
    else:
        draws = {"draws": base.draws} if isinstance(engine, CudaGraphEngine) and options else {}  # as in its graphs
        rows += _error_row(*reference.compare(deployed, example, **draws))
    rows += _time_row(original, deployed, example, {"seed": 0} if options else {})
    if device.type == "cuda":
        del quick
        gc.collect()  # frees the activations of trials
        mebibytes = (_allocated_bytes(device) - before) / 2**20
        rows.append(("weights", f"{mebibytes:.0f} MiB: the network's, cast, and folded"))
    return deployed


def _allocated_bytes(device: torch.device) -> int:
    """Return the GPU memory of all tensors, in bytes."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _check_targets(targets: Tensor | None, dtype: torch.dtype | None, example: Input) -> None:
    rows = len(tensors_in(example)[0])
    if targets is None:
        return
    if dtype != torch.int8:
        raise ValueError("targets need precision='int8', whose quality they measure")
    if not isinstance(targets, Tensor) or targets.shape[:1] != (rows,):
        got = list(targets.shape) if isinstance(targets, Tensor) else repr(targets)
        raise ValueError(f"targets must be a tensor with one target for each of the {rows} rows of example, got {got}")


def _weight_dtype(net: Multitude) -> torch.dtype:
    return next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)


def _dtype(precision: str | None, net: Multitude, device: torch.device) -> torch.dtype | None:
    """Return the dtype to run in; None keeps the network's own."""
    own = _weight_dtype(net)
    if precision is None:
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    check_choice("precision", precision, PRECISIONS)
    if precision == "int8" and device.type != "cpu":
        raise ValueError(f"precision='int8' needs a network on the CPU, got one on {device}")
    if precision == "int8" and stochastic_layers(net.network):
        raise ValueError("precision='int8' needs a network without random draws: pass mt.freeze(net)")
    if precision == "int8" and own != torch.float32:
        raise ValueError(f"precision='int8' needs a network in float32, got {own}: pass net.float()")
    return None if PRECISIONS[precision] == own and device.type == "cpu" else PRECISIONS[precision]


def _fastest_on_cpu(quick: Multitude, plain: TorchEngine, reference: Reference, example: Input, int8: bool) -> Engine:
    """Return the fastest engine without CUDA graphs: ONNX Runtime, torch, or torch with the original network."""
    own = TorchEngine(quick, plain.dtype, example)
    if reference.options or plain.dtype is not None or plain.device.type != "cpu":
        return VerifiedEngine(own, plain, reference)
    engines: dict[str, Engine] = {"original": plain, "torch": own}
    note = ""
    try:
        runtime = OnnxEngine(quick, example, own, int8)
        off, _, bound = reference.compare(runtime, example)
        if off > bound:
            raise ValueError(f"its predictions differ from the network's by {off:.1e} of their variation")
        engines["onnx"] = runtime
    except torch.OutOfMemoryError:
        raise
    except (ImportError, ValueError, RuntimeError) as refusal:
        if int8:
            raise ValueError(f"precision='int8' is not possible for this network: {refusal}") from refusal
        note = f"ONNX Runtime is not used: {refusal}"
    if int8:
        return VerifiedEngine(runtime, plain, reference)
    times = _median_times({name: partial(engine, example) for name, engine in engines.items()})
    best = min(times, key=lambda name: times[name])
    best = best if times[best] < FASTER * times["original"] else "original"
    if best != "onnx" and not note:
        note = f"ONNX Runtime is not used: it takes {times['onnx'] / times[best]:.2f} x as long"
    return VerifiedEngine(engines[best], plain, reference, note)


# -- rows of the summary ------------------------------------------------------------------------------------


def _error_row(found: float, own: float, bound: float) -> list[tuple[str, str]]:
    """Return the summary row of the error of the predictions; raise if it is too large."""
    if not found <= bound:
        raise ValueError(
            f"the deployed predictions differ from the network's on the example by {found:.1e} of their variation, "
            f"above the {bound:.1e} that rounding explains: pass precision='float32'"
        )
    return [("error", f"{found:.1e} of the predictions' variation; {own:.1e} for the network in this precision")]


def _time_row(net: Multitude, deployed: Deployed, example: Input, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary row of the times before and after deployment."""
    with torch.no_grad():
        before, after = _median_times(
            {"before": lambda: net(example, **options), "after": lambda: deployed(example, **options)}
        ).values()
    rows = len(tensors_in(example)[0])
    return [("time", f"{after:.3g} ms for {plural(rows, 'row')}; {before:.3g} ms before, {after / before:.2f} x")]


def _median_times(functions: dict[str, Callable[[], Any]], turns: int = 5) -> dict[str, float]:
    """Return the median milliseconds per call of each function, timed in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
            times[name].append(1e3 * timer.blocked_autorange(min_run_time=TIMED_SECONDS).median)
    return {name: statistics.median(each) for name, each in times.items()}
