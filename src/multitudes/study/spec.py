"""What a study shall do: `Spec`, read from a `study.toml` and checked before anything runs.

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

What is left out has a default, which for network and training depends on the data (`multitudes.study.networks`).
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from multitudes.data.kinds import kind_of_shape
from multitudes.study.methods import METHODS, methods_for, unfit
from multitudes.study.networks import defaults, network_names
from multitudes.study.scales import at_scale
from multitudes.study.sections import (
    DataSection,
    EvaluationSection,
    MethodSection,
    ModelSection,
    Section,
    Seeds,
    TrainingSection,
)
from multitudes.study.toml import key_lines, to_toml

# isort: split
from pydantic import BaseModel, Field, PrivateAttr, ValidationError  # after the sections, which say what to install

__all__ = ["Spec", "SpecError"]

Place = tuple[str | int, ...]
"""Where a value is: `("training", "epochs")`."""

SHIFT = ["gaussian_noise", "defocus_blur", "fog", "contrast"]
"""One corruption of each family: noise, blur, weather, digital."""


class SpecError(ValueError):
    """What is wrong with a specification: one line a problem, with its place in the file."""

    def __init__(self, problems: Iterable[tuple[Place, str]], lines: Mapping[Place, int], file: str | None) -> None:
        placed = [(_line(lines, path), message) for path, message in problems]
        placed.sort(key=lambda each: each[0] or 0)
        self.lines = [line for line, _ in placed]
        where = [f"{file}, line {line}: " if file and line else f"{file}: " if file else "" for line, _ in placed]
        super().__init__("\n".join(place + message for place, (_, message) in zip(where, placed, strict=True)))


def _line(lines: Mapping[Place, int], path: Place) -> int | None:
    """The line of a value, or of the innermost table or list that it is in."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None)


# -- the whole ---------------------------------------------------------------------------------------------


