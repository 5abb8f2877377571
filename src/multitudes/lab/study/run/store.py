"""The run directory of a study and its files.

    study.toml           the specification, with every default filled in
    data.mtdata          the prepared data, unless they come with the package; in a cross-validation, those of the first
                         fold, with data-1.mtdata, ... for the others; seeds and folds have the same order, so
                         METHOD-SEED is a method on a fold
    data.json            a description of the data: fingerprint, kind, task and shape
    costs.json           times of predicting and training, measured when all jobs are done
    baselines.json       scores of baselines without a network
    importance.json      importance of each column of a table
    jobs/METHOD-SEED/    config.json, log.jsonl, model.safetensors, predictions.safetensors and,
                         last, metrics.json
    report.html

Files are written under a temporary name and renamed when complete. Each contains its own checksum, its seal
(`base/sealed_files.py`). `metrics.json` lists the seals of the job's other files. A job is done if its `metrics.json`
exists and all its files are intact. Everything is JSON, TOML or safetensors, so reading a run never executes code: a
user's network is built from a file that the user passes, never from one that a run names.
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

from multitudes.base.archives import ARRAYS, read_tensors
from multitudes.base.sealed_files import (
    BLANK,
    UNFINISHED,
    DamagedError,
    check_seal,
    open_own,
    read_json,
    sealing,
    write_json,
)

REPEAT_JOB = "run the study's command again to repeat this job"
REWRITE = "run the study's command again to rewrite it"
SEALED = "# sha256 "
"""First line of a study.toml written by a run."""
PREDICTIONS = "predictions.safetensors"
FILES = ("config.json", "model.safetensors", PREDICTIONS)
"""Files whose seals `metrics.json` lists."""


class Job:
    """One method with one seed: its directory and files."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.name = self.directory.name
        """METHOD-SEED; METHOD is the name in the study, such as `packed_8`."""
        self.label = self.name.rpartition("-")[0]

    @property
    def seed(self) -> int:
        """Seed of all randomness in the job."""
        return int(self.name.rpartition("-")[2])

    @property
    def done(self) -> bool:
        """True if the results exist and are intact."""
        return (self.directory / "metrics.json").is_file() and self.damage is None

    @property
    def damage(self) -> str | None:
        """Description of what is wrong with the results; None if they are intact or do not exist yet."""
        if not (self.directory / "metrics.json").is_file():
            return None
        try:
            for name, seal in self._metrics()["files"].items():
                path = self.directory / name
                if check_seal(path) != seal:
                    raise DamagedError(path, "it does not belong to this metrics.json")
        except DamagedError as error:
            return f"{error}; {REPEAT_JOB}"
        return None

    @property
    def started(self) -> bool:
        """True if deleting the directory would lose work: results or a checkpoint."""
        return self.done or (self.directory / "checkpoint.safetensors").is_file()

    @property
    def config(self) -> dict[str, Any] | None:
        """Configuration; None before it is prepared."""
        path = self.directory / "config.json"
        if not path.is_file():
            return None
        config = read_json(path)
        for name in ("settings", "data", "model", "training", "evaluation"):
            if not isinstance(config.get(name, {}), dict):
                raise DamagedError(path, f"{name!r} must be a table")
        return config

    @property
    def metrics(self) -> dict[str, Any]:
        """Scores, costs and history."""
        metrics = self._metrics()
        del metrics["files"]
        return metrics

    def _metrics(self) -> dict[str, Any]:
        path = self.directory / "metrics.json"
        metrics = read_json(path)
        if fault := _fault(metrics):
            raise DamagedError(path, fault)
        return metrics

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write the results with the seals of the other files; this marks the job as done."""
        found = [self.directory / name for name in FILES]
        files = {path.name: check_seal(path) for path in found if path.is_file()}
        write_json(self.directory / "metrics.json", {"files": files, **metrics}, place=True)

    @property
    def predictions(self) -> dict[str, Any]:
        """NumPy arrays by name; empty if the file is missing."""
        path = self.directory / PREDICTIONS
        if not path.is_file():
            return {}
        tensors, _ = read_tensors(path, ARRAYS, "the predictions of a job")
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    def events(self, start: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Read the events of complete lines in `log.jsonl` from byte `start`; also return the byte where they end."""
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
        """Reason of the failure; None if the job is done, was not run, or was interrupted."""
        events, _ = self.events()
        return failure_in(events[-1]) if events and not self.done else None

    @property
    def why_not(self) -> str:
        """Reason for missing results: damaged or failed; empty if not run or interrupted."""
        return self.damage or self.failure or ""

    def clear(self) -> None:
        """Remove the directory, results first, so that it never appears done."""
        (self.directory / "metrics.json").unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {'done' if self.done else 'not done'})"


