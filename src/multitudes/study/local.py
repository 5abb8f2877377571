"""Jobs on this machine: a pool of processes, one for each job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from multitudes.core.checks import check_count
from multitudes.study.monitor import Interrupted, JobProgress, Monitor, Outcome, Snapshot
from multitudes.study.store import Job, Run, failure_in

__all__ = ["COMMAND", "JobProcess", "run_local", "threads"]

COMMAND = (sys.executable, "-P", "-m", "multitudes.study.worker")
"""What runs a job; the directory of the job comes after it. No module comes from the working folder (-P)."""


def run_local(
    run: Run,
    *,
    workers: int | None = None,
    command: Sequence[str] = COMMAND,
    on_event: Callable[[Snapshot], None] | None = None,
) -> Outcome:
    """Run the missing jobs of a prepared run, each in a process of its own, `workers` at a time.

    By default there are as many workers as CPU cores, each with one thread, or one for each GPU. A job that fails stops
    no other. `on_event` gets a snapshot a few times a second. Ctrl-C, or a request to end, stops the jobs and raises
    `Interrupted`.
    """
    if workers is not None:
        check_count("workers", workers)
    with run.locked(), _stoppable():
        slots, monitor = _slots(run.spec["device"], workers), Monitor(run, on_event)
        try:
            _run_all(monitor, slots, command)
        except KeyboardInterrupt:
            raise Interrupted(run) from None
    return monitor.outcome


def _run_all(monitor: Monitor, slots: list[dict[str, str]], command: Sequence[str]) -> None:
    """At most as many jobs at a time as there are slots, each in the environment of its slot."""
    waiting = list(monitor.missing)
    running: dict[int, JobProcess] = {}
    try:
        while True:
            monitor.update([each.progress for each in running.values()], waiting, len(slots))
            if not (waiting or running):
                return
            for slot, environment in enumerate(slots):
                if waiting and slot not in running:
                    running[slot] = JobProcess(waiting.pop(0), command, environment)
            time.sleep(0.1)
            for slot, process in list(running.items()):
                if process.ended():
                    del running[slot]
                    monitor.ended(process.job, process.progress.seconds, process.reason)
    finally:
        for process in running.values():
            process.process.terminate()
        for process in running.values():
            process.stop()


# -- processes ---------------------------------------------------------------------------------------------

_TIE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit('its study has ended'); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Ends a process when its parent is killed, and then becomes the command."""


class JobProcess:
    """A process that runs a job, and how far it is; what it prints goes to `output.txt` in the job's directory.

    On Linux it ends when this process does, even if that is killed. Elsewhere it may run to its end, which does no
    harm: a job writes the same files however often it is run.
    """

    def __init__(self, job: Job, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.job, self.progress = job, JobProgress(job.name)
        self.reason = ""
        """Why it failed, once it has ended without results."""
        self._started, (_, self._read) = time.monotonic(), job.events()
        self._output = job.directory / "output.txt"
        tie = [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid())] if sys.platform.startswith("linux") else []
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*tie, *command, str(job.directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def ended(self) -> bool:
        """Whether it has ended; reads its log up to now."""
        code = self.process.poll()  # before the log is read, so that no event is missed
        events, self._read = self.job.events(self._read)
        for event in [{}, *events]:
            self.progress = self.progress.after(event, time.monotonic() - self._started)
            self.reason = failure_in(event) or self.reason
        if code is None:
            return False
        self.reason = self.reason or self._how_it_ended(code)
        if not self._output.stat().st_size:
            self._output.unlink()
        return True

    def stop(self) -> None:
        """End it; what it has half-written has no name yet."""
        self.process.terminate()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _how_it_ended(self, code: int) -> str:
        """Its exit code, and the last line that it printed."""
        lines = [line.strip() for line in self._output.read_text(errors="replace").split("\n")]
        last = next((line for line in reversed(lines) if line), "")
        how = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        how = how if code else "it ended without results"
        return f"{how}: {last}" if last else how


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(count: float) -> dict[str, str]:
    """The environment of a job that computes with so many threads, rounded down."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(max(1, int(count))))


def _slots(device: str, workers: int | None) -> list[dict[str, str]]:
    """The environment of each worker: its threads, so that workers do not compete for cores, and its GPU.

    The threads do not depend on how many jobs there are, so that a job that is run again computes the same.
    """
    gpus = [] if device == "cpu" else _gpus()
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda' needs a GPU that torch can use, and there is none here")
    count = workers or len(gpus) or cores()
    own = [{"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {} for index in range(count)]
    return [threads(cores() / count) | gpu for gpu in own]


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()] if torch.cuda.device_count() else []
    return [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def _stoppable() -> Iterator[None]:
    """Inside, a request to end (SIGTERM) is a KeyboardInterrupt, so that the jobs are stopped first."""

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
