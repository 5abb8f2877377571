"""Groups of options shared by several commands; a command takes a group as one argument.

Options of data, training and evaluation are declared as keys of a `study.toml` (`lab/study/spec/sections.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from typer import Option

from multitudes.lab.study.spec.sections import DataSection, EvaluationSection, Section, TrainingSection, option


class Options(Section):
    """A group of options."""

    heading: ClassVar[str]
    """Heading in `--help`."""

    def arguments(self) -> dict[str, Any]:
        """Return the options that were given, by their name in a specification."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        given = {name: value for name, value in values.items() if value is not None and value is not False}
        return {name: READ[name](value) if name in READ else value for name, value in given.items()}


class Common(Options):
    """Options of every command."""

    heading: ClassVar[str] = "Common options"
    device: Literal["auto", "cpu", "cuda"] | None = option(None, "Device; auto uses a GPU if there is one.")
    precision: Literal["auto", "float32", "bfloat16"] | None = option(
        None, "Precision; bfloat16 is mixed precision, auto uses it on GPUs that support it."
    )
    seed: int | None = option(None, "Seed of all random numbers.", min=0)
    debug: bool = option(False, "Show tracebacks of errors.")


class DataOptions(DataSection, Options):
    """Options for reading a source."""

    heading: ClassVar[str] = "Data"
    data_root: Path | None = option(
        None, "Folder to search for data that are not found.", metavar="FOLDER", envvar="MULTITUDES_DATA"
    )

    def arguments(self) -> dict[str, Any]:
        """Return the options that were given, by their name in `multitudes.lab.data.load`."""
        found = super().arguments()
        root = found.pop("data_root", None)
        if "ood" in found:
            found["ood"] = [located(each, root) for each in found["ood"]]
        return found


class TrainingOptions(TrainingSection, Options):
    """Options for training."""

    heading: ClassVar[str] = "Training"
    model: str | None = option(
        None, "A name in multitudes.models, FILE.py:FUNCTION, or a Hugging Face model hf:FOLDER.", metavar="NAME"
    )


class EvaluationOptions(EvaluationSection, Options):
    """Options for evaluation."""

    heading: ClassVar[str] = "Evaluation"


# -- reading -----------------------------------------------------------------------------------------------


def words(listed: str) -> list[str]:
    """Split a list at commas.

    >>> words("single, packed")
    ['single', 'packed']
    """
    return [word.strip() for word in listed.split(",") if word.strip()]


def located(source: str, root: Path | None) -> str:
    """Return the absolute path of a source that is a file, here or in `root`; return others unchanged.

    >>> located("digits", None), located("uoft-cs/cifar10", None)
    ('digits', 'uoft-cs/cifar10')
    """
    if source == "digits":
        return source
    if root is not None and not root.is_dir():
        raise ValueError(f"--data-root must be a folder, got {str(root)!r}, which does not exist")
    places = [Path(source)] if root is None else [Path(source), root / source]
    return next((str(place.resolve()) for place in places if place.exists()), source)


def writable(to: Path | None, *suffixes: str) -> None:
    """Check the extension and folder of `--to` before any work."""
    if to is None:
        return
    if suffixes and to.suffix.lower() not in suffixes:
        raise ValueError(f"--to must end in {' or '.join(suffixes)}, got {str(to)!r}")
    if to.is_dir() or not to.parent.is_dir():
        raise ValueError(f"--to must be a file in a folder that exists, got {str(to)!r}")


def model_place(model: str) -> str:
    """Return a model with an absolute path in FILE.py:FUNCTION or hf:FOLDER."""
    if model.startswith("hf:"):
        place = Path(model.removeprefix("hf:")).expanduser()
        return f"hf:{place.resolve()}" if place.exists() else model
    file, _, function = model.rpartition(":")
    return f"{Path(file).resolve()}:{function}" if file else function


def _shift(listed: str) -> str | list[str]:
    return listed if listed == "all" else [] if listed == "none" else words(listed)


def _severities(listed: str) -> list[int]:
    try:
        return [int(word) for word in words(listed)]
    except ValueError:
        raise ValueError(f"--severities must be whole numbers, got {listed!r}") from None


def _read_as(listed: list[str]) -> dict[str, str]:
    pairs = [text.rpartition("=") for text in listed]
    for (name, _, _), text in zip(pairs, listed, strict=True):
        if not name:
            raise ValueError(f"--as must be COLUMN=KIND, got {text!r}")
    return {name: kind for name, _, kind in pairs}


READ: dict[str, Callable[[Any], Any]] = {
    "columns": words,
    "model": model_place,
    "read_as": _read_as,
    "shift": _shift,
    "severities": _severities,
}
"""Parsers from an option's text to its value in a specification."""


# -- groups ------------------------------------------------------------------------------------------------


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """Expand a command's option groups into single options, for Typer.

    >>> def command(name: str, common: Common) -> None:
    ...     print(name, common.seed)
    >>> command = grouped(command)
    >>> list(inspect.signature(command).parameters)
    ['name', 'device', 'precision', 'seed', 'debug']
    >>> command(name="packed", device=None, precision=None, seed=3, debug=False)
    packed 3
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, Options)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        own = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += _parameters(groups[name]) if name in groups else [own]

    @wraps(function)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            own = {parameter.name: values.pop(parameter.name) for parameter in _parameters(group)}
            values[name] = group.model_construct(**own)  # the specification or the called function validates
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect and Typer
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameters(group: type[Options]) -> list[inspect.Parameter]:
    """Return the options of a group as parameters of a function; None, or False for a flag, means not given."""
    found = []
    for name, field in group.model_fields.items():
        extra: Any = field.json_schema_extra or {}
        if "option" not in extra:
            continue
        settings = dict(extra["option"])
        kind = settings.pop("kind") or _kind(field.annotation)
        flag = [f"--{name.replace('_', '-')}"] if kind is bool else []
        declared = Option(
            *(flag or settings.pop("flags", ())), help=field.description, rich_help_panel=group.heading, **settings
        )
        hint: Any = bool if flag else kind | None
        default = False if flag else None
        own = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        found.append(own.replace(annotation=Annotated[hint, declared]))
    return found


def _kind(annotation: Any) -> Any:
    """Return the option type of a key, without None and bounds; a list becomes text with commas."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(each for each in get_args(annotation) if each is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return str if get_origin(annotation) is list else annotation
