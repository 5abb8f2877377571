"""Dropout at prediction time: MC dropout and DropConnect.

Gal and Ghahramani, *Dropout as a Bayesian approximation*, 2016: T forward passes with dropout on, through a network
trained with dropout, approximate the predictive distribution

    p(y | x) = 1/T sum_t p(y | x, W * z_t),   z_t ~ Bernoulli(1 - p) / (1 - p).

Wan et al., *Regularization of neural networks using DropConnect*, 2013: the same with a mask on each weight instead
of each activation.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from multitudes.base.checks import check_number
from multitudes.draws.functional_noise import has_noise_to_keep, mark_noise_to_keep
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.packing.quick_dropout import QuickDropout
from multitudes.methods.registry import Method, Settings, by
from multitudes.networks.calls import Input, evaluating
from multitudes.networks.copies import copied
from multitudes.networks.stochastic import Stochastic, stochastic_layers
from multitudes.surgery.affine import (
    SEVERAL,
    AffineMap,
    is_computed,
    kind_of,
    maps_of,
    plain_copy,
    product,
    product_kind,
    run_with,
    select_affine,
    weight_of,
)
from multitudes.surgery.downsampling import LayerCall, LayerTrace, has_other_path
from multitudes.surgery.insert import after, before
from multitudes.surgery.observe import example_for, note_reach, usual_example
from multitudes.surgery.select import (
    CONVOLUTIONS,
    Factory,
    Selector,
    build_network,
    check_model,
    plain_layer,
    replace,
    select,
)

# -- layers ------------------------------------------------------------------------------------------------


class Dropout(Stochastic):
    """Zero activations with probability `p`, single ones or whole channels, and scale up the rest."""

    def __init__(self, p: float, channels: bool = False) -> None:
        super().__init__()
        self.p = p
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        if self.expects or self.p == 0:
            return x
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.channels else x.shape
        kept = self.uniform(shape, like=x) >= self.p
        return x * (kept.to(x.dtype) / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}" + (", channels=True" if self.channels else "")


class DropConnect(Stochastic):
    """A layer whose weights are zeroed with probability `p` in each draw."""

    noise = "weights"
    weight: Tensor
    bias: Any
    p: float

    @staticmethod
    def of(layer: nn.Module, p: float) -> DropConnect:
        """Convert a layer. Torch's layers keep their settings, weights and parameter names; others are wrapped."""
        kind = DROP_CONNECTS.get(type(layer))
        if kind is None or is_computed(layer):
            return DropConnectWrapped(copied(layer), p)
        connected = kind.__new__(kind)
        connected.__dict__.update(copy.deepcopy(layer).__dict__)
        connected.p = p
        return connected

    def drop(self, weight: Tensor) -> Tensor:
        """Draw weights: each is 0 with probability p, else divided by 1 - p."""
        if self.expects or self.p == 0:
            return weight
        kept = self.uniform(weight.shape, like=weight) >= self.p
        return weight * (kept.to(weight.dtype) / (1 - self.p))

    def forward(self, x: Tensor) -> Any:
        return product(self, x, self.drop(self.weight), self.bias)

    def fold(self) -> nn.Module:
        return plain_layer(product_kind(self), self, self.drop(self.weight), self.bias, omit=("p",))


class DropConnectLinear(DropConnect, nn.Linear):
    """`[B, ..., I] -> [B, ..., O]`."""


class DropConnectConv1d(DropConnect, nn.Conv1d):
    """`[B, I, L] -> [B, O, L']`."""


class DropConnectConv2d(DropConnect, nn.Conv2d):
    """`[B, I, H, W] -> [B, O, H', W']`."""


class DropConnectConv3d(DropConnect, nn.Conv3d):
    """`[B, I, D, H, W] -> [B, O, D', H', W']`."""


class DropConnectWrapped(DropConnect):
    """Wrapper that drops the weights of other layers with affine maps: attention, recurrent and user classes."""

    wraps = "layer"

    def __init__(self, layer: nn.Module, p: float) -> None:
        super().__init__()
        self.layer = layer
        self.p = p
        self.maps = [(m.weight, m.bias, m.inputs, m.outputs, m.groups) for m in maps_of(layer)]
        self.several = kind_of(layer) in SEVERAL

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.several:
            return functional_call(self.layer, self._tensors(), args, kwargs)
        (weight,) = self._tensors().values()
        bias = getattr(self.layer, "bias", None)
        return run_with(self.layer, AffineMap(*self.maps[0]), args[0], weight, bias, *args[1:], **kwargs)

    def _tensors(self) -> dict[str, Tensor]:
        """Return this draw's weights by name."""
        if not self.several:
            return {"weight": self.drop(weight_of(self.layer))}
        return {name: self.drop(self.layer.get_parameter(name)) for name, *_ in self.maps}

    def fold(self) -> nn.Module:
        with evaluating(self.layer):
            tensors = self._tensors()
        if not self.several:
            return plain_copy(self.layer, tensors["weight"])
        plain = copied(self.layer)
        for name, tensor in tensors.items():
            plain.get_parameter(name).data = tensor.detach().clone()
        return plain

    def __getattr__(self, name: str) -> Any:
        """Forward attributes of the layer that networks read (`stride`, `batch_first`, weights before dropping)."""
        own = name in ("layer", "reset_parameters") or name.startswith("__")  # as `__deepcopy__` of parametrised layers
        if own or "layer" not in self.__dict__.get("_modules", {}):
            return super().__getattr__(name)
        return getattr(self.layer, name)

    def extra_repr(self) -> str:
        return f"p={self.p}"


