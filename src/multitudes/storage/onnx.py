"""Export to ONNX: one file that answers with the members' mean, their uncertainty, and each of them.

The file is written by torch's exporter, run by onnxruntime, and compared with torch before it gets its name.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.core.calling import Input, call, moved, plain_attention, rows, tensors_in, tile
from multitudes.core.checks import check_number, needed
from multitudes.core.copying import copied
from multitudes.core.draws.stochastic import stochastic_layers
from multitudes.core.files import replacing
from multitudes.core.members import Members, fuse
from multitudes.core.multitude import Multitude
from multitudes.core.predictive import Predictive
from multitudes.core.shared import SharedMembers
from multitudes.core.tasks import CLASSES
from multitudes.evaluation.calibrate import Calibrated, Calibration
from multitudes.evaluation.temperature import LEAST_LOG_PROB, Temperature, Vector
from multitudes.storage.freeze import Frozen, freeze
from multitudes.storage.save import check_path

__all__ = ["OUTPUTS", "to_onnx"]

OUTPUTS: dict[str, dict[str, Callable[[Predictive], Tensor]]] = {
    "classification": {
        "probs": lambda p: p.probs,
        "entropy": lambda p: p.entropy,
        "mutual_information": lambda p: p.mutual_information,
        "members": lambda p: p.member_probs,
    },
    "regression": {"mean": lambda p: p.mean, "std": lambda p: p.std, "members": lambda p: p.member_values},
}
"""The outputs of the file by name, `[B, ...]` and of `members` `[S, B, ...]`; those of classes, and those of values."""

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
    of other sizes. If it does not, or the network cannot be exported, that is an error, and there is no file.
    """
    if not isinstance(net, (Multitude, Calibrated)):
        if not isinstance(net, nn.Module) or isinstance(getattr(net, "net", None), Multitude):
            raise ValueError(
                f"net must be a multitude, got {type(net).__name__}; a stream's past is no part of its input: "
                "export its network, stream.net"
            )
        net = Multitude(net)
    path = check_path(path)
    check_number("tolerance", tolerance, 0, above=True)
    if not tensors_in(example) or tensors_in(example)[0].dim() == 0 or len(tensors_in(example)[0]) == 0:
        raise ValueError("example must be one batch of inputs, of one input at least")
    runtime = needed("onnxruntime", "onnx", "to_onnx")
    for module in ("onnx", "onnxscript"):
        needed(module, "onnx", "to_onnx")
    example = moved(example, "cpu")
    frozen = freeze(_with_members_apart(copied(net)).cpu(), draws, seed).eval()
    with replacing(path) as unfinished, torch.no_grad(), plain_attention():
        frozen(example)  # what is wrong with the example is said by the network itself
        answers = _Answers(frozen, example)
        _export(answers, unfinished)
        session = _opened(runtime, unfinished)
        for batch in (example, rows(example, torch.tensor([0])), tile(example, 3)):
            _check(session, answers, batch, tolerance)
    return path


def _with_members_apart(net: Any) -> Any:
    """Members that share weights as plain networks, whose weights are numbers in the file, not computed there."""
    if isinstance(net, Calibrated):
        return Calibrated(_with_members_apart(net.net), net.calibration)
    if not isinstance(net, SharedMembers) or stochastic_layers(net.network):
        return net
    return fuse([net.member(index) for index in range(net.members)]).like(net)


# -- what is exported --------------------------------------------------------------------------------------


class _Answers(nn.Module):
    """A deterministic multitude with the file's outputs; its inputs are the tensors that a network is called with."""

    def __init__(self, net: Multitude | Calibrated, example: Input) -> None:
        super().__init__()
        multitude = net if isinstance(net, Multitude) else net.net
        self.calibration = None if isinstance(net, Multitude) else _exportable(net.calibration)
        self.network = _Apart(multitude)
        self.example = example
        read = multitude.predictive_of(multitude(example), example, None if isinstance(net, Multitude) else net.task)
        self.reading: dict[str, Any] = {"task": read.task, "quantiles": read.quantiles, "next_tokens": read.next_tokens}
        self.outputs = OUTPUTS["classification" if read.task in CLASSES else "regression"]
        for module in self.modules():
            if isinstance(module, Frozen):
                module.kept = []
        self(*tensors_in(example))  # whose numbers are constants from here on

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        predictive = Predictive(self.network(_called_with(self.example, tensors)), **self.reading)
        if self.calibration is not None:
            predictive = self.calibration(predictive)
        return tuple(output(predictive) for output in self.outputs.values())

    def inputs(self) -> list[str]:
        """The names of the inputs."""
        if isinstance(self.example, Mapping):
            return [name for name, value in self.example.items() if isinstance(value, Tensor)]
        count = len(tensors_in(self.example))
        return ["x"] if count == 1 else [f"x{index}" for index in range(count)]


