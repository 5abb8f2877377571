"""Jobs on a cluster: one Ray task a job, which is tried again where its worker dies.

A task gets the files of a job, runs it in a process of its own as it would be run locally, and returns the files that
it wrote. So no shared file system is needed, and the results are the same. What a worker needs is the package itself.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multitudes.core.checks import check_number, needed
from multitudes.study.local import (
    COMMAND,
    Interrupted,
    JobProgress,
    Outcome,
    Snapshot,
    how_to_go_on,
    start_process,
    time_left,
    why_ended,
)
from multitudes.study.store import Job, Run, write_atomically

__all__ = ["run_cluster"]

LAST = "metrics.json"


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
    """Run the jobs of a prepared run that are missing on a Ray cluster: `"auto"`, `"local"` or an address.

    A task takes `cpus` of a node's cores and `gpus` of its GPUs: a share such as 0.25 puts four jobs on one; by default
    one where there are any, unless the study is for the CPU. A task whose worker dies is started again, `retries` times
    at most; a job that fails by itself is not. The rest is as with `run_local`.
    """
    check_number("cpus", cpus, 0, above=True)
    if gpus is not None:
        check_number("gpus", gpus, 0)
    check_number("retries", retries, 0)
    ray = needed("ray", "ray", "a study on a cluster")
    started = not ray.is_initialized()
    if started:
        _connect(ray, address)
    try:
        with run.locked():
            share = Share(cpus, _gpus(ray, run.spec["device"], gpus))
            return _Tasks(ray, run, share, retries, command, on_event or (lambda snapshot: None)).work()
    finally:
        if started:
            ray.shutdown()


@dataclass(frozen=True)
class Share:
    """What a job gets of a node."""

    cpus: float
    gpus: float


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"ray={address!r}: there is no cluster to be reached there ({reason})") from error


def _gpus(ray: Any, device: str, gpus: float | None) -> float:
    there = ray.cluster_resources().get("GPU", 0)
    share = (1.0 if there and device != "cpu" else 0.0) if gpus is None else float(gpus)
    if device == "cuda" and not (there and share):
        raise ValueError(f"device='cuda' needs GPUs, got a cluster with {there:g} and a share of {share:g}")
    return share


# -- on the driver -----------------------------------------------------------------------------------------


class _Tasks:
    """The tasks of a study, and what has come back from them."""

    def __init__(
        self,
        ray: Any,
        run: Run,
        share: Share,
        retries: int,
        command: Sequence[str] | None,
        tell: Callable[[Snapshot], None],
    ) -> None:
        self.ray, self.run, self.tell = ray, run, tell
        jobs = run.jobs
        missing = [job for job in jobs if not job.done]
        self.total, self.before = len(jobs), len(jobs) - len(missing)
        self.outcome = Outcome([], {})
        self.durations: dict[str, list[float]] = {}
        self.started = time.monotonic()
        self.board = ray.remote(num_cpus=0)(_Board).remote()
        common = ray.put({path.name: path.read_bytes() for path in run.directory.glob("*") if _common(path)})
        work = ray.remote(max_retries=retries, num_cpus=share.cpus, num_gpus=share.gpus)(_work)
        own = {job.name: (job.directory / "config.json").read_bytes() for job in missing}
        self.pending = {
            work.options(name=job.name).remote(job.name, own[job.name], common, share, command, self.board): job
            for job in missing
        }

    def work(self) -> Outcome:
        try:
            self.tell(self.snapshot({}))
            while self.pending:
                ready, _ = self.ray.wait(list(self.pending), num_returns=1, timeout=0.5)
                for task in ready:
                    self.end(task, self.pending.pop(task))
                self.tell(self.snapshot(self.progress()))
            return self.outcome
        except KeyboardInterrupt:
            for task in self.pending:
                self.ray.cancel(task, force=True)
            raise Interrupted(how_to_go_on(self.run)) from None

    def end(self, task: Any, job: Job) -> None:
        try:
            result = self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            self.outcome.failed[job.name] = f"its task was lost: {str(error).strip().splitlines()[0]}"
            return
        for name in sorted(result.files, key=lambda name: name == LAST):  # a job is done when that is there
            write_atomically(job.directory / name, result.files[name])
        if job.done:
            self.outcome.done.append(job.name)
            self.durations.setdefault(job.label, []).append(result.seconds)
        else:
            self.outcome.failed[job.name] = job.failure or result.ended

    def progress(self) -> dict[str, JobProgress]:
        try:
            return dict(self.ray.get(self.board.read.remote(), timeout=5))
        except (self.ray.exceptions.RayError, TimeoutError):  # where it cannot be told, the work goes on
            return {}

    def snapshot(self, progress: Mapping[str, JobProgress]) -> Snapshot:
        names = [job.name for job in self.pending.values()]
        running = tuple(progress[name] for name in names if name in progress)
        waiting = [job.label for job in self.pending.values() if job.name not in progress]
        left = time_left(running, waiting, self.durations, max(1, len(running)))
        done, failed = self.before + len(self.outcome.done), len(self.outcome.failed)
        return Snapshot(self.total, done, failed, running, time.monotonic() - self.started, left)


def _common(path: Path) -> bool:
    """Whether jobs may need a file of the run directory: the data, and a network of the user's own."""
    return path.suffix in (".mtdata", ".py") and not path.name.startswith(".")


# -- on the workers ----------------------------------------------------------------------------------------


class _Board:
    """Where tasks write how far they are."""

    def __init__(self) -> None:
        self.progress: dict[str, JobProgress] = {}

    def tell(self, progress: JobProgress) -> None:
        self.progress[progress.name] = progress

    def read(self) -> dict[str, JobProgress]:
        return self.progress


@dataclass(frozen=True)
class _Result:
    files: dict[str, bytes]
    seconds: float
    ended: str
    """How its process ended, where it left no word."""


def _work(
    name: str, config: bytes, common: Mapping[str, bytes], share: Share, command: Sequence[str] | None, board: Any
) -> _Result:
    """Run one job in a directory like that of the study."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="multitudes-") as place:
        for file, content in common.items():
            write_atomically(Path(place) / file, content)
        job = Job(Path(place) / "jobs" / name)
        write_atomically(job.directory / "config.json", config)
        threads = str(max(1, math.floor(share.cpus)))
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if not share.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        code = _watched(start_process(job, command or COMMAND, environment), job, board)
        files = {path.name: path.read_bytes() for path in job.directory.glob("[!.]*") if _returned(path)}
        return _Result(files, time.monotonic() - started, why_ended(code, job.directory / "output.txt"))


def _watched(process: subprocess.Popen[bytes], job: Job, board: Any) -> int:
    """Tell the board what the job says, until it ends."""
    started, read, progress = time.monotonic(), 0, JobProgress(job.name)
    try:
        while True:
            events, read = job.events(read)
            for event in [{}, *events]:
                progress = progress.after(event, time.monotonic() - started)
            board.tell.remote(progress)
            try:
                return process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.kill()  # where the task was cancelled
        process.wait()


def _returned(path: Path) -> bool:
    empty = path.name == "output.txt" and not path.stat().st_size
    return path.is_file() and path.name not in ("config.json", "checkpoint.safetensors") and not empty
