"""`calibrate` a network after training: correct its probabilities, and add conformal sets and intervals.

`temperature.py` has the scalings, `conformal.py` the scores. Networks do not change. The fit to held-out data is a
`Calibration`; the predictions of the `Calibrated` network hold a reference to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multitudes.base.checks import check_count, check_number, check_seed
from multitudes.ensemble.multitude import Multitude
from multitudes.ensemble.predictor import PredictorModule, multitude_of
from multitudes.evaluation.conformal import Conformal, ConformalScore, check_targets
from multitudes.evaluation.predict import predictions
from multitudes.evaluation.temperature import SCALINGS, Scaling
from multitudes.networks.calls import Input
from multitudes.networks.devices import device_in
from multitudes.tasks import task_of
from multitudes.tasks.predictive import Predictive
from multitudes.training.batches import Batches

PRIOR = 0.5
"""Standard deviation of the prior of log temperatures."""
FEWEST = 20
"""Minimum number of held-out rows for a fit: 19 cannot determine an interval of 95 %."""

# -- fits and calibrated networks --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Calibration:
    """Fit to held-out data: a scaling, the scores for sets or intervals, or both.

    `calibration(predictive)` returns calibrated predictions.
    """

    task: str
    scaling: Scaling | None
    conformal: Conformal | None

    def __call__(self, predictive: Predictive) -> Predictive:
        """Return the predictions, calibrated."""
        if predictive.calibration is not None:
            raise ValueError("predictive is calibrated already: pass the predictions of the network itself")
        if predictive.task != self.task:
            raise ValueError(f"predictive must have the calibration's task {self.task}, got {predictive.task}")
        scaled = predictive.predictions
        if self.scaling is not None:
            scaled = self.scaling.predictions(scaled, predictive.reading)
        return replace(predictive, predictions=scaled, calibration=self)

    def log_probs(self, log_probs: Tensor) -> Tensor:
        """Calibrate the log of the members' mean probabilities, `[B, C, ...]`."""
        return log_probs if self.scaling is None else self.scaling.log_probs(log_probs)

    # Parts ------------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Fitted tensors by name: `temperature`, `scores`, ..."""
        parts = [vars(part) for part in (self.scaling, self.conformal) if part is not None]
        return {name: value for part in parts for name, value in part.items() if isinstance(value, Tensor)}

    @property
    def settings(self) -> dict[str, Any]:
        """Task, scaling, score and its settings."""
        scaling = None if self.scaling is None else type(self.scaling).__name__
        score = {} if self.conformal is None else {"score": asdict(self.conformal.score)}
        return {"task": self.task, "scaling": scaling, **score}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Calibration:
        """Return a calibration with the same settings and other tensors."""

        def updated(part: Any) -> Any:
            return part and replace(part, **{name: tensors[name] for name in vars(part) if name in tensors})

        return replace(self, scaling=updated(self.scaling), conformal=updated(self.conformal))

    def to(self, device: torch.device | str) -> Calibration:
        """Return the calibration on another device."""
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors.items()})

    def __eq__(self, other: object) -> bool:
        """Return True if the settings and tensors are equal."""
        if not isinstance(other, Calibration) or self.settings != other.settings:
            return False
        ours, theirs = self.tensors, other.tensors
        return ours.keys() == theirs.keys() and all(
            tensor is theirs[name] or torch.equal(tensor.cpu(), theirs[name].cpu()) for name, tensor in ours.items()
        )


