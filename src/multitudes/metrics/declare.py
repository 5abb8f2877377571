"""A metric is declared once: `metric` makes its functional form, its torchmetrics class and its place in results.

    @metric("NLL", better=LOWER, group="scores", shifted=True)
    def nll(rows: Rows) -> Tensor:
        '''The mean of `-log p(y)` in nats.'''
        return total_of(-rows.target_log_prob)

The decorated function is the *update*: from a batch that was read and checked to sums, or to a few numbers of each row.
`compute` goes from those of all batches to the result; by default it is the mean. From this follow

- `nll(prediction, target, ignore)`, the function of one batch: what its kind reads, then the settings;
- `NLL(ignore)`, the class that streams;
- the table of `evaluate` (`group`, `shifted`), the order of leaderboards and the arrows of reports (`better`).

Settings are the parameters of the update and of `compute` beyond the first, and those of the kind's reader whose type
has a check, such as `Count`. They are checked when the function is called, or the class is made.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_type_hints

from torch import Tensor
from torchmetrics import Metric

from multitudes.core.checks import check_count
from multitudes.core.tasks.predictive import Predictive
from multitudes.metrics.inputs import places, read_rows, read_without_target
from multitudes.metrics.streaming import StreamingMetric, mean_of

__all__ = ["METRICS"]

GROUPS = ("scores", "calibration", "selective", "diversity")
"""The groups of metrics in `evaluate`; which there are depends on the kind of predictions."""

Count = Annotated[int, check_count]
"""A setting that is a whole number, 1 or more."""


class Better(Enum):
    """Which scores are better; the value is the arrow beside a score's name."""

    HIGHER = "↑"
    LOWER = "↓"
    ZERO = "→0"
    """The nearest to zero, of scores that have a sign."""
    NEITHER = ""
    """The score describes predictions, and does not rank them."""

    def quality(self, score: float) -> float:
        """A number that is higher the better the score is; always 0 for `NEITHER`.

        >>> Better.LOWER.quality(3.0), Better.ZERO.quality(-0.2) < Better.ZERO.quality(0.1)
        (-3.0, True)
        """
        return {"↑": score, "↓": -score, "→0": -abs(score), "": 0.0}[self.value]


HIGHER, LOWER, ZERO, NEITHER = Better
RANKS: dict[str, Better] = {}
"""Which scores are better, by name: that of the function, and that in an evaluation."""


KINDS: dict[str, Kind] = {}
"""The kinds of metrics by name, by which tasks list those that apply."""


@dataclass(frozen=True)
class Kind:
    """What metrics of one kind are given."""

    name: str
    read: Callable[..., Any]
    """From a batch to what updates take; parameters whose type has a check are settings."""
    allows: Callable[[Predictive, float | None], bool] = lambda p, noise_precision: True
    """Whether predictions of a task that has such metrics allow them, given the precision of the noise."""

    def __post_init__(self) -> None:
        KINDS[self.name] = self

    def fits(self, p: Predictive, noise_precision: float | None) -> bool:
        """Whether `evaluate` computes such metrics of these predictions."""
        return self.name in p.reading.metrics and self.allows(p, noise_precision)


CLASSIFICATION = Kind("classification", read_rows)
BY_CLASS = Kind("by class", read_rows)
"""For few classes: a vocabulary has too many to count each."""
SEGMENTATION = Kind("segmentation", read_rows, lambda p, _: len(places(p)) > 1)
YES_OR_NO = Kind("yes or no", read_rows)
TOKENS = Kind("tokens", read_rows)
TARGETLESS = Kind("targetless", read_without_target)


def read_batch(p: Predictive, target: Tensor, **settings: Any) -> Any:
    """Predictions and targets, read and checked once for all metrics of their task, with the reader's own settings."""
    read = KINDS[p.reading.metrics[0]].read
    return read(p, target, **_given(read, settings))


# Declarations -------------------------------------------------------------------------------------------

R = TypeVar("R")

METRICS: dict[str, Declaration[Any]] = {}
"""The declared metrics, by the name of their function."""


