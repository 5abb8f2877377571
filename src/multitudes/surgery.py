"""Surgery: select a network's layers, replace them in a copy, initialise them anew, check the result."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.calling import Input, call
from multitudes.checks import check_count
from multitudes.members import Members
from multitudes.multitude import Multitude, evaluating, plain
from multitudes.stochastic import expecting

Selector = None | str | Sequence[str] | Callable[[str, nn.Module], bool]
"""Which layers: None for a method's default, a regular expression matched against the whole qualified name, a
list of names or dotted suffixes, or a function of `(name, module)`."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PRODUCTS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)
"""Layers that multiply their input by a weight matrix or kernel."""


# -- select and replace ------------------------------------------------------------------------------------


def select(
    model: nn.Module, selector: Selector, kinds: tuple[type[nn.Module], ...], argument: str = "layers"
) -> dict[str, nn.Module]:
    """The layers of `model` that are of one of `kinds` and match `selector`, by qualified name.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> list(select(model, None, (nn.Linear,)))
    ['0', '2']
    >>> list(select(model, "[1-9]", (nn.Linear,)))
    ['2']
    """
    able = {name: module for name, module in model.named_modules() if type(module) in kinds}
    if not able:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"model ({type(model).__name__}) has no layer that can be converted: {names}")
    if selector is None:
        return able
    if not (callable(selector) or isinstance(selector, Iterable)):
        raise ValueError(
            f"{argument} must be None, a regular expression, a list of names or a function, got {selector!r}"
        )
    if isinstance(selector, str):
        chosen = {name: m for name, m in able.items() if _fullmatch(selector, name, argument)}
    elif callable(selector):
        chosen = {name: m for name, m in able.items() if selector(name, m)}
    else:
        chosen = _listed(model, able, list(selector), argument)
    if not chosen:
        given = "a function" if callable(selector) else repr(selector)
        raise ValueError(f"{argument}={given} selects nothing; it could select: {', '.join(able)}")
    return chosen


def _fullmatch(pattern: str, name: str, argument: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"{argument}={pattern!r} is not a regular expression: {error}") from error


def _listed(model: nn.Module, able: dict[str, nn.Module], wanted: list[str], argument: str) -> dict[str, nn.Module]:
    def named(names: Any, want: str) -> list[str]:
        return [name for name in names if name == want or name.endswith(f".{want}")]

    for want in wanted:
        if named(able, want):
            continue
        others = named((name for name, _ in model.named_modules()), want)
        if others:
            kind = type(model.get_submodule(others[0])).__name__
            raise ValueError(
                f"{argument}: layer {others[0]!r} is a {kind}, which this method cannot convert; "
                f"it can convert: {', '.join(able)}"
            )
        raise ValueError(f"{argument}: no layer is named {want!r}; there are: {', '.join(able)}")
    chosen = {name for want in wanted for name in named(able, want)}
    return {name: module for name, module in able.items() if name in chosen}


