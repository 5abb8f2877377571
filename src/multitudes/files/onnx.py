"""`to_onnx`: export a network to one ONNX file, and compare the file with torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_number, needed
from multitudes.base.sealed_files import replacing
from multitudes.ensemble.multitude import Multitude
from multitudes.evaluation.calibrate import Calibrated
from multitudes.files.freeze import freeze
from multitudes.files.onnx_exporter import (
    ExportedMultitude,
    accept_texts,
    check_example,
    check_packages,
    export,
    fix_noise,
    open_session,
    reason,
    separate_members,
    tensor_names,
)
from multitudes.files.save import check_path
from multitudes.networks.calls import Input, plain_attention, select_rows, tensors_in, tile, to_device
from multitudes.networks.copies import copied
from multitudes.tasks.predictive import Predictive

VALUES = ("mean", "members")
"""Outputs in the units of the target, with its offset; `std` has only its scale."""

METADATA = "multitudes"
"""Metadata key of the task and its settings, as JSON."""


def to_onnx(
    net: Multitude | Calibrated | nn.Module,
    path: str | os.PathLike[str],
    example: Input,
    *,
    draws: int = 8,
    seed: int | None = None,
    tolerance: float = 1e-4,
) -> Path:
    """Write a network as one ONNX file for any batch size, and verify it with ONNX Runtime.

    Classifiers output `probs [B, C]`, `entropy [B]`, `mutual_information [B]` and `members [S, B, C]`, the members'
    probabilities; regression outputs `mean`, `std` and `members`, the members' means or quantiles. Shapes are those of
    `Predictive`. A calibrated network outputs calibrated predictions. The file's metadata contain the task and its
    settings.

    Args:
        net: A multitude, calibrated or not, or a plain network.
        path: The file to write. An existing file is replaced after verification.
        example: One batch of inputs. The input is called `x`, or has the names of a mapping of keyword arguments.
        draws: Draws of each member of a network that draws, which is frozen first (see `freeze`).
        seed: Seed of these draws.
        tolerance: Maximum difference from torch, relative for values above 1, on the example and on batches of other
            sizes. The order of equal numbers in `torch.topk` and `torch.sort` may differ.

    Returns:
        The path.

    Raises:
        ValueError: The network cannot be exported, or its file gives other predictions. No file is written.
    """
    return write_onnx(net, check_path(path), example, draws=draws, seed=seed, tolerance=tolerance)


@dataclass(frozen=True)
class RawInputs:
    """Raw inputs that a file takes in place of the network's inputs, and the units of its outputs.

    `example` is one batch of raw inputs by name; `prepare` converts it to the network's input. Inputs in `texts` are
    indices in torch and texts in the file: `texts[name]` maps each text to its index, and None to the index of unknown
    texts. Outputs are `values * std + mean`. `about` is written to the metadata as JSON.
    """

    example: Mapping[str, Tensor]
    prepare: Callable[[Mapping[str, Tensor]], Tensor]
    texts: Mapping[str, Mapping[str | None, int]] = field(default_factory=dict)
    mean: float = 0.0
    std: float = 1.0
    about: Mapping[str, Any] = field(default_factory=dict)

    def written(self, name: str, tensor: Tensor) -> Any:
        """Convert an input to the NumPy array that the file takes, with texts in place of indices."""
        if name not in self.texts:
            return tensor.numpy()
        of = {number: text for text, number in self.texts[name].items() if text is not None}
        words = [of.get(number, "\0 none of them") for number in tensor.tolist()]
        return needed("numpy", "onnx", "an exported network").array(words, dtype=object)


def write_onnx(
    net: Multitude | Calibrated | nn.Module,
    path: Path,
    example: Input,
    *,
    draws: int,
    seed: int | None,
    tolerance: float = 1e-4,
    raw: RawInputs | None = None,
) -> Path:
    """Run `to_onnx`; with `raw`, the file takes raw inputs, and its outputs have their units."""
    if not isinstance(net, (Multitude, Calibrated)):
        if not isinstance(net, nn.Module) or isinstance(getattr(net, "net", None), Multitude):
            raise ValueError(
                f"net must be a multitude or a network, got {type(net).__name__}; to export a stream, which depends on "
                "earlier inputs, pass its network, stream.net"
            )
        net = Multitude(net)
    check_number("tolerance", tolerance, 0, above=True)
    check_example(example)
    check_packages("to_onnx")
    example = to_device(example, "cpu")
    frozen = freeze(separate_members(copied(net)).cpu(), draws, seed).eval()
    with replacing(path) as unfinished, torch.no_grad(), plain_attention():
        frozen(example)  # raises if the example does not fit
        outputs = _OnnxOutputs(frozen, example, raw)
        outputs.write(unfinished)
        session = open_session(unfinished)
        inputs = outputs.example
        for batch in (inputs, select_rows(inputs, torch.tensor([0])), tile(inputs, 3)):
            _check(session, outputs, batch, tolerance)
    return path


# -- the exported module -----------------------------------------------------------------------------------


class _OnnxOutputs(nn.Module):
    """A deterministic multitude with the file's inputs and outputs."""

    def __init__(self, net: Multitude | Calibrated, example: Input, raw: RawInputs | None = None) -> None:
        super().__init__()
        multitude = net if isinstance(net, Multitude) else net.net
        self.calibration = None if isinstance(net, Multitude) else net.calibration
        self.network = ExportedMultitude(multitude)
        self.raw = raw
        self.example = example if raw is None else raw.example
        read = multitude.predictive_of(multitude(example), example, None if isinstance(net, Multitude) else net.task)
        self.reading: dict[str, Any] = {"task": read.task, "quantiles": read.quantiles, "next_tokens": read.next_tokens}
        self.classes, self.outputs = read.reading.classes, read.reading.outputs
        fix_noise(self, self.example)

    def forward(self, given: Any) -> tuple[Tensor, ...]:
        predictive = Predictive(self.network(given if self.raw is None else self.raw.prepare(given)), **self.reading)
        if self.calibration is not None:
            predictive = self.calibration(predictive)
        return tuple(self._in_units(name, getattr(predictive, own)) for name, own in self.outputs.items())

    def write(self, path: Path) -> None:
        names, raw = self.inputs(), self.raw
        about = {METADATA: self.reading, **(raw.about if raw else {})}
        export(self, self.example, path, inputs=names, outputs=list(self.outputs), about=about)
        if raw is not None and raw.texts:
            own = dict(zip(raw.example, names, strict=True))
            accept_texts(path, {own[name]: known for name, known in raw.texts.items()})

    def _in_units(self, name: str, values: Tensor) -> Tensor:
        if self.raw is None or self.classes:
            return values
        return values * self.raw.std + (self.raw.mean if name in VALUES else 0.0)

    def difference(self, name: str, got: Tensor, want: Tensor) -> Tensor:
        """Return the difference of an output, in the network's units and relative for values above 1."""
        if self.raw is None or self.classes:
            return (got - want).abs() / want.abs().clamp(min=1)
        rounded = 4 * torch.finfo(torch.float32).eps * want.abs()
        own = (want - (self.raw.mean if name in VALUES else 0.0)).abs().clamp(min=self.raw.std)
        return ((got - want).abs() - rounded).clamp(min=0) / own

    def inputs(self) -> list[str]:
        return tensor_names(self.example, self.outputs)


