"""Blocks that read and give sequences `[B, T, 8]`: recurrence, attention, convolutions in time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.campaigns.random_dice import WIDTH, Dice, block


class Recurrent(nn.Module):
    """A recurrent layer, batch-first, or sequence-first between two transpositions."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        kind, both = dice.one((nn.RNN, nn.LSTM, nn.GRU)), dice.chance(0.4)
        self.batch_first = dice.chance(0.5)
        layers = dice.one((1, 2))
        rate = dice.rate("recurrent") if layers == 2 and dice.chance(0.5) else 0.0
        self.layer = kind(
            WIDTH, WIDTH // (2 if both else 1), layers, bidirectional=both, dropout=rate, batch_first=self.batch_first
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.layer(x)[0]
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


@block("sequences", plain=True)
def recurrent(dice: Dice) -> nn.Module:
    return Recurrent(dice)


class Attention(nn.Module):
    """`nn.MultiheadAttention`, batch-first or sequence-first."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.batch_first = dice.chance(0.5)
        rate = dice.rate("attention") if dice.chance(0.3) else 0.0
        self.layer = nn.MultiheadAttention(WIDTH, 2, dropout=rate, batch_first=self.batch_first)
        self.weights = dice.chance(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.batch_first else x.transpose(0, 1)
        y = self.layer(y, y, y, need_weights=self.weights)[0]
        return x + (y if self.batch_first else y.transpose(0, 1))


@block("sequences", plain=True)
def attention(dice: Dice) -> nn.Module:
    return Attention(dice)


class Encoder(nn.Module):
    """A `TransformerEncoderLayer`, batch-first or sequence-first."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.batch_first = dice.chance(0.5)
        rate = dice.rate("layer") if dice.chance(0.5) else 0.0
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 12, dropout=rate, batch_first=self.batch_first, norm_first=dice.chance(0.5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)


@block("sequences", plain=True)
def encoder(dice: Dice) -> nn.Module:
    return Encoder(dice)


class OwnAttention(nn.Module):
    """Attention by hand: one projection for queries, keys and values, heads by reshapes."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fused, self.causal = dice.chance(0.6), dice.chance(0.4)
        self.rate = dice.rate("fused attention" if self.fused else "layer") if dice.chance(0.5) else 0.0
        self.dropout = nn.Dropout(0.0 if self.fused else self.rate)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        if self.fused:
            rate = self.rate if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-2, -1) / 2
            if self.causal:
                scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
            y = self.dropout(scores.softmax(-1)) @ v
        return x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


@block("sequences", plain=True)
def own_attention(dice: Dice) -> nn.Module:
    return OwnAttention(dice)


class LearnedQueries(nn.Module):
    """Learned queries, shared by the batch, that attend to the sequence."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.first = dice.chance(0.5)
        self.queries = nn.Parameter(torch.randn(4, WIDTH))
        self.dropout = nn.Dropout(dice.rate("queries") if dice.chance(0.4) else 0.0)
        self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=not self.first)
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.map(self.dropout(self.queries))
        if not self.first:
            return self.layer(queries.expand(x.shape[0], -1, -1), x, x)[0]
        x = x.transpose(0, 1)
        return self.layer(queries.unsqueeze(1).expand(-1, x.shape[1], -1), x, x)[0].transpose(0, 1)


@block("sequences")
def learned_queries(dice: Dice) -> nn.Module:
    return LearnedQueries(dice)


class ClassToken(nn.Module):
    """A class token in front, and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 64, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return x + self.positions[:, : x.shape[1]]


@block("sequences")
def class_token(dice: Dice) -> nn.Module:
    return ClassToken()


class CausalConvolution(nn.Module):
    """A convolution in time, padded on the left."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, dilation=dice.one((1, 2)), groups=dice.one((1, 2, WIDTH)))
        self.norm = nn.GroupNorm(2, WIDTH) if dice.chance(0.5) else nn.InstanceNorm1d(WIDTH, affine=True)
        self.activation = dice.activation()
        self.padded = nn.ConstantPad1d((2 * self.conv.dilation[0], 0), 0.0) if dice.chance(0.3) else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        y = self.padded(y) if self.padded is not None else F.pad(y, (2 * self.conv.dilation[0], 0))
        return x + self.activation(self.norm(self.conv(y))).transpose(1, 2)


@block("sequences", plain=True)
def causal_convolution(dice: Dice) -> nn.Module:
    return CausalConvolution(dice)


class Scan(nn.Module):
    """A recurrence in the network's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(WIDTH))
        self.into = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        decay, values = self.decay.sigmoid(), self.into(x)
        state, states = torch.zeros_like(values[:, 0]), []
        for step in range(values.shape[1]):
            state = decay * state + values[:, step]
            states.append(state)
        return torch.stack(states, 1)


@block("sequences")
def scan(dice: Dice) -> nn.Module:
    return Scan()


class OverTime(nn.Module):
    """Every time step joined with the mean over time, sequence-first."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.join(torch.cat([x, x.mean(0, keepdim=True).expand_as(x)], -1)).transpose(0, 1)


@block("sequences")
def over_time(dice: Dice) -> nn.Module:
    return OverTime()


class Decoder(nn.Module):
    """A `TransformerDecoderLayer` that reads its own input."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, x.flip(1), tgt_mask=mask)


@block("sequences")
def decoder(dice: Dice) -> nn.Module:
    return Decoder(dice)
