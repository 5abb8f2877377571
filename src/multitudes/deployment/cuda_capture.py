"""Capture a network's kernels for one input shape as a CUDA graph.

A convolutional network, or one that draws, is traced and its convolutions are fused. Any other network is compiled. For
members, each promising runner is captured, and the fastest graph is kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from multitudes.base.checks import plural
from multitudes.deployment.engines import TorchEngine
from multitudes.deployment.fusion import Way, apply_ways, best_ways, convolution, count_convolutions, fuse_convolutions
from multitudes.deployment.graph_draws import Noise, draw_function, noise_of
from multitudes.deployment.operation_graph import CannotTrace, check_synchronization, trace
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.packing.pointwise import plain_convolutions
from multitudes.networks.calls import Input, map_tensors, tensors_in
from multitudes.networks.settings import override_attribute

SummaryRows = list[tuple[str, str]]


@dataclass(frozen=True)
class Plan:
    """A function to capture, its runner, the ways of its convolutions, and rows of the summary."""

    function: Callable[..., Tensor]  # keeps the weights that the graph reads
    runner: str
    ways: Sequence[Way]
    summary_rows: SummaryRows


class Captured:
    """One CUDA graph. A call copies inputs to its input tensors, and its output to a new tensor.

    The graph generates the random numbers in `noise`.
    """

    def __init__(self, plan: Plan, x: Input, batched: Sequence[bool], pool: Any, noise: Noise | None) -> None:
        self.plan, self.batched, self.noise = plan, batched, noise
        self.inputs = [tensor.clone() for tensor in tensors_in(x)]
        self.rows = len(self.inputs[0])
        before = torch.cuda.memory_reserved()
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), _cudnn_benchmark():
            _warm_up(self._run)
            with capturing(self.graph, pool, () if noise is None else noise.generators.values()):
                self.output = self._run()
        self.nbytes = max(0, torch.cuda.memory_reserved() - before)

    def _run(self) -> Tensor:
        if self.noise is None:
            return self.plan.function(*self.inputs)
        self.noise.fill()
        return self.plan.function(*self.inputs, *self.noise.numbers)

    def size(self) -> str:
        return str(self.rows) if self.noise is None else f"{self.rows} (x {plural(self.noise.draws, 'draw')})"

    def __call__(self, x: Input, rows: int, seed: int | None = None) -> Tensor:
        """Predict `[S, rows, ...]` for a batch with at most as many rows as the graph."""
        for own, given, batched in zip(self.inputs, tensors_in(x), self.batched, strict=True):
            (own[:rows] if batched else own).copy_(given)
        if self.noise is not None:
            self.noise.seed(seed)
        self.graph.replay()
        answer = self.output if rows == self.rows else self.output[:, :rows]
        return answer.float() if answer.dtype in (torch.bfloat16, torch.float16) else answer.clone()


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Capture kernels in a graph inside the context, including random numbers of these generators.

    If that fails, torch's random state, allocator and current stream are restored.
    """
    for generator in generators:
        graph.register_generator_state(generator)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            _recover(pool)
            raise
        try:
            graph.capture_end()
        except RuntimeError:
            _recover(pool)
            raise


def _recover(pool: Any) -> None:
    """Run a successful capture after a failed one; otherwise random functions on the device raise an error."""
    with suppress(RuntimeError, AttributeError):  # torch has ended it already
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    torch.zeros((), device="cuda")
    graph.capture_end()


@contextmanager
def _cudnn_benchmark() -> Iterator[None]:
    """Turn cuDNN's benchmarks on inside the context."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _warm_up(function: Callable[[], Any]) -> None:
    """Call a function a few times on another stream, as a capture requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)


