"""Calls of any network: arguments, outputs, errors for wrong inputs, and locks."""

from __future__ import annotations

import copy
import inspect
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import BaseTorchFunctionMode

from multitudes.networks.settings import override_attribute

Input = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""The arguments of a network: one tensor, its positional arguments, or its keyword arguments."""


class InputError(ValueError):
    """A wrong input or argument, with a message of the library; never wrapped in another error."""


def split_call(network: nn.Module, x: Input) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments with which to call a network on `x`.

    A mapping holds keyword arguments, or is the single argument of `forward(batch)`.
    """
    if isinstance(x, Mapping):
        return ((x,), {}) if _takes_whole(network, x) else ((), dict(x))
    return (x if isinstance(x, tuple) else (x,)), {}


def _takes_whole(network: nn.Module, x: Mapping[str, Any]) -> bool:
    """Return whether a network's forward takes a mapping as one argument, and not its entries as keywords."""
    if torch.compiler.is_compiling():
        return False
    signature = inspect.signature(network.forward)

    def fits(*args: Any, **kwargs: Any) -> bool:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True

    return fits(x) and not fits(**x)


def call(network: nn.Module, x: Input) -> Tensor:
    """Run a network and return its prediction (see `prediction_in`)."""
    if isinstance(x, Tensor):
        answer = network(x)
    else:
        args, kwargs = split_call(network, x)
        answer = network(*args, **kwargs)
    return answer if isinstance(answer, Tensor) and OUTPUT not in vars(network) else prediction_in(answer, network)


