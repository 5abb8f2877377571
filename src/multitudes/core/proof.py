"""Proofs: a quick way to run a network is compared with the plain one before it is used.

Members may lie side by side in one batch, draws run under `torch.vmap`, layers be packed: all of that is right for most
networks, and silently wrong for some. So the first input of each kind goes both ways, in the mode in which it is used.
The comparison is made without noise and with moved weights, since a gate that starts at zero hides what is behind it;
it leaves no trace in buffers, attributes or random states.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from multitudes.core.architecture import equal
from multitudes.core.calling import Input, tensors_in
from multitudes.core.draws.stochastic import expecting
from multitudes.core.lending import written_attributes
from multitudes.core.noise import STILL, Redrawn
from multitudes.core.settings import holding

__all__ = [
    "Looks",
    "alike",
    "first_difference",
    "kind_of",
    "random_states",
    "running_statistics",
    "silent_trial",
    "trial",
    "unmoved",
]


# -- nothing is left of a trial ----------------------------------------------------------------------------


@contextmanager
def trial(network: nn.Module, x: Input) -> Iterator[None]:
    """Inside, a network runs with moved weights and without gradients; after, it is as it was."""
    with unmoved(network, x), torch.no_grad(), _moved_weights(network):
        yield


@contextmanager
def silent_trial(network: nn.Module, x: Input) -> Iterator[Callable[[], str]]:
    """A `trial` without noise; yields what it cannot be sure of, in words, once the network has run.

    That is random numbers drawn in a way that is not known, and control flow on values.
    """
    looks = Looks(network.parameters())
    with trial(network, x), expecting(network), Redrawn(STILL), looks:
        before = random_states(x)

        def doubt() -> str:
            if any(get() != state for get, _, state in before):
                return "it draws random numbers in a way that cannot be compared"
            return "its code looks at values, so that rows decide for each other" if looks.seen else ""

        yield doubt


class Looks(TorchFunctionMode):
    """Notes whether Python code looks at a number that depends on some tensors: `if h.sum() > 0`, `h.item()`.

    On one input, two ways to run a network may then agree by chance.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = WeakTensorKeyDictionary({tensor: True for tensor in tensors})
        self.seen = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(value, Tensor) and value in self.known for value in tree_leaves((args, kwargs))):
            self.seen = self.seen or getattr(function, "__name__", "") in _LOOKS
            self.known.update({value: True for value in tree_leaves(result) if isinstance(value, Tensor)})
        return result


_LOOKS = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "is_nonzero", "equal", "allclose", "numpy"}


@contextmanager
def unmoved(network: nn.Module, x: Input) -> Iterator[None]:
    """Whatever runs inside leaves buffers, attributes and random states as they were."""
    registries = [(module, dict(module._buffers)) for module in network.modules()]
    values = [(buffer, buffer.clone()) for buffer in network.buffers()]
    states = random_states(x)
    try:
        with written_attributes(network, {}):
            yield
    finally:
        for module, buffers in registries:
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, before in values:
            if not (buffer.is_meta or equal(buffer, before)):
                buffer.copy_(before)
        for _, put, state in states:
            put(state)


@contextmanager
def _moved_weights(network: nn.Module) -> Iterator[None]:
    """Inside, every weight is another, of about the same size, but none is nearly zero."""
    before = [(parameter, parameter.data) for parameter in network.parameters()]
    for number, (parameter, data) in enumerate(before):
        if data.is_floating_point() and data.layout is torch.strided and data.numel():
            generator = torch.Generator(data.device).manual_seed(number)
            noise = torch.randn(data.shape, generator=generator, dtype=data.dtype, device=data.device)
            size = data.float().square().mean().sqrt()
            fan_in = max(1, data.numel() // max(1, data.shape[0])) if data.dim() > 1 else 1
            usual = 0.3 * fan_in**-0.5  # of what is much smaller than that, a gate of 1e-6 say, the effect is hidden
            by = torch.where(size > 0.1 * usual, 0.1 * size, usual)
            parameter.data = data + (noise * by).to(data.dtype)
    try:
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


def running_statistics(network: nn.Module) -> AbstractContextManager[None]:
    """Inside, norms compute with the statistics that they keep, in training too: batch norms, and spectral norms."""
    return holding(filter(_keeps_statistics, network.modules()), "training", False)


def _keeps_statistics(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return bool(module.track_running_stats)
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)


State = tuple[Callable[[], Any], Callable[[Any], Any], Any]


def _ways_of(generator: torch.Generator) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    def put(state: list[int]) -> None:
        generator.set_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))

    return lambda: generator.get_state().tolist(), put


