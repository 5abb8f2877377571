"""The protocol: a multitude answers a batch `[B, ...]` with predictions `[S, B, ...]`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.predictive import Predictive

Input = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""What a network is called with: one tensor, its positional arguments, or its keyword arguments."""

Criterion = Callable[[Tensor, Tensor], Tensor]
"""`(prediction [B, ...], target [B, ...]) -> mean over the batch`."""


class Told(ValueError):
    """An error that says what is wrong in the library's own words."""


class Multitude(nn.Module):
    """A network that gives many predictions: one for each member, or one for each draw.

    A multitude wears its network's names: it shares the network's registries of parameters, buffers and
    children, so that `state_dict()`, `named_parameters()` and attribute access read like the user's own
    network, with nothing put in front.

    Subclasses say how the predictions are made (`_predictions`), whether their members share weights
    (`independent`), and what one member is alone (`_member`).
    """

    independent = False
    """Whether the members share no weight. Then each learns from its own loss, and the losses add up."""

    def __init__(self, network: nn.Module, members: int) -> None:
        super().__init__()
        for registry in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, registry, getattr(network, registry))
        object.__setattr__(self, "network", network)  # not registered, which would put a name in front
        self.training = network.training
        self.members = members
        self.task = "classification"
        self.notes: dict[str, str] = {}
        self._targets_checked = False

    network: nn.Module

    # -- the four verbs ----------------------------------------------------------------------------------

    def forward(self, x: Input) -> Tensor:
        """`[B, ...] -> [S, B, ...]`, in training and in evaluation alike."""
        if torch.compiler.is_compiling():
            return self._predictions(x)
        with told_in_terms_of(x), _plain_attention():
            predictions = self._predictions(x)
        return _one_per_input(predictions, x)

    def loss(self, x: Input, y: Tensor, criterion: Criterion | None = None) -> Tensor:
        """The training objective, a scalar.

        Members that share no weight are trained on the sum of their own losses, so that each learns exactly
        as it would alone; members that share weights on the mean over members.
        """
        predictions = self(x)
        if criterion is None:
            self._check_targets(predictions, y)
            criterion = F.cross_entropy
        return self._combine([criterion(prediction, y) for prediction in predictions])

    def predict(self, x: Input, task: str | None = None) -> Predictive:
        """What the members say together about `x`, in evaluation mode and without gradients."""
        for tensor in tensors_in(x):
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise ValueError(f"x holds {int(tensor.isnan().sum())} NaN values; predictions would be meaningless")
        with evaluating(self), torch.no_grad():
            return Predictive(self(x), task or self.task)

    def member(self, index: int) -> nn.Module:
        """Member `index` alone, as a plain network of the user's own layer classes."""
        if not isinstance(index, int) or not 0 <= index < self.members:
            raise ValueError(f"index must be a member's, 0 to {self.members - 1}, got {index!r}")
        return self._member(index)

    # -- what a subclass says ----------------------------------------------------------------------------

    def _predictions(self, x: Input) -> Tensor:
        raise NotImplementedError

    def _member(self, index: int) -> nn.Module:
        raise NotImplementedError

    # -- what nn.Module must be told ---------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """A multitude's own settings never clash with its network's names."""
        if isinstance(value, (Tensor, nn.Module)):
            super().__setattr__(name, value)
        else:
            object.__setattr__(self, name, value)

    def train(self, mode: bool = True) -> Multitude:
        super().train(mode)
        self.network.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Multitude:
        self.network._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        return f"members={self.members}"

    # -- the rest ----------------------------------------------------------------------------------------

    def summary(self) -> str:
        """A table of the layers that hold weights: name, class, parameters, and what the method did to each."""
        rows = [
            (name or "(root)", type(layer).__name__, f"{count:,}", self.notes.get(name, ""))
            for name, layer in self.network.named_modules()
            if (count := sum(p.numel() for p in layer.parameters(recurse=False)))
        ]
        total = sum(p.numel() for p in self.parameters())
        rows.append(("total", f"{self.members} members", f"{total:,}", self.notes.get("total", "")))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {count:>{widths[2]}}  {note}".rstrip()
            for name, kind, count, note in rows
        )

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient to at most `max_norm`, member by member where they share no weight; the norm(s)."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def _combine(self, losses: list[Tensor]) -> Tensor:
        if losses[0].dim():
            raise ValueError(f"criterion must give one number, the batch's mean, got shape {list(losses[0].shape)}")
        total = torch.stack(losses)
        return total.sum() if self.independent else total.mean()

    def _check_targets(self, predictions: Tensor, y: Tensor) -> None:
        """Class labels must be classes. On a GPU only the first batch is read, since reading stalls it."""
        if predictions.dim() < 3 or predictions.shape[2] == 1:
            raise ValueError(
                f"cross entropy needs predictions for two classes or more, got {list(predictions.shape)}; "
                "pass criterion= for anything else"
            )
        if y.is_floating_point() or torch.compiler.is_compiling() or (y.is_cuda and self._targets_checked):
            return
        self._targets_checked = True
        classes = predictions.shape[2]
        wrong = y[(y != -100) & ((y < 0) | (y >= classes))]
        if wrong.numel():
            raise ValueError(f"y must hold classes 0 to {classes - 1}, got {wrong[0].item()}")


