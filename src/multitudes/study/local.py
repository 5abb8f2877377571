"""Jobs on this machine: a pool of processes, one a job, and how far they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from multitudes.core.checks import check_count
from multitudes.study.store import Job, Run

__all__ = ["Interrupted", "JobProgress", "Outcome", "Snapshot", "run_local"]

COMMAND = (sys.executable, "-m", "multitudes.study.worker")
"""What runs a job; the directory of the job comes after it."""


@dataclass(frozen=True)
class JobProgress:
    """How far a running job is."""

    name: str
    event: str = "start"
    """The last thing it said: start, epoch, evaluate."""
    epoch: int = 0
    epochs: int = 0
    loss: float | None = None
    seconds: float = 0.0
    """Since it was started."""
    expected: float | None = None
    """How many it will take in all; None before its first epoch has ended."""

    def after(self, event: Mapping[str, Any], seconds: float) -> JobProgress:
        """What is known once it has said one thing more, so many seconds after its start.

        >>> event = {"event": "epoch", "epoch": 10, "epochs": 30, "loss": 0.5, "seconds": 4.0}
        >>> JobProgress("deep-0").after(event, seconds=6.0).expected
        14.0
        """
        said = {key: event[key] for key in ("epoch", "epochs", "loss") if event.get(key) is not None}
        now = replace(self, event=str(event.get("event", self.event)), seconds=seconds, **said)
        if now.event != "epoch" or not event or not now.epoch:
            return now
        trained = event.get("seconds") or seconds  # without what it took to start
        return replace(now, expected=seconds + trained * (now.epochs - now.epoch) / now.epoch)


@dataclass(frozen=True)
class Snapshot:
    """How far a study is."""

    total: int
    done: int
    """Jobs that have results, from before as well."""
    failed: int
    running: tuple[JobProgress, ...]
    seconds: float
    """Since the study was started."""
    left: float | None
    """How many seconds it will take yet, about; None as long as there is nothing to tell it by."""


@dataclass(frozen=True)
class Outcome:
    """What became of the jobs: the names of those that ran and are done, and why others failed."""

    done: list[str]
    failed: dict[str, str]

    def __str__(self) -> str:
        ran = f"{len(self.done)} job{'' if len(self.done) == 1 else 's'} done"
        if not self.failed:
            return ran
        reasons: dict[str, list[str]] = {}  # many jobs may fail for the same one
        for name, why in self.failed.items():
            reasons.setdefault(why, []).append(name)
        told = [f"  {', '.join(names)}: {why}" for why, names in reasons.items()]
        return "\n".join([f"{ran}, {len(self.failed)} failed:", *told])


class Interrupted(KeyboardInterrupt):
    """The study was stopped; its message says how to go on."""


def run_local(
    run: Run,
    *,
    workers: int | None = None,
    command: Sequence[str] = COMMAND,
    on_event: Callable[[Snapshot], None] | None = None,
) -> Outcome:
    """Run the jobs of a prepared run that are missing, each in a process of its own, `workers` at a time.

    By default there are as many workers as CPU cores, each with one thread, or on GPUs one for each of them. A job that
    fails stops no other. `on_event` is told how far the study is, a few times a second. Ctrl-C, or a request to end,
    stops the jobs and raises `Interrupted`.
    """
    if workers is not None:
        check_count("workers", workers)
    with run.locked(), _stoppable():
        pool = _Pool(run, _slots(run.spec["device"], workers), command, on_event or (lambda snapshot: None))
        try:
            return pool.work()
        except KeyboardInterrupt:
            pool.stop()
            raise Interrupted(how_to_go_on(run)) from None
        finally:
            pool.stop()


def how_to_go_on(run: Run) -> str:
    """What to say when a study was stopped."""
    jobs = run.jobs
    done = sum(job.done for job in jobs)
    return f"stopped, with {done} of {len(jobs)} jobs done: the same command again goes on from here"


# -- the pool ----------------------------------------------------------------------------------------------


@dataclass
class _Child:
    """A job that is running."""

    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    read: int
    """Up to which byte its log has been read."""
    progress: JobProgress
    failure: str | None = None
    started: float = field(default_factory=time.monotonic)

    def listen(self) -> None:
        """Read what it has said since."""
        events, self.read = self.job.events(self.read)
        seconds = time.monotonic() - self.started
        self.progress = self.progress.after({}, seconds)
        for event in events:
            self.progress = self.progress.after(event, seconds)
            if event.get("event") == "failed":
                self.failure = str(event.get("message") or "it says no reason")


class _Pool:
    """At most as many children as there are slots, each with the environment of its slot."""

    def __init__(
        self, run: Run, slots: list[dict[str, str]], command: Sequence[str], tell: Callable[[Snapshot], None]
    ) -> None:
        self.slots, self.command, self.tell = slots, command, tell
        jobs = run.jobs
        self.waiting = [job for job in jobs if not job.done]
        self.total, self.before = len(jobs), len(jobs) - len(self.waiting)
        self.children: list[_Child] = []
        self.outcome = Outcome([], {})
        self.durations: dict[str, list[float]] = {}  # by method
        self.started = time.monotonic()

    def work(self) -> Outcome:
        self.tell(self.snapshot())
        while self.waiting or self.children:
            free = set(range(len(self.slots))) - {child.slot for child in self.children}
            for slot in sorted(free)[: len(self.waiting)]:
                self.start(self.waiting.pop(0), slot)
            time.sleep(0.1)
            for child in list(self.children):
                code = child.process.poll()  # before its log is read, so that nothing it said is missed
                child.listen()
                if code is not None:
                    self.end(child, code)
            self.tell(self.snapshot())
        return self.outcome

    def start(self, job: Job, slot: int) -> None:
        _, end = job.events()
        process = start_process(job, self.command, self.slots[slot])
        self.children.append(_Child(job, process, slot, end, JobProgress(job.name)))

    def end(self, child: _Child, code: int) -> None:
        self.children.remove(child)
        output = child.job.directory / "output.txt"
        if child.job.done:
            self.outcome.done.append(child.job.name)
            self.durations.setdefault(child.job.label, []).append(time.monotonic() - child.started)
        else:
            self.outcome.failed[child.job.name] = child.failure or why_ended(code, output)
        if not output.stat().st_size:
            output.unlink()

    def stop(self) -> None:
        """End all children; what they have half-written has no name yet."""
        for child in self.children:
            child.process.terminate()
        for child in self.children:
            try:
                child.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self.children.clear()

    def snapshot(self) -> Snapshot:
        running = tuple(child.progress for child in self.children)
        done, failed = self.before + len(self.outcome.done), len(self.outcome.failed)
        left = time_left(running, [job.label for job in self.waiting], self.durations, len(self.slots))
        return Snapshot(self.total, done, failed, running, time.monotonic() - self.started, left)


def time_left(
    running: Sequence[JobProgress], waiting: Sequence[str], durations: Mapping[str, list[float]], workers: int
) -> float | None:
    """About how many seconds: running jobs by their epochs, waiting ones (their methods) by those that have ended.

    >>> time_left([JobProgress("deep-0", seconds=20.0, expected=60.0)], ["deep", "deep"], {}, workers=2)
    80.0
    """
    expected = {progress.name: progress.expected for progress in running}
    every = [seconds for known in durations.values() for seconds in known]
    every += [seconds for seconds in expected.values() if seconds is not None]
    if not every:
        return None
    usual = sum(every) / len(every)
    left = [max(0.0, (expected[progress.name] or usual) - progress.seconds) for progress in running]
    for method in waiting:
        known = durations.get(method)
        left.append(sum(known) / len(known) if known else usual)
    return max([sum(left) / workers, *left[: len(running)]])


# -- processes ---------------------------------------------------------------------------------------------

_TIE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('its study has ended'); os.execvp(sys.argv[2], sys.argv[2:])"
)


def tied(command: Sequence[str]) -> list[str]:
    """A command that ends when this process does, even if that is killed; on Linux, where a process can ask for it.

    Else it may go on to its end, which does no harm: a job writes the same files however often it is run.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def start_process(job: Job, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command on a job's directory; what it prints goes to `output.txt` there."""
    with (job.directory / "output.txt").open("wb") as output:
        return subprocess.Popen(
            tied([*command, str(job.directory)]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )


def why_ended(code: int, output: Path) -> str:
    """Why a process ended that said nothing itself: its exit code, and the last line that it printed."""
    lines = output.read_text(errors="replace").split("\n") if output.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    how = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
    if code == 0:
        how = "it ended without results"
    return f"{how}: {last}" if last else how


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _slots(device: str, workers: int | None) -> list[dict[str, str]]:
    """The environment of each worker: its threads, so that workers do not compete for cores, and its GPU.

    The threads do not depend on how many jobs there are, so that a job which is run again computes the same.
    """
    gpus = [] if device == "cpu" else _gpus()
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda' needs a GPU that torch can use, and there is none here")
    count = workers or len(gpus) or cores()
    threads = str(max(1, cores() // count))
    slots = [{"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} for _ in range(count)]
    for index, slot in enumerate(slots):
        if gpus:
            slot["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
    return slots


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()] if torch.cuda.device_count() else []
    return [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def _stoppable() -> Iterator[None]:
    """A request to end (SIGTERM) is met like Ctrl-C: the jobs are stopped first."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
