"""A trained network as an ONNX file that takes raw rows or images: its preprocessing and its units are inside.

A file for texts takes their tokens, and what makes them of texts is written beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from multitudes.data import Data
from multitudes.data.features import Category, Date, features_of
from multitudes.data.tables import TableEncoder
from multitudes.data.texts import PADDING, TextEncoder
from multitudes.evaluation.calibrate import Calibrated
from multitudes.storage.exporting import input_names
from multitudes.storage.onnx import Raw, write_onnx
from multitudes.study.store import write_atomically
from multitudes.study.trained import Trained

__all__ = ["ExportInput", "export", "export_inputs", "tokenizer_path"]

EXAMPLES = 64
"""How many test inputs the file is compared with torch on."""

TOLERANCE = 1e-3
"""How much the file may differ from torch, in standardised units."""

IMAGE, TOKENS = "image", "tokens"
"""The names of inputs of pixels, and of tokens."""


@dataclass(frozen=True)
class ExportInput:
    """An input of the file: its name there, its type, and what it holds."""

    name: str
    type: str
    holds: str


def export_inputs(data: Data) -> list[ExportInput]:
    """The inputs of a file for networks of these data: of a table one for each column, `[batch]`; pixels of images;
    tokens of texts."""
    encoder = data.encoder
    if isinstance(encoder, TextEncoder):
        return [ExportInput(TOKENS, "int32", f"[batch, {data.shape[0]}], and {PADDING} behind the end of a text")]
    if not isinstance(encoder, TableEncoder):
        return [ExportInput(IMAGE, "uint8", f"[batch, {', '.join(map(str, data.shape))}], pixels from 0 to 255")]
    found = []
    names = input_names([feature.column for feature in encoder.features], data.network_task.outputs)
    for name, feature in zip(names, encoder.features, strict=True):
        if isinstance(feature, Category):
            found.append(ExportInput(name, "string", "[batch], '' where it is missing"))
        else:
            what = ", days since 1970-01-01 in UTC" if isinstance(feature, Date) else ""
            found.append(ExportInput(name, "float64", f"[batch]{what}, NaN where it is missing"))
    return found


def export(trained: Trained, path: Path, *, draws: int = 8, seed: int = 0) -> Path:
    """Write a trained network, on the CPU, as one ONNX file; checked by onnxruntime on raw test inputs."""
    data = trained.data
    x = data.test.x[:EXAMPLES]
    raw, inputs = _raw(trained, x), x if data.kind.written else data.normalised(x)
    off = float((raw.prepare(raw.example) - inputs).abs().max())
    if not off <= TOLERANCE:
        raise ValueError(f"the raw inputs of {data.name} cannot be told from its features: they differ by {off:.1e}")
    written = write_onnx(trained.net, path, inputs, draws=draws, seed=seed, tolerance=TOLERANCE, raw=raw)
    if (beside := tokenizer_path(data, path)) is not None:
        write_atomically(beside, data.encoder.features[0].plain()["tokenizer"])
    return written


def tokenizer_path(data: Data, path: Path) -> Path | None:
    """Where the tokenizer of texts is written, for the `tokenizers` library; None where there are no texts."""
    return path.with_suffix(".tokenizer.json") if data.kind.written else None


def _raw(trained: Trained, x: Tensor) -> Raw:
    data, encoder = trained.data, trained.data.encoder
    about: dict[str, Any] = {"method": (trained.job.config or {}).get("method"), "data": data.name}
    about |= {"classes": list(data.classes), "calibrated": isinstance(trained.net, Calibrated)}
    about["inputs"] = {each.name: {"type": each.type, "holds": each.holds} for each in export_inputs(data)}
    if isinstance(encoder, TextEncoder):
        return Raw({TOKENS: x}, lambda given: given[TOKENS], mean=data.target_mean, std=data.target_std, about=about)
    if not isinstance(encoder, TableEncoder):

        def pixels(given: Mapping[str, Tensor]) -> Tensor:
            return data.normalised(given[IMAGE])

        return Raw({IMAGE: x}, pixels, mean=data.target_mean, std=data.target_std, about=about)
    example = dict(zip((feature.column for feature in encoder.features), _restored(encoder, x), strict=True))

    def features(given: Mapping[str, Tensor]) -> Tensor:
        x = features_of(encoder.features, [given[feature.column] for feature in encoder.features])
        return data.normalised(x.reshape(-1, *data.shape))

    texts = {each.column: each.numbers() for each in encoder.features if isinstance(each, Category)}
    return Raw(example, features, texts, data.target_mean, data.target_std, about)


def _restored(encoder: TableEncoder, x: Tensor) -> list[Tensor]:
    """Raw columns that have these features `[N, F]`."""
    parts = x.flatten(1).split([len(feature.names) for feature in encoder.features], 1)
    return [feature.restored(part) for feature, part in zip(encoder.features, parts, strict=True)]
