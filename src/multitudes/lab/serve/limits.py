"""Limits of requests, and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from multitudes.base.checks import check_count, check_number


@dataclass(frozen=True)
class Limits:
    """Limits of a request, and of concurrent requests."""

    size: int = 10_000_000
    """Bytes of a body."""
    rows: int = 256
    """Rows, images or texts of a request."""
    pixels: int = 50_000_000
    """Pixels of an image before it is resized."""
    seconds: float = 30.0
    """Seconds from the first byte of a request to its answer."""
    requests: int = 128
    """Concurrent requests."""

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, 0, above=True)
        for name in ("size", "rows", "pixels", "requests"):
            check_count(name, getattr(self, name))


class Refused(Exception):
    """A refused request: one sentence, and the HTTP status."""

    def __init__(self, sentence: str, status: int = 422) -> None:
        super().__init__(sentence)
        self.sentence, self.status = sentence, status
