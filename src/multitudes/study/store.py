"""The run directory of a study: its files, and what is in them.

    study.toml           the specification, with every default filled in
    data.mtdata          the prepared data, unless they come with the package
    data.json            a description of the data: fingerprint, kind, task and shape
    costs.json           how long predicting and training take, measured when all jobs are done
    baselines.json       what predicts without a network, and how well
    jobs/METHOD-SEED/    config.json, log.jsonl, model.safetensors, predictions.npz and, last, metrics.json
    report.html

A file is written under another name and renamed when it is whole. A job is done when its `metrics.json` is there. All
is JSON, TOML, safetensors and NumPy arrays, so that reading a run never runs code.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multitudes.core.checks import needed
from multitudes.core.files import UNFINISHED, replacing

__all__ = ["Job", "Run", "failure_in", "write_atomically"]


def write_atomically(path: str | Path, data: bytes | str) -> Path:
    """Write a file whole or not at all, whenever the process or the machine dies; gives its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


class Job:
    """One method with one seed: its directory, and the files in it."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.name = self.directory.name
        """METHOD-SEED; METHOD is the study's name of it, such as `packed_8`."""
        self.label = self.name.rpartition("-")[0]

    @property
    def seed(self) -> int:
        """The seed of everything random in it."""
        return int(self.name.rpartition("-")[2])

    @property
    def done(self) -> bool:
        """Whether its results are there."""
        return (self.directory / "metrics.json").is_file()

    @property
    def started(self) -> bool:
        """Whether there is work that would be lost with its directory: results, or a checkpoint."""
        return self.done or (self.directory / "checkpoint.safetensors").is_file()

    @property
    def config(self) -> dict[str, Any] | None:
        """Its configuration; None before it was prepared."""
        path = self.directory / "config.json"
        return _json(path) if path.is_file() else None

    @property
    def metrics(self) -> dict[str, Any]:
        """Scores, costs and history."""
        return _json(self.directory / "metrics.json")

    @property
    def predictions(self) -> dict[str, Any]:
        """NumPy arrays by name; none where there is no `predictions.npz`."""
        path = self.directory / "predictions.npz"
        if not path.is_file():
            return {}
        with needed("numpy", "study", "the predictions of a job").load(path, allow_pickle=False) as arrays:
            return dict(arrays)

    def events(self, start: int = 0) -> tuple[list[dict[str, Any]], int]:
        """The events in `log.jsonl` from byte `start` on, of whole lines, and the byte at which they end."""
        try:
            with (self.directory / "log.jsonl").open("rb") as file:
                file.seek(start)
                new = file.read()
        except FileNotFoundError:
            return [], start
        end = new.rfind(b"\n") + 1
        return [event for line in new[:end].splitlines() if (event := _event(line))], start + end

    @property
    def failure(self) -> str | None:
        """Why it failed, in a sentence; None where it is done, has not been run, or was interrupted."""
        events, _ = self.events()
        return failure_in(events[-1]) if events and not self.done else None

    def clear(self) -> None:
        """Remove its directory, the results first, so that it never seems done."""
        (self.directory / "metrics.json").unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {'done' if self.done else 'not done'})"


class Run:
    """A run directory, and the jobs of its `study.toml`; those of an earlier one are left where they are.

    >>> import tempfile
    >>> run = Run(tempfile.mkdtemp())
    >>> _ = write_atomically(run.spec_path, "seeds = [0, 1]\\n[methods.single]\\n[methods.packed]\\nmembers = 4\\n")
    >>> _ = write_atomically(run.job("single", 0).directory / "metrics.json", "{}")
    >>> run.done, len(run.missing)
    ([Job('single-0', done)], 3)
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.spec_path = self.directory / "study.toml"
        self.data_path = self.directory / "data.mtdata"
        self.about_path = self.directory / "data.json"
        self.times_path = self.directory / "costs.json"
        self.baselines_path = self.directory / "baselines.json"
        self.report_path = self.directory / "report.html"

    def job(self, label: str, seed: int) -> Job:
        """The job of a method, by the study's name of it, and a seed; it need not exist yet."""
        return self.named(f"{label}-{seed}")

    def named(self, name: str) -> Job:
        """The job of a name, METHOD-SEED."""
        return Job(self.directory / "jobs" / name)

    @property
    def spec(self) -> dict[str, Any]:
        """The specification, as TOML has it."""
        if not self.spec_path.is_file():
            raise ValueError(f"{str(self.directory)!r} is no run directory: there is no study.toml in it")
        spec = tomllib.loads(self.spec_path.read_text(encoding="utf-8"))
        if not isinstance(spec.get("methods"), dict) or not isinstance(spec.get("seeds"), list):
            raise ValueError(f"{str(self.directory)!r} is no run directory: its study.toml has not been run")
        return spec

    @property
    def about(self) -> dict[str, Any] | None:
        """The description of the data; None before they were prepared."""
        return _json(self.about_path) if self.about_path.is_file() else None

    @property
    def times(self) -> dict[str, Any] | None:
        """How long predicting and training take, by method (`timing.py`); None before that was measured."""
        return _json(self.times_path) if self.times_path.is_file() else None

    @property
    def baselines(self) -> dict[str, Any] | None:
        """What predicts without a network, and how well (`baselines.py`); None before that was measured."""
        return _json(self.baselines_path) if self.baselines_path.is_file() else None

    @property
    def jobs(self) -> list[Job]:
        """All jobs of the study, method by method."""
        spec = self.spec
        return [self.job(label, seed) for label in spec["methods"] for seed in spec["seeds"]]

    @property
    def done(self) -> list[Job]:
        """Those that have results."""
        return [job for job in self.jobs if job.done]

    @property
    def missing(self) -> list[Job]:
        """Those that have no results yet, failed or not."""
        return [job for job in self.jobs if not job.done]

    @property
    def failed(self) -> dict[str, str]:
        """Why jobs failed when they were last run, by name."""
        return {job.name: failure for job in self.jobs if (failure := job.failure)}

    def clean(self) -> None:
        """Remove the unfinished files of a process that was killed."""
        for path in [*self.directory.glob(f".*{UNFINISHED}"), *self.directory.glob(f"jobs/*/.*{UNFINISHED}")]:
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other study can run here; the lock ends with the process."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / ".lock").open("w") as file:
            if os.name == "posix":
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(f"another study is running in {str(self.directory)!r}: wait for it") from None
                except OSError:
                    pass  # a file system without locks
            yield

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} must be a JSON object, got {type(found).__name__}")
    return found


def failure_in(event: Mapping[str, Any]) -> str | None:
    """Why a job failed, where this is the event of that."""
    return str(event.get("message") or "it gave no reason") if event.get("event") == "failed" else None


def _event(line: bytes) -> dict[str, Any]:
    """A line of a log; one that was cut off when the machine died is empty."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
