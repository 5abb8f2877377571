"""Parse the body of a request into inputs of the network: JSON, an image, or a text.

JSON is an object with one key, a list: `{"rows": [{"sun": 4.5, "kind": "oak"}]}`, `{"images": ["BASE64"]}` or
`{"texts": ["not bad"]}`, depending on the network. A body of type image/* is one image, text/plain one text. Values are
parsed as `multitudes predict` parses files. Parsing runs no code and has size limits.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from multitudes.base.checks import check_count, check_number, needed
from multitudes.lab.data.new_inputs import Inputs, inputs_of, texts_source
from multitudes.lab.data.parts import Data
from multitudes.lab.data.sources import Source
from multitudes.lab.data.tables.columns import Column, from_cells, strip_cells
from multitudes.lab.data.tables.features import LARGEST
from multitudes.lab.data.tables.numbers_and_dates import decimal_marks

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""Image formats that Pillow decodes itself. Others may start programs, like PostScript."""

NAME = "the request"
"""Source name in messages about bad rows."""


@dataclass(frozen=True)
class Limits:
    """Limits of a request, and of concurrent requests."""

    size: int = 10_000_000
    """Bytes of a body."""
    rows: int = 256
    """Rows, images or texts of a request."""
    pixels: int = 50_000_000
    """Pixels of an image before it is resized."""
    seconds: float = 30.0
    """Seconds from the first byte of a request to its answer."""
    requests: int = 128
    """Concurrent requests."""

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, 0, above=True)
        for name in ("size", "rows", "pixels", "requests"):
            check_count(name, getattr(self, name))


class Refused(Exception):
    """A refused request: one sentence, and the HTTP status."""

    def __init__(self, sentence: str, status: int = 422) -> None:
        super().__init__(sentence)
        self.sentence, self.status = sentence, status


def read_request(body: bytes, content_type: str, data: Data, limits: Limits) -> Inputs:
    """Parse the inputs of a body; raise `Refused` if they cannot be used."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        values = _listed(body, data)
    elif kind.startswith("image/"):
        values = [body]
    elif kind == "text/plain":
        values = [_decoded(body)]
    else:
        raise Refused(f"Content-Type must be application/json, image/* or text/plain, got {content_type!r}", 415)
    if kind != "application/json" and data.kind.inputs != (sent := "texts" if kind == "text/plain" else "images"):
        raise Refused(f"this network was trained on {data.kind.inputs}, but Content-Type={kind} is for {sent}", 415)
    if not 1 <= len(values) <= limits.rows:
        raise Refused(f"{data.kind.inputs} must have 1 to {limits.rows} items, got {len(values)}")
    source = READERS[data.kind.inputs](values, data, limits)
    try:
        return inputs_of([(NAME, source)], data)
    except ValueError as error:
        raise Refused(str(error).partition(". skip_bad=")[0]) from error


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(
            f"the body must be text in UTF-8, got the byte {body[error.start]} at {error.start}", 400
        ) from error


# -- JSON --------------------------------------------------------------------------------------------------


def _listed(body: bytes, data: Data) -> list[Any]:
    """Return the list in a JSON body, under the key of the network's inputs."""
    name = data.kind.inputs
    found = _json(_decoded(body))
    if not isinstance(found, dict):
        raise Refused(f"the body must be a JSON object with the key {name!r}, got {_called(found)}")
    if name not in found:
        keys = ", ".join(map(_shown, found)) or "none"
        raise Refused(f"the body must have the key {name!r}, the inputs of this network, got the keys: {keys}")
    if more := [key for key in found if key != name]:
        raise Refused(f"the body must have only the key {name!r}, got also {_shown(more[0])}")
    if not isinstance(found[name], list):
        raise Refused(f"{name} must be a list, got {_called(found[name])}")
    return found[name]


def _json(text: str) -> Any:
    def refused(constant: str) -> Any:
        raise Refused(f"numbers must be finite, got {constant}: send null for missing values")

    try:
        return json.loads(text, parse_constant=refused)
    except json.JSONDecodeError as error:
        raise Refused(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}", 400
        ) from error
    except RecursionError as error:
        raise Refused("the JSON of the body is nested too deeply", 400) from error
    except ValueError as error:  # an integer with thousands of digits
        raise Refused("the JSON of the body has a number with too many digits", 400) from error


