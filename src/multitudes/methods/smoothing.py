"""Spatial smoothing: average neighboring points of feature maps, like an ensemble.

Park & Kim, *Blurs behave like ensembles: spatial smoothings to improve accuracy, uncertainty, and robustness*, 2022.
Before each down-sampling, eq. (5) to (8):

    Smooth(z) = Blur(Prob(z)),    Prob(z) = ReLU(tau tanh(z / tau)),    Blur = convolution by K = k k^T / |k|_1^2

It adds no weights. The result is a plain network, so every method can convert it: `packed(smooth(model))`,
`mc_dropout(smooth(model))`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_count, check_number
from multitudes.ensemble.multitude import Multitude
from multitudes.methods import dropout
from multitudes.methods.registry import Method, Settings, by
from multitudes.networks.calls import Input, call
from multitudes.networks.seeds import seeded
from multitudes.networks.trace import observing
from multitudes.surgery.downsampling import GLOBAL, LayerCall, LayerTrace, MedianPool, downsamplings
from multitudes.surgery.insert import after, before
from multitudes.surgery.observe import example_for
from multitudes.surgery.select import Factory, Selector, build_network, check_model, replace, select

KERNELS = ((1,), (1, 1), (1, 2, 1), (1, 4, 6, 4, 1))
PROBS = ("tanh", "relu6", "scale", "none")
HEADS = ("gap", "max", "median", "mlp")


# -- layers ------------------------------------------------------------------------------------------------


class Prob(nn.Module):
    """Map features to unnormalized probabilities, `[B, C, H, W] -> [B, C, H, W]`, at least 0.

    Args:
        kind: `"tanh"` for `ReLU(tau tanh(z / tau))`, at most tau; `"relu6"` for `min(ReLU(z), 6)`; `"scale"` for
            `ReLU(z / tau)`, where the paper uses tau = 5; `"none"` for z unchanged.
        tau: The temperature.

    Example:
        >>> Prob("tanh", tau=10)(torch.tensor([-1.0, 1.0, 100.0]))
        tensor([ 0.0000, 0.9967, 10.0000])
    """

    def __init__(self, kind: str = "tanh", tau: float = 10.0) -> None:
        super().__init__()
        check_choice("prob", kind, PROBS)
        check_number("tau", tau, 0, above=True)
        self.kind = kind
        self.tau = tau

    def forward(self, z: Tensor) -> Tensor:
        if self.kind == "tanh":
            return F.relu(self.tau * torch.tanh(z / self.tau))
        if self.kind == "relu6":
            return F.relu6(z)
        if self.kind == "scale":
            return F.relu(z / self.tau)
        return z

    def extra_repr(self) -> str:
        return f"{self.kind!r}, tau={self.tau:g}" if self.kind in ("tanh", "scale") else repr(self.kind)


class Blur(nn.Module):
    """Average each point with its neighbors, separately in each channel.

    Each kernel is the box (1, 1) convolved with itself, so a blur is average pooling over 2 x 2 points with stride 1,
    applied `n = len(kernel) - 1` times.

    Args:
        kernel: (1), (1, 1), (1, 2, 1) or (1, 4, 6, 4, 1).
        growing: If false, border values are replicated (one point more after than before if n is odd), so maps keep
            their size and constant maps are unchanged. If true, maps are padded with zeros, as in the paper's
            experiments, and grow: `[B, C, H, W] -> [B, C, H + n, W + n]`.

    Example:
        >>> Blur((1, 2, 1), growing=True)(torch.ones(1, 1, 1, 1) * 16)
        tensor([[[[1., 2., 1.],
                  [2., 4., 2.],
                  [1., 2., 1.]]]])
    """

    def __init__(self, kernel: Sequence[int] = (1, 1), growing: bool = False) -> None:
        super().__init__()
        self.kernel = tuple(kernel) if isinstance(kernel, Sequence) else kernel
        check_choice("kernel", self.kernel, KERNELS)
        self.growing = growing
        self.times = len(self.kernel) - 1
        sides = (self.times // 2, self.times - self.times // 2)
        # Pad separately: torch's padded average pooling has wrong gradients on a GPU in channels-last format.
        self.pad = nn.ZeroPad2d(self.times) if growing else nn.ReplicationPad2d((*sides, *sides))
        self.box = nn.AvgPool2d(2, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pad(x)
        for _ in range(self.times):
            x = self.box(x)
        return x

    def extra_repr(self) -> str:
        return f"{self.kernel}, growing={self.growing}"


class Smooth(nn.Module):
    """Smooth maps, `Blur(Prob(z))`, eq. (5): `[B, C, H, W] -> [B, C, H, W]`, or larger with `growing`.

    Args:
        kernel: Kernel of the `Blur`.
        prob: Kind of the `Prob`.
        tau: Temperature of the `Prob`.
        growing: Whether maps grow by the blur.
    """

    def __init__(
        self, kernel: Sequence[int] = (1, 1), prob: str = "tanh", tau: float = 10.0, growing: bool = False
    ) -> None:
        super().__init__()
        self.prob = Prob(prob, tau)
        self.blur = Blur(kernel, growing)

    def forward(self, z: Tensor) -> Tensor:
        return self.blur(self.prob(z))


# -- conversion --------------------------------------------------------------------------------------------


def smooth(
    model: nn.Module | Factory,
    kernel: Sequence[int] = (1, 1),
    prob: str = "tanh",
    tau: float = 10.0,
    *,
    growing: bool = False,
    layers: Selector = None,
    example: Input | None = None,
) -> nn.Module:
    """Insert spatial smoothing (Park and Kim, 2022), `Blur(Prob(z))`, before each down-sampling of a network.

    Down-samplings are strided convolutions, pooling layers and the global pooling; a residual block counts as one. The
    image, the max-pool of a stem and the global pooling of pre-activation networks are not smoothed. This gives four in
    ResNets, three in pre-activation ResNets, five in VGG and four in U-Net (the poolings of its encoder).

    Args:
        model: The network, or a function that builds one. It is not changed.
        kernel: Kernel of the blur. (1, 1) shifts maps by half a point. If maps are later joined with maps that are not
            smoothed, as in U-Net's decoder, use (1, 2, 1), which does not shift.
        prob: `"tanh"`, `"relu6"`, `"scale"` or `"none"` (see `Prob`). All but `"none"` remove negative values.
        tau: Temperature of `prob`.
        growing: Whether maps grow by the blur (see `Blur`), as in the paper. This needs global pooling.
        layers: Selects other layers or blocks to smooth before; they must read feature maps.
        example: One batch of inputs to find the down-samplings with; by default noise of the usual sizes is tried.

    Returns:
        A plain network with the same parameters, so checkpoints of `model` load into it.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(10))
        >>> _ = model(torch.zeros(1, 3, 32, 32))
        >>> [type(layer).__name__ for layer in smooth(model)]
        ['Conv2d', 'ReLU', 'Smooth', 'MaxPool2d', 'Flatten', 'Linear']
    """
    model = build_network(model)
    _check_plain(model)
    Smooth(kernel, prob, tau, growing)  # check the settings before any work
    with seeded(0):
        example = example_for(model, example)
        run = LayerTrace(model, example)
        names = _selected(run, layers) if layers is not None else _downsamplings(run)
        new = {name: Smooth(kernel, prob, tau, growing) for name in names}
        smoothed = before(model, new, example=example)
        hint = "growing=False keeps the sizes of its maps" if growing else "layers= selects others"
        _check_output(smoothed, example, run.output, f"smoothed before {', '.join(names)}", hint)
    return smoothed


def _check_plain(model: nn.Module) -> None:
    check_model(model, nested=True)
    if isinstance(model, Multitude):
        raise ValueError(
            f"model is a multitude already ({type(model).__name__}): change the network first, then convert it, as in "
            "packed(smooth(model)) or mc_dropout(smooth(model))"
        )


def _downsamplings(run: LayerTrace) -> list[str]:
    names = downsamplings(run)
    if not names:
        raise ValueError(
            f"model ({type(run.model).__name__}) has no down-sampling: no strided convolution or pooling layer after "
            "its first layer. Pooling functions in a forward are not found: make them layers, or select layers that "
            "read feature maps with layers="
        )
    return names


def _selected(run: LayerTrace, layers: Selector) -> list[str]:
    kinds = tuple({type(module) for name, module in run.model.named_modules() if name})
    names = [name for name in select(run.model, layers, kinds) if name]
    for name in names:
        calls = run.calls(name)
        if not calls:
            raise ValueError(f"layers: layer {name!r} is never called, so it has no input to smooth")
        for seen in calls:
            if not seen.on_map:
                shape = list(seen.input.shape) if isinstance(seen.input, Tensor) else type(seen.input).__name__
                raise ValueError(f"layers: layer {name!r} reads {shape}, which is not a feature map [B, C, H, W]")
    return names


def _check_output(model: nn.Module, example: Input, want: Tensor, what: str, hint: str) -> None:
    with observing(model):
        try:
            got = call(model, example)
            reason = f"it returns {list(got.shape)} instead of {list(want.shape)}"
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            got, reason = None, str(error)
    if got is None or got.shape != want.shape:
        raise ValueError(f"model ({type(model).__name__}) does not run when {what}: {reason}; {hint}")


# -- classifier heads --------------------------------------------------------------------------------------


def head(
    model: nn.Module | Factory,
    kind: str,
    *,
    hidden: int = 4096,
    dropout: float = 0.5,
    example: Input | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Replace the classifier head of a network, as compared in appendix C.1 of Park and Kim (2022).

    The model's head must be a pooling layer, a flattening, and either one linear layer or an `nn.Sequential` that ends
    with several. Linear layers keep their weights if their shapes do not change.

    Args:
        model: The network, or a function that builds one. It is not changed.
        kind: `"gap"`, `"max"` or `"median"` to pool each map to its mean, maximum or median, followed by one linear
            layer; `"mlp"` to pool to 7 x 7 points as in VGG, followed by two hidden layers.
        hidden: Width of the hidden layers of `"mlp"`.
        dropout: Dropout rate of the hidden layers.
        example: One batch of inputs; by default noise of the usual sizes is tried.
        seed: Seed of the new layers.

    Returns:
        A plain network.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
        >>> head(model, "max")[2:]
        Sequential(
          (2): AdaptiveMaxPool2d(output_size=1)
          (3): Flatten(start_dim=1, end_dim=-1)
          (4): Linear(in_features=8, out_features=5, bias=True)
        )
    """
    model = build_network(model)
    _check_plain(model)
    check_choice("kind", kind, HEADS)
    check_count("hidden", hidden)
    check_number("dropout", dropout, 0, below=1)
    with seeded(0):
        example = example_for(model, example)
        run = LayerTrace(model, example)
    pooling, linears = _head(run)
    with seeded(seed):
        classifier = _classifier(kind, pooling, linears, hidden, dropout)
    if kind == "mlp" and isinstance(pooling.module, nn.MaxPool2d):  # VGG's last pooling, not part of its head
        swapped = after(model, {pooling.name: nn.AdaptiveAvgPool2d(7)}, name="avgpool", example=example)
    else:
        new: dict[str, nn.Module] = {"max": nn.AdaptiveMaxPool2d(1), "median": MedianPool()}
        swapped = replace(model, {pooling.name: new.get(kind, nn.AdaptiveAvgPool2d(7 if kind == "mlp" else 1))})
    swapped = _with_classifier(swapped, [seen.name for seen in linears], classifier)
    hint = "its forward must flatten the output of its pooling layer for any size"
    _check_output(swapped, example, run.output, f"given the head {kind!r}", hint)
    return swapped