DROP_CONNECTS: dict[type[nn.Module], type[DropConnect]] = {
    nn.Linear: DropConnectLinear,
    nn.Conv1d: DropConnectConv1d,
    nn.Conv2d: DropConnectConv2d,
    nn.Conv3d: DropConnectConv3d,
}

DROPOUTS: dict[type[nn.Module], bool] = {
    **dict.fromkeys((nn.Dropout, QuickDropout), False),
    **dict.fromkeys((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), True),
}
"""Dropout layers of torch and of this package -> whether they drop whole channels."""

ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish,
    nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Hardsigmoid, nn.Hardtanh,
)  # fmt: skip
NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.LayerNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
PLACES = ("block", "activation", "norm")


# -- conversion --------------------------------------------------------------------------------------------


def mc_dropout(
    model: nn.Module | Factory,
    p: float | None = None,
    layers: Selector = None,
    *,
    example: Input | None = None,
    task: str | None = None,
) -> Multitude:
    """Keep dropout on in evaluation, or insert it (Gal and Ghahramani, 2016): each draw has its own masks.

    Drawn activations are `x * z / (1 - p)` with `z ~ Bernoulli(1 - p)`. By default all dropout stays on: dropout layers
    and random code that runs in training only (`F.dropout`, attention's `dropout_p`, masks from `torch.rand`). Such
    code is found by a run in training mode and one in evaluation mode.

    Args:
        model: The network, or a function that builds one. It is not changed.
        p: Dropout rate; by default each layer keeps its own. Required for inserted dropout.
        layers: If it selects dropout layers, only these stay on. If it selects other layers, dropout is inserted before
            each (after each, for activations), and existing dropout stays on too. Three words select usual places:
            `"block"`, before the last convolution of each residual block; `"activation"`, after every activation;
            `"norm"`, before every normalization.
        example: One batch of inputs, to find blocks and random code with. By default noise of the usual sizes is
            tried, and random code is found on the first input.
        task: Task of the predictions, if it cannot be inferred.

    Returns:
        A multitude that draws: `net(x, draws=D)` is `[D, B, ...]`.

    Example:
        >>> import torch
        >>> net = mc_dropout(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2))).eval()
        >>> net(torch.ones(5, 3), draws=7).shape
        torch.Size([7, 5, 2])
        >>> net = mc_dropout(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), p=0.3, layers="activation")
    """
    model = build_network(model)
    network = check_model(model)
    if p is not None:
        check_number("p", p, 0, below=1)
    existing: dict[str, Any] = {name: m for name, m in network.named_modules() if type(m) in DROPOUTS}
    chosen = existing if layers is None else _chosen(network, layers, example)
    inserted = not chosen.keys() <= existing.keys()
    if inserted and p is None:
        raise ValueError(f"p must be given for the dropout that layers={layers!r} inserts")
    rate = None if inserted else p
    kept = existing if inserted else chosen
    x = _any_example(network, example) if inserted or example is not None else usual_example(network)
    stays_on = {n: Dropout(m.p if rate is None else rate, DROPOUTS[type(m)]) for n, m in kept.items()}
    network = replace(network, stays_on)
    if inserted and p is not None:
        insert = after if all(type(layer) in ACTIVATIONS for layer in chosen.values()) else before
        new = {name: Dropout(p) for name in chosen}
        network = insert(network, new, name="dropout", example=x)
    if inserted or layers is None:
        mark_noise_to_keep(network, rate)
    net = Multitude(network).like(model, task)
    net.notes = {n: f"dropout {m.p} stays on" for n, m in network.named_modules() if isinstance(m, Dropout)}
    if x is not None and has_noise_to_keep(network):
        net.find_noise(x)
    _check_something_drawn(net, existing, p)
    return net


