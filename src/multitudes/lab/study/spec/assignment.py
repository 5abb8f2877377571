"""Read and check a job's configuration: its batched data, device and networks."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_seed
from multitudes.base.sealed_files import read_json
from multitudes.ensemble.multitude import Multitude
from multitudes.lab import data as datasets
from multitudes.lab.data import Data, Loader
from multitudes.lab.study.spec.method_rows import METHODS, build, method_of, unfit
from multitudes.lab.study.spec.network_sources import build_network, outputs_of
from multitudes.methods.registry import Method
from multitudes.networks.devices import device_of
from multitudes.tasks import Criterion
from multitudes.tasks.gaussian import beta_nll
from multitudes.training.optimizers import batch_size_for
from multitudes.training.precision import AUTO, precision_dtype

FOR_WHOLE_TRAINING = ("batch_size", "augment", "patience", "class_weight", "average")
"""Training keys that `fit` does not accept for a single network."""


class Batches:
    """Batches of scaled inputs, with targets as the network was trained on them if `y` is given.

    With a device, batches are moved there and preprocessed for the network.
    """

    def __init__(
        self, data: Data, x: Tensor, y: Tensor | None = None, size: int = 256, device: torch.device | None = None
    ) -> None:
        self.data, self.x, self.y, self.size, self.device = data, x, y, size, device

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.x), self.size):
            rows = slice(start, start + self.size)
            x = self.data.scaled(self.x[rows])
            if self.device is not None:
                x = self.data.preprocess(x.to(self.device))
            if self.y is None:
                yield x
            else:
                y = self.y[rows]
                yield x, (y if self.data.classes else self.data.standardised(y)[:, None]).to(x.device)


@dataclass(frozen=True)
class Assignment:
    """The checked configuration of a job."""

    directory: Path
    config: Mapping[str, Any]
    data: Data
    method: Method
    settings: Mapping[str, Any]
    seed: int
    device: torch.device
    accelerator: Any = None

    @classmethod
    def read(
        cls, directory: Path, device: str | None = None, accelerator: Any = None, data: Data | None = None
    ) -> Assignment:
        """Read the configuration from a job's directory; `data` skips loading its data."""
        path = directory / "config.json"
        if not path.is_file():
            raise ValueError(f"directory must be a job's, got {str(directory)!r}, which has no config.json")
        config = read_json(path)
        if config["version"] != 1:
            raise ValueError(f"version of {str(path)!r} must be 1, got {config['version']!r}")
        method = method_of(config["method"])
        settings = method.complete(config["settings"])
        check_seed(config["seed"])
        where = accelerator.device if accelerator else device_of(device or config.get("device", "cpu"))
        data = data_of(config["data"], directory) if data is None else data
        if config["model"].get("file") is not None:
            inside_run(directory, str(config["model"]["file"]))
        pretrained = any(config["model"].get(key) is not None for key in ("weights", "file"))
        if reason := unfit(method, data.shape, data.kind.name, pretrained):
            raise ValueError(reason)
        return cls(directory, config, data, method, settings, config["seed"], where, accelerator)

    @property
    def is_main(self) -> bool:
        """True for the process that writes files."""
        return self.accelerator is None or self.accelerator.is_main_process

    @property
    def checkpoint(self) -> Path:
        """Checkpoint of an unfinished training."""
        return self.directory / "checkpoint.safetensors"

    @property
    def identity(self) -> str:
        """Digest of everything the training depends on."""
        lasting = {key: value for key, value in self.config.items() if key not in ("device", "evaluation")}
        return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()

    @property
    def loader(self) -> Loader:
        """Training batches."""
        part, training = self.data.train, self.config["training"]
        size = min(training["batch_size"] or batch_size_for(len(part)), len(part))
        alone = len(part) % size == 1 and len(part) > 1  # a batch of one has no variance to normalise by
        streams = self.settings["members"] if self.settings.get("rows") == "own" else 1
        return Loader(
            part, self.data, size, self.device, training.get("augment"), seed=self.seed, drop_last=alone,
            streams=streams,
        )  # fmt: skip

    def network(self, with_weights: bool = True) -> nn.Module:
        """Build the configured network, with random weights or with those that the configuration names."""
        outputs = outputs_of(self.data.task, self.data.outputs)
        data = self.data
        model = {key: value for key, value in self.config["model"].items() if with_weights or key != "weights"}
        return build_network(model, data.shape, outputs, self.directory, data.layout, data.kind.name)

    @property
    def as_single(self) -> Assignment:
        """The same assignment for the single network."""
        return replace(self, method=METHODS["single"], settings=METHODS["single"].complete())

    def convert(self, network: nn.Module) -> Multitude:
        """Convert a network by the method and prepare it for training."""
        example = self.data.normalised(self.data.train.x[:8])
        return self.prepare(build(self.method, network, example, self.settings, self.seed, self.config["model"]))

    def prepare(self, net: Multitude) -> Multitude:
        """Set the task and number of draws, and move the network to the device in its memory format."""
        net.task = self.data.network_task.name
        net.draws = self.config["evaluation"].get("draws", net.draws)
        if self.config["training"].get("channels_last"):
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return net.to(self.device)

    def arguments(self, net: Multitude) -> dict[str, Any]:
        """Return the arguments of `fit` for a network of the method."""
        training = self.config["training"]
        own = {name: value for name, value in training.items() if name not in FOR_WHOLE_TRAINING}
        own["precision"] = precision_on(own.get("precision"), self.device)
        criterion: Criterion | None = None if self.data.classes else _gaussian
        return {
            **self.method.train(net, own, self.settings),
            "criterion": criterion,
            "dataset_size": len(self.data.train),
        }

    def whole_training(self, recorded: Sequence[int]) -> dict[str, Any]:
        """Return further arguments of `fit` for the whole training: early stopping, averaging and class weights.

        With a patience, training stops early and keeps the best weights on the validation part. Regression monitors the
        error of the mean: it keeps falling after the density of an uncalibrated network has started to get worse. A
        method made of `recorded` checkpoints needs all its epochs and no averaged weights.
        """
        training, part = self.config["training"], self.data.validation
        found: dict[str, Any] = {}
        if training.get("patience") is not None and not recorded:
            held_out = Batches(self.data, part.x, part.y, 1024, self.device)
            found = {"patience": training["patience"], "validation": held_out, "stop_by": "error"}
        if training.get("average") is not None and not recorded:
            found["average"] = training["average"]
        if training.get("class_weight") == "balanced":
            counts = torch.bincount(self.data.train.y, minlength=len(self.data.classes)).double()
            found["class_weight"] = (len(self.data.train) / (len(counts) * counts.clamp(min=1))).tolist()
        return found


