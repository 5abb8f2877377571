"""Record a run of a network.

`record` runs a network once and restores its state. `recording` follows any code that runs a network. Both fill a
`Trace`: the calls of modules and, on request, calls of torch functions, random functions, values that Python code
inspects, and multiply-adds. `hooked` replaces inputs or outputs of modules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

from multitudes.networks.architecture import equal
from multitudes.networks.calls import Input, call, evaluating, input_errors, map_tensors
from multitudes.networks.dispatch import RandomUse, ThreadSafeMode
from multitudes.networks.random_functions import STILL, RandomFrom
from multitudes.networks.seeds import RandomStates
from multitudes.networks.settings import FLAT_WEIGHTS, HF_CACHES
from multitudes.networks.stochastic import expecting
from multitudes.networks.views import items_in, may_write, same_objects

Which = Collection[type[nn.Module] | str] | None
"""Modules of a network, by exact class or by name; None for all."""


# -- records -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The size of a tensor, recorded in place of the tensor."""

    shape: torch.Size
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        """Return the size of a tensor, or a nested tensor itself."""
        return tensor if tensor.is_nested else cls(tensor.shape, tensor.nbytes)


@dataclass(eq=False)
class Call:
    """One call of a module."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inside: tuple[Call, ...]  # the enclosing calls, outermost first
    before: int = 0  # multiply-adds before it
    work: int = 0  # multiply-adds in it
    output: Any = None


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One call of a torch function, with its recorded tensor arguments."""

    function: str
    tensors: tuple[Tensor, ...]
    inside: tuple[Call, ...]  # the enclosing calls of modules, outermost first


@dataclass(eq=False)
class Trace:
    """One run of a network; records that were not requested are empty."""

    steps: list[tuple[Call, bool]] = field(default_factory=list)
    """Each call twice, in order: at its start (True) and at its end (False)."""
    functions: list[FunctionCall] = field(default_factory=list)
    """Torch functions, except those that only query shapes and settings."""
    inspections: list[FunctionCall] = field(default_factory=list)
    """Functions by which Python code inspected a value."""
    random: dict[str, set[str]] = field(default_factory=dict)
    """Random functions, by the module that called them."""
    unknown_random: dict[str, None] = field(default_factory=dict)
    """Modules that moved a random state by another function."""
    attributes: set[str] = field(default_factory=set)
    """Attributes that the network's code wrote (`record` alone)."""
    buffers: set[str] = field(default_factory=set)
    """Buffers that the network's code wrote or assigned (`record` alone)."""
    multiply_adds: int = 0
    nbytes: int = 0
    """Bytes of the largest tensor that was created."""
    output: Any = None
    """The prediction (`record` alone)."""
    running: list[Call] = field(default_factory=list)
    """The calls in progress, outermost first."""

    @property
    def calls(self) -> list[Call]:
        """The calls of modules, in order of their starts."""
        return [call for call, begins in self.steps if begins]

    @property
    def ended(self) -> list[Call]:
        """The calls of modules, in order of their ends."""
        return [call for call, begins in self.steps if not begins]


# -- recording ---------------------------------------------------------------------------------------------


def record(network: nn.Module, x: Input, which: Which = None, **options: Any) -> Trace:
    """Record one run of a network on `x`, in evaluation, with expectations and without gradients; restore its state.

    The options are those of `recording`.

    >>> trace = record(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(5, 3), work=True)
    >>> [call.name for call in trace.calls], trace.multiply_adds
    (['', '0', '1', '2'], 100)
    """
    trace = Trace()
    with observing(network, x=x, trace=trace), input_errors(x), recording(network, which, trace, **options):
        trace.output = call(network, x)
    return trace


