"""Progress of a study's jobs and the estimated time left, from the events in their logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from multitudes.lab.study.run.store import Job, Run


@dataclass(frozen=True)
class JobProgress:
    """Progress of a running job."""

    name: str
    event: str = "start"
    """Last event: start, epoch, evaluate, done or failed."""
    epoch: int = 0
    epochs: int = 0
    loss: float | None = None
    seconds: float = 0.0
    """Seconds since its start."""
    expected: float | None = None
    """Estimated total seconds; None before the first epoch has ended."""
    before: int | None = None
    """Epochs done by an earlier run; None before the first epoch of this run has ended."""

    def after(self, event: Mapping[str, Any], seconds: float) -> JobProgress:
        """Return the progress after a log event (`{}` for none), `seconds` after the start.

        >>> event = {"event": "epoch", "epoch": 10, "epochs": 30, "loss": 0.5, "seconds": 4.0}
        >>> JobProgress("deep-0").after(event, seconds=6.0).expected  # it went on after its ninth epoch
        86.0
        """
        known = {key: event[key] for key in ("event", "epoch", "epochs", "loss") if event.get(key) is not None}
        now = replace(self, seconds=seconds, **known)
        if event.get("event") == "start":
            return replace(now, before=None)
        if event.get("event") != "epoch" or not now.epoch:
            return now
        before = now.epoch - 1 if now.before is None else now.before
        trained = event.get("seconds") or seconds  # excludes the start-up
        left = trained * (now.epochs - now.epoch) / max(1, now.epoch - before)
        return replace(now, expected=seconds + left, before=before)


@dataclass(frozen=True)
class Snapshot:
    """Progress of a study."""

    total: int
    done: int
    """Jobs with results, including earlier runs."""
    failed: int
    running: tuple[JobProgress, ...]
    seconds: float
    """Seconds since the study started."""
    left: float | None
    """Estimated seconds left; None while unknown."""


@dataclass(frozen=True)
class Outcome:
    """Results of the jobs: names of those that finished, and reasons why others failed."""

    done: list[str]
    failed: dict[str, str]


class Interrupted(KeyboardInterrupt):
    """Raised when the study is stopped; the message explains how to resume."""

    def __init__(self, run: Run) -> None:
        done, total = len(run.done), len(run.jobs)
        super().__init__(f"stopped, with {done} of {total} jobs done: the same command again resumes the study")


class Monitor:
    """Count finished jobs of a run, and report the progress of the others."""

    def __init__(self, run: Run, report: Callable[[Snapshot], None] | None) -> None:
        self.report = report
        self.total, self.missing = len(run.jobs), run.missing
        self.outcome = Outcome([], {})
        self.durations: dict[str, list[float]] = {}  # by method
        self.started = time.monotonic()

    def ended(self, job: Job, seconds: float, reason: str) -> None:
        """Record a job that ended after this many seconds; without results it failed for this reason."""
        if job.done:
            self.outcome.done.append(job.name)
            self.durations.setdefault(job.label, []).append(seconds)
        else:
            self.outcome.failed[job.name] = reason

    def waiting(self, running: Sequence[JobProgress] = ()) -> list[Job]:
        """Return the jobs that have neither ended nor started."""
        known = {*self.outcome.done, *self.outcome.failed, *(each.name for each in running)}
        return [job for job in self.missing if job.name not in known]

    def update(self, running: Sequence[JobProgress]) -> None:
        """Report a snapshot."""
        if self.report is None:
            return
        waiting = [job.label for job in self.waiting(running)]
        left = time_left(running, waiting, self.durations, max(1, len(running)))
        done = self.total - len(self.missing) + len(self.outcome.done)
        passed = time.monotonic() - self.started
        self.report(Snapshot(self.total, done, len(self.outcome.failed), tuple(running), passed, left))


def time_left(
    running: Sequence[JobProgress], waiting: Sequence[str], durations: Mapping[str, list[float]], workers: int
) -> float | None:
    """Estimate the seconds left: running jobs by their epochs, waiting ones (given by method) by finished jobs.

    >>> time_left([JobProgress("deep-0", seconds=20.0, expected=60.0)], ["deep", "deep"], {}, workers=2)
    80.0
    """
    known = [seconds for method in durations.values() for seconds in method]
    known += [progress.expected for progress in running if progress.expected is not None]
    if not known:
        return None
    left = [max(0.0, (progress.expected or fmean(known)) - progress.seconds) for progress in running]
    return max([(sum(left) + sum(fmean(durations.get(method, known)) for method in waiting)) / workers, *left])
