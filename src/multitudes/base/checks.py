"""Checks of arguments and of optional packages."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any


def check_count(name: str, value: int, least: int = 1) -> int:
    """Check that a value is an integer of at least `least`; return it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, {least} or more, got {value!r}")
    return value


def check_number(
    name: str, value: float, low: float, high: float = float("inf"), above: bool = False, below: float | None = None
) -> None:
    """Check a real number: from `low` (exclusive with `above`) to `high`, or less than `below`."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    fits = real and (low < value if above else low <= value) and value <= high and value != float("inf")
    if not fits or (below is not None and value >= below):
        least = f"above {low:g}" if above else f"{low:g} or more"
        most = "" if high == float("inf") else f" and at most {high:g}"
        if below is not None:
            most = f" and below {below:g}"
        raise ValueError(f"{name} must be {least}{most}, got {value!r}")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Check that a value is one of several."""
    if value not in (choices := list(choices)):
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def check_seed(seed: int | None) -> None:
    """Check that a seed is None or an integer that torch accepts."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise ValueError(f"seed must be None or a whole number, 0 or more and below 2**63, got {seed!r}")


def needed(module: str, extra: str, what: str) -> Any:
    """Import an optional module; if it is missing, raise an ImportError that names the extra that installs it.

    >>> needed("json", "report", "a report").dumps([1])
    '[1]'
    >>> needed("nowhere", "report", "a report")
    Traceback (most recent call last):
    ImportError: a report needs nowhere: pip install 'multitudes[report]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{what} needs {package}: pip install 'multitudes[{extra}]'") from error


def plural(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> plural(1, "job"), plural(2, "job")
    ('1 job', '2 jobs')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
