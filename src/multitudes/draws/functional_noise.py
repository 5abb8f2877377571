"""Functional noise: random functions in a module's own code, kept on in evaluation.

Examples are `F.dropout` in a `forward`, attention with `dropout_p`, and a mask from `torch.rand` behind
`if self.training`. Two recorded runs, in training and in evaluation mode, show which modules draw only in training.
Each of them then runs its own code in training mode with the random numbers of a draw (`FunctionalNoise`), while its
child modules stay in evaluation mode.
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

from multitudes.draws.frozen_noise import FrozenNoise, find_rows, hash_numbers, rows_to_find
from multitudes.networks.calls import Input, InputError
from multitudes.networks.random_functions import STILL, RandomFrom
from multitudes.networks.settings import override_attribute
from multitudes.networks.stochastic import Stochastic, expecting, stochastic_layers
from multitudes.networks.trace import preserve_state, recording
from multitudes.networks.verification import agree, running_statistics

CHILD = "functional_noise"
SEED = "functional_noise_seed"
_MARK = "keeps_functional_noise"
_ACTIVATIONS = (nn.RReLU,)
_DROPS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "scaled_dot_product_attention", "feature_dropout",
          "multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"}  # fmt: skip
"""Functions that compute the same in training as in evaluation if they drop nothing."""


class FunctionalNoise(Stochastic):
    """The random numbers of a module's own code; `rate`, if given, replaces its dropout rate."""

    still = False  # if True, run the code in training mode but drop nothing

    def __init__(self, rate: float | None = None) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """Run a module's own code in training mode with this source's numbers, or in evaluation mode."""
        before = module.training
        module.training = not self.expects
        try:
            if self.expects or (before and self.draw is None and self.rate is None):  # torch's own numbers will do
                return run()
            check = partial(_check_not_checkpointed, module) if torch.is_grad_enabled() else None
            with RandomFrom(self, check):
                return run()
        finally:
            module.training = before

    def kept(self, shape: Sequence[int], p: float, like: Tensor) -> Tensor:
        """Return dropout's mask."""
        if self.still:
            return STILL.kept(shape, p, like)
        p = p if self.rate is None else self.rate
        return (self.uniform(shape, like) >= p).to(like.dtype) / (1 - p)

    def extra_repr(self) -> str:
        return "" if self.rate is None else f"rate={self.rate}"


_CHECKPOINT = inspect.unwrap(checkpoint).__code__


def _check_not_checkpointed(module: nn.Module, function: str) -> None:
    """Raise an InputError if a module's own code draws inside `torch.utils.checkpoint`.

    The backward pass would rerun that code without this source. Checkpoints around the whole module are fine.
    """
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not FunctionalNoise.forward.__code__:
        if frame.f_code is _CHECKPOINT:
            raise InputError(
                f"the code of a {type(module).__name__} calls {function} inside torch.utils.checkpoint, so the "
                "backward pass would draw other numbers: turn off checkpointing, or do not change the dropout rate"
            )
        frame = frame.f_back


_NOISY: dict[type[nn.Module], type[nn.Module]] = {}


def noisy_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward runs through its `FunctionalNoise`; cached."""
    if kind in _NOISY:
        return _NOISY[kind]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._modules[CHILD](self, partial(kind.forward, self, *args, **kwargs))

    own = {"forward": forward, "own_class": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return _NOISY.setdefault(kind, type(kind.__name__, (kind,), own))


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without `noisy_class`."""
    return vars(type(module)).get("own_class", type(module))


# -- finding functional noise ------------------------------------------------------------------------------


def mark_noise_to_keep(network: nn.Module, rate: float | None) -> None:
    """Mark a network whose functional noise is kept on; the first input shows where it is."""
    vars(network)[_MARK] = {"rate": rate}


def freeze_noise_when_found(network: nn.Module, seed: Tensor) -> None:
    """Mark a network whose functional noise is frozen once it is found, with numbers from a seed."""
    network.register_buffer(SEED, seed)


def has_noise_to_keep(network: nn.Module) -> bool:
    """Return whether the network is marked by `mark_noise_to_keep`, and its noise was not found yet."""
    return _MARK in vars(network)


