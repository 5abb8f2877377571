"""From a specification to jobs: one `config.json` for each method and seed, written once everything is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from multitudes.core.files import DamagedError, check_seal, write_json
from multitudes.core.seeding import seeded
from multitudes.data import Data, load, save
from multitudes.data.kinds import kind_of_shape
from multitudes.study.hub_data import (
    check_tokens,
    described,
    hub_model,
    misfit,
    reading_options,
    resolved,
    what_inputs_are,
)
from multitudes.study.hub_models import HubModel
from multitudes.study.methods import METHODS, build
from multitudes.study.networks import build_network, file_digest, outputs_of
from multitudes.study.spec import NOTHING, Spec
from multitudes.study.store import Job, Run, write_atomically
from multitudes.study.toml import Place
from multitudes.training.optimizers import batch_size_for

__all__ = ["StaleError", "planned", "prepare", "stale_jobs"]

VERSION = 1

Config = dict[str, Any]


class StaleError(ValueError):
    """Jobs were run with another specification; `stale` has what changed, by job."""

    def __init__(self, run: Run, stale: Mapping[str, list[str]]) -> None:
        self.stale = dict(stale)
        groups: dict[str, list[str]] = {}
        for name, changes in self.stale.items():
            groups.setdefault("; ".join(changes), []).append(name)
        changed = " ".join(f"{', '.join(names)}: {changes}." for changes, names in groups.items())
        count = "1 job is stale" if len(self.stale) == 1 else f"{len(self.stale)} jobs are stale"
        super().__init__(
            f"{count} in {str(run.directory)!r}, run with a different specification. {changed} "
            f"Run them again with --rerun-stale, or choose another --out"
        )


def prepare(spec: Spec, out: str | Path, *, rerun_stale: bool = False, say: Callable[[str], None] | None = None) -> Run:
    """Prepare a run directory: its data, a `config.json` for each job, and `study.toml`.

    Everything is checked before anything is written: the data, that each method can be built, and that no job was run
    with another specification. Such jobs are an error, or with `rerun_stale` their results are removed. Jobs that are
    done stay, and `run.missing` are the jobs to run. `say` gets a message before what takes long.
    """
    say = say or (lambda message: None)
    run = Run(out, code=None if spec.model.file is None else f"{spec.model.file}:{spec.model.name}")
    _check_folders(run, spec)
    if spec.model.file is not None:
        say(f"The network is {spec.model.name} of {spec.model.file} (SHA-256 {file_digest(spec.model.file)[:16]}...)")
    hub = hub_model(spec)
    parts, about = _data(spec, run, say, hub)
    every, spec = not spec.methods, resolved(spec, about, hub)
    if every and hub is not None:
        spec = _without_unfit(spec, about, hub, say)
    configs = planned(spec, about, hub)
    stale = stale_jobs(run, configs)
    if stale and not rerun_stale:
        raise StaleError(run, stale)
    to_run = [name for name in configs if name in stale or not run.named(name).done]
    check_methods(
        spec, about, [label for label in spec.methods if any(f"{label}-{s}" in to_run for s in spec.seeds)], hub
    )
    with run.locked():
        run.clean()
        _remove_damaged(run, configs, say)
        _write_data(run, parts, about, embedded=spec.data.embedded)
        if spec.model.file is not None:
            write_atomically(run.directory / _copy_name(spec.model.file), Path(spec.model.file).read_bytes())
        for name, config in configs.items():
            _write_config(run.named(name), config)
        run.write_spec(spec.to_toml())
    return run


def _check_folders(run: Run, spec: Spec) -> None:
    """That what is written for the run lands in its directory."""
    if run.directory.exists() and not run.directory.is_dir():
        raise ValueError(f"out must be a run directory, got {str(run.directory)!r}, which is a file")
    jobs = [run.job(label, seed).directory for label in spec.methods for seed in spec.seeds]
    written = [job / name for job in jobs for name in ("", "recording", "log.jsonl", "output.txt")]
    for path in [run.directory / "jobs", *written]:
        if path.is_symlink():
            raise ValueError(f"out must be a run directory of its own, got {str(path)!r}, which is a link: remove it")


def _remove_damaged(run: Run, configs: Mapping[str, Config], say: Callable[[str], None]) -> None:
    """Write configurations that are damaged or missing again, and remove results that still are not whole."""
    for name, config in configs.items():
        job = run.named(name)
        if _config(job) is None and job.directory.is_dir():
            write_json(job.directory / "config.json", config, place=True)
        if job.damage:
            say(f"{name} is done again: {job.damage.partition('; ')[0]}")
            (job.directory / "metrics.json").unlink()


def _write_config(job: Job, config: Config) -> None:
    """What a job has done with another configuration is removed; one that is done keeps its file."""
    if _differences(_lasting(_config(job) or config), _lasting(config)):
        job.clear()
    if not job.done and _config(job) != config:
        write_json(job.directory / "config.json", config, place=True)


def _config(job: Job) -> Config | None:
    """The configuration of a job; None where it is missing or damaged."""
    try:
        return job.config
    except DamagedError:
        return None


# -- data --------------------------------------------------------------------------------------------------


def _data(
    spec: Spec, run: Run, say: Callable[[str], None], hub: HubModel | None = None
) -> tuple[list[Data], dict[str, Any]]:
    """The data of each fold, or none where they have been prepared, and what `data.json` says about them."""
    options = reading_options(spec, hub)
    asked = {**spec.data.model_dump(), "files": _stamps([spec.data.source, *spec.data.ood])}
    request = json.loads(json.dumps(asked | ({} if hub is None else {"of_model": options})))
    about = _about(run, spec.data.embedded, say)
    if about is not None and about.get("request") == request:
        return [], about
    say(f"Preparing {spec.data.source}")
    source = options.pop("source")
    try:
        every = [load(source, **{**options, "fold": fold}) for fold in range(spec.data.folds or 0)]
        data = every[0] if every else load(source, **options)
        if hub is not None and options["tokenizer"] is None:
            check_tokens(hub, data)
    except ValueError as error:
        if hub is not None and (why := misfit(spec, hub, error)):
            raise spec.error([(("model", "name"), why)]) from error
        raise spec.error([(("data", _named(error, type(spec.data).model_fields) or "source"), str(error))]) from error
    return every or [data], {
        "request": request,
        "name": data.name,
        "kind": data.kind.name,
        "task": data.task,
        "shape": list(data.shape),
        "outputs": data.outputs,
        "parts": {name: len(part) for name, part in data.parts.items()},
        "ood": {name: len(x) for name, x in data.ood.items()},
        "dropped": dict(data.dropped),
        "columns": [each.plain() for each in data.reading],
        "classes": _counts(data),
        "fingerprint": data.fingerprint,
        "folds": [each.fingerprint for each in every],
        **what_inputs_are(data),
    }


def _counts(data: Data) -> dict[str, int]:
    """How many training rows each class has."""
    if not data.classes:
        return {}
    counts = torch.bincount(data.train.y, minlength=len(data.classes)).tolist()
    return dict(zip(data.classes, counts, strict=True))


def _named(error: ValueError, keys: Iterable[str]) -> str | None:
    """The key that an error names first, if it is one of these."""
    first = str(error).replace("=", " ").split()[0]
    return first if first in keys else None


def _stamps(sources: list[str]) -> list[list[int]]:
    """The number of files, total size and newest time of each local source: whether it may have changed."""
    stamps = []
    for source in sources:
        path = Path(source)
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        stats = [each.stat() for each in files]
        stamps.append([len(stats), sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)])
    return stamps


def _about(run: Run, embedded: bool, say: Callable[[str], None]) -> dict[str, Any] | None:
    """What `data.json` says; None where it, or the prepared data that it describes, is missing or damaged."""
    try:
        about = run.about
        if about is None or embedded:
            return about
        seals = [about["data"]] if isinstance(about.get("data"), str) else about.get("data") or [None]
        if all(check_seal(run.fold_path(fold)) == seal for fold, seal in enumerate(seals)):
            return about
        say(f"{str(run.data_path)!r} is not the file that data.json describes")
    except DamagedError as error:
        say(str(error))
    return None


def _write_data(run: Run, parts: list[Data], about: dict[str, Any], embedded: bool) -> None:
    if not parts:
        return
    run.directory.mkdir(parents=True, exist_ok=True)
    run.about_path.unlink(missing_ok=True)  # it must never describe other data than those beside it
    if not embedded:
        seals = [check_seal(save(data, run.fold_path(fold))) for fold, data in enumerate(parts)]
        about = {**about, "data": seals if about["folds"] else seals[0]}
    write_json(run.about_path, about)


# -- configurations ----------------------------------------------------------------------------------------


def planned(spec: Spec, about: Mapping[str, Any], hub: HubModel | None = None) -> dict[str, Config]:
    """The configuration of each job, by its name.

    `about` describes the data (`Run.about`), `hub` the model, where it is one of Hugging Face.
    """
    spec = resolved(spec, about, hub)
    common = {
        "model": _model(spec) if hub is None else described(spec, about, hub),
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
            "data": _place(spec, about, fold),
            **common,
        }
        for label, each in spec.methods.items()
        for fold, seed in enumerate(spec.seeds)
    }


def _place(spec: Spec, about: Mapping[str, Any], fold: int) -> Config:
    """Where a job finds its data: those of the fold of this number, where there are folds."""
    if spec.data.embedded:
        return {"source": spec.data.source}
    if about.get("folds") and fold:
        return {"file": f"../../data-{fold}.mtdata", "fingerprint": about["folds"][fold]}
    return {"file": "../../data.mtdata", "fingerprint": about["fingerprint"]}


def _model(spec: Spec) -> Config:
    model = spec.model
    own = {}
    if model.file is not None:
        own = {"file": f"../../{_copy_name(model.file)}", "sha256": file_digest(model.file)}
    return {**own, "name": model.name, "settings": dict(model.settings)}


def _copy_name(file: str) -> str:
    """The name of the copy of a user's file: with a fingerprint, so that a changed file has another name."""
    path = Path(file)
    return f"{path.stem}-{file_digest(path)[:8]}{path.suffix}"