@dataclass(eq=False)
class Declaration(Generic[R]):
    """All that is known of a metric; it decorates the update, of which it makes the function."""

    class_name: str
    compute: Callable[..., R] = mean_of  # type: ignore[assignment]
    _: KW_ONLY
    better: Better
    kind: Kind = CLASSIFICATION
    shape: tuple[int | str, ...] = (2,)
    """Of the sums; a name is a setting, or one of the class alone, such as the number of `classes`."""
    kept: int = 0
    """How many numbers are kept of every row instead of sums; 0 for none."""
    group: str | None = None
    """One of `GROUPS`; None for what `evaluate` leaves out."""
    score: str = ""
    """The name in an evaluation; that of the function by default."""
    shifted: bool = False
    """Whether `evaluate` computes it of corrupted images too."""
    order: Sequence[str] | None = None
    """The names of the settings in order; None for all, those of the update first and of the reader last."""
    name: str = field(init=False)
    """Of the function; `class_name` is that of the class."""
    update: Callable[..., Tensor] = field(init=False)

    def __call__(self, update: Callable[..., Tensor]) -> Callable[..., R]:
        """Declare the metric whose update this is; gives the function of one batch, with the update's docstring."""
        self.update, self.name = update, update.__name__
        self.score = self.score or self.name
        if self.group not in (None, *GROUPS):
            raise ValueError(f"group must be None or one of {', '.join(GROUPS)}, got {self.group!r}")
        if self.name in METRICS and METRICS[self.name].update.__module__ != update.__module__:
            other = METRICS[self.name].update.__module__
            raise ValueError(f"{self.name} must be declared once, got another in {other}")
        METRICS[self.name] = self
        RANKS.update({self.name: self.better, self.score: self.better})
        update.__globals__[self.class_name] = self.streaming  # where pickle looks for it
        parameters = [*self.data, *self.settings.values()]

        @functools.wraps(update)
        def function(*args: Any, **kwargs: Any) -> R:
            given = _bound(parameters, *args, **kwargs)
            return self.result(self.sums(given), given)

        _signed(function, parameters, get_type_hints(self.compute).get("return", Any))
        function.declaration = self  # type: ignore[attr-defined]
        return function

    @functools.cached_property
    def data(self) -> list[inspect.Parameter]:
        """The parameters of a batch."""
        return [each for each in _parameters(self.kind.read) if not _check(each)]

    @functools.cached_property
    def settings(self) -> dict[str, inspect.Parameter]:
        """The function's parameters beside those of a batch, by name."""
        found = {each.name: each for each in [*_parameters(self.update)[1:], *_parameters(self.compute)[1:]]}
        found |= {each.name: each for each in _parameters(self.kind.read) if _check(each)}
        return {name: found[name] for name in self.order or found}

    @functools.cached_property
    def class_settings(self) -> dict[str, inspect.Parameter]:
        """The class's parameters: before the settings, sizes that all processes must know before their first batch."""
        sizes = [each for each in self.shape if isinstance(each, str) and each not in self.settings]
        return {name: _parameter(name, Count) for name in sizes} | self.settings

    def sums(self, given: Mapping[str, Any]) -> Tensor:
        """What a batch adds, which is given by name together with the settings."""
        return self.update(self.kind.read(**_given(self.kind.read, given)), **_given(self.update, given))

    def result(self, sums: Tensor, settings: Mapping[str, Any]) -> R:
        """What all batches together give."""
        return self.compute(sums, **_given(self.compute, settings))

    @functools.cached_property
    def streaming(self) -> type[Metric]:
        """The class that streams."""

        def update(metric: Any, *args: Any, **kwargs: Any) -> None:
            metric._add_checked(self.sums(metric.settings | _bound(self.data, *args, **kwargs)))

        update.__doc__ = f"Add a batch; `{self.kind.read.__name__}` says what it may be."
        higher = {HIGHER: True, LOWER: False}.get(self.better)
        name, size = self.class_name, 4 * self.kept
        keeps = f" It keeps {size} bytes of every row in float32: {size} MB for a million." if self.kept else ""
        members = {
            "__doc__": f"`{self.name}`, streaming.{keeps}", "__module__": self.update.__module__,
            "__qualname__": name, "declaration": self, "higher_is_better": higher,
            "update": _signed(update, [_parameter("self"), *self.data], None),
        }  # fmt: skip
        made = type(name, (_DeclaredMetric,), members)
        return _signed(made, [*self.class_settings.values(), _parameter("kwargs", Any, inspect.Parameter.VAR_KEYWORD)])


