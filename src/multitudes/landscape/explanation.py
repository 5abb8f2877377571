"""`explain` compares a few trained networks: weights, predictions, loss between them, and curvature.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019; for the curvature Park and Kim,
*Blurs behave like ensembles*, 2022.
"""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_count, check_seed, needed
from multitudes.base.sealed_files import replacing
from multitudes.ensemble.multitude import Multitude
from multitudes.landscape.accuracy_diversity import DiversityPlane, diversity_plane
from multitudes.landscape.function_space import FunctionMap, Similarity, function_map, similarity
from multitudes.landscape.solutions import Solutions, read_solutions
from multitudes.landscape.targets import with_targets
from multitudes.landscape.weight_space.hessian import HessianSpectrum, hessian_spectrum
from multitudes.landscape.weight_space.planes import Plane, plane
from multitudes.tasks import task_of


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Results of `explain`; each part has its own `plot()`."""

    solutions: Solutions
    similarity: Similarity
    map: FunctionMap | None
    """Networks as points, close if their predictions are close; None for fewer than three networks."""
    diversity: DiversityPlane | None
    """Disagreement with the first network against accuracy; None for predicted numbers, or if the first network is no
    better than chance."""
    plane: Plane
    """Loss on the plane through the first three networks, or on the line through two."""
    spectrum: HessianSpectrum
    """Largest curvature of the loss at the first network, by mini-batch."""

    def __repr__(self) -> str:
        return f"Explanation({self.solutions!r})"

    def figures(self) -> dict[str, Any]:
        """Return the Plotly figures by name."""
        parts = {name: getattr(self, name) for name in ("similarity", "map", "diversity", "plane", "spectrum")}
        return {name: part.plot() for name, part in parts.items() if part is not None}

    def save(self, path: str | os.PathLike[str], title: str = "Comparison of networks") -> Path:
        """Write all figures to one HTML page that works offline, and return its path."""
        needed("plotly", "plots", "a page of figures")
        parts = [
            figure.to_html(full_html=False, include_plotlyjs=index == 0, default_height="480px")
            for index, figure in enumerate(self.figures().values())
        ]
        head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        view = "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        body = f"<body style='max-width:60rem;margin:auto;font-family:sans-serif'>{''.join(parts)}</body></html>"
        with replacing(path) as unfinished:
            unfinished.write_text(head + view + body, encoding="utf-8")
        return Path(path)


def explain(
    runs: Any,
    data: Any,
    *,
    model: nn.Module | None = None,
    points: int = 25,
    batches: int = 8,
    draws: int = 10,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Explanation:
    """Compare trained networks of one architecture. Arguments are not changed.

    Args:
        runs: Two or more networks: by name, as a list, or as a multitude with several members (see `read_solutions`).
            They classify, or predict numbers if they are multitudes of task "regression" or "gaussian".
        data: `(x, y)` or an iterable of batches, which is iterated once and cached.
        model: Network for state dicts, if runs are state dicts.
        points: Number of points of the loss plane in each direction.
        batches: Number of mini-batches for the curvature.
        draws: Number of draws from networks that draw.
        seed: Seed of the map, the draws and the start vectors of the curvature.
        folder: Folder for caching the loss plane; an interrupted call resumes from it.
        progress: Show progress on stderr. Default: on a terminal, after two seconds.

    Returns:
        The analyses; `save(path)` writes them to one page.
    Example:
        >>> x = torch.randn(64, 2)
        >>> data = x, (x[:, 0] > 0).long()
        >>> why = explain([nn.Linear(2, 2) for _ in range(3)], data, points=5, batches=1)
        >>> why.similarity.cosine.shape, why.plane.loss.shape
        (torch.Size([3, 3]), torch.Size([5, 5]))
    """
    check_count("points", points)
    check_count("batches", batches)
    check_seed(seed)
    batched = with_targets(data, torch.device("cpu"))
    found = read_solutions(runs, batched, model=model, draws=draws, seed=seed)
    networks = [_of_task(network, found.task) for network in dict.fromkeys(found.networks)]  # draws share one
    if len(networks) < 2:
        raise ValueError(f"runs must hold two or more networks, got {len(networks)}")
    return Explanation(
        found,
        similarity(found),
        function_map(found, seed=seed) if len(found.labels) > 2 else None,
        diversity_plane(found, reference=found.labels[0]) if _above_chance(found) else None,
        plane(
            networks[0], batched, through=networks[:3], points=points, batch_norm=batched, folder=folder,
            progress=progress,
        ),
        hessian_spectrum(networks[0], _joined(batched), 1, batches, batch_size=32, seed=seed, progress=progress),
    )  # fmt: skip


def _joined(batches: list[tuple[Any, Any]]) -> Any:
    """Concatenate the batches, to be split into mini-batches later; batches that are not tensors are unchanged."""
    if not all(isinstance(x, Tensor) for x, _ in batches):
        return batches
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def _of_task(network: nn.Module, task: str) -> nn.Module:
    """Return a network that has the loss of the task."""
    if task_of(task).classes:
        return network
    net = Multitude(network)
    net.task = task
    return net


def _above_chance(found: Solutions) -> bool:
    """Return True if the first solution classifies better than chance; the limits of diversity require it."""
    if not found.predictive.reading.classes:
        return False
    first = found.predictive.predictions[0]
    right = (first.argmax(1) == found.classes()).double().mean()
    return bool(right > 1 / first.shape[1])
