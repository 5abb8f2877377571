"""Turn a specification into jobs: check everything, then write a `config.json` per method and seed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from multitudes.base.sealed_files import DamagedError, check_seal, write_atomically, write_json
from multitudes.lab.data import Data, load, save
from multitudes.lab.data.images import find_images
from multitudes.lab.data.kinds import kind_of_shape
from multitudes.lab.data.sources import open_source
from multitudes.lab.data.tables.features import Pixels
from multitudes.lab.data.texts import LONGEST, TextEncoder, read_tokenizer
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.spec.hub_models import HubModel, is_hub
from multitudes.lab.study.spec.method_rows import METHODS, build
from multitudes.lab.study.spec.network_sources import build_network, file_digest, outputs_of
from multitudes.lab.study.spec.specification import NOTHING, Spec
from multitudes.lab.study.spec.toml import Place
from multitudes.networks.seeds import seeded
from multitudes.training.optimizers import batch_size_for

VERSION = 1

Config = dict[str, Any]
Notify = Callable[[str], None]


class StaleError(ValueError):
    """Raised if jobs were run with another specification; `stale` lists the changes per job."""

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


def prepare(spec: Spec, out: str | Path, *, rerun_stale: bool = False, notify: Notify | None = None) -> Run:
    """Prepare a run directory: its data, a `config.json` for each job, and `study.toml`.

    Checks everything before it writes: the data, that each method can be built, and that no job was run with another
    specification. Such stale jobs raise an error; `rerun_stale` removes their results instead. Finished jobs stay, and
    `run.missing` lists the jobs to run. `notify` gets a message before each slow step.
    """
    notify = notify or (lambda message: None)
    run = Run(out, code=None if spec.model.file is None else f"{spec.model.file}:{spec.model.name}")
    _check_folders(run, spec)
    if spec.model.file is not None:
        digest = file_digest(spec.model.file)[:16]
        notify(f"The network is {spec.model.name} of {spec.model.file} (SHA-256 {digest}...)")
    hub = _hub_model(spec)
    parts, about = _data(spec, run, notify, hub)
    every, spec = not spec.methods, _resolved(spec, about, hub)
    if every and hub is not None:
        spec = _without_unfit(spec, about, hub, notify)
    configs = job_configs(spec, about, hub)
    stale = stale_jobs(run, configs)
    if stale and not rerun_stale:
        raise StaleError(run, stale)
    to_run = {run.named(name).label for name in configs if name in stale or not run.named(name).done}
    check_methods(spec, about, [label for label in spec.methods if label in to_run], hub)
    with run.locked():
        run.clean()
        _remove_damaged(run, configs, notify)
        _write_data(run, parts, about, embedded=spec.data.embedded)
        if spec.model.file is not None:
            write_atomically(run.directory / _copy_name(spec.model.file), Path(spec.model.file).read_bytes())
        for name, config in configs.items():
            _write_config(run.named(name), config)
        run.write_spec(spec.to_toml())
    return run


def _check_folders(run: Run, spec: Spec) -> None:
    """Raise if a file of the run would be written outside of its directory."""
    if run.directory.exists() and not run.directory.is_dir():
        raise ValueError(f"out must be a run directory, got the file {str(run.directory)!r}")
    jobs = [run.job(label, seed).directory for label in spec.methods for seed in spec.seeds]
    written = [job / name for job in jobs for name in ("", "recording", "log.jsonl", "output.txt")]
    for path in [run.directory / "jobs", *written]:
        if path.is_symlink():
            raise ValueError(f"out must not contain links, but {str(path)!r} is a link: remove it")


def _remove_damaged(run: Run, configs: Mapping[str, Config], notify: Notify) -> None:
    """Rewrite damaged or missing configurations, and remove damaged results."""
    for name, config in configs.items():
        job = run.named(name)
        if _config(job) is None and job.directory.is_dir():
            write_json(job.directory / "config.json", config, place=True)
        if job.damage:
            notify(f"{name} will be repeated: {job.damage.partition('; ')[0]}")
            (job.directory / "metrics.json").unlink()


def _write_config(job: Job, config: Config) -> None:
    """Write a job's configuration. Clear the job if its configuration changed; keep the file if the job is done."""
    if _differences(_lasting(_config(job) or config), _lasting(config)):
        job.clear()
    if not job.done and _config(job) != config:
        write_json(job.directory / "config.json", config, place=True)


