"""`Deployed`: the result of `deploy`."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from multitudes.deployment.engines import Engine
from multitudes.ensemble.multitude import Multitude
from multitudes.evaluation.calibrate import Calibration
from multitudes.networks.calls import Input, InputError, input_errors, one_per_input, tensors_in, to_device
from multitudes.networks.devices import device_in
from multitudes.tasks.predictive import Predictive

OPTIONS = ("draws", "seed", "memory")
"""Options of a call, as for a multitude."""


class Deployed:
    """A deployed network, with the network's `predict`; a call returns predictions `[S, B, ...]`.

    It takes batches of any size from any device, and is thread-safe. Its weights are copies, without gradients.
    """

    def __init__(
        self,
        engine: Engine,
        net: Multitude,
        calibration: Calibration | None,
        precision: str,
        rows: list[tuple[str, str]],
    ) -> None:
        self._engine, self._net, self._calibration, self._rows = engine, net, calibration, rows
        self._lock = threading.Lock()
        self.precision = precision
        self.members = net.members
        self.device = device_in(net)

    @property
    def task(self) -> str:
        """Task of the predictions; see `Predictive`."""
        return self._net.task if self._calibration is None else self._calibration.task

    def __call__(self, x: Input, **options: Any) -> Tensor:
        """Map `[B, ...] -> [S, B, ...]`, uncalibrated; networks that draw take `draws`, `seed` and `memory`."""
        if more := [name for name in options if name not in OPTIONS]:
            raise ValueError(f"a deployed network takes x and the options {', '.join(OPTIONS)}, got {more[0]!r}")
        with input_errors(x):
            x = to_device(x, self.device)
            with self._lock:
                return one_per_input(self._engine(x, **options), x)

    def predict(self, x: Input, task: str | None = None, **options: Any) -> Predictive:
        """Predict `x` with all members and draws, calibrated if the network was."""
        for tensor in tensors_in(x):
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise ValueError(
                    f"x holds {int(tensor.isnan().sum())} NaN values, whose predictions would be meaningless"
                )
        if self._calibration is not None and task not in (None, self.task):
            raise ValueError(f"task must be {self.task!r}, for which the network was calibrated, got {task!r}")
        if options.get("draws") == "auto":
            raise InputError("draws='auto' needs the original network; a deployed one takes a number of draws")
        task = self.task if self._calibration is not None else task
        found = self._net.predictive_of(self(x, **options), x=x, task=task)
        return found if self._calibration is None else self._calibration(found)

    def summary(self) -> str:
        """Describe the changes, the error of the predictions, and the times before and after."""
        rows = [*self._rows, *self._engine.summary_rows()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {how}" for name, how in rows)

    def __reduce__(self) -> Any:
        raise ValueError(
            "a deployed network cannot be copied or pickled: save the original with mt.save, and deploy it again"
        )

    def __repr__(self) -> str:
        return f"Deployed(members={self.members}, precision={self.precision!r}, device={str(self.device)!r})"
