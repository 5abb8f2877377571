"""Steps after all jobs are done: timing in turns, baselines, the loss plane, column importance."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from torch import nn

from multitudes.ensemble.members import Members
from multitudes.lab.study.results.importance import NAME, measure_importance
from multitudes.lab.study.run.baselines import measure_baselines
from multitudes.lab.study.run.costs import measure_times
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.spec.assignment import data_of
from multitudes.landscape.weight_space.planes import plane

LANDSCAPE = "landscape.json"

Notify = Callable[[str], None]


def measure_all(run: Run, notify: Notify) -> None:
    """Measure everything that concerns all jobs together, unless it was measured for the same jobs already.

    Skips times or column importance if a network cannot be loaded here or the study's device is missing.
    """
    if not run.done:
        return
    if set((run.times or {"methods": ()})["methods"]) != set(run.timed):
        try:
            run.write_table(run.times_path.name, measure_times(run, notify) or {}, run.timed)
        except ValueError as error:
            notify(f"Times were not measured: {error}")
    if run.baselines is None:
        _write_baselines(run)
    write_landscape(run)
    if (run.about or {}).get("kind") == "table" and run.read_table(NAME) is None:
        notify("Measuring which columns matter")
        try:
            run.write_table(NAME, measure_importance(run))
        except ValueError as error:
            notify(f"Which columns matter was not measured: {error}")


def _write_baselines(run: Run) -> None:
    """Write `baselines.json`; for cross-validation only once every fold has a finished job."""
    configs = {job.directory: (job.config or {})["data"] for job in run.done}
    first = {str(data): directory for directory, data in reversed(configs.items())}
    found = [measure_baselines(data_of(configs[directory], directory)) for directory in reversed(first.values())]
    folds = (run.about or {}).get("folds")
    if not folds:
        run.write_table(run.baselines_path.name, found[0], found[0]["fingerprint"])
    elif [each["fingerprint"] for each in found] == folds:
        run.write_table(run.baselines_path.name, {"folds": [each["baselines"] for each in found]}, folds)


# -- the loss between networks that were trained independently ---------------------------------------------


def write_landscape(run: Run, points: int = 21, images: int = 256) -> Path | None:
    """Measure the loss on the plane through three networks of a run; None if there are not three comparable ones.

    Uses three members of a deep ensemble, or else single networks of three seeds. An existing file made from the
    current results is reused.
    """
    if run.read_table(LANDSCAPE) is not None:
        return run.directory / LANDSCAPE
    found = _three_networks(run)
    if found is None:
        return None
    networks, trained = found
    test = trained.data.test
    data = trained.data.normalised(test.x[:images]).to(trained.device), test.y[:images].to(trained.device)
    train = trained.data.normalised(trained.data.train.x[:images]).to(trained.device)
    models = list(networks.values())
    scored = plane(models[0], data, through=models, points=points, batch_norm=train, progress=False)
    x, y = (axis.tolist() for axis in scored.axes)
    places = [
        {"name": name, "x": at[0], "y": at[1], "loss": _finite(loss)}
        for name, at, loss in zip(networks, scored.coordinates.tolist(), scored.scores.loss.tolist(), strict=True)
    ]
    table = {
        "plane": {"x": x, "y": y, "loss": [list(map(_finite, row)) for row in scored.loss.T.tolist()], "points": places}
    }
    return run.write_table(LANDSCAPE, table)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _three_networks(run: Run) -> tuple[dict[str, nn.Module], Trained] | None:
    """Return three networks by name, and one of their jobs."""
    done = {job.name: job for job in run.done}
    for job in done.values():
        if (job.config or {})["method"] == "deep":
            trained = Trained.read(job.directory, "cpu", model_file=run.code)
            net = trained.multitude
            if isinstance(net, Members) and net.members > 2 and trained.data.classes:
                return {f"{job.name}, member {index}": net.member(index) for index in range(3)}, trained
    if run.folds:
        return None  # single networks of other folds have other training rows, and maybe other features
    alone = [job for job in done.values() if (job.config or {})["method"] == "single"]
    single = [Trained.read(job.directory, "cpu", model_file=run.code) for job in alone[:3]]
    if len(single) < 3 or not single[0].data.classes:
        return None
    return {one.job.name: one.multitude.member(0) for one in single}, single[0]
