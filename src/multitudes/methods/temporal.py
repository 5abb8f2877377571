"""Temporal smoothing: the average of recent predictions of a stream.

Park et al., *Vector quantized Bayesian neural network inference for data streams*, 2021, as used by Park and Kim,
*Blurs behave like ensembles*, 2022. Neighboring frames of a stream are nearly the same, so past predictions are an
ensemble at no extra cost:

    p(y | x_0) = sum_a w_a p(y | x_a),   w_a = exp(-decay * a) / sum_b exp(-decay * b),

where `x_a` is the frame `a` steps ago.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_count, check_number
from multitudes.ensemble.predictor import Predictor, PredictorModule, predicted, predictor
from multitudes.networks.calls import Input
from multitudes.tasks.predictive import Predictive


class Stream(PredictorModule):
    """A network for a stream of frames, which averages each prediction with those for earlier frames.

    `stream(frame)`, for B parallel streams `[B, ...]`, returns a `Predictive` with the weighted average as its only
    member. The last `frames` predictions are stored; call `reset` before the next stream. The arguments are those of
    `temporal`.
    """

    def __init__(self, net: Predictor, frames: int, decay: float) -> None:
        super().__init__()
        self.net = net
        self.frames = frames
        self.decay = decay
        self._recent: deque[Tensor] = deque(maxlen=frames)

    def forward(self, frame: Input, task: str | None = None, **options: Any) -> Predictive:
        """Predict the next frame; `options` are those of the network's `predict`."""
        if task is not None:
            options["task"] = task
        prediction = predicted(self.net, frame, **options)
        now = prediction.together
        if self._recent and self._recent[0].shape != now.shape:
            raise ValueError(
                f"frame has predictions of shape {list(now.shape)}, but earlier frames of shape "
                f"{list(self._recent[0].shape)}: call reset() before a new stream"
            )
        self._recent.appendleft(now)
        ages = torch.arange(len(self._recent), dtype=torch.float64)
        weights = torch.softmax(-self.decay * ages, 0)
        average = prediction.reading.averaged(torch.stack(list(self._recent)), weights).unsqueeze(0)
        return replace(prediction, predictions=average, draws=None, calibration=None)

    predict = forward  # `mt.predict(stream, frames)` runs a whole stream

    def reset(self) -> None:
        """Forget all frames so far."""
        self._recent.clear()

    def __len__(self) -> int:
        """Return the number of stored frames."""
        return len(self._recent)

    def __bool__(self) -> bool:
        """Return True, as for any network, also before the first frame."""
        return True

    def extra_repr(self) -> str:
        return f"frames={self.frames}, decay={self.decay:g}"


def temporal(net: nn.Module, frames: int = 5, decay: float = 0.8) -> Stream:
    """Average the predictions for the latest frames of a stream (Park et al., 2021; Park and Kim, 2022).

    The prediction is `sum_a w_a p(y | x_a)` with weights `w_a` proportional to `exp(-decay * a)`, where `x_a` is the
    frame `a` steps ago.

    Args:
        net: A multitude, calibrated or not, or a plain network. It is not copied. Calibrated probabilities are
            averaged; prediction sets are not available, since their guarantee is for one frame.
        frames: Number of frames in the average.
        decay: Decay of the weights per frame, 0 or more.

    Returns:
        A `Stream`, to call with one frame `[B, ...]` after the other.

    Example:
        >>> stream = temporal(nn.Linear(3, 2), frames=5, decay=0.8)
        >>> stream(torch.ones(1, 3)).probs.shape, len(stream)
        (torch.Size([1, 2]), 1)
    """
    check_count("frames", frames)
    check_number("decay", decay, 0)
    if isinstance(net, Stream):
        raise ValueError("net must be a multitude or a network, got a Stream: pass its net")
    return Stream(predictor(net), frames, decay)