class _Apart(nn.Module):
    """A multitude as networks of their own where members share no weight, `[B, ...] -> [S, B, ...]`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        apart = [net.member(index) for index in range(net.members)] if isinstance(net, Members) else []
        self.members = nn.ModuleList(map(_Apart, apart))
        self.net = None if apart else net

    def forward(self, x: Input) -> Tensor:
        if self.net is None:
            return torch.cat([member(x) for member in self.members])
        if isinstance(self.net, SharedMembers):  # as one batch, whatever its size
            return call(self.net.network, tile(x, self.net.members)).unflatten(0, (self.net.members, -1))
        return self.net(x) if isinstance(self.net, Multitude) else call(self.net, x).unsqueeze(0)


def _called_with(example: Input, tensors: tuple[Tensor, ...]) -> Input:
    """An input like the example, with these tensors in the place of its own."""
    given = iter(tensors)

    def own(value: Any) -> Any:
        return next(given) if isinstance(value, Tensor) else value

    if isinstance(example, Mapping):
        return {name: own(value) for name, value in example.items()}
    return tuple(own(value) for value in example) if isinstance(example, tuple) else own(example)


class _Temperature(Temperature):
    """Without asking whether it is 1, which the exporter cannot know of a tensor."""

    def log_probs(self, log_probs: Tensor) -> Tensor:
        return F.log_softmax(log_probs / self.temperature.to(log_probs), 1)


class _Vector(Vector):
    """Without asking whether there is anything to scale."""

    def log_probs(self, log_probs: Tensor) -> Tensor:
        shape = (-1, *[1] * (log_probs.ndim - 2))
        weight, bias = self.weight.to(log_probs).view(shape), self.bias.to(log_probs).view(shape)
        return F.log_softmax(weight * log_probs.clamp(min=LEAST_LOG_PROB) + bias, 1)


def _exportable(calibration: Calibration) -> Calibration:
    kind: Any = {Temperature: _Temperature, Vector: _Vector}.get(type(calibration.scaling))
    return calibration if kind is None else replace(calibration, scaling=kind(**vars(calibration.scaling)))


# -- the exporter ------------------------------------------------------------------------------------------


def _export(answers: _Answers, path: Path) -> None:
    tensors = tensors_in(tile(answers.example, 2))  # of a batch of one, torch takes the one for a constant
    batched = [tensor.shape[:1] == tensors[0].shape[:1] for tensor in tensors]
    dynamic = tuple({0: torch.export.Dim.DYNAMIC} if own else {} for own in batched)
    try:
        with _quiet():
            # By torch.export itself: the exporter would go on to ways that take a branch for the only one.
            traced = torch.export.export(answers, tuple(tensors), dynamic_shapes={"tensors": dynamic}, strict=False)
            program = torch.onnx.export(
                traced,
                dynamo=True,
                verbose=False,
                input_names=answers.inputs(),
                output_names=list(answers.outputs),
                custom_translation_table={torch.ops.aten.searchsorted.Tensor: _searchsorted},
            )
            assert program is not None
            _tidy(program.model.graph)
            program.model.metadata_props[METADATA] = json.dumps(answers.reading)
            program.save(path, external_data=False)  # one file
    except Exception as error:  # the exporter runs the user's own code, so anything may come
        raise ValueError(f"the network cannot be exported to ONNX: {_reason(error)}") from error


def _tidy(graph: Any) -> None:
    """Call the size of a batch so, and nothing else like an output; and leave out the places in the code."""
    outputs = {value.name for value in graph.outputs}
    size = str(graph.inputs[0].shape[0])
    for node in graph:
        node.metadata_props.clear()
        for value in node.outputs:
            if value.name in outputs and value not in graph.outputs:
                value.name = f"{value.name}_inside"
    for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
        for dim, length in enumerate(value.shape or ()):
            if str(length) == size:
                value.shape[dim] = "batch"


def _searchsorted(knots: Any, values: Any, **_: Any) -> Any:
    """How many knots `[C, K]` are below each value `[C, N]`: ONNX has no search."""
    onnxscript = importlib.import_module("onnxscript")
    op = onnxscript.opset18
    below = op.Less(op.Unsqueeze(knots, op.Constant(value_ints=[1])), op.Unsqueeze(values, op.Constant(value_ints=[2])))
    count = op.Cast(below, to=onnxscript.INT64.dtype)
    return op.ReduceSum(count, op.Constant(value_ints=[2]), keepdims=0)


def _reason(error: BaseException) -> str:
    """What was the first to go wrong, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter tells of its own work."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# -- the proof ---------------------------------------------------------------------------------------------


def _opened(runtime: Any, path: Path) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no class in common
        raise ValueError(f"onnxruntime cannot run the exported network: {_reason(error)}") from error


def _check(session: Any, answers: _Answers, x: Input, tolerance: float) -> None:
    tensors = tensors_in(x)
    want = dict(zip(answers.outputs, answers(*tensors), strict=True))
    feed = {name: tensor.numpy() for name, tensor in zip(answers.inputs(), tensors, strict=True)}
    try:
        got = dict(zip(want, map(torch.from_numpy, session.run(list(want), feed)), strict=True))
    except Exception as error:  # its errors have no class in common
        raise ValueError(f"onnxruntime cannot run a batch of {len(tensors[0])}: {_reason(error)}") from error
    for name, values in want.items():
        if got[name].shape != values.shape:
            raise ValueError(
                f"the exported network is wrong: its {name} for a batch of {len(tensors[0])} have shape "
                f"{list(got[name].shape)} instead of {list(values.shape)}"
            )
        off = float(((got[name] - values).abs() / values.abs().clamp(min=1)).max())
        if not off <= tolerance:
            raise ValueError(
                f"the exported network is wrong: its {name} for a batch of {len(tensors[0])} differ from torch's by "
                f"{off:.1e}, and tolerance is {tolerance:g}"
            )
