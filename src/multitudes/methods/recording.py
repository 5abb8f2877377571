"""Recording a network after the training steps that its method asks for."""

from __future__ import annotations

from multitudes.training.fit import Progress
from multitudes.training.recorder import Recorder

__all__ = ["Recording"]


class Recording:
    """A callback of `fit` that records the network after the steps `times`, each of them once, also after a resume."""

    def __init__(self, recorder: Recorder, times: list[int]) -> None:
        self.recorder, self.times = recorder, times

    def __call__(self, progress: Progress) -> None:
        due = not progress.epoch_ended and progress.step in self.times
        if due and self.recorder.count <= self.times.index(progress.step):
            self.recorder.record()