def milliseconds(function: Callable[[], Any], calls: int = 5) -> float:
    """Time the kernels of a call, without launches; infinite if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with _cudnn_benchmark():
            _warm_up(function)
            with capturing(graph, torch.cuda.graph_pool_handle()):
                for _ in range(calls):
                    function()
    except RuntimeError:
        return math.inf
    return _replay_time(graph) / calls


def _replay_time(graph: torch.cuda.CUDAGraph, repeats: int = 3) -> float:
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:])


# -- capturing networks ------------------------------------------------------------------------------------


def capture(
    plain: TorchEngine, x: Input, batched: Sequence[bool], pool: Any, like: Plan | None, draws: int = 0
) -> Captured:
    """Return the fastest graph of a network for inputs like `x` and this many draws, or raise `CannotTrace`.

    `like` is the plan of a graph of another size; with it, timing and compiling are skipped.
    """
    best: Captured | None = None
    reason = ""
    runners = _runners(plain.net, x, draws) if like is None else [like.runner]
    for runner in runners:
        try:
            noise = noise_of(plain, x, draws) if draws else None
            call = _forward_function(plain, x, runner) if noise is None else draw_function(plain, x)
            tensors = [*tensors_in(x), *(() if noise is None else noise.numbers)]
            make = _plan_unfused if noise is None and not _convolves(plain.net) else _plan_fused
            found = Captured(make(call, tensors, runner, like), x, batched, pool, noise)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            reason = f"not enough memory for a graph ({str(error).splitlines()[0]})"
            continue
        except (RuntimeError, ValueError) as error:  # includes CannotTrace
            reason = reason or str(error).strip().splitlines()[0]
            continue
        if best is None or _replay_time(found.graph) < _replay_time(best.graph):
            best = found
    if best is None:
        raise CannotTrace(reason)
    return best


def _runners(net: Multitude, x: Input, draws: int) -> list[str]:
    """Return the runners to try: batched kernels, or one member after the other."""
    if not isinstance(net, Members) or draws:  # members that draw run one after the other
        return [""]
    if not _convolves(net):
        return ["loop" if net.refusal("vmapped", x) else "vmapped"]
    return ["loop"] if net.refusal("packed", x) else ["packed", "loop"]


def _convolves(net: Multitude) -> bool:
    """Return whether a network has 2-d convolutions, and at least as many convolution kernels as matrices."""
    ranks = [parameter.dim() for parameter in net.network.parameters()]
    return sum(rank > 2 for rank in ranks) >= ranks.count(2) and 4 in ranks


def _forward_function(plain: TorchEngine, x: Input, runner: str) -> Callable[..., Tensor]:
    """Return the network as a function of the tensors in `x`."""

    def call(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        with plain.precision(), override_attribute([plain.net] if runner else [], "_runner", runner):
            found: Tensor = plain.net(map_tensors(lambda _: next(given), x))
        return found

    return call


def _plan_unfused(call: Callable[..., Tensor], tensors: list[Tensor], runner: str, like: Plan | None) -> Plan:
    """Return a plan without fusion, compiled if possible."""
    with torch.no_grad():
        call(*tensors)  # fill caches before the capture
        try:
            check_synchronization(call, tensors)
        except CannotTrace:  # tracing may turn the value into a constant
            return _plan_fused(call, tensors, runner, like)
        if like is not None:
            return Plan(call, runner, (), [("kernels", "torch's own")])
        try:
            with torch._dynamo.config.patch(recompile_limit=256):
                quick = torch.compile(call, dynamic=False)
                quick(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers raise errors of any class
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            return Plan(call, runner, (), [("kernels", f"torch's own; not compiled: {why}")])
    return Plan(quick, runner, (), [("kernels", "compiled")])


def _plan_fused(call: Callable[..., Tensor], tensors: list[Tensor], runner: str, like: Plan | None) -> Plan:
    """Return a plan with fused convolutions, each in its fastest way or that of the plan `like`."""
    with torch.no_grad(), plain_convolutions():
        call(*tensors)
        graph = trace(call, tensors)
        fused = fuse_convolutions(graph)
        check_synchronization(graph, tensors)
        if like is not None and len(like.ways) == count_convolutions(graph):
            apply_ways(graph, like.ways)
            return Plan(graph, runner, like.ways, like.summary_rows)
        ways = best_ways(graph, tensors, milliseconds)
        apply_ways(graph, ways)
        rows = _describe_ways(ways, fused)
        if _left_over(graph) > WORTH_COMPILING:
            with suppress(Exception):  # compilers raise errors of any class; the graph works uncompiled
                quick = torch.compile(graph, dynamic=False)
                quick(*tensors)
                return Plan(quick, runner, ways, [*rows, ("the rest" if ways else "kernels", "compiled")])
    return Plan(graph, runner, ways, rows)


WORTH_COMPILING = 0.1
"""Compile a graph if pointwise functions and norms write more than this share of what convolutions write."""


def _left_over(graph: fx.GraphModule) -> float:
    """Return the size of outputs that a compiler would fuse, relative to those of convolutions."""
    written, by_convolutions = 0, 0
    for node in graph.graph.nodes:
        value = node.meta.get("tensor_meta")
        size = value.shape.numel() if isinstance(getattr(value, "shape", None), torch.Size) else 0
        by_convolutions += size if node.target is convolution else 0
        tags = getattr(node.target, "tags", ())
        written += size if torch.Tag.pointwise in tags or "norm" in str(node.target) else 0
    return written / max(1, by_convolutions)


def _describe_ways(ways: Sequence[Way], fused: int) -> SummaryRows:
    if not ways:
        return []
    one_call = sum(way.fused for way in ways)
    rows = [("convolutions", f"{one_call} of {fused} with bias, residual and ReLU in one cuDNN call")]
    counts = Counter(way.groups for way in ways)
    groups = ", ".join(f"{counts[each]} of {plural(each, 'group')}" for each in sorted(counts))
    return [*rows, ("", groups)] if max(counts, default=1) > 1 else rows
