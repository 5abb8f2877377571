"""The network for tables: each number embedded, then a multilayer perceptron.

Gorishniy, Rubachev and Babenko, *On Embeddings for Numerical Features in Tabular Deep Learning* (2022): a perceptron
learns jumps and bends of one column badly, so each number first becomes a vector. Piecewise-linear embeddings, with a
linear part beside that is all there is in the beginning, are those of Gorishniy et al., *TabM* (2025).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from multitudes.core.checks import check_choice, check_count, check_number
from multitudes.models.blocks import check_counts
from multitudes.models.perceptron import MLP

Layout = Sequence[int | Sequence[float]]
"""What the features of a table are, in order: of a number the edges of its bins, of n zeros and ones n."""

FEW = 20
"""A column of more zeros and ones than these is embedded."""

FREQUENCIES, SIGMA = 48, 0.05
"""How many frequencies a periodic embedding begins with, and their deviation."""


class PiecewiseLinear(nn.Module):
    """Each of F numbers as a vector: a line, and a bend at every edge of its bins. `[..., F] -> [..., F * width]`.

    A number is written as one value a bin: 1 in those below it, 0 in those above it, in its own how far it has come;
    the first and the last bin go on without an end. The vector is a linear map of that and of the number itself.
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
        written = torch.cat([x, bins], -1)
        return embedded(written, self.weight, self.bias)


class Periodic(nn.Module):
    """Each of F numbers as a vector: sines and cosines of learned frequencies, a linear map, and a rectifier.

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
        return torch.relu(embedded(torch.cat([angles.cos(), angles.sin()], -1), self.weight, self.bias))


class Categories(nn.Module):
    """A vector for each of many categories, which come as zeros and ones: `[B, count] -> [B, width]`."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def embedded(written: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear map of its own for each of F numbers: `[..., F, K] -> [..., F * width]`."""
    return (torch.einsum("...fk,fkw->...fw", written, weight) + bias).flatten(-2)


def check_edges(edges: Sequence[Sequence[float]]) -> None:
    """Rising numbers, two or more of each column."""
    for at, each in enumerate(edges):
        bins = torch.tensor(list(each), dtype=torch.float32)
        if len(each) < 2 or not bool(bins.isfinite().all()) or not bool((bins.diff() > 0).all()):
            raise ValueError(f"layout: the edges of number {at} must be two or more that rise, got {list(each)}")


class Tabular(nn.Module):
    """Embeddings of numbers, and an `MLP`, which sees them side by side with all zeros and ones.

    Args:
        inputs: features of a row.
        outputs: outputs of the last layer.
        layout: what the features are, in order: of a number the edges of its bins, of n features of zeros and ones that
            belong together n (see `Data.layout`); by default all are numbers that are spread like the normal
            distribution.
        embedding: "piecewise", "periodic" or None, which leaves numbers as they are.
        width: of each embedding.
        bins: how many bins numbers have, where there is no layout.
        hidden: units of each hidden layer; by default 512 in two, and without embeddings in three.
        dropout: the rate of the dropout after each hidden layer.
        activation: as of `MLP`.

    Shape: `[B, inputs] -> [B, outputs]`.

    >>> net = tabular(5, 2, layout=[[-1.0, 0.0, 1.0], [-2.0, 2.0], 3])  # two numbers, and a column of three categories
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
            raise ValueError(f"layout must be of {inputs} features, the inputs, got one of {sum(sizes)}")
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        numbers = [at for at, each in enumerate(layout) if isinstance(each, Sequence)]
        edges = [each for each in layout if isinstance(each, Sequence)]
        check_edges(edges)
        many = [at for at, each in enumerate(layout) if isinstance(each, int) and each > FEW]
        few = [at for at in range(len(layout)) if at not in numbers and at not in many]
        # Numbers, then columns of many zeros and ones, then the others: the order in which the perceptron sees them.
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
    """How many of the perceptron's inputs each column has, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        # Several rows may come side by side, `[B, n * inputs]`, to a perceptron that was widened for them (MIMO).
        rows = x.unflatten(-1, (-1, self.inputs)).index_select(-1, self.order)
        ends = list(accumulate(self.sizes))
        numbers, few = rows[..., : ends[0]], rows[..., ends[-2] :]
        embedded = numbers if self.embedding is None else self.embedding(numbers)
        categories = [embed(rows[..., ends[at] : ends[at + 1]]) for at, embed in enumerate(self.categories)]
        return self.mlp(torch.cat([embedded, *categories, few], -1).flatten(-2))


def _normal_layout(inputs: int, bins: int) -> Layout:
    """As of numbers of the normal distribution: bins of the same probability, the ends at 0.1 % of it."""
    levels = torch.linspace(0, 1, bins + 1, dtype=torch.float64).clamp(min(1e-3, 0.5 / bins), 1 - min(1e-3, 0.5 / bins))
    return [torch.special.ndtri(levels).tolist()] * inputs


_EMBEDDINGS = {
    "piecewise": PiecewiseLinear,
    "periodic": lambda edges, width: Periodic(len(edges), width),
}


tabular = Tabular
