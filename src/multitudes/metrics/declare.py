"""Declaration of metrics: `metric` builds the function, the torchmetrics class and the entry in results.

    @metric("NLL", better=LOWER, group="scores", shifted=True)
    def nll(rows: Rows) -> Tensor:
        '''The mean of `-log p(y)` in nats.'''
        return total_of(-rows.target_log_prob)

The decorated function is the *update*: it maps a batch, read and checked, to sums or to a few numbers per row.
`compute` maps the sums or numbers of all batches to the result; by default it is the mean. The decorator creates

- `nll(prediction, target, ignore)`, the function of one batch: first the kind's inputs, then the settings;
- `NLL(ignore)`, the streaming class;
- entries for the table of `evaluate` (`group`, `shifted`), leaderboard order and arrows in reports (`better`).

Settings are the parameters of the update and of `compute` after the first, and those of the kind's reader whose type
has a check, such as `Count`. They are checked when the function is called or the class is created. The function's
docstring is that of the update; `Args:` for inputs and settings of the reader are added from the reader's docstring.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from importlib import import_module
from pkgutil import iter_modules
from textwrap import indent
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_type_hints

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from multitudes.base.checks import check_choice, check_count
from multitudes.metrics.class_inputs import places, read_rows, read_without_target
from multitudes.tasks.predictive import Predictive

__all__ = ["METRICS"]

GROUPS = ("scores", "calibration", "selective", "diversity")
"""Groups of metrics in `evaluate`; the kind of predictions determines which apply."""

Count = Annotated[int, check_count]
"""A positive integer setting."""


class Better(Enum):
    """Direction of better scores; the value is the arrow printed beside a score's name."""

    HIGHER = "↑"
    LOWER = "↓"
    ZERO = "→0"
    """Closest to zero is best, for signed scores."""
    NEITHER = ""
    """The score describes predictions but does not rank them."""

    def quality(self, score: float) -> float:
        """Return a number that is higher for better scores; always 0 for `NEITHER`.

        >>> Better.LOWER.quality(3.0), Better.ZERO.quality(-0.2) < Better.ZERO.quality(0.1)
        (-3.0, True)
        """
        return {"↑": score, "↓": -score, "→0": -abs(score), "": 0.0}[self.value]


HIGHER, LOWER, ZERO, NEITHER = Better
RANKS: dict[str, Better] = {}
"""Direction of better scores, by function name and by name in an evaluation."""


INPUT_FORMATS: dict[str, InputFormat] = {}
"""Input formats by name; tasks list the formats of the metrics that apply to them."""


@dataclass(frozen=True)
class InputFormat:
    """Input format of a group of metrics."""

    name: str
    read: Callable[..., Any]
    """Function that maps a batch to the input of updates. Parameters whose type has a check are settings."""
    allows: Callable[[Predictive, float | None], bool] = lambda p, noise_precision: True
    """Function of predictions and noise precision: True if these metrics apply to predictions of a suitable task."""

    def __post_init__(self) -> None:
        INPUT_FORMATS[self.name] = self

    def fits(self, p: Predictive, noise_precision: float | None) -> bool:
        """Return True if `evaluate` computes these metrics for the predictions."""
        return self.name in p.reading.metrics and self.allows(p, noise_precision)


CLASSIFICATION = InputFormat("classification", read_rows)
BY_CLASS = InputFormat("by class", read_rows)
"""Metrics for few classes: a vocabulary is too large to count each."""
SEGMENTATION = InputFormat("segmentation", read_rows, lambda p, _: len(places(p)) > 1)
YES_OR_NO = InputFormat("yes or no", read_rows)
TOKENS = InputFormat("tokens", read_rows)
TARGETLESS = InputFormat("targetless", read_without_target)


def read_batch(p: Predictive, target: Tensor, **settings: Any) -> Any:
    """Read and check predictions and targets once for all metrics of their task, with the reader's settings."""
    read = INPUT_FORMATS[p.reading.metrics[0]].read
    return read(p, target, **_select(read, settings))


# Sums ---------------------------------------------------------------------------------------------------


