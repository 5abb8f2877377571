"""Ensembles, subspaces and weight averages on corrupted images: Fort, Hu and Lakshminarayanan (2019), Fig. 9."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape import Solutions, read_solutions, subspaces
from multitudes.landscape.figures import add_lines, subplots
from multitudes.landscape.solutions import last_checkpoint, trajectory_of
from multitudes.methods.subspace import KINDS
from multitudes.networks.stochastic import stochastic_layers
from multitudes.shift import CORRUPTIONS, corrupt
from multitudes.training.batches import Batches
from multitudes.training.recorder import Checkpoints


def variants(
    run: Checkpoints, model: nn.Module | None = None, kinds: Iterable[str] = KINDS, **options: Any
) -> dict[str, nn.Module]:
    """Return the solutions of section 5 for a run: its last checkpoint, subspaces around it, and the mean checkpoint.

    The subspaces are of `kinds`, with the `options` of `subspaces`.
    """
    network, states = trajectory_of(run, model)
    options["data"] = Batches.of(options.get("data"))
    drawn = subspaces(states, network, kinds, **options)
    mean = mt.swa(network, states, data=options["data"])
    return {"baseline": last_checkpoint(states, network)} | drawn | {"weight averaging": mean}


@dataclass(frozen=True, eq=False, repr=False)
class UnderCorruption:
    """Scores by corruption and severity: `[K, T, V]` for K methods, T corruptions, V severities; float64, CPU.

    Severity 0 is the uncorrupted images, for every corruption.
    """

    methods: tuple[str, ...]
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    accuracy: Tensor
    brier: Tensor
    divergence: Tensor
    """Jensen-Shannon divergence of a method's solutions, in nats."""

    def plot(self) -> Any:
        """Plot the means of the three scores over corruptions, against severity (Fig. 9)."""
        fig = subplots("Under corruption", "accuracy", "Brier score", "JS divergence", x="severity")
        for column, score in enumerate((self.accuracy, self.brier, self.divergence), start=1):
            add_lines(fig, self.methods, self.severities, score.mean(1), column)
        return fig


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
    """Return accuracy, Brier score and JS divergence of methods on corrupted images (Fig. 9).

    Args:
        methods: by name, the solutions whose predictions a method averages: a multitude, a subspace, a list of
            networks, a `Recorder` (see `read_solutions`). The divergence grows with the number of solutions: compare
            methods with equally many.
        images: `[N, C, H, W]` in [0, 1], as for `corrupt`.
        target: their classes, `[N]`.
        corruptions: names of `multitudes.shift.CORRUPTIONS` or `EXTRA`.
        severities: from 0 (uncorrupted) to 5.
        preprocess: preprocessing of the networks after the corruption, such as a normalisation.
        model: the network of state dicts.
        draws: number of draws of a stochastic method; the paper uses 5.
        seed: of corruptions and draws.
    """

    def read(x: Tensor, solutions: Mapping[str, Any]) -> Solutions:
        data = (x if preprocess is None else preprocess(x), target)
        return read_solutions({"": dict(solutions)}, data, model=model, draws=draws, seed=seed)

    def scored(found: Solutions) -> Tensor:
        """Return the scores, `[3, K]`."""
        chosen = [found.chosen(name, found.runs) for name in methods]
        metrics = mt.metrics
        columns = [(metrics.accuracy(p, target), metrics.brier(p, target), metrics.ensemble_js(p)) for p in chosen]
        return torch.stack([torch.stack(column).double() for column in columns], 1)

    clean = read(images, methods)
    # Draw weights from a subspace once, for all images.
    drawn = {
        name: list(_once([net for net, kind in zip(clean.networks, clean.kinds, strict=True) if kind == name], draws))
        for name in methods
    }
    table = torch.stack(
        [
            scored(read(corrupt(images, name, level, seed), drawn) if level else clean)
            for name in corruptions
            for level in severities
        ],
        dim=2,
    )
    shape = (len(corruptions), len(severities))
    return UnderCorruption(tuple(methods), tuple(corruptions), tuple(severities), *table.unflatten(2, shape))


def _once(networks: list[nn.Module], draws: int) -> Iterator[nn.Module]:
    """Yield the networks of solutions, one for all draws of a stochastic network."""
    at = 0
    while at < len(networks):
        yield networks[at]
        at += draws if stochastic_layers(networks[at]) else 1
