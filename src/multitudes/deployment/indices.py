"""Indices of which nobody looks at the range, in a network and in its ONNX graph.

Torch refuses an index that is out of range. ONNX Runtime counts those below 0 from the end, and a one-hot vector of a
class that does not exist is zero. Of ids that are given, the range is looked at before (`inputs.py`); of those that a
network computes nobody knows.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__all__ = ["computed_indices"]

_INDEXED = {"Gather": 1, "GatherElements": 1, "GatherND": 1, "ScatterElements": 1, "ScatterND": 1}
"""Operators that take indices, and which of their inputs these are."""

_OF_SHAPES = {"Shape", "Size", "ArgMax", "ArgMin", "NonZero"}
"""Operators whose results are in the range of a tensor that there is."""

_SAME = {"Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Slice", "Expand", "Flatten", "Concat"}
"""Operators that leave numbers as they are."""


def computed_indices(path: Path) -> list[str]:
    """The operators of a graph that take indices which are computed from values of its inputs."""
    onnx = importlib.import_module("onnx")
    graph = onnx.load(str(path)).graph
    ids = {value.name for value in graph.input if _is_whole(onnx, value.type.tensor_type.elem_type)}
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


def _is_whole(onnx: Any, kind: int) -> bool:
    return kind in (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.UINT8, onnx.TensorProto.INT8)
