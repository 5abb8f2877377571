"""Scores of ensembles by the number of runs.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, section 5.
Predictions are averaged over the solutions of the first m runs: checkpoints, draws from subspaces around them, or
averages of weights (Fig. 8). The diversity of these solutions is

    JS divergence = H(mean_m p_m) - mean_m H(p_m).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.landscape.figures import add_lines, figure
from multitudes.landscape.solutions import read_solutions
from multitudes.metrics.class_inputs import read_rows
from multitudes.metrics.divergences import ensemble_js
from multitudes.metrics.scoring import accuracy, brier


@dataclass(frozen=True, eq=False, repr=False)
class Growth:
    """Scores `[K, M]` of ensembles of K kinds of solutions and the first 1, ..., M runs, float64 on the CPU."""

    kinds: tuple[str, ...]
    runs: tuple[str, ...]
    accuracy: Tensor
    brier: Tensor
    divergence: Tensor
    """Jensen-Shannon divergence of the averaged solutions, in nats."""

    def __repr__(self) -> str:
        return f"Growth(kinds={len(self.kinds)}, runs={len(self.runs)})"

    def plot(self) -> Any:
        """Plot accuracy against ensemble size, one line per kind (Fig. 8)."""
        fig = figure("Accuracy by ensemble size", "runs in the ensemble", "accuracy")
        add_lines(fig, self.kinds, range(1, len(self.runs) + 1), self.accuracy)
        return fig


def growth(
    solutions: Any, data: Any = None, *, model: nn.Module | None = None, draws: int = 10, seed: int = 0
) -> Growth:
    """Score the mean prediction of the first 1, 2, ..., M runs, for each kind of solutions (Fig. 8).

    Args:
        solutions: Runs with the same kinds, for example `{name: subspaces(run) for name, run in runs.items()}`; see
            `read_solutions`.
        data: Inputs and classes, `(x, y)` or batches of them.
        model: See `read_solutions`.
        draws: Number of solutions per run, for a kind that draws.
        seed: See `read_solutions`.

    Returns:
        Scores of each kind and size, with `plot()`.
    Example:
        >>> nets = [nn.Linear(3, 2) for _ in range(4)]
        >>> growth(nets, (torch.randn(20, 3), torch.zeros(20).long())).accuracy.shape
        torch.Size([1, 4])
    """
    read = read_solutions(solutions, data, model=model, draws=draws, seed=seed)
    classes = read.classes()
    runs, kinds = tuple(dict.fromkeys(read.runs)), tuple(dict.fromkeys(read.kinds))
    for run, kind in itertools.product(runs, kinds):
        if (run, kind) not in read.groups():
            raise ValueError(f"solutions must have the same kinds in every run, but {run!r} has no {kind!r}")

    def scores(kind: str, size: int) -> Tensor:
        rows = read_rows(read.chosen(kind, runs[:size]), classes)
        return torch.stack([accuracy(rows), brier(rows), ensemble_js(rows)])

    table = torch.stack([scores(kind, size) for kind in kinds for size in range(1, len(runs) + 1)])
    return Growth(kinds, runs, *table.T.unflatten(1, (len(kinds), len(runs))).contiguous())
