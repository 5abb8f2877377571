"""Quantities of predictions: computed when first asked for, by the tasks that have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

from torch import Tensor

__all__ = ["Quantities", "quantity"]


class Quantities:
    """What quantities are computed of; `Predictive` says what each is."""

    predictions: Tensor
    task: str
    draws: Tensor | None
    calibration: Any
    quantiles: tuple[float, ...] | None

    def _require(self, quantity: str, *tasks: str) -> None:
        if self.task not in tasks:
            # Not an AttributeError, which hasattr and getattr would swallow.
            needed = " or ".join(filter(None, [", ".join(tasks[:-1]), tasks[-1]]))
            raise ValueError(f"{quantity} needs task {needed}, got predictions of {self.task}")


def quantity(*tasks: str) -> Callable[[Callable[[Any], Tensor]], cached_property[Tensor]]:
    """A property of predictions that is computed once, and an error for any task but `tasks`."""

    def decorate(compute: Callable[[Any], Tensor]) -> cached_property[Tensor]:
        @wraps(compute)
        def checked(self: Quantities) -> Tensor:
            self._require(compute.__name__, *tasks)
            return compute(self)

        return cached_property(checked)

    return decorate
