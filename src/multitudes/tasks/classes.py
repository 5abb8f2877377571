"""Tasks of classes: "classification", "tokens", "binary" and "multilabel".

`by_class` converts the logits of a task to the form of classification, with classes in dim 2. Quantities are computed
in that form, and `own_form` converts them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.networks.calls import Input, InputError, tensors_in
from multitudes.tasks.criteria import CROSS_ENTROPIES
from multitudes.tasks.task import Task

BINARY_CROSS_ENTROPIES = (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss)


class ClassTask(Task):
    """A task whose predictions are logits of classes: one softmax over `class_axis`, or one sigmoid per logit."""

    classes = True
    quantities: ClassVar[frozenset[str]] = frozenset(
        {
            *("member_log_probs", "member_probs", "log_probs", "probs", "label", "confidence", "entropy"),
            *("expected_entropy", "mutual_information", "disagreement", "as_classes"),
        }
    )
    outputs: ClassVar[dict[str, str]] = {
        **{"probs": "probs", "entropy": "entropy", "mutual_information": "mutual_information"},
        "members": "member_values",
    }
    likelihood = True

    def by_class(self, predictions: Tensor) -> Tensor:
        """Return logits with classes in dim 2: `[S, B, C, ...]`. A single logit z becomes (0, z) for (no, yes)."""
        if self.class_axis is None:
            return torch.stack([torch.zeros_like(predictions), predictions], 2)
        return predictions if self.class_axis > 0 else predictions.movedim(self.class_axis, 2)

    def own_form(self, values: Tensor, dim: int) -> Tensor:
        """Convert values with classes in `dim` to the task's form; for yes or no, select yes."""
        if self.class_axis is None:
            return values.select(dim, 1)
        return values if self.class_axis > 0 else values.movedim(dim, self.class_axis)

    def logits(self, log_probs: Tensor) -> Tensor:
        """Convert log-probabilities `[B, C, ...]` to logits in the task's form."""
        own = self.own_form(log_probs, 1)
        return own if self.class_axis is not None else own - log_probs.select(1, 0)

    def class_count(self, shape: Sequence[int]) -> int:
        """Return the number of classes in predictions of shape `[B, ...]`."""
        return 2 if self.class_axis is None else shape[self.class_axis]

    def targets_by_class(self, y: Tensor, shape: torch.Size) -> Tensor:
        """Return targets as classes, in the shape `places` for predictions of shape `[B, ...]`."""
        yes_or_no = self.class_axis is None and (y.dtype == torch.bool or y.is_floating_point())
        return y.long() if yes_or_no and bool((y == y.round()).all()) else self.aligned(y)

    def _averaged(self, values: Tensor, weights: Tensor) -> Tensor:
        log_probs = F.log_softmax(self.by_class(values), 2)
        mean = (log_probs + weights.log().view(-1, *[1] * (log_probs.dim() - 1))).logsumexp(0)
        return self.logits(mean).reshape(values.shape[1:])


# -- one class of several ----------------------------------------------------------------------------------


class SoftmaxTask(ClassTask):
    """One class of several for each target: logits with an axis of classes."""

    quantities = ClassTask.quantities | {"max_logit"}
    scores = ("aps", "lac", "raps")

    def _check_classes(self, predictions: Tensor, y: Tensor) -> None:
        """Check classes, or probabilities with classes in dim 1, for predictions `[S, B, C, ...]`."""
        if predictions.dim() < 3 or predictions.shape[2] == 1:
            raise InputError(
                f"cross entropy needs predictions for two classes or more, got {list(predictions.shape)}; for one "
                "logit pass task='binary', for values pass task='regression' or task='gaussian'"
            )
        if y.is_floating_point():
            own = y.movedim(self.class_axis, 1) if self.class_axis is not None and y.dim() > 2 else y
            if own.shape != predictions.shape[1:] or bool((own < 0).any()) or not _adds_up(own, 1):
                raise InputError(
                    f"y must hold classes, or their probabilities {list(predictions.shape[1:])}, got values of shape "
                    f"{list(y.shape)}: for values pass task='regression' or task='gaussian', for several labels of "
                    "one input task='multilabel'"
                )
            return
        classes, y = predictions.shape[2], y.long()
        wrong = y[(y != -100) & ((y < 0) | (y >= classes))]
        if wrong.numel():
            raise InputError(f"y must hold classes 0 to {classes - 1}, got {wrong[0].item()}")
        if bool((y == -100).all()):
            raise InputError("y must hold at least one target that is not ignored, got only -100")


