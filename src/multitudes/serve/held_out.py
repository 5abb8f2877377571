"""What is known of a network from inputs that it has not learned from: its test part.

The predictions are those that the job has saved; where there are none, or other draws are asked for, some rows are
predicted anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from multitudes.core.tasks.predictive import Predictive
from multitudes.evaluation.conformal import Conformal
from multitudes.study.trained import Trained

__all__ = ["HeldOut", "held_out"]

ROWS = 1000
"""The most that are predicted anew."""


class HeldOut(NamedTuple):
    """Rows of the test part `[n]`, with the network's uncertainty of each, `[n]`: entropy, or standard deviation."""

    rows: Tensor
    uncertainty: Tensor
    probs: Tensor | None
    """Of classes, `[n, C]`."""

    def conformal(self, y: Tensor) -> Conformal | None:
        """The scores for sets of classes, from all targets of the test part; nothing was fitted to these rows."""
        if self.probs is None:
            return None
        return Conformal.fit(Predictive(self.probs.clamp(min=torch.finfo().tiny).log()[None]), y[self.rows])


def held_out(trained: Trained, anew: bool = False, seed: int = 0, precision: str | None = None) -> HeldOut:
    """From the files of the job, or `anew` from the network."""
    test, classes = trained.data.test, trained.data.classes
    saved = {} if anew else trained.job.predictions
    found = saved.get("probs" if classes else "std")
    if found is not None and found.shape == ((len(test), len(classes)) if classes else (len(test),)):
        return _held_out(torch.arange(len(test)), torch.from_numpy(found).float())
    rows = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))[:ROWS]
    answer = trained.predict(test.x[rows], seed=seed, precision=precision, progress=False)
    return _held_out(rows, answer.probs if classes else answer.std[:, 0])


def _held_out(rows: Tensor, found: Tensor) -> HeldOut:
    if found.dim() == 1:
        return HeldOut(rows, found, None)
    return HeldOut(rows, torch.special.entr(found).sum(1), found)
