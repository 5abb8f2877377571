"""How much a network computes, counted by torch."""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode

from multitudes.core.dispatching import Overlapping

__all__ = ["flop_counter"]


class _Everywhere:
    """Instead of torch's record of the module at work, whose hooks fail where a module is given a parameter."""

    parents = ("Global",)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


class _Counter(Overlapping, FlopCounterMode):
    """Torch's counter, for several threads at once."""


def flop_counter() -> FlopCounterMode:
    """A counter of the floating-point operations inside of it, `with counter:`, then `counter.get_total_flops()`.

    >>> import torch
    >>> with flop_counter() as counter:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counter.get_total_flops()
    48
    """
    counter = _Counter(display=False)
    counter.mod_tracker = _Everywhere()  # type: ignore[assignment]
    return counter
