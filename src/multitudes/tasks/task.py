"""`Task`: how to average, train, measure, calibrate and export predictions."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from multitudes.networks.calls import InputError
from multitudes.tasks.criteria import (
    Criterion,
    at_least_float32,
    expand_weight,
    setting_of,
    target_losses,
    unwrap,
    weighted_by_row,
    weighted_mean,
)


class Task(ABC):
    """The meaning of predictions `[S, B, ...]`; immutable. `multitudes.tasks.task_of` makes one from its name.

    Subclasses derive from `ClassTask` or `ValueTask`, set the attributes below where the defaults do not fit, and
    override the methods that differ.
    """

    name: ClassVar[str]
    criteria: ClassVar[tuple[Any, ...]]
    """Known criteria, functions and classes; the default first."""
    rank: ClassVar[int] = 3
    """The minimum rank of predictions `[S, B, ...]`."""
    form: ClassVar[str] = "[S, B, channels, ...]"
    """The predictions' shape, for errors."""
    settings: ClassVar[tuple[str, ...]] = ()
    """The names of its settings: `"quantiles"`, `"next_tokens"`."""

    classes: ClassVar[bool]
    """True if predictions are logits of classes, not values."""
    class_axis: ClassVar[int | None] = None
    """The axis of classes in predictions `[B, ...]`; None if they have none."""
    quantities: ClassVar[frozenset[str]]
    """The quantities of a `Predictive` that exist for this task."""
    outputs: ClassVar[dict[str, str]]
    """The outputs of an exported file, by name, with their quantities."""
    metrics: ClassVar[tuple[str, ...]]
    """The kinds of metrics that apply (`metrics.declare`); the first parses predictions and targets for all."""
    scalings: ClassVar[tuple[str | None, ...]] = (None,)
    """The scalings that can calibrate it (`evaluation.temperature`), the default first."""
    scores: ClassVar[tuple[str, ...]] = ()
    """The conformal scores of its sets and intervals (`evaluation.conformal`), the default first."""
    likelihood: ClassVar[bool] = False
    """True if a Laplace posterior exists: the default criterion is the negative log-likelihood of a softmax (with an
    axis of classes), a sigmoid (other classes) or a Gaussian (values)."""
    single_logit: ClassVar[bool] = False
    """True if the two classes, no and yes, share one logit."""
    several_labels: ClassVar[bool] = False
    """True if each input has several targets, in dim 1, each with its own classes."""
    per_value: ClassVar[int] = 1
    """The number of network outputs per class or value."""
    predicts_noise: ClassVar[bool] = False
    """True if members predict the noise of values, so that their mixture has a density."""
    compared: ClassVar[bool] = False
    """True if the landscape's function-space analyses support the task."""
    ignored: ClassVar[int | None] = None
    """The target that metrics ignore."""
    quantiles: Any = None
    """The levels of quantiles; a setting."""
    next_tokens: Any = False
    """True if position t predicts the label at t + 1; a setting."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # equal in every process

    # -- predictions and targets ---------------------------------------------------------------------------

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless predictions of this shape, `[S, B, ...]`, fit the task."""
        if len(shape) < self.rank:
            need: str | None = f"be {self.form}"
        else:
            need = self._needs(shape) if shape[0] else "hold at least one member in dim 0"
        if need is not None:
            raise ValueError(f"predictions of task {self.name} must {need}, got shape {list(shape)}")

    def _needs(self, shape: Sequence[int]) -> str | None:
        """Return the requirement that a shape of sufficient rank violates, for an error."""
        return None

    def check_targets(self, predictions: Tensor, y: Tensor, values: bool = True) -> None:
        """Raise InputError if aligned targets `[B, ...]` do not fit predictions `[S, B, ...]`.

        With `values`, check the values of classes and probabilities too.
        """
        if not isinstance(y, Tensor) or not y.numel():
            got = f"shape {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise InputError(f"y must be a tensor with at least one target, got {got}")

    def sized(self, shape: Sequence[int]) -> Self:
        """Return the task with the settings that follow from the shape of predictions."""
        return self

    def aligned(self, y: Tensor, last: int = -100) -> Tensor:
        """Move targets `[B, ...]` to the positions that predict them; positions without a target get `last`."""
        return y

    def places(self, shape: torch.Size) -> torch.Size:
        """Return the shape of targets, `[B, ...]`, for predictions of shape `[B, ...]`."""
        return shape[:1] + shape[2:]

    def shown(self, outputs: Sequence[int]) -> list[int]:
        """Return the axes of predictions after `[S, B]` to display: those of classes or values."""
        if self.single_logit or not outputs:
            return list(outputs[1:])
        return [outputs[0] // self.per_value, *outputs[1:]]

    def averaged(self, predictions: Tensor, weights: Tensor | None = None) -> Tensor:
        """Average predictions `[D, B, ...]` into one in the same form, `[B, ...]`.

        For classes, these are logits whose probabilities are the mean probabilities; for regression and quantiles, the
        mean; for Gaussians, the mean and variance of the mixture. `weights [D]` sum to 1 and are equal by default.

        >>> from multitudes.tasks import task_of
        >>> task_of("classification").averaged(torch.tensor([[[2.0, 2.0]], [[1.0, 1.0]]])).exp()
        tensor([[0.5000, 0.5000]])
        >>> task_of("binary").averaged(torch.tensor([[3.0], [-3.0]])).sigmoid()
        tensor([0.5000])
        """
        if len(predictions) == 1:
            return predictions[0]
        values = at_least_float32(predictions)
        if weights is None:
            weights = torch.full((len(values),), 1 / len(values))
        return self._averaged(values, weights.to(values).view(-1, *[1] * (values.dim() - 1)))

    @abstractmethod
    def _averaged(self, values: Tensor, weights: Tensor) -> Tensor:
        """Average values in float32 or better, with weights `[D, 1, ...]`."""

    # -- losses --------------------------------------------------------------------------------------------

    @property
    def criterion(self) -> Criterion:
        """The default criterion."""
        criterion: Criterion = self.criteria[0]
        return criterion

    def averages_rows(self, criterion: Criterion) -> bool:
        """Return whether a criterion is known to be a mean over rows, so that batches can be combined.

        >>> from multitudes.tasks import task_of
        >>> import torch.nn.functional as F
        >>> values = task_of("regression")
        >>> values.averages_rows(F.mse_loss), values.averages_rows(nn.MSELoss(reduction="sum"))
        (True, False)
        """
        weighs_rows = self.class_axis is None and setting_of(criterion, "weight", None) is not None
        return self._is_own(criterion) and not weighs_rows and setting_of(criterion, "reduction", "mean") == "mean"

    def _is_own(self, criterion: Criterion) -> bool:
        """Return whether a criterion is exactly a known one, not a subclass, which may compute anything."""
        own = unwrap(criterion)
        return (type(own) if isinstance(own, nn.Module) else own) in self.criteria

    def loss(self, criterion: Criterion, prediction: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Apply a known criterion to a prediction `[B, ...]` and unaligned targets, including integers of any type.

        With a `weight` per row, `[B]`, or per target, in the shape of y, return the mean of losses times weights.
        """
        with nullcontext() if torch.compiler.is_compiling() else fitting(prediction, y):
            criterion, prediction, fitted = self._fitted(criterion, prediction, y)
            if weight is None:
                return criterion(prediction, fitted)
            own = self._is_own(criterion) or not isinstance(unwrap(criterion), nn.Module)
            mean = weighted_mean if own else weighted_by_row
            return mean(criterion, prediction, fitted, self._fitted_weight(weight, y, fitted))

    def validation_losses(
        self, predictions: Tensor, together: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the score (lower is better) and the weight (0 if ignored) of each target, in the same shape.

        By default, the score is the loss of the joint prediction, `together`.
        """
        with fitting(together, y):
            criterion, prediction, fitted = self._fitted(self.criterion, at_least_float32(together), y)
            losses, counts = target_losses(criterion, prediction, fitted)
            return losses, counts * expand_weight(self._fitted_weight(weight, y, fitted), losses)

    def _fitted(self, criterion: Criterion, prediction: Tensor, y: Tensor) -> tuple[Criterion, Tensor, Tensor]:
        """Convert a criterion, a prediction and targets to the shapes and dtypes that torch's criteria take."""
        own = (
            dict(criterion.named_buffers()) if isinstance(criterion, nn.Module) else getattr(criterion, "keywords", {})
        )
        weights = {name: t for name, t in own.items() if isinstance(t, Tensor) and t.is_floating_point()}
        if any(tensor.dtype != prediction.dtype for tensor in weights.values()):
            dtype = reduce(torch.promote_types, (tensor.dtype for tensor in weights.values()), prediction.dtype)
            prediction = prediction.to(dtype)
            if isinstance(criterion, nn.Module):
                criterion = copy.deepcopy(criterion).to(dtype)
            else:
                criterion = partial(criterion, **{name: tensor.to(dtype) for name, tensor in weights.items()})
        prediction, y = self._placed(prediction, self.aligned(y))
        if self.class_axis is not None and not y.is_floating_point():
            return criterion, prediction, y.to(torch.int64)
        return criterion, prediction, y.to(prediction.dtype) if self.classes or not y.is_floating_point() else y

    def _placed(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return prediction, y

    def _fitted_weight(self, weight: Tensor, y: Tensor, fitted: Tensor) -> Tensor:
        """Reorder the weights of single targets like the targets."""
        if weight.dim() == 1 or weight.shape != y.shape:
            return weight
        return self.aligned(weight, 0).reshape(fitted.shape if weight.numel() == fitted.numel() else weight.shape)


@contextmanager
def fitting(prediction: Tensor, y: Tensor) -> Iterator[None]:
    """Turn torch's errors about targets that do not fit predictions into an `InputError`."""
    try:
        yield
    except (torch.OutOfMemoryError, InputError):
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if "CUDA error" in str(error):
            raise
        what = f"y of shape {list(y.shape)} ({y.dtype})"
        raise InputError(f"{what} does not fit predictions of shape {list(prediction.shape)}: {error}") from error