class Calibrated(PredictorModule):
    """Wrapper of a network and its `Calibration`; `predict` returns calibrated predictions.

    The fitted tensors are buffers (`calibrated.temperature`, `calibrated.scores`, ...): saved with the state dict and
    moved with the module, but never rounded to half precision. `calibrated.net` is the network itself, not a copy.
    After further training, calibrate it again.

    Args:
        net: The network to wrap.
        calibration: The fit to its predictions on held-out data.
    """

    net: Multitude

    def __init__(self, net: Multitude, calibration: Calibration) -> None:
        super().__init__()
        self.net = net
        self.training = net.training
        self._calibration = calibration
        for name, tensor in calibration.tensors.items():
            self.register_buffer(name, tensor)

    @property
    def calibration(self) -> Calibration:
        """Calibration with the current buffers."""
        return self._calibration.with_tensors(dict(self.named_buffers(recurse=False)))

    @property
    def members(self) -> int:
        """Number of members, M."""
        return self.net.members

    @property
    def task(self) -> str:
        """Task of the predictions (see `Predictive`)."""
        return self._calibration.task

    def forward(self, x: Input, **options: Any) -> Tensor:
        """Return the network's predictions, `[B, ...] -> [S, B, ...]`, not calibrated."""
        return self.net(x, **options)

    def predict(self, x: Input, task: str | None = None, **options: Any) -> Predictive:
        """Return calibrated predictions of a batch.

        Args:
            x: Inputs `[B, ...]`.
            task: The calibration's task, or None.
            options: Passed to the network's `predict`.
        """
        if task not in (None, self.task):
            raise ValueError(f"task must be {self.task!r}, for which the network was calibrated, got {task!r}")
        return self.calibration(self.net.predict(x, self.task, **options))

    def member(self, index: int) -> nn.Module:
        """Return a member as a network of its own, not calibrated."""
        return self.net.member(index)

    def extra_repr(self) -> str:
        calibration = self.calibration
        settings = {name: value for name, value in calibration.settings.items() if value is not None}
        tensors = {
            name: tensor.tolist() if tensor.numel() <= 4 else list(tensor.shape)
            for name, tensor in calibration.tensors.items()
        }
        return ", ".join(f"{name}={value}" for name, value in (settings | tensors).items())

    # For nn.Module ------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Calibrated:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():  # moved, but never rounded: rounding would change thresholds
            now = self._buffers[name]
            self._buffers[name] = None if buffer is None or now is None else buffer.to(now.device)
        return self

    def get_extra_state(self) -> Tensor:
        """Return the settings as bytes in a tensor, which every format of state dicts supports."""
        return torch.tensor(list(json.dumps(self._calibration.settings, sort_keys=True).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError unless the settings are the same: tensors of other settings have another meaning."""
        settings = json.loads(bytes(state.tolist()))
        if settings != self._calibration.settings:
            raise ValueError(f"state dict has calibration settings {settings}, expected {self._calibration.settings}")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        for name, buffer in self._buffers.items():  # the number of scores may differ
            saved = state_dict.get(prefix + name)
            if buffer is not None and isinstance(saved, Tensor):
                self._buffers[name] = buffer.new_empty(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


# -- calibrate ---------------------------------------------------------------------------------------------


class _Plan:
    """Checked arguments of `calibrate`: the parts to fit, and how to divide the data between them."""

    def __init__(
        self,
        task: str,
        scaling: str | None = "auto",
        conformal: str | None = "auto",
        share: float = 0.5,
        seed: int | None = None,
        ignore: int | None = None,
        k_reg: int | None = None,
        penalty: float | None = None,
        randomized: bool = False,
    ) -> None:
        from multitudes.metrics.class_inputs import check_ignore  # not needed to predict

        reading = task_of(task)
        scaling = _choose("scaling", scaling, reading.scalings, task)
        conformal = _choose("conformal", conformal, (*reading.scores, None), task)
        if scaling is None and conformal is None:
            raise ValueError("scaling and conformal must not both be None: there is nothing to calibrate")
        check_number("share", share, 0, above=True, below=1)
        check_seed(seed)
        check_ignore("ignore", ignore)
        given = {name: value for name, value in (("k_reg", k_reg), ("penalty", penalty)) if value is not None}
        if given and conformal != "raps":
            raise ValueError(f"{' and '.join(given)} need conformal='raps', got conformal={conformal!r}")
        if conformal is None and randomized:
            raise ValueError("randomized=True needs conformal='aps' or 'raps', got conformal=None")
        settings: dict[str, Any] = {**given, "randomized": randomized}
        self.scaling = scaling
        self.score = None if conformal is None else ConformalScore(conformal, **settings)
        self.share, self.seed, self.ignore = share, seed, ignore


def _choose(name: str, value: str | None, choices: tuple[str | None, ...], task: str) -> str | None:
    """Return the value if it is one of the choices, or the first choice for "auto"."""
    if value not in (*choices, "auto"):
        allowed = ", ".join(repr(choice) for choice in (*choices, "auto"))
        raise ValueError(f"{name} must be one of {allowed} for {task}, got {value!r}")
    return choices[0] if value == "auto" else value


def calibrate(
    net: nn.Module,
    data: Any,
    *,
    scaling: str | None = "auto",
    conformal: str | None = "auto",
    share: float = 0.5,
    seed: int | None = None,
    task: str | None = None,
    ignore: int | None = None,
    k_reg: int | None = None,
    penalty: float | None = None,
    randomized: bool = False,
    **options: Any,
) -> Calibrated:
    """Calibrate a network's predictions on held-out data; `net` does not change.

    With both `scaling` and `conformal`, the inputs are divided at random between them: the coverage of sets and
    intervals is guaranteed only if nothing else was fitted to the data of their scores. All pixels of an input stay
    together. The guarantee is for the mean share of an input's pixels (or outputs) whose sets contain their targets
    (see `conformal.py`).

    Args:
        net: Multitude or plain network.
        data: Inputs and targets, `(x, y)`, or an iterable of such batches, such as a `DataLoader`.
        scaling: None, "auto" or:

            - classification: "temperature" (one, after averaging members), "member_temperature" (one per member,
              before), "vector" (a weight and a bias per class) or "isotonic" (a rising function per class; needs
              scikit-learn);
            - tokens, binary, multilabel: "temperature" or "member_temperature";
            - regression, gaussian: "variance" (one factor for all variances).

            "auto" is "temperature" for classes, "variance" for gaussian, None for regression and quantiles.
        conformal: Score of sets and intervals, None, or "auto" for the first: "aps", "lac" or "raps" for
            classification and tokens, "lac" or "aps" for binary and multilabel, "absolute" or "scaled" (by the
            predicted standard deviation) for regression, "scaled" or "absolute" for gaussian, "cqr" for quantiles.
        share: Share of the inputs for the scores; the scaling gets the rest.
        seed: Seed of the division, of the network's draws, and of randomized scores.
        task: Meaning of the predictions (see `Predictive`); by default the network's task.
        ignore: Target to leave out, such as 255 in segmentation; for tokens, -100 is always left out.
        k_reg: Rank from which "raps" adds its penalty; 5 by default.
        penalty: Penalty of "raps" per rank; 0.01 by default.
        randomized: True to cut the sets of "aps" and "raps" at random, so that coverage is exact.
        options: Passed to the network's `predict`: `draws`, `memory`, ...

    Example:
        >>> x, y = torch.tensor([[3.0, 0.0]]).repeat(3000, 1), (torch.arange(3000) % 3 == 0).long()
        >>> net = nn.Identity()  # gives the first class 95 %; it is right in two of three cases
        >>> calibrated = calibrate(net, (x, y), seed=0)
        >>> p = calibrated.predict(x[:1])
        >>> net(x[:1]).softmax(1), p.probs
        (tensor([[0.9526, 0.0474]]), tensor([[0.66..., 0.33...]]))
        >>> p.set(0.6), p.set(0.9)
        (tensor([[ True, False]]), tensor([[True, True]]))
    """
    if isinstance(net, Calibrated):
        raise ValueError("net is calibrated already: calibrate its network, net.net")
    multitude = multitude_of(net)
    plan = _Plan(task or multitude.task, scaling, conformal, share, seed, ignore, k_reg, penalty, randomized)
    predictive, target = _predict_all(multitude, data, task=task, seed=seed, **options)
    calibration = _fit(predictive, target, multitude.members, plan)
    return Calibrated(multitude, calibration.to(device_in(multitude)))


def fit_calibration(
    predictive: Predictive, target: Tensor, *, members: int | None = None, **settings: Any
) -> Calibration:
    """Fit a calibration to predictions and targets; `calibration(other)` calibrates other predictions.

    Args:
        predictive: Predictions of held-out data.
        target: Their targets.
        members: Number of members that made the S predictions, member-major; by default S.
        settings: Arguments of `calibrate`: `scaling`, `conformal`, `share`, `seed`, ...

    Example:
        >>> p = Predictive(torch.tensor([[[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]]]))  # 88 %, right in 2 of 3 cases
        >>> calibration = fit_calibration(p, torch.tensor([0, 0, 1]), conformal=None)
        >>> calibration(p).probs[0]
        tensor([0.6667, 0.3333])
    """
    plan = _Plan(predictive.task, **settings)
    return _fit(predictive, target, predictive.members if members is None else members, plan)


@torch.no_grad()
def _fit(predictive: Predictive, target: Tensor, members: int, plan: _Plan) -> Calibration:
    if predictive.calibration is not None:
        raise ValueError("predictive is calibrated already: pass the predictions of the network itself")
    if predictive.members % check_count("members", members):
        raise ValueError(f"members must divide the {predictive.members} predictions per input, got {members}")
    target = check_targets(predictive, target, plan.ignore)
    for_scaling, for_scores = _divide(len(predictive), plan)
    calibration = Calibration(predictive.task, None, None)
    if plan.scaling is not None:
        part, own = predictive[for_scaling], target[for_scaling]
        if predictive.reading.classes:
            from multitudes.metrics.class_inputs import read_rows  # not needed to predict

            rows = read_rows(part, own, plan.ignore)
            if not len(rows):
                raise ValueError("target must hold classes to fit the scaling, got only ignored ones")
            part, own = rows.members("calibrate"), rows.target
        calibration = replace(calibration, scaling=SCALINGS[plan.scaling].fit(part, own, members))
    if plan.score is not None:
        part, own = calibration(predictive[for_scores]), target[for_scores]
        fitted = Conformal.fit(part, own, plan.score, ignore=plan.ignore, seed=plan.seed)
        calibration = replace(calibration, conformal=fitted)
    return calibration


def _predict_all(net: Multitude, data: Any, **options: Any) -> tuple[Predictive, Tensor]:
    """Return predictions of all data and their targets, on the CPU."""
    parts, targets = [], []
    for index, (part, y) in enumerate(predictions(net, Batches(data).batches, **options)):
        if y is None:
            raise ValueError("data must have targets: pass (x, y), or batches of inputs and targets")
        if y.shape[:1] != (len(part),):
            raise ValueError(f"batch {index} of data: {len(part)} inputs have targets of shape {list(y.shape)}")
        parts.append(part.cpu())
        targets.append(y.cpu())
    if parts and parts[0].reading.ignored is not None:
        _pad_tokens(parts, targets, parts[0].reading.ignored)
    return Predictive.concat(parts), torch.cat(targets)


def _pad_tokens(parts: list[Predictive], targets: list[Tensor], ignored: int) -> None:
    """Pad batches of token sequences to the longest, with ignored targets, in place."""
    longest = max(part.predictions.shape[2] for part in parts)
    for index, (part, y) in enumerate(zip(parts, targets, strict=True)):
        missing = longest - part.predictions.shape[2]
        if missing and y.dim() == 2:
            parts[index] = replace(part, predictions=F.pad(part.predictions, (0, 0, 0, missing)))
            targets[index] = F.pad(y, (0, missing), value=ignored)


def _divide(inputs: int, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Divide inputs between the scaling and the scores. If only one of them is fitted, it gets all."""
    if plan.scaling is None or plan.score is None:
        return torch.arange(inputs), torch.arange(inputs)
    generator = None if plan.seed is None else torch.Generator().manual_seed(plan.seed)
    order = torch.randperm(inputs, generator=generator)
    count = round(plan.share * inputs)
    if not 0 < count < inputs:
        part = "scaling" if count else "scores"
        raise ValueError(f"share={plan.share} of {inputs} inputs leaves none for the {part}: pass more data")
    return order[count:], order[:count]


# -- benefit of a scaling ----------------------------------------------------------------------------------


def helpful_scaling(predictive: Predictive, target: Tensor, members: int, seed: int = 0) -> Calibration | None:
    """Fit the task's default scaling to held-out rows. Return None if there are too few, or it does not help.

    It helps if a scaling fitted to one half of the rows improves the log score of the other half, in both directions.
    For classes, the gain must exceed a standard error, because the best temperature of few rows is random, and the cost
    under a prior of the log temperature (`PRIOR`), because the best temperature of a few correct rows is near 0. For
    numbers, any gain is enough, because intervals that are too narrow do more harm than wide ones.
    """
    if predictive.reading.scalings[0] is None or len(target) < FEWEST:
        return None
    halves = torch.randperm(len(target), generator=torch.Generator().manual_seed(seed)).tensor_split(2)
    gain = torch.cat([_gain(predictive, target, members, *parts)[1] for parts in (halves, halves[::-1])])
    whole, earned = _gain(predictive, target, members, *[torch.arange(len(target))] * 2)
    if not predictive.reading.classes:
        return whole if bool(gain.mean() > 0) else None
    price = float(whole.tensors["temperature"].log().square().sum()) / (2 * PRIOR**2)
    helps = bool(gain.mean() > gain.std() / len(gain) ** 0.5) and float(earned.sum()) > price
    return whole if helps else None


def _gain(
    predictive: Predictive, target: Tensor, members: int, fitted_to: Tensor, scored: Tensor
) -> tuple[Calibration, Tensor]:
    """Fit the scaling to some rows. Return it, and its improvement of the log score of each `scored` row."""
    scaling = fit_calibration(predictive[fitted_to], target[fitted_to], members=members, conformal=None)
    rest, own = predictive[scored], target[scored]
    return scaling, log_scores(scaling(rest), own) - log_scores(rest, own)


def log_scores(predictive: Predictive, target: Tensor) -> Tensor:
    """Return the log probability or density of each target, `[N]` in float64."""
    from multitudes.metrics.declare import read_batch  # not needed to predict

    read = read_batch(predictive, target)
    return (read.target_log_prob if predictive.reading.classes else read.log_density).double()
