"""Limits of requests, and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from multitudes.core.checks import check_count, check_number


@dataclass(frozen=True)
class Limits:
    """The most that a request may ask for, and the most requests at a time."""

    size: int = 10_000_000
    """Bytes of a body."""
    rows: int = 256
    """Rows, images or texts of a request."""
    pixels: int = 50_000_000
    """Pixels of an image before it is resized."""
    seconds: float = 30.0
    """From the first byte of a request to its answer."""
    requests: int = 128
    """Requests under way at once."""

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, 0, above=True)
        for name in ("size", "rows", "pixels", "requests"):
            check_count(name, getattr(self, name))


class Refused(Exception):
    """A request that gets no answer: one sentence, and the status of HTTP."""

    def __init__(self, sentence: str, status: int = 422) -> None:
        super().__init__(sentence)
        self.sentence, self.status = sentence, status