def _called(value: Any) -> str:
    """Name the type of a JSON value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(text: str, most: int = 60) -> str:
    """Quote a text of the request, cut if it is long."""
    return repr(text if len(text) <= most else f"{text[:most]} ...")


# -- rows of a table ---------------------------------------------------------------------------------------


def _row_source(rows: Sequence[Any], data: Data, limits: Limits) -> Source:
    columns = [feature.column for feature in data.encoder.features]
    for at, row in enumerate(rows):
        if not isinstance(row, dict):
            raise Refused(f"row {at} must be an object of values by column, got {_called(row)}")
        if missing := [name for name in columns if name not in row]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise Refused(f"row {at} must have the column {missing[0]!r}{more}; send null for missing values")
        if unknown := [name for name in row if name not in columns]:
            known = ", ".join(columns[:20])
            raise Refused(f"row {at} has the unknown column {_shown(unknown[0])}; the network's columns are {known}")
        for name in columns:
            _check_cell(f"row {at}: {name!r}", row[name])
    values = {name: [row[name] for row in rows] for name in columns}
    written = {name: strip_cells(list(map(_to_text, own))) for name, own in values.items() if str in map(type, own)}
    marks = dict(zip(written, decimal_marks(list(written.values())), strict=True))
    found = {
        name: from_cells(written[name], marks[name]) if name in written else _numbers(own)
        for name, own in values.items()
    }
    return _source(found, [f"row {at}" for at in range(len(rows))])


def _check_cell(where: str, value: Any) -> None:
    if isinstance(value, (dict, list)):
        raise Refused(f"{where} must be a number, a string, a boolean or null, got {_called(value)}")
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
        got = value if isinstance(value, float) else "a larger integer"
        raise Refused(f"{where} must be finite in float32, got {got}: send null for missing values")


def _to_text(value: Any) -> str:
    """Format a value like a CSV cell."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)


def _numbers(values: Sequence[Any]) -> Column:
    found = torch.tensor([math.nan if value is None else float(value) for value in values], dtype=torch.float64)
    yes_no = any(isinstance(value, bool) for value in values)
    return Column("number", found, names=("False", "True") if yes_no else ())


# -- images and texts --------------------------------------------------------------------------------------


def _image_source(images: Sequence[Any], data: Data, limits: Limits) -> Source:
    names = [f"image {at}" for at in range(len(images))]
    files = [_file(image, name) for image, name in zip(images, names, strict=True)]
    for file, name in zip(files, names, strict=True):
        _check_image(file, name, limits)
    return _source({"image": Column("image", files)}, names)


def _file(image: Any, name: str) -> bytes:
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str):
        raise Refused(f"{name} must be a file in base64, got {_called(image)}")
    try:
        return base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(f"{name} must be a file in base64, got {_shown(image, 20)}") from error


def _check_image(file: bytes, name: str, limits: Limits) -> None:
    """Check an image's size from its header: it may have a million times as many pixels as bytes."""
    pillow = needed("PIL.Image", "serve", "serving images")
    try:
        with pillow.open(io.BytesIO(file), formats=FORMATS) as image:
            width, height = image.size
    except pillow.DecompressionBombError as error:
        raise Refused(f"{name} must have {limits.pixels:,} pixels at most, got far more") from error
    except Exception as error:  # Pillow's decoders raise nearly anything
        formats = ", ".join(FORMATS)
        raise Refused(f"{name} must be an image ({formats}), got {len(file)} bytes that cannot be decoded") from error
    if width * height > limits.pixels:
        raise Refused(f"{name} must have {limits.pixels:,} pixels at most, got {width} x {height}")


def _text_source(texts: Sequence[Any], data: Data, limits: Limits) -> Source:
    for at, text in enumerate(texts):
        if not isinstance(text, str):
            raise Refused(f"text {at} must be a string, got {_called(text)}")
    return texts_source(texts, data)


def _source(columns: Mapping[str, Column], names: Sequence[str]) -> Source:
    """Make a source from the columns of a request, with named rows."""
    return Source(NAME, columns, {"train": torch.arange(len(names))}, [(name, 1) for name in names], files=True)


READERS: dict[str, Callable[[Sequence[Any], Data, Limits], Source]] = {
    "rows": _row_source,
    "images": _image_source,
    "texts": _text_source,
}
"""Readers by the word for a kind's inputs (`Kind.inputs`)."""
