"""Blocks that read and give feature maps `[B, 8, H, W]`: convolutions, norms, padding, shuffles, pooling."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.campaigns.random_dice import WIDTH, Dice, block
from tests.campaigns.random_rows import Residual


class PlainConv2d(nn.Conv2d):
    """A subclass that inherits `forward`."""


class StandardisedConv2d(nn.Conv2d):
    """A subclass with a `forward` of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


class ChannelsLast(nn.Module):
    """A layer of rows on maps, as ConvNeXt has it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def norm_of(dice: Dice, width: int) -> nn.Module:
    kind = dice.one(("batch", "batch", "batch without statistics", "group", "instance", "layer", "none"))
    if kind == "batch":
        return nn.BatchNorm2d(width, affine=dice.chance(0.8), momentum=dice.one((0.1, None)))
    if kind == "batch without statistics":
        return nn.BatchNorm2d(width, track_running_stats=False)
    if kind == "group":
        return nn.GroupNorm(2, width)
    if kind == "instance":
        return nn.InstanceNorm2d(width, affine=dice.chance(0.5), track_running_stats=dice.chance(0.5))
    return ChannelsLast(nn.LayerNorm(width)) if kind == "layer" else nn.Identity()


@block("maps", plain=True)
def convolutions(dice: Dice) -> nn.Module:
    width = dice.one((8, 12, 16))
    kind = dice.one((nn.Conv2d, nn.Conv2d, PlainConv2d, StandardisedConv2d))
    mode = dice.one(("zeros", "zeros", "circular", "reflect"))
    layers = [
        kind(WIDTH, width, 3, padding=1, padding_mode=mode, groups=dice.one((1, 1, 2))),
        norm_of(dice, width),
        dice.activation(),
    ]
    if dice.chance(0.3):
        layers.append(dice.one((nn.Dropout, nn.Dropout2d))(dice.rate("layer")))
    layers.append(kind(width, WIDTH, dice.one((1, 3)), padding="same", bias=dice.chance(0.5)))
    body = nn.Sequential(*layers)
    return Residual(body, dice.one((None, 0.0))) if dice.chance(0.6) else body


@block("maps", plain=True)
def depthwise(dice: Dice) -> nn.Module:
    return Residual(
        nn.Sequential(
            nn.ZeroPad2d(1), nn.Conv2d(WIDTH, WIDTH, 3, groups=WIDTH), norm_of(dice, WIDTH), dice.activation(),
            nn.Conv2d(WIDTH, WIDTH, 1),
        )
    )  # fmt: skip


@block("maps", plain=True)
def down_and_up(dice: Dice) -> nn.Module:
    down: nn.Module = nn.Conv2d(WIDTH, 12, 2, stride=2)
    if dice.chance(0.5):
        down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(WIDTH, 12, 1))
    up: nn.Module = nn.ConvTranspose2d(12, WIDTH, 2, stride=2)
    if dice.chance(0.5):
        up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(12, WIDTH, 3, padding=1))
    return Residual(nn.Sequential(down, dice.activation(), up)) if dice.chance(0.5) else nn.Sequential(down, up)


class DenseJoin(nn.Module):
    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.grow = nn.Conv2d(WIDTH, 4, 3)
        self.join = nn.Conv2d(WIDTH + 4, WIDTH, 1)
        self.norm, self.activation = norm_of(dice, WIDTH + 4), dice.function()

    def forward(self, x: Tensor) -> Tensor:
        grown = self.activation(self.grow(F.pad(x, (1, 1, 1, 1))))
        return self.join(self.norm(torch.cat([x, grown], 1)))


@block("maps", plain=True)
def dense_join(dice: Dice) -> nn.Module:
    return DenseJoin(dice)


class SqueezeAndExcite(nn.Module):
    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.activation = dice.activation()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        scale = self.excite(self.activation(self.squeeze(y.mean((2, 3))))).sigmoid()
        return x + y * scale[:, :, None, None]


@block("maps", plain=True)
def squeeze_and_excite(dice: Dice) -> nn.Module:
    return SqueezeAndExcite(dice)


class Shuffles(nn.Module):
    """Pixels into channels and back, and channels shuffled over groups."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4 * WIDTH, 4 * WIDTH, 1, groups=4)
        self.groups = dice.one((2, 4))
        self.layers = dice.chance(0.5)
        self.unshuffle, self.shuffle = nn.PixelUnshuffle(2), nn.PixelShuffle(2)
        self.channels = nn.ChannelShuffle(self.groups)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.unshuffle(x) if self.layers else F.pixel_unshuffle(x, 2))
        if self.layers:
            y = self.channels(y)
        else:
            batch, channels, height, width = y.shape
            y = y.view(batch, self.groups, channels // self.groups, height, width).transpose(1, 2)
            y = y.reshape(batch, channels, height, width)
        return x + self.shuffle(y)


@block("maps")
def shuffles(dice: Dice) -> nn.Module:
    return Shuffles(dice)


class InOtherDimensions(nn.Module):
    """A convolution over the pixels in a row, or over maps as volumes."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.volume = dice.chance(0.5)
        transposed = dice.chance(0.3)
        if self.volume:
            self.conv = (nn.ConvTranspose3d if transposed else nn.Conv3d)(2, 2, 3, padding=1)
        else:
            self.conv = (nn.ConvTranspose1d if transposed else nn.Conv1d)(WIDTH, WIDTH, 3, padding=1)
        self.activation = dice.activation()

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(1, (2, WIDTH // 2)) if self.volume else x.flatten(2)
        return x + self.activation(self.conv(y)).reshape(x.shape)


@block("maps")
def in_other_dimensions(dice: Dice) -> nn.Module:
    return InOtherDimensions(dice)


class PixelAttention(nn.Module):
    """Attention over pixels, and a zero-initialised gate."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(3))
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).flatten(2) for layer in (self.query, self.key, self.value))
        weights = torch.bmm(query.transpose(1, 2), key).softmax(-1)
        return x + self.gate * torch.bmm(value, weights.transpose(1, 2)).view_as(x)


@block("maps")
def pixel_attention(dice: Dice) -> nn.Module:
    return PixelAttention(dice)


@block("maps")
def normalised_weights_of_convolution(dice: Dice) -> nn.Module:
    kind = dice.one((nn.utils.weight_norm, nn.utils.spectral_norm, parametrizations.weight_norm))
    return nn.Sequential(kind(nn.Conv2d(WIDTH, 12, 3, padding=1)), dice.activation(), nn.Conv2d(12, WIDTH, 1))


@block("maps", plain=True)
def layer_of_rows(dice: Dice) -> nn.Module:
    """ConvNeXt's block, with its scale of channels."""
    conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
    rows = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
    return Residual(nn.Sequential(conv, ChannelsLast(rows)), 1e-6 if dice.chance(0.3) else None)


class MapNoise(nn.Module):
    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.rate, self.channels = dice.rate("function"), dice.chance(0.5)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        drop = F.dropout2d if self.channels else F.dropout
        return x + self.conv(drop(x, self.rate, self.training))


@block("maps")
def map_noise(dice: Dice) -> nn.Module:
    return MapNoise(dice)
