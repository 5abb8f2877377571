"""Ensembles, subspaces and weight averages on corrupted images: Fort, Hu and Lakshminarayanan (2019), Fig. 9."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.core.batches import Batches
from multitudes.core.draws.stochastic import stochastic_layers
from multitudes.landscape import Solutions, read_solutions, subspaces
from multitudes.landscape.figures import add_lines, subplots
from multitudes.landscape.solutions import last_checkpoint, trajectory_of
from multitudes.methods.subspace import KINDS
from multitudes.shift import CORRUPTIONS, corrupt
from multitudes.training.recorder import Checkpoints

__all__ = ["UnderCorruption", "under_corruption", "variants"]


def variants(
    run: Checkpoints, model: nn.Module | None = None, kinds: Iterable[str] = KINDS, **options: Any
) -> dict[str, nn.Module]:
    """The solutions of section 5 from a run: its last checkpoint, subspaces around it, and the mean of its checkpoints.

    The subspaces are of `kinds`, with the `options` of `subspaces`.
    """
    network, states = trajectory_of(run, model)
    options["data"] = Batches.of(options.get("data"))
    drawn = subspaces(states, network, kinds, **options)
    mean = mt.swa(network, states, data=options["data"])
    return {"baseline": last_checkpoint(states, network)} | drawn | {"weight averaging": mean}


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

    def plot(self) -> Any:
        """Means over the corruptions of the three scores, against severity (Fig. 9)."""
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
    """Accuracy, Brier score and JS divergence of methods on corrupted images (Fig. 9).

    Args:
        methods: by name, the solutions whose predictions a method averages: a multitude, a subspace, a list of
            networks, a `Recorder` (see `read_solutions`). The divergence grows with the number of solutions: compare
            methods of as many.
        images: `[N, C, H, W]` in [0, 1], as `corrupt` takes them.
        target: their classes, `[N]`.
        corruptions: names of `multitudes.shift.CORRUPTIONS` or `EXTRA`.
        severities: 0, the images as they are, to 5.
        preprocess: the networks' own preparation of images, such as a normalisation, after the corruption.
        model: the network that state dicts are of.
        draws: how many draws to make of a method that draws; the paper makes 5.
        seed: of corruptions and draws.
    """

    def read(x: Tensor, solutions: Mapping[str, Any]) -> Solutions:
        data = (x if preprocess is None else preprocess(x), target)
        return read_solutions({"": dict(solutions)}, data, model=model, draws=draws, seed=seed)

    def scored(found: Solutions) -> Tensor:
        """`[3, K]`"""
        chosen = [found.chosen(name, found.runs) for name in methods]
        metrics = mt.metrics
        columns = [(metrics.accuracy(p, target), metrics.brier(p, target), metrics.ensemble_js(p)) for p in chosen]
        return torch.stack([torch.stack(column).double() for column in columns], 1)

    clean = read(images, methods)
    # Weights are drawn from a subspace once, and are the same for all images.
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
    """The networks of solutions, one for all draws of a network that draws."""
    at = 0
    while at < len(networks):
        yield networks[at]
        at += draws if stochastic_layers(networks[at]) else 1
