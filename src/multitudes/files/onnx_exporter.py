"""Export modules to ONNX with torch's exporter, and open the files with ONNX Runtime, for `to_onnx` and `deploy`."""

from __future__ import annotations

import importlib
import json
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import needed
from multitudes.draws.frozen_noise import FrozenNoise
from multitudes.ensemble.members import Members, fuse
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.shared import SharedMembers
from multitudes.evaluation.calibrate import Calibrated
from multitudes.files.onnx_decompositions import DECOMPOSITIONS
from multitudes.networks.calls import Input, call, map_tensors, tensors_in, tile
from multitudes.networks.copies import copied
from multitudes.networks.stochastic import stochastic_layers

# -- preparing modules ------------------------------------------------------------------------------------


def separate_members(net: Any) -> Any:
    """Convert members that share weights to separate networks with weights of their own."""
    if isinstance(net, Calibrated):
        return Calibrated(separate_members(net.net), net.calibration)
    if not isinstance(net, SharedMembers) or stochastic_layers(net.network):
        return net
    return fuse([net.member(index) for index in range(net.members)]).like(net)


class ExportedMultitude(nn.Module):
    """A multitude as a module that torch can export, `[B, ...] -> [S, B, ...]`; `Members` run one by one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        members = [copied(net.member(index)) for index in range(net.members)] if isinstance(net, Members) else []
        self.members = nn.ModuleList(map(ExportedMultitude, members))
        self.net = None if members else net

    def forward(self, x: Input) -> Tensor:
        if self.net is None:
            return torch.cat([member(x) for member in self.members])
        if isinstance(self.net, SharedMembers):  # tiled, for batches of any size
            return call(self.net.network, tile(x, self.net.members)).unflatten(0, (self.net.members, -1))
        return self.net(x) if isinstance(self.net, Multitude) else call(self.net, x).unsqueeze(0)


def check_example(example: Input) -> None:
    """Check that an example is a batch of at least one input."""
    tensors = tensors_in(example)
    if not tensors or not tensors[0].dim() or not len(tensors[0]):
        raise ValueError("example must be one batch with at least one input")


def check_packages(what: str) -> None:
    """Raise an ImportError if a package that `what` needs for ONNX files is missing."""
    for module in ("onnxruntime", "onnx", "onnxscript"):
        needed(module, "onnx", what)


def fix_noise(module: nn.Module, example: Input) -> None:
    """Run a module once, to store the noise of its frozen layers as constants."""
    for each in module.modules():
        if isinstance(each, FrozenNoise):
            each.kept = []
    module(example)


def tensor_names(example: Input, outputs: Collection[str]) -> list[str]:
    """Return the names of a file's inputs, one per tensor of the example."""
    count = len(tensors_in(example))
    if isinstance(example, Mapping):
        names = [name for name, value in example.items() if isinstance(value, Tensor)]
        if len(names) == count:  # no nested tensors
            return input_names(names, outputs)
    return ["x"] if count == 1 else [f"x{index}" for index in range(count)]


def input_names(names: Sequence[str], outputs: Collection[str]) -> list[str]:
    """Make input names unique and different from output names, with the prefix `input_`.

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


# -- the exporter ------------------------------------------------------------------------------------------


class _TensorInputs(nn.Module):
    """A module whose arguments are the tensors in another module's input."""

    def __init__(self, module: nn.Module, example: Input) -> None:
        super().__init__()
        self.module, self.example = module, example

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        return self.module(map_tensors(lambda _: next(given), self.example))


def export(
    module: nn.Module,
    example: Input,
    path: Path,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    about: Mapping[str, Any],
) -> None:
    """Export a module with inputs like `example` to one file, for any batch size."""
    given = tensors_in(example)
    batched = [tensor.shape[:1] == given[0].shape[:1] for tensor in given]
    # torch would treat a batch size of 1 as a constant.
    tensors = [torch.cat([tensor, tensor]) if own else tensor for tensor, own in zip(given, batched, strict=True)]
    dynamic = tuple({0: torch.export.Dim.DYNAMIC} if own else {} for own in batched)
    try:
        with quiet():
            # Call torch.export directly: fallbacks of the ONNX exporter would freeze data-dependent branches.
            traced = torch.export.export(
                _TensorInputs(module, example), tuple(tensors), dynamic_shapes={"tensors": dynamic}, strict=False
            )
            program = torch.onnx.export(
                traced.run_decompositions(DECOMPOSITIONS),
                dynamo=True,
                verbose=False,
                input_names=list(inputs),
                output_names=list(outputs),
            )
            assert program is not None
            _clean_names(program.model)
            program.model.metadata_props.update({key: json.dumps(value) for key, value in about.items()})
            program.save(path, external_data=False)  # one file
    except Exception as error:  # the exporter runs user code
        raise ValueError(f"the network cannot be exported to ONNX: {_explain(error)}") from error


def _clean_names(model: Any) -> None:
    """Name the batch dimension, make names unique, and remove source locations."""
    graph = model.graph
    for part in (graph, *model.functions.values()):
        for node in part.all_nodes():
            node.metadata_props.clear()
    _keep_constants(graph)
    taken = {value.name for value in (*graph.inputs, *graph.outputs)}
    size = str(graph.inputs[0].shape[0])
    for node in graph:
        for value in node.outputs:
            if value.name in taken and value not in graph.outputs:
                value.name = f"{value.name}_inside"
    for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
        if any(str(length) == size for length in value.shape or ()):
            shape = value.shape.copy()  # values may share a shape
            for dim, length in enumerate(shape):
                if str(length) == size:
                    shape[dim] = "batch"
            value.shape = shape


def _keep_constants(graph: Any) -> None:
    """Restore constants that lost their name: two `clamp` of one tensor give their bounds the same name."""
    for value in [value for node in graph for value in node.inputs if value is not None]:
        if value.const_value is None or value.producer() is not None or graph.initializers.get(value.name) is value:
            continue
        while value.name in graph.initializers:
            value.name = f"{value.name}_other"
        graph.register_initializer(value)


def accept_texts(path: Path, texts: Mapping[str, Mapping[str | None, int]]) -> None:
    """Replace inputs that are indices of texts with the texts themselves."""
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


def _explain(error: BaseException) -> str:
    """Explain in one line why the export failed."""
    message = reason(error)
    if found := re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", message):
        return f"ONNX has no operator for torch's {found[1]}"
    if "Constraints violated" in message:
        return (
            "its code makes the batch size a constant: use x.shape[0] instead of len(x), and torch.gather instead of "
            "torch.take_along_dim"
        )
    return message.removeprefix("ValueError: ")


def reason(error: BaseException) -> str:
    """Return the root cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter inside the context."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# -- running files ------------------------------------------------------------------------------------------


def open_session(path: Path, threads: int = 0) -> Any:
    """Open a file with ONNX Runtime on the CPU; 0 threads means one per core."""
    runtime = needed("onnxruntime", "onnx", "to_onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, not printed
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # release the cores between runs
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common class
        raise ValueError(f"ONNX Runtime cannot run the exported network: {reason(error)}") from error