# -- verification ------------------------------------------------------------------------------------------


def _check(session: Any, outputs: _OnnxOutputs, x: Input, tolerance: float) -> None:
    tensors = tensors_in(x)
    want = dict(zip(outputs.outputs, outputs(x), strict=True))
    names = list(outputs.example) if outputs.raw else outputs.inputs()
    own = [outputs.raw.written(name, x) if outputs.raw else x.numpy() for name, x in zip(names, tensors, strict=True)]
    feed = dict(zip(outputs.inputs(), own, strict=True))
    try:
        got = dict(zip(want, map(torch.from_numpy, session.run(list(want), feed)), strict=True))
    except Exception as error:  # its errors have no common class
        raise ValueError(f"ONNX Runtime cannot run a batch of {len(tensors[0])}: {reason(error)}") from error
    for name, values in want.items():
        if got[name].shape != values.shape:
            raise ValueError(
                f"the exported network is wrong: {name} for a batch of {len(tensors[0])} has shape "
                f"{list(got[name].shape)} instead of {list(values.shape)}"
            )
        off = float(outputs.difference(name, got[name], values).max())
        if not off <= tolerance:
            raise ValueError(
                f"the exported network is wrong: {name} for a batch of {len(tensors[0])} differs from torch by "
                f"{off:.1e}, above tolerance={tolerance:g}"
            )
