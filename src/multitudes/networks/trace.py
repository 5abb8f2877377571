"""Record a run of a network.

`record` runs a network once and leaves no trace in it. `recording` follows any code that runs a network. Both make a
`Trace`: the calls of its modules and, on request, the torch functions that it calls, the random numbers that it draws,
the values that its Python code inspects, and its multiply-adds. `hooked` replaces inputs or outputs of modules.
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
from multitudes.networks.views import may_write, same_objects

Which = Collection[type[nn.Module] | str] | None
"""Modules of a network, by exact class or by name; None for all."""


# -- records -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The size of a tensor that was not kept."""

    shape: torch.Size
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        """Return the size of a tensor; a nested tensor unchanged."""
        return tensor if tensor.is_nested else cls(tensor.shape, tensor.nbytes)


@dataclass(eq=False)
class Call:
    """One call of a module."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inside: tuple[Call, ...]  # the calls around it, outermost first
    before: int = 0  # multiply-adds before it
    work: int = 0  # multiply-adds in it
    output: Any = None


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One call of a torch function, with the tensors that it took."""

    function: str
    tensors: tuple[Tensor, ...]
    inside: tuple[Call, ...]  # the calls of modules around it, outermost first


@dataclass(eq=False)
class Trace:
    """One run of a network. What was not requested is empty."""

    steps: list[tuple[Call, bool]] = field(default_factory=list)
    """Each call twice, in order: at its start (True) and at its end (False)."""
    functions: list[FunctionCall] = field(default_factory=list)
    """Torch functions, except those that only query shapes and settings."""
    looks: list[FunctionCall] = field(default_factory=list)
    """Functions through which Python code inspected a value."""
    random: dict[str, set[str]] = field(default_factory=dict)
    """Random functions by the module whose code called them."""
    unknown_random: dict[str, None] = field(default_factory=dict)
    """Modules whose code moved a random state by some other function."""
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
    """Run a network on `x` once, in evaluation with expectations and without gradients; leave it as it was.

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
    looks: Iterable[Tensor] = (),
    noise: bool = False,
    work: bool = False,
) -> Iterator[Trace]:
    """Record what runs inside.

    Args:
        network: the network whose modules are followed.
        which: the modules that are followed, all by default.
        trace: the trace to fill, a new one by default.
        tensors: keep the inputs and outputs of modules; otherwise a `Shape` of each.
        functions: record torch functions: all, or those that take one of these tensors.
        looks: record where Python code inspects a value that depends on these tensors: `if h.sum() > 0`, `h.item()`.
        noise: record random functions, which return the middle of their distributions meanwhile.
        work: count multiply-adds and the bytes of the largest tensor.
    """
    trace, looks, counter = trace or Trace(), list(looks), _WorkCounter()
    states, torchs = RandomStates(), RandomUse()

    def caller() -> str:
        return trace.running[-1].name if trace.running else ""

    def compare_states() -> None:
        nonlocal states
        if noise and (torchs.seen or states.moved):
            trace.unknown_random[caller()] = None
            states, torchs.seen = RandomStates(), False

    def held(value: Any) -> Any:
        return value if tensors else map_tensors(Shape.of, value)

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        compare_states()
        begun = Call(name, module, held(args), held(kwargs), tuple(trace.running), before=counter.multiply_adds)
        trace.running.append(begun)
        trace.steps.append((begun, True))

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        compare_states()
        if not trace.running or trace.running[-1].module is not module:  # another hook failed before it started
            return
        ended = trace.running.pop()
        ended.output, ended.work = held(output), counter.multiply_adds - ended.before
        trace.steps.append((ended, False))

    def drew(function: str) -> None:
        trace.random.setdefault(caller(), set()).add(function)

    with ExitStack() as stack:
        if noise:
            stack.enter_context(RandomFrom(STILL, drew))
            stack.enter_context(torchs)
        if functions or looks:
            stack.enter_context(_Functions(trace, functions, looks))
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
    """Yield modules with one name each; skip names that do not exist."""
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

_LOOKS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "is_nonzero", "equal", "allclose", "numpy"}

_ASKS = {"dim", "size", "numel", "nelement", "ndimension", "stride", "element_size", "get_device"}
_ASKS |= {"__len__", "__hash__", "__repr__", "__format__"}


def is_query(name: str) -> bool:
    """Return whether a function only queries shapes and settings of a tensor."""
    return name in _ASKS or (name.startswith("is_") and name not in _LOOKS)


class _Functions(TorchFunctionMode):
    """Record torch functions, and values that Python code inspects."""

    def __init__(self, trace: Trace, functions: bool | Collection[Tensor], looks: list[Tensor]) -> None:
        super().__init__()
        self.trace = trace
        self.wanted = None if functions is True else {id(tensor) for tensor in functions or ()}
        self.origins = WeakTensorKeyDictionary()  # maps `weight.T`, `.data` to the tensor they come from
        self.known = WeakTensorKeyDictionary({tensor: True for tensor in looks})

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
            if name in _LOOKS:
                self.trace.looks.append(FunctionCall(name, (), inside))
            self.known.update({value: True for value in tree_leaves(result) if isinstance(value, Tensor)})
        return result

    def _used(self, given: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors among a function's arguments that are recorded."""
        own = [self.origins.get(tensor, tensor) for tensor in given]
        return tuple(tensor for tensor in own if self.wanted is None or id(tensor) in self.wanted)


