"""Insert new layers before or after the layers of a copy of a network.

If the parent is an `nn.Sequential` that the network calls, the new layer becomes a further child, and all names stay.
Otherwise an `Inserted` with both replaces the layer: `conv` is then found at `conv.layer`, and checkpoints with the old
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
    """A layer, its child `layer`, with other layers that run on its input or output, in the order of the children.

    Attributes such as `stride` and `weight` come from the layer, since the network's code may read them.
    """

    wraps = "layer"

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the children in order; pass further arguments to the layer."""
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
    """Return a copy of a network with new layers on the inputs of some of its layers.

    Args:
        model: The network. A layer that it uses in several places gets the new layer in all of them.
        new: The new layers, by the names of the layers that they precede. They take over the mode of these layers.
        name: Name of the new layers; by default the class name in lower case, with a number if it is taken.
        example: One batch of inputs. A run on it finds the Sequentials that the network calls; others get no child.

    Example:
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
    """Return a copy of a network with new layers on the outputs of some of its layers; see `before`.

    Example:
        >>> net = after(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2)), {"0": nn.Dropout(0.3)})
        >>> net
        Sequential(
          (0): Inserted(
            (layer): Conv2d(3, 8, kernel_size=(3, 3), stride=(2, 2))
            (dropout): Dropout(p=0.3, inplace=False)
          )
        )
        >>> net[0].stride
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
    # Inner layers first, since a copy of the outer layer includes them.
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
            module.activation_relu_or_gelu = 0  # turn off the fast path, which does not call the layers
    return whole


def _homes(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the parents of each module, once per place."""
    homes: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for child in module._modules.values():
            if child is not None:
                homes.setdefault(id(child), []).append(module)
    return homes


def _joined(layer: nn.Module, added: nn.Module, offset: int, name: str | None) -> Inserted:
    """Return an `Inserted` of a layer and a new one; reuse an existing `Inserted`."""
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