def _head(run: LayerTrace) -> tuple[LayerCall, list[LayerCall]]:
    """Return the last pooling layer and the linear layers after it."""
    poolings = [i for i, seen in enumerate(run.layers) if seen.downsamples or isinstance(seen.module, GLOBAL)]
    last = max((i for i in poolings if run.layers[i].pools), default=None)
    rest = [] if last is None else run.layers[last + 1 :]
    linears = [seen for seen in rest if isinstance(seen.module, nn.Linear)]
    paths = {seen.name.rpartition(".")[0] for seen in linears}
    parents = [run.model.get_submodule(path) for path in paths]
    reason = ""
    if last is None or not linears:
        reason = "no pooling layer comes before its linear layers (pooling functions are not found)"
    elif any(seen.has_weights and seen not in linears for seen in rest) or linears[0].input.dim() != 2:
        reason = f"there is more than a flattening between {run.layers[last].name!r} and {linears[0].name!r}"
    elif len(linears) > 1 and not (len(parents) == 1 and type(parents[0]) is nn.Sequential):
        reason = f"its linear layers ({', '.join(seen.name for seen in linears)}) are not in one nn.Sequential"
    elif any(len(run.calls(seen.name)) > 1 for seen in (run.layers[last], *linears)):
        reason = "a layer of its head is also used elsewhere"
    if reason:
        raise ValueError(
            f"cannot replace the head of model ({type(run.model).__name__}): it must be a pooling layer, a flattening "
            f"and linear layers, but {reason}"
        )
    assert last is not None
    return run.layers[last], linears


