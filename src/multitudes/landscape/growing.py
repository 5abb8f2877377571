"""Ensembles of runs and of solutions around each run as they grow, and causes of two runs' difference.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, section 5 and appendix B.
Predictions are averaged over the solutions of the first m runs: checkpoints, draws from subspaces around them, averages
of weights (Fig. 8). The diversity of the solutions that are averaged is

    JS divergence = H(mean_m p_m) - mean_m H(p_m).

Two runs may differ in their initialisation, in the order of their batches, or in both (Fig. S4).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.checks import check_seed
from multitudes.core.seeding import seeded
from multitudes.landscape.figures import COLOURS, add_lines, figure
from multitudes.landscape.function_space import Similarity, similarity
from multitudes.landscape.solutions import read_solutions
from multitudes.metrics.divergences import ensemble_js
from multitudes.metrics.inputs import read_rows
from multitudes.metrics.scoring import accuracy, brier

__all__ = ["Growth", "Randomness", "growth", "initialisation_against_order"]

# -- as the ensemble grows ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Growth:
    """Ensembles by size: `[K, M]`, for K kinds of solutions and the first 1, ..., M runs; float64, on the CPU."""

    kinds: tuple[str, ...]
    runs: tuple[str, ...]
    accuracy: Tensor
    brier: Tensor
    divergence: Tensor
    """The Jensen-Shannon divergence of all solutions that are averaged, in nats."""

    def __repr__(self) -> str:
        return f"Growth(kinds={len(self.kinds)}, runs={len(self.runs)})"

    def plot(self) -> Any:
        """Accuracy against the size of the ensemble, a line for each kind (Fig. 8)."""
        fig = figure("Ensembles as they grow", "runs in the ensemble", "accuracy")
        add_lines(fig, self.kinds, range(1, len(self.runs) + 1), self.accuracy)
        return fig


def growth(
    solutions: Any, data: Any = None, *, model: nn.Module | None = None, draws: int = 10, seed: int = 0
) -> Growth:
    """Score the mean prediction of the first 1, 2, ..., M runs, for each kind of solutions (Fig. 8).

    The arguments are those of `read_solutions`: runs of the same kinds, and data with classes. As runs pass
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


# -- initialisation and order ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Randomness:
    """Runs of controlled seeds of initialisations and of orders of batches, and how their functions differ."""

    similarity: Similarity
    initialisations: tuple[int, ...]
    orders: tuple[int, ...]

    def __repr__(self) -> str:
        means = ", ".join(f"{name}: {value:.4f}" for name, value in self.disagreement.items())
        return f"Randomness({means})"

    @property
    def disagreement(self) -> dict[str, float]:
        """The mean disagreement of two runs, by the seeds in which they differ."""
        sums: dict[str, list[float]] = {}
        for i, j in torch.triu_indices(len(self.orders), len(self.orders), 1).T.tolist():
            starts = self.initialisations[i] != self.initialisations[j]
            batches = self.orders[i] != self.orders[j]
            name = "both" if starts and batches else "initialisation" if starts else "order" if batches else "neither"
            sums.setdefault(name, []).append(float(self.similarity.disagreement[i, j]))
        return {name: sum(values) / len(values) for name, values in sums.items()}

    def plot(self) -> Any:
        """The disagreement of two runs, by what differs between them (Fig. S4)."""
        means = self.disagreement
        fig = figure("Random initialisation and random order", "what differs", "disagreement")
        return fig.add_bar(x=list(means), y=list(means.values()), marker={"color": COLOURS[0]})


def initialisation_against_order(
    make: Callable[[int], nn.Module],
    train: Callable[[nn.Module, int], Any],
    data: Any,
    *,
    seeds: tuple[int, int] = (0, 1),
    repeat: bool = False,
) -> Randomness:
    """Train four networks, by two initialisations and two orders of batches, and compare them (Fig. S4).

    Args:
        make: gives a network, initialised by a seed.
        train: trains a network in place, with batches in the order of a seed. Torch's random state is set to the
            seed before each of both, and is as it was, after.
        data: inputs `[N, ...]`, `(x, y)` or an iterable of batches, to compare predictions on.
        seeds: two different ones.
        repeat: train the first network twice: on some hardware equal seeds do not give equal functions.

    >>> data = torch.randn(100, 2)
    >>> initialisation_against_order(lambda seed: nn.Linear(2, 3), lambda net, seed: None, data).disagreement["order"]
    0.0
    """
    if len(seeds) != 2 or seeds[0] == seeds[1]:
        raise ValueError(f"seeds must be two different numbers, got {seeds!r}")
    for seed in seeds:
        check_seed(seed)
    places = [(start, order) for start in seeds for order in seeds]
    places += places[:1] if repeat else []
    networks: dict[str, nn.Module] = {}
    for number, (start, order) in enumerate(places):
        with seeded(start):
            network = make(start)
        if not isinstance(network, nn.Module):
            raise ValueError(f"make must give an nn.Module, got {type(network).__name__}")
        if any(network is other for other in networks.values()):
            raise ValueError("make must give a new network each time, got one that it gave before")
        with seeded(order):
            train(network, order)
        again = ", again" if number == 4 else ""
        networks[f"initialisation {start}, order {order}{again}"] = network
    starts, orders = zip(*places, strict=True)
    return Randomness(similarity(networks, data), starts, orders)
