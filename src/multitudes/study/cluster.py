"""Jobs on a cluster: one Ray task for each job, which is tried again where its worker dies.

A task gets the files of a job, runs it in a process of its own as it would be run locally, and returns the files that
it wrote. So no shared file system is needed, and the results are the same. A worker needs the package itself alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multitudes.core.checks import check_number, needed
from multitudes.study.local import threads
from multitudes.study.monitor import Interrupted, JobProgress, Monitor, Outcome, Snapshot
from multitudes.study.processes import JobProcess, starter
from multitudes.study.store import Job, Run, write_atomically

__all__ = ["run_cluster"]


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
    default one where there are any, unless the study is for the CPU. A task whose worker dies is started again,
    `retries` times at most; a job that fails by itself is not. The rest is as with `run_local`.
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
            gpus = _gpus(ray, run.spec["device"], gpus)
            environment = threads(cpus) | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
            work = ray.remote(max_retries=retries, num_cpus=cpus, num_gpus=gpus)(_work)
            monitor = Monitor(run, on_event)
            try:
                _run_all(ray, run, monitor, lambda *given: work.remote(*given, environment, command))
            except KeyboardInterrupt:
                raise Interrupted(run) from None
            return monitor.outcome
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"ray={address!r}: no cluster can be reached there ({reason})") from error


def _gpus(ray: Any, device: str, gpus: float | None) -> float:
    there = ray.cluster_resources().get("GPU", 0)
    fraction = (1.0 if there and device != "cpu" else 0.0) if gpus is None else float(gpus)
    if device == "cuda" and not (there and fraction):
        raise ValueError(f"device='cuda' needs GPUs, got a cluster with {there:g} and gpus={fraction:g} for a job")
    return fraction


# -- on the driver -----------------------------------------------------------------------------------------


def _run_all(ray: Any, run: Run, monitor: Monitor, start: Callable[..., Any]) -> None:
    """Start all tasks, and write the files of each that ends."""
    board = ray.remote(num_cpus=0)(_Board).remote()
    # What jobs may need of the run directory: the data, and a network of the user's own.
    files = [path for path in run.directory.glob("[!.]*") if path.suffix in (".mtdata", ".py")]
    shared = ray.put({path.name: path.read_bytes() for path in files})
    configs = {job.name: (job.directory / "config.json").read_bytes() for job in monitor.missing}
    pending = {start(job.name, configs[job.name], shared, board): job for job in monitor.missing}
    progress: dict[str, JobProgress] = {}
    try:
        while True:
            running = [progress[job.name] for job in pending.values() if job.name in progress]
            waiting = [job for job in pending.values() if job.name not in progress]
            monitor.update(running, waiting, max(1, len(running)))
            if not pending:
                return
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=0.5)
            for task in ready:
                _end(ray, task, pending.pop(task), monitor)
            try:
                progress = ray.get(board.read.remote(), timeout=5)
            except (ray.exceptions.RayError, TimeoutError):
                progress = {}  # unknown; the work goes on
    finally:
        for task in pending:
            ray.cancel(task, force=True)


def _end(ray: Any, task: Any, job: Job, monitor: Monitor) -> None:
    try:
        result: _Result = ray.get(task)
    except ray.exceptions.RayError as error:
        monitor.ended(job, 0, f"its task was lost: {str(error).strip().splitlines()[0]}")
        return
    for name in sorted(result.files, key=lambda name: name == "metrics.json"):  # last: with it, the job is done
        write_atomically(job.directory / name, result.files[name])
    monitor.ended(job, result.seconds, result.reason)


# -- on the workers ----------------------------------------------------------------------------------------


class _Board:
    """Where tasks write how far they are."""

    def __init__(self) -> None:
        self.progress: dict[str, JobProgress] = {}

    def write(self, progress: JobProgress) -> None:
        self.progress[progress.name] = progress

    def read(self) -> dict[str, JobProgress]:
        return self.progress


@dataclass(frozen=True)
class _Result:
    files: dict[str, bytes]
    seconds: float
    reason: str


def _work(
    name: str,
    config: bytes,
    shared: Mapping[str, bytes],
    board: Any,
    environment: Mapping[str, str],
    command: Sequence[str] | None,
) -> _Result:
    """Run one job in a folder like the run directory."""
    with tempfile.TemporaryDirectory(prefix="multitudes-") as folder:
        for file, content in shared.items():
            write_atomically(Path(folder) / file, content)
        job = Job(Path(folder) / "jobs" / name)
        write_atomically(job.directory / "config.json", config)
        processes = starter(command)
        try:
            process = JobProcess(job, processes, environment)
            while not process.ended():
                board.write.remote(process.progress)
                time.sleep(0.5)
        finally:
            processes.close()  # where the task was cancelled
        own = ("config.json", "checkpoint.safetensors")
        files = {path.name: path.read_bytes() for path in job.directory.glob("[!.]*") if path.is_file()}
        files = {file: content for file, content in files.items() if file not in own}
        return _Result(files, process.progress.seconds, process.reason)