class Run:
    """A run directory with the jobs of its `study.toml`; jobs of earlier specifications are left alone.

    `code` is the user's file with a network, as FILE.py:FUNCTION, given by the caller; it is never read from the
    directory.

    >>> import tempfile
    >>> from multitudes.base.sealed_files import write_atomically
    >>> run = Run(tempfile.mkdtemp())
    >>> _ = write_atomically(run.spec_path, "seeds = [0, 1]\\n[methods.single]\\n[methods.packed]\\nmembers = 4\\n")
    >>> run.job("single", 0).write_metrics({"scores": {}, "costs": {}})
    >>> run.done, len(run.missing)
    ([Job('single-0', done)], 3)
    """

    def __init__(self, directory: str | Path, code: str | None = None) -> None:
        self.directory, self.code = Path(directory), code
        self.spec_path = self.directory / "study.toml"
        self.data_path = self.directory / "data.mtdata"
        self.about_path = self.directory / "data.json"
        self.times_path = self.directory / "costs.json"
        self.baselines_path = self.directory / "baselines.json"
        self.report_path = self.directory / "report.html"

    def fold_path(self, fold: int) -> Path:
        """Return the path of a fold's prepared data; the first fold uses the path of a run without folds."""
        return self.data_path if fold == 0 else self.directory / f"data-{fold}.mtdata"

    @property
    def folds(self) -> list[int]:
        """Seeds of a cross-validation, one per fold in order; empty without folds."""
        spec = self.spec
        data = spec.get("data")
        return list(spec["seeds"]) if isinstance(data, dict) and data.get("folds") else []

    def job(self, label: str, seed: int) -> Job:
        """Return the job of a method (by its name in the study) and seed; it need not exist yet."""
        return self.named(f"{label}-{seed}")

    def named(self, name: str) -> Job:
        """Return the job named METHOD-SEED."""
        return Job(self.directory / "jobs" / name)

    @property
    def spec(self) -> dict[str, Any]:
        """Specification as parsed from TOML."""
        if not self.spec_path.is_file():
            raise ValueError(f"{str(self.directory)!r} is not a run directory: it has no study.toml")
        try:
            text = self.spec_path.read_bytes()
            if text.startswith(SEALED.encode()):  # hand-written ones have no seal
                check_seal(self.spec_path)
            spec = tomllib.loads(text.decode())
        except DamagedError as error:
            raise DamagedError(self.spec_path, f"{error.what}; {REWRITE}") from error
        except (ValueError, OSError, RecursionError) as error:
            raise DamagedError(self.spec_path, f"it is not valid TOML ({error}); {REWRITE}") from error
        if not isinstance(spec.get("methods"), dict) or not isinstance(spec.get("seeds"), list):
            raise ValueError(f"{str(self.directory)!r} is not a run directory: its study.toml has not been run")
        for name in [*spec["methods"], *map(str, spec["seeds"])]:
            if not name or "/" in name or "\\" in name or "\0" in name or name.startswith("."):
                raise DamagedError(self.spec_path, f"{name!r} is not a valid name of a method or seed; {REWRITE}")
        return spec

    @property
    def about(self) -> dict[str, Any] | None:
        """Description of the data; None before they are prepared."""
        return read_json(self.about_path) if self.about_path.is_file() else None

    def write_spec(self, text: str) -> None:
        """Write the specification."""
        with sealing(self.spec_path) as unfinished:
            unfinished.write_text(f"{SEALED}{BLANK}\n{text}", encoding="utf-8")

    def write_table(self, name: str, table: Mapping[str, Any], of: Any = None) -> Path:
        """Write a file of the run with its inputs (`of`); the default is the current results."""
        return write_json(self.directory / name, {**table, "of": self.results if of is None else of})

    def read_table(self, name: str, of: Any = None) -> dict[str, Any] | None:
        """Read a file of `write_table`; None if it is missing, damaged, or made from other inputs."""
        try:
            table = read_json(self.directory / name)
        except DamagedError:
            return None
        return table if table.pop("of", None) == (self.results if of is None else of) else None

    @property
    def results(self) -> dict[str, str]:
        """Seals of the results of finished jobs."""
        return {job.name: check_seal(job.directory / "metrics.json") for job in self.done}

    @property
    def times(self) -> dict[str, Any] | None:
        """Times of predicting and training by method (`costs.py`); None before they are measured."""
        try:
            table = read_json(self.times_path)
        except DamagedError:
            return None
        of, timed, methods = table.pop("of", None), self.timed, table.get("methods")
        if not isinstance(of, dict) or not isinstance(methods, dict):
            return None
        own = {label: times for label, times in methods.items() if of.get(label) == timed.get(label)}
        return {**table, "methods": own} if own else None

    @property
    def timed(self) -> dict[str, list[str]]:
        """Timed job of each method, the first finished one, with the seal of its results."""
        first: dict[str, Job] = {}
        for job in self.done:
            first.setdefault(job.label, job)
        return {label: [job.name, check_seal(job.directory / "metrics.json")] for label, job in first.items()}

    @property
    def baselines(self) -> dict[str, Any] | None:
        """Scores of baselines without a network (`baselines.py`); None before they are measured."""
        about = self.about or {}
        return self.read_table(self.baselines_path.name, about.get("folds") or about.get("fingerprint", ""))

    @property
    def jobs(self) -> list[Job]:
        """All jobs of the study, method by method."""
        spec = self.spec
        return [self.job(label, seed) for label in spec["methods"] for seed in spec["seeds"]]

    @property
    def done(self) -> list[Job]:
        """Jobs with results."""
        return [job for job in self.jobs if job.done]

    @property
    def missing(self) -> list[Job]:
        """Jobs without results, failed or not."""
        return [job for job in self.jobs if not job.done]

    @property
    def failed(self) -> dict[str, str]:
        """Reasons of the last failures, by job name."""
        return {job.name: failure for job in self.jobs if (failure := job.failure)}

    @property
    def damaged(self) -> dict[str, str]:
        """Damage of results that are not intact, by job name."""
        return {job.name: damage for job in self.jobs if (damage := job.damage)}

    def clean(self) -> None:
        """Remove unfinished files of killed processes."""
        for path in [*self.directory.glob(f".*{UNFINISHED}"), *self.directory.glob(f"jobs/*/.*{UNFINISHED}")]:
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Prevent other studies from running here inside the context; the lock ends with the process."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with open_own(self.directory / ".lock", "a") as file:
            if os.name == "posix":
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(f"another study runs in {str(self.directory)!r}: wait for its end") from None
                except OSError:
                    pass  # a file system without locks
            yield

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"