def _training(spec: Spec) -> Config:
    training = spec.training.model_dump()
    return {key: None if value == NOTHING.get(key) else value for key, value in training.items()}


def stale_jobs(run: Run, configs: Mapping[str, Config]) -> dict[str, list[str]]:
    """By name, what changed for the jobs that were started with another configuration, the device aside."""
    started = [(run.named(name), config) for name, config in configs.items() if run.named(name).started]
    changes = {job.name: _differences(_lasting(_config(job) or config), _lasting(config)) for job, config in started}
    return {name: changed for name, changed in changes.items() if changed}


def _lasting(config: Config) -> Config:
    """What the results depend on, as JSON has it: all but the device."""
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


# -- checks ------------------------------------------------------------------------------------------------


def check_methods(spec: Spec, about: Mapping[str, Any], labels: list[str], hub: HubModel | None = None) -> None:
    """Build each of these methods once, so that an error is raised now, with its line, and not after hours."""
    if problems := _unbuildable(spec, about, labels, hub):
        raise spec.error(problems)


def _without_unfit(spec: Spec, about: Mapping[str, Any], hub: HubModel, say: Callable[[str], None]) -> Spec:
    """Without those of all methods that cannot be built of a model that is not for all of them; `say` tells why."""
    unfit = {str(place[1]): message for place, message in _unbuildable(spec, about, list(spec.methods), hub)}
    for label, message in unfit.items():
        say(f"{label} is left out: {message.removeprefix(f'methods.{label}').lstrip(': ')}")
    return spec.model_copy(update={"methods": {name: each for name, each in spec.methods.items() if name not in unfit}})


