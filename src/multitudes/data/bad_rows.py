"""Rows that cannot be used: `BadRows` names and counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from multitudes.data.columns import Column, Encoded
from multitudes.data.kinds import Encoder
from multitudes.data.sources import Source

__all__ = ["BadRows"]


class BadRows:
    """The rows of a source that cannot be used, and why: an error, or with `skip` to be left out and counted."""

    def __init__(self, source: Source, skip: bool) -> None:
        self.source, self.skip = source, skip
        self.rows: dict[int, str] = dict(source.broken)  # the reason
        self.details: dict[int, str] = {}

    def check(self, inputs: Mapping[str, Column], fills: bool, needed: Mapping[str, Column] | None = None) -> None:
        """Rows must have all `needed` values, and all inputs; or one of these, where the others are filled in."""
        for name, column in {**(needed or {}), **({} if fills else inputs)}.items():
            lacks = "is missing or no finite number" if column.kind == "number" else "is missing"
            for row in column.missing():
                self.rows.setdefault(row, f"{name!r} {lacks}")
        if fills:
            empty = torch.stack([column.empty() for column in inputs.values()]).all(0)
            for row in empty.nonzero().flatten().tolist():
                self.rows.setdefault(row, "all inputs are missing")
        self._settle()

    def encode(self, encoder: Encoder, columns: Mapping[str, Column], rows: Tensor) -> Encoded:
        """The inputs of these rows, as far as they can be encoded."""
        encoded = encoder(columns, rows, self.source.where)
        for index, error in encoded.bad.items():
            reason, bracket, detail = error.partition(" (")
            self.rows[int(rows[index])], self.details[int(rows[index])] = reason, bracket + detail
        self._settle()
        return encoded

    def _settle(self) -> None:
        if not self.rows or self.skip:
            return
        named = sorted(self.rows)[:3]
        first = [f"{self.source.where(row)}: {self.rows[row]}{self.details.get(row, '')}" for row in named]
        more = [f"and {len(self.rows) - 3} more"] if len(self.rows) > 3 else []
        count = "1 bad row" if len(self.rows) == 1 else f"{len(self.rows)} bad rows"
        raise ValueError(f"{self.source.name} has {count}: {'; '.join(first + more)}. skip_bad=True leaves them out")

    def without(self, rows: Tensor) -> Tensor:
        """Those of these rows that can be used."""
        return rows[~torch.isin(rows, torch.tensor(list(self.rows), dtype=torch.int64))]

    def counts(self) -> dict[str, int]:
        """How many rows cannot be used, by reason."""
        return dict(Counter(self.rows.values()))