# -- multiply-adds -----------------------------------------------------------------------------------------


def _recurrent(input: Tensor, *weights: Any, **kwargs: Any) -> int:
    """Count the operations of a recurrent layer's single kernel: two per weight and position, without biases."""
    matrices = tree_leaves(weights[: 2 if isinstance(weights[0], Tensor) else 1])
    positions = input.numel() // matrices[0].shape[-1]
    return 2 * positions * sum(matrix.numel() for matrix in matrices if matrix.dim() == 2)


_recurrent._get_raw = True  # type: ignore[attr-defined]  # makes torch's counter pass tensors, not shapes

_KERNELS = {torch.ops.aten.mkldnn_rnn_layer: _recurrent, torch.ops.aten._cudnn_rnn: _recurrent}
"""Kernels that torch's counter does not count."""


class _WorkCounter(ThreadSafeMode, FlopCounterMode):
    """Torch's counter of operations, extended by the bytes of the largest tensor."""

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
    """Return whether an operation returns its argument, or a view of it."""
    overloads = packet.overloads() if hasattr(packet, "overloads") else []
    return bool(overloads) and any(r.alias_info for r in getattr(packet, overloads[0])._schema.returns)


# -- no side effects ---------------------------------------------------------------------------------------


@contextmanager
def observing(*networks: nn.Module, x: Input = (), trace: Trace | None = None) -> Iterator[None]:
    """Run networks in evaluation, with expectations instead of draws and without gradients; restore them afterwards."""
    with ExitStack() as stack:
        for network in networks:
            stack.enter_context(evaluating(network))  # first, since it locks the network
            stack.enter_context(preserve_state(network, x, trace))
            stack.enter_context(expecting(network))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def preserve_state(network: nn.Module, x: Input, trace: Trace | None = None) -> Iterator[Callable[[], bool]]:
    """Restore buffers, attributes, modes and random states afterwards; record in a trace which were written.

    Yield a function that returns whether random numbers have been drawn.
    """
    states, torchs = RandomStates(x), RandomUse()
    try:
        with preserve_writes(network, trace), torchs:
            yield lambda: torchs.seen or states.moved
    finally:
        states.restore(torchs.seen)  # other threads may move torch's state too


@contextmanager
def preserve_writes(network: nn.Module, trace: Trace | None = None) -> Iterator[None]:
    """Restore buffers, attributes and modes afterwards; record in a trace which were written."""
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
_CONTAINERS = (list, dict, set)


def writing_modules(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules whose code may write attributes, with names: the user's own classes, or those with hooks."""
    return [(path, module) for path, module in network.named_modules() if may_write(module)]


@contextmanager
def preserve_attributes(writing: Sequence[tuple[str, nn.Module]]) -> Iterator[set[tuple[str, str]]]:
    """Restore the attributes of modules afterwards; yield the (module, attribute) names that were written.

    Containers, and objects that hold attributes, get their items back as well, also inside others.
    """
    modules = [(path, module, _attributes(module)) for path, module in writing]
    contents = {
        (path, key): value.copy() if type(value) in _CONTAINERS else value
        for path, _, before in modules
        for key, value in before.items()
    }
    seen: set[int] = set()
    inside = [
        (path, key, held, _items(held))
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
            now_held = _items(held)
            if len(now_held) != len(items) or not all(map(is_, now_held, items)):
                written.add((path, key))
                held.clear()
                (held.update if isinstance(held, (dict, set)) else held.extend)(_paired(held, items))
        for path, module, before in modules:
            now = _attributes(module)
            written |= {(path, key) for key in now.keys() ^ before.keys()}
            written |= {
                (path, key) for key in now.keys() & before.keys() if not same_objects(now[key], contents[path, key])
            }
            for key in now.keys() - before.keys():
                del vars(module)[key]
            for key, value in before.items():
                vars(module)[key] = value
                if not same_objects(value, items := contents[path, key]):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(items)


_NOT_OPENED = ("torch", "numpy", "builtins", "multitudes.")
"""Modules of classes whose objects do not belong to a network."""


def _containers(value: Any, seen: set[int], depth: int = 4) -> Iterator[Any]:
    """Yield the containers in a value, and the attributes of objects in it, each once."""
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


def _items(held: Any) -> list[Any]:
    """List what a container holds; of a dictionary the keys and then the values."""
    return [*held, *held.values()] if isinstance(held, dict) else list(held)


def _paired(held: Any, items: list[Any]) -> Any:
    half = len(items) // 2
    return dict(zip(items[:half], items[half:], strict=True)) if isinstance(held, dict) else items


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _PASSED}