def _config(job: Job) -> Config | None:
    """Return a job's configuration; None if missing or damaged."""
    try:
        return job.config
    except DamagedError:
        return None


# -- data --------------------------------------------------------------------------------------------------


def _data(spec: Spec, run: Run, notify: Notify, hub: HubModel | None) -> tuple[list[Data], dict[str, Any]]:
    """Return the data of each fold (empty if already prepared) and their description for `data.json`."""
    options = _reading_options(spec, hub)
    asked = {**spec.data.model_dump(), "files": _stamps([spec.data.source, *spec.data.ood])}
    request = json.loads(json.dumps(asked | ({} if hub is None else {"of_model": options})))
    about = _about(run, spec.data.embedded, notify)
    if about is not None and about.get("request") == request:
        return [], about
    notify(f"Preparing {spec.data.source}")
    source = options.pop("source")
    try:
        every = [load(source, **{**options, "fold": fold}) for fold in range(spec.data.folds or 0)]
        data = every[0] if every else load(source, **options)
        if hub is not None and options["tokenizer"] is None:
            _check_tokens(hub, data)
    except ValueError as error:
        if hub is not None and (why := _wrong_kind(spec, hub, error)):
            raise spec.error([(("model", "name"), why)]) from error
        key = _first_key(error, type(spec.data).model_fields) or "source"
        raise spec.error([(("data", key), str(error))]) from error
    counts = torch.bincount(data.train.y, minlength=len(data.classes)).tolist() if data.classes else []
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
        "classes": dict(zip(data.classes, counts, strict=True)),
        "fingerprint": data.fingerprint,
        "folds": [each.fingerprint for each in every],
        **_input_details(data),
    }


def _first_key(error: ValueError, keys: Iterable[str]) -> str | None:
    """Return the key that an error message starts with, if it is one of these."""
    first = str(error).replace("=", " ").split()[0]
    return first if first in keys else None


def _stamps(sources: list[str]) -> list[list[int]]:
    """Return file count, total size and newest time of each local source, to detect changes."""
    stamps = []
    for source in sources:
        path = Path(source)
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        stats = [each.stat() for each in files]
        stamps.append([len(stats), sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0)])
    return stamps


def _about(run: Run, embedded: bool, notify: Notify) -> dict[str, Any] | None:
    """Read `data.json`; None if it or the data it describes is missing or damaged."""
    try:
        about = run.about
        if about is None or embedded:
            return about
        seals = [about["data"]] if isinstance(about.get("data"), str) else about.get("data") or [None]
        if all(check_seal(run.fold_path(fold)) == seal for fold, seal in enumerate(seals)):
            return about
        notify(f"{str(run.data_path)!r} is not the file that data.json describes")
    except DamagedError as error:
        notify(str(error))
    return None


def _write_data(run: Run, parts: list[Data], about: dict[str, Any], embedded: bool) -> None:
    if not parts:
        return
    run.directory.mkdir(parents=True, exist_ok=True)
    run.about_path.unlink(missing_ok=True)  # never leave a description next to other data
    if not embedded:
        seals = [check_seal(save(data, run.fold_path(fold))) for fold, data in enumerate(parts)]
        about = {**about, "data": seals if about["folds"] else seals[0]}
    write_json(run.about_path, about)


# -- configurations ----------------------------------------------------------------------------------------


def job_configs(spec: Spec, about: Mapping[str, Any], hub: HubModel | None = None) -> dict[str, Config]:
    """Return the configuration of each job by its name.

    `about` describes the data (`Run.about`); `hub` is the model if it is a Hugging Face model.
    """
    spec = _resolved(spec, about, hub)
    common = {
        "model": _model(spec) if hub is None else _hub_config(spec, about, hub),
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
            "data": _data_location(spec, about, fold),
            **common,
        }
        for label, each in spec.methods.items()
        for fold, seed in enumerate(spec.seeds)
    }


