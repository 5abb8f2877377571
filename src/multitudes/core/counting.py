"""Count operations; `multitudes.core.trace.recording(work=True)` does the same."""

from multitudes.core.trace import WorkCounter as flop_counter

__all__ = ["flop_counter"]
