"""Temporal smoothing: exponentially weighted recent predictions of a stream."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt


class Echo(nn.Module):
    """Its logits are its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def by_hand(frames: list[Tensor], decay: float, keep: int) -> Tensor:
    """The definition: `frames` are predictions, the last one is now."""
    recent = list(reversed(frames))[:keep]
    weights = [math.exp(-decay * age) for age in range(len(recent))]
    return sum(w * frame for w, frame in zip(weights, recent, strict=True)) / sum(weights)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize(("frames", "decay"), [(5, 0.8), (3, 0.0), (1, 0.8), (4, 3.0)])
def test_recent_probabilities_are_weighted_by_their_age(shape: tuple[int, ...], frames: int, decay: float) -> None:
    stream = mt.temporal(Echo(), frames=frames, decay=decay)
    logits = torch.randn(9, *shape, generator=torch.Generator().manual_seed(0))
    for step in range(9):
        p = stream(logits[step])
        want = by_hand([x.softmax(1) for x in logits[: step + 1]], decay, frames)
        torch.testing.assert_close(p.probs, want)
        assert len(stream) == min(step + 1, frames)


def test_regression_averages_means() -> None:
    stream = mt.temporal(Echo(), frames=3, decay=0.5)
    stream.net.task = "regression"
    values = torch.randn(6, 4, 1, generator=torch.Generator().manual_seed(0))
    for step in range(6):
        torch.testing.assert_close(stream(values[step]).mean, by_hand(list(values[: step + 1]), 0.5, 3))


def test_gaussian_averages_are_the_mixtures() -> None:
    stream = mt.temporal(Echo(), frames=2, decay=1.0)
    old, new = torch.tensor([[1.0, 0.3]]), torch.tensor([[-2.0, 1.5]])
    stream(old, task="gaussian")
    p = stream(new, task="gaussian")
    w = torch.tensor([math.exp(-1.0), 1.0]) / (1 + math.exp(-1.0))
    means = torch.tensor([1.0, -2.0])
    variances = nn.functional.softplus(torch.tensor([0.3, 1.5])) + 1e-6
    mean = (w * means).sum()
    torch.testing.assert_close(p.mean[0, 0], mean)
    torch.testing.assert_close(p.variance[0, 0], (w * (variances + means**2)).sum() - mean**2)


def test_reset_starts_a_new_stream() -> None:
    stream = mt.temporal(Echo())
    assert stream
    stream(torch.randn(1, 3))
    with pytest.raises(ValueError, match="reset"):
        stream(torch.randn(2, 3))
    assert len(stream) == 1
    stream.reset()
    x = torch.randn(2, 3)
    torch.testing.assert_close(stream(x).probs, x.softmax(1))


def test_a_stream_of_draws_of_a_smooth_network() -> None:
    torch.manual_seed(0)
    model = mt.models.unet(classes=3, width=4)
    net = mt.mc_dropout(mt.smooth(model, example=torch.zeros(1, 3, 16, 16)), 0.3)
    stream = mt.temporal(net, frames=3)
    video = torch.randn(5, 1, 3, 16, 16)
    predictions = [net.predict(frame, draws=4, seed=1).probs for frame in video]
    for step, frame in enumerate(video):
        p = stream(frame, draws=4, seed=1)
        torch.testing.assert_close(p.probs, by_hand(predictions[: step + 1], 0.8, 3))
    assert p.label.shape == (1, 16, 16)


def test_a_whole_stream_goes_through_predict() -> None:
    stream = mt.temporal(Echo(), frames=2, decay=0.0)
    frames = torch.randn(6, 3)
    p = mt.predict(stream, frames, batch_size=1)
    probs = frames.softmax(1)
    torch.testing.assert_close(p.probs[1:], (probs[1:] + probs[:-1]) / 2)


def test_bad_arguments_are_errors() -> None:
    for options in ({"frames": 0}, {"frames": 2.5}, {"decay": -1.0}, {"decay": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(options))):
            mt.temporal(Echo(), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="net must be"):
        mt.temporal(None)  # type: ignore[arg-type]
