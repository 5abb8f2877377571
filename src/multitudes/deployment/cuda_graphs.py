"""The GPU engine: one CUDA graph per batch size and number of draws.

A graph has a fixed number of rows. If rows do not affect each other, batches are padded to the next size with a graph.
Networks that draw are not padded, since the draws of a seed depend on the number of rows. The first output of a graph
for each number of rows is compared with the network's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from multitudes.deployment.cuda_capture import Captured, Plan, capture
from multitudes.deployment.engines import MAX_SHAPES, Engine, Reference, TorchEngine, rows_of, signature
from multitudes.deployment.operation_graph import CannotTrace
from multitudes.networks.calls import Input, map_tensors, tensors_in

MAX_GRAPHS = 16
"""Maximum number of graphs. Beyond it, a size replaces the least used graph once it occurs more than twice as often."""

MAX_ROWS = 512
"""Maximum rows of a graph, unless larger sizes are requested; larger batches are split."""


class CudaGraphEngine:
    """A multitude on a GPU, with one CUDA graph per batch size.

    Graphs capture `folded`. `otherwise` runs inputs without a graph, such as new shapes until they occur twice. With
    `may_pad`, batches are padded.
    """

    def __init__(
        self, folded: TorchEngine, otherwise: Engine, reference: Reference, example: Input, sizes: Iterable[int],
        may_pad: bool,
    ) -> None:  # fmt: skip
        self.folded, self.otherwise, self.reference, self.may_pad = folded, otherwise, reference, may_pad
        self.batched = [tensor.shape[:1] == tensors_in(example)[0].shape[:1] for tensor in tensors_in(example)]
        self.sizes = sorted({len(tensors_in(example)[0]), *sizes})
        self.graphs: dict[Any, Captured | None] = {}  # None: the reason is in `refused`
        self.refused: dict[Any, str] = {}
        self.agreed: dict[Any, bool] = {}  # per graph and number of rows
        self.seen: dict[Any, int] = {}
        self.plan: Plan | None = None
        self.pool = torch.cuda.graph_pool_handle()
        self.done = torch.cuda.Event()
        with torch.cuda.device(folded.device):
            for size in self.sizes:
                self._prepare(example, size, self._draws({}) or 0, None)

    def __call__(self, x: Input, **options: Any) -> Tensor:
        with torch.cuda.device(self.folded.device):
            torch.cuda.current_stream().wait_event(self.done)  # calls share their input tensors
            found = self._answer(x, **options)
            self.done.record()
        return found

    def _answer(self, x: Input, **options: Any) -> Tensor:
        rows, most, draws = rows_of(x), max(MAX_ROWS, *self.sizes), self._draws(options)
        if not rows or draws is None or not self._fits(x, rows) or (rows > most and not self.may_pad):
            return self.otherwise(x, **options)
        if rows > most:
            parts = [self._answer(self._part(x, start, min(start + most, rows))) for start in range(0, rows, most)]
            return torch.cat(parts, 1)
        graph = self._graph(x, rows, draws)
        return self.otherwise(x, **options) if graph is None else graph(x, rows, options.get("seed"))

    def _draws(self, options: dict[str, Any]) -> int | None:
        """Return the draws of a graph, 0 without layers that draw; None if no graph supports the options."""
        if not self.reference.options:
            return None if options else 0
        draws, seed = options.get("draws"), options.get("seed")
        draws = self.folded.net.draws if draws is None else draws
        plain = type(draws) is int and (seed is None or type(seed) is int) and options.get("memory") is None
        return draws if plain and draws > 0 else None

    def summary_rows(self) -> list[tuple[str, str]]:
        made = {key: graph for key, graph in self.graphs.items() if graph is not None}
        if not made:
            return [("CUDA graphs", "none: " + next(iter(self.reasons()), "no input size occurred twice"))]
        first = next(iter(made.values()))
        mebibytes = sum(graph.nbytes for graph in made.values()) / 2**20
        sizes = ", ".join(graph.size() for graph in made.values())
        bounded = f"at most {MAX_GRAPHS} are kept, of {max(MAX_ROWS, *self.sizes)} rows or fewer"
        return [*first.plan.summary_rows, ("CUDA graphs", f"for batches of {sizes}, {mebibytes:.0f} MiB; {bounded}")]

    def reasons(self) -> list[str]:
        """Return the reasons why inputs have no graph."""
        return list(dict.fromkeys(self.refused.values()))

    # -- choosing a graph ----------------------------------------------------------------------------------

    def _fits(self, x: Input, rows: int) -> bool:
        """Return whether `x` has the example's number of tensors and batch axes, and no values but plain ones."""
        tensors = tensors_in(x)
        own = [tensor.shape[:1] == (rows,) for tensor, batched in zip(tensors, self.batched, strict=False) if batched]
        return len(tensors) == len(self.batched) and all(own) and signature(x) is not None

    def _part(self, x: Input, start: int, end: int) -> Input:
        batched = iter(self.batched)
        return map_tensors(lambda tensor: tensor[start:end] if next(batched) else tensor, x)

    def _size(self, rows: int) -> int:
        """Return the rows of the graph for a batch: a requested size, or a power of two."""
        if not self.may_pad:
            return rows
        power = 1 << (rows - 1).bit_length()
        return next((size for size in self.sizes if rows <= size <= power), power)

    def _key(self, x: Input, size: int, draws: int) -> Any:
        """Return the key of a graph with this many rows and draws."""
        shapes = [tuple(tensor.shape)[batched:] for tensor, batched in zip(tensors_in(x), self.batched, strict=True)]
        return signature(x, shapes=False), tuple(shapes), size, draws

    def _graph(self, x: Input, rows: int, draws: int) -> Captured | None:
        """Return the graph for a batch; None if there is none, or if it is wrong for this number of rows."""
        size = self._size(rows)
        key = self._key(x, size, draws)
        if len(self.seen) > MAX_SHAPES:
            self._forget()
        self.seen[key] = self.seen.get(key, 0) + 1
        if key not in self.graphs:
            if not self._is_worth_it(key):
                return None
            self._prepare(x, size, draws, self.plan)
        graph = self.graphs[key]
        if graph is not None and (key, rows) not in self.agreed:
            self.agreed[key, rows] = self._is_right(graph, x, draws)
        return graph if graph is not None and self.agreed[key, rows] else None

    def _is_worth_it(self, key: Any) -> bool:
        """Return whether inputs of this key are frequent enough for a graph."""
        made = self._made()
        rarest = min((self.seen.get(other, 0) for other in made), default=0)
        return self.seen[key] >= 2 and (len(made) < MAX_GRAPHS or self.seen[key] > 2 * rarest)

    def _made(self) -> list[Any]:
        return [key for key, graph in self.graphs.items() if graph is not None]

    def _forget(self) -> None:
        """Drop the counts of inputs without a graph."""
        made = set(self._made())
        self.seen = {key: times for key, times in self.seen.items() if key in made}
        self.graphs = {key: graph for key, graph in self.graphs.items() if graph is not None}
        self.agreed = {known: right for known, right in self.agreed.items() if known[0] in made}
        self.refused = {}

    def _prepare(self, x: Input, size: int, draws: int, like: Plan | None) -> None:
        """Capture a graph with this many rows and draws for inputs like `x`, or store why that is impossible.

        With a plan, the slow timing is skipped.
        """
        key = self._key(x, size, draws)
        self.graphs[key] = None
        padded = self._of_rows(self.folded.cast(x), size)
        try:
            self.graphs[key] = found = capture(self.folded, padded, self.batched, self.pool, like, draws)
        except CannotTrace as refusal:
            self.refused[key] = str(refusal)
            return
        self.plan = found.plan if like is None else self.plan
        rarest = sorted((other for other in self._made() if other != key), key=lambda other: self.seen.get(other, 0))
        for other in rarest[: max(0, len(rarest) + 1 - MAX_GRAPHS)]:
            del self.graphs[other]
            self.agreed = {known: right for known, right in self.agreed.items() if known[0] != other}

    def _is_right(self, graph: Captured, x: Input, draws: int) -> bool:
        """Compare a graph with the network on the first input with this many rows; warn if they differ."""
        options = {"draws": draws} if draws else {}
        off, _, bound = self.reference.compare(lambda x, seed=None, **_: graph(x, rows_of(x), seed), x, **options)
        if off > bound:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(x))
            why = f"a graph's predictions differ from the network's by {off:.1e}"
            self.refused[shapes] = why
            warnings.warn(f"x of shape {shapes}: {why}; torch runs such inputs", stacklevel=2)
        return off <= bound

    def _of_rows(self, x: Input, size: int) -> Input:
        """Pad the batch to this many rows by repeating rows."""
        batched = iter(self.batched)

        def padded(tensor: Tensor) -> Tensor:
            if not next(batched) or len(tensor) == size:
                return tensor
            return tensor[torch.arange(size, device=tensor.device) % len(tensor)]

        return map_tensors(padded, x)
