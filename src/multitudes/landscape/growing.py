"""What ensembles and subspaces add to each other: as ensembles grow, under corruption, and by what is random.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, section 5 and appendix B. Each
run gives a solution (its last checkpoint), solutions drawn from subspaces around it, and the average of its weights.
Predictions are averaged over the solutions of the first m runs: at m = 1 that is each of these alone, beyond it
together with ensembling (Fig. 8). The same under corruptions of the images, with the diversity of each method's own
solutions (Fig. 9),

    JS divergence = H(mean_m p_m) - mean_m H(p_m).

Two runs may differ in their initialisation, in the order of their batches, or in both (Fig. S4).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.batches import Batches
from multitudes.core.checks import check_seed, needed
from multitudes.core.draws.stochastic import stochastic_layers
from multitudes.core.seeding import seeded
from multitudes.landscape.figures import COLOURS, DASHES, SYMBOLS, figure, styled
from multitudes.landscape.figures import graph_objects as graph
from multitudes.landscape.function_space import Similarity, similarity
from multitudes.landscape.solutions import Solutions, last_checkpoint, read_solutions, subspaces, trajectory_of
from multitudes.methods.subspace import KINDS, swa
from multitudes.metrics.divergences import ensemble_js
from multitudes.metrics.inputs import read_rows
from multitudes.metrics.scoring import accuracy, brier
from multitudes.shift.corruptions import CORRUPTIONS, EXTRA, corrupt
from multitudes.training.recorder import Checkpoints

__all__ = [
    "Growth",
    "Randomness",
    "UnderCorruption",
    "growth",
    "initialisation_against_order",
    "under_corruption",
    "variants",
]

SCORES = ("accuracy", "brier", "divergence")


def _scores(read: Solutions, kind: str, runs: Sequence[str]) -> Tensor:
    """Accuracy and Brier score of the mean prediction, and JS divergence, of a kind's solutions in some runs, `[3]`."""
    rows = read_rows(read.chosen(kind, runs), read.classes())
    return torch.stack([accuracy(rows), brier(rows), ensemble_js(rows)])


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
        _add_lines(fig, self.kinds, list(range(1, len(self.runs) + 1)), self.accuracy)
        return fig


def variants(
    run: Checkpoints, model: nn.Module | None = None, kinds: Iterable[str] = KINDS, **options: Any
) -> dict[str, nn.Module]:
    """What section 5 makes of a run: its last checkpoint, subspaces around it, and the mean of its checkpoints.

    The subspaces are of `kinds`, with the `options` of `subspaces`.

    >>> model = nn.Linear(3, 2)
    >>> run = [{k: v + i for k, v in model.state_dict().items()} for i in range(9)]
    >>> list(variants(run, model, kinds=["diagonal"]))
    ['baseline', 'diagonal', 'weight averaging']
    """
    network, states = trajectory_of(run, model)
    options["data"] = Batches.of(options.get("data"))
    drawn = subspaces(states, network, kinds, **options)
    mean = swa(network, states, data=options["data"])
    return {"baseline": last_checkpoint(states, network)} | drawn | {"weight averaging": mean}


def growth(
    solutions: Any, data: Any = None, *, model: nn.Module | None = None, draws: int = 10, seed: int = 0
) -> Growth:
    """Score the mean prediction of the first 1, 2, ..., M runs, for each kind of solutions (Fig. 8).

    `solutions` are runs of the same kinds, as `{name: variants(recorder) for name, recorder in runs.items()}`, and
    `data` has their classes: see `read_solutions`, whose arguments these are. A kind that draws adds `draws` solutions
    for each run.

    >>> nets = [nn.Linear(3, 2) for _ in range(4)]
    >>> growth(nets, (torch.randn(20, 3), torch.zeros(20).long())).accuracy.shape
    torch.Size([1, 4])
    """
    read = read_solutions(solutions, data, model=model, draws=draws, seed=seed)
    read.classes()
    runs, kinds = tuple(dict.fromkeys(read.runs)), tuple(dict.fromkeys(read.kinds))
    found = set(zip(read.runs, read.kinds, strict=True))
    for run, kind in itertools.product(runs, kinds):
        if (run, kind) not in found:
            raise ValueError(f"solutions must have the same kinds in every run, but {run!r} has no {kind!r}")
    scores = torch.stack([_scores(read, kind, runs[:size]) for kind in kinds for size in range(1, len(runs) + 1)])
    return Growth(kinds, runs, *scores.T.unflatten(1, (len(kinds), len(runs))).contiguous())


