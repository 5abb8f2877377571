"""Result of an evaluation: numbers by name, each with the count that it was computed over."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multitudes.base.sealed_files import replacing


@dataclass(frozen=True)
class Score:
    """Number, and the count of inputs (or pixels) that it was computed over."""

    value: float
    count: int


class Evaluation(Mapping[str, float]):
    """Scores by name: `result["nll"]` is a number, and `result.counts["nll"]` its count of inputs.

    It prints as a table, and is stored as JSON: `result.save(path)`, `Evaluation.load(path)`.

    Args:
        scores: Scores with their counts.

    Example:
        >>> result = Evaluation({"accuracy": Score(0.93, 10000), "shift/fog/3/accuracy": Score(0.815, 10000)})
        >>> result["accuracy"], result.counts["accuracy"]
        (0.93, 10000)
        >>> print(result)
        score                  value  count
        accuracy              0.9300  10000
        shift/fog/3/accuracy  0.8150  10000
        >>> dict(result.under("shift/fog"))
        {'3/accuracy': 0.815}
    """

    def __init__(self, scores: Mapping[str, Score]) -> None:
        self.scores = dict(scores)

    def __getitem__(self, name: str) -> float:
        if name not in self.scores:
            close = difflib.get_close_matches(name, self.scores, n=3) or list(self.scores)[:3]
            raise KeyError(f"there is no score {name!r}; did you mean {', '.join(close)}?")
        return self.scores[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def counts(self) -> dict[str, int]:
        """Number of inputs or pixels that each score was computed over."""
        return {name: score.count for name, score in self.scores.items()}

    def under(self, prefix: str) -> Evaluation:
        """Return the scores whose names begin with `prefix/`, without the prefix."""
        start = f"{prefix}/"
        return Evaluation({n.removeprefix(start): s for n, s in self.scores.items() if n.startswith(start)})

    def __repr__(self) -> str:
        return f"Evaluation({len(self)} scores)"

    def __str__(self) -> str:
        rows = [("score", "value", "count")]
        rows += [(name, f"{score.value:.4f}", str(score.count)) for name, score in self.scores.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(f"{n:<{widths[0]}}  {v:>{widths[1]}}  {c:>{widths[2]}}" for n, v, c in rows)

    def table(self) -> dict[str, dict[str, Any]]:
        """Return the scores in JSON types, `{name: {"value": ..., "count": ...}}`."""
        return {name: {"value": plain_number(score.value), "count": score.count} for name, score in self.scores.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the `table` as JSON, whole or not at all. NaN becomes null."""
        with replacing(path) as unfinished:
            unfinished.write_text(json.dumps(self.table(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Evaluation:
        """Read a file written by `save`."""
        try:
            table = json.loads(Path(path).read_text())
            values = {name: math.nan if row["value"] is None else float(row["value"]) for name, row in table.items()}
            return cls({name: Score(value, int(table[name]["count"])) for name, value in values.items()})
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"path {str(path)!r} does not hold an evaluation: {error}") from error


def plain_number(value: float) -> float | str | None:
    """Return a number in JSON types: None for NaN, a string for infinity."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)
