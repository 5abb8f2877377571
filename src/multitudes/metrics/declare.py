"""Declaration of metrics: `metric` makes the function, the torchmetrics class and the entry in results.

    @metric("NLL", better=LOWER, group="scores", shifted=True)
    def nll(rows: Rows) -> Tensor:
        '''The mean of `-log p(y)` in nats.'''
        return total_of(-rows.target_log_prob)

The decorated function is the *update*: it maps a batch, read and checked, to sums or to a few numbers per row.
`compute` maps the sums or numbers of all batches to the result; by default it is the mean. The decorator creates

- `nll(prediction, target, ignore)`, the function of one batch: first the kind's inputs, then the settings;
- `NLL(ignore)`, the streaming class;
- entries for the table of `evaluate` (`group`, `shifted`), leaderboard order and arrows in reports (`better`).

Settings are all parameters of the update and of `compute` but the first, and those of the kind's reader whose type
has a check, such as `Count`. They are checked when the function is called or the class is created.
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

from multitudes.base.checks import check_count
from multitudes.metrics.class_inputs import places, read_rows, read_without_target
from multitudes.metrics.streaming import StreamingMetric, mean_of
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


KINDS: dict[str, Kind] = {}
"""Kinds of metrics by name; tasks list the kinds that apply to them."""


@dataclass(frozen=True)
class Kind:
    """Input format of a group of metrics."""

    name: str
    read: Callable[..., Any]
    """Maps a batch to the input of updates. Parameters whose type has a check are settings."""
    allows: Callable[[Predictive, float | None], bool] = lambda p, noise_precision: True
    """Return whether predictions of a suitable task support these metrics, given the noise precision."""

    def __post_init__(self) -> None:
        KINDS[self.name] = self

    def fits(self, p: Predictive, noise_precision: float | None) -> bool:
        """Return whether `evaluate` computes these metrics for the predictions."""
        return self.name in p.reading.metrics and self.allows(p, noise_precision)


CLASSIFICATION = Kind("classification", read_rows)
BY_CLASS = Kind("by class", read_rows)
"""For few classes; a vocabulary is too large to count each."""
SEGMENTATION = Kind("segmentation", read_rows, lambda p, _: len(places(p)) > 1)
YES_OR_NO = Kind("yes or no", read_rows)
TOKENS = Kind("tokens", read_rows)
TARGETLESS = Kind("targetless", read_without_target)


def read_batch(p: Predictive, target: Tensor, **settings: Any) -> Any:
    """Read and check predictions and targets once for all metrics of their task, with the reader's settings."""
    read = KINDS[p.reading.metrics[0]].read
    return read(p, target, **_given(read, settings))


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
    kind: Kind = CLASSIFICATION
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
        """Register the metric of this update. Return the function of one batch, with the update's docstring."""
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
        """Parameters of a batch."""
        return [each for each in _parameters(self.kind.read) if not _check(each)]

    @functools.cached_property
    def settings(self) -> dict[str, inspect.Parameter]:
        """Parameters of the function besides those of a batch, by name."""
        found = {each.name: each for each in [*_parameters(self.update)[1:], *_parameters(self.compute)[1:]]}
        found |= {each.name: each for each in _parameters(self.kind.read) if _check(each)}
        return {name: found[name] for name in self.order or found}

    @functools.cached_property
    def class_settings(self) -> dict[str, inspect.Parameter]:
        """Parameters of the class: sizes that all processes need before their first batch, then the settings."""
        sizes = [each for each in self.shape if isinstance(each, str) and each not in self.settings]
        return {name: _parameter(name, Count) for name in sizes} | self.settings

    def sums(self, given: Mapping[str, Any]) -> Tensor:
        """Return the update of a batch; `given` holds its arguments and the settings by name."""
        return self.update(self.kind.read(**_given(self.kind.read, given)), **_given(self.update, given))

    def result(self, sums: Tensor, settings: Mapping[str, Any]) -> R:
        """Compute the result from the sums or rows of all batches."""
        return self.compute(sums, **_given(self.compute, settings))

    @functools.cached_property
    def streaming(self) -> type[Metric]:
        """The streaming class."""

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
    """Base of the classes of declared metrics; settings are attributes too."""

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


def offered(package: str, path: Iterable[str]) -> dict[str, Any]:
    """Return the public names of a folder's modules: the metrics that they declare, and their `__all__`."""
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
    """Return the parameters of a function with their types."""
    hints = get_type_hints(function, include_extras=True)
    found = inspect.signature(function).parameters.values()
    return [each.replace(annotation=hints.get(each.name, Any)) for each in found]


def _check(parameter: inspect.Parameter) -> Callable[[str, Any], object] | None:
    """Return the check in the parameter's type, if there is one."""
    checks: tuple[Any, ...] = getattr(parameter.annotation, "__metadata__", (None,))
    return checks[0]


def _given(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings that a function takes."""
    return {each.name: settings[each.name] for each in _parameters(function) if each.name in settings}


def _bound(parameters: Sequence[inspect.Parameter], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Bind arguments to names, apply defaults, and check them."""
    call = inspect.Signature(parameters).bind(*args, **kwargs)
    call.apply_defaults()
    for each in parameters:
        if (check := _check(each)) is not None:
            check(each.name, call.arguments[each.name])
    return call.arguments


def _signed(named: Any, parameters: Sequence[inspect.Parameter], result: Any = inspect.Signature.empty) -> Any:
    """Set the signature that `help` shows: types without their checks. Return the function or class."""
    shown = [
        each.replace(annotation=each.annotation.__origin__ if _check(each) else each.annotation) for each in parameters
    ]
    named.__signature__ = inspect.Signature(shown, return_annotation=result)
    return named