def _unbuildable(
    spec: Spec, about: Mapping[str, Any], labels: list[str], hub: HubModel | None = None
) -> list[tuple[Place, str]]:
    """Which of these methods cannot be built, by their place in the specification, and why."""
    shape, outputs = tuple(about["shape"]), outputs_of(about["task"], about["outputs"])
    kind = kind_of_shape(shape, about.get("kind"))
    texts = about.get("text") or {}
    example = torch.tensor(texts["examples"], dtype=kind.dtype) if "examples" in texts else kind.blank(shape)
    model = {key: value for key, value in spec.model.model_dump().items() if value is not None}
    if hub is not None:
        model = described(spec, about, hub)
    rows = about["parts"]["train"]
    batches = math.ceil(rows / (spec.training.batch_size or batch_size_for(rows)))
    problems: list[tuple[Place, str]] = []
    with seeded(0):
        for label in labels:
            try:
                network = build_network(model, shape, outputs, kind=kind.name)
            except ValueError as error:
                raise spec.error([(("model", "name"), str(error))]) from error
            method, settings = METHODS[spec.methods[label].method], spec.methods[label].settings
            try:
                net = build(method, network, example, settings, 0, model)
                method.times(method.train(net, _training(spec), settings)["epochs"] * batches, settings)
            except (ArithmeticError, MemoryError, RuntimeError, TypeError) as error:
                reason = next(iter(str(error).splitlines()), "") or type(error).__name__
                problems.append((("methods", label), f"methods.{label} cannot be built with {settings}: {reason}"))
            except ValueError as error:
                key = _named(error, settings)
                place: Place = ("methods", label, key) if key else ("methods", label)
                problems.append((place, f"methods.{label}: {error}"))
    return problems
