"""What is fitted to held-out data, and the network that has it: `Calibration` and `Calibrated`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input
from multitudes.core.multitude import Multitude
from multitudes.core.predictive import Predictive
from multitudes.evaluation.conformal import Conformal
from multitudes.evaluation.temperature import Scaling

__all__ = ["Calibrated", "Calibration"]


@dataclass(frozen=True, eq=False)
class Calibration:
    """What was fitted to held-out data: a scaling, the scores for sets or intervals, or both.

    `calibration(predictive)` gives calibrated predictions.
    """

    task: str
    scaling: Scaling | None
    conformal: Conformal | None

    def __call__(self, predictive: Predictive) -> Predictive:
        """The same predictions, calibrated."""
        if predictive.calibration is not None:
            raise ValueError("predictive is calibrated already: pass the predictions of the network itself")
        if predictive.task != self.task:
            raise ValueError(f"predictive must be of task {self.task}, as the calibration is, got {predictive.task}")
        scaled = predictive.predictions
        if self.scaling is not None:
            scaled = self.scaling.predictions(scaled, self.task)
        return replace(predictive, predictions=scaled, calibration=self)

    def log_probs(self, log_probs: Tensor) -> Tensor:
        """The log of the members' mean probabilities, `[B, C, ...]`, calibrated."""
        return log_probs if self.scaling is None else self.scaling.log_probs(log_probs)

    # What it is made of -----------------------------------------------------------------------------------

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What was fitted, by name: `temperature`, `scores`, ..."""
        parts = [vars(part) for part in (self.scaling, self.conformal) if part is not None]
        return {name: value for part in parts for name, value in part.items() if isinstance(value, Tensor)}

    @property
    def settings(self) -> dict[str, Any]:
        """What was chosen: the task, the scaling, the score and its settings."""
        scaling = None if self.scaling is None else type(self.scaling).__name__
        score = {} if self.conformal is None else {"score": asdict(self.conformal.score)}
        return {"task": self.task, "scaling": scaling, **score}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Calibration:
        """The same settings with other tensors."""

        def renewed(part: Any) -> Any:
            return part and replace(part, **{name: tensors[name] for name in vars(part) if name in tensors})

        return replace(self, scaling=renewed(self.scaling), conformal=renewed(self.conformal))

    def to(self, device: torch.device | str) -> Calibration:
        """The same on another device."""
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors.items()})

    def equals(self, other: Calibration) -> bool:
        """Whether the other gives the same predictions the same calibration."""
        if self.settings != other.settings or self.tensors.keys() != other.tensors.keys():
            return False
        pairs = [(tensor, other.tensors[name]) for name, tensor in self.tensors.items()]
        return all(one is two or torch.equal(one.cpu(), two.cpu()) for one, two in pairs)


class Calibrated(nn.Module):
    """A network and its `Calibration`: it predicts as the network does, and its predictions are calibrated.

    What was fitted are its buffers (`calibrated.temperature`, `calibrated.scores`, ...), saved with the state dict and
    moved with the module, but never rounded to half precision. The network itself is `calibrated.net`, not a copy of
    it: if it is trained further, calibrate it again.
    """

    def __init__(self, net: Multitude, calibration: Calibration) -> None:
        super().__init__()
        self.net = net
        self.training = net.training
        self._calibration = calibration
        for name, tensor in calibration.tensors.items():
            self.register_buffer(name, tensor)

    @property
    def calibration(self) -> Calibration:
        """What was fitted, as it is now."""
        return self._calibration.with_tensors(dict(self.named_buffers(recurse=False)))

    @property
    def members(self) -> int:
        """M: how many members the network has."""
        return self.net.members

    @property
    def task(self) -> str:
        """What the predictions are of; see `Predictive`."""
        return self._calibration.task

    def forward(self, x: Input, **options: Any) -> Tensor:
        """What the network gives: `[B, ...] -> [S, B, ...]`, not calibrated."""
        return self.net(x, **options)

    def predict(self, x: Input, task: str | None = None, **options: Any) -> Predictive:
        """Calibrated predictions of a batch; the options are those of the network's own `predict`."""
        if task not in (None, self.task):
            raise ValueError(f"task must be {self.task!r}, for which the network was calibrated, got {task!r}")
        return self.calibration(self.net.predict(x, self.task, **options))

    def member(self, index: int) -> nn.Module:
        """Member `index` alone, not calibrated."""
        return self.net.member(index)

    def extra_repr(self) -> str:
        calibration = self.calibration
        settings = {name: value for name, value in calibration.settings.items() if value is not None}
        tensors = {
            name: tensor.tolist() if tensor.numel() <= 4 else list(tensor.shape)
            for name, tensor in calibration.tensors.items()
        }
        return ", ".join(f"{name}={value}" for name, value in (settings | tensors).items())

    # What nn.Module must be told --------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Calibrated:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():  # moved, but never rounded: a rounded threshold is another one
            now = self._buffers[name]
            self._buffers[name] = None if buffer is None or now is None else buffer.to(now.device)
        return self

    def get_extra_state(self) -> Tensor:
        """The settings, as bytes in a tensor, which every format of state dicts can hold."""
        return torch.tensor(list(json.dumps(self._calibration.settings, sort_keys=True).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse what was fitted with other settings: its numbers would be read as something else."""
        settings = json.loads(bytes(state.tolist()))
        if settings != self._calibration.settings:
            raise ValueError(
                f"the state dict is of a calibration with {settings}, but this one has {self._calibration.settings}"
            )

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        for name, buffer in self._buffers.items():  # there are as many scores as there were data
            saved = state_dict.get(prefix + name)
            if buffer is not None and isinstance(saved, Tensor):
                self._buffers[name] = buffer.new_empty(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)
