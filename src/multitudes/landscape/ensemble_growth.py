"""Growing ensembles: of runs, and of solutions around each run.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, section 5.
Predictions are averaged over the solutions of the first m runs: checkpoints, draws from subspaces around them, averages
of weights (Fig. 8). The diversity of these solutions is

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
    """Scores of ensembles by size, `[K, M]`, for K kinds of solutions and the first 1, ..., M runs; float64 CPU."""

    kinds: tuple[str, ...]
    runs: tuple[str, ...]
    accuracy: Tensor
    brier: Tensor
    divergence: Tensor
    """Jensen-Shannon divergence of all averaged solutions, in nats."""

    def __repr__(self) -> str:
        return f"Growth(kinds={len(self.kinds)}, runs={len(self.runs)})"

    def plot(self) -> Any:
        """Plot accuracy against the size of the ensemble, with a line for each kind (Fig. 8)."""
        fig = figure("Ensembles as they grow", "runs in the ensemble", "accuracy")
        add_lines(fig, self.kinds, range(1, len(self.runs) + 1), self.accuracy)
        return fig


def growth(
    solutions: Any, data: Any = None, *, model: nn.Module | None = None, draws: int = 10, seed: int = 0
) -> Growth:
    """Score the mean prediction of the first 1, 2, ..., M runs, for each kind of solutions (Fig. 8).

    The arguments are those of `read_solutions`. Runs must have the same kinds, and data must have classes. Runs can be
    `{name: subspaces(recorder) for name, recorder in runs.items()}`. A kind that draws adds `draws` solutions per run.

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