def _data_location(spec: Spec, about: Mapping[str, Any], fold: int) -> Config:
    """Return the location of a job's data, by fold in a cross-validation."""
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
    """Name the copy of a user's file; it includes a digest, so that a changed file gets a new name."""
    return f"{Path(file).stem}-{file_digest(file)[:8]}{Path(file).suffix}"


def _training(spec: Spec) -> Config:
    training = spec.training.model_dump()
    return {key: None if value == NOTHING.get(key) else value for key, value in training.items()}


def stale_jobs(run: Run, configs: Mapping[str, Config]) -> dict[str, list[str]]:
    """Return what changed for jobs started with another configuration, ignoring the device."""
    started = [(run.named(name), config) for name, config in configs.items() if run.named(name).started]
    changes = {job.name: _differences(_lasting(_config(job) or config), _lasting(config)) for job, config in started}
    return {name: changed for name, changed in changes.items() if changed}


def _lasting(config: Config) -> Config:
    """Return the configuration that results depend on, as JSON: everything but the device."""
    return {key: value for key, value in json.loads(json.dumps(config)).items() if key != "device"}


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    """List the differences between two configurations, as `training.epochs was 30, is 5`.

    >>> _differences({"training": {"epochs": 30}, "seed": 0}, {"training": {"epochs": 5}, "seed": 0})
    ['training.epochs was 30, is 5']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            change
            for key in {**old, **new}
            for change in _differences(old.get(key), new.get(key), f"{place}.{key}" if place else str(key))
        ]
    texts = [text if len(text) <= 60 else f"{text[:56]} ..." for text in (json.dumps(old), json.dumps(new))]
    return [] if old == new else [f"{place} was {texts[0]}, is {texts[1]}"]


# -- checks ------------------------------------------------------------------------------------------------


def check_methods(spec: Spec, about: Mapping[str, Any], labels: list[str], hub: HubModel | None = None) -> None:
    """Build each of these methods once, to raise errors now, with their line, instead of after hours."""
    if problems := _unbuildable(spec, about, labels, hub):
        raise spec.error(problems)


def _without_unfit(spec: Spec, about: Mapping[str, Any], hub: HubModel, notify: Notify) -> Spec:
    """Drop the methods that cannot be built from this model; `notify` gets the reasons."""
    unfit = {str(place[1]): message for place, message in _unbuildable(spec, about, list(spec.methods), hub)}
    for label, message in unfit.items():
        notify(f"Skipping {label}: {message.removeprefix(f'methods.{label}').lstrip(': ')}")
    return spec.model_copy(update={"methods": {name: each for name, each in spec.methods.items() if name not in unfit}})


def _unbuildable(
    spec: Spec, about: Mapping[str, Any], labels: list[str], hub: HubModel | None = None
) -> list[tuple[Place, str]]:
    """Return the methods that cannot be built, by place in the specification, with the reason."""
    shape, outputs = tuple(about["shape"]), outputs_of(about["task"], about["outputs"])
    kind = kind_of_shape(shape, about.get("kind"))
    texts = about.get("text") or {}
    example = torch.tensor(texts["examples"], dtype=kind.dtype) if "examples" in texts else kind.blank(shape)
    model = {key: value for key, value in spec.model.model_dump().items() if value is not None}
    if hub is not None:
        model = _hub_config(spec, about, hub)
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
                key = _first_key(error, settings)
                place: Place = ("methods", label, key) if key else ("methods", label)
                problems.append((place, f"methods.{label}: {error}"))
    return problems


# -- Hugging Face models -----------------------------------------------------------------------------------


def _hub_model(spec: Spec) -> HubModel | None:
    """Return the Hugging Face model of a specification; None for other models."""
    name = spec.model.name
    if name is None or not is_hub(name):
        return None
    try:
        return HubModel.read(name)
    except ValueError as error:
        raise spec.error([(("model", "name"), str(error))]) from error


def _reading_options(spec: Spec, hub: HubModel | None) -> dict[str, Any]:
    """Return the arguments of `load`: those of the specification, with the model's for the rest."""
    options = spec.data.model_dump()
    options["size"] = None if options["size"] is None else tuple(options["size"])
    if hub is None or spec.data.source == "digits" or Path(spec.data.source).suffix.lower() == ".mtdata":
        return options
    if hub.kind == "text":
        longest = options["max_length"]
        if longest is not None and hub.longest is not None and longest > hub.longest:
            most = f"the limit of {hub.name}, got {longest}"
            raise spec.error([(("data", "max_length"), f"max_length must be at most {hub.longest}, {most}")])
        options["tokenizer"] = options["tokenizer"] or str(hub.folder)
        options["max_length"] = longest or min(LONGEST, hub.longest or LONGEST)
    else:
        options["size"] = options["size"] or hub.size
        options["pixels"] = hub.pixels
    return options


