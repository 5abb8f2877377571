"""Vision transformers for small images (Dosovitskiy et al., 2021, "An Image Is Worth 16x16 Words").

An image is split into patches, one token each. A class token is prepended, and positions are added. Blocks of attention
and a feed-forward network follow, both with a norm before and a residual connection. A linear layer reads the class
token. Weights are drawn from a normal distribution of deviation 0.02, truncated at two deviations, as in the authors'
code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.base.checks import check_number
from multitudes.models.blocks import check_counts

DEVIATION = 0.02


class Attention(nn.Module):
    """Self-attention of tokens, `[B, T, width] -> [B, T, width]`, with heads of `size` channels."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, -1, self.size)).permute(2, 0, 3, 1, 4)  # [B, H, T, size]
        y = F.scaled_dot_product_attention(query, key, value)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward network with residual connections: `[B, T, width] -> [B, T, width]`."""

    def __init__(self, width: int, heads: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, expansion * width), nn.Linear(expansion * width, width)
        self.act = nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.fc2(self.dropout(self.act(self.fc1(self.norm2(x))))))


class ViT(nn.Module):
    """A vision transformer of `depth` blocks; the defaults are ViT-S/4, 21,342,346 parameters for CIFAR-10.

    Args:
        classes: Outputs of the last layer.
        channels: Channels of the input image.
        size: Height and width of the input image, a multiple of `patch`.
        patch: Height and width of a patch.
        width: Channels of a token, a multiple of `heads`.
        depth: The number of blocks.
        heads: Heads of each attention.
        expansion: Ratio of the feed-forward network's width to that of a token.
        dropout: Rate of the dropout after the positions, each attention and each feed-forward layer.

    Shape: `[B, channels, size, size] -> [B, classes]`.

    Example:
        >>> vit(classes=10, width=48, depth=2, heads=3)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        size: int = 32,
        patch: int = 4,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
        expansion: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_counts(classes=classes, channels=channels, size=size, patch=patch)
        check_counts(width=width, depth=depth, heads=heads, expansion=expansion)
        check_number("dropout", dropout, 0, below=1)
        if size % patch:
            raise ValueError(f"size must be a multiple of patch, got size={size} and patch={patch}")
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}")
        self.patch = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.position = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, expansion, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all weights."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=DEVIATION, a=-2 * DEVIATION, b=2 * DEVIATION)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        for parameter in (self.token, self.position):
            nn.init.trunc_normal_(parameter, std=DEVIATION, a=-2 * DEVIATION, b=2 * DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(patches.shape[0], -1, -1), patches], 1) + self.position
        return self.fc(self.norm(self.blocks(self.dropout(tokens))[:, 0]))


vit = ViT


def vit_tiny(classes: int = 10, channels: int = 3, size: int = 32, patch: int = 4, dropout: float = 0.0) -> ViT:
    """Build a ViT-Ti/4 of width 192 with three heads, 5,362,762 parameters; arguments as in `ViT`."""
    return ViT(classes, channels, size, patch, width=192, heads=3, dropout=dropout)
