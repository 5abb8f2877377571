"""A trained network and its data, read from the directory of a job."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from multitudes.core.multitude import Multitude
from multitudes.data import Data
from multitudes.evaluation.calibrate import Calibrated
from multitudes.storage.save import load
from multitudes.study.job_data import data_of, device_of
from multitudes.study.networks import build_network, outputs_of
from multitudes.study.store import Job, Run
from multitudes.training.precision import check_precision

__all__ = ["Trained", "find_job", "mixed_precision"]


@dataclass(frozen=True)
class Trained:
    """What a job has trained, and on what."""

    job: Job
    net: Multitude | Calibrated
    data: Data
    device: torch.device

    @classmethod
    def read(cls, path: str | Path, device: str | None = None, draws: int | None = None) -> Trained:
        """From the directory of a job, or of a run that has one alone; the network is in evaluation mode."""
        where = device_of(device)
        job = find_job(path)
        config = job.config or {}
        data = data_of(config["data"], job.directory)
        model = None
        if config["model"].get("file") is not None:  # code of the user's own, which no file of weights holds
            outputs = outputs_of(data.task, data.outputs)
            model = build_network(config["model"], data.shape, outputs, job.directory)
        net = load(job.directory / "model.safetensors", model)
        found = cls(job, net.to(where).eval(), data, where)
        if draws is not None:
            found.multitude.draws = draws
        return found

    @property
    def multitude(self) -> Multitude:
        """The network, without its calibration."""
        return self.net.net if isinstance(self.net, Calibrated) else self.net


def mixed_precision(device: torch.device, precision: str | None) -> AbstractContextManager[Any]:
    """Inside, torch computes with this precision; an error where this machine cannot."""
    check_precision(precision or "float32", device)
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def find_job(path: str | Path) -> Job:
    """The job in a directory: that of a job, or of a run that has one alone."""
    path = Path(path)
    if (path / "config.json").is_file():
        job = Job(path)
        if not job.done:
            raise ValueError(f"{str(path)!r} is a job that is not done: {job.failure or 'run its study first'}")
        return job
    if not (path / "study.toml").is_file():
        raise ValueError(f"JOB must be a directory RUN/jobs/METHOD-SEED, or that of a run, got {str(path)!r}")
    run = Run(path)
    done = run.done
    if len(done) == 1:
        return done[0]
    if not done:
        raise ValueError(f"no job of the run {str(path)!r} is done")
    from multitudes.study.leaderboard import leaderboard  # here: one job is read without metrics

    best = leaderboard(run)[0]
    example = run.job(best.name, best.seeds[0]).directory
    names = ", ".join(job.name for job in done)
    raise ValueError(f"{str(path)!r} has {len(done)} jobs ({names}): say which, such as {str(example)!r}, the best")