def _wrong_kind(spec: Spec, hub: HubModel, error: ValueError) -> str:
    """Explain a data error that comes from a model for another kind of data; empty for other errors."""
    name = spec.data.source
    if hub.kind == "text" and str(error).startswith("tokenizer= is "):
        return f"model {hub.name!r} is for texts, but {name} contains images"
    if hub.kind == "image":
        try:
            found = find_images(open_source(name, spec.data.split), spec.data.image)
        except ValueError:
            return ""
        return "" if found else f"model {hub.name!r} is for images, but {name} contains none"
    return ""


def _check_tokens(hub: HubModel, data: Data) -> None:
    """Raise if prepared texts were tokenized differently than for the pretrained model."""
    encoder = data.encoder
    if not isinstance(encoder, TextEncoder) or hub.kind != "text" or not hub.pretrained:
        return
    if read_tokenizer(hub.folder, encoder.text.longest).tokenizer != encoder.text.tokenizer:
        raise ValueError(
            f"source was prepared with another tokenizer than that of {hub.name}: prepare it again with this model"
        )


def _input_details(data: Data) -> dict[str, Any]:
    """Describe texts, or images normalised for a pretrained model, for `data.json`."""
    encoder = data.encoder
    if not isinstance(encoder, TextEncoder):
        pixels = next((each for each in encoder.features if isinstance(each, Pixels)), None)
        return {} if pixels is None else {"pixels": {"mean": list(pixels.mean), "std": list(pixels.std)}}
    text, lengths = encoder.text, (data.train.x >= 0).sum(1)
    shortest = lengths.argsort(stable=True)[:4]
    return {
        "text": {
            "column": text.column,
            "tokens": text.longest,
            "padding": text.empty,
            "vocabulary": encoder.vocabulary,
            "lengths": {
                "least": int(lengths.min()),
                "median": int(lengths.median()),
                "most": int(lengths.max()),
            },
            "examples": data.train.x[shortest, : int(lengths[shortest].max())].tolist(),
        }
    }


def _resolved(spec: Spec, about: Mapping[str, Any], hub: HubModel | None) -> Spec:
    """Fill in every default for the data that `about` describes."""
    pretrained = None if hub is None else hub.pretrained
    return spec.resolved(tuple(about["shape"]), about["task"], about["parts"]["train"], about.get("kind"), pretrained)


def _hub_config(spec: Spec, about: Mapping[str, Any], hub: HubModel) -> dict[str, Any]:
    """Return everything a job needs to build the model; raise if it does not fit the data."""
    text = about.get("text") or {}
    many = hub.config.get("vocab_size")
    fault = ""
    if about["kind"] != hub.kind:
        fault = f"model {hub.name!r} is for {hub.kind}s, but {about['name']} is of kind {about['kind']}"
    elif isinstance(many, int) and text.get("vocabulary", 0) > many:
        fault = f"model {hub.name!r} has a vocabulary of {many} tokens, but the tokenizer has {text['vocabulary']}"
    elif hub.longest is not None and text.get("tokens", 0) > hub.longest:
        fault = f"model {hub.name!r} takes at most {hub.longest} tokens, but the texts have up to {text['tokens']}"
    if not fault:
        try:
            return hub.plain(spec.model.settings, text.get("padding"))
        except ValueError as error:
            fault = str(error)
    raise spec.error([(("model", "name"), fault)])
