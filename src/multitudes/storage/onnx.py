"""Export to ONNX: one file that answers with the members' mean, their uncertainty, and each of them.

The file is written by torch's exporter, run by onnxruntime, and compared with torch before it gets its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, moved, plain_attention, rows, tensors_in, tile
from multitudes.core.checks import check_number, needed
from multitudes.core.copying import copied
from multitudes.core.files import replacing
from multitudes.core.multitude import Multitude
from multitudes.core.tasks.predictive import Predictive
from multitudes.evaluation.calibrate import Calibrated
from multitudes.storage.exporting import (
    Apart,
    check_example,
    check_packages,
    export,
    keep_numbers,
    members_apart,
    opened,
    reason,
    take_texts,
    tensor_names,
)
from multitudes.storage.freeze import freeze
from multitudes.storage.save import check_path

VALUES = ("mean", "members")
"""The outputs that are values of their own, and no deviation."""

METADATA = "multitudes"
"""The entry of the file's metadata that says how its outputs are to be read, as JSON: the task and its settings."""


def to_onnx(
    net: Multitude | Calibrated | nn.Module,
    path: str | os.PathLike[str],
    example: Input,
    *,
    draws: int = 8,
    seed: int | None = None,
    tolerance: float = 1e-4,
) -> Path:
    """Write a multitude as one ONNX file for batches of any size, and prove it right; returns its path.

    A classifier's outputs are `probs [B, C]`, `entropy [B]`, `mutual_information [B]` and `members [S, B, C]`, the
    members' probabilities, in the shapes that a `Predictive` of the task has; those of values are `mean`, `std` and
    `members`, the members' means or quantiles. The file's metadata have the task, the levels of quantiles, and whether
    a position predicts the next token. A calibrated network's outputs are calibrated. The input is named `x`, or as in
    a mapping of keyword arguments; `example` is one batch of it. A network that draws is frozen first, with `draws`
    draws of every member.

    The file must give what torch gives, up to `tolerance` (relative to values above 1), on the example and on batches
    of other sizes. If it does not, or the network cannot be exported, that is an error, and there is no file. Which of
    equal numbers comes first is left open by `torch.topk` and `torch.sort`; in the file it is the first of them.
    """
    return write_onnx(net, check_path(path), example, draws=draws, seed=seed, tolerance=tolerance)


@dataclass(frozen=True)
class Raw:
    """Raw inputs that a file takes in place of the network's own, and the units in which it answers.

    `example` is one batch of its inputs by name, of which `prepare` makes the input of the network. Of those in
    `texts`, which are numbers to torch, the file takes texts: `texts[name]` has the number of each, and under None that
    of all others. Values are answered as `values * std + mean`. `about` goes to the file's metadata, by key, as JSON.
    """

    example: Mapping[str, Tensor]
    prepare: Callable[[Mapping[str, Tensor]], Tensor]
    texts: Mapping[str, Mapping[str | None, int]] = field(default_factory=dict)
    mean: float = 0.0
    std: float = 1.0
    about: Mapping[str, Any] = field(default_factory=dict)

    def written(self, name: str, tensor: Tensor) -> Any:
        """An input as the file takes it, a NumPy array: texts for their numbers."""
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
    raw: Raw | None = None,
) -> Path:
    """`to_onnx`; with `raw`, whose example becomes `example`, the file takes raw inputs and answers in their units."""
    if not isinstance(net, (Multitude, Calibrated)):
        if not isinstance(net, nn.Module) or isinstance(getattr(net, "net", None), Multitude):
            raise ValueError(
                f"net must be a multitude, got {type(net).__name__}; a stream's past is no part of its input: "
                "export its network, stream.net"
            )
        net = Multitude(net)
    check_number("tolerance", tolerance, 0, above=True)
    check_example(example)
    check_packages("to_onnx")
    example = moved(example, "cpu")
    frozen = freeze(members_apart(copied(net)).cpu(), draws, seed).eval()
    with replacing(path) as unfinished, torch.no_grad(), plain_attention():
        frozen(example)  # what is wrong with the example is said by the network itself
        answers = _Answers(frozen, example, raw)
        answers.write(unfinished)
        session = opened(unfinished)
        inputs = answers.example
        for batch in (inputs, rows(inputs, torch.tensor([0])), tile(inputs, 3)):
            _check(session, answers, batch, tolerance)
    return path


