"""From a specification to jobs: one `config.json` for each method and seed, written once everything is checked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from multitudes.core.seeding import seeded
from multitudes.data import Data, load, save
from multitudes.study.methods import METHODS
from multitudes.study.networks import build_network, outputs_of
from multitudes.study.spec import NOTHING, Place, Spec
from multitudes.study.store import Job, Run, write_atomically

__all__ = ["StaleError", "planned", "prepare", "stale_jobs"]

VERSION = 1

Config = dict[str, Any]


class StaleError(ValueError):
    """Jobs have been done that the specification no longer asks for; `stale` has what changed, by job."""

    def __init__(self, run: Run, stale: Mapping[str, list[str]]) -> None:
        self.stale = dict(stale)
        groups: dict[str, list[str]] = {}
        for name, changes in self.stale.items():
            groups.setdefault("; ".join(changes), []).append(name)
        told = " ".join(f"{', '.join(names)}: {changes}." for changes, names in groups.items())
        count = "1 job is stale" if len(self.stale) == 1 else f"{len(self.stale)} jobs are stale"
        super().__init__(
            f"{count} in {str(run.directory)!r}, done with a different specification. {told} "
            f"Run them anew with --rerun-stale, or choose another --out"
        )


def prepare(spec: Spec, out: str | Path, *, rerun_stale: bool = False, say: Callable[[str], None] | None = None) -> Run:
    """Make a run directory ready: its data, a `config.json` for each job, and `study.toml`; gives the run.

    Everything is checked before anything is written: the data, that each method can be built, and that no job was done
    with another specification. Such jobs are an error, or with `rerun_stale` their results are removed. What is done
    already stays, and `run.missing` are the jobs to run. `say` is told what takes long.
    """
    run, say = Run(out), say or (lambda message: None)
    if run.directory.exists() and not run.directory.is_dir():
        raise ValueError(f"out must be a directory, got {str(out)!r}, which is a file")
    data, about = _data(spec, run, say)
    spec = spec.resolved(tuple(about["shape"]), about["task"])
    configs = planned(spec, about)
    stale = stale_jobs(run, configs)
    if stale and not rerun_stale:
        raise StaleError(run, stale)
    check_methods(spec, about, [label for label in spec.methods if _wanting(run, spec, label, stale)])
    with run.locked():
        run.clean()
        for name in stale:
            Job(run.directory / "jobs" / name).clear()
        _keep_data(run, data, about, embedded=spec.data.embedded)
        if spec.model.file is not None:
            write_atomically(run.directory / _kept_name(spec.model.file), Path(spec.model.file).read_bytes())
        for name, config in configs.items():
            _write_config(Job(run.directory / "jobs" / name), config)
        write_atomically(run.spec_path, spec.to_toml())
    return run


def _wanting(run: Run, spec: Spec, label: str, stale: Mapping[str, Any]) -> bool:
    """Whether there is a job of this method to run."""
    return any(job.name in stale or not job.done for job in (run.job(label, seed) for seed in spec.seeds))


def _write_config(job: Job, config: Config) -> None:
    """Unless it is there: a job that is running, or done, keeps the file that it was started with."""
    if job.config is None or _differences(_asked(job.config), _asked(config)):
        job.clear()
    if job.config != config and not job.done:
        write_atomically(job.directory / "config.json", json.dumps(config, indent=1) + "\n")


# -- data --------------------------------------------------------------------------------------------------


def _data(spec: Spec, run: Run, say: Callable[[str], None]) -> tuple[Data | None, dict[str, Any]]:
    """The data, unless they have been prepared, and what is known about them."""
    asked = json.loads(json.dumps({**spec.data.model_dump(), "files": _stamps([spec.data.source, *spec.data.ood])}))
    about = run.about
    if about is not None and about["asked"] == asked and (spec.data.embedded or run.data_path.is_file()):
        return None, about
    say(f"Preparing {spec.data.source}")
    options = spec.data.model_dump()
    size = options.pop("size")
    try:
        data = load(options.pop("source"), size=None if size is None else tuple(size), **options)
    except ValueError as error:
        raise _about_data(spec, error) from error
    return data, {
        "asked": asked,
        "name": data.name,
        "kind": data.kind.name,
        "task": data.task,
        "shape": list(data.shape),
        "outputs": data.outputs,
        "parts": {name: len(part) for name, part in data.parts.items()},
        "ood": {name: len(x) for name, x in data.ood.items()},
        "dropped": dict(data.dropped),
        "fingerprint": data.fingerprint,
    }


def _about_data(spec: Spec, error: ValueError) -> ValueError:
    """An error of `load` at the line of the key that it names, or else of the source."""
    key = str(error).replace("=", " ").split()[0]
    place: Place = ("data", key if key in type(spec.data).model_fields else "source")
    return spec.error([(place, str(error))])


def _stamps(sources: list[str]) -> list[list[int]]:
    """How many files the local sources are, how large in all and how new: whether they may have changed."""
    stamps = []
    for source in sources:
        path = Path(source)
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        stats = [each.stat() for each in files]
        stamps.append([len(stats), sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)])
    return stamps


def _keep_data(run: Run, data: Data | None, about: dict[str, Any], embedded: bool) -> None:
    if data is None:
        return
    run.directory.mkdir(parents=True, exist_ok=True)
    run.about_path.unlink(missing_ok=True)  # it must never tell of other data than those beside it
    if not embedded:
        save(data, run.data_path)
    write_atomically(run.about_path, json.dumps(about, indent=1) + "\n")


# -- configurations ----------------------------------------------------------------------------------------


def planned(spec: Spec, about: Mapping[str, Any]) -> dict[str, Config]:
    """The configuration of each job, by its name; `about` is what is known of the data (`Run.about`)."""
    spec = spec.resolved(tuple(about["shape"]), about["task"])
    data = {"file": "../../data.mtdata", "fingerprint": about["fingerprint"]}
    common = {
        "data": {"source": spec.data.source} if spec.data.embedded else data,
        "model": _model(spec),
        "training": _training(spec),
        "evaluation": spec.evaluation.model_dump(),
        "device": spec.device,
    }
    return {
        f"{label}-{seed}": {
            "version": VERSION,
            "method": each.method,
            "settings": dict(each.settings),
            "seed": seed,
            **common,
        }
        for label, each in spec.methods.items()
        for seed in spec.seeds
    }


def _model(spec: Spec) -> Config:
    model = spec.model
    file = {} if model.file is None else {"file": f"../../{_kept_name(model.file)}"}
    return {**file, "name": model.name, "settings": dict(model.settings)}


def _kept_name(file: str) -> str:
    """What the copy of a user's file is called: with a fingerprint, so that a changed file is another one."""
    path = Path(file)
    return f"{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}{path.suffix}"


