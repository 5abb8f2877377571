"""Inputs, outputs and targets of an output layer as rows.

The network must predict the layer's outputs unchanged: all of them in order, some of them (the last token of a text),
or their `log_softmax`. To verify this, one run replaces the outputs by their indices and looks these up in the
predictions. A network that changes the outputs, for example by a scale, is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.ensemble.multitude import Multitude
from multitudes.methods.laplace.curvature import wide
from multitudes.methods.laplace.layers import LaplaceLayer
from multitudes.networks.calls import (
    Input,
    InputError,
    call,
    input_errors,
    plain_attention,
    split_batch,
    to_device,
    weight_in,
)
from multitudes.networks.devices import device_in
from multitudes.networks.stochastic import Stochastic
from multitudes.networks.trace import hooked, observing, recording
from multitudes.surgery.affine import affine_layers, has_other_hooks, kind_of, maps_of
from multitudes.surgery.output_layers import final_layers
from multitudes.surgery.select import Selector, check_untied, select
from multitudes.tasks import Task
from multitudes.tasks.classes import check_class_axis, check_clear
from multitudes.training.batches import Batches


def fits_noise(task: Task) -> bool:
    """Return whether the noise variance is fitted or given, not an output of the network."""
    return not task.classes and not task.predicts_noise


# -- the layer ---------------------------------------------------------------------------------------------


def output_layer(network: nn.Module, layers: Selector, example: Input) -> str:
    """Return the name of the layer that `layers` selects, or else of the last layer with weights."""
    if layers is not None:
        names = list(select(network, layers, affine_layers(network)))
    elif maps_of(network) or isinstance(network, Stochastic):
        names = [""]
    else:
        with input_errors(example), plain_attention():
            names = final_layers(network, example)
    if len(names) != 1:
        raise ValueError(
            f"layers must select the one layer whose outputs are the predictions, got {', '.join(map(repr, names))}: "
            f"pass layers=[{names[0]!r}], or another of them"
        )
    layer: Any = network.get_submodule(names[0])
    where = layer_label(network, names[0])
    if isinstance(layer, Stochastic):
        raise ValueError(f"{where} already draws its weights, so it cannot have a Laplace posterior")
    if len(maps_of(layer)) != 1 or not _is_linear(layer):
        raise ValueError(
            f"{where} is the output layer, but a Laplace posterior is for linear layers and 1x1 convolutions: select "
            "another with layers="
        )
    if has_other_hooks(layer):
        raise ValueError(f"{where} has forward hooks, which would be lost: remove them first")
    check_untied(network, names)
    return names[0]


def layer_label(network: nn.Module, name: str) -> str:
    """Return a layer's name and class, for errors."""
    kind = type(network.get_submodule(name)).__name__
    return f"layer {name!r} ({kind})" if name else f"the network itself ({kind})"


def _is_linear(layer: Any) -> bool:
    kind = kind_of(layer)
    if kind in (None, nn.Linear):
        return True
    settings = (("kernel_size", 1), ("stride", 1), ("padding", 0))
    return (
        kind is nn.Conv2d
        and layer.groups == 1
        and all(getattr(layer, name) in (value, (value, value)) for name, value in settings)
    )


# -- rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputRows:
    """One batch as rows of the layer, without rows that have no target."""

    phi: Tensor
    """Features `[R, F]`, the last one 1 if there is a bias."""
    outputs: Tensor
    """The layer's outputs `[R, O]`, in float64."""
    target: Tensor
    """Classes `[R]` or probabilities `[R, O]` for a softmax; `[R, O / 2]` for a Gaussian head; else `[R, O]`."""
    weight: Tensor
    """Weight of each target `[R, O]`, or of a row `[R, 1]`; 0 for outputs without a target."""
    by_output: bool = True
    """True if each output of the layer is one of the predictions `[B]` or `[B, O]`."""


