"""The specification of a study: `Spec`, read from a `study.toml` and checked before anything runs.

    seeds = 3                         # or a list: [0, 1, 2]
    methods = ["single", "deep"]      # or tables, with settings:

    [methods.packed]
    members = 4
    [methods.packed_8]                # the same method once more
    method = "packed"
    members = 8

    [data]
    source = "digits"
    [model]
    name = "small_cnn"
    [training]
    epochs = 30
    [evaluation]
    shift = ["fog", "contrast"]

Every value but the data has a default; those of model and training depend on the data (`network_sources.py`).
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from multitudes.lab.study.results.result_rows import TARGETS, known_score
from multitudes.lab.study.spec.sections import (
    DataSection,
    EvaluationSection,
    MethodSection,
    ModelSection,
    Section,
    Seeds,
    SpecError,
    TrainingSection,
    close,
    one_of,
    problem,
)
from multitudes.lab.study.spec.toml import Place, TomlText, at_scale, to_toml
from multitudes.methods.catalog import list_methods

# isort: split
from pydantic import Field, PrivateAttr, ValidationError  # after the sections, which report the extra to install

SHIFT = ["gaussian_noise", "defocus_blur", "fog", "contrast"]
"""One corruption of each family: noise, blur, weather, digital."""


class Spec(Section):
    """A study: every method with every seed, trained and measured on the same data.

    >>> spec = Spec.of(data="digits", methods=["single", "packed"], seeds=3, epochs=30)
    >>> spec.seeds, spec.methods["packed"].settings
    ([0, 1, 2], {'members': 4, 'alpha': 2, 'gamma': 1, 'layers': None})
    >>> Spec.of(methods=["packed"], epochs=0)
    Traceback (most recent call last):
    multitudes.lab.study.spec.sections.SpecError: training.epochs must be greater than or equal to 1, got 0
    """

    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    methods: dict[str, MethodSection] = Field(default={})
    """Methods by their names in the study; empty means all that fit the data."""
    seeds: Seeds = Field(default=[0])
    by: Literal["nll", "brier", "accuracy", "log_density", "crps", "rmse"] | None = None
    """Score by which methods are ranked and recommended; None is a proper default score."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()

    _source: TomlText | None = PrivateAttr(default=None)

    @classmethod
    def load(cls, path: str | Path, scale: str | None = None, **options: Any) -> Self:
        """Read a `study.toml` at one of its scales; options, named as in `of`, replace its values."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            raw = at_scale(tomllib.loads(text), scale)
        except OSError as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        except ValueError as error:  # not TOML, not UTF-8, or no such scale
            raise ValueError(f"{path.name}: {str(error)[:1].lower()}{str(error)[1:]}") from error
        merged, source = _merged(raw, options), TomlText(text, path.name, scale)
        model = raw.get("model") if options.get("model") is None else None
        if (path.parent / "jobs").is_dir() and isinstance(model, dict) and model.get("file") is not None:
            why = "code named by a run directory is never executed: pass --model FILE.py:FUNCTION"
            raise SpecError([(("model", "file"), f"model.file: {why}")], source)
        spec = cls._checked(merged, path.parent, source)
        if "source" not in merged.get("data", {}):
            raise SpecError([(("data",), "data.source must name the data, such as a file, or digits")], source)
        return spec

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Build a specification from options: `data`, `model` (a name, or FILE.py:FUNCTION), `methods`, `seeds`,
        `by`, `device`, and any key of the tables by its own name (`epochs`, `ood`, `shift`). None means not given."""
        return cls._checked(_merged({}, options), Path(), None)

    @classmethod
    def _checked(cls, raw: dict[str, Any], base: Path, source: TomlText | None) -> Self:
        methods, problems = _read_methods(raw.get("methods"))
        if isinstance(raw.get("model"), str):
            raw = {**raw, "model": {"name": raw["model"]}}
        raw, faults = _with_folds(raw)
        problems += faults
        problems += _read_model(raw.get("model"), base)
        try:
            spec = cls.model_validate({**raw, "methods": methods})
        except ValidationError as error:
            problems = [problem(cls, each, SECTIONS) for each in error.errors()] + problems
        if problems:
            raise SpecError(problems, source)
        spec = spec.model_copy(update=_absolute(spec, base))
        spec._source = source
        return spec

    def __eq__(self, other: object) -> bool:
        """Compare all values, ignoring where they were read from."""
        return isinstance(other, Spec) and self.model_dump() == other.model_dump()

    def error(self, problems: Iterable[tuple[Place, str]]) -> SpecError:
        """Return an error found later, with lines of the file that this was read from."""
        return SpecError(problems, self._source)

    def resolved(
        self,
        shape: tuple[int, ...],
        task: str = "classification",
        rows: int = 1000,
        kind: str | None = None,
        pretrained: bool | None = None,
    ) -> Self:
        """Fill in every default, for an input shape `(C, H, W)` or `(F,)`, a task, and a number of training rows.

        `kind` names the kind of data if the shape is ambiguous; `pretrained` is that of a Hugging Face model.
        """
        from multitudes.lab.data.kinds import kind_of_shape  # local: reading a specification needs no torch
        from multitudes.lab.study.spec.method_rows import METHODS, methods_for
        from multitudes.lab.study.spec.network_sources import defaults

        suggested = defaults(shape, rows, kind, pretrained)
        if not (self.model.name or suggested["model"]["name"]):
            raise self.error(
                [(("model",), "model must be a Hugging Face model, hf:FOLDER, for texts, but none is given")]
            )
        given = {key: value for key, value in self.training.model_dump().items() if value is not None}
        training = {**suggested["training"], **given}
        if "lr" not in given and training["optimizer"] != suggested["training"]["optimizer"]:
            training["lr"] = 0.05 if training["optimizer"] == "sgd" else 1e-3  # learning rates depend on the optimizer
        if "warmup" not in given and pretrained is not None:
            training["warmup"] *= training["epochs"] / suggested["training"]["epochs"]
        elif "warmup" not in given and training["warmup"] >= training["epochs"]:
            training["warmup"] = 0  # training is too short for a warm-up
        for key, nothing in NOTHING.items():
            training[key] = nothing if training.get(key) is None else training[key]
        methods = self.methods
        if not methods:
            every = {name: METHODS[name].complete() for name in methods_for(shape, kind, bool(pretrained))}
            methods = {name: MethodSection(method=name, settings=settings) for name, settings in every.items()}
        corruptible = kind_of_shape(shape, kind).corruptible(shape) and TARGETS[task].classes
        usual = SHIFT if corruptible else []
        shift = usual if self.evaluation.shift is None else self.evaluation.shift
        spec = self.model_copy(
            update={
                "model": self.model if self.model.name else ModelSection(**suggested["model"]),
                "methods": methods,
                "training": TrainingSection(**training),
                "evaluation": self.evaluation.model_copy(update={"shift": shift}),
            }
        )
        spec._check(shape, task, kind, bool(pretrained) or self.model.file is not None)
        return spec

    def _check(self, shape: tuple[int, ...], task: str, kind: str | None, pretrained: bool) -> None:
        """Raise if the specification does not fit the data."""
        from multitudes.lab.data.kinds import kind_of_shape
        from multitudes.lab.study.spec.method_rows import METHODS, unfit

        problems: list[tuple[Place, str]] = []
        training, evaluation = self.training, self.evaluation
        try:
            known_score(task, self.by)
        except ValueError as error:
            problems.append((("by",), str(error)))
        if training.warmup >= training.epochs:  # type: ignore[operator]
            many = f"the {training.epochs} epochs, got {training.warmup:g}"
            problems.append((("training", "warmup"), f"training.warmup must be less than {many}"))
        if evaluation.shift and not (kind_of_shape(shape, kind).corruptible(shape) and TARGETS[task].classes):
            needs = "images of 1 or 3 channels, 8 or more pixels a side, and classes"
            got = f"inputs {list(shape)} and {task}"
            problems.append((("evaluation", "shift"), f"evaluation.shift needs {needs}, got {got}"))
        if training.augment != "none" and not kind_of_shape(shape, kind).feature_maps:
            problems.append((("training", "augment"), f"training.augment={training.augment!r} is for images"))
        if training.class_weight != "none" and not TARGETS[task].classes:
            problems.append((("training", "class_weight"), f"training.class_weight is for classes, got {task}"))
        for label, each in self.methods.items():
            if reason := unfit(METHODS[each.method], shape, kind, pretrained):
                problems.append((("methods", label), f"methods.{label}: {reason}"))
        if problems:
            raise self.error(problems)

    def to_toml(self) -> str:
        """Return the text of a `study.toml` that reads back as this specification."""
        whole = self.model_dump(exclude_none=True)
        methods = {
            label: {"method": None if each.method == label else each.method, **each.settings}
            for label, each in self.methods.items()
        }
        whole.pop("methods")
        whole["model"]["settings"] = whole["model"]["settings"] or None
        first = {name: whole.pop(name, None) for name in ("seeds", "by", "device")}
        return to_toml({**first, "methods": methods, **whole})


