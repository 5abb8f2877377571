"""The driver that submits jobs to a Ray cluster: one task per job, retried if its worker dies.

    python -m multitudes.lab.study.run.ray_driver

It writes the files of finished jobs to the run directory.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from multitudes.base.checks import needed
from multitudes.base.sealed_files import write_atomically
from multitudes.lab.study.run.execution import GRACE, Send, conversation, thread_limits
from multitudes.lab.study.run.monitor import JobProgress
from multitudes.lab.study.run.ray_node import Result, SharedState, work
from multitudes.lab.study.run.store import Job, Run


def main() -> None:
    """Run the study described on stdin."""
    request, send = conversation()
    try:
        _run(request, send)
    except (ImportError, ValueError) as error:
        send(error=str(error))
    send(finished=True)


def _run(request: Mapping[str, Any], send: Send) -> None:
    ray = needed("ray", "ray", "a study on a cluster")
    send(patience=request["patience"])
    try:
        ray.init(address=request["address"], log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        token = " or it refused the token (RAY_AUTH_TOKEN)" if ":" in request["address"] else ""
        raise ValueError(f"cannot reach a cluster at this address{token}: {reason or type(error).__name__}") from error
    send(connected=True)
    try:
        _Tasks(ray, request, send).run()
    finally:
        ray.shutdown()


class _Tasks:
    """The Ray tasks of a study."""

    def __init__(self, ray: Any, request: Mapping[str, Any], send: Send) -> None:
        self.ray, self.send, self.patience = ray, send, request["patience"]
        self.stopped = self.stop_sent = False
        signal.signal(signal.SIGTERM, self._stop)
        self.needs = {"CPU": request["cpus"], "GPU": self._gpus(request["device"], request["gpus"])}
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        state = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=1)(SharedState)
        self.state = state.options(scheduling_strategy=here).remote()
        environment = thread_limits(self.needs["CPU"]) | ({} if self.needs["GPU"] else {"CUDA_VISIBLE_DEVICES": ""})
        given = {"max_retries": request["retries"], "num_cpus": self.needs["CPU"], "num_gpus": self.needs["GPU"]}
        task = ray.remote(**given)(work)
        run = Run(request["directory"])
        shared = self._shared(run)
        self.pending: dict[Any, Job] = {
            task.remote(job.name, _files(job), shared, self.state, environment, request["command"]): job
            for job in run.missing
        }
        self.last_fit = time.monotonic()

    def run(self) -> None:
        """Run until all tasks have ended."""
        progress: dict[str, JobProgress] = {}
        deadline = float("inf")
        while self.pending and time.monotonic() < deadline:
            running = [progress[job.name] for job in self.pending.values() if job.name in progress]
            self.send(running=[asdict(each) for each in running])
            self._check_placement(bool(running))
            if self.stopped and not self.stop_sent:
                deadline, self.stop_sent = time.monotonic() + GRACE + 5, True
                self.state.stop.remote()  # started jobs save their training and return it
                for task, job in self.pending.items():
                    if job.name not in progress:
                        self.ray.cancel(task)
            ready, _ = self.ray.wait(list(self.pending), num_returns=1, timeout=0.5)
            for task in ready:
                self._end(task, self.pending.pop(task))
            try:
                progress = self.ray.get(self.state.read.remote(), timeout=5)
            except (self.ray.exceptions.RayError, TimeoutError):
                progress = {}  # unknown; the tasks go on
        for task in self.pending:
            self.ray.cancel(task, force=True)
        self.send(running=[])

    def _end(self, task: Any, job: Job) -> None:
        try:
            result: Result = self.ray.get(task, timeout=60)
        except (self.ray.exceptions.TaskCancelledError, TimeoutError):
            return
        except self.ray.exceptions.RayError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            self.send(job=job.name, seconds=0, reason=f"its task was lost: {reason}")
            return
        # metrics.json comes last: it marks the job as done.
        for name in sorted(result.files, key=lambda name: name == "metrics.json"):
            write_atomically(job.directory / name, result.files[name])
        if not result.stopped:
            self.send(job=job.name, seconds=result.seconds, reason=result.reason)

    # -- inputs of tasks -------------------------------------------------------------------------------------

    def _gpus(self, device: str, gpus: float | None) -> float:
        available = self.ray.cluster_resources().get("GPU", 0)
        fraction = (1.0 if available and device != "cpu" else 0.0) if gpus is None else float(gpus)
        if device == "cuda" and not (available and fraction):
            raise ValueError(
                f"device='cuda' needs GPUs, got a cluster with {available:g} GPUs and gpus={fraction:g} per job"
            )
        return fraction

    def _shared(self, run: Run) -> dict[str, tuple[str, list[Any]]]:
        """Put shared files of the run directory (data, user code) into Ray, as checksum and content.

        The reference to the content is wrapped in a list, so that Ray sends it only to nodes that request it, not with
        each task.
        """
        shared = {}
        for path in run.directory.glob("[!.]*"):
            if path.suffix in (".mtdata", ".py"):
                content = path.read_bytes()
                shared[path.name] = (hashlib.sha256(content).hexdigest(), [self.ray.put(content)])
        return shared

    # -- faults --------------------------------------------------------------------------------------------

    def _check_placement(self, running: bool) -> None:
        """Raise if no node could run a job for a while."""
        now = time.monotonic()
        if running or any(self._fits(node) for node in self.ray.nodes()):
            self.last_fit = now
        elif now - self.last_fit > self.patience:
            needs = " and ".join(f"{count:g} {name}" for name, count in self.needs.items() if count)
            raise ValueError(f"no node of the cluster has {needs} for a job; finished jobs are kept")

    def _fits(self, node: Mapping[str, Any]) -> bool:
        there = node.get("Resources", {})
        return bool(node["Alive"]) and all(there.get(name, 0) >= count for name, count in self.needs.items())

    def _stop(self, *_: Any) -> None:
        self.stopped = True


def _files(job: Job) -> dict[str, bytes]:
    """Return a job's initial files: its configuration, and what an earlier run saved."""
    found = [job.directory / "config.json", job.directory / "checkpoint.safetensors"]
    found += (job.directory / "recording").glob("[!.]*")
    return {str(path.relative_to(job.directory)): path.read_bytes() for path in found if path.is_file()}


if __name__ == "__main__":
    main()
