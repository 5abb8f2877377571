"""Random networks: each is made of an input, two to five blocks and a head, and is known by its number alone.

`case(123)` is always the same network with the same weights, input and target, in float64. What the blocks are is in
`random_rows`, `random_habits`, `random_sequences` and `random_maps`; what is done with the networks in `random_judge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tests.campaigns.random_habits
import tests.campaigns.random_maps  # noqa: F401
from tests.campaigns.random_dice import BLOCKS, PLAIN, WIDTH, Dice
from tests.campaigns.random_sequences import class_token

CLASSES = 3


@dataclass
class Answer:
    """An answer of several parts, as Hugging Face's."""

    logits: Tensor
    features: Tensor


class Network(nn.Module):
    """An input, blocks and a head. Subclasses differ in what they are called with."""

    def __init__(self, into: nn.Module, blocks: nn.Module, head: nn.Module, answer: str) -> None:
        super().__init__()
        self.into, self.blocks, self.head, self.answer = into, blocks, head, answer

    def forward(self, x: Tensor) -> Any:
        return self.finish(self.blocks(self.into(x)))

    def finish(self, features: Tensor) -> Any:
        logits = self.head(features)
        if self.answer == "tuple":
            return logits, features
        if self.answer == "dict":
            return {"logits": logits, "features": features}
        return Answer(logits, features) if self.answer == "object" else logits


class Masked(Network):
    """Called with a sequence and a mask of its steps, by position or by keyword."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        features = self.into(x)
        if mask is not None:
            features = features * (0.1 + mask.unsqueeze(-1))  # not 0, which a norm would make much of
        return self.finish(self.blocks(features))


class OfBatch(Network):
    """Called with a batch that is a dict."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.finish(self.blocks(self.into(batch["x"]) + batch["shift"].unsqueeze(-1)))


class Pair(Network):
    """Called with two inputs, which the same layer reads."""

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.finish(self.blocks(self.into(x) - 0.5 * self.into(other)))


class Graph(Network):
    """Called with nodes `[N, F]` and edges `[2, E]`: each node adds up its neighbours."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        nodes = self.into(x)
        neighbours = torch.zeros_like(nodes).index_add(0, edge_index[1], nodes[edge_index[0]])
        return self.finish(self.blocks(nodes + neighbours))


class SequenceFirst(Network):
    """Called with `[T, B, F]`."""

    def forward(self, x: Tensor) -> Any:
        return self.finish(self.blocks(self.into(x).transpose(0, 1)))


class Video(Network):
    """Network for `[B, T, C, H, W]` whose blocks get the frames time-major, `[T*B, C, H, W]`."""

    def forward(self, x: Tensor) -> Any:
        frames = x.transpose(0, 1)
        features = self.blocks(self.into(frames.flatten(0, 1)))
        return self.finish(features.unflatten(0, frames.shape[:2]).mean(0))


class Pixels(nn.Module):
    """Bytes to numbers, and a first convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.to(self.conv.weight.dtype) / 255)


class Pool(nn.Module):
    """The mean over everything between the batch and the features, or the first step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "maps":
            x = x.mean((2, 3))
        elif x.dim() == 3:
            x = x[:, 0] if self.how == "first" else x.mean(1)
        return self.linear(x)


class PatchesOf(nn.Module):
    """Maps `[B, 8, H, W]` to a sequence of patches `[B, T, 8]`."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(WIDTH, WIDTH, 3, stride=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.patches(x).flatten(2).transpose(1, 2)


Inputs = tuple[type[Network], Callable[[], nn.Module], Callable[[int], Any], str]


def _mask(batch: int, length: int) -> Tensor:
    return (torch.rand(batch, length) > 0.3).to(torch.get_default_dtype())


def _frozen_embedding() -> nn.Module:
    return nn.Embedding.from_pretrained(torch.randn(20, WIDTH))


def _tokens(batch: int) -> Tensor:
    return torch.randint(20, (batch, 5))


