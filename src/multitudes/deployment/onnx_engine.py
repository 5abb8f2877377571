"""The engine of a CPU: the network as an ONNX graph, run by ONNX Runtime, in 8 bits if asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, mapped, plain_attention, tensors_in
from multitudes.core.checks import needed
from multitudes.core.copying import copied
from multitudes.core.multitude import Multitude
from multitudes.deployment.quantising import quantise
from multitudes.storage.exporting import Apart, export, keep_numbers, opened, reason, tensor_names

__all__ = ["OnnxRuntime"]


class _Raw(nn.Module):
    """A multitude as a function of the tensors that it is called with."""

    def __init__(self, net: Multitude, example: Input) -> None:
        super().__init__()
        self.network = Apart(net)
        self.example = example

    def forward(self, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        return self.network(mapped(lambda _: next(given), self.example))


class OnnxRuntime:
    """A deterministic multitude, run by ONNX Runtime with as many threads as torch has."""

    @torch.no_grad()
    def __init__(self, net: Multitude, example: Input, int8: bool = False) -> None:
        for module in ("onnxruntime", "onnx", "onnxscript"):
            needed(module, "onnx", "deploy on a CPU")
        self.int8 = int8
        self.names = tensor_names(example, ["predictions"])
        self.dtypes = [tensor.dtype for tensor in tensors_in(example)]
        with tempfile.TemporaryDirectory() as folder, plain_attention():
            path, raw = Path(folder) / "network.onnx", _Raw(copied(net), example)
            keep_numbers(raw, *tensors_in(example))
            export(raw, example, path, inputs=self.names, outputs=["predictions"], about={})
            path = quantise(path, list(self._parts(example))) if int8 else path
            self.session = opened(path, torch.get_num_threads())

    def __call__(self, x: Input, **options: Any) -> Tensor:
        try:
            (found,) = self.session.run(None, self._feed(tensors_in(x)))
        except Exception as error:  # its errors have no class in common
            raise RuntimeError(reason(error)) from error
        return torch.from_numpy(found)

    def _feed(self, tensors: list[Tensor]) -> dict[str, Any]:
        given = zip(self.names, tensors, self.dtypes, strict=True)
        return {name: tensor.detach().to(dtype).contiguous().numpy() for name, tensor, dtype in given}

    def _parts(self, example: Input, rows: int = 32) -> Iterator[dict[str, Any]]:
        """The example in small batches."""
        tensors = tensors_in(example)
        batch = len(tensors[0])
        for start in range(0, batch, rows):
            yield self._feed([t[start : start + rows] if t.shape[:1] == (batch,) else t for t in tensors])

    def told(self) -> list[tuple[str, str]]:
        bits = ", convolutions and products in 8 bits" if self.int8 else ""
        return [("run by", f"ONNX Runtime{bits}, threads: {torch.get_num_threads()}")]
