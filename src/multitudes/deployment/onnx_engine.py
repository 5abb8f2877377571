"""The CPU engine: ONNX Runtime, optionally in 8 bits."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitudes.deployment.engines import TorchEngine, has_special_values, signature
from multitudes.ensemble.multitude import Multitude
from multitudes.files.onnx_exporter import (
    ExportedMultitude,
    check_packages,
    export,
    fix_noise,
    open_session,
    quiet,
    reason,
    tensor_names,
)
from multitudes.networks.calls import Input, plain_attention, tensors_in
from multitudes.networks.copies import copied
from multitudes.networks.trace import recording

DIFFERENT_OPERATORS = {"TopK", "NonZero"}
"""Operators that ONNX Runtime computes differently: ties, and the mean of an empty selection, which is not NaN."""


class OnnxEngine:
    """A deterministic multitude, run by ONNX Runtime with as many threads as torch.

    `plain` runs inputs with other non-tensor values than the example, inputs that runtimes may treat differently, and
    inputs whose predictions are not finite.
    """

    @torch.no_grad()
    def __init__(self, net: Multitude, example: Input, plain: TorchEngine, int8: bool = False) -> None:
        check_packages("deploy on a CPU")
        self.int8, self.plain, self.kind = int8, plain, signature(example, shapes=False)
        if self.kind is None:
            raise ValueError("the example contains values other than tensors and plain values")
        self.names = tensor_names(example, ["predictions"])
        with tempfile.TemporaryDirectory() as folder, plain_attention():
            path, raw = Path(folder) / "network.onnx", ExportedMultitude(copied(net))
            fix_noise(raw, example)
            export(raw, example, path, inputs=self.names, outputs=["predictions"], about={})
            model = importlib.import_module("onnx").load(path)
            if found := DIFFERENT_OPERATORS & {
                node.op_type for part in (model.graph, *model.functions) for node in part.node
            }:
                raise ValueError(f"ONNX Runtime computes {', '.join(found)} differently from torch")
            given = zip(self.names, tensors_in(example), strict=True)
            indices = computed_indices(model.graph, {name for name, tensor in given if tensor.dtype in _WHOLE})
            with recording(net.network, (), tensors=False, functions=True) as trace:
                plain(example)
            if indices or any(use.function == "one_hot" for use in trace.functions):
                made = ", ".join(dict.fromkeys(indices or ["one_hot"]))
                raise ValueError(f"the network computes indices ({made}), whose range ONNX Runtime does not check")
            path = quantize(path, list(self._parts(example))) if int8 else path
            self.session = open_session(path, torch.get_num_threads())

    def __call__(self, x: Input, **options: Any) -> Tensor:
        if signature(x, shapes=False) != self.kind or has_special_values(x):
            return self.plain(x, **options)
        try:
            (found,) = self.session.run(None, self._feed(tensors_in(x)))
        except Exception as error:  # its errors have no common class
            raise RuntimeError(reason(error)) from error
        predictions = torch.from_numpy(found)
        return predictions if bool(predictions.isfinite().all()) else self.plain(x, **options)

    def _feed(self, tensors: list[Tensor]) -> dict[str, Any]:
        return {name: tensor.detach().contiguous().numpy() for name, tensor in zip(self.names, tensors, strict=True)}

    def _parts(self, example: Input, rows: int = 32) -> Iterator[dict[str, Any]]:
        """Yield the example in small batches, for calibration."""
        tensors = tensors_in(example)
        batch = len(tensors[0])
        for start in range(0, batch, rows):
            yield self._feed([t[start : start + rows] if t.shape[:1] == (batch,) else t for t in tensors])

    def summary_rows(self) -> list[tuple[str, str]]:
        bits = ", convolutions and products in 8 bits" if self.int8 else ""
        return [("engine", f"ONNX Runtime{bits}, threads: {torch.get_num_threads()}")]


# -- indices -----------------------------------------------------------------------------------------------
# Torch raises an error for an index out of range. ONNX Runtime counts negative indices from the end, and the one-hot
# vector of an unknown class is zero. `has_special_values` checks ids in inputs; networks that compute ids are refused.

_INDEXED = {"Gather": 1, "GatherElements": 1, "GatherND": 1, "ScatterElements": 1, "ScatterND": 1}
"""Operators that take indices, with the position of that input."""

_OF_SHAPES = {"Shape", "Size", "ArgMax", "ArgMin", "NonZero"}
"""Operators whose results are valid indices."""

_SAME = {"Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Slice", "Expand", "Flatten", "Concat"}
"""Operators that keep values unchanged."""


_WHOLE = (torch.int64, torch.int32, torch.uint8, torch.int8)
"""Dtypes of ids."""


def computed_indices(graph: Any, ids: set[str]) -> list[str]:
    """Return the operators whose indices are computed from inputs, instead of being inputs in `ids`."""
    computed = {value.name for value in graph.input} - ids
    found = []
    for node in graph.node:
        place = _INDEXED.get(node.op_type)
        if place is not None and node.input[place] in computed:
            found.append(node.op_type)
        if node.op_type in _OF_SHAPES:
            continue
        if ids.intersection(node.input) and node.op_type in _SAME and not computed.intersection(node.input):
            ids.update(node.output)
        elif (ids | computed).intersection(node.input):
            computed.update(node.output)
    return found


# -- 8 bits ------------------------------------------------------------------------------------------------


def quantize(path: Path, batches: list[dict[str, Any]]) -> Path:
    """Write a graph with 8-bit convolutions and products next to this one; return its path.

    Weights have a scale per output channel, activations one per tensor, from their values in `batches`.
    """
    tools = importlib.import_module("onnxruntime.quantization")
    shapes = importlib.import_module("onnxruntime.quantization.shape_inference")

    class Reader(tools.CalibrationDataReader):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self.left = iter(batches)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.left, None)

    known, found = path.with_name("shapes.onnx"), path.with_name("int8.onnx")
    try:
        with quiet():
            shapes.quant_pre_process(str(path), str(known), skip_symbolic_shape=True)
            tools.quantize_static(
                str(known),
                str(found),
                Reader(),
                op_types_to_quantize=["Conv", "Gemm", "MatMul"],
                per_channel=True,
                # Older processors add pairs of products in 16 bits, which can overflow.
                reduce_range=not torch.cpu._is_vnni_supported(),
            )
    except Exception as error:  # its errors have no common class
        raise ValueError(f"the network cannot be quantized to 8 bits: {reason(error)}") from error
    return found