class SharedMembers(Multitude):
    """Members that share one network's weights: the batch is tiled, `[M*B, ...]`, member-major.

    Layers that tell the members apart have a `member` attribute: None when they see the tiled batch, `i` when
    they see member `i`'s rows alone. In evaluation on a CPU the members run one after the other, which is
    faster there than one large batch.
    """

    def _predictions(self, x: Input) -> Tensor:
        if self.training or any(t.is_cuda for t in tensors_in(x)):
            return call(self.network, tile(x, self.members)).unflatten(0, (self.members, -1))
        return torch.stack([self._alone(index, x) for index in range(self.members)])

    def _alone(self, index: int, x: Input) -> Tensor:
        layers = [layer for layer in self.network.modules() if isinstance(layer, MemberLayer)]
        for layer in layers:
            layer.member = index
        try:
            return call(self.network, x)
        finally:
            for layer in layers:
                layer.member = None

    def _member(self, index: int) -> nn.Module:
        folded = {id(layer): layer.fold(index) for layer in self.network.modules() if isinstance(layer, MemberLayer)}
        return copy.deepcopy(self.network, folded)


class MemberLayer(nn.Module):
    """A user's layer that treats the rows of each member in its own way (see `SharedMembers`)."""

    def __init__(self, layer: nn.Module, members: int) -> None:
        super().__init__()
        self.layer = layer
        self.members = members
        self.member: int | None = None
        self.axis = -1 if isinstance(layer, nn.Linear) else 1

    def __getattr__(self, name: str) -> Any:
        """The layer's plain settings (`stride`, `in_features`), which networks may ask for; never its tensors."""
        if name != "layer" and "layer" in self._modules:
            setting = getattr(self.layer, name, None)
            if setting is not None and not isinstance(setting, Tensor):
                return setting
        return super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """The weight's shape, dtype and device, for networks that ask; its values are NaN, for no member has them."""
        weight: Any = self.layer.weight
        return weight.new_full((), torch.nan).expand(weight.shape)

    def fold(self, index: int) -> nn.Module:
        """The plain layer that member `index` sees."""
        raise NotImplementedError

    def _by_member(self, function: Callable[[Tensor, Tensor], Tensor], x: Tensor, values: Tensor) -> Tensor:
        """`function` of the rows of x `[M*B, C, ...]` and their member's own of `values [M, C]`, in x's dtype."""
        shape = [1] * x.dim()
        shape[self.axis] = -1
        if self.member is not None:
            return function(x, values[self.member].to(x.dtype).view(shape))
        rows = x.unflatten(0, (self.members, -1))
        return function(rows, values.to(x.dtype).view(self.members, *shape)).flatten(0, 1)


# -- calling any network -----------------------------------------------------------------------------------


def split_call(x: Input) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for a network called with `x`."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def call(network: nn.Module, x: Input) -> Tensor:
    """Run a network and find its prediction: the tensor it returns, or the `logits` of what it returns."""
    args, kwargs = split_call(x)
    return prediction_in(network(*args, **kwargs))


def prediction_in(output: Any) -> Tensor:
    """A network's output, or the `logits` of it."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise Told(
        f"the network returned a {type(output).__name__}; it must return a tensor, or an object with `logits` "
        "(wrap it in a module that picks the prediction)"
    )


def tile(x: Input, times: int) -> Input:
    """The batch `times` times over, `[B, ...] -> [times*B, ...]`."""

    def tiled(value: Any) -> Any:
        return value.repeat(times, *[1] * (value.dim() - 1)) if isinstance(value, Tensor) and value.dim() else value

    if isinstance(x, Mapping):
        return {key: tiled(value) for key, value in x.items()}
    return tuple(tiled(value) for value in x) if isinstance(x, tuple) else tiled(x)


def tensors_in(x: Input) -> list[Tensor]:
    """The tensors that a network is called with."""
    values = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple) else (x,)
    return [value for value in values if isinstance(value, Tensor)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's own mode again after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        if isinstance(model, Multitude):
            model.network.training = model.training


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Without torch's fused attention, which vmap cannot batch."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def told_in_terms_of(x: Input) -> Iterator[None]:
    """Turn what torch says about an input that does not fit into a ValueError that names the input."""
    tensors = tensors_in(x)
    if not tensors:
        raise ValueError(f"x must be a tensor, or a tuple or mapping that holds one, got {type(x).__name__}")
    try:
        yield
    except (torch.OutOfMemoryError, NotImplementedError, Told):
        raise
    except (RuntimeError, IndexError, ValueError) as error:
        if "CUDA error" in str(error):
            raise
        shapes = ", ".join(f"{list(t.shape)} ({t.dtype})" for t in tensors)
        raise Told(f"x of shape {shapes} does not fit the network: {error}") from error


def _one_per_input(predictions: Tensor, x: Input) -> Tensor:
    batch = tensors_in(x)[0].shape[:1]
    if predictions.dim() < 2 or predictions.shape[1:2] != batch:
        raise ValueError(
            f"x of shape {list(tensors_in(x)[0].shape)} gave predictions of shape {list(predictions.shape)}: "
            "the first dimension of x must be the batch, and the network must give one prediction for each input"
        )
    return predictions
