"""The loss landscape between a path joining two optima and the origin of weight space.

Fort, Hu and Lakshminarayanan, *Deep ensembles: a loss landscape perspective*, 2019, appendix A: each segment of a
curved path spans a triangle with the origin; the triangles are laid side by side in one picture (Fig. S3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.landscape import Path
from multitudes.landscape.figures import coloured, figure
from multitudes.landscape.weight_space.weight_scores import WeightScorer, measured, single_network
from multitudes.training.recorder import unflattened


@dataclass(frozen=True, eq=False, repr=False)
class Stitched:
    """The landscape from a path to the origin: S places along the path, R distances from the origin; on CPU."""

    x: Tensor
    """Position of each point in the picture, `[S, R]`: the origin is (0, 0), and distances are those of the weights."""
    y: Tensor
    loss: Tensor
    """`[S, R]`."""
    accuracy: Tensor | None
    agreement: Tensor | None
    """`[2, S, R]`, with the two ends."""
    knots: tuple[int, ...]
    """Indices of the S places that are points of the path; places between two of them lie in one plane."""
    share: Tensor
    """Distance of each point relative to the path, `[R]`."""

    def __repr__(self) -> str:
        return f"Stitched({len(self.knots) - 1} triangles, {self.loss.shape[0]}x{self.loss.shape[1]})"

    def plot(self, what: str = "loss", *, end: int = 0) -> Any:
        """Plot the log loss, the accuracy, or the agreement with one end, 0 or 1, with Plotly."""
        if end not in (0, 1):
            raise ValueError(f"end must be 0 or 1, got {end!r}")
        values = measured(self, what)
        values = values[end] if what == "agreement" else values
        fig = figure(f"{what.capitalize()} from the path to the origin", "weight space", "")
        shown, scale = coloured(values, what)
        marker = {"color": shown.flatten().tolist(), "size": 9, **scale}
        x, y = self.x.flatten().tolist(), self.y.flatten().tolist()
        fig.add_scatter(x=x, y=y, mode="markers", marker=marker, name=what, showlegend=False)
        on_path = int((self.share - 1).abs().argmin())
        line, ray = {"color": "black"}, {"color": "black", "width": 1, "dash": "dot"}
        fig.add_scatter(x=self.x[:, on_path].tolist(), y=self.y[:, on_path].tolist(), name="path", line=line)
        for knot in self.knots:
            outwards = {"x": [0, float(self.x[knot, -1])], "y": [0, float(self.y[knot, -1])]}
            fig.add_scatter(**outwards, line=ray, showlegend=False)
        fig.update_yaxes(scaleanchor="x")
        return fig


def stitched(
    network: nn.Module,
    path: Path,
    data: Any,
    *,
    across: int = 3,
    radii: int = 11,
    reach: float = 1.25,
) -> Stitched:
    """Score the triangles between the segments of a path and the origin, and lay them side by side.

    Args:
        network: the network of the path.
        path: as returned by `tunnel`.
        data: `(x, y)` or an iterable of batches.
        across: number of parts per segment.
        radii: number of points from the origin outwards.
        reach: distance of the last point; the path is at 1, which is always included.

    Agreement is with the weights of the path's ends. Batch-norm statistics are recomputed on `data` at every point.
    """
    alone = single_network(network)
    scorer = WeightScorer(network, data, batch_norm=data)
    steps = torch.arange(across, dtype=torch.float64) / across
    first, second = path.weights[:-1].double(), path.weights[1:].double()
    inner = torch.lerp(first.unsqueeze(1), second.unsqueeze(1), steps.view(1, -1, 1)).flatten(0, 1)
    places = torch.cat([inner, path.weights[-1:].double()])
    share = torch.cat([torch.linspace(0, reach, radii, dtype=torch.float64), torch.ones(1).double()]).unique()
    ends = [unflattened(path.weights[at].to(scorer.device), alone) for at in (0, -1)]
    scorer.score_solutions([state | scorer.statistics(state) for state in ends])
    settings = (share.view(1, -1, 1) * places.unsqueeze(1)).flatten(0, 1)
    length = places.norm(dim=1)
    unit = places / length.unsqueeze(1)
    angle = torch.cat([torch.zeros(1).double(), 2 * (unit.diff(dim=0).norm(dim=1) / 2).clamp(max=1).asin()]).cumsum(0)
    radius = length.unsqueeze(1) * share
    columns = scorer.score_all(settings).table.T.unflatten(1, radius.shape)
    return Stitched(
        radius * angle.cos().unsqueeze(1),
        radius * angle.sin().unsqueeze(1),
        columns[0],
        columns[1],
        columns[2:],
        tuple(range(0, len(places), across)),
        share,
    )