def _check_something_drawn(net: Multitude, existing: dict[str, Any], p: float | None) -> None:
    """Raise if the network would draw nothing, with the remedies."""
    layers = stochastic_layers(net.network)
    if layers and (p is not None or any(not isinstance(layer, Dropout) or layer.p for layer in layers)):
        return
    if existing:
        raise ValueError("p must be given, since the model's dropout layers have rate 0")
    look = (
        "; pass one batch of inputs as example= to find dropout in its code" if has_noise_to_keep(net.network) else ""
    )
    raise ValueError(
        f"model ({type(net.network).__name__}) has no dropout layer to keep on; layers= selects where to insert some: "
        f"{', '.join(map(repr, PLACES))}, or any of its layers{look}"
    )


def _chosen(network: nn.Module, layers: Selector, example: Input | None) -> dict[str, Any]:
    """Return the dropout layers that stay on, or the layers before or after which dropout is inserted."""
    if layers == "block":
        names = _last_convolutions(network, example_for(network, example))
        if not names:
            raise ValueError(f"layers='block': model ({type(network).__name__}) has no residual block of convolutions")
        return {name: network.get_submodule(name) for name in names}
    if layers in ("activation", "norm"):
        return select(network, None, ACTIVATIONS if layers == "activation" else NORMS)
    chosen = select(network, layers, tuple({type(module) for name, module in network.named_modules() if name}))
    return {name: layer for name, layer in chosen.items() if type(layer) in DROPOUTS} or chosen


def _any_example(network: nn.Module, example: Input | None) -> Input | None:
    """Return an example if one is found; it only helps to keep the names of layers in Sequentials."""
    try:
        return example_for(network, example)
    except ValueError:
        return None


def _last_convolutions(network: nn.Module, example: Input) -> list[str]:
    """Return the names of the last convolution of each residual block, in execution order.

    A convolution's block is the smallest enclosing module whose input also reaches its output by another path. A
    projection on that path has the same input as the block's first convolution, and is left out.
    """
    blocks: dict[str, list[LayerCall]] = {}
    for seen in LayerTrace(network, example).layers:
        if type(seen.module) not in CONVOLUTIONS:
            continue
        tensors = [each for each in reversed(seen.inside) if isinstance(each.input, Tensor)]
        block = next((each.name for each in tensors if has_other_path(each, seen.module)), None)
        if block is not None:
            chain = blocks.setdefault(block, [])
            if not chain or seen.input is not chain[0].input:
                chain.append(seen)
    return [chain[-1].name for chain in blocks.values() if len(chain) > 1]


def drop_connect(
    model: nn.Module | Factory, p: float, layers: Selector = None, *, task: str | None = None
) -> Multitude:
    """Drop weights in each draw, `W * z / (1 - p)` with `z ~ Bernoulli(1 - p)` (Wan et al., 2013).

    Args:
        model: The network, or a function that builds one. It is not changed.
        p: Probability that a weight is zero. Biases are not dropped.
        layers: Selects the layers; by default all with a weight matrix or kernel.
        task: Task of the predictions, if it cannot be inferred.

    Returns:
        A multitude that draws: `net(x, draws=D)` is `[D, B, ...]`.

    Example:
        >>> import torch
        >>> net = drop_connect(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), p=0.3).eval()
        >>> net(torch.ones(5, 3), draws=7).shape
        torch.Size([7, 5, 2])
    """
    model = build_network(model)
    network = check_model(model)
    check_number("p", p, 0, below=1)
    chosen = select_affine(network, layers)
    connected = {name: DropConnect.of(layer, p) for name, layer in chosen.items()}
    net = Multitude(replace(network, connected)).like(model, task)
    net.notes = {name: f"each weight is dropped with probability {p}" for name in chosen}
    note_reach(net, network, chosen, warn=layers is None)
    return net


# -- for studies -------------------------------------------------------------------------------------------


def build_mc_dropout(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    """Keep existing dropout on. If there is none, insert it in the residual blocks, or else after activations."""
    p, layers = settings["p"], settings["layers"]
    if layers is None:
        try:
            return mc_dropout(network, p, example=example)
        except ValueError:  # no dropout
            p = 0.1 if p is None else p
        try:
            return mc_dropout(network, p, "block", example=example)
        except ValueError:  # no residual blocks
            layers = "activation"
    return mc_dropout(network, 0.1 if p is None and layers is not None else p, layers, example=example)


SETTINGS = {"p": None, "layers": None}
ROWS = (
    Method(
        "mc_dropout", build_mc_dropout, SETTINGS,
        "Training of one network. One forward per draw, from the first dropout layer on.",
        "Pick it if you already have a network with dropout.",
        place=60,
    ),
    Method(
        "drop_connect", by(drop_connect), {"p": 0.1},
        "Training of one network. One forward per draw.",
        "Pick it if the network has no good place for dropout.",
        place=70,
    ),
)  # fmt: skip
