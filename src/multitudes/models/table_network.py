"""Network for tables: embeddings of numbers, then a multilayer perceptron.

Gorishniy, Rubachev and Babenko, *On Embeddings for Numerical Features in Tabular Deep Learning* (2022): a perceptron
is bad at learning jumps and bends in one column, so each number is first mapped to a vector. The piecewise-linear
embeddings are those of Gorishniy et al., *TabM* (2025), with a linear part, the only nonzero one at the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice, check_count, check_number
from multitudes.models.blocks import check_counts
from multitudes.models.perceptron import MLP

Layout = Sequence[int | Sequence[float]]
"""Features of a table in order: for a number, the edges of its bins; for n zeros and ones, n."""

FEW = 20
"""Columns with more zeros and ones than this are embedded."""

FREQUENCIES, SIGMA = 48, 0.05
"""Number of frequencies of a periodic embedding, and their initial deviation."""


class PiecewiseLinear(nn.Module):
    """Embed F numbers as vectors: a line, with a bend at every edge of its bins. `[..., F] -> [..., F * width]`.

    A number is encoded as one value per bin: 1 for bins below it, 0 for bins above it, and its relative position in its
    own bin. The first and last bins extend to infinity. The vector is linear in this encoding and the number itself.
    """

    def __init__(self, edges: Sequence[Sequence[float]], width: int) -> None:
        super().__init__()
        check_count("width", width)
        check_edges(edges)
        most = max(len(each) - 1 for each in edges)
        start, slope = torch.zeros(len(edges), most), torch.zeros(len(edges), most)
        low, high = torch.zeros(len(edges), most), torch.zeros(len(edges), most)
        for at, each in enumerate(edges):
            bins = torch.tensor(each, dtype=torch.float64)
            count = len(bins) - 1
            start[at, :count], slope[at, :count] = bins[:-1].float(), 1 / bins.diff().float()
            high[at, :count] = 1.0
            low[at, 0], high[at, count - 1] = -math.inf, math.inf
        for name, values in {"start": start, "slope": slope, "low": low, "high": high}.items():
            self.register_buffer(name, values)
        self.weight = nn.Parameter(torch.empty(len(edges), 1 + most, width))
        self.bias = nn.Parameter(torch.empty(len(edges), width))
        self.reset_parameters()

    start: Tensor
    slope: Tensor
    low: Tensor
    high: Tensor

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = self.bias.shape[1] ** -0.5
        nn.init.zeros_(self.weight)
        nn.init.uniform_(self.weight[:, 0], -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        bins = torch.clamp((x - self.start) * self.slope, self.low, self.high)
        return embed(torch.cat([x, bins], -1), self.weight, self.bias)


class Periodic(nn.Module):
    """Embed F numbers as vectors: sines and cosines of learned frequencies, a linear map, and a ReLU.

    `[..., F] -> [..., F * width]`.
    """

    def __init__(self, count: int, width: int, frequencies: int = FREQUENCIES, sigma: float = SIGMA) -> None:
        super().__init__()
        check_counts(width=width, frequencies=frequencies)
        check_number("sigma", sigma, 0, above=True)
        self.sigma = sigma
        self.frequencies = nn.Parameter(torch.empty(count, frequencies))
        self.weight = nn.Parameter(torch.empty(count, 2 * frequencies, width))
        self.bias = nn.Parameter(torch.empty(count, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.frequencies, 0.0, self.sigma, -3 * self.sigma, 3 * self.sigma)
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * self.frequencies * x.unsqueeze(-1)
        return torch.relu(embed(torch.cat([angles.cos(), angles.sin()], -1), self.weight, self.bias))


class Categories(nn.Module):
    """Embed a column of many categories, given as zeros and ones: `[B, count] -> [B, width]`."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def embed(encoding: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply a separate linear map to each of F numbers: `[..., F, K] -> [..., F * width]`."""
    return (torch.einsum("...fk,fkw->...fw", encoding, weight) + bias).flatten(-2)


def check_edges(edges: Sequence[Sequence[float]]) -> None:
    """Raise unless every column has two or more rising edges."""
    for at, each in enumerate(edges):
        bins = torch.tensor(list(each), dtype=torch.float32)
        if len(each) < 2 or not bool(bins.isfinite().all()) or not bool((bins.diff() > 0).all()):
            raise ValueError(f"layout must hold two or more increasing edges for number {at}, got {list(each)}")


