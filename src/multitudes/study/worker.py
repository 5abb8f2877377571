"""One job of a study, a method with a seed: trained, measured and written down, from its `config.json` alone.

    python -m multitudes.study.worker RUN/jobs/packed-0

A job imports what trains and measures, and nothing that plans, plots or talks to a cluster. It can be killed at any
moment and run again: training goes on from its last checkpoint, and the job is done when its `metrics.json` is there.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from multitudes.core.checks import check_seed, needed
from multitudes.core.gaussian import gaussian_nll
from multitudes.core.multitude import Criterion, Multitude
from multitudes.core.predictive import Predictive
from multitudes.core.seeding import seeded
from multitudes.data import Data, Loader
from multitudes.data.splits import spread
from multitudes.evaluation.evaluate import evaluate
from multitudes.evaluation.scores import Evaluation, plain_number
from multitudes.metrics import ECE, MCE, NLL, RMSE, Accuracy, LogDensity, read_rows
from multitudes.storage.save import save
from multitudes.study import costs
from multitudes.study.job_data import ScaledBatches, data_of, device_of
from multitudes.study.methods import METHODS, Method, method_of, unfit
from multitudes.study.networks import build_network, outputs_of
from multitudes.study.store import write_atomically
from multitudes.training.fit import Epoch, Progress, fit
from multitudes.training.recorder import Recorder

__all__ = ["main", "run"]

SAVED_MEMBERS = 16
"""The most members or draws whose predictions are saved."""
GROUPS = 64
"""The most groups of members or draws that the scores of a size are taken over."""
SETTLING = 2048
"""The most training inputs that batch-norm statistics are computed on."""
EVALUATION_SEED = 0
"""Of all jobs alike, so that they see the same shifted images."""


def run(directory: str | Path, device: str | None = None, accelerator: Any = None) -> None:
    """Run the job in a directory, on its configuration's device or another; does nothing where it is done.

    Failures are written to `log.jsonl`, one sentence, before they are raised. With a Hugging Face `Accelerator` all
    its processes call this: all train, on its devices, and the main one measures and writes.
    """
    directory = Path(directory)
    leads = accelerator is None or accelerator.is_main_process
    if not (directory / "metrics.json").is_file():
        log = _Log(directory / "log.jsonl" if leads else None)
        try:
            _run(_Job.read(directory, device, accelerator), log)
        except Exception as error:
            log("failed", message=_sentence(error))
            raise
    if leads:
        (directory / "checkpoint.safetensors").unlink(missing_ok=True)
        shutil.rmtree(directory / "recording", ignore_errors=True)


def _run(job: _Job, log: _Log) -> None:
    start, commit = time.time(), costs.commit()  # now: the files may change while this runs
    log("start", message=f"{job.method.name} on {job.data.name}, seed {job.seed}, {job.device}")
    with seeded(job.seed):
        network = build_network(job.config["model"], job.data.shape, job.outputs, job.directory)
        single = job.prepared(METHODS["single"].build(network, job.example, {}, job.seed))
        net = job.prepared(job.method.build(network, job.example, job.settings, job.seed))
        steps = job.step_costs(net, single)
        net, history = _trained(job, net, log)
        if not job.leads:
            return
        log("evaluate", message="measuring")
        paid = _costs(job, net, single, history, steps)
        scores, by_size, arrays = _measured(job, net)
    save(net, job.directory / "model.safetensors")
    write_atomically(job.directory / "predictions.npz", arrays)
    result = {
        "scores": scores.table(),
        "by_size": by_size,
        "costs": paid,
        "history": [asdict(epoch) for epoch in history],
        "machine": costs.machine(job.device),
        "versions": costs.versions(),
        "commit": commit,
        "seconds": time.time() - start,
    }
    write_atomically(job.directory / "metrics.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    log("done", seconds=result["seconds"])


# -- what is asked for -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """The configuration of a job, read and checked."""

    directory: Path
    config: Mapping[str, Any]
    data: Data
    method: Method
    settings: Mapping[str, Any]
    seed: int
    device: torch.device
    accelerator: Any = None

    @classmethod
    def read(cls, directory: Path, device: str | None, accelerator: Any) -> _Job:
        path = directory / "config.json"
        if not path.is_file():
            raise ValueError(f"directory must be that of a job, got {str(directory)!r}, which has no config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["version"] != 1:
            raise ValueError(f"version of {str(path)!r} must be 1, got {config['version']!r}")
        method = method_of(config["method"])
        settings = method.complete(config["settings"])
        check_seed(config["seed"])
        where = accelerator.device if accelerator else device_of(device or config.get("device", "cpu"))
        data = data_of(config["data"], directory)
        if reason := unfit(method, data.shape):
            raise ValueError(reason)
        return cls(directory, config, data, method, settings, config["seed"], where, accelerator)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes."""
        return self.accelerator is None or self.accelerator.is_main_process

    @property
    def outputs(self) -> int:
        return outputs_of(self.data.task, self.data.outputs)

    @property
    def loader(self) -> Loader:
        """The batches to train on."""
        part, training = self.data.train, self.config["training"]
        size = min(training["batch_size"], len(part))
        alone = len(part) % size == 1 and len(part) > 1  # a batch of one has no variance to normalise by
        return Loader(part, self.data, size, self.device, training.get("augment"), seed=self.seed, drop_last=alone)

    @property
    def example(self) -> Tensor:
        """A few inputs as a network gets them, on the CPU."""
        return self.data.normalised(self.data.train.x[:8])

    def prepared(self, net: Multitude) -> Multitude:
        """On the device and laid out as for training, with the task of the data and the draws of the evaluation."""
        net.task = "classification" if self.data.classes else "gaussian"
        net.draws = self.config["evaluation"].get("draws", net.draws)
        if self.config["training"].get("channels_last"):
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net.to(self.device)

    def arguments(self, method: Method, net: Multitude) -> dict[str, Any]:
        """Those of `fit`, for a network that is trained by a method."""
        own = {k: v for k, v in self.config["training"].items() if k not in ("batch_size", "augment")}
        settings = self.settings if method is self.method else method.complete()
        criterion: Criterion | None = None if self.data.classes else _gaussian
        return {**method.train(net, own, settings), "criterion": criterion, "dataset_size": len(self.data.train)}

    def step_costs(self, net: Multitude, single: Multitude) -> tuple[costs.Step, costs.Step]:
        """Of a training step, the method's and a single network's."""
        x, y = next(iter(self.loader))

        def cost(method: Method, net: Multitude) -> costs.Step:
            return costs.training_cost(net, x, y, lambda net: self.arguments(method, net))

        base = cost(METHODS["single"], single)
        return base if self.method.name == "single" else cost(self.method, net), base