def _gaussian(prediction: Tensor, y: Tensor) -> Tensor:
    return beta_nll(prediction, y[:, None])


def data_of(config: Mapping[str, Any], directory: Path) -> Data:
    """Load a job's data: the digits, or a prepared file in the run directory.

    A configuration may come from somebody else, so it cannot make this read other files or use the network.
    """
    if "file" not in config:
        if config.get("source") != "digits":
            raise ValueError(f"the data of a job must be a prepared file or digits, got {config.get('source')!r}")
        return datasets.load(**config)
    inside_run(directory, str(config["file"]))
    found = datasets.read(directory / config["file"])
    if config.get("fingerprint") not in (None, found.fingerprint):
        raise ValueError(
            f"data file {config['file']!r} was changed since the study was prepared: run the study's command again"
        )
    return found


def inside_run(directory: Path, file: str) -> Path:
    """Return the path of a file named in a job's configuration. Raise if it lies outside the run directory."""
    run = os.path.normpath(directory.absolute().parent.parent)
    path = os.path.normpath(directory.absolute() / file)
    if os.path.commonpath([run, path]) != run:
        raise ValueError(
            f"the configuration of {str(directory)!r} names {file!r}, which is outside of its run directory"
        )
    return Path(path)


def precision_on(name: str | None, device: torch.device) -> str:
    """Resolve a precision name on a device: auto is bfloat16 on GPUs that support it, else float32."""
    if name == AUTO:
        return "float32" if precision_dtype(name, device) is None else "bfloat16"
    return name or "float32"
