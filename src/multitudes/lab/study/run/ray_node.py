"""Code that runs on the nodes of a Ray cluster: each job in its own folder, with data shared by a node's jobs.

A task gets the files of a job, runs it as on a local machine, and returns the files it wrote. So the results are the
same and no shared file system is needed. A node only needs this package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from multitudes.base.sealed_files import write_atomically
from multitudes.lab.study.run.execution import LOCAL, Driver, LostError, end_with_parent
from multitudes.lab.study.run.monitor import JobProgress
from multitudes.lab.study.run.store import Job

FOLDERS = "multitudes-nodes"
"""Parent of all job folders, inside the folder for temporary files."""

REPORT = 0.5
"""Seconds between progress messages of a task."""

_SWEEP = """
import os, shutil, sys, time
if os.fork():
    os._exit(0)  # Ray kills the children of its workers, but not their children
sys.stdin.read()
while os.path.exists(sys.argv[1]):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.1)  # a job that is being killed may still write
"""
"""Script that removes a folder once the process at the other end of stdin has ended."""


class SharedState:
    """Shared state: tasks write their progress here and read whether to stop."""

    def __init__(self) -> None:
        self.progress: dict[str, JobProgress] = {}
        self.stopped = False

    def write(self, progress: JobProgress) -> bool:
        """Store a task's progress; return True if the task should save its training and stop."""
        self.progress[progress.name] = progress
        return self.stopped

    def read(self) -> dict[str, JobProgress]:
        """Return the progress of all started tasks."""
        return self.progress

    def stop(self) -> None:
        """Ask all tasks to stop."""
        self.stopped = True


@dataclass(frozen=True)
class Result:
    """Result of a job."""

    files: dict[str, bytes]
    """Files by path in the job's directory."""
    seconds: float
    reason: str
    stopped: bool
    """True if it was stopped before it was done."""


def work(
    name: str,
    files: Mapping[str, bytes],
    shared: Mapping[str, tuple[str, Sequence[Any]]],
    state: Any,
    environment: Mapping[str, str],
    command: Sequence[str] | None,
) -> Result:
    """Run one job in a folder laid out like the run directory."""
    import ray

    with _folder(ray, shared) as folder:
        job = Job(folder / "jobs" / name)
        for file, content in files.items():
            write_atomically(job.directory / file, content)
        driver = Driver(LOCAL, {"jobs": [str(job.directory)], "slots": [environment], "command": command}, environment)
        stopped, seconds, reason = False, 0.0, "its driver was stopped"
        answer, reported = None, -REPORT
        try:
            for message in driver.messages():
                if "job" in message:
                    seconds, reason = message["seconds"], message["reason"]
                elif message["running"] and time.monotonic() - reported >= REPORT and (answer is None or answer.done()):
                    stopped = answer is not None and answer.exception() is None and answer.result()
                    if stopped:
                        driver.stop()
                        break
                    # Do not wait: Ray gives the cores of a waiting task to another one.
                    progress = JobProgress(**message["running"][0])
                    answer, reported = state.write.remote(progress).future(), time.monotonic()
        except LostError as error:
            reason = f"it {error}"
        finally:
            driver.kill()
        return Result(_written(job), seconds, reason, stopped and not job.done)


def _written(job: Job) -> dict[str, bytes]:
    """Return the files a job wrote; training files only if training has not finished."""
    found = {str(path.relative_to(job.directory)): path for path in job.directory.rglob("[!.]*") if path.is_file()}
    training = [name for name in found if name == "checkpoint.safetensors" or name.startswith("recording")]
    left_out = {"config.json", *(training if job.done else ())}
    return {name: path.read_bytes() for name, path in found.items() if name not in left_out}


# -- folders -----------------------------------------------------------------------------------------------


@cache
def _own_folder() -> tuple[Path, subprocess.Popen[bytes]]:
    """Return this process's folder, and the process that removes it after this one ends for any reason."""
    above = Path(tempfile.gettempdir()) / f"{FOLDERS}-{os.getuid()}"
    above.mkdir(mode=0o700, exist_ok=True)
    if above.is_symlink() or above.stat().st_uid != os.getuid():
        raise ValueError(f"{str(above)!r} belongs to another user: set TMPDIR to a folder of yours")
    end_with_parent(os.getppid())  # Ray's workers may outlive their node
    folder = Path(tempfile.mkdtemp(dir=above))
    sweeper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SWEEP, str(folder)], start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    sweeper.wait()
    return folder, sweeper


@contextmanager
def _folder(ray: Any, shared: Mapping[str, tuple[str, Sequence[Any]]]) -> Iterator[Path]:
    """Create a folder for one job with links to the shared files, and remove it at the end.

    A node fetches a shared file once. Other processes link to the first copy.
    """
    own, _ = _own_folder()
    folder = Path(tempfile.mkdtemp(dir=own))
    try:
        with _locked(own.parent):
            for name, (checksum, (content,)) in shared.items():
                for other in own.parent.glob(f"*/{checksum}"):
                    with suppress(OSError):  # the file exists, or the other process has just ended
                        os.link(other, own / checksum)
                if not (own / checksum).is_file():
                    write_atomically(own / checksum, ray.get(content))
                os.link(own / checksum, folder / name)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder inside the context."""
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