def _gaussian(prediction: Tensor, y: Tensor) -> Tensor:
    return gaussian_nll(prediction, y[:, None])


# -- training ----------------------------------------------------------------------------------------------


class _Record:
    """Records the network after the steps at which it is due, and each of them once, also where training resumes."""

    def __init__(self, recorder: Recorder, times: list[int]) -> None:
        self.recorder, self.times = recorder, times

    def __call__(self, progress: Progress) -> None:
        due = not progress.epoch_ended and progress.step in self.times
        if due and self.recorder.count <= self.times.index(progress.step):
            self.recorder.record()


def _trained(job: _Job, net: Multitude, log: _Log) -> tuple[Multitude, list[Epoch]]:
    """What predicts, and what each epoch was like."""
    loader, checkpoint = job.loader, job.directory / "checkpoint.safetensors"
    arguments = job.arguments(job.method, net)
    batches = len(loader) // (job.accelerator.num_processes if job.accelerator else 1)  # of this process, an epoch
    times = job.method.times(arguments["epochs"] * batches, job.settings)
    recording = job.directory / "recording"
    if job.leads and not checkpoint.is_file():  # from the beginning
        shutil.rmtree(recording, ignore_errors=True)
    records = times and job.leads
    recorder = Recorder(net, keep=len(times), folder=recording, resume=True) if records else None
    started = time.monotonic()

    def tell(progress: Progress) -> None:
        if progress.epoch_ended:
            seconds = time.monotonic() - started
            log(
                "epoch", epoch=progress.epoch, epochs=progress.epochs, loss=plain_number(progress.loss), seconds=seconds
            )

    callbacks = (tell,) if recorder is None else (_Record(recorder, times), tell)
    history = fit(
        net, loader, **arguments, callbacks=callbacks, checkpoint=checkpoint, seed=job.seed, progress=False,
        accelerator=job.accelerator,
    )  # fmt: skip
    if not job.leads:
        return net, history
    x = job.data.normalised(job.data.train.x[:SETTLING]).to(job.device)
    return job.prepared(job.method.finish(net, recorder, x, job.settings, job.seed)), history