class Tabular(nn.Module):
    """Embeddings of numbers, and an `MLP` on these and all zeros and ones.

    Args:
        inputs: Features of a row.
        outputs: Outputs of the last layer.
        layout: Features in order: for a number, the edges of its bins; for n features of zeros and ones that belong
            together, n (see `Data.layout`). By default all are numbers with a normal distribution.
        embedding: "piecewise", "periodic" or None, which leaves numbers unchanged.
        width: Size of each embedding.
        bins: Number of bins per number, if there is no layout.
        hidden: Units of each hidden layer; by default two layers of 512, or three without embeddings.
        dropout: Rate of the dropout after each hidden layer.
        activation: As in `MLP`.

    Shape: `[B, inputs] -> [B, outputs]`.

    Example:
        >>> net = tabular(
        ...     5, 2, layout=[[-1.0, 0.0, 1.0], [-2.0, 2.0], 3]
        ... )  # two numbers, and a column of three categories
        >>> net(torch.zeros(4, 5)).shape, net.chunks
        (torch.Size([4, 2]), [16, 16, 3])
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        layout: Layout | None = None,
        embedding: str | None = "piecewise",
        width: int = 16,
        bins: int = 128,
        hidden: Sequence[int] | None = None,
        dropout: float = 0.1,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        check_counts(inputs=inputs, outputs=outputs, width=width, bins=bins)
        check_choice("embedding", embedding, ("piecewise", "periodic", None))
        self.inputs = inputs
        layout = _normal_layout(inputs, bins) if layout is None else list(layout)
        sizes = [1 if isinstance(each, Sequence) else check_count("layout", each) for each in layout]
        if sum(sizes) != inputs:
            raise ValueError(f"layout must have {inputs} features like inputs, got {sum(sizes)}")
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        numbers = [at for at, each in enumerate(layout) if isinstance(each, Sequence)]
        edges = [each for each in layout if isinstance(each, Sequence)]
        check_edges(edges)
        many = [at for at, each in enumerate(layout) if isinstance(each, int) and each > FEW]
        few = [at for at in range(len(layout)) if at not in numbers and at not in many]
        # The perceptron's inputs: numbers, then columns of many zeros and ones, then the others.
        self.sizes = [len(numbers), *(sizes[at] for at in many), sum(sizes[at] for at in few)]
        places = [p for at in (*numbers, *many, *few) for p in range(starts[at], starts[at] + sizes[at])]
        self.register_buffer("order", torch.tensor(places), persistent=True)
        self.embedding = None if embedding is None or not edges else _EMBEDDINGS[embedding](edges, width)
        self.categories = nn.ModuleList(Categories(sizes[at], width) for at in many)
        each = 1 if self.embedding is None else width
        self.chunks = [each] * len(numbers) + [width] * len(many) + [sizes[at] for at in few]
        hidden = (512,) * (3 if self.embedding is None else 2) if hidden is None else hidden
        self.mlp = MLP(sum(self.chunks), outputs, hidden, activation=activation, dropout=dropout)

    order: Tensor
    chunks: list[int]
    """Number of the perceptron's inputs for each column, in order."""

    def forward(self, x: Tensor) -> Tensor:
        # A network widened by MIMO gets several concatenated rows, `[B, n * inputs]`.
        rows = x.unflatten(-1, (-1, self.inputs)).index_select(-1, self.order)
        ends = list(accumulate(self.sizes))
        numbers, few = rows[..., : ends[0]], rows[..., ends[-2] :]
        numbers = numbers if self.embedding is None else self.embedding(numbers)
        categories = [layer(rows[..., ends[at] : ends[at + 1]]) for at, layer in enumerate(self.categories)]
        return self.mlp(torch.cat([numbers, *categories, few], -1).flatten(-2))


def _normal_layout(inputs: int, bins: int) -> Layout:
    """Return bins of equal probability for normally distributed numbers, with ends at 0.1 % or at most half a bin."""
    levels = torch.linspace(0, 1, bins + 1, dtype=torch.float64).clamp(min(1e-3, 0.5 / bins), 1 - min(1e-3, 0.5 / bins))
    return [torch.special.ndtri(levels).tolist()] * inputs


_EMBEDDINGS = {
    "piecewise": PiecewiseLinear,
    "periodic": lambda edges, width: Periodic(len(edges), width),
}


tabular = Tabular