def _fault(metrics: Mapping[str, Any]) -> str | None:
    """Describe what is wrong with the format of results; None if it is valid."""
    for name in ("files", "scores", "costs"):
        if not isinstance(metrics.get(name), dict):
            return f"{name!r} must be a table"
    for name, seal in metrics["files"].items():
        if name not in FILES or not isinstance(seal, str):
            return f"'files' names {name!r}, which is not a file of a job"
    for name, score in metrics["scores"].items():
        if not isinstance(score, dict) or not _is_number(score.get("value", "")) or type(score.get("count")) is not int:
            return f"the score {name!r} must have a value and a count"
    wrong = [name for name, cost in metrics["costs"].items() if not _is_number(cost)]
    return f"the cost {wrong[0]!r} must be a number" if wrong else None


def _is_number(value: Any) -> bool:
    """Return whether a value is a number as `plain_number` writes it: NaN is null, infinity is a string."""
    return value in (None, "inf", "-inf") or (isinstance(value, int | float) and not isinstance(value, bool))


def failure_in(event: Mapping[str, Any]) -> str | None:
    """Return the reason if an event is a failure; else None."""
    return str(event.get("message") or "unknown reason") if event.get("event") == "failed" else None


def _event(line: bytes) -> dict[str, Any]:
    """Parse a line of a log; empty if it was cut off by a crash."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}
