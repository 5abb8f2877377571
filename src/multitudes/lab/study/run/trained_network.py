"""A trained network with its data, loaded from a job's directory, and its export to ONNX with raw inputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitudes.base.sealed_files import write_atomically
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.predictor import Predictor
from multitudes.evaluation.calibrate import Calibrated
from multitudes.evaluation.predict import predictions
from multitudes.files.onnx import RawInputs, write_onnx
from multitudes.files.onnx_exporter import input_names
from multitudes.files.save import load
from multitudes.lab.data import Data
from multitudes.lab.data.tables.features import Category, Date, features_of
from multitudes.lab.data.tables.table import TableEncoder
from multitudes.lab.data.texts import PADDING, TextEncoder
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.spec.assignment import Batches, data_of, precision_on
from multitudes.lab.study.spec.hub_models import is_hub
from multitudes.lab.study.spec.network_sources import build_network, code_of, file_digest, outputs_of
from multitudes.networks.devices import device_of
from multitudes.tasks.predictive import Predictive
from multitudes.training.precision import check_precision

EXAMPLES = 64
"""Number of test inputs for comparing the exported file with torch."""

TOLERANCE = 1e-3
"""Maximum difference between the file and torch, in standardised units."""

IMAGE, TOKENS = "image", "tokens"
"""Names of pixel inputs and token inputs."""


@dataclass(frozen=True)
class Trained:
    """The trained network of a job, with its data."""

    job: Job
    net: Multitude | Calibrated
    data: Data
    device: torch.device

    @classmethod
    def read(
        cls, path: str | Path, device: str | None = None, draws: int | None = None, model_file: str | None = None
    ) -> Trained:
        """Read from the directory of a job, or of a run with a single job; the network is in evaluation mode.

        No code named in the directory is run. A user's network is built from `model_file`: FILE.py:FUNCTION, or FILE.py
        to use the function name of the training.
        """
        where = device_of(device)
        job = find_job(path)
        config = job.config or {}
        for key in ("data", "model"):
            if not isinstance(config.get(key), dict):
                raise ValueError(f"{str(job.directory / 'config.json')!r} must have a table {key!r}")
        data = data_of(config["data"], job.directory)
        own = _custom_model(job, config["model"], model_file)
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
        """Predict inputs like those of its data, `[N, ...]`, on the CPU, with the network or with `by`.

        Pass `seed=None` for a network without draws.
        """
        net, prepare = by or self.net, lambda x, _: self.data.preprocess(x)
        options = {} if seed is None else {"seed": seed}
        with mixed_precision(self.device, precision):
            parts = predictions(net, Batches(self.data, x), progress, self.device, prepare, **options)
            return Predictive.concat(part.cpu() for part, _ in parts)

    @property
    def multitude(self) -> Multitude:
        """The network without its calibration."""
        return self.net.net if isinstance(self.net, Calibrated) else self.net


def _custom_model(job: Job, model: Mapping[str, Any], given: str | None) -> dict[str, Any] | None:
    """Return the user's network of a job, built from the given file; None if the job has no user code."""
    named = model.get("file")
    if given is None:
        if named is not None:
            code = f"{model.get('name')} of {Path(str(named)).name}"
            raise ValueError(
                f"{str(job.directory)!r} needs your own code to build its network, {code}; code from a run directory "
                "is never executed: pass --model-file FILE.py, a file that you trust"
            )
        return None
    if named is None:
        raise ValueError(
            f"--model-file={given} is not needed: the network of {str(job.directory)!r} comes with this library"
        )
    file, function = code_of(given)
    if not Path(file).is_file():
        raise ValueError(f"--model-file must be a Python file, got {file!r}, which does not exist")
    if model.get("sha256") not in (None, file_digest(file)):
        warnings.warn(f"{file} is not the file that {job.name} was trained with", stacklevel=3)
    return {"file": str(Path(file).resolve()), "name": function or model["name"], "settings": model.get("settings")}


