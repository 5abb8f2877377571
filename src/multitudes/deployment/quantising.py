"""Quantising: an ONNX graph whose convolutions and products are in 8 bits, by ONNX Runtime's own tools.

Weights have a scale for each output channel, activations one for each tensor, from the range of their values in the
batches that are given.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import torch

from multitudes.storage.exporting import reason

__all__ = ["quantise"]


def quantise(path: Path, batches: list[dict[str, Any]]) -> Path:
    """The file of the same graph in 8 bits, beside it; `batches` are inputs by name."""
    tools = importlib.import_module("onnxruntime.quantization")
    shapes = importlib.import_module("onnxruntime.quantization.shape_inference")

    class Reader(tools.CalibrationDataReader):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self.left = iter(batches)

        def get_next(self) -> dict[str, Any] | None:
            return next(self.left, None)

    known, found = path.with_name("shapes.onnx"), path.with_name("int8.onnx")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        shapes.quant_pre_process(str(path), str(known), skip_symbolic_shape=True)
        tools.quantize_static(
            str(known),
            str(found),
            Reader(),
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
            per_channel=True,
            # Without 8-bit products of their own, older processors add up pairs in 16 bits, which overflow.
            reduce_range=not torch.cpu._is_vnni_supported(),
        )
    except Exception as error:  # its errors have no class in common
        raise ValueError(f"the network cannot be quantised to 8 bits: {reason(error)}") from error
    finally:
        logging.disable(before)
    return found