@contextmanager
def recording(
    network: nn.Module,
    which: Which = None,
    trace: Trace | None = None,
    *,
    tensors: bool = True,
    functions: bool | Collection[Tensor] = False,
    inspected: Iterable[Tensor] = (),
    noise: bool = False,
    work: bool = False,
) -> Iterator[Trace]:
    """Record a network's runs inside `with`.

    Args:
        network: the network to record.
        which: its modules to record, all by default.
        trace: the trace to fill, a new one by default.
        tensors: store the inputs and outputs of modules; otherwise, the `Shape` of each.
        functions: record calls of torch functions: all, or those that take one of these tensors.
        inspected: record where Python code inspects values that depend on these tensors: `if h.sum() > 0`.
        noise: record random functions, and make them return the middle of their distributions.
        work: count multiply-adds and the bytes of the largest tensor.
    """
    trace, inspected, counter = trace or Trace(), list(inspected), _WorkCounter()
    states, random_use = RandomStates(), RandomUse()

    def caller() -> str:
        return trace.running[-1].name if trace.running else ""

    def compare_states() -> None:
        nonlocal states
        if noise and (random_use.seen or states.moved):
            trace.unknown_random[caller()] = None
            states, random_use.seen = RandomStates(), False

    def held(value: Any) -> Any:
        return value if tensors else map_tensors(Shape.of, value)

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        compare_states()
        begun = Call(name, module, held(args), held(kwargs), tuple(trace.running), before=counter.multiply_adds)
        trace.running.append(begun)
        trace.steps.append((begun, True))

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        compare_states()
        if not trace.running or trace.running[-1].module is not module:  # a hook failed before the module started
            return
        ended = trace.running.pop()
        ended.output, ended.work = held(output), counter.multiply_adds - ended.before
        trace.steps.append((ended, False))

    def drew(function: str) -> None:
        trace.random.setdefault(caller(), set()).add(function)

    with ExitStack() as stack:
        if noise:
            stack.enter_context(RandomFrom(STILL, drew))
            stack.enter_context(random_use)
        if functions or inspected:
            stack.enter_context(_Functions(trace, functions, inspected))
        stack.enter_context(hooked(network, which, leave, enter, always=True))
        if work:
            stack.enter_context(counter)
        yield trace
    trace.multiply_adds, trace.nbytes = counter.multiply_adds, counter.nbytes


@contextmanager
def hooked(
    network: nn.Module,
    which: Which,
    leave: Callable[[str, nn.Module, Any, Any], Any] | None = None,
    enter: Callable[[str, nn.Module, Any, Any], Any] | None = None,
    *,
    always: bool = False,
) -> Iterator[None]:
    """Call functions before and after modules run.

    `leave(name, module, args, output)` may return another output, `enter(name, module, args, kwargs)` other arguments
    `(args, kwargs)`. With `always`, `leave` is also called for modules that raise an error.
    """
    with ExitStack() as stack:
        for name, module in _modules(network, which):
            if enter is not None:
                stack.enter_context(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
            if leave is not None:
                stack.enter_context(module.register_forward_hook(partial(leave, name), always_call=always))
        yield


def _modules(network: nn.Module, which: Which) -> Iterable[tuple[str, nn.Module]]:
    """Return modules with one name each; skip names that do not exist."""
    if which is None or not all(isinstance(each, str) for each in which):
        named = network.named_modules(remove_duplicate=False)
        which = [name for name, module in named if which is None or type(module) in which or name in which]
    found: dict[int, tuple[str, nn.Module]] = {}
    for name in map(str, which):
        with suppress(AttributeError):
            module = network.get_submodule(name)
            found.setdefault(id(module), (name, module))
    return found.values()


# -- functions ---------------------------------------------------------------------------------------------

_READS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "is_nonzero", "equal", "allclose", "numpy"}

_QUERIES = {"dim", "size", "numel", "nelement", "ndimension", "stride", "element_size", "get_device"}
_QUERIES |= {"__len__", "__hash__", "__repr__", "__format__"}


