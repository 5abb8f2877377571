"""The tables of a `study.toml`, one class each: their keys, valid values, and which keys are options.

A key declared by `option` is also a command-line option with that help text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from multitudes.base.checks import needed
from multitudes.lab.data.tables.numbers_and_dates import READ_AS
from multitudes.lab.study.spec.toml import Place, TomlText
from multitudes.training.schedules import SCHEDULES, schedule_of

needed("pydantic", "study", "a study")  # raises with the extra to install; the import below would not

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field  # noqa: E402

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


def option(default: Any, help: str, kind: Any = None, **settings: Any) -> Any:
    """Declare a field that is also a command-line option: its help, its type there if different, and settings."""
    return Field(default, description=help, json_schema_extra={"option": {"kind": kind, **settings}})


def _unique(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError(f"must not repeat a value, got {values}")
    return values


MOST_SEEDS = 10_000


def _seeds(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if not 1 <= value <= MOST_SEEDS:
        raise ValueError(f"must be a number of seeds, 1 to {MOST_SEEDS}, or a list of seeds, got {value}")
    return list(range(value))


def _sides(value: Any) -> Any:
    return [value, value] if isinstance(value, int) and not isinstance(value, bool) else value


def _corruptions(value: Any) -> Any:
    from multitudes.shift.corruptions import CORRUPTIONS  # local: imports torch

    return list(CORRUPTIONS) if value == "all" else value


def _corruption(name: str) -> str:
    from multitudes.shift.corruptions import CORRUPTIONS, EXTRA

    if name not in CORRUPTIONS + EXTRA:
        raise ValueError(f'must be one of {", ".join(CORRUPTIONS + EXTRA)}, or the whole list "all", got {name!r}')
    return name


def _schedule(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError(f"must be one of {', '.join(SCHEDULES)}, or a table with such a name, got {value!r}")
    try:
        schedule_of(value)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("schedule ")) from error
    return value


Unique = (Field(min_length=1), AfterValidator(_unique))
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], BeforeValidator(_seeds), *Unique]
Sizes = Annotated[list[Count], *Unique]
Severities = Annotated[list[Annotated[int, Field(ge=1, le=5)]], *Unique]
Corruptions = Annotated[
    list[Annotated[str, AfterValidator(_corruption)]], BeforeValidator(_corruptions), AfterValidator(_unique)
]


class Section(BaseModel):
    """A table. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DataSection(Section):
    """Data to learn from: the arguments of `multitudes.lab.data.load`."""

    source: str = "digits"
    target: str | None = option(None, "Column to predict.", metavar="COLUMN")
    image: str | None = option(None, "Column of images, if there are several.", metavar="COLUMN")
    text: str | None = option(
        None, "Column of texts, if there are several.", flags=("--text-column",), metavar="COLUMN"
    )
    tokenizer: str | None = option(
        None, "Tokenizer for texts, a Hugging Face folder; default: the model's.", metavar="FOLDER|NAME"
    )
    max_length: Count | None = option(None, "Maximum tokens per text; default: 256 or the model's limit.", min=1)
    columns: list[str] | None = option(None, "Feature columns of a table; default: all others.", metavar="A,B,...")
    drop: list[str] = option([], "Ignore this column; may be repeated.", list[str], metavar="COLUMN")
    read_as: dict[str, str] = option(
        {},
        f"Read a column as {', '.join(READ_AS)}; may be repeated.",
        list[str],
        flags=("--as",),
        metavar="COLUMN=KIND",
    )
    split: str | None = option(None, "Column with train, validation or test for each row.", metavar="COLUMN")
    task: Literal["classification", "regression"] | None = option(None, "Default: inferred from the target.")
    numbers: Literal["quantile", "standard"] = option(
        "quantile", "Scaling of numbers in a table: quantile maps them to a normal distribution."
    )
    fold: Annotated[int, Field(ge=0)] = option(0, "Split of a .npz file to use.", min=0)
    folds: Annotated[int, Field(ge=2, le=100)] | None = option(
        None, "Cross-validate with this many folds; each method is trained once per fold.", min=2
    )
    size: Annotated[list[Count], BeforeValidator(_sides), Field(min_length=2, max_length=2)] | None = option(
        None, "Resize images to this many pixels per side.", int, min=1
    )
    limit: Count | None = option(None, "Use at most this many rows of each part.", min=1)
    ood: list[str] = option([], "Source of out-of-distribution inputs; may be repeated.", list[str], metavar="SOURCE")
    skip_bad: bool = option(False, "Skip rows that cannot be read, and report how many.")
    validation: Fraction | None = None
    test: Fraction = 0.2
    seed: Annotated[int, Field(ge=0)] = 0

    @property
    def embedded(self) -> bool:
        """True for the complete data that come with the package."""
        return self == DataSection()


class ModelSection(Section):
    """The network: a model of `multitudes.models`, a function `build(shape, outputs, **settings)` in a file, or a
    Hugging Face model, `hf:FOLDER`, whose settings are those of its configuration."""

    name: str | None = None
    file: str | None = None
    settings: dict[str, Any] = {}