# -- measuring ---------------------------------------------------------------------------------------------


def _costs(
    job: _Job, net: Multitude, single: Multitude, history: list[Epoch], steps: tuple[costs.Step, costs.Step]
) -> dict[str, float]:
    x = job.data.normalised(job.data.test.x[: costs.BATCH]).to(job.device)
    step, base = steps
    seconds = sum(epoch.seconds for epoch in history)
    longer = len(history) / job.config["training"]["epochs"]

    def of(net: Multitude, step: costs.Step, batch: int | None, seconds: float) -> tuple[dict[str, float], int]:
        speed = costs.inference_cost(net, x, batch)
        return {
            "parameters": costs.parameters(net),
            "multiply_adds": costs.multiply_adds(net, x),
            "training_seconds": seconds,
            "inference_per_second": speed.per_second,
            "peak_memory_bytes": step.peak_bytes,
        }, speed.batch

    own, batch = of(net, step, None, seconds)
    if job.method.name == "single":
        return costs.with_ratios(own, own)
    # What the single network would have taken: its time a step, for as many steps as it makes.
    return costs.with_ratios(own, of(single, base, batch, seconds * base.seconds / step.seconds / longer)[0])


def _measured(job: _Job, net: Multitude) -> tuple[Evaluation, dict[str, Any], bytes]:
    """All scores, those by size of the ensemble, and the predictions as a NumPy archive."""
    data, options = job.data, job.config["evaluation"]
    size = options.get("batch_size", 256)
    bins = {"bins": options.get("bins", 15), "min_count": options.get("min_count", 1)}
    how = {"preprocess": data.preprocess, "scale": data.target_std, "seed": EVALUATION_SEED, "progress": False, **bins}
    # Criteria of out-of-distribution inputs are of classes.
    ood = {name: ScaledBatches(data, x, size=size) for name, x in data.ood.items()} if data.classes else {}
    predictions = _Predictions(data, _Growth(options.get("sizes", (1, 2, 4, 8, 16)), data, **bins))
    scores = evaluate(net, ScaledBatches(data, data.test.x, data.test.y, size), ood=ood, watch=predictions, **how)
    if options.get("shift"):
        draws, net.draws = net.draws, options.get("shift_draws") or net.draws
        corrupted = evaluate(
            net, _corruptible(data, options.get("shift_limit"), size), shift=options["shift"],
            severities=options.get("severities", (1, 2, 3, 4, 5)), tasks="scores", **how,
        )  # fmt: skip
        net.draws = draws
        scores = Evaluation(scores.scores | {name: corrupted.scores[name] for name in corrupted if "shift/" in name})
    return scores, predictions.growth.table(), predictions.archive()


def _corruptible(data: Data, limit: int | None, size: int) -> ScaledBatches:
    """The test part, or as much of it as shall be corrupted, of each class its share."""
    rows = torch.arange(len(data.test))
    if limit is not None and limit < len(rows):
        rows = spread(data.test.y, limit, EVALUATION_SEED)
    return ScaledBatches(data, data.test.x[rows], data.test.y[rows], size)


