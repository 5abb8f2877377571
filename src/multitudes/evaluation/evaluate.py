"""One call, every number: `evaluate` scores a network on data, on shifted data and on foreign data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from multitudes.core.batches import Batches
from multitudes.core.calling import Input
from multitudes.core.checks import check_count, check_seed
from multitudes.core.multitude import Multitude
from multitudes.core.predictive import Predictive
from multitudes.core.seeding import mixed
from multitudes.evaluation.predict import predictions
from multitudes.evaluation.scores import Evaluation, Score
from multitudes.metrics import (
    AURC,
    CRPS,
    ECE,
    MCE,
    NLL,
    RMSE,
    Accuracy,
    AccuracyAtCoverage,
    AdaptiveECE,
    Brier,
    ClasswiseECE,
    Disagreement,
    EnsembleJS,
    GaussianECE,
    IntervalCoverage,
    IntervalWidth,
    LogDensity,
    MeanIoU,
    MemberError,
    OODDetection,
    OODTable,
    Overconfidence,
    mean_corruption_error,
    read_rows,
    relative_mean_corruption_error,
)
from multitudes.shift.corruptions import CORRUPTIONS, EXTRA, corrupt

__all__ = ["evaluate"]

# -- what is measured --------------------------------------------------------------------------------------

TASKS = ("scores", "calibration", "selective", "diversity")
"""Groups of metrics; which there are depends on the kind of predictions."""

SHIFTED = ("accuracy", "nll", "brier", "ece", "mean_iou", "rmse", "crps")
"""What is reported of corrupted images."""


def _classification(p: Predictive, bins: int, min_count: int) -> dict[str, dict[str, Metric]]:
    """The metrics of class predictions like `p`, by group."""
    classes = p.predictions.shape[2]
    groups: dict[str, dict[str, Metric]] = {
        "scores": {"accuracy": Accuracy(), "nll": NLL(), "brier": Brier()},
        "calibration": {
            "ece": ECE(bins, min_count), "mce": MCE(bins, min_count), "classwise_ece": ClasswiseECE(classes, bins),
            "overconfidence": Overconfidence(),
        },
        "diversity": {
            "member_error": MemberError(), "disagreement": Disagreement(), "ensemble_js": EnsembleJS(),
        },
    }  # fmt: skip
    if p.predictions.ndim > 3:
        groups["scores"] |= {"mean_iou": MeanIoU(classes)}
    else:  # ranking keeps a number of every row; of every pixel it would be too many
        groups["calibration"] |= {"adaptive_ece": AdaptiveECE()}
        groups["selective"] = {"aurc": AURC(), "accuracy_at_90": AccuracyAtCoverage(0.9)}
    return groups


def _regression(p: Predictive, tau: float | None, scale: float) -> dict[str, dict[str, Metric]]:
    """The metrics of values like `p`, by group."""
    noise: dict[str, Any] = {"tau": tau, "scale": scale}
    groups: dict[str, dict[str, Metric]] = {
        "scores": {"rmse": RMSE(scale=scale), "crps": CRPS(**noise)},
        "calibration": {
            "gaussian_ece": GaussianECE(tau=tau), "coverage_95": IntervalCoverage(tau=tau),
            "width_95": IntervalWidth(**noise),
        },
    }  # fmt: skip
    if p.task == "gaussian" or tau is not None:  # points have no density
        groups["scores"] |= {"log_density": LogDensity(**noise)}
    return groups


class _Pass:
    """The metrics of one pass over data; which ones, the first prediction says."""

    def __init__(self, make: Callable[[Predictive], dict[str, Metric]], ignore: int | None) -> None:
        self.make, self.ignore = make, ignore
        self.count = 0
        self.metrics: dict[str, Metric] | None = None

    def over(self, pairs: Iterable[tuple[Predictive, Tensor | None]], prefix: str = "") -> dict[str, Score]:
        for predicted, target in pairs:
            self.update(predicted, target)
        return self.scores(prefix)

    def update(self, predicted: Predictive, target: Tensor | None) -> None:
        if target is None:
            raise ValueError("data must have targets, batches of (x, y), to be scored; got inputs alone")
        if self.metrics is None:
            self.metrics = self.make(predicted)
        if predicted.task == "classification":
            rows = read_rows(predicted, target, self.ignore)  # read and checked once, for all of them
            self.count += len(rows)
            for metric in self.metrics.values():
                metric.update(rows)
        else:
            self.count += target.numel()
            for metric in self.metrics.values():
                metric.update(predicted, target)

    def scores(self, prefix: str = "") -> dict[str, Score]:
        found = self.metrics or {}
        return {prefix + name: Score(float(metric.compute()), self.count) for name, metric in found.items()}


Watch = Callable[[str | None, Predictive, Tensor | None], None]
"""What is told of every prediction: which data it is of, None for those that are scored; itself; and its targets."""


# -- evaluate ----------------------------------------------------------------------------------------------


def evaluate(
    net: nn.Module,
    data: Any,
    *,
    shift: bool | str | Sequence[str] | Mapping[str, Any] | None = None,
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    ood: Any = None,
    tasks: str | Sequence[str] | None = None,
    baseline: Evaluation | None = None,
    preprocess: Callable[[Any], Input] | None = None,
    ignore: int | None = None,
    tau: float | None = None,
    scale: float = 1.0,
    bins: int = 15,
    min_count: int = 1,
    seed: int | None = None,
    device: Any = None,
    progress: bool | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> Evaluation:
    """Score `net` on `data`, and on what is not like it; predictions are streamed, and none of them kept.

    Args:
        net: a multitude, calibrated or not, or a plain network.
        data: a batch `(x, y)` of any size, or an iterable of batches such as a `DataLoader`.
        shift: corruptions of images in [0, 1] by name, or True for the fifteen of `shift.CORRUPTIONS`; or other
            versions of the data, `{name: data}`.
        severities: of the corruptions.
        ood: data that are foreign to the network, of which only the inputs are used; or several, `{name: data}`.
        tasks: the groups of scores of `data` to compute, of scores, calibration, selective and diversity; by default
            all that there are for the kind of predictions.
        baseline: the result of another network, shifted alike: corruption errors are then also given relative to its.
        preprocess: what to do with inputs after they were shifted: normalise them, say.
        ignore: a label whose pixels do not count.
        tau: for `task="regression"`, the precision of the noise around the members' values (see `metrics.log_density`).
        scale: what values are multiplied by, where targets were standardised.
        bins: of confidence, for the calibration errors `ece`, `mce` and `classwise_ece`.
        min_count: how many predictions a bin must hold to count for `ece` and `mce`.
        seed: of the draws, where the network draws, and of the corruptions, which without it are always the same.
        device: where the inputs go; by default where the network's parameters are.
        progress: whether to show progress on stderr; by default on a terminal, after two seconds.
        watch: a function that is told every prediction of `data` and of `ood` as it is made, `watch(name, p, target)`,
            to keep of it what it likes; `name` is that of the foreign data, and None for `data` itself.
        options: of the network's own `predict`: `task`, `draws`, `memory`, ...

    The result's names are those of the metrics, `"nll"`, and below `"shift/fog/3/nll"`, `"shift/mean/3/nll"` and
    `"shift/mean/nll"` over the corruptions, `"ood/svhn/entropy/auroc"` by criterion.

    >>> import torch
    >>> x, y = torch.rand(64, 1, 8, 8), torch.randint(3, (64,))
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    >>> result = evaluate(net, (x, y), shift="contrast", severities=[5], ood=torch.rand(32, 1, 8, 8))
    >>> [name for name in result if "contrast" in name]
    ['shift/contrast/5/accuracy', 'shift/contrast/5/nll', 'shift/contrast/5/brier', 'shift/contrast/5/ece']
    >>> result.counts["ood/entropy/auroc"]
    96
    """
    groups = _checked_tasks(tasks)
    corruptions, versions = _checked_shift(shift, severities)
    foreign = {} if ood is None else dict(ood) if isinstance(ood, Mapping) else {"": ood}
    check_seed(seed)
    check_count("bins", bins)
    check_count("min_count", min_count)
    if seed is not None:
        options["seed"] = seed
    if baseline is not None and not (isinstance(baseline, Evaluation) and corruptions):
        raise ValueError(f"baseline must be an Evaluation, and shift corruptions, got {baseline!r} and {shift!r}")
    multitude: Any = net if callable(getattr(net, "predict", None)) else Multitude(net)
    batches = data if isinstance(data, Iterator) and not corruptions else Batches(data).batches

    def predicted(batches: Any, change: Change | None = None) -> Iterator[tuple[Predictive, Tensor | None]]:
        return predictions(multitude, batches, progress, device, _prepared(change, preprocess), **options)

    def measured(chosen: Sequence[str] = groups, only: Sequence[str] | None = None) -> _Pass:
        def make(p: Predictive) -> dict[str, Metric]:
            classes = p.task == "classification"
            kinds = _classification(p, bins, min_count) if classes else _regression(p, tau, scale)
            named = {name: metric for group in chosen for name, metric in kinds.get(group, {}).items()}
            return {name: metric for name, metric in named.items() if only is None or name in only}

        return _Pass(make, ignore)

    own, detection = measured(), OODDetection()
    for prediction, target in predicted(batches):
        own.update(prediction, target)
        if watch is not None:
            watch(None, prediction, target)
        if foreign:
            detection.update(prediction, False)
    scores = own.scores()
    for name, severity in corruptions:
        change = _corruption(name, severity, seed or 0)
        scores |= measured(TASKS, SHIFTED).over(predicted(batches, change), f"shift/{name}/{severity}/")
    scores |= _summary(scores, corruptions)
    if baseline is not None:
        scores |= _relative(scores, corruptions, baseline)
    for name, version in versions.items():
        scores |= measured().over(predicted(Batches(version).batches), f"shift/{name}/")
    for name, unknown in foreign.items():
        found = copy.deepcopy(detection)
        for prediction, _ in predicted(Batches(unknown).batches):
            found.update(prediction, True)
            if watch is not None:
                watch(name, prediction, None)
        scores |= _detected(found.compute(), f"ood/{name}/" if name else "ood/")
    return Evaluation(scores)


Change = Callable[[Any, int], Input]
"""From an input, and the number of its batch, to the input that the network gets."""


def _prepared(change: Change | None, preprocess: Callable[[Any], Input] | None) -> Change | None:
    """First `change`, then `preprocess`, where they are given."""
    if preprocess is None or change is None:
        return change if preprocess is None else lambda x, index: preprocess(x)
    return lambda x, index: preprocess(change(x, index))


def _corruption(name: str, severity: int, seed: int) -> Change:
    """Each batch has noise of its own, and the same one in every evaluation."""

    def change(x: Any, index: int) -> Input:
        if not isinstance(x, Tensor):
            raise ValueError(f"shift={name!r} needs batches of images, got {type(x).__name__}")
        return corrupt(x, name, severity, seed=mixed(seed, index) % 2**63)

    return change


def _detected(table: OODTable, prefix: str) -> dict[str, Score]:
    measures = {"auroc": "auroc", "aupr": "aupr", "fpr95": "fpr"}
    return {
        f"{prefix}{criterion}/{name}": Score(float(getattr(detection, measure)), table.inside + table.outside)
        for criterion, detection in table.items()
        for name, measure in measures.items()
    }


def _summary(scores: Mapping[str, Score], corruptions: Sequence[tuple[str, int]]) -> dict[str, Score]:
    """Means over the corruptions, for each severity and for all."""
    summary = {}
    for severity in [*dict.fromkeys(severity for _, severity in corruptions), None]:
        chosen = [f"shift/{name}/{level}" for name, level in corruptions if severity in (level, None)]
        place = "shift/mean" if severity is None else f"shift/mean/{severity}"
        for measure in SHIFTED:
            found = [scores[f"{one}/{measure}"] for one in chosen if f"{one}/{measure}" in scores]
            if found:
                mean = sum(score.value for score in found) / len(found)
                summary[f"{place}/{measure}"] = Score(mean, sum(score.count for score in found))
    return summary


def _relative(
    scores: Mapping[str, Score], corruptions: Sequence[tuple[str, int]], baseline: Evaluation
) -> dict[str, Score]:
    """Corruption errors relative to those of a baseline: mCE, relative mCE, mCNLL and mCECE."""

    def table(values: Mapping[str, float], measure: str) -> dict[str, list[float]]:
        rows: dict[str, list[float]] = {}
        for name, severity in corruptions:
            value = values[f"shift/{name}/{severity}/{measure}"]
            rows.setdefault(name, []).append(1 - value if measure == "accuracy" else value)
        return rows

    own = {name: score.value for name, score in scores.items()}
    count = sum(scores[f"shift/{name}/{severity}/accuracy"].count for name, severity in corruptions)
    errors, theirs = table(own, "accuracy"), table(baseline, "accuracy")
    clean, their_clean = 1 - own["accuracy"], 1 - baseline["accuracy"]
    relative = {
        "mce": partial(mean_corruption_error, errors, theirs),
        "relative_mce": partial(relative_mean_corruption_error, errors, clean, theirs, their_clean),
        "mcnll": partial(mean_corruption_error, table(own, "nll"), table(baseline, "nll")),
        "mcece": partial(mean_corruption_error, table(own, "ece"), table(baseline, "ece")),
    }
    return {f"shift/{name}": Score(_or_nan(value), count) for name, value in relative.items()}


def _or_nan(value: Callable[[], Tensor]) -> float:
    """NaN where a corruption does not hurt the baseline, to which there is then no ratio."""
    try:
        return float(value())
    except ValueError:
        return math.nan


# -- arguments ---------------------------------------------------------------------------------------------


def _checked_tasks(tasks: str | Sequence[str] | None) -> tuple[str, ...]:
    chosen = TASKS if tasks is None else (tasks,) if isinstance(tasks, str) else tuple(tasks)
    for task in chosen:
        if task not in TASKS:
            raise ValueError(f"tasks must be of {', '.join(TASKS)}, got {task!r}")
    return chosen


def _checked_shift(shift: Any, severities: Sequence[int]) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Corruptions with their severities, and versions of the data by name."""
    if shift is None or shift is False:
        return [], {}
    if isinstance(shift, Mapping):
        return [], dict(shift)
    names = CORRUPTIONS if shift is True else (shift,) if isinstance(shift, str) else tuple(shift)
    for name in names:
        if name not in CORRUPTIONS + EXTRA:
            raise ValueError(f"shift must be of {', '.join(CORRUPTIONS + EXTRA)}, or data by name, got {name!r}")
    for severity in severities:
        if isinstance(severity, bool) or severity not in (1, 2, 3, 4, 5):
            raise ValueError(f"severities must be whole numbers from 1 to 5, got {severity!r}")
    return [(name, severity) for name in names for severity in severities], {}
