"""Data sets: `Part` is one part, `Data` all of them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_choice
from multitudes.lab.data.kinds import Encoder, Kind, kind_of_inputs
from multitudes.lab.data.preprocessing import NUMBERS, layout_of, mean_std
from multitudes.lab.data.tables.column_types import ColumnReading
from multitudes.lab.data.tables.features import Feature
from multitudes.tasks import Task, task_of

NETWORK_TASKS = {"classification": "classification", "regression": "gaussian"}
"""Task of networks for data of each task: regression also predicts the noise."""


@dataclass(frozen=True, eq=False, repr=False)
class Part:
    """One part of a data set: N inputs and their targets, on the CPU.

    Args:
        x: Images, uint8 `[N, C, H, W]`; table features, float32 `[N, F]`, not standardised; or tokens, int32 `[N, T]`,
            padded with -1.
        y: Classes, int64 `[N]`, or numbers, float32 `[N]`, in their own units.
        files: Encoded images that decode to `x`, or texts, if known. A prepared file stores them instead of pixels.
    """

    x: Tensor
    y: Tensor
    files: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        kind_of_inputs(self.x)
        if self.y.dtype not in (torch.int64, torch.float32) or self.y.shape != self.x.shape[:1]:
            kind = f"{self.y.dtype} {list(self.y.shape)}"
            raise ValueError(f"y must be int64 or float32, one for each of {len(self.x)} inputs, got {kind}")
        if self.x.is_floating_point() and not bool(self.x.isfinite().all()):
            at = (~self.x.isfinite()).nonzero()[0].tolist()
            raise ValueError(f"x must be finite, got {self.x[tuple(at)].item()} at {at}")
        if not len(self.x):
            raise ValueError(f"x must hold at least one input, got shape {list(self.x.shape)}")

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        return f"Part({len(self)} x {list(self.x.shape[1:])})"


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """A data set: training, validation and test part, and out-of-distribution inputs.

    Args:
        name: Name of the data.
        train: Training part.
        validation: Validation part.
        test: Test part.
        classes: Class names; empty for regression.
        columns: Names of a table's features; empty for images and texts.
        ood: Out-of-distribution inputs by name, each like `x`.
        dropped: Number of bad rows that were left out, by reason.
        features: Encoding of the columns; default: plain numbers.
        reading: Description of how each column of the source was read.
        numbers: Preprocessing of a table's numbers, "quantile" or "standard".

    >>> part = Part(torch.tensor([[1.0], [3.0]]), torch.tensor([10.0, 30.0]))
    >>> data = Data("two points", part, part, part, columns=("a",), numbers="standard")
    >>> data
    Data('two points': 2 + 2 + 2 rows of [1], regression)
    >>> data.preprocess(part.x).flatten()
    tensor([-1.,  1.])
    >>> data.target_mean, data.target_std
    (20.0, 10.0)
    """

    name: str
    train: Part
    validation: Part
    test: Part
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    ood: Mapping[str, Tensor] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    features: Sequence[Feature] = ()
    reading: Sequence[ColumnReading] = ()
    numbers: str = NUMBERS[0]

    def __post_init__(self) -> None:
        check_choice("numbers", self.numbers, NUMBERS)
        like = self.train.x
        inputs = {name: part.x for name, part in self.parts.items()} | dict(self.ood)
        for name, x in inputs.items():
            if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
                raise ValueError(
                    f"{name} must hold inputs like those of train, {like.dtype} {list(like.shape[1:])}, "
                    f"got {x.dtype} {list(x.shape[1:])}"
                )
        for name, part in self.parts.items():
            if part.y.is_floating_point() == bool(self.classes):
                kind = "classes" if self.classes else "numbers, since there are no classes"
                raise ValueError(f"y of {name} must be {kind}, got {part.y.dtype}")
            wrong = (part.y < 0) | (part.y >= len(self.classes)) if self.classes else ~part.y.isfinite()
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                right = f"classes 0 to {len(self.classes) - 1}" if self.classes else "finite"
                raise ValueError(f"y of {name} must be {right}, got {part.y[first].item()} at {first}")
        if len(self.columns) != (features := self.shape[0] if self.kind.has_columns else 0):
            raise ValueError(f"columns must name the {features} features, got {len(self.columns)}")
        if self.encoder.names != self.columns:
            raise ValueError(f"features must be those of the columns {self.columns}, got {self.encoder.names}")

    @property
    def parts(self) -> dict[str, Part]:
        """The three parts by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    @property
    def kind(self) -> Kind:
        """Kind of the inputs."""
        return kind_of_inputs(self.train.x)

    @property
    def encoder(self) -> Encoder:
        """Encoder of other sources' rows into inputs like these."""
        return self.kind.encoder(self.shape, self.columns, self.features)

    @property
    def task(self) -> str:
        """ "classification" or "regression"."""
        return "classification" if self.classes else "regression"

    @property
    def network_task(self) -> Task:
        """Task of networks for these data: classes, or values with their noise."""
        return task_of(NETWORK_TASKS[self.task])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input, `(C, H, W)` or `(F,)`."""
        return tuple(self.train.x.shape[1:])

    @property
    def outputs(self) -> int:
        """Number of predicted values: the number of classes, or 1."""
        return len(self.classes) or 1

    # -- preprocessing ------------------------------------------------------------------------------------------

    def scaled(self, x: Tensor) -> Tensor:
        """Convert inputs to floating point: images to [0, 1], tables unchanged; tokens stay integers."""
        return self.kind.scaled(x)

    def preprocess(self, x: Tensor) -> Tensor:
        """Preprocess scaled inputs for the network; tokens are cut to the longest text."""
        if self.kind.is_text:
            cut: Tensor = self.preprocessing(x)
            return cut
        if not x.is_floating_point():
            raise ValueError(f"x must be scaled before it is preprocessed, got {x.dtype}: call `scaled` first")
        place = (x.device, x.dtype)
        if place not in self._copies:  # cached: a copy to a GPU synchronises with it
            self._copies[place] = copy.deepcopy(self.preprocessing).to(x)
        found: Tensor = self._copies[place](x)
        return found

    def normalised(self, x: Tensor) -> Tensor:
        """Scale and preprocess inputs for the network."""
        return self.preprocess(self.scaled(x))

    def standardised(self, y: Tensor) -> Tensor:
        """Return training targets: classes unchanged, numbers standardised by `target_mean` and `target_std`."""
        return y if self.classes else (y - self.target_mean) / self.target_std

    def in_units(self, y: Tensor) -> Tensor:
        """Convert standardised numbers to the units of the targets."""
        return y * self.target_std + self.target_mean

    @cached_property
    def preprocessing(self) -> nn.Module:
        """Preprocessing of scaled inputs, fitted to the training part."""
        return self.kind.preprocessing(self.train.x, self.encoder.features, self.numbers)

    def layout(self, bins: int = 128) -> list[int | list[float]]:
        """Describe the features of a table, one column after the other, for `models.tabular`.

        A number has the edges of at most `bins` quantile bins of its preprocessed training values; a group of zeros and
        ones has its size.
        """
        return layout_of(self.encoder.features, self.normalised(self.train.x), bins)

    @cached_property
    def target_mean(self) -> float:
        """Mean of the training targets; 0 for classification."""
        return 0.0 if self.classes else mean_std(self.train.y[:, None])[0].item()

    @cached_property
    def target_std(self) -> float:
        """Standard deviation of the training targets; 1 for classification or constant targets."""
        return 1.0 if self.classes else mean_std(self.train.y[:, None])[1].item()

    @cached_property
    def _copies(self) -> dict[tuple[torch.device, torch.dtype], nn.Module]:
        """Cached copies of the preprocessing, by device and dtype."""
        return {}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that can affect a result."""
        names = [self.classes, self.columns, tuple(self.ood)]
        if self.kind.has_columns and self.numbers != "standard":
            names.append((self.numbers,))
        if not self.kind.has_columns and self.features:
            names.append(tuple(json.dumps(each.plain()) for each in self.features))
        tensors = [*(tensor for part in self.parts.values() for tensor in (part.x, part.y)), *self.ood.values()]
        shapes = [(str(tensor.dtype), list(tensor.shape)) for tensor in tensors]
        digest = hashlib.sha256(json.dumps([names, shapes]).encode())
        for tensor in tensors:
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def __repr__(self) -> str:
        counts = " + ".join(str(len(part)) for part in self.parts.values())
        task = f"{len(self.classes)} classes" if self.classes else "regression"
        ood = "".join(f", {len(x)} {name}" for name, x in self.ood.items())
        return f"Data({self.name!r}: {counts} {self.kind.inputs} of {list(self.shape)}, {task}{ood})"