class Spec(Section):
    """A study: every method with every seed, trained on the same data and measured alike.

    >>> spec = Spec.of(data="digits", methods=["single", "packed"], seeds=3, epochs=30)
    >>> spec.seeds, spec.methods["packed"].settings
    ([0, 1, 2], {'members': 4, 'alpha': 2, 'gamma': 1, 'layers': None})
    >>> Spec.of(methods=["packed"], epochs=0)
    Traceback (most recent call last):
    multitudes.study.spec.SpecError: training.epochs must be 1 or more, got 0
    """

    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    methods: dict[str, MethodSection] = Field(default={})
    """What the study calls them; none stands for all that fit the data."""
    seeds: Seeds = Field(default=[0])
    device: Literal["auto", "cpu", "cuda"] = "auto"
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()

    _lines: dict[Place, int] = PrivateAttr(default_factory=dict)
    _file: str | None = PrivateAttr(default=None)

    @classmethod
    def load(cls, path: str | Path, scale: str | None = None, **options: Any) -> Self:
        """Read a `study.toml`, at one of its scales; options, named as in `of`, come before what it says."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            raw = tomllib.loads(text)
        except OSError as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        except ValueError as error:  # no TOML, or not UTF-8
            raise ValueError(f"{path.name}: {str(error)[:1].lower()}{str(error)[1:]}") from error
        try:
            raw, lines = at_scale(raw, key_lines(text), scale)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error
        return cls._checked(_merged(raw, options), path.parent, lines, path.name)

    @classmethod
    def of(cls, **options: Any) -> Self:
        """From options: `data`, `model` (a name, or FILE.py:FUNCTION), `methods`, `seeds`, `device`, and any key of
        the sections by its own name (`epochs`, `ood`, `shift`). One that is None is not given."""
        return cls._checked(_merged({}, options), Path(), {}, None)

    @classmethod
    def _checked(cls, raw: dict[str, Any], base: Path, lines: dict[Place, int], file: str | None) -> Self:
        methods, problems = _read_methods(raw.get("methods"))
        problems += _read_model(raw.get("model"), base)
        try:
            spec = cls.model_validate({**raw, "methods": methods})
        except ValidationError as error:
            problems = [_problem(cls, each) for each in error.errors()] + problems
        if problems:
            raise SpecError(problems, lines, file)
        spec = spec.model_copy(update={"data": _located(spec.data, base), "model": _absolute(spec.model, base)})
        spec._lines, spec._file = lines, file
        return spec

    def __eq__(self, other: object) -> bool:
        """Whether both ask for the same, wherever they were read."""
        return isinstance(other, Spec) and self.model_dump() == other.model_dump()

    def error(self, problems: Iterable[tuple[Place, str]]) -> SpecError:
        """An error for what shows only later, with the lines of the file that this was read from."""
        return SpecError(problems, self._lines, self._file)

    def resolved(self, shape: tuple[int, ...], task: str = "classification") -> Self:
        """With every default filled in, for inputs of a shape, `(C, H, W)` or `(F,)`, and a task."""
        suggested = defaults(shape)
        given = {key: value for key, value in self.training.model_dump().items() if value is not None}
        training = {**suggested["training"], **given}
        if "lr" not in given and training["optimizer"] != suggested["training"]["optimizer"]:
            training["lr"] = 0.05 if training["optimizer"] == "sgd" else 1e-3  # a rate is one of its optimizer
        if "warmup" not in given and training["warmup"] >= training["epochs"]:
            training["warmup"] = 0  # too short a training for it
        for key, nothing in NOTHING.items():
            training[key] = nothing if training[key] is None else training[key]
        methods = self.methods
        if not methods:
            every = {name: METHODS[name].complete() for name in methods_for(shape)}
            methods = {name: MethodSection(method=name, settings=settings) for name, settings in every.items()}
        spec = self.model_copy(
            update={
                "model": self.model if self.model.name else ModelSection(**suggested["model"]),
                "methods": methods,
                "training": TrainingSection(**training),
                "evaluation": self.evaluation.model_copy(update={"shift": self._shift(shape, task)}),
            }
        )
        spec._check(shape, task)
        return spec

    def _shift(self, shape: tuple[int, ...], task: str) -> list[str]:
        if self.evaluation.shift is not None:
            return self.evaluation.shift
        return SHIFT if kind_of_shape(shape).corruptible(shape) and task == "classification" else []

    def _check(self, shape: tuple[int, ...], task: str) -> None:
        """What only the data can tell."""
        problems: list[tuple[Place, str]] = []
        training, evaluation = self.training, self.evaluation
        if training.warmup >= training.epochs:  # type: ignore[operator]
            many = f"the {training.epochs} epochs, got {training.warmup:g}"
            problems.append((("training", "warmup"), f"training.warmup must be less than {many}"))
        if evaluation.shift and not (kind_of_shape(shape).corruptible(shape) and task == "classification"):
            needs = "images of 1 or 3 channels, 8 or more pixels a side, and classes"
            got = f"inputs {list(shape)} and {task}"
            problems.append((("evaluation", "shift"), f"evaluation.shift needs {needs}, got {got}"))
        if training.augment != "none" and not kind_of_shape(shape).feature_maps:
            problems.append((("training", "augment"), f"training.augment={training.augment!r} is for images"))
        for label, each in self.methods.items():
            if reason := unfit(METHODS[each.method], shape):
                problems.append((("methods", label), f"methods.{label}: {reason}"))
        if problems:
            raise self.error(problems)

    def to_toml(self) -> str:
        """The text of a `study.toml` that reads back as this."""
        whole = self.model_dump(exclude_none=True)
        methods = {
            label: {"method": None if each.method == label else each.method, **each.settings}
            for label, each in self.methods.items()
        }
        whole.pop("methods")
        whole["model"]["settings"] = whole["model"]["settings"] or None
        return to_toml({"seeds": whole.pop("seeds"), "device": whole.pop("device"), "methods": methods, **whole})


NOTHING = {"augment": "none", "clip": 0.0}
"""How the file says that there is none of it, since TOML has no word for that."""


# -- reading -----------------------------------------------------------------------------------------------

SECTIONS: dict[str, type[Section]] = {
    "training": TrainingSection,
    "data": DataSection,
    "evaluation": EvaluationSection,
    "model": ModelSection,
}
OPTIONS = ("training", "data", "evaluation")
"""Those whose keys are options by their own name; where two have the same, it is that of the first."""


def _merged(raw: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says, with options put where they belong."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for name, value in options.items():
        if value is None:
            continue
        if name in ("methods", "seeds", "device"):
            merged[name] = value
        elif name == "data":
            merged.setdefault("data", {})["source"] = str(value)
        elif name == "model":
            file, _, function = str(value).rpartition(":")
            merged["model"] = {"file": file, "name": function} if file else {"name": value}
        else:
            owners = [section for section in OPTIONS if name in SECTIONS[section].model_fields]
            place = merged.setdefault(owners[0], {}) if owners and name not in ("source", "seed") else merged
            place[name] = [str(each) for each in value] if name == "ood" else value
    return merged


def _read_methods(raw: Any) -> tuple[Any, list[tuple[Place, str]]]:
    """Methods by what the study calls them, `{"method": ..., "settings": ...}`, and what is wrong with them."""
    if raw is None:
        return {}, []
    if not isinstance(raw, list | tuple | dict) or not raw:
        return {}, [(("methods",), f"methods must be a list of names, or tables [methods.NAME], got {raw!r}")]
    if isinstance(raw, dict):
        entries = [(("methods", label), label, table) for label, table in raw.items()]
    else:
        entries = [(("methods", index), label, {}) for index, label in enumerate(raw)]
    methods: dict[str, dict[str, Any]] = {}
    problems: list[tuple[Place, str]] = []
    for path, label, table in entries:
        if not isinstance(label, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", label):
            problems.append((path, f"methods must have names of letters, digits, _, - and ., got {label!r}"))
        elif not isinstance(table, dict):
            problems.append((path, f"methods.{label} must be a table of settings, got {table!r}"))
        elif label in methods:
            problems.append((path, f"methods names {label!r} twice"))
        else:
            settings = {key: value for key, value in table.items() if key != "method"}
            name = table.get("method", label)
            methods[label] = {"method": name, "settings": settings}
            wrong = _wrong_settings(label, name, settings)
            problems += [((*path, key) if key else path, message) for key, message in wrong]
            if not wrong:
                methods[label]["settings"] = METHODS[name].complete(settings)
    return {label: each for label, each in methods.items() if isinstance(each["method"], str)}, problems


def _wrong_settings(label: str, name: Any, settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Which keys of a method's table are wrong, and why."""
    if not isinstance(name, str) or name not in METHODS:
        where = f"methods.{label}.method" if label != name else "methods"
        return [("method", f"{where} must be {_choices(METHODS)}, got {name!r}{_close(name, METHODS)}")]
    known = METHODS[name].settings
    wrong = []
    for key, value in settings.items():
        if key not in known:
            choices = f"its settings are {', '.join(known)}" if known else "it has no settings"
            wrong.append((key, f"methods.{label}: unknown setting {key!r} of {name}{_close(key, known)}; {choices}"))
        elif fault := _mismatch(known[key], value):
            wrong.append(
                (key, f"methods.{label}.{key} must be {fault}, like its default {known[key]!r}, got {value!r}")
            )
    return wrong


