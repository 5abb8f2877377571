"""Dropout that stays on: MC dropout, and DropConnect.

Gal and Ghahramani, *Dropout as a Bayesian approximation*, 2016: a network trained with dropout, drawn T times with
its dropout on, approximates the predictive distribution

    p(y | x) = 1/T sum_t p(y | x, W * z_t),   z_t ~ Bernoulli(1 - p) / (1 - p).

Wan et al., *Regularization of neural networks using DropConnect*, 2013: the same with a mask on each weight instead
of each activation.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.core.calling import Input
from multitudes.core.checks import check_number
from multitudes.core.draws.stochastic import Stochastic
from multitudes.core.multitude import Multitude
from multitudes.surgery import insert as insertion
from multitudes.surgery.downsampling import Call, Run, has_other_path
from multitudes.surgery.layers import CONVOLUTIONS, Selector, check_model, plain_layer, replace, select
from multitudes.surgery.observe import example_for

# -- layers ------------------------------------------------------------------------------------------------


class Dropout(Stochastic):
    """Zeroes activations with probability `p`, each on its own or whole channels, and scales up the rest."""

    channelwise = True

    def __init__(self, p: float, channels: bool = False) -> None:
        super().__init__()
        self.p = p
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        if self.expects or self.p == 0:
            return x
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.channels else x.shape
        return x * _mask(self.uniform(shape, like=x), self.p, x)

    def extra_repr(self) -> str:
        return f"p={self.p}" + (", channels=True" if self.channels else "")


def _mask(uniform: Tensor, p: float, like: Tensor) -> Tensor:
    """0 with probability p, else 1 / (1 - p)."""
    return (uniform >= p).to(like.dtype) / (1 - p)


class DropConnect(Stochastic):
    """A layer whose weights are zeroed with probability `p`, anew for each draw."""

    noise = "weights"
    weight: Tensor
    bias: Tensor | None
    p: float

    def connected(self) -> Tensor:
        """The weights of this draw."""
        if self.expects or self.p == 0:
            return self.weight
        return self.weight * _mask(self.uniform(self.weight.shape, like=self.weight), self.p, self.weight)

    def fold(self) -> nn.Module:
        kind = next(plain for plain, connected in CONNECTED.items() if connected is type(self))
        return plain_layer(kind, self, self.connected(), self.bias, omit=("p",))


class DropConnectLinear(DropConnect, nn.Linear):
    """`[B, ..., I] -> [B, ..., O]`."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.connected(), self.bias)


class DropConnectConv1d(DropConnect, nn.Conv1d):
    """`[B, I, L] -> [B, O, L']`."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.connected(), self.bias)


class DropConnectConv2d(DropConnect, nn.Conv2d):
    """`[B, I, H, W] -> [B, O, H', W']`."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.connected(), self.bias)


class DropConnectConv3d(DropConnect, nn.Conv3d):
    """`[B, I, D, H, W] -> [B, O, D', H', W']`."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.connected(), self.bias)


CONNECTED: dict[type[nn.Module], type[DropConnect]] = {
    nn.Linear: DropConnectLinear,
    nn.Conv1d: DropConnectConv1d,
    nn.Conv2d: DropConnectConv2d,
    nn.Conv3d: DropConnectConv3d,
}

DROPOUTS: dict[type[nn.Module], bool] = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}
"""Torch's dropout layers, and whether they drop whole channels."""

ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish,
    nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Hardsigmoid, nn.Hardtanh,
)  # fmt: skip
NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.LayerNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
PLACES = ("block", "activation", "norm", "before")


# -- conversion --------------------------------------------------------------------------------------------


def mc_dropout(
    model: nn.Module,
    p: float | None = None,
    layers: Selector = None,
    *,
    where: str | None = None,
    example: Input | None = None,
) -> Multitude:
    """A copy of `model` whose dropout stays on in evaluation, with rate `p` or, without one, each layer's own.

    The model's dropout layers are switched on, those that `layers` selects. `where` inserts new ones of rate `p`
    instead of selecting: before the last convolution of each residual block (`"block"`), after every activation
    (`"activation"`), before every normalisation (`"norm"`), or before each layer that `layers` selects
    (`"before"`); `layers` narrows the places down, and the dropout that is there is switched on as well.
    `example` is one batch of inputs, with which residual blocks are found; where it is left out, the usual sizes
    are tried.

    >>> import torch
    >>> net = mc_dropout(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2))).eval()
    >>> net(torch.ones(5, 3), draws=7).shape
    torch.Size([7, 5, 2])
    >>> net = mc_dropout(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), p=0.3, where="activation")
    """
    network = check_model(model)
    if p is not None:
        check_number("p", p, 0, below=1)
    if where is not None and where not in PLACES:
        raise ValueError(f"where must be one of {', '.join(PLACES)}, got {where!r}")
    _check_existing(network, where)
    existing = {name: layer for name, layer in network.named_modules() if type(layer) in DROPOUTS}
    if where is None:
        existing = select(network, layers, tuple(DROPOUTS))
        if p is None and not any(layer.p for layer in existing.values()):
            raise ValueError("p must be given: the model's dropout layers have rate 0, so nothing would be drawn")
    network, plain = replace(network, {name: _kept_on(layer, p, where) for name, layer in existing.items()}), network
    if where is not None:
        if p is None:
            raise ValueError(f"p must be given for the dropout that where={where!r} inserts")
        new = {name: Dropout(p) for name in _places(plain, where, layers, example)}
        insert = insertion.after if where == "activation" else insertion.before
        network = insert(network, new, name="dropout", example=_any_example(network, example))
    net = Multitude(network).like(model)
    for name, layer in network.named_modules():
        if isinstance(layer, Dropout):
            net.notes[name] = f"dropout {layer.p} stays on"
        elif isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout:
            warnings.warn(
                f"layer {name!r} ({type(layer).__name__}) has dropout inside, which stays off in evaluation",
                stacklevel=2,
            )
    return net