def rows_of(
    network: nn.Module, name: str, where: str, batches: Batches, reader: Multitude, argument: str = "data"
) -> Iterator[OutputRows]:
    """Yield the rows of a network's `LaplaceLayer` for each batch.

    `reader` has the task. In errors, `where` is the layer's name and `argument` that of the batches.
    """
    observer = _Observer(network, name, where, reader)
    device = device_in(network)
    with observing(network), plain_attention():
        for index, batch in enumerate(batches.batches):
            try:
                x, y = split_batch(batch)
                if y is None or not len(y):
                    raise ValueError("a Laplace posterior needs targets: pass (x, y), or batches of inputs and targets")
                weight = weight_in(batch, y, "a batch")
                weight = torch.ones(len(y)) if weight is None else weight
                rows = observer.rows(to_device(x, device), y.to(device), wide(weight.to(device)))
            except ValueError as error:
                raise ValueError(f"batch {index} of {argument}: {error}") from error
            if len(rows.phi):
                yield rows


class _Observer:
    """Run a network on batches. The first one determines how predictions follow from the layer's outputs."""

    def __init__(self, network: nn.Module, name: str, where: str, reader: Multitude) -> None:
        self.network, self.name, self.where, self.reader = network, name, where, reader
        self.layer = cast("LaplaceLayer", network.get_submodule(name))
        self.task = reader.reading
        self.way = ""  # "whole": all outputs in order; "log_softmax"; "chosen": some of them

    def rows(self, x: Input, y: Tensor, weight: Tensor) -> OutputRows:
        """Return the rows of a batch; `weight [B]` is per input."""
        with input_errors(x):
            inputs, outputs, prediction = self._run(x)
        y = self.task.aligned(y)
        self._check(x, y, inputs, prediction)
        numbers = self._numbers(x, outputs, prediction)
        phi = self.layer.rows(inputs).flatten(0, -2)
        own = wide(self.layer.last(outputs)).flatten(0, -2)
        if self.task.predicts_noise or self.task.class_axis is not None:
            return self._grouped(phi, own, numbers, y, weight)
        weight = weight.view(-1, *[1] * (prediction.dim() - 1)).expand_as(prediction)
        rows = self._single(phi, own, numbers, y, weight)
        return replace(rows, by_output=prediction.dim() < 3 and prediction[:1].numel() == own.shape[1])

    def _run(self, x: Input, instead: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the layer's input, its output, and the prediction. `instead` replaces the layer's output, if given."""
        names = [self.name]
        with recording(self.network, names) as trace, hooked(self.network, names, lambda *_: instead):
            prediction = call(self.network, x)
        if len(trace.ended) != 1:
            raise InputError(f"{self.where} must run once for an input, but runs {len(trace.ended)} times")
        return trace.ended[0].args[0], trace.ended[0].output, prediction

    def _check(self, x: Input, y: Tensor, inputs: Tensor, prediction: Tensor) -> None:
        """Raise unless targets fit the predictions and features are finite."""
        if self.reader.known_task is None:
            check_class_axis(prediction[None], x)
            check_clear(prediction[None], y)
        self.task.check_shape(prediction[None].shape)
        self.task.check_targets(prediction[None], y)
        if self.task.predicts_noise:
            want = [len(prediction), *self.task.shown(prediction.shape[1:])]
            if list(y.shape) != want:
                raise ValueError(f"y must have the means' shape {want}, got {list(y.shape)}")
        places = self.task.places(prediction.shape)
        if self.task.class_axis is not None and not y.is_floating_point() and y.shape != places:
            raise ValueError(f"y must have one class for each prediction, {list(places)}, got shape {list(y.shape)}")
        if y.is_floating_point() and not bool(y.isfinite().all()):
            raise ValueError("y must be finite, got NaN or infinity")
        if not bool(inputs.isfinite().all()):
            raise ValueError(f"the inputs of {self.where} must be finite, got NaN or infinity")

    # -- which output is which prediction ----------------------------------------------------------------

    def _numbers(self, x: Input, outputs: Tensor, prediction: Tensor) -> Tensor:
        """Return the index of the layer's output (counted with channels last) for each element of the prediction."""
        last = self.layer.last(outputs)
        counted = torch.arange(last.numel(), device=last.device).view(last.shape)
        counted = counted.movedim(-1, 1) if isinstance(self.layer, nn.Conv2d) else counted
        if not self.way:
            self.way = self._detect_way(x, outputs, prediction, counted)
        numbers = None
        if self.way == "chosen":
            numbers = self._looked_up(x, counted, prediction)
        elif counted.numel() == prediction.numel():
            numbers = counted.reshape(prediction.shape)
        if numbers is None or not self._same(last, numbers, prediction):
            raise ValueError(
                f"the predictions are not the outputs of {self.where}, but are computed from them: a Laplace posterior "
                "needs a network that ends with this layer"
            )
        return numbers

    def _detect_way(self, x: Input, outputs: Tensor, prediction: Tensor, counted: Tensor) -> str:
        numbers = self._looked_up(x, counted, prediction)
        if numbers is None:
            return "log_softmax" if self.task.class_axis is not None and outputs.shape == prediction.shape else "chosen"
        whole = counted.numel() == prediction.numel()
        return "whole" if whole and torch.equal(numbers, counted.reshape(prediction.shape)) else "chosen"

    def _looked_up(self, x: Input, counted: Tensor, prediction: Tensor) -> Tensor | None:
        """Return the indices of the outputs that the prediction consists of; None if it is computed from them."""
        marks = wide((counted + 1) * (1 - 2 * (counted % 2)))  # alternate signs, to notice e.g. a ReLU
        values = wide(self._run(x, marks)[2])
        if values.shape != prediction.shape or not bool(values.isfinite().all()):
            return None
        numbers = values.abs().round().long() - 1
        if not bool(((numbers >= 0) & (numbers < counted.numel())).all()):
            return None
        return numbers if torch.equal(self.layer.last(marks).flatten()[numbers], values) else None

    def _same(self, last: Tensor, numbers: Tensor, prediction: Tensor) -> bool:
        if self.way == "log_softmax":
            given = F.log_softmax(wide(last), -1).flatten()[numbers]
            return torch.allclose(given, wide(prediction), rtol=1e-3, atol=1e-3)
        return torch.equal(wide(last).flatten()[numbers], wide(prediction))

    def _grouped(self, phi: Tensor, outputs: Tensor, numbers: Tensor, y: Tensor, weight: Tensor) -> OutputRows:
        """Build rows for predictions made of all outputs of a row together."""
        axis, width = self.task.class_axis or 1, outputs.shape[1]
        numbers = numbers.movedim(axis, -1).flatten(0, -2)
        order = torch.arange(width, device=numbers.device)
        first = numbers[:, :1]
        if numbers.shape[1] != width or not torch.equal(numbers - first, order.expand_as(numbers)):
            raise ValueError(
                f"each prediction must be one row of the {width} outputs of {self.where} in their order, got "
                f"{numbers.shape[1]} in another order"
            )
        which = first[:, 0] // width
        weight = weight.repeat_interleave(len(which) // len(weight))
        if self.task.class_axis is not None and not y.is_floating_point():
            y = y.flatten().long()
            kept = y != -100
            which, y, weight = which[kept], y[kept], weight[kept]
        else:
            y = wide(y.movedim(axis, -1)).flatten(0, -2)
        return OutputRows(phi[which], outputs[which], y, weight[:, None])

    def _single(self, phi: Tensor, outputs: Tensor, numbers: Tensor, y: Tensor, weight: Tensor) -> OutputRows:
        """Build rows for predictions that are one output each."""
        numbers = numbers.flatten()
        if len(numbers.unique()) != len(numbers):
            raise ValueError(f"an output of {self.where} appears in the predictions more than once")
        target, weights = torch.zeros_like(outputs).flatten(), torch.zeros_like(outputs).flatten()
        target[numbers], weights[numbers] = wide(y).flatten(), weight.flatten()
        target, weights = target.view_as(outputs), weights.view_as(outputs)
        kept = weights.any(1)
        return OutputRows(phi[kept], outputs[kept], target[kept], weights[kept])