def is_query(name: str) -> bool:
    """Return whether a function only queries shapes and settings of a tensor."""
    return name in _QUERIES or (name.startswith("is_") and name not in _READS)


class _Functions(TorchFunctionMode):
    """Record calls of torch functions, and values that Python code inspects."""

    def __init__(self, trace: Trace, functions: bool | Collection[Tensor], inspected: list[Tensor]) -> None:
        super().__init__()
        self.trace = trace
        self.wanted = None if functions is True else {id(tensor) for tensor in functions or ()}
        self.origins = WeakTensorKeyDictionary()  # maps `weight.T` and `weight.data` to `weight`
        self.known = WeakTensorKeyDictionary({tensor: True for tensor in inspected})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        inside = tuple(self.trace.running)
        if name != "__get__" and not is_query(name) and (used := self._used(given)):
            self.trace.functions.append(FunctionCall(name, used, inside))  # before it runs, since it may fail
        result = function(*args, **(kwargs or {}))
        if name == "__get__" and isinstance(result, Tensor):
            self.origins[result] = self.origins.get(given[0], given[0])
        if len(self.known) and any(tensor in self.known for tensor in given):
            if name in _READS:
                self.trace.inspections.append(FunctionCall(name, (), inside))
            self.known.update({value: True for value in tree_leaves(result) if isinstance(value, Tensor)})
        return result

    def _used(self, given: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the arguments of a function that are recorded."""
        own = [self.origins.get(tensor, tensor) for tensor in given]
        return tuple(tensor for tensor in own if self.wanted is None or id(tensor) in self.wanted)


# -- multiply-adds -----------------------------------------------------------------------------------------


def _recurrent(input: Tensor, *weights: Any, **kwargs: Any) -> int:
    """Count the operations of a recurrent kernel: two per weight and position, without biases."""
    matrices = tree_leaves(weights[: 2 if isinstance(weights[0], Tensor) else 1])
    positions = input.numel() // matrices[0].shape[-1]
    return 2 * positions * sum(matrix.numel() for matrix in matrices if matrix.dim() == 2)


_recurrent._get_raw = True  # type: ignore[attr-defined]  # makes torch's counter pass tensors, not shapes

_KERNELS = {torch.ops.aten.mkldnn_rnn_layer: _recurrent, torch.ops.aten._cudnn_rnn: _recurrent}
"""Kernels that torch's counter omits."""


class _WorkCounter(ThreadSafeMode, FlopCounterMode):
    """Torch's counter of operations, with the bytes of the largest tensor."""

    nbytes = 0

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_KERNELS)
        tracker: Any = nullcontext()  # torch's own adds hooks that fail on modules that take a parameter
        tracker.parents = ("Global",)
        self.mod_tracker = tracker

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds counted so far."""
        return int(self.get_total_flops()) // 2

    def _count_flops(self, packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if not _gives_views(packet):
            for value in out if isinstance(out, (tuple, list)) else (out,):
                self.nbytes = max(self.nbytes, value.nbytes if isinstance(value, Tensor) else 0)
        return super()._count_flops(packet, out, args, kwargs)


@cache
def _gives_views(packet: Any) -> bool:
    """Return whether an operation returns its argument or a view of it."""
    overloads = packet.overloads() if hasattr(packet, "overloads") else []
    return bool(overloads) and any(r.alias_info for r in getattr(packet, overloads[0])._schema.returns)


# -- restored state ---------------------------------------------------------------------------------------


@contextmanager
def observing(*networks: nn.Module, x: Input = (), trace: Trace | None = None) -> Iterator[None]:
    """Put networks in evaluation, with expectations and without gradients, inside `with`; restore their state."""
    with ExitStack() as stack:
        for network in networks:
            stack.enter_context(evaluating(network))  # first, since it locks the network
            stack.enter_context(preserve_state(network, x, trace))
            stack.enter_context(expecting(network))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def preserve_state(network: nn.Module, x: Input, trace: Trace | None = None) -> Iterator[Callable[[], bool]]:
    """Restore buffers, attributes, modes and random states afterwards; record in a trace what was written.

    Yield a function that returns whether random numbers were drawn.
    """
    states, random_use = RandomStates(x), RandomUse()
    try:
        with preserve_writes(network, trace), random_use:
            yield lambda: random_use.seen or states.moved
    finally:
        states.restore(random_use.seen)  # other threads may move torch's state too


@contextmanager
def preserve_writes(network: nn.Module, trace: Trace | None = None) -> Iterator[None]:
    """Restore buffers, attributes and modes afterwards; record in a trace what was written."""
    trace = Trace() if trace is None else trace
    modules = [(path, module, dict(module._buffers), module.training) for path, module in network.named_modules()]
    values = [(name, buffer, buffer.clone()) for name, buffer in network.named_buffers()]
    try:
        with preserve_attributes(writing_modules(network)) as attributes:
            yield
    finally:
        for path, module, buffers, training in modules:
            own = module._buffers
            assigned = [name for name in {**buffers, **own} if own.get(name) is not buffers.get(name)]
            trace.buffers.update(_joined(path, name) for name in assigned)
            own.clear()
            own.update(buffers)
            module.training = training
        for name, buffer, before in values:
            if not buffer.is_meta and not equal(buffer, before):
                trace.buffers.add(name)
                buffer.copy_(before)
        trace.attributes.update(_joined(*place) for place in attributes)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_PASSED = frozenset([*vars(nn.Module()), *HF_CACHES, *FLAT_WEIGHTS])


def writing_modules(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules whose code may write attributes, with their names."""
    return [(path, module) for path, module in network.named_modules() if may_write(module)]