def under_all_names(network: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the other names of tied tensors to a state that has one name for each.

    This is for `functional_call` with `tie_weights=False`. A shared module keeps one name, since `functional_call` does
    not restore modules that are replaced under two.
    """
    own = dict(network.named_parameters()) | dict(network.named_buffers())
    given = {id(own[name]): tensor for name, tensor in state.items() if name in own}
    places: dict[str, Tensor] = {}
    for path, module in network.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if id(tensor) in given:
                places[f"{path}.{name}" if path else name] = given[id(tensor)]
    return places


def call_with(network: nn.Module, state: Mapping[str, Tensor], x: Input) -> Tensor:
    """Run a network with some of its tensors replaced, and return its prediction."""
    args, kwargs = split_call(network, x)
    return prediction_in(
        functional_call(network, under_all_names(network, state), args, kwargs, tie_weights=False), network
    )


OUTPUT = "multitudes_output"
"""The attribute that holds a network's `output`; copies and saved files keep it."""

Output = str | int | Callable[[Any], Tensor]
"""The place of the prediction in a network's output: a key, an attribute, a position, or a function of the output."""


def with_output(network: nn.Module, output: Output) -> nn.Module:
    """Return a shallow copy of the network with a chosen output; it shares parameters, buffers and children."""
    if isinstance(output, bool) or not (isinstance(output, (str, int)) or callable(output)):
        raise ValueError(f"output must be a key, an attribute, a position or a function of the output, got {output!r}")
    twin = copy.copy(network)
    object.__setattr__(twin, OUTPUT, output)
    return twin


def chosen_output(network: nn.Module) -> Output | None:
    """Return the chosen output of a network, or None."""
    return vars(network).get(OUTPUT)


def prediction_in(answer: Any, network: nn.Module) -> Tensor:
    """Return the prediction in a network's output: the chosen part, the tensor itself, or its `logits`."""
    output = vars(network).get(OUTPUT)
    if output is not None:
        found = part_of(answer, output)
        if not isinstance(found, Tensor):
            raise InputError(f"output={_shown(output)} must be a tensor, got a {type(found).__name__}")
        return found
    if isinstance(answer, Tensor):
        return answer
    logits = answer.get("logits") if isinstance(answer, Mapping) else getattr(answer, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise InputError(
        f"found no prediction in the network's output, a {type(answer).__name__}{_parts(answer)}: pass its name, its "
        "position or a function of the output as output= of mt.Multitude(model, output=...), and pass the result to "
        "methods instead of model"
    )


def part_of(answer: Any, output: Output) -> Any:
    """Return the chosen part of a network's output; raise an error if it is missing.

    A single tensor counts as the logits, since some networks return more than logits in training only.
    """
    if isinstance(answer, Tensor) and not callable(output):
        if output == "logits":
            return answer
        raise InputError(f"output={_shown(output)} does not exist: the network returned a single tensor")
    try:
        if callable(output):
            return output(answer)
        if isinstance(output, str) and not isinstance(answer, Mapping):
            return getattr(answer, output)
        return answer[output]
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise InputError(
            f"output={_shown(output)} is missing from the network's output, a {type(answer).__name__}"
            f"{_parts(answer)}: {error}"
        ) from error


def _shown(output: Output) -> str:
    return repr(output) if isinstance(output, (str, int)) else getattr(output, "__name__", "a function")


def _parts(answer: Any) -> str:
    """Format the tensors in an output."""
    named: Any = {}
    if isinstance(answer, Mapping):
        named = answer
    elif isinstance(answer, (tuple, list)):
        named = dict(zip(getattr(answer, "_fields", range(len(answer))), answer, strict=True))
    elif hasattr(answer, "__dict__"):
        named = vars(answer)
    shapes = [f"{name!r} {list(value.shape)}" for name, value in named.items() if isinstance(value, Tensor)]
    return f" with {', '.join(shapes)}" if shapes else ""


def tile(x: Input, times: int) -> Input:
    """Repeat the batch, `[B, ...] -> [times*B, ...]`."""
    return map_tensors(lambda t: t.repeat(times, *[1] * (t.dim() - 1)) if t.dim() else t, x)


def select_rows(x: Input, index: Tensor) -> Input:
    """Select rows of the batch by their positions."""
    batch = tensors_in(x)[0].shape[0]
    return map_tensors(lambda t: t[index] if t.shape[:1] == (batch,) else t, x)


def map_tensors(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Apply a function to every tensor in an input, at any depth."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {key: map_tensors(function, value) for key, value in x.items()}
    if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
        return type(x)(map_tensors(function, value) for value in x)
    return x


LABELS = ("label", "labels")
"""The keys of targets in Hugging Face's batches."""


def split_batch(batch: Any) -> tuple[Input, Tensor | None]:
    """Split a batch of data into the arguments of a network and the targets.

    A batch is an input, a tuple or list that starts with one, or a mapping of keyword arguments and labels.
    """
    if isinstance(batch, Mapping):
        x: Any = {key: value for key, value in batch.items() if key not in LABELS}
        y = next((batch[key] for key in LABELS if key in batch), None)
    elif isinstance(batch, (tuple, list)) and batch:
        x, y = batch[0], batch[1] if len(batch) > 1 else None
        if isinstance(x, Mapping):
            x = {key: value for key, value in x.items() if key not in LABELS}
        x = tuple(x) if isinstance(x, list) else x
    else:
        x, y = batch, None
    if not isinstance(x, (Tensor, Mapping)) and not (isinstance(x, tuple) and x):
        raise ValueError(f"a batch must be, or start with, a tensor, a mapping or a tuple, got {type(x).__name__}")
    return x, y if isinstance(y, Tensor) else None


def weight_in(batch: Any, y: Tensor, what: str) -> Tensor | None:
    """Return the weights `[B]` of a batch `(x, y, weight)`, or None; `what` names the batch in errors."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 3 or batch[2] is None:
        return None
    weight = batch[2]
    fits = isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape == y.shape[:1]
    if len(batch) > 3 or not fits:
        got = f"{list(weight.shape)} ({weight.dtype})" if isinstance(weight, Tensor) else type(weight).__name__
        got = f"{len(batch)} parts" if len(batch) > 3 else got
        raise ValueError(
            f"{what} must be (x, y), or (x, y, weight) with one floating-point weight for each of the {len(y)} rows, "
            f"got {got}"
        )
    if not weight.is_cuda and not bool((weight.isfinite() & (weight >= 0)).all()):  # reading would wait for a GPU
        wrong = weight[~(weight.isfinite() & (weight >= 0))][0].item()
        raise ValueError(f"{what} must have finite weights, 0 or more, got {wrong:g}")
    return weight


def to_device(x: Any, device: torch.device | str | None) -> Any:
    """Move an input to another device."""
    return map_tensors(lambda tensor: tensor.to(device), x)


def tensors_in(x: Any) -> list[Tensor]:
    """Return the tensors in an input, at any depth."""
    if isinstance(x, Tensor):
        return [x]
    values = x.values() if isinstance(x, Mapping) else x
    nested = isinstance(x, (Mapping, tuple, list)) and not hasattr(x, "_fields")
    return [tensor for value in values for tensor in tensors_in(value)] if nested else []


def tensor_versions(x: Input) -> list[int]:
    """Return the version counter of each tensor of an input; 0 in inference mode, which has no counters."""
    tensors = [x] if isinstance(x, Tensor) else tensors_in(x)
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def plain_attention(network: nn.Module | None = None) -> AbstractContextManager[Any]:
    """Keep torch's attention modules from their fused kernel, which calls no layers and fails under vmap.

    A `network` without such modules needs no function mode, which would cost a microsecond per function.
    """
    if network is not None and not any(isinstance(module, _FUSED) for module in network.modules()):
        return nullcontext()
    if torch.compiler.is_compiling():  # only while tracing
        return override_attribute([torch.backends.mha], "_is_fastpath_enabled", False)
    return BaseTorchFunctionMode()  # torch uses fused attention only if the thread has no active mode


def input_kind(x: Any, batch: int | None = None) -> Any:
    """Describe an input without its sizes, as a hashable: ranks, dtypes, and which tensors have a batch axis."""
    if batch is None:
        first = tensors_in(x)
        batch = first[0].shape[0] if first and first[0].dim() else 0
    if isinstance(x, Tensor):
        return x.dim(), x.dtype, x.device.type, x.dim() > 0 and x.shape[0] == batch
    if isinstance(x, Mapping):
        return tuple((key, input_kind(value, batch)) for key, value in x.items())
    if isinstance(x, (tuple, list)):
        return tuple(input_kind(value, batch) for value in x)
    return type(x)


def verdict_key(network: nn.Module, x: Input) -> tuple[bool, Hashable]:
    """Return the cache key of a verdict: mode, kind of input, whether it has several rows, and autocast."""
    first = x if isinstance(x, Tensor) else tensors_in(x)[0]
    device = first.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    kind = (x.dim(), x.dtype, device) if isinstance(x, Tensor) else input_kind(x)
    return network.training, (kind, first.dim() > 0 and len(first) > 1, autocast)


@contextmanager
def input_errors(x: Input) -> Iterator[None]:
    """Turn torch's errors inside `with` into a ValueError that names the input."""
    check_input(x)
    try:
        yield
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise_about(x, error)


def check_input(x: Input) -> None:
    """Raise a ValueError if an input holds no tensor."""
    if not isinstance(x, Tensor) and not tensors_in(x):
        raise ValueError(f"x must be a tensor, or a tuple or mapping that holds one, got {type(x).__name__}")


def raise_about(x: Input, error: Exception) -> NoReturn:
    """Raise an `InputError` that names the input, or the error itself if it is not about the input."""
    if isinstance(error, (torch.OutOfMemoryError, NotImplementedError, InputError)) or "CUDA error" in str(error):
        raise error
    shapes = ", ".join(f"{list(t.shape)} ({t.dtype})" for t in tensors_in(x))
    raise InputError(f"x of shape {shapes} does not fit the network: {error}") from error


def one_per_input(predictions: Tensor, x: Input) -> Tensor:
    """Return predictions `[S, B, ...]`; raise an error if B is not the size of the first or second axis of `x`.

    If `x` has several tensors, B is not checked.
    """
    tensors = [x] if isinstance(x, Tensor) else tensors_in(x)
    fits = len(tensors) > 1 or predictions.shape[1:2] in (tensors[0].shape[:1], tensors[0].shape[1:2])
    if predictions.dim() < 2 or not fits:
        raise ValueError(
            f"x of shape {list(tensors[0].shape)} gave predictions of shape {list(predictions.shape)}: the first or "
            "second dimension of x must be the batch, and the network must return one prediction for each input"
        )
    return predictions


# -- locks ---------------------------------------------------------------------------------------------------

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_FINDING = threading.Lock()
_INITIALIZING = threading.RLock()


def initializing() -> threading.RLock:
    """Return the lock for code that initializes networks, which uses torch's random state; all threads share it.

    Take it before a network's lock, never after.
    """
    return _INITIALIZING


def one_thread(network: nn.Module) -> AbstractContextManager[object]:
    """Return the lock of a network, to hold while it runs; no lock in compiled graphs, which cannot trace it."""
    if torch.compiler.is_compiling():
        return nullcontext()
    with _FINDING:
        return _LOCKS.setdefault(network, threading.RLock())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Hold a model's lock and put it in evaluation mode inside `with`; restore each module's mode afterwards."""
    shared = getattr(type(model), "shares", None)  # a multitude's network is not one of its children
    network: nn.Module = model if shared is None else getattr(model, shared)
    with one_thread(network):
        modes = [(module, module.training) for module in (*model.modules(), network)]
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _forget() -> None:
    global _FINDING, _INITIALIZING
    _FINDING, _INITIALIZING = threading.Lock(), threading.RLock()
    _LOCKS.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)  # the child lacks the threads that hold the locks
