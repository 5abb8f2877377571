"""Members that share one network's weights, and the layers that tell them apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, InputError, call, input_errors, tensors_in, tile
from multitudes.core.calling import rows as some_rows
from multitudes.core.compiling import uncompiled
from multitudes.core.copying import copied
from multitudes.core.draws.functional import to_be_kept
from multitudes.core.draws.stochastic import stochastic_layers
from multitudes.core.lending import Attributes, checkpointed, each_from_the_same
from multitudes.core.multitude import Multitude, evaluating
from multitudes.core.proof import alike, first_difference, kind_of, running_statistics, silent_trial, unmoved
from multitudes.core.settings import holding
from multitudes.core.tasks import Criterion
from multitudes.core.unreadable import unreadable

MOST_ROWS = 4096
"""Of a table, the most rows that all members see side by side in evaluation on a CPU."""


class SharedMembers(Multitude):
    """Members that share one network's weights, and run as one batch, tiled `[M*B, ...]`, member-major.

    Layers that tell the members apart have a `member` attribute: None when they see the tiled batch, `i` when
    they see member `i`'s rows alone. What comes before the first of them runs once for all members: that layer is the
    one that tiles (the way "late"). Where that is not the same computation, the input is tiled ("tiled"). In evaluation
    on a CPU the members run one after the other ("alone"), which is faster there than one large batch, but for rows of
    a table; and wherever a tiled batch is not the same computation, because a network has its batch elsewhere, or lets
    its rows see each other. That is tried with the first input of each kind. Batch norms in training take their
    statistics over the tiled batch, all members' together.
    """

    expands = False  # the rows of the tiled batch are the members'
    found_anew = ("_draw_cache", "_written", "_tiles")

    rows = "shared"
    """Whether the members learn from the same rows of a step, or each from its own part of them, "own"."""

    def __init__(self, network: nn.Module, members: int) -> None:
        super().__init__(network, members)
        self.forget()

    def forget(self) -> None:
        super().forget()
        self._written: list[Attributes] = [{} for _ in range(self.members)]
        self._tiles: dict[Any, str] = {}  # the ways, by mode and kind of input, and the last by mode alone

    def _predictions(self, x: Input) -> Tensor:
        if self._together(x) and (way := self._way(x)) != "alone":
            return self._late(x) if way == "late" else self._tiled(x)
        if torch.compiler.is_compiling():
            return torch.stack([self._alone(index, x) for index in range(self.members)])
        with each_from_the_same(self.network, self._written) as turn:
            return torch.stack([turn(index, partial(self._alone, index, x)) for index in range(self.members)])

    def loss(
        self,
        x: Input,
        y: Tensor,
        criterion: Criterion | None = None,
        *,
        task: str | None = None,
        dataset_size: int | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """As `Multitude.loss`; with `rows="own"` the batch is divided among the members, the rest of it left out."""
        if self.rows == "shared" or not self.training:
            return super().loss(x, y, criterion, task=task, dataset_size=dataset_size, weight=weight)
        given = len(y)
        used = given - given % self.members
        if not used:
            raise InputError(f"x must have a row for each of {self.members} members, which have their own, got {given}")
        if self._way(x) == "alone":
            raise InputError("rows='own' needs members that can lie side by side in one batch")
        with input_errors(x):
            self.settle(x)
            predictions = call(self.network, some_rows(x, torch.arange(used, device=y.device)))
        parts = predictions.unflatten(0, (self.members, -1))
        targets = y[:used].unflatten(0, (self.members, -1))
        weights = [None] * self.members if weight is None else weight[:used].unflatten(0, (self.members, -1)).unbind()
        criterion = self._criterion(criterion, task, parts, targets[0])
        each = zip(parts, targets, weights, strict=True)
        losses = [criterion(part, target, weight=own) for part, target, own in each]
        return self._combine(losses) + self._divergence_of_one(dataset_size)

    def _of_first(self, x: Input) -> Tensor:
        return self._alone(0, x)

    def _prepare(self, x: Input) -> None:
        if self._together(x):
            self._way(x)

    def _together(self, x: Input) -> bool:
        """Whether the members run side by side, if they can: rows of a table do in evaluation on a CPU too."""
        if self.training or any(t.is_cuda for t in tensors_in(x)):
            return True
        return isinstance(x, Tensor) and x.dim() == 2 and len(x) <= MOST_ROWS and x.is_floating_point()

    def _tiled(self, x: Input) -> Tensor:
        return call(self.network, tile(x, self.members)).unflatten(0, (self.members, -1))

    def _late(self, x: Input) -> Tensor:
        with holding(self._layers(), "batch", len(tensors_in(x)[0])):
            return call(self.network, x).unflatten(0, (self.members, -1))

    def _layers(self) -> list[MemberLayer]:
        return [module for module in self.network.modules() if isinstance(module, MemberLayer)]

    def _alone(self, index: int, x: Input) -> Tensor:
        with self._as(index):
            if torch.compiler.is_compiling():
                return call(self.network, x)
            with checkpointed(lambda: self._as(index)):
                return call(self.network, x)

    def _as(self, index: int) -> AbstractContextManager[None]:
        """Inside, the network is member `index`."""
        return holding(self._layers(), "member", index)

    def _way(self, x: Input) -> str:
        """Which of "late", "tiled" and "alone" to run: the first that gives what each member gives alone.

        It is tried once for each kind of input; a batch of one row cannot tell whether to tile late.
        """
        if torch.compiler.is_compiling() and self.training in self._tiles:
            return self._tiles[self.training]
        key = self.training, kind_of(x), len(tensors_in(x)[0]) > 1
        return self._tiles[key] if key in self._tiles else self._tried(x, key)

    @uncompiled
    def _tried(self, x: Input, key: Any) -> str:
        self._tiles[self.training] = self._tiles[key] = self._found(x)
        return self._tiles[key]

    def _found(self, x: Input) -> str:
        if self._may_be_late(x) and not self._prove(x, self._late):
            return "late"
        trouble = self._prove(x, self._tiled)
        if trouble:
            warnings.warn(
                f"the members' rows cannot lie side by side in one batch: {trouble}; so the members run one after "
                "the other, which is slower",
                stacklevel=2,
            )
        return "alone" if trouble else "tiled"

    def _may_be_late(self, x: Input) -> bool:
        """Not with layers that draw: each member has numbers of its own. Nor with a batch of one: it fits any other."""
        return len(tensors_in(x)[0]) > 1 and not stochastic_layers(self.network) and not to_be_kept(self.network)

    def _prove(self, x: Input, together: Callable[[Input], Tensor]) -> str:
        with running_statistics(self.network), silent_trial(self.network, x) as doubt:
            return self._trouble(x, together) or doubt()

    def _trouble(self, x: Input, together: Callable[[Input], Tensor]) -> str:
        """How members side by side differ from the first and the last one alone; nothing where they do not."""
        few = sorted({0, self.members - 1})
        want = []
        for index in few:
            with unmoved(self.network, x):
                want.append(self._alone(index, x))
        try:
            with unmoved(self.network, x):
                got = together(x)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return f"tiled, the network fails ({str(error).splitlines()[0]})"
        if got.shape[1:] == want[0].shape and alike(got[few], torch.stack(want)):
            return ""
        layer = first_difference(
            self.network,
            lambda: together(x),
            lambda: self._alone(few[-1], x),
            partial(_own_rows, few[-1], self.members),
        )
        return f"{layer} gives something else then" if layer else "tiled, the predictions are different ones"

    def _member(self, index: int) -> nn.Module:
        folded = {id(layer): layer.fold(index) for layer in self._layers()}
        return copied(self.network, folded)


def _own_rows(index: int, members: int, tiled: Tensor) -> Tensor | None:
    """A member's rows of a tiled tensor; None where they cannot be told."""
    return tiled.unflatten(0, (members, -1))[index] if tiled.dim() and tiled.shape[0] % members == 0 else None


