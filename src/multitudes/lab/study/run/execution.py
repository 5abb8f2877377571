"""Run the jobs of a study, locally or on a Ray cluster, in a driver process that this process monitors.

`local_driver` forks for each job, so it must not have run any computation before. `ray_driver` submits jobs to Ray,
which can block forever and kills its process when it loses the cluster. A driver reads its request from stdin and
reports on stdout, one JSON object per line. On SIGTERM it stops its jobs.
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

from multitudes.base.checks import check_count, check_number, plural
from multitudes.lab.study.run.monitor import Interrupted, JobProgress, Monitor, Outcome, Snapshot
from multitudes.lab.study.run.store import Run

LOCAL, RAY = "multitudes.lab.study.run.local_driver", "multitudes.lab.study.run.ray_driver"
LINUX = sys.platform.startswith("linux")
GRACE = 10.0
"""Seconds for a job to save its training when it is stopped."""
PATIENCE = 30.0
"""Seconds for a cluster to answer, and to place a job."""
SILENCE = 90.0
"""Seconds without a message after which a cluster counts as lost."""
RETRIES = 3
"""How often a cluster restarts a job whose worker was lost."""
TRIES = 3
"""How often the local driver is started if it gets killed."""

Send = Callable[..., None]


def run_local(
    run: Run,
    *,
    workers: int | None = None,
    command: Sequence[str] | None = None,
    on_event: Callable[[Snapshot], None] | None = None,
) -> Outcome:
    """Run the missing jobs of a prepared run, each in its own process, `workers` at a time.

    The default is one single-threaded worker per CPU core, or one per GPU. A failed job does not stop the others.
    `on_event` gets a snapshot a few times a second. Ctrl-C or SIGTERM stops the jobs, which save their training, and
    raises `Interrupted`. `command` replaces the package's own worker; the job's directory is appended to it.
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

    A task takes `cpus` cores and `gpus` GPUs of a node; 0.25 puts four jobs on one GPU. The default is one GPU if there
    are any, unless the study is for the CPU. A task whose worker or node dies is retried up to three times; a job that
    fails by itself is not. Raises ValueError if the cluster does not answer for 30 seconds or is lost; finished jobs
    are kept. Otherwise like `run_local`.
    """
    check_number("cpus", cpus, 0, above=True)
    if gpus is not None:
        check_number("gpus", gpus, 0)
    ray = sys.modules.get("ray")
    if address == "auto" and ray is not None and ray.is_initialized():  # this process's own cluster
        address = str(ray.get_runtime_context().gcs_address)
    request = {
        "directory": str(run.directory.resolve()), "address": address, "device": run.spec["device"], "cpus": cpus,
        "gpus": gpus, "retries": RETRIES, "command": command, "patience": PATIENCE,
    }  # fmt: skip
    # By default a driver whose head node is gone waits a minute before it exits.
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
    """Forward a driver's messages to the monitor until it has finished."""
    try:
        for message in driver.messages(silence):
            if "error" in message:
                raise ValueError(message["error"])
            if "job" in message:
                monitor.ended(run.named(message["job"]), message["seconds"], message["reason"])
            if "running" in message:
                monitor.update([JobProgress(**each) for each in message["running"]])
        if left := len(monitor.waiting()):
            raise LostError(f"stopped before {plural(left, 'job')} had run")
    except KeyboardInterrupt:
        driver.stop()
        raise Interrupted(run) from None
    finally:
        driver.kill()


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn SIGTERM into a KeyboardInterrupt inside the context, so that jobs are stopped first."""

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
    """Raise if nothing listens at an address; Ray itself would retry for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:
        return
    if not port.isdigit():
        raise ValueError("an address must be HOST:PORT, auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot reach a cluster at this address ({error})") from error


# -- drivers -----------------------------------------------------------------------------------------------


class LostError(Exception):
    """Raised when a driver exits or stops responding before it has finished."""


class Driver:
    """A process that runs jobs. On Linux it ends with this process, even if that is killed."""

    def __init__(self, module: str, request: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
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
        """Yield messages until the driver has finished; kill it after `silence` seconds without one.

        A message `{"patience": 30.0}` sets a shorter limit for the next one.
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
            if not line.endswith("\n"):  # end of file, or an incomplete line
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
        """Return the exit code and the last printed line."""
        code = self.process.wait()
        self.errors.seek(0)
        last = last_line(self.errors.read().decode(errors="replace"))
        return f"its driver ended with code {code}" + (f": {last}" if last else "")

    def stop(self) -> None:
        """Ask the driver to collect saved training and exit."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2 * GRACE)

    def kill(self) -> None:
        """Kill the driver."""
        self.process.kill()
        self.process.wait()
        for file in (self.input, self.output, self.errors):
            with suppress(BrokenPipeError):
                file.close()


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty."""
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def end_with_parent(parent: int) -> None:
    """Make Linux kill this process when its parent ends; exit if it already has."""
    if LINUX:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("its study has ended")


def conversation() -> tuple[dict[str, Any], Send]:
    """Read the study's request in a driver, and return it with a function that reports to the study.

    Redirects what libraries print to stderr.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the study forwards it
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**message: Any) -> None:
        reports.write(json.dumps(message) + "\n")

    request = json.loads(sys.stdin.readline())
    end_with_parent(request["parent"])
    return request, send


# -- the machine --------------------------------------------------------------------------------------------


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_limits(count: float) -> dict[str, str]:
    """Return the environment that limits a job to this many threads, rounded down."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(max(1, int(count))))


def _slots(device: str, workers: int | None) -> list[dict[str, str]]:
    """Return the environment of each worker: its GPU and its share of threads, so workers do not compete for cores.

    Threads do not depend on the number of jobs, so that a rerun job computes the same result.
    """
    gpus = [] if device == "cpu" else _gpus()
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda' needs a GPU that torch can use, but there is none")
    count = workers or len(gpus) or cores()
    own = [{"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {} for index in range(count)]
    return [thread_limits(cores() / count) | gpu for gpu in own]


def _gpus() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()] if torch.cuda.device_count() else []
    return [str(index) for index in range(torch.cuda.device_count())]
