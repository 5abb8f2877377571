"""Dropout that is no layer: modules whose own code draws in training, found by observation and kept on.

`F.dropout` in a `forward`, attention with `dropout_p`, a mask from `torch.rand` behind `if self.training`: a network in
evaluation is silent about all of them. One run in training mode shows which modules draw. Each such module then runs
its own code as in training, with random numbers that are those of a draw (`FunctionalNoise`), while the modules inside
it stay as they are.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multitudes.core.calling import Input, InputError
from multitudes.core.draws.frozen import Frozen, find_rows, rows_to_find, scrambled
from multitudes.core.draws.stochastic import Stochastic, expecting, stochastic_layers
from multitudes.core.noise import STILL, Redrawn
from multitudes.core.proof import alike, running_statistics
from multitudes.core.settings import holding
from multitudes.core.trace import recording, unmoved

CHILD = "functional_noise"
SEED = "functional_noise_seed"
_MARK = "keeps_functional_noise"
_ACTIVATIONS = (nn.RReLU,)
_DROPS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "scaled_dot_product_attention", "feature_dropout",
          "multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"}  # fmt: skip
"""Functions that give what they are given where nothing is dropped."""


class FunctionalNoise(Stochastic):
    """The random numbers of a module's own code; `rate`, if given, is that of its dropout."""

    still = False  # whether dropout drops nothing, while the module's code runs as in training

    def __init__(self, rate: float | None = None) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """Run a module's own code as in training, with this source's numbers, or as in evaluation."""
        before = module.training
        module.training = not self.expects
        try:
            if self.expects or (before and self.draw is None and self.rate is None):  # torch's own is as good
                return run()
            check = partial(_check_not_checkpointed, module) if torch.is_grad_enabled() else None
            with Redrawn(self, check):
                return run()
        finally:
            module.training = before

    def kept(self, shape: Sequence[int], p: float, like: Tensor) -> Tensor:
        """Dropout's mask."""
        if self.still:
            return STILL.kept(shape, p, like)
        p = p if self.rate is None else self.rate
        return (self.uniform(shape, like) >= p).to(like.dtype) / (1 - p)

    def extra_repr(self) -> str:
        return "" if self.rate is None else f"rate={self.rate}"


_CHECKPOINT = inspect.unwrap(checkpoint).__code__


def _check_not_checkpointed(module: nn.Module, function: str) -> None:
    """Raise an InputError where a module's own code draws inside `torch.utils.checkpoint`.

    What runs again in the backward pass would draw other numbers, since this source is gone by then. Checkpoints around
    the module are no matter: they run all of it again.
    """
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not FunctionalNoise.forward.__code__:
        if frame.f_code is _CHECKPOINT:
            raise InputError(
                f"the code of a {type(module).__name__} calls {function} inside torch.utils.checkpoint, which would "
                "draw others in the backward pass: turn its checkpointing off, or leave the dropout rate as it is"
            )
        frame = frame.f_back


_KEPT: dict[type[nn.Module], type[nn.Module]] = {}