@contextmanager
def preserve_attributes(writing: Sequence[tuple[str, nn.Module]]) -> Iterator[set[tuple[str, str]]]:
    """Restore the attributes of modules afterwards; yield the (module, attribute) names that were written.

    Nested containers, and objects with attributes, get their items back as well.
    """
    modules = [(path, module, _attributes(module)) for path, module in writing]
    seen: set[int] = set()
    inside = [
        (path, key, held, items_in(held))
        for path, _, before in modules
        for key, value in before.items()
        if not torch.compiler.is_compiling()  # graphs cannot look into objects; what is written was found before
        for held in _containers(value, seen)
    ]
    written: set[tuple[str, str]] = set()
    try:
        yield written
    finally:
        for path, key, held, items in inside:
            now_held = items_in(held)
            if len(now_held) != len(items) or not all(map(is_, now_held, items)):
                written.add((path, key))
                held.clear()
                if isinstance(held, dict):
                    half = len(items) // 2
                    held.update(zip(items[:half], items[half:], strict=True))
                else:
                    (held.update if isinstance(held, set) else held.extend)(items)
        for path, module, before in modules:
            now = _attributes(module)
            written |= {(path, key) for key in now.keys() ^ before.keys()}
            written |= {(path, key) for key in now.keys() & before.keys() if not same_objects(now[key], before[key])}
            for key in now.keys() - before.keys():
                del vars(module)[key]
            vars(module).update(before)


_NOT_OPENED = ("torch", "numpy", "builtins", "multitudes.")
"""Packages whose objects are not restored."""


def _containers(value: Any, seen: set[int], depth: int = 4) -> Iterator[Any]:
    """Yield each container in a value once, including the attribute dictionaries of objects."""
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or id(value) in seen or not depth:
        return
    held = value
    if not isinstance(value, (list, tuple, dict, set, deque)):
        if type(value).__module__.startswith(_NOT_OPENED) or not hasattr(value, "__dict__"):
            return
        held = vars(value)
    seen.add(id(value))
    for each in held.values() if isinstance(held, dict) else held:
        yield from _containers(each, seen, depth - 1)
    if not isinstance(held, tuple):
        yield held


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _PASSED}
