"""Networks without a chosen task: shapes that prove classification, and errors for all others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multitudes as mt
from multitudes.tasks import criterion_for
from tests.tasks.task_cases import X, classes, reshaped

# Targets and shapes -----------------------------------------------------------------------------------------


def test_the_shape_of_targets_shows_the_class_axis() -> None:
    net = mt.Multitude(reshaped(5, 3))
    first, last = classes(4, 3, high=5), classes(4, 5, high=3)
    torch.testing.assert_close(net.loss(X, first), F.cross_entropy(net(X)[0], first))
    with pytest.raises(ValueError, match=r"have their classes last: pass task='tokens'"):
        net.loss(X, last)
    want = F.cross_entropy(net(X)[0].movedim(-1, 1), last)
    torch.testing.assert_close(net.loss(X, last, task="tokens"), want)
    with pytest.raises(ValueError, match=r"have their classes last: pass task='tokens'"):
        net.loss(X, torch.randn(4, 5, 3).softmax(-1))
    square = mt.Multitude(reshaped(3, 3))
    y = classes(4, 3, high=3)
    with pytest.raises(
        ValueError, match=r"may have their classes in dim 1 or last, and no task was chosen: pass task="
    ):
        square.loss(X, y)
    for criterion in (nn.CrossEntropyLoss(), F.cross_entropy):
        with pytest.raises(ValueError, match="may have their classes in dim 1 or last"):
            square.loss(X, y, criterion)
    a, b = (square.loss(X, y, task=task).item() for task in ("classification", "tokens"))
    assert a == pytest.approx(F.cross_entropy(square(X)[0], y).item())
    assert b == pytest.approx(F.cross_entropy(square(X)[0].movedim(-1, 1), y).item()) and a != pytest.approx(b)


@pytest.mark.parametrize("shape", [(5, 3), (3, 3)])
def test_predictions_of_two_axes_need_a_task(shape: tuple[int, int]) -> None:
    net = mt.deep_ensemble(reshaped(*shape), 2)
    for run in (net.predict, lambda x: mt.predict(net, x), lambda x: mt.temporal(net)(x)):
        with pytest.raises(ValueError, match="may have their classes in dim 2 or last, and no task was chosen: pass"):
            run(X)
    y = classes(4, shape[0], high=3)
    for verb in (mt.evaluate, mt.calibrate):
        with pytest.raises(ValueError, match="may have their classes in dim 2 or last"):
            verb(net, (X, y))
    assert net.predict(X, task="classification").probs.sum(1).allclose(torch.ones(4, shape[1]))
    assert net.predict(X, task="tokens").probs.sum(2).allclose(torch.ones(4, shape[0]))
    net.task = "tokens"
    assert mt.evaluate(net, (X, y)).counts["nll"] == y.numel()


def test_one_token_with_several_classes_is_not_a_single_logit() -> None:
    net = mt.Multitude(reshaped(1, 3))
    with pytest.raises(ValueError, match="have their classes last: pass task='tokens'"):
        net.loss(X, classes(4, 1, high=3))
    with pytest.raises(ValueError, match="may have their classes in dim 2 or last"):
        net.predict(X)
    with pytest.raises(ValueError, match="for one logit pass task='binary'"):
        net.loss(X, classes(4, 3, high=2))
    assert net.predict(X, task="tokens").probs.shape == (4, 1, 3)


@pytest.mark.parametrize(
    ("channels", "size", "clear"),
    [
        ((3, 6), (8, 8), True),
        ((6,), (4, 4), True),  # a stride of 2
        ((8,), (8, 8), False),  # as many classes as pixels
    ],
)
def test_dense_predictions_need_a_task_unless_the_input_size_shows_the_class_axis(
    channels: tuple[int, ...], size: tuple[int, int], clear: bool
) -> None:
    images = torch.randn(2, 3, 8, 8)
    net = mt.Multitude(nn.Conv2d(3, channels[-1], 3, stride=8 // size[0], padding=1))
    if clear:
        p = net.predict(images)
        assert p.task == "classification" and p.probs.shape == (2, channels[-1], *size)
    else:
        with pytest.raises(ValueError, match="have an unknown class axis"):
            net.predict(images)

    class Last(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).movedim(1, -1)

    channels_last = mt.Multitude(Last(3, channels[-1], 3, padding=1))
    with pytest.raises(ValueError, match="have an unknown class axis.*task='tokens' for classes last"):
        channels_last.predict(images)
    y = torch.randint(channels[-1], (2, 8, 8))
    p = channels_last.predict(images, task="tokens")
    assert p.probs.sum(-1).allclose(torch.ones(2, 8, 8))
    assert mt.evaluate(channels_last, (images, y), task="tokens").counts["nll"] == y.numel()


@pytest.mark.parametrize("last", [[], [nn.Flatten(0)]])
def test_one_number_per_input_needs_a_task(last: list[nn.Module]) -> None:
    net = mt.Multitude(nn.Sequential(nn.Linear(8, 1), *last))
    y = torch.tensor([0.0, 1.0, 1.0, 0.0])
    for use in (lambda: net.predict(X), lambda: net.loss(X, y), lambda: net.loss(X, y.long())):
        with pytest.raises(ValueError, match=r"pass task='binary' for logits of yes or no, task='reg"):
            use()
    assert net.predict(X, task="binary").probs.shape == (4,)
    assert net.predict(X, task="regression").mean.shape == net(X).shape[1:]


@pytest.mark.parametrize(
    ("task", "net", "y", "sentence"),
    [
        ("binary", reshaped(1), torch.tensor([0, 1, 2, 0]), "y must hold 0 or 1.* for task 'binary', got 2"),
        ("binary", reshaped(1), torch.zeros(4, 2), r"shape \[4, 1\] or that without the single channel, got \[4, 2\]"),
        (None, reshaped(3), torch.ones(4, 3).long(), "for several labels of one input pass task='multilabel'"),
        (None, reshaped(3), torch.ones(4, 3), "for several labels of one input task='multilabel'"),
        ("multilabel", reshaped(3), torch.zeros(4), r"y must have the predictions' shape \[4, 3\], got \[4\]"),
        ("multilabel", reshaped(3), torch.full((4, 3), -100), "y must hold 0 or 1.* got -100"),
        ("tokens", reshaped(5, 3), classes(4, 5, high=3) + 2, "y must hold classes 0 to 2, got"),
        ("tokens", reshaped(5, 3), classes(4, 3, high=3), r"shape without classes, \[4, 5\], got \[4, 3\]"),
        ("tokens", reshaped(5, 3), torch.full((4, 5), -100), "not ignored, got only -100"),
        ("tokens", reshaped(5), classes(4, high=3), r"must be \[S, B, T, C\], classes last, got shape \[1, 4, 5\]"),
    ],
)
def test_targets_that_do_not_fit_are_errors(task: str | None, net: nn.Module, y: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mt.Multitude(net).loss(X, y, task=task)


@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_criteria_belong_to_their_tasks(task: str) -> None:
    for criterion in (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()):
        assert criterion_for(task, criterion) is criterion
        with pytest.raises(ValueError, match=r"is for task 'binary' or 'multilabel', and the task is 'classification'"):
            criterion_for(None, criterion)
    with pytest.raises(ValueError, match="takes probabilities, and a network must return logits"):
        criterion_for(task, nn.BCELoss())
    with pytest.raises(ValueError, match=f"is for task 'classification' or 'tokens', and the task is '{task}'"):
        criterion_for(task, nn.CrossEntropyLoss())
    assert criterion_for("tokens", nn.CrossEntropyLoss())


def test_masks_of_another_size_than_the_logits_are_an_error() -> None:
    net = mt.Multitude(nn.Conv2d(3, 5, 3, stride=2, padding=1))
    with pytest.raises(ValueError, match=r"of size \[4, 4\] and y of size \[8, 8\]: scale one.*size=\(8, 8\)"):
        net.loss(torch.randn(2, 3, 8, 8), classes(2, 8, 8, high=5), task="classification")
