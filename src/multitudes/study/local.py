"""Jobs on this machine: a pool of processes, one for each job (see `processes`)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from multitudes.core.checks import check_count
from multitudes.study.monitor import Interrupted, Monitor, Outcome, Snapshot
from multitudes.study.processes import JobProcess, Starter, starter, threads
from multitudes.study.store import Run

__all__ = ["cores", "run_local", "stoppable"]


def run_local(
    run: Run,
    *,
    workers: int | None = None,
    command: Sequence[str] | None = None,
    on_event: Callable[[Snapshot], None] | None = None,
) -> Outcome:
    """Run the missing jobs of a prepared run, each in a process of its own, `workers` at a time.

    By default there are as many workers as CPU cores, each with one thread, or one for each GPU. A job that fails stops
    no other. `on_event` gets a snapshot a few times a second. Ctrl-C, or a request to end, stops the jobs, which save
    their training, and raises `Interrupted`. `command` is what runs a job, with its directory added, in place of the
    package's own worker.
    """
    if workers is not None:
        check_count("workers", workers)
    with run.locked(), stoppable():
        slots, monitor = _slots(run.spec["device"], workers), Monitor(run, on_event)
        try:
            with closing(starter(command)) as processes:
                _run_all(monitor, slots, processes)
        except KeyboardInterrupt:
            raise Interrupted(run) from None
    return monitor.outcome


def _run_all(monitor: Monitor, slots: list[dict[str, str]], processes: Starter) -> None:
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
                    running[slot] = JobProcess(waiting.pop(0), processes, environment)
            time.sleep(0.05)
            for slot, process in list(running.items()):
                if process.ended():
                    del running[slot]
                    monitor.ended(process.job, process.progress.seconds, process.reason)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.stop()


# -- the machine --------------------------------------------------------------------------------------------


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()] if torch.cuda.device_count() else []
    return [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def stoppable() -> Iterator[None]:
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
