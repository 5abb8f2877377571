"""Run the jobs of a study, on this machine or on a Ray cluster, in a driver process that this one watches.

`local_driver` forks itself for each job, and must not have computed anything before. `ray_driver` gives the jobs to
Ray, which can wait without end for a cluster, and ends its whole process when it loses one. A driver reads its request
from stdin and reports on stdout, a JSON object a line. It ends its jobs when it is asked to end (SIGTERM).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from multitudes.core.checks import check_count, check_number
from multitudes.study.monitor import Interrupted, JobProgress, Monitor, Outcome, Snapshot
from multitudes.study.store import Run

LOCAL, RAY = "multitudes.study.local_driver", "multitudes.study.ray_driver"
LINUX = sys.platform.startswith("linux")
GRACE = 10.0
"""Seconds that a job has, once it is asked to end, to save its training."""
PATIENCE = 30.0
"""Seconds that a cluster has to answer, and to find a place for a job."""
SILENCE = 90.0
"""Seconds without a message after which a cluster is lost."""
RETRIES = 3
"""How many times a cluster starts a job again whose worker is lost."""
TRIES = 3
"""How many times the local driver is started where it is killed."""

Tell = Callable[..., None]


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
    lost = LostError("")
    with run.locked(), _stoppable():
        slots, monitor = _slots(run.spec["device"], workers), Monitor(run, on_event)
        for _ in range(TRIES):
            jobs = [str(job.directory.resolve()) for job in monitor.waiting()]
            if not jobs:
                return monitor.outcome
            driver = Driver(LOCAL, {"jobs": jobs, "slots": slots, "command": command}, slots[0])
            try:
                _follow(driver, run, monitor)
                return monitor.outcome
            except LostError as error:
                lost = error
    raise ValueError(f"the process that runs the jobs {lost}")


def run_cluster(
    run: Run,
    address: str = "auto",
    *,
    cpus: float = 1,
    gpus: float | None = None,
    command: Sequence[str] | None = None,
    on_event: Callable[[Snapshot], None] | None = None,
) -> Outcome:
    """Run the missing jobs of a prepared run on a Ray cluster: `"auto"`, `"local"` or an address.

    A task takes `cpus` of a node's cores and `gpus` of its GPUs: a fraction such as 0.25 puts four jobs on one; by
    default one where there are any, unless the study is for the CPU. A task whose worker or node dies is started again,
    three times at most; a job that fails by itself is not. A cluster that does not answer for 30 seconds, or is
    lost, is a ValueError; what is done stays done. The rest is as with `run_local`.
    """
    check_number("cpus", cpus, 0, above=True)
    if gpus is not None:
        check_number("gpus", gpus, 0)
    ray = sys.modules.get("ray")
    if address == "auto" and ray is not None and ray.is_initialized():  # the cluster that this process is in
        address = str(ray.get_runtime_context().gcs_address)
    request = {
        "directory": str(run.directory.resolve()), "address": address, "device": run.spec["device"], "cpus": cpus,
        "gpus": gpus, "retries": RETRIES, "command": command, "patience": PATIENCE,
    }  # fmt: skip
    # A driver whose head is gone waits a minute before it ends itself.
    environment = {"RAY_gcs_rpc_server_reconnect_timeout_s": "20"}
    with run.locked(), _stoppable():
        monitor = Monitor(run, on_event)
        try:
            _probe(address)
            _follow(Driver(RAY, request, environment), run, monitor, SILENCE)
        except LostError as error:
            done, total = len(run.done), len(run.jobs)
            again = f"with {done} of {total} jobs done: the same command resumes the study"
            raise ValueError(f"ray={address!r}: the cluster {error}, {again}") from None
        except ValueError as error:
            raise ValueError(f"ray={address!r}: {error}") from error.__cause__
    return monitor.outcome


def _follow(driver: Driver, run: Run, monitor: Monitor, silence: float = threading.TIMEOUT_MAX) -> None:
    """Tell the monitor what a driver reports, until it has finished."""
    try:
        for message in driver.messages(silence):
            if "error" in message:
                raise ValueError(message["error"])
            if "job" in message:
                monitor.ended(run.named(message["job"]), message["seconds"], message["reason"])
            if "running" in message:
                monitor.update([JobProgress(**each) for each in message["running"]])
    except KeyboardInterrupt:
        driver.stop()
        raise Interrupted(run) from None
    finally:
        driver.kill()


@contextmanager
def _stoppable() -> Iterator[None]:
    """Inside, a request to end (SIGTERM) is a KeyboardInterrupt, so that the jobs are stopped first."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _probe(address: str) -> None:
    """Check that a process listens at an address; Ray itself would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:
        return
    if not port.isdigit():
        raise ValueError("an address is HOST:PORT, auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"no cluster can be reached there ({error})") from error


# -- drivers -----------------------------------------------------------------------------------------------


class LostError(Exception):
    """A driver ended, or fell silent, before it had finished."""


class Driver:
    """A process that runs jobs. On Linux it ends when this process does, even if that is killed."""

    def __init__(self, module: str, request: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module], stdin=pipe, stdout=pipe, stderr=self.errors,
            env={**os.environ, **environment}, text=True,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        with suppress(BrokenPipeError):
            self.input.write(json.dumps({"parent": os.getpid(), **request}) + "\n")
            self.input.flush()

    def messages(self, silence: float = threading.TIMEOUT_MAX) -> Iterator[dict[str, Any]]:
        """Yield its messages until it has finished; it is killed where it sends none for `silence` seconds.

        A message may ask for less patience with the next one, `{"patience": 30.0}`.
        """
        limit = silence
        while True:
            asked, clock = time.monotonic(), threading.Timer(limit, self.process.kill)
            clock.daemon = True  # Ctrl-C may come before it is cancelled
            clock.start()
            try:
                line = self.output.readline()
            finally:
                clock.cancel()
            if not line.endswith("\n"):  # nothing, or the beginning of a line
                silent = time.monotonic() - asked >= limit
                raise LostError("does not answer" if silent else f"was lost ({self._how_it_ended()})")
            message = json.loads(line)
            if "finished" in message:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE)
                return
            limit = message.get("patience", silence)
            yield message

    def _how_it_ended(self) -> str:
        """Its exit code, and the last line that it printed."""
        code = self.process.wait()
        self.errors.seek(0)
        last = last_line(self.errors.read().decode(errors="replace"))
        return f"its driver ended with code {code}" + (f": {last}" if last else "")

    def stop(self) -> None:
        """Have it collect what the jobs have saved, and end."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2 * GRACE)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        for file in (self.input, self.output, self.errors):
            with suppress(BrokenPipeError):
                file.close()


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty."""
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent ends, however that ends; exit if it has ended already."""
    if LINUX:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("its study has ended")


def conversation() -> tuple[dict[str, Any], Tell]:
    """In a driver: what the study asks for, and how to report to it; what libraries print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the study passes it on
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(**message: Any) -> None:
        reports.write(json.dumps(message) + "\n")

    request = json.loads(sys.stdin.readline())
    end_with_parent(request["parent"])
    return request, tell


# -- the machine --------------------------------------------------------------------------------------------


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(count: float) -> dict[str, str]:
    """Return the environment of a job that computes with so many threads, rounded down."""
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
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()] if torch.cuda.device_count() else []
    return [str(index) for index in range(torch.cuda.device_count())]
