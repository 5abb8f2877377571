"""What is done when all jobs are: times in turns, baselines, the loss plane; and the answer that all of it gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from multitudes.study.baselines import measure_baselines
from multitudes.study.job_data import data_of
from multitudes.study.landscape import write_landscape
from multitudes.study.store import Job, Run, write_atomically
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


def _write_times(run: Run, say: Say) -> None:
    """`costs.json`; where the device of the study is not here, nothing."""
    first: dict[str, Job] = {}
    for job in run.done:
        first.setdefault(job.label, job)
    of = {label: [job.name, job.metrics["seconds"]] for label, job in first.items()}
    if (run.times or {}).get("of") == of:
        return
    try:
        found = measure_times(run, say)
    except ValueError as error:
        say(f"Times were not measured: {error}")
        return
    _write(run.times_path, {"of": of, **(found or {})})


def _write_baselines(run: Run) -> None:
    """`baselines.json`."""
    fingerprint = (run.about or {}).get("fingerprint")
    if fingerprint is not None and (run.baselines or {}).get("fingerprint") == fingerprint:
        return
    job = run.done[0]
    _write(run.baselines_path, measure_baselines(data_of((job.config or {})["data"], job.directory)))


def _write(path: Any, table: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(table) + "\n")
