"""The kinds of data: one row of `KINDS` each, with everything that depends on the kind.

Code that reads, normalises, trains on, measures or shows data uses its `Kind`. To add a kind, add a row here: no other
module checks what the inputs are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.lab.data.images import ImageEncoder, find_images, refit
from multitudes.lab.data.preprocessing import Preprocessing
from multitudes.lab.data.sources import Source, open_images, open_source, open_table
from multitudes.lab.data.tables.columns import Column
from multitudes.lab.data.tables.features import Feature, Pixels, Text
from multitudes.lab.data.tables.table import LoadOptions, TableEncoder, choose_columns
from multitudes.lab.data.texts import CutToLongest, TextEncoder, find_texts
from multitudes.training.optimizers import batch_size_for

Shape = tuple[int, ...]
"""Shape of one input, without the batch axis."""

Encoder = ImageEncoder | TextEncoder | TableEncoder
"""Encoders of a source's rows into network inputs, as in training."""


def _as_is(x: Tensor, shape: Shape = ()) -> Tensor:
    return x


@dataclass(frozen=True, eq=False)
class Kind:
    """Everything specific to one kind of data."""

    name: str
    """Name in files."""
    inputs: str
    """Word for its inputs."""
    dtype: torch.dtype
    """Dtype of stored inputs."""
    dims: int
    """Number of dimensions of one input; no two kinds share both this and the dtype."""
    form: str
    """Description of valid `x`, for errors."""
    find: Callable[[Source, LoadOptions, str | None], list[str] | None]
    """Return the columns of a source that must be inputs (empty if undecided); None if the source is of another
    kind. The last argument is the target, if given."""
    options: Collection[str]
    """Arguments of `load` for this kind only."""
    choose: Callable[[Source, str, LoadOptions], dict[str, Column]]
    """Choose the input columns, given the target and the options."""
    fit: Callable[[Mapping[str, Column], Tensor, LoadOptions], Encoder]
    """Fit an encoder for these columns to the training rows."""
    encoder: Callable[[Shape, Sequence[str], Sequence[Feature]], Encoder]
    """Rebuild the fitted encoder from the input shape, feature names and fitted features."""
    preprocessing: Callable[[Tensor, Sequence[Feature], str], nn.Module]
    """Fit the preprocessing of scaled inputs to the training part, as stored; the last argument is `numbers`."""
    defaults: Callable[[Shape, int], dict[str, Any]]
    """Default `{"model": ..., "training": ...}` of a study, for an input shape and a number of training rows."""
    arguments: Callable[[str, Shape, int, Collection[str]], dict[str, Any]]
    """Arguments of the named network that the data determine; the last argument lists the parameters it accepts."""
    open: Callable[[Path], Source] = open_table
    """Open new inputs from a file or folder."""
    refit: Callable[[Tensor, Shape], Tensor] = _as_is
    """Convert inputs of another shape to this one."""
    scaled: Callable[[Tensor], Tensor] = _as_is
    """Convert inputs to floating point, before normalisation."""
    has_columns: bool = False
    """True if features have names. The encoder then fills in missing values, so a row needs only one value."""
    validation: float = 0.1
    """Default share of the training rows that is held out for validation."""
    feature_maps: bool = False
    """True for images: they are decoded from files, can be shifted and flipped, and integer targets are always
    classes."""
    is_picture: Callable[[Shape], bool] = lambda shape: False
    """Return whether a page can show the inputs as pictures."""
    is_text: bool = False
    """True for texts, which a page can show. Their shape does not identify the kind."""

    def describe(self, shape: Shape) -> str:
        """Describe the inputs, such as "rows of 13"."""
        return f"{self.inputs} of {' x '.join(map(str, shape))}{' tokens at most' if self.is_text else ''}"

    def blank(self, shape: Shape) -> Tensor:
        """Return four empty inputs of a shape, as network inputs on the CPU."""
        return self.scaled(torch.zeros(4, *shape, dtype=self.dtype))

    def corruptible(self, shape: Shape) -> bool:
        """Return whether the corruptions of `mt.shift` support inputs of this shape."""
        return self.is_picture(shape) and min(shape[1:]) >= 8


def _defaults(model: str, settings: Mapping[str, Any], **training: Any) -> dict[str, Any]:
    common = {
        "optimizer": "adam", "momentum": 0.9, "weight_decay": 0.0, "schedule": "cosine", "warmup": 0, "augment": None,
        "precision": "float32", "channels_last": False, "compile": False, "clip": None,
    }  # fmt: skip
    return {"model": {"name": model, "settings": dict(settings)}, "training": {**common, **training}}