# -- what is exported --------------------------------------------------------------------------------------


class _Answers(nn.Module):
    """A deterministic multitude with the file's outputs; its input is that of the network, or a raw one."""

    def __init__(self, net: Multitude | Calibrated, example: Input, raw: Raw | None = None) -> None:
        super().__init__()
        multitude = net if isinstance(net, Multitude) else net.net
        self.calibration = None if isinstance(net, Multitude) else net.calibration
        self.network = Apart(multitude)
        self.raw = raw
        self.example = example if raw is None else raw.example
        read = multitude.predictive_of(multitude(example), example, None if isinstance(net, Multitude) else net.task)
        self.reading: dict[str, Any] = {"task": read.task, "quantiles": read.quantiles, "next_tokens": read.next_tokens}
        self.classes, self.outputs = read.reading.classes, read.reading.outputs
        keep_numbers(self, self.example)

    def forward(self, given: Any) -> tuple[Tensor, ...]:
        predictive = Predictive(self.network(given if self.raw is None else self.raw.prepare(given)), **self.reading)
        if self.calibration is not None:
            predictive = self.calibration(predictive)
        return tuple(self._in_units(name, getattr(predictive, own)) for name, own in self.outputs.items())

    def write(self, path: Path) -> None:
        """Write the file."""
        names, raw = self.inputs(), self.raw
        about = {METADATA: self.reading, **(raw.about if raw else {})}
        export(self, self.example, path, inputs=names, outputs=list(self.outputs), about=about)
        if raw is not None and raw.texts:
            own = dict(zip(raw.example, names, strict=True))
            take_texts(path, {own[name]: known for name, known in raw.texts.items()})

    def _in_units(self, name: str, values: Tensor) -> Tensor:
        if self.raw is None or self.classes:
            return values
        return values * self.raw.std + (self.raw.mean if name in VALUES else 0.0)

    def difference(self, name: str, got: Tensor, want: Tensor) -> Tensor:
        """Return how much an output differs, in the units of the network, relative to values above 1."""
        if self.raw is None or self.classes:
            return (got - want).abs() / want.abs().clamp(min=1)
        rounded = 4 * torch.finfo(torch.float32).eps * want.abs()
        own = (want - (self.raw.mean if name in VALUES else 0.0)).abs().clamp(min=self.raw.std)
        return ((got - want).abs() - rounded).clamp(min=0) / own

    def inputs(self) -> list[str]:
        """The names of the inputs."""
        return tensor_names(self.example, self.outputs)


# -- the proof ---------------------------------------------------------------------------------------------


def _check(session: Any, answers: _Answers, x: Input, tolerance: float) -> None:
    tensors = tensors_in(x)
    want = dict(zip(answers.outputs, answers(x), strict=True))
    names = list(answers.example) if answers.raw else answers.inputs()
    own = [answers.raw.written(name, x) if answers.raw else x.numpy() for name, x in zip(names, tensors, strict=True)]
    feed = dict(zip(answers.inputs(), own, strict=True))
    try:
        got = dict(zip(want, map(torch.from_numpy, session.run(list(want), feed)), strict=True))
    except Exception as error:  # its errors have no class in common
        raise ValueError(f"onnxruntime cannot run a batch of {len(tensors[0])}: {reason(error)}") from error
    for name, values in want.items():
        if got[name].shape != values.shape:
            raise ValueError(
                f"the exported network is wrong: its {name} for a batch of {len(tensors[0])} have shape "
                f"{list(got[name].shape)} instead of {list(values.shape)}"
            )
        off = float(answers.difference(name, got[name], values).max())
        if not off <= tolerance:
            raise ValueError(
                f"the exported network is wrong: its {name} for a batch of {len(tensors[0])} differ from torch's by "
                f"{off:.1e}, and tolerance is {tolerance:g}"
            )
