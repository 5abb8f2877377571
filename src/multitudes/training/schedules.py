"""Learning-rate schedules: factors of the optimizer's rate, by the share of the training that is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multitudes.base.checks import check_choice, check_count, check_number

Schedule = Callable[[float], float]
"""Function from the share of the training that is done, in [0, 1), to a factor of the learning rate."""


def constant() -> Schedule:
    """Keep the rate constant."""
    return lambda done: 1.0


def linear() -> Schedule:
    """Lower the rate to 0 linearly."""
    return lambda done: 1.0 - done


def cosine() -> Schedule:
    """Lower the rate to 0 along half a cosine (Loshchilov & Hutter, 2017).

    >>> [round(cosine()(done), 3) for done in (0, 0.25, 0.5, 0.75)]
    [1.0, 0.854, 0.5, 0.146]
    """
    return lambda done: 0.5 * (1 + math.cos(math.pi * done))


def cyclic(cycles: int = 5) -> Schedule:
    """Restart a cosine `cycles` times, for snapshots (Huang et al., 2017)."""
    check_count("cycles", cycles)
    return lambda done: 0.5 * (1 + math.cos(math.pi * (done * cycles % 1)))


def multistep(milestones: Sequence[float] = (0.3, 0.6, 0.8), factor: float = 0.2) -> Schedule:
    """Multiply the rate by `factor` at each of the `milestones`, shares of the training.

    >>> schedule = multistep((0.5, 0.75), factor=0.1)
    >>> [round(schedule(done), 3) for done in (0, 0.49, 0.5, 0.75)]
    [1.0, 1.0, 0.1, 0.01]
    """
    for milestone in milestones:
        check_number("milestones", milestone, 0, high=1)
    check_number("factor", factor, 0, above=True)
    return lambda done: float(factor ** sum(done >= milestone for milestone in milestones))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "cyclic": cyclic,
    "linear": linear,
    "multistep": multistep,
}


def schedule_of(schedule: str | Mapping[str, Any] | Schedule, warmup: float = 0.0) -> Schedule:
    """Return a schedule by name, by a mapping (`{"name": "cyclic", "cycles": 4}`), or from a function.

    During the first share `warmup` of the training, the rate rises linearly to that of the schedule.

    >>> schedule = schedule_of("constant", warmup=0.5)
    >>> [schedule(done) for done in (0.0, 0.25, 0.5)]
    [0.0, 0.5, 1.0]
    """
    if isinstance(schedule, str):
        schedule = {"name": schedule}
    if isinstance(schedule, Mapping):
        settings = dict(schedule)
        name = settings.pop("name", None)
        check_choice("schedule", name, SCHEDULES)
        try:
            after = SCHEDULES[name](**settings)
        except TypeError as error:
            raise ValueError(f"schedule {name!r} does not accept these settings: {error}") from error
    elif callable(schedule):
        after = schedule
    else:
        raise ValueError(f"schedule must be a name, a mapping or a function, got {schedule!r}")
    return lambda done: after(done) * min(1.0, done / warmup if warmup else 1.0)