def _check_existing(network: nn.Module, where: str | None) -> None:
    for name, layer in network.named_modules():
        if isinstance(layer, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            raise ValueError(f"layer {name!r} is an {type(layer).__name__}, which cannot be kept on; use nn.Dropout")
    if where is None and not any(type(layer) in DROPOUTS for layer in network.modules()):
        raise ValueError(
            f"model ({type(network).__name__}) has no dropout layer to keep on; "
            f"where= inserts some: {', '.join(map(repr, PLACES))}"
        )


def _kept_on(layer: Any, p: float | None, where: str | None) -> Dropout:
    return Dropout(layer.p if p is None or where is not None else p, DROPOUTS[type(layer)])


def _places(network: nn.Module, where: str, layers: Selector, example: Input | None) -> list[str]:
    """The layers before or after which dropout is inserted."""
    if where == "block":
        found = _last_convolutions(network, example_for(network, example))
        if not found:
            raise ValueError(f"where='block': model ({type(network).__name__}) has no residual block of convolutions")
        chosen = select(network, layers, CONVOLUTIONS)
        return [name for name in found if name in chosen] or _nothing(found)
    if where == "before":
        if layers is None:
            raise ValueError("layers must say before which layers dropout is inserted, got None")
        return list(select(network, layers, tuple({type(m) for m in network.modules() if m is not network})))
    return list(select(network, layers, ACTIVATIONS if where == "activation" else NORMS))


def _any_example(network: nn.Module, example: Input | None) -> Input | None:
    """An example helps to keep the names of layers in Sequentials; it is not needed."""
    try:
        return example_for(network, example)
    except ValueError:
        return None


def _nothing(found: list[str]) -> list[str]:
    raise ValueError(f"layers selects no last convolution of a residual block; it could select: {', '.join(found)}")


def _last_convolutions(network: nn.Module, example: Input) -> list[str]:
    """The last convolution of each residual block, in the order in which they run.

    A convolution's block is the smallest module around it whose input reaches its output by another path as well. A
    projection on that path reads what the block's first convolution reads, and is not one of the chain.
    """
    blocks: dict[str, list[Call]] = {}
    for seen in Run(network, example).layers:
        block = _residual_block(seen) if type(seen.module) in CONVOLUTIONS else None
        if block is not None:
            chain = blocks.setdefault(block, [])
            if not chain or seen.input is not chain[0].input:
                chain.append(seen)
    return [chain[-1].name for chain in blocks.values() if len(chain) > 1]


def _residual_block(seen: Call) -> str | None:
    for block in reversed(seen.inside):
        if isinstance(block.input, Tensor) and has_other_path(block, seen.module):
            return block.name
    return None


def drop_connect(model: nn.Module, p: float, layers: Selector = None) -> Multitude:
    """A copy of `model` whose weights are dropped with probability `p`, anew for each draw.

    `layers` selects the layers, by default all convolutions and linear layers. Biases are kept.

    >>> import torch
    >>> net = drop_connect(nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 2)), p=0.3).eval()
    >>> net(torch.ones(5, 3), draws=7).shape
    torch.Size([7, 5, 2])
    """
    network = check_model(model)
    check_number("p", p, 0, below=1)
    chosen = select(network, layers, tuple(CONNECTED))
    net = Multitude(replace(network, {name: _connected(layer, p) for name, layer in chosen.items()})).like(model)
    net.notes = {name: f"each weight is dropped with probability {p}" for name in chosen}
    return net


def _connected(layer: nn.Module, p: float) -> DropConnect:
    """The layer as one of DropConnect: the same settings and weights under the same names."""
    kind = CONNECTED[type(layer)]
    connected = kind.__new__(kind)
    connected.__dict__.update(copy.deepcopy(layer).__dict__)
    connected.p = p
    return connected