def has_noise_to_find(network: nn.Module) -> bool:
    """Return whether an input has yet to show functional noise or the batch axes of frozen noise."""
    return has_noise_to_keep(network) or bool(rows_to_find(network))


def find_noise(network: nn.Module, x: Input, run: Callable[[Input], Tensor]) -> dict[str, str]:
    """Find the batch axes of frozen noise and the functional noise, and keep the latter on (frozen if so marked).

    Return a note for each module with noise, by name. Raise an error for noise that cannot be kept on.
    """
    find_rows(network, x, run)
    if not has_noise_to_keep(network):
        return {}
    found = _keep_on(network, x, partial(run, x), vars(network)[_MARK]["rate"])
    del vars(network)[_MARK]
    if (seed := network._buffers.pop(SEED, None)) is not None:
        for number, name in enumerate(found):
            module: Any = network.get_submodule(name)
            module.add_module(CHILD, FrozenNoise(module._modules[CHILD], hash_numbers(hash_numbers(seed) + number)))
        find_rows(network, x, run)
    return {name: f"{', '.join(sorted(functions))} in its own code stays on" for name, functions in found.items()}


def _keep_on(network: nn.Module, x: Input, run: Callable[[], Tensor], rate: float | None) -> dict[str, set[str]]:
    """Keep functional noise on; return the random functions of each module."""
    found = _find(network, x, run)
    for name in found:
        module = network.get_submodule(name)
        if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or hasattr(module, CHILD):
            raise ValueError(
                f"{_place(network, name)} draws random numbers in its own code, which cannot be kept on for this kind "
                "of module: select the dropout layers to keep on with layers="
            )
    for name in found:
        module = network.get_submodule(name)
        module.add_module(CHILD, FunctionalNoise(rate).train(module.training))
        module.__class__ = noisy_class(type(module))
    for module in network.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # the fast path does not call the layers
    try:
        _check_only_noise(network, x, run, found)
    except BaseException:
        for name in found:
            module = network.get_submodule(name)
            del module._modules[CHILD]
            module.__class__ = own_class(module)
        raise
    return found


def _find(network: nn.Module, x: Input, run: Callable[[], Tensor]) -> dict[str, set[str]]:
    """Return the random functions that modules call in training but not in evaluation."""
    seen: dict[bool, dict[str, set[str]]] = {}
    for training in (True, False):
        with (
            override_attribute(network.modules(), "training", training),
            running_statistics(network),
            preserve_state(network, x),
            expecting(network),
            torch.no_grad(),
            recording(network, tensors=False, noise=True) as trace,
        ):
            run()
        seen[training] = trace.random
        if training and trace.unknown_random:
            name = next(iter(trace.unknown_random))
            raise ValueError(
                f"{_place(network, name)} draws random numbers in training by an unknown function, which cannot be "
                "kept on in evaluation: select the dropout layers to keep on with layers="
            )
    return {
        name: new
        for name, functions in seen[True].items()
        if (new := functions - seen[False].get(name, set()))
        and not isinstance(network.get_submodule(name), _ACTIVATIONS)
    }


def _check_only_noise(network: nn.Module, x: Input, run: Callable[[], Tensor], found: dict[str, set[str]]) -> None:
    """Raise an error if code under `self.training` does more than dropout, which would change evaluation."""
    if not found or not all(functions <= _DROPS for functions in found.values()):
        return
    with override_attribute(network.modules(), "training", False), preserve_state(network, x), torch.no_grad():
        with expecting(network):
            want = run()
        sources = [layer for layer in stochastic_layers(network) if isinstance(layer, FunctionalNoise)]
        with (
            expecting(network),
            override_attribute(sources, "expects", False),
            override_attribute(sources, "still", True),
        ):
            got = run()
    if not agree(got[None], want[None]):
        places = ", ".join(_place(network, name) for name in found)
        raise ValueError(
            f"{places} uses self.training for more than dropout, so dropout alone cannot be kept on: select the "
            "dropout layers to keep on with layers="
        )


def _place(network: nn.Module, name: str) -> str:
    kind = type(network.get_submodule(name)).__name__
    return f"layer {name!r} ({kind})" if name else f"the network itself ({kind})"
