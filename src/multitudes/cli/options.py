"""Options that several commands share: a dataclass is a group of them, and a command takes it as one argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from typer import Option

__all__ = [
    "Common",
    "DataOptions",
    "EvaluationOptions",
    "TrainingOptions",
    "given",
    "grouped",
    "located",
    "words",
    "writable",
]

EVERYWHERE, DATA, TRAINING, EVALUATION = "On every command", "Data", "Training", "Evaluation"


@dataclass(frozen=True)
class Common:
    """What every command takes."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        Option(help="Where to compute; auto is a GPU where there is one.", rich_help_panel=EVERYWHERE),
    ] = None
    precision: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option(help="Of the computation; bfloat16 is mixed precision.", rich_help_panel=EVERYWHERE),
    ] = None
    seed: Annotated[int | None, Option(min=0, help="Of everything random.", rich_help_panel=EVERYWHERE)] = None
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.", rich_help_panel=EVERYWHERE)] = False


@dataclass(frozen=True)
class DataOptions:
    """How to read a source: the arguments of `multitudes.data.load`."""

    target: Annotated[str | None, Option(metavar="COLUMN", help="What to predict.", rich_help_panel=DATA)] = None
    image: Annotated[
        str | None, Option(metavar="COLUMN", help="The images, where there are several.", rich_help_panel=DATA)
    ] = None
    columns: Annotated[str | None, Option(metavar="A,B,...", help="The features of a table.", rich_help_panel=DATA)] = (
        None
    )
    split: Annotated[
        str | None, Option(metavar="COLUMN", help="Says train, validation or test.", rich_help_panel=DATA)
    ] = None
    task: Annotated[
        Literal["classification", "regression"] | None,
        Option(help="Told by the target, unless said here.", rich_help_panel=DATA),
    ] = None
    fold: Annotated[int | None, Option(min=0, help="Which split of a .npz file.", rich_help_panel=DATA)] = None
    size: Annotated[int | None, Option(min=1, help="Resize images to this many pixels.", rich_help_panel=DATA)] = None
    limit: Annotated[int | None, Option(min=1, help="Keep this many rows of each part.", rich_help_panel=DATA)] = None
    ood: Annotated[
        list[str] | None, Option(metavar="SOURCE", help="Foreign inputs; may be repeated.", rich_help_panel=DATA)
    ] = None
    skip_bad: Annotated[
        bool, Option("--skip-bad", help="Leave bad rows out, and say how many.", rich_help_panel=DATA)
    ] = False
    data_root: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            envvar="MULTITUDES_DATA",
            help="Where sources are looked for that are not found as given.",
            rich_help_panel=DATA,
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Those that were given, by their name in `load`."""
        found = given(self)
        root = found.pop("data_root", None)
        if "columns" in found:
            found["columns"] = words(found["columns"])
        if "ood" in found:
            found["ood"] = [located(source, root) for source in found["ood"]]
        return found


@dataclass(frozen=True)
class TrainingOptions:
    """How to train: the arguments of `mt.fit`."""

    model: Annotated[
        str | None,
        Option(metavar="NAME", help="One of multitudes.models, or FILE.py:FUNCTION.", rich_help_panel=TRAINING),
    ] = None
    epochs: Annotated[int | None, Option(help="Times to go through the data.", rich_help_panel=TRAINING)] = None
    batch_size: Annotated[int | None, Option(help="Inputs in a step.", rich_help_panel=TRAINING)] = None
    optimizer: Annotated[Literal["sgd", "adam", "adamw"] | None, Option(rich_help_panel=TRAINING)] = None
    lr: Annotated[float | None, Option(help="Learning rate at its highest.", rich_help_panel=TRAINING)] = None
    weight_decay: Annotated[float | None, Option(rich_help_panel=TRAINING)] = None
    schedule: Annotated[
        Literal["cosine", "linear", "multistep", "cyclic", "constant"] | None,
        Option(help="Of the learning rate.", rich_help_panel=TRAINING),
    ] = None
    warmup: Annotated[float | None, Option(help="Epochs in which the rate rises.", rich_help_panel=TRAINING)] = None
    augment: Annotated[
        Literal["none", "standard", "crop"] | None,
        Option(help="Random crops, with or without flips.", rich_help_panel=TRAINING),
    ] = None
    channels_last: Annotated[
        bool, Option("--channels-last", help="Lay images out channels-last.", rich_help_panel=TRAINING)
    ] = False
    compile: Annotated[bool, Option("--compile", help="Compile the training step.", rich_help_panel=TRAINING)] = False

    def arguments(self) -> dict[str, Any]:
        """Those that were given, by their name in a specification."""
        found = given(self)
        if "model" in found:
            file, _, function = found["model"].rpartition(":")
            found["model"] = f"{Path(file).resolve()}:{function}" if file else function
        return found


@dataclass(frozen=True)
class EvaluationOptions:
    """What to measure beside the test part as it is."""

    shift: Annotated[
        str | None,
        Option(metavar="A,B|all|none", help="Corruptions of images to test on.", rich_help_panel=EVALUATION),
    ] = None
    severities: Annotated[
        str | None, Option(metavar="1,3,5", help="Of the corruptions, from 1 to 5.", rich_help_panel=EVALUATION)
    ] = None
    draws: Annotated[
        int | None, Option(min=1, help="Predictions of a method that draws.", rich_help_panel=EVALUATION)
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Those that were given, by their name in a specification."""
        found = given(self)
        if "shift" in found:
            chosen = found["shift"]
            found["shift"] = chosen if chosen == "all" else [] if chosen == "none" else words(chosen)
        if "severities" in found:
            found["severities"] = [_whole("severities", word) for word in words(found["severities"])]
        return found


def given(options: Any) -> dict[str, Any]:
    """The options of a group that were given, by name."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def words(listed: str) -> list[str]:
    """The words of a list.

    >>> words("single, packed")
    ['single', 'packed']
    """
    return [word.strip() for word in listed.split(",") if word.strip()]


def located(source: str, root: Path | None) -> str:
    """A source as `load` finds it from anywhere: a file or folder by its whole path, one within `root` too.

    >>> located("digits", None), located("uoft-cs/cifar10", None)
    ('digits', 'uoft-cs/cifar10')
    """
    if source == "digits":
        return source
    if root is not None and not root.is_dir():
        raise ValueError(f"--data-root must be a folder, got {str(root)!r}, which is none")
    places = [Path(source)] if root is None else [Path(source), root / source]
    return next((str(place.resolve()) for place in places if place.exists()), source)


def writable(to: Path | None, *suffixes: str) -> None:
    """Say before any work that `--to` is not where, or not what, a file can be."""
    if to is None:
        return
    if suffixes and to.suffix.lower() not in suffixes:
        raise ValueError(f"--to must end in {' or '.join(suffixes)}, got {str(to)!r}")
    if to.is_dir() or not to.parent.is_dir():
        raise ValueError(f"--to must be a file in a folder that is there, got {str(to)!r}")


def _whole(name: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{name} must be whole numbers, got {word!r}") from None


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose groups of options are single options, as Typer reads them.

    >>> def command(name: str, common: Common) -> None:
    ...     print(name, common.seed)
    >>> command = grouped(command)
    >>> list(inspect.signature(command).parameters)
    ['name', 'device', 'precision', 'seed', 'debug']
    >>> command(name="packed", device=None, precision=None, seed=3, debug=False)
    packed 3
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if not is_dataclass(hints[name]):
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = hints[name]
        own = get_type_hints(hints[name], include_extras=True)
        parameters += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=own[f.name])
            for f in fields(hints[name])
        ]

    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which inspect and Typer read
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
