"""Members that share one network's weights, and the layers that tell them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, call, tensors_in, tile
from multitudes.core.copying import copied
from multitudes.core.multitude import Multitude, evaluating


class SharedMembers(Multitude):
    """Members that share one network's weights: the batch is tiled, `[M*B, ...]`, member-major.

    Layers that tell the members apart have a `member` attribute: None when they see the tiled batch, `i` when
    they see member `i`'s rows alone. In evaluation on a CPU the members run one after the other, which is
    faster there than one large batch.
    """

    expands = False  # the rows of the tiled batch are the members'

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
        return copied(self.network, folded)


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
        self.axis = axis

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
        """The weight's shape, dtype and device, for networks that ask; its values are NaN, for no member has them."""
        with evaluating(self.layer), torch.no_grad():  # in training, what computes a weight may move its buffers
            weight: Any = self.layer.weight
        return weight.new_full((), torch.nan).expand(weight.shape)

    def fold(self, index: int) -> nn.Module:
        """The plain layer that member `index` sees."""
        raise NotImplementedError

    def _changes_weight(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it is faster to change the weight for each member than to change x: on a CPU, if it is smaller.

        On a GPU one large product is faster than one for each member, and takes more memory (`benchmarks/README.md`).
        Where the layer has hooks, they see what each member's own layer sees.
        """
        if self.layer._forward_hooks or self.layer._forward_pre_hooks:
            return True
        return not x.is_cuda and weight.numel() * (self.members if self.member is None else 1) < x.numel()

    def _each(self, x: Tensor, own: Callable[[int, Tensor], Tensor]) -> Tensor:
        """What each member's `own` layer, a function of its number, makes of its rows."""
        if self.member is not None:
            return own(self.member, x)
        return torch.cat([own(index, rows) for index, rows in enumerate(self._rows(x))])

    def _by_member(self, function: Callable[[Tensor, Tensor], Tensor], x: Tensor, values: Tensor) -> Tensor:
        """`function` of the rows of x `[M*B, C, ...]` and their member's own of `values [M, C]`, in x's dtype."""
        shape = [1] * x.dim()
        shape[self.axis] = -1
        if self.member is not None:
            return function(x, values[self.member].to(x.dtype).view(shape))
        return function(self._rows(x), values.to(x.dtype).view(self.members, *shape)).flatten(0, 1)

    def _rows(self, x: Tensor) -> Tensor:
        """x `[M*B, ...]` as `[M, B, ...]`; an error where its first axis cannot be that of the members' rows."""
        if x.dim() <= -self.axis or x.shape[0] % self.members:
            raise ValueError(rows_missing(self.layer, self.members, x))
        return x.unflatten(0, (self.members, -1))


def rows_missing(layer: nn.Module, members: int, x: Tensor) -> str:
    return (
        f"a {type(layer).__name__} that tells {members} members apart got an input of shape {list(x.shape)}, whose "
        "first axis does not hold the rows of each member one after the other"
    )