# -- images ------------------------------------------------------------------------------------------------


def _image_preprocessing(x: Tensor, features: Sequence[Feature], numbers: str) -> Preprocessing:
    """Fit the mean and standard deviation of each channel, `[C, 1, 1]`, from histograms, without a floating-point
    copy of the images; or use those of a pretrained network."""
    for given in features:
        if isinstance(given, Pixels):
            mean, std = (torch.tensor(values)[:, None, None] for values in (given.mean, given.std))
            return Preprocessing(mean, std)
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in x.unbind(1)]).double()
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ levels
    variance = (share * (levels - mean[:, None]).square()).sum(1)
    std = torch.where((counts > 0).sum(1) == 1, 1.0, variance.sqrt())
    return Preprocessing(mean[:, None, None].float(), std[:, None, None].float())


def _fitted_images(columns: Mapping[str, Column], rows: Tensor, options: LoadOptions) -> ImageEncoder:
    if options.pixels is None:
        return ImageEncoder(options.size)
    mean, std = (tuple(map(float, values)) for values in options.pixels)
    return ImageEncoder(options.size, len(mean), features=(Pixels(next(iter(columns)), mean, std),))


def _image_defaults(shape: Shape, rows: int) -> dict[str, Any]:
    """Return defaults by size. The small networks need square images; other small images use a ResNet."""
    side = min(shape[1:])
    if side >= 32:
        return _defaults(
            "resnet18", {}, epochs=75, batch_size=128, optimizer="sgd", lr=0.05, weight_decay=5e-4, warmup=1,
            augment="standard",
        )  # fmt: skip
    square = shape[1] == shape[2]
    if side > 16:
        model = "medium_cnn" if square else "resnet20"
        return _defaults(model, {}, epochs=20, batch_size=128, lr=1.6e-3, augment="crop")
    return _defaults("small_cnn" if square else "resnet20", {}, epochs=35, batch_size=32, lr=0.005)


def _image_arguments(model: str, shape: Shape, outputs: int, taken: Collection[str]) -> dict[str, Any]:
    channels, height, width = shape
    if "size" in taken and height != width:
        sides = f"{height} x {width}"
        raise ValueError(f"model {model!r} needs square images, got {sides}: use resnet20, or resize them with size=")
    stem = "imagenet" if min(height, width) >= 96 else "small"
    numbers = {"inputs": math.prod(shape), "outputs": outputs, "classes": outputs, "channels": channels}
    return {**numbers, "size": height, "stem": stem}


# -- tables ------------------------------------------------------------------------------------------------


def _table_arguments(model: str, shape: Shape, outputs: int, taken: Collection[str]) -> dict[str, Any]:
    if "inputs" not in taken:
        raise ValueError(f"model {model!r} is for images, but the inputs are rows of {shape[0]} numbers: use tabular")
    return {"inputs": shape[0], "outputs": outputs}


MOST_EPOCHS, FEWEST_EPOCHS, ROWS_IN_ALL = 200, 20, 2_100_000
"""Maximum and minimum epochs for tables; between them, as many as give this number of rows in all."""


