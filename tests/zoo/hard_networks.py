"""Networks that are hard to run packed or under vmap."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class ChannelShuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        return self.fc(F.relu(self.conv2(x)).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16 + 3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        deep = F.relu(self.deep(F.max_pool2d(skip, 2)))
        return self.out(torch.cat([skip, self.up(deep), x], dim=1))


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.grow = nn.ModuleList(nn.Conv2d(6 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.fc = nn.Linear(18, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.first(x)]
        for conv in self.grow:
            features.append(F.relu(conv(torch.cat(features, 1))))
        return self.fc(torch.cat(features, 1).mean([-1, -2]))


class SqueezeExcite(nn.Module):
    """Gates of shape [B, C, 1, 1] and [B, 1, H, W], a channel softmax, and a learned scale [C, 1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.where, self.fc = nn.Conv2d(8, 1, 1), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        x = x * self.where(x).sigmoid() + x.softmax(1) * self.scale
        x += 0.5 * x
        return self.fc(x.amax((2, 3)))


class ConvNext(nn.Module):
    """Layer norm over permuted channels, a depthwise convolution and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 2, stride=2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.wide, self.back = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.gamma, self.head = nn.Parameter(torch.full((8,), 0.5)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.gamma * self.back(F.gelu(self.wide(self.norm(y))))
        x = x + y.permute(0, 3, 1, 2)
        return self.head(x.mean([-2, -1]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Linear(6, 8), nn.Linear(8, 24), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x[:, 0])


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.PReLU(), nn.Conv2d(8, 8, 1, stride=2),
            nn.BatchNorm2d(8, momentum=0.3), nn.PReLU(8), nn.LayerNorm([8, 4, 4]), nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 8, 3, padding="same", dilation=2), nn.BatchNorm2d(8, affine=False), nn.Flatten(),
            nn.Linear(8 * 64, 12), nn.LayerNorm(12), nn.Linear(12, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.up = (
            nn.Conv3d(2, 6, 3, padding=1),
            nn.BatchNorm3d(6),
            nn.ConvTranspose3d(6, 4, 2),
        )
        self.line, self.fc = nn.Conv1d(4, 4, 3, groups=2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.relu(self.norm(self.conv(x))))
        return self.fc(self.line(x.flatten(2)).mean(-1))


class Branches(nn.Module):
    """A forward with control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if self.one(x).sum().item() > 0 else self.two(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(6, 6), nn.Linear(6, 6)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.there(x)))


class TwoNames(nn.Module):
    """One layer with batch norm, registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.second = self.first
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(self.first(x))))


class Reused(nn.Module):
    """One layer in two places, a buffer, arithmetic on sizes, and in-place writes to a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(6, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.again(self.first(x)).relu()) + self.shift
        x[:, 1].mul_(2.0)
        x.sub_(x.mean())
        return x / x.shape[1] ** 0.5 / len(x) + torch.arange(8.0)


class Aliased(nn.Module):
    """In-place writes to aliases, optional arguments and a test for None."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, gain: float = 3.0) -> Tensor:
        y = self.conv(x)
        z = y
        y += 1.0
        y *= 0.5
        count = x.shape[0]
        count += 1
        if mask is None:
            y = F.relu(y)
        return self.fc((z + gain * y).mean((2, 3))) * count


class Asks(nn.Module):
    """A forward that tests the type of a value, which is a wrapper when packed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return x if isinstance(x, Tensor) else x * 2.0


class Written(nn.Module):
    """A forward that assigns to a part of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x[:, 0] = 0.0
        return self.last(x)


HARD = {
    "shuffle": (ChannelShuffle, (3, 8, 8)),
    "unet": (UNet, (3, 8, 8)),
    "dense": (DenseBlock, (3, 8, 8)),
    "squeeze_excite": (SqueezeExcite, (3, 8, 8)),
    "convnext": (ConvNext, (3, 8, 8)),
    "attention": (Attention, (5, 6)),
    "norms": (Norms, (3, 8, 8)),
    "volume": (Volume, (2, 4, 4, 4)),
    "branches": (Branches, (6,)),
    "lstm": (Recurrent, (5, 6)),
    "tied": (Tied, (6,)),
    "two_names": (TwoNames, (6,)),
    "reused": (Reused, (6,)),
    "aliased": (Aliased, (3, 8, 8)),
    "asks": (Asks, (6,)),
    "written": (Written, (6,)),
    "cumulative": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4)),
        (6,),
    ),
    "weight_norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 4)),
        (6,),
    ),
    "sequence": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), (5, 6)),
    "one_layer": (lambda: nn.Conv2d(3, 4, 1), (3, 8, 8)),
}
MAY_REFUSE = {
    ("branches", "packed"), ("branches", "vmapped"), ("cumulative", "vmapped"),
    ("lstm", "packed"), ("lstm", "vmapped"), ("asks", "packed"),
}  # fmt: skip