# -- under corruption --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class UnderCorruption:
    """Methods by corruption and severity: `[K, T, V]`, for K methods, T corruptions, V severities; float64, CPU.

    Severity 0 is the images as they are, for every corruption.
    """

    methods: tuple[str, ...]
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    accuracy: Tensor
    brier: Tensor
    divergence: Tensor
    """The Jensen-Shannon divergence of a method's solutions, in nats."""

    def __repr__(self) -> str:
        return (
            f"UnderCorruption(methods={len(self.methods)}, corruptions={len(self.corruptions)}, "
            f"severities={self.severities})"
        )

    def plot(self) -> Any:
        """Means over the corruptions of the three scores, against severity (Fig. 9)."""
        subplots = needed("plotly.subplots", "plots", "a figure")
        fig = subplots.make_subplots(cols=3, subplot_titles=("accuracy", "Brier score", "JS divergence"))
        for column, score in enumerate(SCORES, start=1):
            _add_lines(fig, self.methods, list(self.severities), getattr(self, score).mean(1), column)
        return styled(fig, "Under corruption", "severity")


def under_corruption(
    methods: Mapping[str, Any],
    images: Tensor,
    target: Tensor,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = (0, 1, 2, 3, 4, 5),
    preprocess: Callable[[Tensor], Tensor] | None = None,
    model: nn.Module | None = None,
    draws: int = 5,
    seed: int = 0,
) -> UnderCorruption:
    """Accuracy, Brier score and JS divergence of methods on corrupted images (Fig. 9).

    Args:
        methods: by name, what holds the solutions whose predictions a method averages: a multitude, a subspace, a
            list of networks, a `Recorder` (see `read_solutions`). The divergence grows with the number of solutions:
            compare methods of as many.
        images: `[N, C, H, W]` in [0, 1], as `corrupt` takes them.
        target: their classes, `[N]`.
        corruptions: names of `multitudes.shift.CORRUPTIONS` or `EXTRA`.
        severities: 0, the images as they are, to 5.
        preprocess: what the networks want done to images, such as a normalisation, after the corruption.
        model: the network that state dicts are of.
        draws: how many draws to make of a method that draws; the paper makes 5.
        seed: of corruptions and draws.
    """
    if not isinstance(methods, Mapping) or not methods:
        raise ValueError(f"methods must be one or more methods by name, got {methods!r}")
    names, levels = tuple(corruptions), tuple(severities)
    for name in names:
        if name not in CORRUPTIONS + EXTRA:
            raise ValueError(f"corruptions must be among {', '.join(CORRUPTIONS + EXTRA)}, got {name!r}")
    for level in levels:
        if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= 5:
            raise ValueError(f"severities must be whole numbers from 0 to 5, got {level!r}")
    if not names or not levels:
        raise ValueError(f"corruptions and severities must hold at least one each, got {names} and {levels}")
    check_seed(seed)

    def read(x: Tensor, solutions: Mapping[str, Any]) -> Solutions:
        data = (x if preprocess is None else preprocess(x), target)
        return read_solutions({"": dict(solutions)}, data, model=model, draws=draws, seed=seed)

    def scored(found: Solutions) -> Tensor:
        """`[3, K]`"""
        return torch.stack([_scores(found, name, found.runs) for name in methods], 1)

    clean = read(images, methods)
    # What was drawn from a subspace is drawn once, and stays the same for all images.
    drawn = {
        name: list(_once([net for net, kind in zip(clean.networks, clean.kinds, strict=True) if kind == name], draws))
        for name in methods
    }
    table = torch.stack(
        [
            scored(read(corrupt(images, name, level, seed), drawn) if level else clean)
            for name in names
            for level in levels
        ],
        dim=2,
    )
    return UnderCorruption(tuple(methods), names, levels, *table.unflatten(2, (len(names), len(levels))))


def _once(networks: list[nn.Module], draws: int) -> Iterator[nn.Module]:
    """The networks of solutions, where one that draws stands for all of its draws."""
    at = 0
    while at < len(networks):
        yield networks[at]
        at += draws if stochastic_layers(networks[at]) else 1


# -- initialisation and order ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Randomness:
    """Runs of controlled seeds, and how their functions differ."""

    similarity: Similarity
    initialisations: tuple[int, ...]
    """The seed of each run's initialisation."""
    orders: tuple[int, ...]
    """The seed of each run's batches."""

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
        return fig.add_trace(graph().Bar(x=list(means), y=list(means.values()), marker={"color": COLOURS[0]}))


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


# -- figures -----------------------------------------------------------------------------------------------


def _add_lines(fig: Any, names: Sequence[str], x: list[int], values: Tensor, column: int | None = None) -> None:
    """A line for each row of `values [K, X]`; in subplots, named once."""
    place = {} if column is None else {"row": 1, "col": column}
    for number, (name, y) in enumerate(zip(names, values.tolist(), strict=True)):
        fig.add_trace(
            graph().Scatter(
                x=x,
                y=y,
                mode="lines+markers",
                line={"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number % len(DASHES)]},
                marker={"symbol": SYMBOLS[number % len(SYMBOLS)]},
                name=name,
                legendgroup=name,
                showlegend=column in (None, 1),
            ),
            **place,
        )
