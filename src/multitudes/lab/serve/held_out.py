"""Uncertainty on the test part, and examples for a page.

Uses the predictions saved by the job. Without those, or for another number of draws, some rows are predicted again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from multitudes.evaluation.conformal import Conformal
from multitudes.lab.data.parts import Data
from multitudes.lab.data.tables.features import Category
from multitudes.lab.report.chart import png
from multitudes.lab.report.input_examples import table_values
from multitudes.lab.serve.json_answers import rows_of
from multitudes.lab.study.run.trained_network import Trained
from multitudes.tasks.predictive import Predictive

ROWS = 1000
"""Maximum number of rows to predict again."""
EXAMPLES = 6
"""Number of examples of each kind."""


class HeldOut(NamedTuple):
    """Rows of the test part `[n]` with the uncertainty of each `[n]`: entropy or standard deviation."""

    rows: Tensor
    uncertainty: Tensor
    probs: Tensor | None
    """Class probabilities, `[n, C]`."""

    def conformal(self, y: Tensor) -> Conformal | None:
        """Fit conformal scores of classes to these rows; `y` holds all test targets."""
        if self.probs is None:
            return None
        return Conformal.fit(Predictive(self.probs.clamp(min=torch.finfo().tiny).log()[None]), y[self.rows])


def held_out(trained: Trained, recompute: bool = False, seed: int = 0, precision: str | None = None) -> HeldOut:
    """Read held-out predictions from the job's files, or compute them if `recompute`."""
    test, classes = trained.data.test, trained.data.classes
    saved = {} if recompute else trained.job.predictions
    rows, array = torch.arange(len(test)), saved.get("probs" if classes else "std")
    if array is not None and array.shape == (len(test), *([len(classes)] if classes else [])):
        found = torch.from_numpy(array).float()
    else:
        rows = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))[:ROWS]
        answer = trained.predict(test.x[rows], seed=seed, precision=precision, progress=False)
        found = answer.probs if classes else answer.std[:, 0]
    return HeldOut(rows, torch.special.entr(found).sum(1), found) if classes else HeldOut(rows, found, None)


# -- examples ----------------------------------------------------------------------------------------------


def examples(data: Data, held_out: HeldOut) -> dict[str, list[dict[str, Any]]]:
    """Return `{"sure": [...], "unsure": [...]}`: inputs under `image`, `row` or `text`, each with its `truth`."""
    order = held_out.uncertainty.argsort(stable=True)
    rows = held_out.rows[order]
    count = min(EXAMPLES, len(rows) // 2)
    sure = _varied(rows, data, count)
    unsure = rows.flip(0)[:count]
    return {"sure": _shown(data, sure), "unsure": _shown(data, unsure)}


def _varied(rows: Tensor, data: Data, count: int) -> Tensor:
    """Return the first rows, taking one of each class before any second one."""
    if not data.classes:
        return rows[:count]
    first: dict[int, int] = {}
    for row, label in zip(rows.tolist(), data.test.y[rows].tolist(), strict=True):
        first.setdefault(label, row)
    chosen = list(first.values())[:count]
    rest = [row for row in rows.tolist()[:count] if row not in chosen]
    return torch.tensor([*chosen, *rest][:count], dtype=torch.int64)


def _shown(data: Data, rows: Tensor) -> list[dict[str, Any]]:
    inputs = _inputs(data, rows)
    truths = data.test.y[rows].tolist()
    named = [data.classes[truth] if data.classes else float(f"{truth:.6g}") for truth in truths]
    return [{**given, "truth": truth} for given, truth in zip(inputs, named, strict=True)] if inputs else []


def _inputs(data: Data, rows: Tensor) -> list[dict[str, Any]]:
    """Return inputs of the test part; empty if a page cannot show them."""
    if data.kind.is_picture(data.shape):
        return [{"image": png(data.test.x[row].numpy(), max(data.shape))} for row in rows.tolist()]
    if data.kind.is_text and len(data.test.files) == len(data.test):
        return [{"text": data.test.files[row].decode(errors="replace")} for row in rows.tolist()]
    if data.kind.has_columns:
        columns = {
            name: [float(f"{value:.7g}") if isinstance(value, float) else value for value in values]
            for name, values in table_values(data.encoder.features, data.test.x[rows]).items()
        }
        return [{"row": row} for row in rows_of(columns)]
    return []


def columns_of(data: Data) -> list[dict[str, Any]]:
    """Describe the columns of a table: name, kind and known categories; empty if the inputs have no columns."""
    if not data.kind.has_columns:
        return []
    return [
        {"name": each.column, "kind": each.kind, "known": list(each.known) if isinstance(each, Category) else []}
        for each in data.encoder.features
    ]