def random_states(x: Any = ()) -> list[State]:
    """How to get and to put each random state, and what it is now, in a form that compares.

    That is torch's on the CPU and on the devices of `x`, Python's, and NumPy's where it is in use.
    """
    ways: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (
            lambda: torch.get_rng_state().tolist(),
            lambda s: torch.set_rng_state(torch.tensor(s, dtype=torch.uint8, device="cpu")),
        ),
        (random.getstate, random.setstate),
    ]
    for device in {tensor.device for tensor in tensors_in(x) if tensor.is_cuda}:
        ways.append(_ways_of(torch.cuda.default_generators[device.index]))
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        ways.append((lambda: [v.tolist() if hasattr(v, "tolist") else v for v in numpy.get_state()], numpy.set_state))
    return [(get, put, get()) for get, put in ways]


# -- comparing ---------------------------------------------------------------------------------------------


def kind_of(x: Any, batch: int | None = None) -> Any:
    """What an input is like, whatever its sizes: ranks, dtypes, and which tensors are as long as the first."""
    if batch is None:
        first = tensors_in(x)
        batch = first[0].shape[0] if first and first[0].dim() else 0
    if isinstance(x, Tensor):
        return x.dim(), x.dtype, x.device.type, x.dim() > 0 and x.shape[0] == batch
    if isinstance(x, Mapping):
        return tuple((key, kind_of(value, batch)) for key, value in x.items())
    if isinstance(x, (tuple, list)):
        return tuple(kind_of(value, batch) for value in x)
    return type(x)


def alike(got: Tensor, want: Tensor) -> bool:
    """Whether two computations of the same values `[S, ...]` agree, each of the S to float rounding."""
    with torch._C.DisableTorchFunction():  # what watches the computations does not watch this
        return _alike(got, want)


def _alike(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or (got.dtype != want.dtype and not _is_half(want)):
        return False
    if not want.numel():
        return True
    half, tolerance = _is_half(want), _tolerance(want)
    got, want = (_real(values).flatten(1) for values in (got, want))
    if not torch.equal(got.isfinite(), want.isfinite()):
        return False
    if half:
        error, size = ((values.nan_to_num(0, 0, 0)).norm(dim=1) for values in (got - want, want))
        return bool((error <= 0.1 * size.clamp(min=1e-12)).all())
    error = (got - want).nan_to_num(0, 0, 0).abs().amax(1)
    values = want.nan_to_num(0, 0, 0)
    spread = (values - values.mean(1, keepdim=True)).abs().amax(1).maximum(1e-3 * values.abs().amax(1))
    return bool((error <= tolerance * spread.clamp(min=1e-12)).all())


def first_difference(
    network: nn.Module,
    quick: Callable[[], Any],
    plain: Callable[[], Any],
    part: Callable[[Tensor], Tensor | None],
) -> str:
    """The first layer whose output, or the `part` of it that counts, differs between two ways to run a network."""

    def outputs(run: Callable[[], Any]) -> list[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor]] = []

        def see(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor):
                    found.append((f"layer {name!r} ({type(module).__name__})", output.detach()))

            return hook

        wrappers = [module for module in network.modules() if hasattr(type(module), "wraps")]
        inside = {id(module) for wrapper in wrappers for module in wrapper.modules() if module is not wrapper}
        handles = [
            module.register_forward_hook(see(name))
            for name, module in network.named_modules()
            if name and id(module) not in inside
        ]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        return found

    for (name, got), (_, want) in zip(outputs(quick), outputs(plain), strict=False):
        own = part(got)
        if own is None or own.shape != want.shape or not alike(own[None], want[None]):
            return name
    return ""


def _real(values: Tensor) -> Tensor:
    values = values.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return (values if values.dtype == torch.float64 else values.float()).reshape(len(values), -1)


def _is_half(values: Tensor) -> bool:
    return torch.is_autocast_enabled(values.device.type) or values.dtype in (torch.bfloat16, torch.float16)


def _tolerance(values: Tensor) -> float:
    if values.is_cuda:  # TensorFloat-32
        return 0.02
    return 1e-6 if values.dtype in (torch.float64, torch.complex128) else 2e-3
