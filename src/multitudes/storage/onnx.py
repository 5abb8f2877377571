"""Export to ONNX: one file that answers with the members' mean, their uncertainty, and each of them.

The file is written by torch's exporter, run by onnxruntime, and compared with torch before it gets its name.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
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

__all__ = ["OUTPUTS", "Raw", "input_names", "to_onnx", "write_onnx"]

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
    of other sizes. If it does not, or the network cannot be exported, that is an error, and there is no file.
    """
    return write_onnx(net, check_path(path), example, draws=draws, seed=seed, tolerance=tolerance)


@dataclass(frozen=True)
class Raw:
    """What a file takes in place of the network's input, and the units in which it answers.

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
    if not tensors_in(example) or tensors_in(example)[0].dim() == 0 or len(tensors_in(example)[0]) == 0:
        raise ValueError("example must be one batch of inputs, of one input at least")
    runtime = needed("onnxruntime", "onnx", "to_onnx")
    for module in ("onnx", "onnxscript"):
        needed(module, "onnx", "to_onnx")
    example = moved(example, "cpu")
    frozen = freeze(_with_members_apart(copied(net)).cpu(), draws, seed).eval()
    with replacing(path) as unfinished, torch.no_grad(), plain_attention():
        frozen(example)  # what is wrong with the example is said by the network itself
        answers = _Answers(frozen, example, raw)
        _export(answers, unfinished)
        session = _opened(runtime, unfinished)
        inputs = answers.example
        for batch in (inputs, rows(inputs, torch.tensor([0])), tile(inputs, 3)):
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
    """A deterministic multitude with the file's outputs; its inputs are the tensors that a network is called with, or
    raw ones."""

    def __init__(self, net: Multitude | Calibrated, example: Input, raw: Raw | None = None) -> None:
        super().__init__()
        multitude = net if isinstance(net, Multitude) else net.net
        self.calibration = None if isinstance(net, Multitude) else _exportable(net.calibration)
        self.network = _Apart(multitude)
        self.raw = raw
        self.example = example if raw is None else raw.example
        read = multitude.predictive_of(multitude(example), example, None if isinstance(net, Multitude) else net.task)
        self.reading: dict[str, Any] = {"task": read.task, "quantiles": read.quantiles, "next_tokens": read.next_tokens}
        self.outputs = OUTPUTS["classification" if read.task in CLASSES else "regression"]
        for module in self.modules():
            if isinstance(module, Frozen):
                module.kept = []
        self(*tensors_in(self.example))  # whose numbers are constants from here on

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given: Any = _called_with(self.example, tensors)
        predictive = Predictive(self.network(given if self.raw is None else self.raw.prepare(given)), **self.reading)
        if self.calibration is not None:
            predictive = self.calibration(predictive)
        return tuple(self._in_units(name, output(predictive)) for name, output in self.outputs.items())

    def _in_units(self, name: str, values: Tensor) -> Tensor:
        if self.raw is None or self.reading["task"] in CLASSES:
            return values
        return values * self.raw.std + (self.raw.mean if name in VALUES else 0.0)

    def difference(self, name: str, got: Tensor, want: Tensor) -> Tensor:
        """How much an output differs, in the units of the network, relative to values above 1."""
        if self.raw is None or self.reading["task"] in CLASSES:
            return (got - want).abs() / want.abs().clamp(min=1)
        rounded = 4 * torch.finfo(torch.float32).eps * want.abs()
        own = (want - (self.raw.mean if name in VALUES else 0.0)).abs().clamp(min=self.raw.std)
        return ((got - want).abs() - rounded).clamp(min=0) / own

    def inputs(self) -> list[str]:
        """The names of the inputs."""
        if isinstance(self.example, Mapping):
            names = [name for name, value in self.example.items() if isinstance(value, Tensor)]
            return input_names(names, self.outputs)
        count = len(tensors_in(self.example))
        return ["x"] if count == 1 else [f"x{index}" for index in range(count)]


def input_names(names: Sequence[str], outputs: Collection[str]) -> list[str]:
    """Names of inputs, each once and none that of an output: with `input_` before them where that is needed.

    >>> input_names(["mean", "input_mean", "size"], ["mean", "std"])
    ['input_input_mean', 'input_mean', 'size']
    """
    found = []
    for name in names:
        own = name
        while own in outputs or (own != name and own in names):
            own = f"input_{own}"
        found.append(own)
    return found


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
            about = {METADATA: answers.reading, **(answers.raw.about if answers.raw else {})}
            program.model.metadata_props.update({key: json.dumps(value) for key, value in about.items()})
            program.save(path, external_data=False)  # one file
            if answers.raw is not None and answers.raw.texts:
                names = dict(zip(answers.raw.example, answers.inputs(), strict=True))
                _take_texts(path, {names[name]: known for name, known in answers.raw.texts.items()})
    except Exception as error:  # the exporter runs the user's own code, so anything may come
        raise ValueError(f"the network cannot be exported to ONNX: {_reason(error)}") from error


def _tidy(graph: Any) -> None:
    """Call the size of a batch so, and nothing else like an input or output; and leave out the places in the code."""
    taken = {value.name for value in (*graph.inputs, *graph.outputs)}
    size = str(graph.inputs[0].shape[0])
    for node in graph:
        node.metadata_props.clear()
        for value in node.outputs:
            if value.name in taken and value not in graph.outputs:
                value.name = f"{value.name}_inside"
    for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
        for dim, length in enumerate(value.shape or ()):
            if str(length) == size:
                value.shape[dim] = "batch"


def _take_texts(path: Path, texts: Mapping[str, Mapping[str | None, int]]) -> None:
    """Let inputs that are numbers of texts be these texts."""
    onnx = importlib.import_module("onnx")
    model = onnx.load(path)
    nodes = []
    for value in [value for value in model.graph.input if value.name in texts]:
        number, known = f"{value.name}_number", dict(texts[value.name])
        for node in model.graph.node:
            node.input[:] = [number if name == value.name else name for name in node.input]
        value.type.tensor_type.elem_type = onnx.TensorProto.STRING
        numbers = {"default_int64": known.pop(None), "keys_strings": list(known), "values_int64s": list(known.values())}
        nodes.append(onnx.helper.make_node("LabelEncoder", [value.name], [number], domain="ai.onnx.ml", **numbers))
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])
    if not any(each.domain == "ai.onnx.ml" for each in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
    onnx.save(model, path)


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
    names = list(answers.example) if answers.raw else answers.inputs()
    own = [answers.raw.written(name, x) if answers.raw else x.numpy() for name, x in zip(names, tensors, strict=True)]
    feed = dict(zip(answers.inputs(), own, strict=True))
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
        off = float(answers.difference(name, got[name], values).max())
        if not off <= tolerance:
            raise ValueError(
                f"the exported network is wrong: its {name} for a batch of {len(tensors[0])} differ from torch's by "
                f"{off:.1e}, and tolerance is {tolerance:g}"
            )