INPUTS: dict[str, Inputs] = {
    "vector": (Network, lambda: nn.Linear(6, WIDTH), lambda b: torch.randn(b, 6), "rows"),
    "image": (Network, lambda: nn.Conv2d(3, WIDTH, 3, padding=1), lambda b: torch.randn(b, 3, 6, 6), "maps"),
    "bytes": (Network, Pixels, lambda b: torch.randint(256, (b, 3, 6, 6), dtype=torch.uint8), "maps"),
    "patches": (
        Network,
        lambda: nn.Sequential(nn.Conv2d(3, WIDTH, 1), PatchesOf()),
        lambda b: torch.randn(b, 3, 6, 6),
        "sequences",
    ),
    "sequence": (Network, lambda: nn.Linear(6, WIDTH), lambda b: torch.randn(b, 5, 6), "sequences"),
    "tokens": (Network, lambda: nn.Embedding(20, WIDTH), _tokens, "sequences"),
    "frozen tokens": (Network, _frozen_embedding, _tokens, "sequences"),
    "sequence first": (SequenceFirst, lambda: nn.Linear(6, WIDTH), lambda b: torch.randn(5, b, 6), "sequences"),
    "masked": (Masked, lambda: nn.Embedding(20, WIDTH), lambda b: (_tokens(b), _mask(b, 5)), "sequences"),
    "keywords": (
        Masked,
        lambda: nn.Linear(6, WIDTH),
        lambda b: {"x": torch.randn(b, 5, 6), "mask": _mask(b, 5)},
        "sequences",
    ),
    "dict": (
        OfBatch,
        lambda: nn.Linear(6, WIDTH),
        lambda b: {"x": torch.randn(b, 5, 6), "shift": torch.randn(b, 5)},
        "sequences",
    ),
    "pair": (Pair, lambda: nn.Linear(6, WIDTH), lambda b: (torch.randn(b, 6), torch.randn(b, 6)), "rows"),
    "graph": (
        Graph,
        lambda: nn.Linear(6, WIDTH),
        lambda b: (torch.randn(2 * b, 6), torch.randint(2 * b, (2, 3 * b))),
        "rows",
    ),
    "video": (Video, lambda: nn.Conv2d(3, WIDTH, 3, padding=1), lambda b: torch.randn(b, 3, 3, 6, 6), "maps"),
}


@dataclass
class Case:
    """A random network with an input and a target."""

    number: int
    model: nn.Module
    x: Any
    y: Tensor
    task: str
    parts: tuple[str, ...]
    noise: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number}: {', '.join(self.parts)}"


@contextmanager
def in_double(seed: int) -> Iterator[None]:
    """Use float64 and this seed inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(before)


def run(model: nn.Module, x: Any) -> Tensor:
    """Call a network as a user would and read the prediction, independently of the library."""
    if isinstance(x, dict) and not isinstance(model, OfBatch):
        output = model(**x)
    else:
        output = model(*x) if isinstance(x, tuple) else model(x)
    if isinstance(output, tuple):
        return output[0]
    if isinstance(output, dict):
        return output["logits"]
    return output if isinstance(output, Tensor) else output.logits


def case(number: int, noise: Sequence[int] | None = None, weights: int = 0) -> Case:
    """Build a random network, with all its `noise` or only some dropouts; `weights` seeds other weights."""
    dice = Dice(number, noise)
    with in_double(1_000_003 * weights + number):
        kind = dice.one(list(INPUTS))
        network, into, batch, form = INPUTS[kind]
        blocks_of = PLAIN if dice.chance(0.4) else BLOCKS
        chosen = [dice.one(blocks_of[form]) for _ in range(dice.random.randint(1, 4))]
        if form == "maps" and kind != "video" and dice.chance(0.25):
            form = "sequences"
            chosen = [*chosen[:2], PatchesOf, *(dice.one(blocks_of[form]) for _ in range(dice.random.randint(1, 2)))]
        head, dense = _head(dice, form, chosen[-1] is class_token)
        answer = dice.one(("tensor",) * 8 + ("tuple", "dict", "object"))
        size = dice.random.randint(3, 5)
        blocks = nn.Sequential(*(build() if build is PatchesOf else build(dice) for build in chosen))
        model = network(into(), blocks, head(), answer).eval()
    with in_double(number):
        x = batch(size)
        prediction = run(
            model, x
        ).detach()  # with a gradient, as in a training before: some layers keep what they computed
        y = torch.randn_like(prediction) if dense else torch.randint(CLASSES, (len(prediction),))
    parts = (kind, *(build.__name__ for build in chosen), head.__name__ if dense else "pool", answer)
    return Case(number, model, x, y, "regression" if dense else "classification", parts, tuple(dice.rates))


def _head(dice: Dice, form: str, token_is_last: bool) -> tuple[Callable[[], nn.Module], bool]:
    """A head, and whether it answers for each step or pixel."""
    dense = dice.chance(0.25)

    def per_pixel() -> nn.Module:
        return nn.Conv2d(WIDTH, CLASSES, 1)

    def per_step() -> nn.Module:
        return nn.Linear(WIDTH, CLASSES)

    how = "maps" if form == "maps" else dice.one(("mean", "first"))
    if token_is_last:  # a class token that nothing has been added to says nothing of the input
        how = "mean"
    if form == "rows" or not dense:
        return (lambda: Pool(how)), False
    return (per_pixel if form == "maps" else per_step), True
