"""What runs on the nodes of a Ray cluster: a job in a folder of its own, and the data once for all jobs of a node.

A task gets the files of a job, runs it in a process as it would be run locally, and returns the files that it wrote. So
no shared file system is needed, and the results are the same. A node needs the package itself alone.

Everything lies in one folder of a node and study. Whoever works in it holds a lock on it, which ends with the process
however that ends, and a small process that waits for that lock removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from multitudes.study.fork_server import end_with_parent
from multitudes.study.monitor import JobProgress
from multitudes.study.processes import LINUX, JobProcess, Starter, starter
from multitudes.study.store import Job, write_atomically

__all__ = ["Board", "Result", "work"]

FOLDERS = "multitudes-nodes"
"""The folder of the folders, in that for temporary files."""

REPORT = 0.5
"""Seconds between two messages of a task about its progress."""

_SWEEP = """
import fcntl, os, shutil, sys, time
if os.fork():
    os._exit(0)
folder = sys.argv[1]
path = os.path.join(folder, ".lock")
try:
    with open(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mine = os.stat(path).st_ino == os.fstat(lock.fileno()).st_ino  # else another has removed it
        for _ in range(100 if mine else 0):
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.1)  # a job that is being killed may still write
            if not os.path.exists(folder) or os.path.exists(path):
                break
    os.rmdir(os.path.dirname(folder))
except OSError:
    pass
"""
"""Removes a folder when nobody holds the lock in it any more."""


class Board:
    """Where tasks write how far they are, and learn whether they are to end."""

    def __init__(self) -> None:
        self.progress: dict[str, JobProgress] = {}
        self.stopped = False

    def write(self, progress: JobProgress) -> bool:
        """Whether to save the training and to end."""
        self.progress[progress.name] = progress
        return self.stopped

    def read(self) -> dict[str, JobProgress]:
        """How far the tasks are that were started."""
        return self.progress

    def stop(self) -> None:
        """Have all of them end."""
        self.stopped = True


@dataclass(frozen=True)
class Result:
    """What came of a job."""

    files: dict[str, bytes]
    """By their path in the job's directory."""
    seconds: float
    reason: str
    stopped: bool
    """Whether it was asked to end before it was done."""


def work(
    name: str,
    files: Mapping[str, bytes],
    shared: Mapping[str, tuple[str, Sequence[Any]]],
    board: Any,
    environment: Mapping[str, str],
    command: Sequence[str] | None,
) -> Result:
    """Run one job in a folder like the run directory."""
    import ray

    stopped = False
    with _folder(ray.get_runtime_context().get_job_id()) as folder:
        _place(ray, shared, folder)
        job = Job(folder / "run" / "jobs" / name)
        for file, content in files.items():
            write_atomically(job.directory / file, content)
        process = JobProcess(job, _starter(tuple(command) if command else None), environment)
        answer, told = None, -REPORT
        try:
            while not (stopped or process.ended()):
                if time.monotonic() - told >= REPORT and (answer is None or answer.done()):
                    stopped = answer is not None and answer.exception() is None and answer.result()
                    # Not waited for: Ray would give the cores of a task that waits to another one.
                    answer, told = board.write.remote(process.progress).future(), time.monotonic()
                time.sleep(0.05)
            if stopped:
                process.stop()
        finally:
            if process.process.poll() is None:  # where the task was cancelled
                process.stop(grace=0)
        return Result(_written(job), process.progress.seconds, process.reason, stopped and not job.done)


@cache
def _starter(command: tuple[str, ...] | None) -> Starter:
    """One for all tasks of this worker, so that what jobs import is imported once."""
    return starter(command)


def _written(job: Job) -> dict[str, bytes]:
    """The files of a job; of its training, only where that has not ended."""
    found = {str(path.relative_to(job.directory)): path for path in job.directory.rglob("[!.]*") if path.is_file()}
    training = [name for name in found if name == "checkpoint.safetensors" or name.startswith("recording")]
    left_out = {"config.json", *(training if job.done else ())}
    return {name: path.read_bytes() for name, path in found.items() if name not in left_out}


# -- the folder of a node ----------------------------------------------------------------------------------

_LOCKS: dict[Path, IO[str]] = {}
"""Those that this process holds, until it ends."""


@contextlib.contextmanager
def _folder(study: str) -> Iterator[Path]:
    """A folder for one job, removed at its end, or with all of the study's; `run` in it is like a run directory."""
    own = _locked(_folders() / study)
    folder = Path(tempfile.mkdtemp(prefix="job-", dir=own))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folders() -> Path:
    folder = Path(tempfile.gettempdir()) / f"{FOLDERS}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ValueError(f"{str(folder)!r} belongs to somebody else: set TMPDIR to a folder of your own")
    return folder


def _locked(folder: Path) -> Path:
    """The folder of a study on this node, made and held."""
    import fcntl

    while folder not in _LOCKS:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = (folder / ".lock").open("a+")
        except FileNotFoundError:  # it was removed in between
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(folder / ".lock").st_ino == os.fstat(lock.fileno()).st_ino:
                _LOCKS[folder] = lock
                if LINUX:
                    end_with_parent()  # Ray's workers may outlive their node
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _SWEEP, str(folder)], start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                ).wait()  # fmt: skip
                _sweep_others(folder)
    return folder


def _sweep_others(own: Path) -> None:
    """Remove the folders of studies that ended together with their sweepers."""
    import fcntl

    for folder in own.parent.iterdir():
        if folder != own:
            with contextlib.suppress(OSError), (folder / ".lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _place(ray: Any, shared: Mapping[str, tuple[str, Sequence[Any]]], folder: Path) -> None:
    """The data where a job looks for them; they come to a node once, and are kept under their checksum."""
    import fcntl

    (folder / "run").mkdir()
    for name, (checksum, (content,)) in shared.items():
        kept = folder.parent / checksum
        with (folder.parent / ".data").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.is_file():
                write_atomically(kept, ray.get(content))
        os.link(kept, folder / "run" / name)