def kept_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A module's class, with its forward run by its `FunctionalNoise`; the same one each time."""
    if kind in _KEPT:
        return _KEPT[kind]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._modules[CHILD](self, partial(kind.forward, self, *args, **kwargs))

    own = {"forward": forward, "own_class": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    _KEPT[kind] = type(kind.__name__, (kind,), own)
    return _KEPT[kind]


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before its noise was kept on."""
    return vars(type(module)).get("own_class", type(module))


# -- finding it --------------------------------------------------------------------------------------------


def noise_to_keep(network: nn.Module, rate: float | None) -> None:
    """Mark a network: its functional noise is to be kept on, once an input shows where it is."""
    vars(network)[_MARK] = {"rate": rate}


def freeze_when_found(network: nn.Module, seed: Tensor) -> None:
    """Mark a network: functional noise that is found later is to be frozen, with numbers that come from a seed."""
    network.register_buffer(SEED, seed)


def to_be_kept(network: nn.Module) -> bool:
    """Return whether the network's functional noise is to be kept on, and has not been looked for yet."""
    return _MARK in vars(network)


def noise_to_find(network: nn.Module) -> bool:
    """Return whether an input has yet to show functional noise, or the batch axes of frozen noise."""
    return to_be_kept(network) or bool(rows_to_find(network))


def find_noise(network: nn.Module, x: Input, run: Callable[[Input], Tensor]) -> dict[str, str]:
    """Find the batch axes of frozen noise, and keep on what the network's own code draws in training.

    Return what is kept on, by the module's name; noise that cannot be kept on is an error each time. In a network that
    is frozen, what is found is frozen too.
    """
    find_rows(network, x, run)
    if not to_be_kept(network):
        return {}
    found = _kept(network, x, partial(run, x), vars(network)[_MARK]["rate"])
    del vars(network)[_MARK]
    if (seed := network._buffers.pop(SEED, None)) is not None:
        for number, name in enumerate(found):
            module: Any = network.get_submodule(name)
            module.add_module(CHILD, Frozen(module._modules[CHILD], scrambled(scrambled(seed) + number)))
        find_rows(network, x, run)
    return {name: f"{', '.join(sorted(functions))} in its own code stays on" for name, functions in found.items()}


def _kept(network: nn.Module, x: Input, run: Callable[[], Tensor], rate: float | None) -> dict[str, set[str]]:
    """Keep on what is found; the modules, and the functions by which they draw."""
    found = _found(network, x, run)
    for name in found:
        module = network.get_submodule(name)
        if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or hasattr(module, CHILD):
            raise ValueError(f"{_place(network, name)} draws in its own code, which cannot be kept on there")
    for name in found:
        module = network.get_submodule(name)
        module.add_module(CHILD, FunctionalNoise(rate).train(module.training))
        module.__class__ = kept_class(type(module))
    for module in network.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else it reads the weights of its layers instead of calling them
    try:
        _check_only_noise(network, x, run, found)
    except BaseException:
        for name in found:
            module = network.get_submodule(name)
            del module._modules[CHILD]
            module.__class__ = own_class(module)
        raise
    return found


def _found(network: nn.Module, x: Input, run: Callable[[], Tensor]) -> dict[str, set[str]]:
    """The modules whose own code draws in training and not in evaluation, and by which functions."""
    seen: dict[bool, dict[str, set[str]]] = {}
    for training in (True, False):
        with (
            holding(network.modules(), "training", training),
            running_statistics(network),
            unmoved(network, x),
            expecting(network),
            torch.no_grad(),
            recording(network, tensors=False, noise=True) as trace,
        ):
            run()
        seen[training] = trace.random
        if training and trace.unknown_random:
            name = next(iter(trace.unknown_random))
            raise ValueError(
                f"{_place(network, name)} draws random numbers in training in a way that cannot be kept on in "
                "evaluation; layers= names the dropout layers that shall stay on, without it"
            )
    return {
        name: new
        for name, functions in seen[True].items()
        if (new := functions - seen[False].get(name, set()))
        and not isinstance(network.get_submodule(name), _ACTIVATIONS)
    }


def _check_only_noise(network: nn.Module, x: Input, run: Callable[[], Tensor], found: dict[str, set[str]]) -> None:
    """An error where code that asks `self.training` does more than drop: then evaluation would be something else."""
    if not found or not all(functions <= _DROPS for functions in found.values()):
        return
    with holding(network.modules(), "training", False), unmoved(network, x), torch.no_grad():
        with expecting(network):
            want = run()
        sources = [layer for layer in stochastic_layers(network) if isinstance(layer, FunctionalNoise)]
        with expecting(network), holding(sources, "expects", False), holding(sources, "still", True):
            got = run()
    if not alike(got[None], want[None]):
        places = ", ".join(_place(network, name) for name in found)
        raise ValueError(
            f"{places} asks for self.training for more than dropout, which cannot be kept on alone; layers= names the "
            "dropout layers that shall stay on, without it"
        )


def _place(network: nn.Module, name: str) -> str:
    kind = type(network.get_submodule(name)).__name__
    return f"layer {name!r} ({kind})" if name else f"the network itself ({kind})"
