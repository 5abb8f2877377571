"""Insertion: a copy of a network in which new layers run on the inputs or outputs of some of its layers.

A layer's parent decides how. An `nn.Sequential` that the network calls gets the new layer as a further child, and every
layer keeps its name. Anywhere else, and if the network may index a Sequential by position, the layer is replaced by an
`Inserted`, which holds both. A layer `conv` with weights is then found at `conv.layer`; checkpoints with its former
names still load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from multitudes.networks.calls import Input
from multitudes.networks.copies import copied
from multitudes.surgery.initialize import RULES
from multitudes.surgery.observe import execution_order


class Inserted(nn.Sequential):
    """A layer, its child `layer`, and others that run on its input or its output, in the order of the children.

    Other attributes (`stride`, `weight`) come from the layer, since the network's own code may read them. Initialisers
    find the layer among the children.
    """

    wraps = "layer"

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the children in order; the further arguments go to the layer."""
        for name, module in self._modules.items():
            input = module(input, *args, **kwargs) if name == "layer" else module(input)
        return input

    def __getattr__(self, name: str) -> Any:
        children = self.__dict__.get("_modules", {})
        own = name in children or name in RULES or name.startswith("__")
        if own or "layer" not in children:
            return super().__getattr__(name)
        return getattr(children["layer"], name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load tensors under the layer's former names too."""
        names = list(self._modules["layer"].state_dict())
        former = all(prefix + name in state_dict for name in names)
        if former and not all(f"{prefix}layer.{name}" in state_dict for name in names):
            state_dict.update({f"{prefix}layer.{name}": state_dict.pop(prefix + name) for name in names})
        super()._load_from_state_dict(state_dict, prefix, *args)


def before(
    model: nn.Module, new: Mapping[str, nn.Module], *, name: str | None = None, example: Input | None = None
) -> nn.Module:
    """Return a copy of `model` in which each layer in `new`, by name, gets its new layer on its input.

    The new layer's own name is `name`, by default its class name in lower case, with a number if it is taken. With an
    `example`, one batch of inputs, one run shows which Sequentials the network calls, and thus may get children;
    without one, none does. A layer that is used in several places has the new layer in all of them. New layers are used
    as they are, in the mode of the layers that they join; all other modes are kept.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> before(model, {"2": nn.Dropout(0.3)}, example=torch.zeros(1, 3, 8, 8))
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): ReLU()
      (dropout): Dropout(p=0.3, inplace=False)
      (2): Conv2d(8, 4, kernel_size=(3, 3), stride=(1, 1))
    )
    """
    return _insert(model, new, 0, name, example)


def after(
    model: nn.Module, new: Mapping[str, nn.Module], *, name: str | None = None, example: Input | None = None
) -> nn.Module:
    """Do the same as `before`, but run the new layers on the outputs of the layers.

    >>> class Net(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.conv = nn.Conv2d(3, 8, 3, stride=2)
    ...         self.act = nn.ReLU()
    >>> net = after(Net(), {"conv": nn.Dropout(0.3)})
    >>> net
    Net(
      (conv): Inserted(
        (layer): Conv2d(3, 8, kernel_size=(3, 3), stride=(2, 2))
        (dropout): Dropout(p=0.3, inplace=False)
      )
      (act): ReLU()
    )
    >>> net.conv.stride
    (2, 2)
    """
    return _insert(model, new, 1, name, example)


def _insert(
    model: nn.Module, new: Mapping[str, nn.Module], offset: int, name: str | None, example: Input | None
) -> nn.Module:
    homes = _homes(model)
    missing = [layer for layer in new if layer not in dict(model.named_modules(remove_duplicate=False))]
    if missing:
        there = ", ".join(other for other, _ in model.named_modules() if other)
        raise ValueError(f"model ({type(model).__name__}) has no layer {missing[0]!r}; there are: {there}")
    running = [] if example is None else execution_order(model, example, (nn.Sequential,))
    called = {id(model.get_submodule(sequential)) for sequential in running}
    memo: dict[int, Any] = {}
    copies: dict[int, nn.Module] = {}  # copies of layers that the memo replaces
    children: list[tuple[nn.Module, str, nn.Module]] = []
    # Inner layers first: a copy of the outer layer includes them.
    for path in sorted(new, key=lambda path: sum(1 for _ in model.get_submodule(path).modules())):
        layer = model.get_submodule(path)
        added = new[path].train(layer.training)
        owners = homes.get(id(layer), [])
        if len(owners) == 1 and (id(owners[0]) in called or isinstance(owners[0], Inserted)):
            children.append((owners[0], path.rpartition(".")[2], added))
        else:
            copies[id(layer)] = copied(layer, memo)
            memo[id(layer)] = _joined(copies[id(layer)], added, offset, name)
    whole = copied(model, memo)
    for owner, child, added in children:
        _add_child(copies.get(id(owner), memo.get(id(owner))), child, added, offset, name)
    for module in whole.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # fast path: reads the weights of its layers instead of calling them
    return whole


def _homes(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the parents of each module, one entry for each place."""
    homes: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for child in module._modules.values():
            if child is not None:
                homes.setdefault(id(child), []).append(module)
    return homes


def _joined(layer: nn.Module, added: nn.Module, offset: int, name: str | None) -> Inserted:
    """Join a layer and a new one in an `Inserted`; further ones join an existing one."""
    joined = layer if isinstance(layer, Inserted) else Inserted(OrderedDict(layer=layer))
    joined.training = layer.training  # children may be frozen in another mode
    _add_child(joined, list(joined._modules)[-offset], added, offset, name)
    return joined


def _add_child(parent: Any, child: str, added: nn.Module, offset: int, name: str | None) -> None:
    """Insert `added` next to a child, in place: before it, or after it with `offset` 1."""
    base = name or type(added).__name__.lower()
    fresh, number = base, 1
    while hasattr(parent, fresh):
        number += 1
        fresh = f"{base}_{number}"
    items = list(parent._modules.items())
    items.insert(list(parent._modules).index(child) + offset, (fresh, added))
    parent._modules.clear()
    parent._modules.update(items)