def _mismatch(default: Any, value: Any) -> str | None:
    """What a setting must be to be of the kind of its default; None where it is."""
    if default is None:
        return None
    if isinstance(default, bool) or isinstance(value, bool):
        return None if isinstance(default, bool) and isinstance(value, bool) else _KINDS[type(default)]
    kinds = (int, float) if isinstance(default, int | float) else (str,) if isinstance(default, str) else (list, tuple)
    return None if isinstance(value, kinds) else _KINDS[type(default)]


_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list", tuple: "a list"}


def _read_model(raw: Any, base: Path) -> list[tuple[Place, str]]:
    """What is wrong with a network's name or file."""
    if not isinstance(raw, dict) or not isinstance(raw.get("name", ""), str):
        return []
    name, file = raw.get("name"), raw.get("file")
    if file is None:
        if name is None:
            alone = isinstance(raw.get("settings"), dict) and raw["settings"]
            return [(("model", "settings"), "model.settings need a model.name")] if alone else []
        names = network_names()
        message = (
            f"model.name must be {_choices(names)}, or a function of model.file, got {name!r}{_close(name, names)}"
        )
        return [] if name in names else [(("model", "name"), message)]
    if name is None:
        return [(("model", "file"), "model.file needs model.name, the function in it that makes the network")]
    if isinstance(file, str) and not (base / file).is_file():
        return [(("model", "file"), f"model.file must be a Python file, got {file!r}, which is none")]
    return []