class _Predictions:
    """Collects the predictions while they are scored, for the page."""

    def __init__(self, data: Data, growth: _Growth) -> None:
        self.data, self.growth = data, growth
        self.parts: dict[str, list[Tensor]] = {}

    def __call__(self, ood: str | None, predicted: Predictive, target: Tensor | None) -> None:
        part = predicted.cpu()
        if ood is None:
            self.growth.update(part, None if target is None else target.cpu())
        for name, tensor in self._arrays(part).items():
            if ood is None or name == "members":
                self.parts.setdefault(name if ood is None else f"ood/{ood}/{name}", []).append(tensor)

    def _arrays(self, part: Predictive) -> dict[str, Tensor]:
        """Of a batch; numbers in their own units."""
        data = self.data
        if data.classes:
            return {"probs": part.probs.float(), "members": part.member_probs[:SAVED_MEMBERS].half()}
        members = data.in_units(part.member_values[:SAVED_MEMBERS, :, 0])
        return {"mean": data.in_units(part.mean[:, 0]), "std": part.std[:, 0] * data.target_std, "members": members}

    def archive(self) -> bytes:
        """All of it as a NumPy archive."""
        arrays = {name: torch.cat(parts, int(name.endswith("members"))) for name, parts in self.parts.items()}
        file = io.BytesIO()
        np = needed("numpy", "study", "the predictions of a job")
        np.savez_compressed(file, **{name: tensor.numpy() for name, tensor in arrays.items()}, target=self.data.test.y)
        return file.getvalue()


class _Growth:
    """Scores by the number of members or draws: over groups of so many, none of which is in two."""

    def __init__(self, sizes: Any, data: Data, bins: int, min_count: int) -> None:
        self.sizes, self.data, self.bins = sorted(set(sizes)), data, (bins, min_count)
        self.metrics: dict[int, dict[str, Metric]] = {}

    def update(self, part: Predictive, target: Tensor | None) -> None:
        for size in [size for size in self.sizes if size <= part.members]:
            found = self.metrics.setdefault(size, self._made())
            for start in range(0, min(part.members - size + 1, GROUPS * size), size):
                group = Predictive(part.predictions[start : start + size], part.task)
                rows = (read_rows(group, target),) if self.data.classes else (group, target)
                for metric in found.values():
                    metric.update(*rows)

    def _made(self) -> dict[str, Metric]:
        if self.data.classes:
            return {"nll": NLL(), "accuracy": Accuracy(), "ece": ECE(*self.bins), "mce": MCE(*self.bins)}
        scale = self.data.target_std
        return {"nll": LogDensity(scale=scale), "rmse": RMSE(scale=scale)}

    def table(self) -> dict[str, Any]:
        """`{"sizes": [...], "nll": [...], ...}`."""
        sign = {"nll": 1 if self.data.classes else -1}  # of a log density
        rows = self.metrics.values()
        columns = {
            name: [plain_number(sign.get(name, 1) * float(row[name].compute())) for row in rows]
            for name in self._made()
        }
        return {"sizes": list(self.metrics), **columns}


# -- writing -----------------------------------------------------------------------------------------------


class _Log:
    """`log.jsonl`: a line for every event, on the disk at once."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def __call__(self, event: str, **what: Any) -> None:
        if self.path is None or not self.path.parent.is_dir():
            return  # where there is no job, there is none to tell of
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "event": event, **what}) + "\n")


def _sentence(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, ValueError) and first else f"{type(error).__name__}: {first}".rstrip(": ")


def main(arguments: list[str] | None = None) -> None:
    """The command line of one job."""
    parser = argparse.ArgumentParser(prog="python -m multitudes.study.worker", description="Run one job of a study.")
    parser.add_argument("directory", help="RUN/jobs/METHOD-SEED, in which is a config.json")
    parser.add_argument("--device", help="cpu, cuda or auto, in place of the configuration's")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process without a traceback, as SIGTERM does
    run(given.directory, given.device)


if __name__ == "__main__":
    main()