class _DeclaredMetric(StreamingMetric):
    """What the classes of declared metrics share; settings are attributes too."""

    declaration: ClassVar[Declaration[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = self.declaration
        given = {name: kwargs.pop(name) for name in own.class_settings if name in kwargs}
        settings = _bound([*own.class_settings.values()], *args, **given)
        of_compute = _given(own.compute, settings).keys() - _given(own.update, settings).keys()
        looked_at = {name: value for name, value in settings.items() if name not in of_compute}
        shape = tuple(settings[each] if isinstance(each, str) else each for each in own.shape)
        super().__init__(shape=shape, columns=own.kept, settings=tuple(looked_at.values()), **kwargs)
        self.settings = settings
        for name, value in settings.items():
            setattr(self, name, value)

    def _add_checked(self, sums: Tensor) -> None:
        own = self.declaration
        if not own.kept:
            for name, found in zip(own.shape, sums.shape, strict=True):
                if isinstance(name, str) and found != self.settings[name]:
                    raise ValueError(f"prediction must have {name}={self.settings[name]}, got {found}")
        self._add(sums)

    def compute(self) -> Any:
        """The result over all batches so far."""
        return self.declaration.result(self._all(), self.settings)


metric = Declaration
F = TypeVar("F", bound=Callable[..., Any])


def ranked(better: Better, *scores: str) -> Callable[[F], F]:
    """Declare which values of a function are better that is no metric of a batch; `scores` are its names in results."""

    def declare(function: F) -> F:
        RANKS.update(dict.fromkeys(scores or (function.__name__,), better))
        return function

    return declare


def offered(package: str, path: Iterable[str]) -> dict[str, Any]:
    """What the modules of a folder offer, by name: the metrics that they declare, and the rest of their `__all__`."""
    found: dict[str, Any] = {}
    for each in iter_modules(path):
        module = import_module(f"{package}.{each.name}")
        own = [metric for metric in METRICS.values() if metric.update.__module__ == module.__name__]
        names = [name for metric in own for name in (metric.name, metric.class_name)]
        found |= {name: getattr(module, name) for name in [*names, *getattr(module, "__all__", ())]}
    return found


# Signatures ---------------------------------------------------------------------------------------------


def _parameter(name: str, annotation: Any = Any, kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD) -> Any:
    return inspect.Parameter(name, kind, annotation=annotation)


@functools.cache
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function, with their types."""
    hints = get_type_hints(function, include_extras=True)
    found = inspect.signature(function).parameters.values()
    return [each.replace(annotation=hints.get(each.name, Any)) for each in found]


def _check(parameter: inspect.Parameter) -> Callable[[str, Any], object] | None:
    """The check that the parameter's type has."""
    checks: tuple[Any, ...] = getattr(parameter.annotation, "__metadata__", (None,))
    return checks[0]


def _given(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a function takes."""
    return {each.name: settings[each.name] for each in _parameters(function) if each.name in settings}


def _bound(parameters: Sequence[inspect.Parameter], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments by name, checked, with defaults for those that are left out."""
    call = inspect.Signature(parameters).bind(*args, **kwargs)
    call.apply_defaults()
    for each in parameters:
        if (check := _check(each)) is not None:
            check(each.name, call.arguments[each.name])
    return call.arguments


def _signed(named: Any, parameters: Sequence[inspect.Parameter], result: Any = inspect.Signature.empty) -> Any:
    """A function or class, with the signature that `help` shows: types without their checks."""
    shown = [
        each.replace(annotation=each.annotation.__origin__ if _check(each) else each.annotation) for each in parameters
    ]
    named.__signature__ = inspect.Signature(shown, return_annotation=result)
    return named
