"""The driver that runs jobs on this machine. Each job is a forked process, which starts in milliseconds.

    python -m multitudes.lab.study.run.local_driver

On systems other than Linux, each job is a newly spawned process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from multitudes.lab.study.run.execution import GRACE, LINUX, TRIES, Send, conversation, end_with_parent, last_line
from multitudes.lab.study.run.monitor import JobProgress
from multitudes.lab.study.run.store import Job, failure_in

PRELOADED = ("multitudes.lab.study.run.worker", "safetensors.torch", "sklearn.datasets", "torch.profiler", "PIL.Image")
"""Imports that jobs need, preloaded if installed.

They must not initialize a GPU or start threads, which forked processes do not inherit.
"""
OUTPUT = "output.txt"
"""File in a job's directory for its output."""
BLOCKED = (signal.SIGINT, signal.SIGTERM)
SET_NAME = 15
"""prctl option of Linux that sets the process name."""
_PROCESSES: Any = multiprocessing.get_context("fork" if LINUX else "spawn")


def main() -> None:
    """Run the jobs listed on stdin."""
    request, send = conversation()
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    if LINUX and not request["command"]:
        for name in PRELOADED:
            with suppress(ImportError):  # a job that needs it will report it
                importlib.import_module(name)
        gc.freeze()  # keep these pages shared with the jobs
    _run([Job(each) for each in request["jobs"]], request["slots"], request["command"], send, stopped)
    send(finished=True)


def _run(
    waiting: list[Job], slots: list[dict[str, str]], command: Sequence[str] | None, send: Send, stopped: list[bool]
) -> None:
    """Run as many jobs at a time as there are slots, each in its slot's environment."""
    running: dict[int, JobProcess] = {}
    while (waiting or running) and not stopped:
        send(running=[asdict(each.progress) for each in running.values()])
        for slot, environment in enumerate(slots):
            if waiting and slot not in running:
                running[slot] = JobProcess(waiting.pop(0), environment, command)
        time.sleep(0.05)
        for slot, process in list(running.items()):
            if process.ended():
                del running[slot]
                send(job=process.job.name, seconds=process.progress.seconds, reason=process.reason)
    for process in running.values():
        process.process.terminate()
    deadline = time.monotonic() + GRACE
    for process in running.values():
        process.process.join(max(0.0, deadline - time.monotonic()))
        process.process.kill()
        process.process.join()
    send(running=[])


class JobProcess:
    """A process that runs a job and tracks its progress; its output goes to `output.txt` in the job's directory.

    On Linux it ends with this process, even if that is killed. On other systems it may run to its end. That is
    harmless: a repeated job writes the same files. A job killed by a signal is restarted from its checkpoint, up to
    `TRIES` starts in all.
    """

    def __init__(self, job: Job, environment: Mapping[str, str], command: Sequence[str] | None) -> None:
        self.job, self.progress = job, JobProgress(job.name)
        self.reason = ""
        """Reason of the failure, if it ended without results."""
        self.tries, self._started_at = 0, time.monotonic()
        self._arguments = (str(job.directory), environment, command, os.getpid())
        self._output = job.directory / OUTPUT
        self._start()

    def _start(self) -> None:
        self.tries += 1
        _, self._read = self.job.events()
        self._output.write_bytes(b"")
        if os.name == "posix":
            signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)  # until the job installs its own handlers
        self.process = _PROCESSES.Process(target=_run_in_child, args=self._arguments)
        self.process.start()
        if os.name == "posix":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)

    def ended(self) -> bool:
        """Read new events from its log; return True once it has ended for good."""
        code = self.process.exitcode  # before reading the log, so that no event is missed
        events, self._read = self.job.events(self._read)
        for event in [{}, *events]:
            self.progress = self.progress.after(event, time.monotonic() - self._started_at)
            self.reason = failure_in(event) or self.reason
        if code is None:
            return False
        if code < 0 and not (self.job.done or self.reason) and self.tries < TRIES:
            self._start()
            return False
        self.reason = self.reason or self._how_it_ended(code)
        if not self._output.stat().st_size:
            self._output.unlink()
        return True

    def _how_it_ended(self, code: int) -> str:
        """Describe the exit code and the last printed line."""
        last = last_line(self._output.read_text(errors="replace"))
        killed = f"it was killed by {signal.Signals(-code).name} {self.tries} times" if code < 0 else ""
        if code == -signal.SIGKILL and not last:
            last = "perhaps there is not enough memory for this many jobs at once"
        how = killed or (f"it ended with exit code {code}" if code else "it ended without results")
        return f"{how}: {last}" if last else how


def _run_in_child(directory: str, environment: Mapping[str, str], command: Sequence[str] | None, driver: int) -> None:
    """Run the job in a new process, as `python -m multitudes.lab.study.run.worker` would in this environment."""
    end_with_parent(driver)
    if LINUX:
        ctypes.CDLL(None).prctl(SET_NAME, os.path.basename(directory).encode()[:15])
    for number in BLOCKED:
        signal.signal(number, signal.SIG_DFL)
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    os.environ.update(environment)
    with open(os.path.join(directory, OUTPUT), "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if command:
        os.execvp(command[0], [*command, directory])
    from multitudes.lab.study.run import worker

    worker.main([directory])


if __name__ == "__main__":
    main()