class MemberLayer(nn.Module):
    """A user's layer that treats the rows of each member in its own way (see `SharedMembers`)."""

    wraps = "layer"
    """The child that is the user's own layer, whose place it takes."""

    def __init__(self, layer: nn.Module, members: int, axis: int = -1) -> None:
        """`axis` is that of channels in x, counted from the last."""
        super().__init__()
        self.layer = layer
        self.members = members
        self.member: int | None = None
        self.batch: int | None = None  # where it may be the one to tile: the rows of one member
        self.axis = axis
        self.place = ""  # its name in the network

    def __getattr__(self, name: str) -> Any:
        """The layer's plain settings (`stride`, `in_features`), which networks may ask for; never its tensors."""
        special = name == "layer" or name.startswith("__")  # as `__deepcopy__` of parametrised layers
        if not special and "layer" in self.__dict__.get("_modules", {}):
            setting = getattr(self.layer, name, None)
            if setting is not None and not isinstance(setting, Tensor):
                return setting
        return super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """The weight's shape, dtype and device, for networks that ask; to compute with it is an error."""
        with evaluating(self.layer), torch.no_grad():  # in training, what computes a weight may move its buffers
            return self._asked("weight", self.layer.weight)

    @property
    def bias(self) -> Tensor | None:
        """As `weight`; None where the layer has none."""
        bias = self._bias()
        return self._asked("bias", bias) if isinstance(bias, Tensor) else bias

    def _bias(self) -> Any:
        return getattr(self.layer, "bias", None)

    def _asked(self, name: str, tensor: Any) -> Tensor:
        kind = type(self.layer).__name__
        place = f"layer {self.place!r} ({kind})" if self.place else f"a {kind}"
        return unreadable(
            tensor,
            f"the network computes with the {name} of {place} instead of calling the layer, so that its members could "
            "not be told apart: leave it out by layers=",
        )

    def fold(self, index: int) -> nn.Module:
        """The plain layer that member `index` sees."""
        raise NotImplementedError

    def _changes_weight(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it is faster to change the weight for each member than to change x: on a CPU, if it is smaller.

        On a GPU one large product is faster than one for each member, and takes more memory (`benchmarks/README.md`).
        Where the layer has hooks, they see what each member's own layer sees.
        """
        if self._hooked:
            return True
        if x.dim() == 2:  # one product of all rows is faster than one for each member, however many rows there are
            return False
        return not x.is_cuda and weight.numel() * (self.members if self.member is None else 1) < x.numel()

    @property
    def _hooked(self) -> bool:
        return bool(self.layer._forward_hooks or self.layer._forward_pre_hooks)

    def _each(self, x: Tensor, own: Callable[[int, Tensor], Tensor]) -> Tensor:
        """What each member's `own` layer, a function of its number, makes of its rows."""
        if self.member is not None:
            return own(self.member, x)
        return torch.cat([own(index, rows) for index, rows in enumerate(self._rows(x))])

    def _by_member(self, function: Callable[..., Tensor], x: Tensor, *values: Tensor) -> Tensor:
        """`function` of the rows of x `[M*B, C, ...]` and their member's own of each `values [M, C]`, in x's dtype."""
        shape = [1] * x.dim()
        shape[self.axis] = -1
        if self.member is not None:
            return function(x, *(each[self.member].to(x.dtype).view(shape) for each in values))
        return function(self._rows(x), *(each.to(x.dtype).view(self.members, *shape) for each in values)).flatten(0, 1)

    def _rows(self, x: Tensor) -> Tensor:
        """x `[M*B, ...]` as `[M, B, ...]`, and rows `[B, ...]` of all members alike, where it may be the one to tile.

        An error where its first axis cannot be that of the members' rows.
        """
        if self.batch is not None and x.dim() > -self.axis and len(x) == self.batch:
            return x.expand(self.members, *x.shape)
        if x.dim() <= -self.axis or x.shape[0] % self.members:
            raise ValueError(rows_missing(self.layer, self.members, x))
        return x.unflatten(0, (self.members, -1))


def rows_missing(layer: nn.Module, members: int, x: Tensor) -> str:
    """What is said where an input cannot be the tiled batch."""
    return (
        f"a {type(layer).__name__} that tells {members} members apart got an input of shape {list(x.shape)}, whose "
        "first axis does not hold the rows of each member one after the other"
    )