def total_of(values: Tensor) -> Tensor:
    """Return the sum and the number of values `[N]`, `[2]` in float64.

    >>> total_of(torch.tensor([True, True, False]))
    tensor([2., 3.], dtype=torch.float64)
    """
    return counted(values.sum(dtype=torch.float64), len(values))


def counted(total: Tensor, count: int) -> Tensor:
    """Stack sums of any shape with the number of values in each, `[2, ...]` in float64."""
    return torch.stack([total.double(), torch.full_like(total, count, dtype=torch.float64)])


def mean_of(total: Tensor) -> Tensor:
    """Divide sums by counts, both in `[2, ...]`; NaN for a count of 0.

    >>> mean_of(torch.tensor([1.0, 4.0]))
    tensor(0.2500)
    """
    return total[0] / total[1]


# Streaming ----------------------------------------------------------------------------------------------


class StreamingMetric(Metric):
    """Metric whose state is one float64 tensor of sums with a `shape`, or `columns` numbers for each row.

    Sums are added over batches and processes, rows are concatenated. `settings` are the values besides the data that
    updates depend on.
    """

    full_state_update = False
    is_differentiable = False
    sums: Tensor
    values: list[Tensor]

    def __init__(
        self, *, shape: Sequence[int] = (), columns: int = 0, settings: tuple[object, ...] = (), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        # A collection merges two metrics, and updates only the first, if their states are equal after the first batch:
        # accuracy and error, if half of the batch is correct. It also compares the names of states, so an empty state
        # with a unique name keeps them separate.
        self.add_state(f"{type(self).__name__}{settings}", [], dist_reduce_fx=None)
        self.columns = columns
        if columns:
            self.add_state("values", [], dist_reduce_fx="cat")
        else:
            self.add_state("sums", torch.zeros(*shape, dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, batch: Tensor) -> None:
        """Add the result of a batch."""
        if self.columns:
            self.values.append(batch.to(self.device))
        else:
            self.sums = self.sums + batch.to(self.sums.device)

    def _all(self) -> Tensor:
        """Return the state over all batches so far: sums, or rows `[N, columns]`."""
        if not self.columns:
            return self.sums
        # After a reduction over processes it is a tensor instead of a list.
        return dim_zero_cat(self.values) if len(self.values) else torch.empty(0, self.columns, device=self.device)


# Declarations -------------------------------------------------------------------------------------------

R = TypeVar("R")

METRICS: dict[str, Declaration[Any]] = {}
"""Declared metrics by function name."""


@dataclass(eq=False)
class Declaration(Generic[R]):
    """Declaration of a metric. As a decorator, it turns an update into the metric's function."""

    class_name: str
    compute: Callable[..., R] = mean_of  # type: ignore[assignment]
    _: KW_ONLY
    better: Better
    kind: InputFormat = CLASSIFICATION
    shape: tuple[int | str, ...] = (2,)
    """Shape of the sums; a name is a setting, or a size that only the class takes, such as the number of `classes`."""
    kept: int = 0
    """Numbers stored per row instead of sums; 0 to store sums."""
    group: str | None = None
    """One of `GROUPS`, or None to leave it out of `evaluate`."""
    score: str = ""
    """Name in an evaluation; by default that of the function."""
    shifted: bool = False
    """True if `evaluate` also computes it on corrupted images."""
    order: Sequence[str] | None = None
    """Names of the settings in order; by default all, the update's first and the reader's last."""
    name: str = field(init=False)
    """Name of the function; `class_name` is that of the class."""
    update: Callable[..., Tensor] = field(init=False)

    def __call__(self, update: Callable[..., Tensor]) -> Callable[..., R]:
        """Register the metric of this update. Return the function of one batch."""
        self.update, self.name = update, update.__name__
        self.score = self.score or self.name
        check_choice("group", self.group, (None, *GROUPS))
        other = METRICS.get(self.name, self).update.__module__
        if other != update.__module__:
            raise ValueError(f"metric {self.name!r} exists already in {other}: choose another name")
        METRICS[self.name] = self
        RANKS.update({self.name: self.better, self.score: self.better})
        update.__globals__[self.class_name] = self.streaming  # where pickle looks for it
        parameters = [*self.data, *self.settings.values()]

        @functools.wraps(update)
        def function(*args: Any, **kwargs: Any) -> R:
            given = _bind(parameters, *args, **kwargs)
            return self.result(self.sums(given), given)

        _set_signature(function, parameters, get_type_hints(self.compute).get("return", Any))
        function.__doc__ = self.documentation(update.__doc__ or "", parameters)
        function.declaration = self  # type: ignore[attr-defined]
        return function

    @functools.cached_property
    def data(self) -> list[inspect.Parameter]:
        """Parameters of a batch."""
        return [each for each in _parameters(self.kind.read) if not _check(each)]

    @functools.cached_property
    def settings(self) -> dict[str, inspect.Parameter]:
        """Parameters of the function besides those of a batch, by name."""
        parameters = [*_parameters(self.update)[1:], *_parameters(self.compute)[1:]]
        parameters += [each for each in _parameters(self.kind.read) if _check(each)]
        by_name = {each.name: each for each in parameters}
        return {name: by_name[name] for name in self.order or by_name}

    @functools.cached_property
    def class_settings(self) -> dict[str, inspect.Parameter]:
        """Parameters of the class: sizes that all processes need before their first batch, then the settings."""
        sizes = [each for each in self.shape if isinstance(each, str) and each not in self.settings]
        return {name: _parameter(name, Count) for name in sizes} | self.settings

    def sums(self, given: Mapping[str, Any]) -> Tensor:
        """Return the update of a batch; `given` holds its arguments and the settings by name."""
        return self.update(self.kind.read(**_select(self.kind.read, given)), **_select(self.update, given))

    def result(self, sums: Tensor, settings: Mapping[str, Any]) -> R:
        """Compute the result from the sums or rows of all batches."""
        return self.compute(sums, **_select(self.compute, settings))

    def documentation(self, text: str, parameters: Sequence[inspect.Parameter]) -> str:
        """Return a docstring with `Args:` for the parameters, as described by the update and by the kind's reader."""
        described = _described_arguments(self.kind.read.__doc__) | _described_arguments(self.update.__doc__)
        described |= {"classes": "    classes: Number of classes.", "members": "    members: Number of members."}
        entries = [described[each.name] for each in parameters if each.name in described]
        head, *others = _SECTION.split(inspect.cleandoc(text))
        kept = [_as_example(section) for section in others if not section.startswith("Args:")]
        return "\n\n".join([head, *(["\n".join(["Args:", *entries])] if entries else []), *kept])

    @functools.cached_property
    def streaming(self) -> type[Metric]:
        """The streaming class."""

        def update(metric: Any, *args: Any, **kwargs: Any) -> None:
            metric._add_checked(self.sums(metric.settings | _bind(self.data, *args, **kwargs)))

        settings = [*self.class_settings.values()]
        update.__doc__ = self.documentation("Add a batch.", self.data)
        about = f"Streaming version of `{self.name}`."
        if self.kept:
            size = 4 * self.kept
            about += f"\n\nIt stores {size} bytes per row in float32: {size} MB for a million rows."
        members = {
            "__doc__": self.documentation(about, settings),
            "__module__": self.update.__module__,
            "__qualname__": self.class_name,
            "declaration": self,
            "higher_is_better": {HIGHER: True, LOWER: False}.get(self.better),
            "update": _set_signature(update, [_parameter("self"), *self.data], None),
        }
        streaming = type(self.class_name, (_DeclaredMetric,), members)
        return _set_signature(streaming, [*settings, _parameter("kwargs", Any, inspect.Parameter.VAR_KEYWORD)])


class _DeclaredMetric(StreamingMetric):
    """Base of the classes of declared metrics; settings are attributes too."""

    declaration: ClassVar[Declaration[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = self.declaration
        given = {name: kwargs.pop(name) for name in own.class_settings if name in kwargs}
        settings = _bind([*own.class_settings.values()], *args, **given)
        only_compute = _select(own.compute, settings).keys() - _select(own.update, settings).keys()
        of_updates = tuple(value for name, value in settings.items() if name not in only_compute)
        shape = tuple(settings[each] if isinstance(each, str) else each for each in own.shape)
        super().__init__(shape=shape, columns=own.kept, settings=of_updates, **kwargs)
        self.settings = settings
        for name, value in settings.items():
            setattr(self, name, value)

    def _add_checked(self, sums: Tensor) -> None:
        own = self.declaration
        if not own.kept:
            for name, size in zip(own.shape, sums.shape, strict=True):
                if isinstance(name, str) and size != self.settings[name]:
                    raise ValueError(f"{name}={self.settings[name]} does not fit prediction, which has {size} {name}")
        self._add(sums)

    def compute(self) -> Any:
        """Compute the result over all batches so far."""
        return self.declaration.result(self._all(), self.settings)


metric = Declaration
F = TypeVar("F", bound=Callable[..., Any])


def ranked(better: Better, *scores: str) -> Callable[[F], F]:
    """Declare the better direction of a function that is not a metric of a batch; `scores` are its names in results."""

    def declare(function: F) -> F:
        RANKS.update(dict.fromkeys(scores or (function.__name__,), better))
        return function

    return declare


def discover(package: str, path: Iterable[str]) -> dict[str, Any]:
    """Import a folder's modules. Return their public names: the declared metrics, and each module's `__all__`."""
    public: dict[str, Any] = {}
    for each in iter_modules(path):
        module = import_module(f"{package}.{each.name}")
        own = [metric for metric in METRICS.values() if metric.update.__module__ == module.__name__]
        names = [name for metric in own for name in (metric.name, metric.class_name)]
        public |= {name: getattr(module, name) for name in [*names, *getattr(module, "__all__", ())]}
    return public


# Signatures and docstrings ------------------------------------------------------------------------------


_SECTION = re.compile(r"\n\n(?=(?:Args|Returns|Raises|Example):\n|>>> )")
"""Gap before a section of a docstring."""


def _described_arguments(docstring: str | None) -> dict[str, str]:
    """Return the lines of `Args:` in a docstring, by argument."""
    for section in _SECTION.split(inspect.cleandoc(docstring or "")):
        if section.startswith("Args:\n"):
            entries = re.split(r"\n(?=    \w)", section.removeprefix("Args:\n"))
            return {entry.partition(":")[0].strip(): entry for entry in entries}
    return {}


def _as_example(section: str) -> str:
    """Put a section that begins with `>>>` under `Example:`."""
    return "Example:\n" + indent(section, "    ") if section.startswith(">>>") else section


def _parameter(name: str, annotation: Any = Any, kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD) -> Any:
    return inspect.Parameter(name, kind, annotation=annotation)


@functools.cache
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function with their types."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return [each.replace(annotation=hints.get(each.name, Any)) for each in parameters]


def _check(parameter: inspect.Parameter) -> Callable[[str, Any], object] | None:
    """Return the check in the parameter's type, if there is one."""
    checks: tuple[Any, ...] = getattr(parameter.annotation, "__metadata__", (None,))
    return checks[0]


def _select(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings that a function takes."""
    return {each.name: settings[each.name] for each in _parameters(function) if each.name in settings}


def _bind(parameters: Sequence[inspect.Parameter], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Bind arguments to names, apply defaults, and check them."""
    call = inspect.Signature(parameters).bind(*args, **kwargs)
    call.apply_defaults()
    for each in parameters:
        if (check := _check(each)) is not None:
            check(each.name, call.arguments[each.name])
    return call.arguments


def _set_signature(target: Any, parameters: Sequence[inspect.Parameter], result: Any = inspect.Signature.empty) -> Any:
    """Set the signature that `help` shows: types without their checks. Return the function or class."""
    shown = [
        each.replace(annotation=each.annotation.__origin__ if _check(each) else each.annotation) for each in parameters
    ]
    target.__signature__ = inspect.Signature(shown, return_annotation=result)
    return target
