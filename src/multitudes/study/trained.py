"""A trained network and its data, read from the directory of a job."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitudes.core.multitude import Multitude
from multitudes.core.predictor import Predictor
from multitudes.core.tasks.predictive import Predictive
from multitudes.data import Data
from multitudes.evaluation.calibrate import Calibrated
from multitudes.evaluation.predict import predictions
from multitudes.storage.save import load
from multitudes.study.hub_models import is_hub
from multitudes.study.job_data import ScaledBatches, data_of, device_of, precision_on
from multitudes.study.networks import build_network, code_of, file_digest, outputs_of
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
    def read(
        cls, path: str | Path, device: str | None = None, draws: int | None = None, model_file: str | None = None
    ) -> Trained:
        """From the directory of a job, or of a run that has one alone; the network is in evaluation mode.

        No code is run that the directory names. A network of the user's own code is built from `model_file`, which is
        FILE.py:FUNCTION, or FILE.py with the function of the training.
        """
        where = device_of(device)
        job = find_job(path)
        config = _config(job)
        data = data_of(config["data"], job.directory)
        own = _own_code(job, config["model"], model_file)
        if is_hub(config["model"].get("name")):  # its weights are in the job's file
            own = {key: value for key, value in config["model"].items() if key != "weights"}
        model = None if own is None else build_network(own, data.shape, outputs_of(data.task, data.outputs))
        net = load(job.directory / "model.safetensors", model)
        trained = cls(job, net.to(where).eval(), data, where)
        if draws is not None:
            trained.multitude.draws = draws
        return trained

    def predict(
        self,
        x: Tensor,
        *,
        seed: int | None = 0,
        precision: str | None = None,
        progress: bool | None = None,
        by: Predictor | None = None,
    ) -> Predictive:
        """What the network predicts of inputs like those of its data, `[N, ...]`, on the CPU; or what `by` predicts.

        A network that draws nothing needs no seed.
        """
        net, prepare = by or self.net, lambda x, _: self.data.preprocess(x)
        options = {} if seed is None else {"seed": seed}
        with mixed_precision(self.device, precision):
            parts = predictions(net, ScaledBatches(self.data, x), progress, self.device, prepare, **options)
            return Predictive.concat(part.cpu() for part, _ in parts)

    @property
    def multitude(self) -> Multitude:
        """The network without its calibration."""
        return self.net.net if isinstance(self.net, Calibrated) else self.net


def _config(job: Job) -> dict[str, Any]:
    config = job.config or {}
    for key in ("data", "model"):
        if not isinstance(config.get(key), dict):
            raise ValueError(f"{str(job.directory / 'config.json')!r} must have a table {key!r}")
    return config


def _own_code(job: Job, model: Mapping[str, Any], given: str | None) -> dict[str, Any] | None:
    """The network of the user's own code that a job has trained, from the given file; None where it has none."""
    named = model.get("file")
    if given is None:
        if named is not None:
            code = f"{model.get('name')} of {Path(str(named)).name}"
            raise ValueError(
                f"the network of {str(job.directory)!r} is code, {code}, which is not run unless you name it: "
                "pass --model-file FILE.py, a file that you trust"
            )
        return None
    if named is None:
        raise ValueError(f"--model-file={given} is not needed: {str(job.directory)!r} has a network of this library")
    file, function = code_of(given)
    if not Path(file).is_file():
        raise ValueError(f"--model-file must be a Python file, got {file!r}, which does not exist")
    if model.get("sha256") not in (None, file_digest(file)):
        warnings.warn(f"{file} is not the file that {job.name} was trained with", stacklevel=3)
    return {"file": str(Path(file).resolve()), "name": function or model["name"], "settings": model.get("settings")}


def mixed_precision(device: torch.device, precision: str | None) -> AbstractContextManager[Any]:
    """Inside, torch computes with this precision; an error where this machine cannot."""
    precision = precision_on(precision, device)
    check_precision(precision, device)
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def find_job(path: str | Path) -> Job:
    """The job in a directory: that of a job, or of a run that has one alone."""
    path = Path(path)
    if (path / "config.json").is_file():
        job = Job(path)
        if not job.done:
            raise ValueError(f"{str(path)!r} is a job that is not done: {job.why_not or 'run its study first'}")
        return job
    if not (path / "study.toml").is_file():
        raise ValueError(f"JOB must be a directory RUN/jobs/METHOD-SEED, or that of a run, got {str(path)!r}")
    run = Run(path)
    done = run.done
    if len(done) == 1:
        return done[0]
    if not done:
        damaged = next((f"; {damage}" for damage in run.damaged.values()), "")
        raise ValueError(f"no job of the run {str(path)!r} is done{damaged}")
    from multitudes.study.leaderboard import leaderboard  # here: one job is read without metrics

    best = next(row for row in leaderboard(run) if not row.baseline)
    example = run.job(best.name, best.seeds[0]).directory
    names = ", ".join(job.name for job in done)
    raise ValueError(f"{str(path)!r} has {len(done)} jobs ({names}): say which, such as {str(example)!r}, the best")
