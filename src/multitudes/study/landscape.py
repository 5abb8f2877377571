"""The loss between networks of a study that were trained apart, for its page: `landscape.json`."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from multitudes.core.members import Members
from multitudes.landscape.planes import plane
from multitudes.study.store import Run, write_atomically
from multitudes.study.trained import Trained

__all__ = ["write_landscape"]


def write_landscape(run: Run, points: int = 21, images: int = 256) -> Path | None:
    """Measure the plane through three networks of a run; None where there are not three that are alike.

    They are members of a deep ensemble, or else single networks of three seeds. An existing file is used again, unless
    a job has been done since.
    """
    path = run.directory / "landscape.json"
    newest = max((job.directory / "metrics.json").stat().st_mtime for job in run.done)
    if path.is_file() and path.stat().st_mtime >= newest:
        return path
    found = _three(run)
    if found is None:
        return None
    networks, trained = found
    test = trained.data.test
    data = trained.data.normalised(test.x[:images]).to(trained.device), test.y[:images].to(trained.device)
    train = trained.data.normalised(trained.data.train.x[:images]).to(trained.device)
    alike = list(networks.values())
    scored = plane(alike[0], data, through=alike, points=points, batch_norm=train, progress=False)
    x, y = (axis.tolist() for axis in scored.axes)
    places = [
        {"name": name, "x": at[0], "y": at[1], "loss": loss}
        for name, at, loss in zip(networks, scored.coordinates.tolist(), scored.scores.loss.tolist(), strict=True)
    ]
    table = {"plane": {"x": x, "y": y, "loss": scored.loss.T.tolist(), "points": places}}
    write_atomically(path, json.dumps(table))
    return path


def _three(run: Run) -> tuple[dict[str, nn.Module], Trained] | None:
    """Three networks by name, and one of the jobs that they are from."""
    done = {job.name: job for job in run.done}
    for job in done.values():
        if (job.config or {})["method"] == "deep":
            trained = Trained.read(job.directory, "cpu")
            net = trained.multitude
            if isinstance(net, Members) and net.members > 2 and trained.data.classes:
                return {f"{job.name}, member {index}": net.member(index) for index in range(3)}, trained
    single = [Trained.read(job.directory, "cpu") for job in done.values() if (job.config or {})["method"] == "single"]
    if len(single) < 3 or not single[0].data.classes:
        return None
    return {one.job.name: one.net.member(0) for one in single[:3]}, single[0]