def replace(model: nn.Module, replacements: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of `model` in which the named layers are others. The model itself is left as it was.

    A layer that the network uses in several places is replaced in all of them. Training modes are kept.
    """
    _check_untied(model, replacements)
    memo: dict[int, Any] = {}
    for name, new in replacements.items():
        old = model.get_submodule(name)
        memo[id(old)] = new.train(old.training)
    replaced = copy.deepcopy(model, memo)
    for module in replaced.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # In evaluation it would read the weights of its linear layers instead of calling them.
            module.activation_relu_or_gelu = 0
    return replaced


def _check_untied(model: nn.Module, names: Iterable[str]) -> None:
    """A weight that two layers share would be two weights after one of them is replaced."""
    owners: dict[int, set[tuple[int, str]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add((id(module), name))
    for name in names:
        for parameter in model.get_submodule(name).parameters():
            if len(owners[id(parameter)]) > 1:
                tied = sorted(owner for _, owner in owners[id(parameter)])
                raise ValueError(
                    f"layers {' and '.join(map(repr, tied))} share a weight, so {name!r} cannot be replaced"
                )


# -- initialise --------------------------------------------------------------------------------------------


def redraw(model: nn.Module) -> nn.Module:
    """Initialise every layer anew, in place, from torch's random state.

    Each layer by its own `reset_parameters`, inner layers first, as constructors do it, so that a network may
    have the last word in a `reset_parameters` of its own; Hugging Face models by their own initialiser.
    Parameters that stand alone (class tokens, position embeddings) are drawn from the normal distribution
    with the mean and deviation that they have; constant ones stay.
    """
    for module in reversed(list(model.modules())):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
            continue
        for parameter in module.parameters(recurse=False):
            _redraw_alone(parameter)
    for module in model.modules():
        initialise = getattr(module, "_init_weights", None)
        if callable(initialise):
            with _unmarked(module):
                module.apply(initialise)
            break
    return model


def _redraw_alone(parameter: nn.Parameter) -> None:
    values = parameter.data
    if parameter.requires_grad and values.is_floating_point() and values.numel() > 1 and values.std() > 0:
        values.normal_(values.mean().item(), values.std().item())


@contextmanager
def _unmarked(module: nn.Module) -> Iterator[None]:
    """Hugging Face skips what it has marked as initialised; take the marks off for a while."""
    mark = "_is_hf_initialized"
    marked = [t for t in [*module.modules(), *module.parameters(), *module.buffers()] if mark in vars(t)]
    before = [getattr(t, mark) for t in marked]
    for t in marked:
        delattr(t, mark)
    try:
        yield
    finally:
        for t, value in zip(marked, before, strict=True):
            setattr(t, mark, value)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Random numbers from `seed`, and torch's own random state as it was, after. None: torch's own state."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


# -- examples ----------------------------------------------------------------------------------------------

_SIDES = (32, 28, 224, 64, 16, 8, 96, 128, 48, 256, 299, 384, 512, 12, 20, 24, 40, 56, 80, 100, 112, 160, 192)
_LENGTHS = (128, 64, 32, 256, 512, 1000, 1024, 16, 8, 100, 96, 48, 2048, 4096, 16000)


def example_for(model: nn.Module, example: Input | None = None) -> Input:
    """The given example, or noise of a shape that fits the network, found by trying the usual sizes."""
    if example is not None:
        return example
    first = next((m for m in model.modules() if type(m) in PRODUCTS), None)
    where = next(iter([*model.parameters(), *model.buffers()]), torch.zeros(0))
    for shape in _shapes(first):
        x = torch.randn(2, *shape, device=where.device, dtype=where.dtype if where.is_floating_point() else None)
        try:
            with observing(model):
                call(model, x)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            continue
        return x
    raise ValueError(f"no input was found that fits the model ({type(model).__name__}): pass one batch as example=")


def _shapes(first: Any) -> list[tuple[int, ...]]:
    if isinstance(first, nn.Linear):
        return [(first.in_features,), (8, first.in_features)]
    if first is None:
        return []
    channels, spatial = first.in_channels, len(first.kernel_size)
    sides = _LENGTHS if spatial == 1 else _SIDES if spatial == 2 else _SIDES[:6]
    return [(channels, *[side] * spatial) for side in sides]


@contextmanager
def observing(*models: nn.Module) -> Iterator[None]:
    """Inside, networks run in evaluation, with expectations instead of draws, and without gradients."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
            stack.enter_context(expecting(model))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def hooked(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], hook: Callable[[str, nn.Module, Any, Any], Any]
) -> Iterator[None]:
    """Let `hook(name, layer, args, output)` see, and perhaps replace, the outputs of the layers of these kinds."""
    handles = [
        module.register_forward_hook(lambda m, args, y, name=name: hook(name, m, args, y))
        for name, module in model.named_modules()
        if type(module) in kinds
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def executed(model: nn.Module, example: Input, kinds: tuple[type[nn.Module], ...]) -> list[str]:
    """The names of the layers of these kinds, in the order in which a forward reaches them."""
    order: list[str] = []
    with hooked(model, kinds, lambda name, *_: order.append(name)), observing(model):
        call(model, example)
    return list(dict.fromkeys(order))


# -- check -------------------------------------------------------------------------------------------------


def check(net: Multitude, example: Input, tolerance: float = 1e-4) -> None:
    """Prove a multitude right on an example, or raise a ValueError that says where it is wrong.

    Each member's prediction must equal that of `net.member(i)` alone. Where members share no weight, no
    prediction may depend on another member's weights: with one member's weights set to NaN, the others' are
    the same. Every runner that can run the network is checked. Where layers draw, expectations are compared.
    """
    for runner in ("loop", "packed", "stacked") if isinstance(net, Members) else ("auto",):
        one = copy.deepcopy(net).eval()
        with torch.no_grad():
            try:
                if isinstance(one, Members):
                    one.runner = runner
                predictions = one(example, draws=0)
            except ValueError:
                if runner in ("packed", "stacked"):  # refused, so never used
                    continue
                raise
            _check_equal(one, example, predictions, tolerance, runner)
            if one.independent:
                _check_independent(one, example, predictions, tolerance, runner)


def _check_equal(net: Multitude, example: Input, together: Tensor, tolerance: float, runner: str) -> None:
    for index, prediction in enumerate(together.unflatten(0, (net.members, -1))):
        member = net.member(index).eval()
        alone = member(example, draws=0) if isinstance(member, Multitude) else call(member, example)
        alone = alone.view_as(prediction)
        error = (prediction - alone).abs().max().item()
        if not error <= tolerance * max(1.0, alone.abs().max().item()):
            raise ValueError(f"member {index} differs from itself alone by {error:.2e} (runner {runner!r})")


def _check_independent(net: Multitude, example: Input, before: Tensor, tolerance: float, runner: str) -> None:
    for poisoned in range(net.members):
        other = copy.deepcopy(net)
        for parameter in other.parameters():
            parameter[poisoned] = torch.nan
        groups = zip(
            before.unflatten(0, (net.members, -1)),
            other(example, draws=0).unflatten(0, (net.members, -1)),
            strict=True,
        )
        for index, (was, now) in enumerate(groups):
            if index != poisoned and not torch.allclose(was, now, rtol=tolerance, atol=tolerance):
                raise ValueError(f"member {index} depends on the weights of member {poisoned} (runner {runner!r})")


# -- arguments ---------------------------------------------------------------------------------------------


def check_arguments(model: nn.Module, members: int, init: str, nested: bool = False) -> nn.Module:
    """What every method asks of its first arguments; returns the network to convert.

    That is the network of a multitude which only draws. Other multitudes are converted by few (`nested`).
    """
    check_model(model, nested)
    check_count("members", members)
    if init not in ("fresh", "pretrained"):
        raise ValueError(f"init must be 'fresh' or 'pretrained', got {init!r}")
    return plain(model)


def check_model(model: nn.Module, nested: bool = False) -> nn.Module:
    """A network, or a multitude which only draws, whose network it then returns."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(plain(model), Multitude) and not nested:
        raise ValueError(
            f"model is a multitude of members already ({type(model).__name__} of {model.members} members): "
            "convert the network first and make members of it after"
        )
    return plain(model)
