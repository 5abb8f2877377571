"""The tables of a `study.toml`, one class each, and what their values must be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from multitudes.core.checks import needed
from multitudes.shift.corruptions import CORRUPTIONS, EXTRA
from multitudes.training.schedules import SCHEDULES, schedule_of

needed("pydantic", "study", "a study")  # says which extra has it, where the import below would not

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field  # noqa: E402

__all__ = ["DataSection", "EvaluationSection", "MethodSection", "ModelSection", "Section", "Seeds", "TrainingSection"]

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]


def _unique(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError(f"must hold nothing twice, got {values}")
    return values


def _seeds(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if value < 1:
        raise ValueError(f"must be a number of seeds, 1 or more, or a list of seeds, got {value}")
    return list(range(value))


def _sides(value: Any) -> Any:
    return [value, value] if isinstance(value, int) and not isinstance(value, bool) else value


def _corruptions(value: Any) -> Any:
    return list(CORRUPTIONS) if value == "all" else value


def _corruption(name: str) -> str:
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
    """A table: no key that is unknown, no value that is bent to fit."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DataSection(Section):
    """What to learn: the arguments of `multitudes.data.load`."""

    source: str = "digits"
    ood: list[str] = []
    target: str | None = None
    image: str | None = None
    columns: list[str] | None = None
    split: str | None = None
    task: Literal["classification", "regression"] | None = None
    fold: Annotated[int, Field(ge=0)] = 0
    size: Annotated[list[Count], BeforeValidator(_sides), Field(min_length=2, max_length=2)] | None = None
    validation: Share = 0.1
    test: Share = 0.2
    seed: Annotated[int, Field(ge=0)] = 0
    limit: Count | None = None
    skip_bad: bool = False

    @property
    def embedded(self) -> bool:
        """Whether the data come with the package, as they are."""
        return self == DataSection()


class ModelSection(Section):
    """The network: one of `multitudes.models`, or a function `build(shape, outputs, **settings)` of a file."""

    name: str | None = None
    file: str | None = None
    settings: dict[str, Any] = {}


class MethodSection(Section):
    """A method, by its name in `METHODS`, with all its settings."""

    method: str
    settings: dict[str, Any] = {}


class TrainingSection(Section):
    """How to train: the arguments of `mt.fit`. None is what the data's kind suggests."""

    epochs: Count | None = None
    batch_size: Count | None = None
    optimizer: Literal["sgd", "adam", "adamw"] | None = None
    lr: Annotated[float, Field(gt=0)] | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    schedule: Annotated[Any, AfterValidator(_schedule)] = None
    warmup: Annotated[float, Field(ge=0)] | None = None
    augment: Literal["none", "standard", "crop"] | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    channels_last: bool | None = None
    compile: bool | None = None
    clip: Annotated[float, Field(ge=0)] | None = None
    """0 does not clip."""


class EvaluationSection(Section):
    """What to measure. `shift` None is one corruption of each family for images, and none for tables."""

    shift: Corruptions | None = None
    severities: Severities = [1, 3, 5]
    shift_limit: Count | None = None
    """How many images of the test part are corrupted; None is all of them."""
    shift_draws: Count | None = None
    """How many draws are made of each of these; None is as many as of the others."""
    draws: Count = 20
    batch_size: Count = 256
    sizes: Sizes = [1, 2, 4, 8, 16]
    bins: Count = 15
    """Of confidence, for the calibration errors."""
    min_count: Count = 1
    """How many predictions a bin must hold to count for them."""