def table_training(rows: int) -> dict[str, Any]:
    """Return the training settings for tables that did best on validation rows (`results/README.md`)."""
    return {
        "epochs": min(MOST_EPOCHS, max(FEWEST_EPOCHS, ROWS_IN_ALL // rows)), "batch_size": batch_size_for(rows),
        "optimizer": "adamw", "lr": 2e-3, "weight_decay": 3e-4, "schedule": "constant", "clip": 1.0, "patience": 32,
        "average": 0.99, "precision": "auto",
    }  # fmt: skip


# -- texts -------------------------------------------------------------------------------------------------


def _text_encoder(shape: Shape, names: Sequence[str], features: Sequence[Feature]) -> TextEncoder:
    text = next((feature for feature in features if isinstance(feature, Text)), None)
    return TextEncoder(text or Text("text", longest=shape[0]))


def _text_arguments(model: str, shape: Shape, outputs: int, taken: Collection[str]) -> dict[str, Any]:
    raise ValueError(f"model {model!r} does not accept texts: use a Hugging Face model, hf:FOLDER")


PRETRAINED_EPOCHS, MOST_TEXT_EPOCHS, TEXTS_IN_ALL = 4, 30, 100_000
"""Epochs of a transformer: a pretrained one needs few; otherwise as many as give this number of texts in all."""


def transformer_training(rows: int, pretrained: bool) -> dict[str, Any]:
    """Return the training settings of a Hugging Face model: fine-tuning uses a smaller learning rate."""
    epochs = PRETRAINED_EPOCHS if pretrained else min(MOST_TEXT_EPOCHS, max(PRETRAINED_EPOCHS, TEXTS_IN_ALL // rows))
    return {
        "epochs": epochs, "batch_size": 32, "optimizer": "adamw", "lr": 5e-5 if pretrained else 5e-4,
        "weight_decay": 0.01, "schedule": "cosine", "warmup": epochs / 10, "clip": 1.0, "precision": "auto",
    }  # fmt: skip


# -- all of them -------------------------------------------------------------------------------------------

KINDS = [
    Kind(
        "image", "images", torch.uint8, 3, "uint8 images [N, C, H, W]",
        find=lambda source, options, target: None if options.text else find_images(source, options.image),
        options=("image", "size", "pixels"),
        choose=lambda source, target, options: ImageEncoder().columns(source, options.image),
        fit=_fitted_images,
        encoder=lambda shape, names, features: ImageEncoder((shape[1], shape[2]), shape[0], features=features),
        preprocessing=_image_preprocessing,
        defaults=_image_defaults,
        arguments=_image_arguments,
        open=lambda path: open_images(path) or open_source(path),
        refit=refit,
        scaled=lambda x: x.float() / 255,
        feature_maps=True,
        is_picture=lambda shape: shape[0] in (1, 3),
    ),
    Kind(
        "text", "texts", torch.int32, 1, "int32 tokens [N, T]",
        find=find_texts,
        options=("text", "tokenizer", "max_length"),
        choose=lambda source, target, options: {
            name: source.columns[name] for name in find_texts(source, options, target) or ()
        },
        fit=TextEncoder.fitted,
        encoder=_text_encoder,
        preprocessing=lambda x, features, numbers: CutToLongest(),
        defaults=lambda shape, rows: _defaults("", {}, **transformer_training(rows, pretrained=False)),
        arguments=_text_arguments,
        is_text=True,
    ),
    Kind(
        "table", "rows", torch.float32, 1, "float32 features [N, F]",
        find=lambda source, options, target: [],
        options=("columns", "drop", "read_as"),
        choose=choose_columns,
        fit=TableEncoder.fitted,
        encoder=lambda shape, names, features: TableEncoder(features) if features else TableEncoder.of_numbers(names),
        preprocessing=lambda x, features, numbers: Preprocessing.fitted(
            x, [number for feature in features for number in feature.numeric], numbers
        ),
        defaults=lambda shape, rows: _defaults("tabular", {}, **table_training(rows)),
        arguments=_table_arguments,
        has_columns=True,
        validation=0.15,
    ),
]  # fmt: skip
"""Kinds in order of preference: the first one that finds its inputs in a source wins; tables accept any source."""


def kind_of_shape(shape: Shape, name: str | None = None) -> Kind:
    """Return the kind of data with this name, or for this input shape, `(C, H, W)` or `(F,)`.

    >>> kind_of_shape((3, 32, 32)).name, kind_of_shape((13,)).name
    ('image', 'table')
    """
    fitting = [kind for kind in KINDS if kind.dims == len(shape) and (kind.name == name if name else not kind.is_text)]
    return _only("shape must fit", list(shape), fitting)


def kind_of_inputs(x: Tensor) -> Kind:
    """Return the kind of inputs `[N, ...]`."""
    fitting = [kind for kind in KINDS if (x.dtype, x.dim()) == (kind.dtype, kind.dims + 1)]
    return _only("x must be", f"{x.dtype} {list(x.shape)}", fitting)


def _only(must: str, got: object, fitting: list[Kind]) -> Kind:
    if not fitting:
        raise ValueError(f"{must} {' or '.join(kind.form for kind in KINDS)}, got {got}")
    return fitting[0]


def kind_of_source(source: Source, options: LoadOptions, target: str | None = None) -> tuple[Kind, list[str]]:
    """Return the kind of a source, and the columns that must be inputs."""
    found = ((kind, kind.find(source, options, target)) for kind in KINDS)
    return next((kind, names) for kind, names in found if names is not None)