class Classification(SoftmaxTask):
    """One class for each input or pixel: logits `[S, B, C, ...]`."""

    name = "classification"
    criteria = (*CROSS_ENTROPIES, F.multi_margin_loss, nn.MultiMarginLoss)
    class_axis = 1
    metrics = ("classification", "by class", "segmentation", "targetless")
    scalings = ("temperature", "member_temperature", "vector", "isotonic", None)
    compared = True

    def _needs(self, shape: Sequence[int]) -> str | None:
        # The softmax of a single logit is always 1.
        if shape[2] >= 2:
            return None
        return "hold 2 or more classes in dim 2 (use task='binary' for one logit, task='regression' for one value)"

    def check_targets(self, predictions: Tensor, y: Tensor, values: bool = True) -> None:
        super().check_targets(predictions, y, values)
        shape = predictions.shape[1:]
        if y.shape == shape and not y.is_floating_point():
            raise InputError(
                f"y of shape {list(y.shape)} ({y.dtype}) does not fit predictions of shape {list(shape)}, which are "
                "the classes of one target: for several labels of one input pass task='multilabel'"
            )
        if len(shape) > 3 and y.dim() == len(shape) - 1 and y.shape[1:] != shape[2:]:
            size = tuple(y.shape[1:])
            raise InputError(
                f"predictions are of size {list(shape[2:])} and y of size {list(y.shape[1:])}: scale one of them, for "
                f"example by mt.Multitude(model, output=lambda out: F.interpolate(out.logits, size={size}))"
            )
        if values:
            self._check_classes(predictions, y)