def mixed_precision(device: torch.device, precision: str | None) -> AbstractContextManager[Any]:
    """Return an autocast context for this precision; raise if the machine does not support it."""
    precision = precision_on(precision, device)
    check_precision(precision, device)
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def find_job(path: str | Path) -> Job:
    """Find the job in a directory of a job, or of a run with a single job."""
    path = Path(path)
    if (path / "config.json").is_file():
        job = Job(path)
        if not job.done:
            raise ValueError(f"{str(path)!r} is a job without results: {job.why_not or 'run its study first'}")
        return job
    if not (path / "study.toml").is_file():
        raise ValueError(f"JOB must be a job directory, RUN/jobs/METHOD-SEED, or a run directory, got {str(path)!r}")
    run = Run(path)
    done = run.done
    if len(done) == 1:
        return done[0]
    if not done:
        damaged = next((f"; {damage}" for damage in run.damaged.values()), "")
        raise ValueError(f"no job of the run {str(path)!r} has results{damaged}")
    from multitudes.lab.study.results.leaderboard import leaderboard  # local: reading one job needs no metrics

    best = next(row for row in leaderboard(run) if not row.baseline)
    example = run.job(best.name, best.seeds[0]).directory
    names = ", ".join(job.name for job in done)
    raise ValueError(f"{str(path)!r} has {len(done)} jobs ({names}): choose one, such as {str(example)!r}, the best")


# -- ONNX --------------------------------------------------------------------------------------------------


def export_inputs(data: Data) -> dict[str, tuple[str, str]]:
    """Return the inputs of the exported file by name: their type and content.

    They are the single columns of a table, the pixels of images, or the tokens of texts.
    """
    encoder = data.encoder
    if isinstance(encoder, TextEncoder):
        return {TOKENS: ("int32", f"[batch, {data.shape[0]}], and {PADDING} after the end of a text")}
    if not isinstance(encoder, TableEncoder):
        return {IMAGE: ("uint8", f"[batch, {', '.join(map(str, data.shape))}], pixels from 0 to 255")}
    date = "[batch], days since 1970-01-01 in UTC, NaN if missing"
    kinds = {Category: ("string", "[batch], '' if missing"), Date: ("float64", date)}
    number = "float64", "[batch], NaN if missing"
    names = input_names([feature.column for feature in encoder.features], data.network_task.outputs)
    return {name: kinds.get(type(each), number) for name, each in zip(names, encoder.features, strict=True)}


def export(trained: Trained, path: Path, *, draws: int = 8, seed: int = 0) -> Path:
    """Write a trained network as one ONNX file, on the CPU, and verify it with onnxruntime on raw test inputs."""
    data = trained.data
    x = data.test.x[:EXAMPLES]
    raw, inputs = _raw(trained, x), x if data.kind.is_text else data.normalised(x)
    off = float((raw.prepare(raw.example) - inputs).abs().max())
    if not off <= TOLERANCE:
        raise ValueError(f"cannot recover the raw inputs of {data.name} from its features: the error is {off:.1e}")
    written = write_onnx(trained.net, path, inputs, draws=draws, seed=seed, tolerance=TOLERANCE, raw=raw)
    if (beside := tokenizer_path(data, path)) is not None:
        write_atomically(beside, data.encoder.features[0].plain()["tokenizer"])
    return written


def tokenizer_path(data: Data, path: Path) -> Path | None:
    """Return the path of the tokenizer file, for the `tokenizers` library; None if the data are not texts."""
    return path.with_suffix(".tokenizer.json") if data.kind.is_text else None


def _raw(trained: Trained, x: Tensor) -> RawInputs:
    data, encoder = trained.data, trained.data.encoder
    about: dict[str, Any] = {"method": (trained.job.config or {}).get("method"), "data": data.name}
    about |= {"classes": list(data.classes), "calibrated": isinstance(trained.net, Calibrated)}
    about["inputs"] = {name: {"type": kind, "holds": holds} for name, (kind, holds) in export_inputs(data).items()}
    if isinstance(encoder, TextEncoder):
        return RawInputs(
            {TOKENS: x}, lambda given: given[TOKENS], mean=data.target_mean, std=data.target_std, about=about
        )
    if not isinstance(encoder, TableEncoder):

        def pixels(given: Mapping[str, Tensor]) -> Tensor:
            return data.normalised(given[IMAGE])

        return RawInputs({IMAGE: x}, pixels, mean=data.target_mean, std=data.target_std, about=about)
    parts = x.flatten(1).split([len(feature.names) for feature in encoder.features], 1)
    example = {feature.column: feature.restored(part) for feature, part in zip(encoder.features, parts, strict=True)}

    def features(given: Mapping[str, Tensor]) -> Tensor:
        x = features_of(encoder.features, [given[feature.column] for feature in encoder.features])
        return data.normalised(x.reshape(-1, *data.shape))

    texts = {each.column: each.numbers() for each in encoder.features if isinstance(each, Category)}
    return RawInputs(example, features, texts, data.target_mean, data.target_std, about)
