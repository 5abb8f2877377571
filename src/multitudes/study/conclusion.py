"""What is done when all jobs are: times in turns, baselines, the loss plane, which columns matter."""

from __future__ import annotations

from collections.abc import Callable

from multitudes.study.baselines import measure_baselines
from multitudes.study.importance import NAME, measure_importance
from multitudes.study.job_data import data_of
from multitudes.study.landscape import write_landscape
from multitudes.study.store import Run
from multitudes.study.timing import measure_times

__all__ = ["measure_all"]

Say = Callable[[str], None]


def measure_all(run: Run, say: Say) -> None:
    """Measure what concerns all jobs together, as far as that has not been done for the same jobs."""
    if not run.done:
        return
    _write_times(run, say)
    _write_baselines(run)
    write_landscape(run)
    _write_importance(run, say)


def _write_times(run: Run, say: Say) -> None:
    """`costs.json`; where the device of the study is not here, nothing."""
    if set((run.times or {"methods": ()})["methods"]) == set(run.timed):
        return
    try:
        found = measure_times(run, say)
    except ValueError as error:
        say(f"Times were not measured: {error}")
        return
    run.write_table(run.times_path.name, found or {}, run.timed)


def _write_importance(run: Run, say: Say) -> None:
    """`importance.json`, of tables; where a network cannot be read here, nothing."""
    if (run.about or {}).get("kind") != "table" or run.read_table(NAME) is not None:
        return
    say("Measuring which columns matter")
    try:
        found = measure_importance(run)
    except ValueError as error:
        say(f"Which columns matter was not measured: {error}")
        return
    run.write_table(NAME, found)


def _write_baselines(run: Run) -> None:
    """`baselines.json`."""
    if run.baselines is not None:
        return
    first = {str((job.config or {})["data"]): job for job in reversed(run.done)}
    found = [measure_baselines(data_of((job.config or {})["data"], job.directory)) for job in reversed(first.values())]
    folds = (run.about or {}).get("folds")
    if not folds:
        run.write_table(run.baselines_path.name, found[0], found[0]["fingerprint"])
    elif [each["fingerprint"] for each in found] == folds:  # all of them have a job done
        run.write_table(run.baselines_path.name, {"folds": [each["baselines"] for each in found]}, folds)