def _located(data: DataSection, base: Path) -> DataSection:
    """With the sources that are files by their whole path, so that the run directory can tell them from anywhere."""

    def whole(source: str) -> str:
        known = source == DataSection().source or not (base / source).exists()
        return source if known else str((base / source).resolve())

    return data.model_copy(update={"source": whole(data.source), "ood": [whole(source) for source in data.ood]})


def _absolute(model: ModelSection, base: Path) -> ModelSection:
    return model if model.file is None else model.model_copy(update={"file": str((base / model.file).resolve())})


# -- what is wrong -----------------------------------------------------------------------------------------

_MUST = {
    "missing": "is missing",
    "int_type": "must be a whole number, got {input!r}",
    "float_type": "must be a number, got {input!r}",
    "finite_number": "must be a finite number, got {input!r}",
    "string_type": "must be a text, got {input!r}",
    "bool_type": "must be true or false, got {input!r}",
    "list_type": "must be a list, got {input!r}",
    "dict_type": "must be a table, got {input!r}",
    "model_type": "must be a table, got {input!r}",
    "literal_error": "must be {expected}, got {input!r}",
    "greater_than": "must be above {gt}, got {input!r}",
    "greater_than_equal": "must be {ge} or more, got {input!r}",
    "less_than": "must be below {lt}, got {input!r}",
    "less_than_equal": "must be {le} at most, got {input!r}",
    "too_short": "must hold at least {min_length}, got {input!r}",
    "too_long": "must hold at most {max_length}, got {input!r}",
    "value_error": "{error}",
}


def _problem(kind: type[BaseModel], error: Mapping[str, Any]) -> tuple[Place, str]:
    """Where Pydantic found a fault, and a sentence about it."""
    path: Place = error["loc"]
    if error["type"] == "extra_forbidden":
        for key in path[:-1]:
            kind = kind.model_fields[str(key)].annotation  # type: ignore[assignment]
        known = list(kind.model_fields)
        owner = next((name for name, section in SECTIONS.items() if path[-1] in section.model_fields), None)
        hint = f" (did you mean [{owner}] {path[-1]}?)" if owner else _close(path[-1], known)
        table = f"[{'.'.join(map(str, path[:-1]))}]" if path[1:] else "the file"
        return path, f"unknown key {_name(path)!r}{hint}; the keys of {table} are {', '.join(known)}"
    told = _MUST.get(error["type"], "is wrong: " + error["msg"].replace("{", "{{").replace("}", "}}"))
    return path, f"{_name(path)} {told.format(input=error['input'], **error.get('ctx', {}))}"


def _name(path: Place) -> str:
    """A path as one writes it: `evaluation.severities[1]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _choices(names: Iterable[str]) -> str:
    return f"one of {', '.join(names)}"


def _close(name: Any, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