class MethodSection(Section):
    """A method, by its name in `METHODS`, with all its settings."""

    method: str
    settings: dict[str, Any] = {}


class TrainingSection(Section):
    """Training: the arguments of `mt.fit`. A default of None depends on the kind of data."""

    epochs: Count | None = option(None, "Passes over the training data.")
    patience: Annotated[int, Field(ge=0)] | None = option(
        None, "Stop after this many epochs without a better validation score; 0: never."
    )
    batch_size: Annotated[int, Field(ge=0)] | None = option(
        None, "Inputs per training step; 0: chosen by the number of rows."
    )
    optimizer: Literal["sgd", "adam", "adamw"] | None = option(None, "Optimizer.")
    lr: Annotated[float, Field(gt=0)] | None = option(None, "Peak learning rate.")
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = option(None, "Weight decay of the optimizer.")
    schedule: Annotated[Any, AfterValidator(_schedule)] = option(
        None, "Learning rate schedule.", Literal[tuple(SCHEDULES)]
    )
    warmup: Annotated[float, Field(ge=0)] | None = option(None, "Epochs of linear learning rate warm-up.")
    augment: Literal["none", "standard", "crop"] | None = option(
        None, "Augmentation of images: random crops, with flips if standard."
    )
    class_weight: Literal["none", "balanced"] | None = option(
        None, "balanced: weight each class by the inverse of its number of rows."
    )
    precision: Literal["auto", "float32", "bfloat16"] | None = None
    """auto is bfloat16 on GPUs that support it."""
    average: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of a moving average of the weights; 0 disables it."""
    channels_last: bool | None = option(None, "Use the channels-last memory format for images.", bool)
    compile: bool | None = option(None, "Compile the training step with torch.compile.", bool)
    clip: Annotated[float, Field(ge=0)] | None = None
    """0 disables clipping."""


class EvaluationSection(Section):
    """Evaluation. `shift` None is one corruption per family for images, and none for tables."""

    shift: Corruptions | None = option(None, "Image corruptions to evaluate on.", metavar="A,B|all|none")
    severities: Severities = option([1, 3, 5], "Severities of the corruptions, 1 to 5.", metavar="1,3,5")
    shift_limit: Count = 500
    """Maximum number of corrupted test images, stratified by class."""
    shift_draws: Count = 10
    """Draws per corrupted image."""
    draws: Count = option(20, "Number of random predictions of methods that draw.", min=1)
    calibrate: bool = True
    """Calibrate each network on the validation part before measuring it."""
    batch_size: Count = 256
    sizes: Sizes = [1, 2, 4, 8, 16]
    bins: Count = 15
    """Confidence bins of the calibration errors."""
    min_count: Count = 1
    """Minimum predictions in a bin for it to count."""


# -- errors ------------------------------------------------------------------------------------------------


class SpecError(ValueError):
    """Errors in a specification: one line per problem, with its line in the file if there is one."""

    def __init__(self, problems: Iterable[tuple[Place, str]], source: TomlText | None = None) -> None:
        found = [(source.line(place) if source else None, message) for place, message in problems]
        found.sort(key=lambda each: each[0] or 0)
        self.lines = [line for line, _ in found]
        start = source.name if source else ""
        where = [f"{start}, line {line}: " if line else f"{start}: " if start else "" for line in self.lines]
        super().__init__("\n".join(place + message for place, (_, message) in zip(where, found, strict=True)))


def problem(
    kind: type[BaseModel], error: Mapping[str, Any], sections: Mapping[str, type[BaseModel]]
) -> tuple[Place, str]:
    """Return the place of a Pydantic error and a sentence about it; `sections` are the tables of a file."""
    path: Place = error["loc"]
    if error["type"] == "extra_forbidden":
        for key in path[:-1]:
            kind = kind.model_fields[str(key)].annotation  # type: ignore[assignment]
        known = list(kind.model_fields)
        owner = next((name for name, section in sections.items() if path[-1] in section.model_fields), None)
        hint = f" (did you mean [{owner}] {path[-1]}?)" if owner else close(path[-1], known)
        table = f"[{'.'.join(map(str, path[:-1]))}]" if path[1:] else "the file"
        return path, f"unknown key {_name(path)!r}{hint}; the keys of {table} are {', '.join(known)}"
    if error["type"] == "value_error":  # a message of this module, with the value
        return path, f"{_name(path)} {error['ctx']['error']}"
    rule = re.sub(r"^\w+ should (.*?)( or instance of \w+)?$", r"must \1", error["msg"])  # "Input should be ..."
    return path, f"{_name(path)} {rule}, got {error['input']!r}"


def _name(path: Place) -> str:
    """Format a path: `evaluation.severities[1]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def one_of(names: Iterable[str]) -> str:
    """List the choices for an error message."""
    return f"one of {', '.join(names)}"


def close(name: Any, names: Iterable[str]) -> str:
    """Suggest the closest name, in brackets."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
