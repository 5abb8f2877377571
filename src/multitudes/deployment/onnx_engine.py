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
from multitudes.core.trace import recording
from multitudes.deployment.engines import Plain
from multitudes.deployment.indices import computed_indices
from multitudes.deployment.inputs import signature, unusual
from multitudes.deployment.quantising import quantise
from multitudes.storage.exporting import Apart, export, keep_numbers, opened, operators, reason, tensor_names

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


UNLIKE = {"TopK", "NonZero"}
"""Operators of which ONNX Runtime makes something else than torch: it breaks ties otherwise, and the mean of what is
selected is a number where nothing is."""


class OnnxRuntime:
    """A deterministic multitude, run by ONNX Runtime with as many threads as torch has.

    `plain` runs what the graph was not made for: other values beside the tensors than the example's, numbers of which
    runtimes differ, and inputs whose predictions are not finite.
    """

    @torch.no_grad()
    def __init__(self, net: Multitude, example: Input, plain: Plain, int8: bool = False) -> None:
        for module in ("onnxruntime", "onnx", "onnxscript"):
            needed(module, "onnx", "deploy on a CPU")
        self.int8, self.plain, self.kind = int8, plain, signature(example, shapes=False)
        if self.kind is None:
            raise ValueError("the example holds more than tensors and plain values")
        self.names = tensor_names(example, ["predictions"])
        with tempfile.TemporaryDirectory() as folder, plain_attention():
            path, raw = Path(folder) / "network.onnx", _Raw(copied(net), example)
            keep_numbers(raw, *tensors_in(example))
            export(raw, example, path, inputs=self.names, outputs=["predictions"], about={})
            if found := UNLIKE & operators(path):
                raise ValueError(f"it uses {', '.join(found)}, of which ONNX Runtime makes something else")
            indices = computed_indices(path)
            with recording(net.network, (), tensors=False, functions=True) as trace:
                plain(example)
            if indices or any(use.function == "one_hot" for use in trace.functions):
                made = ", ".join(dict.fromkeys(indices or ["one_hot"]))
                raise ValueError(f"it computes indices ({made}), of which nobody looks at the range there")
            path = quantise(path, list(self._parts(example))) if int8 else path
            self.session = opened(path, torch.get_num_threads())

    def __call__(self, x: Input, **options: Any) -> Tensor:
        if signature(x, shapes=False) != self.kind or unusual(x):
            return self.plain(x, **options)
        try:
            (found,) = self.session.run(None, self._feed(tensors_in(x)))
        except Exception as error:  # its errors have no class in common
            raise RuntimeError(reason(error)) from error
        predictions = torch.from_numpy(found)
        return predictions if bool(predictions.isfinite().all()) else self.plain(x, **options)

    def _feed(self, tensors: list[Tensor]) -> dict[str, Any]:
        return {name: tensor.detach().contiguous().numpy() for name, tensor in zip(self.names, tensors, strict=True)}

    def _parts(self, example: Input, rows: int = 32) -> Iterator[dict[str, Any]]:
        """The example in small batches."""
        tensors = tensors_in(example)
        batch = len(tensors[0])
        for start in range(0, batch, rows):
            yield self._feed([t[start : start + rows] if t.shape[:1] == (batch,) else t for t in tensors])

    def told(self) -> list[tuple[str, str]]:
        bits = ", convolutions and products in 8 bits" if self.int8 else ""
        return [("run by", f"ONNX Runtime{bits}, threads: {torch.get_num_threads()}")]
