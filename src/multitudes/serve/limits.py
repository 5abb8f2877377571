"""What a request may ask for, and how it is refused."""

from __future__ import annotations

from dataclasses import dataclass, fields

from multitudes.core.checks import check_count, check_number

__all__ = ["Limits", "Refused"]


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
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "seconds":
                check_number("seconds", value, 0, above=True)
            else:
                check_count(field.name, value)


class Refused(Exception):
    """A request that gets no answer: the status of HTTP, one sentence, and whether it may be tried again later."""

    def __init__(self, status: int, sentence: str, later: bool = False) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.later = status, sentence, later
