"""The loss between networks of a study that were trained apart, for its page: `landscape.json`."""

from __future__ import annotations

import math
from pathlib import Path

from torch import nn

from multitudes.core.members import Members
from multitudes.landscape.planes import plane
from multitudes.study.store import Run
from multitudes.study.trained import Trained

__all__ = ["NAME", "write_landscape"]

NAME = "landscape.json"


def write_landscape(run: Run, points: int = 21, images: int = 256) -> Path | None:
    """Measure the plane through three networks of a run; None where there are not three that are alike.

    They are members of a deep ensemble, or else single networks of three seeds. An existing file is used again, if it
    is whole and was made from the results that are there.
    """
    if run.read_table(NAME) is not None:
        return run.directory / NAME
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
        {"name": name, "x": at[0], "y": at[1], "loss": _finite(loss)}
        for name, at, loss in zip(networks, scored.coordinates.tolist(), scored.scores.loss.tolist(), strict=True)
    ]
    table = {
        "plane": {"x": x, "y": y, "loss": [list(map(_finite, row)) for row in scored.loss.T.tolist()], "points": places}
    }
    return run.write_table(NAME, table)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _three(run: Run) -> tuple[dict[str, nn.Module], Trained] | None:
    """Three networks by name, and one of the jobs that they are from."""
    done = {job.name: job for job in run.done}
    for job in done.values():
        if (job.config or {})["method"] == "deep":
            trained = Trained.read(job.directory, "cpu", model_file=run.code)
            net = trained.multitude
            if isinstance(net, Members) and net.members > 2 and trained.data.classes:
                return {f"{job.name}, member {index}": net.member(index) for index in range(3)}, trained
    if run.folds:
        return None  # single networks of other rows, and maybe of other features
    alone = [job for job in done.values() if (job.config or {})["method"] == "single"]
    single = [Trained.read(job.directory, "cpu", model_file=run.code) for job in alone[:3]]
    if len(single) < 3 or not single[0].data.classes:
        return None
    return {one.job.name: one.multitude.member(0) for one in single}, single[0]
