"""Jobs on a Ray cluster: a process that talks to it (`ray_driver`), watched from here.

Ray can wait without end for a cluster that is not there, and ends the whole process when it loses one. So it is kept in
a process of its own, which can be killed: whatever happens there is a sentence here.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from multitudes.core.checks import check_number
from multitudes.study.local import stoppable
from multitudes.study.monitor import Interrupted, JobProgress, Monitor, Outcome, Snapshot
from multitudes.study.processes import GRACE, tied
from multitudes.study.store import Run

__all__ = ["run_cluster"]

DRIVER = (sys.executable, "-m", "multitudes.study.ray_driver")
PATIENCE = 30.0
"""How many seconds a cluster has to answer, and to find a place for a job."""
SILENCE = 90.0
"""After how many seconds without a word the cluster is lost."""


def run_cluster(
    run: Run,
    address: str = "auto",
    *,
    cpus: float = 1,
    gpus: float | None = None,
    retries: int = 3,
    command: Sequence[str] | None = None,
    on_event: Callable[[Snapshot], None] | None = None,
) -> Outcome:
    """Run the missing jobs of a prepared run on a Ray cluster: `"auto"`, `"local"` or an address.

    A task takes `cpus` of a node's cores and `gpus` of its GPUs: a fraction such as 0.25 puts four jobs on one; by
    default one where there are any, unless the study is for the CPU. A task whose worker or node dies is started again,
    `retries` times at most; a job that fails by itself is not. A cluster that does not answer for 30 seconds, or is
    lost, is a ValueError; what is done stays done. The rest is as with `run_local`.
    """
    check_number("cpus", cpus, 0, above=True)
    if gpus is not None:
        check_number("gpus", gpus, 0)
    check_number("retries", retries, 0)
    address = _address(address)
    request = {
        "directory": str(run.directory.resolve()), "address": address, "device": run.spec["device"], "cpus": cpus,
        "gpus": gpus, "retries": retries, "command": None if command is None else list(command), "patience": PATIENCE,
    }  # fmt: skip
    with run.locked(), stoppable():
        monitor = Monitor(run, on_event)
        _probe(address)
        driver = _Driver(address, request)
        try:
            for message in driver.messages():
                _note(message, run, monitor)
        except KeyboardInterrupt:
            driver.stop()
            raise Interrupted(run) from None
        finally:
            driver.kill()
        if driver.lost:
            done, total = len(run.done), len(run.jobs)
            raise ValueError(
                f"ray={address!r}: {driver.lost}, with {done} of {total} jobs done: the same command resumes the study"
            )
    return monitor.outcome


def _note(message: dict[str, Any], run: Run, monitor: Monitor) -> None:
    if "job" in message:
        monitor.ended(run.named(message["job"]), message["seconds"], message["reason"])
    if "running" in message:
        running = [JobProgress(**each) for each in message["running"]]
        ended = {*monitor.outcome.done, *monitor.outcome.failed, *(each.name for each in running)}
        waiting = [job for job in monitor.missing if job.name not in ended]
        monitor.update(running, waiting, max(1, len(running)))


# -- the cluster -------------------------------------------------------------------------------------------


def _address(address: str) -> str:
    """Where the cluster is: the one that this process is in, if there is one."""
    ray = sys.modules.get("ray")
    if address == "auto" and ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return address


def _probe(address: str) -> None:
    """That somebody listens at an address; Ray itself would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:
        return
    if not port.isdigit():
        raise ValueError(f"ray={address!r}: an address is HOST:PORT, auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"ray={address!r}: no cluster can be reached there ({error})") from error


class _Driver:
    """The process that talks to the cluster."""

    def __init__(self, address: str, request: dict[str, Any]) -> None:
        self.address = address
        self.lost = ""
        """Why it ended before all was done."""
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        # A driver whose head is gone waits a minute before it ends itself.
        own = {"RAY_gcs_rpc_server_reconnect_timeout_s": "20", "PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        self.process = tied(DRIVER, stdin=pipe, stdout=pipe, stderr=self.errors, env={**os.environ, **own}, bufsize=0)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it says, until it has ended or must be given up."""
        assert self.process.stdout is not None
        limit, heard, finished = SILENCE, b"", False
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            while not finished:
                if not ready.select(limit):
                    self.lost = "the cluster does not answer"
                    return
                new = os.read(self.process.stdout.fileno(), 1 << 20)
                if not new:
                    self.lost = self._how_it_ended()
                    return
                *lines, heard = (heard + new).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "error" in message:
                        raise ValueError(f"ray={self.address!r}: {message['error']}")
                    limit = PATIENCE if "connecting" in message else SILENCE
                    finished = finished or "finished" in message
                    yield message

    def stop(self) -> None:
        """Have it collect what the jobs have saved, and end."""
        self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 2 * GRACE
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def kill(self) -> None:
        """End it."""
        if self.process.poll() is None and not self.lost:  # it has nothing left to do but to leave the cluster
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                pipe.close()

    def _how_it_ended(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        if b"No module named 'ray'" in self.errors.read():
            return "a study on a cluster needs ray: pip install 'multitudes[ray]'"
        return f"the cluster was lost (its driver ended with code {code})"