def _training(spec: Spec) -> Config:
    training = spec.training.model_dump()
    return {key: None if value == NOTHING.get(key) else value for key, value in training.items()}


def stale_jobs(run: Run, configs: Mapping[str, Config]) -> dict[str, list[str]]:
    """Of the jobs that have begun, those which were asked for something else: what changed, by name.

    Where a job runs is no part of what it was asked for.
    """
    stale = {}
    for name, config in configs.items():
        job = Job(run.directory / "jobs" / name)
        if job.started and (changes := _differences(_asked(job.config or {}), _asked(config))):
            stale[name] = changes
    return stale


def _asked(config: Config) -> Config:
    return {key: value for key, value in json.loads(json.dumps(config)).items() if key != "device"}


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    """What differs between two configurations, as `training.epochs was 30, is 5`.

    >>> _differences({"training": {"epochs": 30}, "seed": 0}, {"training": {"epochs": 5}, "seed": 0})
    ['training.epochs was 30, is 5']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [
            change
            for key in keys
            for change in _differences(old.get(key), new.get(key), f"{place}.{key}" if place else str(key))
        ]
    return [] if old == new else [f"{place} was {_short(old)}, is {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


# -- whether it can be done --------------------------------------------------------------------------------


def check_methods(spec: Spec, about: Mapping[str, Any], labels: list[str]) -> None:
    """Build each of these methods once: what cannot be is told now, with its line, and not after hours."""
    shape, outputs = tuple(about["shape"]), outputs_of(about["task"], about["outputs"])
    model = {key: value for key, value in spec.model.model_dump().items() if value is not None}
    problems: list[tuple[Place, str]] = []
    with seeded(0):
        for label in labels:
            try:
                network = build_network(model, shape, outputs)
            except ValueError as error:
                raise spec.error([(("model", "name"), str(error))]) from error
            method, settings = METHODS[spec.methods[label].method], spec.methods[label].settings
            try:
                net = method.build(network, torch.zeros(4, *shape), settings, 0)
                epochs = method.train(net, _training(spec), settings)["epochs"]
                method.times(epochs * math.ceil(about["parts"]["train"] / _batch_size(spec)), settings)
            except ValueError as error:
                key = str(error).replace("=", " ").split()[0]
                place: Place = ("methods", label, key) if key in settings else ("methods", label)
                problems.append((place, f"methods.{label}: {error}"))
    if problems:
        raise spec.error(problems)


def _batch_size(spec: Spec) -> int:
    return spec.training.batch_size or 1