@dataclass(frozen=True)
class Tokens(SoftmaxTask):
    """One class for each token: logits `[S, B, T, C]`, classes last."""

    next_tokens: bool = False

    name = "tokens"
    criteria = CROSS_ENTROPIES
    rank = 4
    form = "[S, B, T, C], classes last"
    settings = ("next_tokens",)
    class_axis = -1
    metrics = ("classification", "tokens", "targetless")
    scalings = ("temperature", "member_temperature", None)
    ignored = -100

    def _needs(self, shape: Sequence[int]) -> str | None:
        return "hold 2 or more classes in the last dim" if shape[-1] < 2 else None

    def check_targets(self, predictions: Tensor, y: Tensor, values: bool = True) -> None:
        super().check_targets(predictions, y, values)
        self.check_shape(predictions.shape)
        shape = predictions.shape[1:]
        if y.shape not in (shape[:-1], shape):
            want = list(shape[:-1])
            raise InputError(f"y must have the predictions' shape without classes, {want}, got {list(y.shape)}")
        if values:
            self._check_classes(self.by_class(predictions), y)

    def aligned(self, y: Tensor, last: int = -100) -> Tensor:
        """Shift a causal language model's labels `[B, T]` to the positions that predict them; the rest gets `last`.

        >>> Tokens(next_tokens=True).aligned(torch.tensor([[3, 1, 4]]))
        tensor([[   1,    4, -100]])
        """
        if not self.next_tokens or not isinstance(y, Tensor) or y.dim() < 2:
            return y  # check_targets raises the error
        return torch.cat([y[:, 1:], torch.full_like(y[:, :1], last)], 1)

    def places(self, shape: torch.Size) -> torch.Size:
        return shape[:-1]

    def _placed(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return prediction.movedim(-1, 1), y.movedim(-1, 1) if y.dim() == prediction.dim() else y


# -- yes or no ---------------------------------------------------------------------------------------------


class SigmoidTask(ClassTask):
    """Yes or no per target: independent logits."""

    scalings = ("temperature", "member_temperature", None)
    scores = ("lac", "aps")

    def check_targets(self, predictions: Tensor, y: Tensor, values: bool = True) -> None:
        super().check_targets(predictions, y, values)
        self.check_shape(predictions.shape)
        shape = predictions.shape[1:]
        single = self.single_logit and len(shape) > 1
        if y.shape != shape and not (single and y.shape == shape[:1] + shape[2:]):
            also = " or that without the single channel" if single else ""
            raise InputError(f"y must have the predictions' shape {list(shape)}{also}, got {list(y.shape)}")
        if not values or y.dtype == torch.bool:
            return
        wrong = y[~((y >= 0) & (y <= 1))]  # also true for NaN
        if wrong.numel():
            raise InputError(
                f"y must hold 0 or 1, or probabilities between, for task {self.name!r}, got {wrong[0].item():g}"
            )


class Binary(SigmoidTask):
    """Yes or no for each input or pixel: one logit, `[S, B]` or `[S, B, 1, ...]`."""

    name = "binary"
    criteria = BINARY_CROSS_ENTROPIES
    rank = 2
    form = "[S, B] or [S, B, 1, ...]"
    metrics = ("classification", "by class", "segmentation", "yes or no", "targetless")
    single_logit = True

    def _needs(self, shape: Sequence[int]) -> str | None:
        if len(shape) < 3 or shape[2] == 1:
            return None
        return f"be {self.form}, one logit for each input or pixel (use task='multilabel' for several)"

    def by_class(self, predictions: Tensor) -> Tensor:
        return super().by_class(predictions.squeeze(2) if predictions.dim() > 2 else predictions)

    def targets_by_class(self, y: Tensor, shape: torch.Size) -> Tensor:
        return super().targets_by_class(y.reshape(self.places(shape)) if y.shape == shape else y, shape)

    def _placed(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return prediction, y.reshape(prediction.shape) if y.numel() == prediction.numel() else y


class Multilabel(SigmoidTask):
    """Yes or no for each of several labels: independent logits, `[S, B, L, ...]`."""

    name = "multilabel"
    criteria = (*BINARY_CROSS_ENTROPIES, F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss)
    form = "[S, B, labels, ...]"
    metrics = ("classification", "by class", "yes or no", "targetless")
    several_labels = True

    def places(self, shape: torch.Size) -> torch.Size:
        return shape


# -- without a chosen task ---------------------------------------------------------------------------------


def check_class_axis(predictions: Tensor, x: Input) -> None:
    """Raise InputError unless the shape of predictions `[S, B, ...]` proves that classes are in dim 2.

    This is so if there is no further axis, and for images, `[S, B, C, H, W]`, if the last two axes are in proportion to
    those of the input and the two axes before the last are not.
    """
    shape = predictions.shape
    _check_several(shape)
    dims = len(shape) - 3
    if dims < 1:
        return
    sizes = [tensor.shape[-dims:] for tensor in tensors_in(x) if tensor.dim() >= dims + 1]
    first = any(_in_proportion(shape[3:], size) for size in sizes)
    last = any(_in_proportion(shape[2:-1], size) for size in sizes)
    if dims == 1 or not first or last:
        what = "may have their classes in dim 2 or last" if dims == 1 else "have an unknown class axis"
        raise InputError(
            f"predictions of shape {list(shape)} {what}, and no task was chosen: "
            "pass task='classification' for classes in dim 2, or task='tokens' for classes last"
        )


def _in_proportion(places: Sequence[int], size: Sequence[int]) -> bool:
    return all(one * size[0] == places[0] * other for one, other in zip(places, size, strict=True))


def _check_several(shape: Sequence[int]) -> None:
    if len(shape) < 3 or (shape[2] == 1 and len(shape) != 4):  # one token of several classes has four axes
        raise InputError(
            f"predictions of shape {list(shape)} are one number per input, and no task was chosen: pass "
            "task='binary' for logits of yes or no, task='regression' for values"
        )


def check_clear(predictions: Tensor, y: Tensor) -> None:
    """Raise InputError if the shape of targets does not fit predictions with classes in dim 2, `[S, B, C, ...]`."""
    shape = predictions.shape[1:]
    if len(shape) < 2 or shape[1] == 1:
        _check_several(predictions.shape)
    if not isinstance(y, Tensor) or len(shape) < 3:
        return
    in_dim_1, last = y.shape == shape[:1] + shape[2:], y.shape == shape[:-1]
    if y.shape == shape and y.is_floating_point():
        in_dim_1, last = _adds_up(y, 1), _adds_up(y, -1)
    if last:
        way_out = "have their classes last: pass task='tokens'"
        if in_dim_1:
            way_out = (
                "may have their classes in dim 1 or last, and no task was chosen: pass task='classification' for dim "
                "1, or task='tokens' for classes last"
            )
        raise InputError(f"predictions of shape {list(shape)} for targets of shape {list(y.shape)} {way_out}")


def _adds_up(y: Tensor, dim: int) -> bool:
    """Return whether class probabilities sum to 1 over an axis."""
    total = y.float().sum(dim)
    return torch.allclose(total, torch.ones_like(total), atol=1e-2)