HUB = "hf:"
"""Prefix of a Hugging Face model's folder or name."""
NOTHING = {"augment": "none", "clip": 0.0, "patience": 0, "class_weight": "none", "average": 0.0}
"""Values that disable a feature in the file, since TOML has no null."""


# -- reading -----------------------------------------------------------------------------------------------

SECTIONS: dict[str, type[Section]] = {
    "training": TrainingSection,
    "data": DataSection,
    "evaluation": EvaluationSection,
    "model": ModelSection,
}
OPTIONS = ("training", "data", "evaluation")
"""Tables whose keys are options under their own name; for a name in two of them, the first wins."""


def _merged(raw: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options into the tables of a file."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for name, value in options.items():
        if value is None:
            continue
        if name in ("methods", "seeds", "by", "device"):
            merged[name] = value
        elif name == "data":
            merged.setdefault("data", {})["source"] = str(value)
        elif name == "model":
            file, _, function = ("", "", value) if str(value).startswith(HUB) else str(value).rpartition(":")
            merged["model"] = {"file": file, "name": function} if file else {"name": value}
        else:
            owners = [section for section in OPTIONS if name in SECTIONS[section].model_fields]
            place = merged.setdefault(owners[0], {}) if owners and name not in ("source", "seed") else merged
            place[name] = [str(each) for each in value] if name == "ood" else value
    return merged


def _with_folds(raw: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
    """Add a seed for each fold of a cross-validation; also return problems with the folds."""
    data = raw["data"] if isinstance(raw.get("data"), dict) else {}
    folds = data.get("folds")
    if type(folds) is not int or folds < 2:
        return raw, []
    if data.get("fold"):
        return raw, [(("data", "fold"), f"data.fold must be left out with data.folds={folds}, got {data['fold']!r}")]
    seeds = raw.get("seeds", list(range(folds)))
    if seeds != folds and not (isinstance(seeds, list) and len(seeds) == folds):
        rule = f"seeds must be left out with data.folds={folds}, since each fold has one seed"
        return raw, [(("seeds",), f"{rule}, got {seeds!r}")]
    return {**raw, "seeds": seeds}, []


def _read_methods(raw: Any) -> tuple[Any, list[tuple[Place, str]]]:
    """Return the methods by their names in the study, `{"method": ..., "settings": ...}`, and their problems."""
    if raw is None:
        return {}, []
    if not isinstance(raw, list | tuple | dict) or not raw:
        return {}, [(("methods",), f"methods must be a list of names, or tables [methods.NAME], got {raw!r}")]
    entries = list(raw.items()) if isinstance(raw, dict) else [(label, {}) for label in raw]
    every = {each.name: each.settings for each in list_methods()}
    methods: dict[str, dict[str, Any]] = {}
    problems: list[tuple[Place, str]] = []
    for index, (label, table) in enumerate(entries):
        path: Place = ("methods", label if isinstance(raw, dict) else index)
        if not isinstance(label, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", label):
            problems.append((path, f"methods must have names of letters, digits, _, - and ., got {label!r}"))
        elif not isinstance(table, dict):
            problems.append((path, f"methods.{label} must be a table of settings, got {table!r}"))
        elif label in methods:
            problems.append((path, f"methods lists {label!r} twice"))
        else:
            given = {"method": label, **table}
            name = given.pop("method")
            methods[label] = {"method": str(name), "settings": {**every.get(str(name), {}), **given}}
            if not isinstance(name, str) or name not in every:
                where = f"methods.{label}.method" if label != name else "methods"
                message = f"{where} must be {one_of(every)}, got {name!r}{close(name, every)}"
                problems.append(((*path, "method"), message))
                continue
            wrong = {key: _wrong_setting(label, name, key, value, every[name]) for key, value in given.items()}
            problems += [((*path, key), message) for key, message in wrong.items() if message]
    return methods, problems


def _wrong_setting(label: str, name: str, key: str, value: Any, known: Mapping[str, Any]) -> str | None:
    """Explain what is wrong with a key of a method's table; None if it is valid."""
    if key not in known:
        choices = f"its settings are {', '.join(known)}" if known else "it has no settings"
        return f"methods.{label}: unknown setting {key!r} of {name}{close(key, known)}; {choices}"
    fault = _mismatch(known[key], value)
    return fault and f"methods.{label}.{key} must be {fault}, like its default {known[key]!r}, got {value!r}"


MOST = 1000
"""Upper bound of members, checkpoints and other counts; more would not fit into memory."""


def _mismatch(default: Any, value: Any) -> str | None:
    """Describe the type a setting must have, by its default; None if it has that type."""
    known = {bool: "true or false", int | float: "a number", str: "a string", list | tuple: "a list"}
    types = next((types for types in known if isinstance(default, types)), None)
    if types is None:
        return None
    if not isinstance(value, types) or isinstance(value, bool) != isinstance(default, bool):
        return known[types]
    if isinstance(value, int | float) and not math.isfinite(value):
        return "a number, and finite"
    large = type(default) is int and isinstance(value, int | float) and abs(value) > MOST
    return f"a number, {MOST} at most" if large else None


def _read_model(raw: Any, base: Path) -> list[tuple[Place, str]]:
    """List problems with the name or file of the model."""
    if not isinstance(raw, dict) or not isinstance(raw.get("name", ""), str):
        return []
    name, file = raw.get("name"), raw.get("file")
    if file is not None and name is None:
        return [(("model", "file"), "model.file needs model.name, the function in it that builds the model")]
    if file is not None:
        missing = isinstance(file, str) and not (base / file).is_file()
        fault = f"model.file must be a Python file, got {file!r}, which does not exist"
        return [(("model", "file"), fault)] if missing else []
    if name is None:
        alone = isinstance(raw.get("settings"), dict) and raw["settings"]
        return [(("model", "settings"), "model.settings need a model.name")] if alone else []
    if name.startswith(HUB):
        return []
    from multitudes.lab.study.spec.network_sources import network_names

    names = network_names()
    choices = f"{one_of(names)}, a function of model.file, or hf:FOLDER"
    fault = f"model.name must be {choices}, got {name!r}{close(name, names)}"
    return [] if name in names else [(("model", "name"), fault)]


def _absolute(spec: Spec, base: Path) -> dict[str, Section]:
    """Return data and model with absolute file paths."""

    def whole(source: str) -> str:
        known = source == DataSection().source or not (base / source).exists()
        return source if known else str((base / source).resolve())

    data = {"source": whole(spec.data.source), "ood": [whole(source) for source in spec.data.ood]}
    if spec.data.tokenizer is not None:
        data["tokenizer"] = whole(spec.data.tokenizer)
    file = None if spec.model.file is None else str((base / spec.model.file).resolve())
    name = spec.model.name
    if name is not None and name.startswith(HUB):
        name = HUB + whole(name.removeprefix(HUB))
    model = spec.model.model_copy(update={"file": file, "name": name})
    return {"data": spec.data.model_copy(update=data), "model": model}
