"""Run one job of a study, a method with a seed: train, measure and save it, using only its `config.json`.

    python -m multitudes.lab.study.run.worker RUN/jobs/packed-0

A job does not import planning, plotting or cluster code. It can be killed at any moment and run again: training resumes
from the last checkpoint, and the job is done once its `metrics.json` exists.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multitudes.base.archives import write_arrays
from multitudes.base.sealed_files import DamagedError, open_own
from multitudes.ensemble.multitude import Multitude
from multitudes.evaluation.scores import plain_number
from multitudes.files.save import save
from multitudes.lab.study.run import costs
from multitudes.lab.study.run.measurement import calibrate_network, measure
from multitudes.lab.study.run.store import PREDICTIONS, Job
from multitudes.lab.study.spec.assignment import Assignment, Batches
from multitudes.methods.registry import Recording
from multitudes.networks.seeds import seeded
from multitudes.training.checkpoint import saved_step
from multitudes.training.fit import fit
from multitudes.training.recorder import Recorder
from multitudes.training.trainer import Epoch, Progress

BATCH_NORM_ROWS = 2048
"""Maximum number of training inputs for batch-norm statistics."""


def run(directory: str | Path, device: str | None = None, accelerator: Any = None) -> None:
    """Run the job in a directory, on its configured device or another, unless it is done.

    Failures are logged to `log.jsonl` as one sentence before they are raised. With a Hugging Face `Accelerator` every
    process calls this: all of them train, on its devices, and the main one measures and writes.
    """
    directory = Path(directory)
    is_main = accelerator is None or accelerator.is_main_process
    if not Job(directory).done:
        log = _Log(directory / "log.jsonl" if is_main else None)
        try:
            _run(Assignment.read(directory, device, accelerator), log)
        except Exception as error:
            log("failed", message=_sentence(error))
            raise
    if is_main:
        (directory / "checkpoint.safetensors").unlink(missing_ok=True)
        shutil.rmtree(directory / "recording", ignore_errors=True)


def _run(job: Assignment, log: _Log) -> None:
    start, commit = time.time(), costs.commit()  # read now: the files may change during the run
    log("start", message=f"{job.method.name} on {job.data.name}, seed {job.seed}, {job.device}")
    with seeded(job.seed):
        network = job.network()
        single, net = job.as_single.convert(network), job.convert(network)
        batch = next(iter(job.loader))
        steps = (
            costs.TrainingStep(net, *batch, job.arguments),
            costs.TrainingStep(single, *batch, job.as_single.arguments),
        )
        memory = [step.peak_bytes() for step in steps]
        net, history = _trained(job, net, log)
        if not job.is_main:
            return
        log("evaluate", message="measuring")
        paid = _costs(job, net, single, memory)
        paid["training_seconds"] = sum(epoch.seconds for epoch in history)
        final = calibrate_network(net, job.data, job.config["evaluation"])
        found = measure(final, job.data, job.config["evaluation"])
    save(final, job.directory / "model.safetensors")
    write_arrays(job.directory / PREDICTIONS, found.predictions, "the predictions of a job")
    result = {
        "scores": found.scores.table(),
        "by_size": found.by_size,
        "costs": paid,
        "history": [asdict(epoch) for epoch in history],
        "machine": costs.machine(job.device),
        "versions": costs.versions(),
        "commit": commit,
        "seconds": time.time() - start,
    }
    Job(job.directory).write_metrics(result)
    log("done", seconds=result["seconds"])


def _costs(job: Assignment, net: Multitude, single: Multitude, memory: list[int]) -> dict[str, float]:
    """Return costs that do not depend on the machine, also relative to the single network; times are measured later."""
    x = job.data.normalised(job.data.test.x[:1]).to(job.device)
    own, base = (
        {"parameters": costs.parameters(each), "multiply_adds": costs.multiply_adds(each, x), "peak_memory_bytes": peak}
        for each, peak in zip((net, single), memory, strict=True)
    )
    return own | {f"{name}_ratio": value / base[name] for name, value in own.items()}


# -- training ----------------------------------------------------------------------------------------------


def _resumed(job: Assignment, net: Multitude, times: list[int], log: _Log) -> Recorder | None:
    """Return the job's recorder if it records; remove a damaged checkpoint or recording."""
    recording = job.directory / "recording"

    def recorder() -> Recorder | None:
        step = saved_step(job.checkpoint, job.identity)
        if step is None:  # start over
            shutil.rmtree(recording, ignore_errors=True)
        if not times:
            return None
        found = Recorder(net, keep=len(times), folder=recording, resume=True, of=job.identity)
        if found.count < sum(time <= (step or 0) for time in times):
            raise DamagedError(recording, "a checkpoint is missing in it")
        return found

    try:
        return recorder()
    except ValueError as error:
        log("restart", message=f"restarting the training: {_sentence(error)}")
        job.checkpoint.unlink(missing_ok=True)
        return recorder()


def _trained(job: Assignment, net: Multitude, log: _Log) -> tuple[Multitude, list[Epoch]]:
    """Train the network; return the final one, and its epochs."""
    loader = job.loader
    arguments = job.arguments(net)
    processes = job.accelerator.num_processes if job.accelerator else 1
    batches = len(loader) // processes  # per epoch, in this process
    times = job.method.times(arguments["epochs"] * batches, job.settings)
    recorder = _resumed(job, net, times, log) if job.is_main else None
    started = time.monotonic()

    def log_epoch(progress: Progress) -> None:
        if progress.epoch_ended:
            loss, seconds = plain_number(progress.loss), time.monotonic() - started
            log("epoch", epoch=progress.epoch, epochs=progress.epochs, loss=loss, seconds=seconds)

    callbacks = (log_epoch,) if recorder is None else (Recording(recorder, times), log_epoch)
    history = fit(
        net, loader, **arguments, **job.whole_training(times), callbacks=callbacks, checkpoint=job.checkpoint,
        checkpoint_of=job.identity, seed=job.seed, progress=False, accelerator=job.accelerator,
    )  # fmt: skip
    if not job.is_main:
        return net, history
    x = job.data.normalised(job.data.train.x[:BATCH_NORM_ROWS]).to(job.device)
    finished = job.method.finish(net, recorder, x, job.settings, job.seed)
    train, held_out = (Batches(job.data, p.x, p.y, 1024, job.device) for p in (job.data.train, job.data.validation))
    return job.prepare(job.method.after(finished, train, held_out, job.settings, job.seed)), history


# -- writing -----------------------------------------------------------------------------------------------


class _Log:
    """Append events to `log.jsonl`, one line each, flushed at once."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def __call__(self, event: str, **what: Any) -> None:
        if self.path is None or not self.path.parent.is_dir():
            return  # no job directory, nothing to log
        with open_own(self.path, "a") as file:
            file.write(json.dumps({"time": time.time(), "event": event, **what}) + "\n")


def _sentence(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, ValueError) and first else f"{type(error).__name__}: {first}".rstrip(": ")


def main(arguments: list[str] | None = None) -> None:
    """Run one job from the command line."""
    program = "python -m multitudes.lab.study.run.worker"
    parser = argparse.ArgumentParser(prog=program, description="Run one job of a study.")
    parser.add_argument("directory", help="RUN/jobs/METHOD-SEED, which contains a config.json")
    parser.add_argument("--device", help="cpu, cuda or auto; replaces that of the configuration")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end the process without a traceback, like SIGTERM
    run(given.directory, given.device)


if __name__ == "__main__":
    main()