def _classifier(kind: str, pooling: LayerCall, linears: list[LayerCall], hidden: int, dropout: float) -> nn.Module:
    """Build one linear layer, or VGG's three."""
    old: list[Any] = [seen.module for seen in linears]
    channels, classes = pooling.input.shape[1], old[-1].out_features
    widths = (49 * channels, hidden, hidden, classes) if kind == "mlp" else (channels, classes)
    new: list[nn.Module] = []
    for index, shape in enumerate(pairwise(widths)):
        like = old[min(index, len(old) - 1)]
        kept = len(old) == len(widths) - 1 and shape == (like.in_features, like.out_features)
        own = {"bias": like.bias is not None, "device": like.weight.device, "dtype": like.weight.dtype}
        new += [copy.deepcopy(like) if kept else nn.Linear(*shape, **own), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*new[:-2]) if kind == "mlp" else new[0]


def _with_classifier(model: nn.Module, linears: list[str], classifier: nn.Module) -> nn.Module:
    """Replace the first linear layer by the classifier and remove the layers after it, up to the last linear one."""
    swapped = replace(model, {linears[0]: classifier})
    path, _, first = linears[0].rpartition(".")
    parent = swapped.get_submodule(path)
    names = list(parent._modules)
    for name in names[names.index(first) + 1 : names.index(linears[-1].rpartition(".")[2]) + 1]:
        del parent._modules[name]
    return swapped


# -- for studies -------------------------------------------------------------------------------------------


def _smooth_dropout(network: nn.Module, example: Tensor, settings: Settings, seed: int) -> Multitude:
    """MC dropout of a smoothed network: section 3 of the paper."""
    smoothed = smooth(network, **{name: settings[name] for name in SETTINGS}, example=example)
    return dropout.build_mc_dropout(smoothed, example, settings, seed)


SETTINGS = {"kernel": [1, 1], "prob": "tanh", "tau": 10.0, "growing": False}
ROWS = (
    Method(
        "smooth", by(smooth), SETTINGS,
        "One network, with a small blur before each down-sampling. No new parameters, little time.",
        "Pick it if images may be shifted or noisy and inference may take only one forward.",
        place=110, feature_maps=True,
    ),
    Method(
        "smooth_dropout", _smooth_dropout, {**SETTINGS, **dropout.SETTINGS},
        "As mc_dropout, with a small blur before each down-sampling.",
        "Pick it if you can afford only a few draws. Smoothing replaces many of them.",
        place=120, feature_maps=True,
    ),
)  # fmt: skip
