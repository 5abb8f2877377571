"""`evaluate`: score a network on data, on shifted data and on out-of-distribution data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from multitudes.base.checks import check_choice, check_count, check_seed
from multitudes.evaluation.predict import predictions
from multitudes.evaluation.scores import Evaluation, Score
from multitudes.metrics.class_inputs import places
from multitudes.metrics.declare import GROUPS, METRICS, read_batch
from multitudes.metrics.ood import OODDetection, OODTable
from multitudes.metrics.robustness import mean_corruption_error, relative_mean_corruption_error
from multitudes.networks.calls import Input
from multitudes.networks.seeds import mixed
from multitudes.shift.corruptions import CORRUPTIONS, EXTRA, corrupt
from multitudes.tasks.predictive import Predictive
from multitudes.training.batches import Batches

Watch = Callable[[str | None, Predictive, Tensor | None], None]
"""`watch(name, p, target)` receives every prediction; `name` is that of its `ood` data, or None for `data`."""

InputTransform = Callable[[Any, int], Input]
"""Map an input and the number of its batch to the network's input."""


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
    noise_precision: float | None = None,
    scale: float = 1.0,
    bins: int = 15,
    min_count: int = 1,
    seed: int | None = None,
    device: Any = None,
    progress: bool | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> Evaluation:
    """Score a network on data, shifted data and out-of-distribution data; predictions are streamed, not stored.

    Args:
        net: Multitude, calibrated or not, or plain network.
        data: A batch `(x, y)` of any size, or an iterable of batches such as a `DataLoader`.
        shift: Corruptions of images in [0, 1] by name, or True for the fifteen of `shift.CORRUPTIONS`; or other
            versions of the data, `{name: data}`.
        severities: Severities of the corruptions.
        ood: Out-of-distribution data, of which only the inputs are used; or several, `{name: data}`.
        tasks: Groups of scores of `data` to compute: scores, calibration, selective, diversity; by default all that
            the predictions support.
        baseline: Result of another network with the same shifts. It adds relative corruption errors:
            `"shift/mean_corruption_error"`, `"shift/mcnll"`, `"shift/mcece"` and, if both results have an `"accuracy"`
            without corruption, `"shift/relative_mean_corruption_error"`.
        preprocess: Function of inputs after the shift, such as normalisation.
        ignore: Label whose pixels do not count; for tokens, -100 never counts.
        noise_precision: For `task="regression"`, 1 / variance of the noise around the members' values (see
            `metrics.log_density`).
        scale: Factor on values whose targets were standardised.
        bins: Number of confidence bins of `ece`, `mce`, `classwise_ece` and `adaptive_ece`.
        min_count: Minimum number of predictions for a bin to count in `ece` and `mce`.
        seed: Seed of the network's draws and of the corruptions; by default random draws, fixed corruptions.
        device: Device for the inputs; by default that of the network's parameters.
        progress: True to show progress on stderr; by default on a terminal, after two seconds.
        watch: Function called with every prediction of `data` and of `ood`, `watch(name, p, target)`; `name` is that of
            the `ood` data, or None for `data`.
        options: Passed to the network's `predict`: `task`, `draws`, `memory`, ...

    Returns:
        Scores by name. Names of scores are those of the metrics, such as `"nll"`, and depend on the task; then
        `"shift/fog/3/nll"`, means over corruptions `"shift/mean/3/nll"` and `"shift/mean/nll"`, and by uncertainty
        `"ood/svhn/entropy/auroc"`.

    Example:
        >>> import torch
        >>> x, y = torch.rand(64, 1, 8, 8), torch.randint(3, (64,))
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        >>> result = evaluate(net, (x, y), shift="contrast", severities=[5], ood=torch.rand(32, 1, 8, 8))
        >>> [name for name in result if "contrast" in name]
        ['shift/contrast/5/accuracy', 'shift/contrast/5/nll', 'shift/contrast/5/brier', 'shift/contrast/5/ece']
        >>> result.counts["ood/entropy/auroc"]
        96
    """
    groups = _check_groups(tasks)
    corruptions, versions = _check_shift(shift, severities)
    unknown = {} if ood is None else dict(ood) if isinstance(ood, Mapping) else {"": ood}
    check_seed(seed)
    check_count("bins", bins)
    check_count("min_count", min_count)
    if seed is not None:
        options["seed"] = seed
    if baseline is not None and not isinstance(baseline, Evaluation):
        raise ValueError(f"baseline must be an Evaluation, got {baseline!r}")
    if baseline is not None and not corruptions:
        raise ValueError(f"baseline needs corruptions: pass shift=True or their names, got shift={shift!r}")
    batches = data if isinstance(data, Iterator) and not corruptions else Batches(data).batches
    reading = {"ignore": ignore, "noise_precision": noise_precision, "scale": scale}
    settings = {"bins": bins, "min_count": min_count}
    detection = OODDetection()

    def run(batches: Any, transform: InputTransform | None = None) -> Iterator[tuple[Predictive, Tensor | None]]:
        def prepare(x: Any, index: int) -> Input:
            x = x if transform is None else transform(x, index)
            return x if preprocess is None else preprocess(x)

        return predictions(net, batches, progress, device, prepare, **options)

    def run_data() -> Iterator[tuple[Predictive, Tensor | None]]:
        for prediction, target in run(batches):
            if watch is not None:
                watch(None, prediction, target)
            if unknown:
                detection.update(prediction, False)
            yield prediction, target

    scores = _measure(run_data(), reading, settings, groups)
    for name, severity in corruptions:
        pairs = run(batches, _corruption(name, severity, seed or 0))
        scores |= _under(f"shift/{name}/{severity}", _measure(pairs, reading, settings, shifted=True))
    scores |= _summary(scores, corruptions)
    if baseline is not None:
        scores |= _relative(scores, corruptions, baseline)
    for name, version in versions.items():
        pairs = run(Batches(version).batches)
        scores |= _under(f"shift/{name}", _measure(pairs, reading, settings, groups))
    for name, other in unknown.items():
        own = copy.deepcopy(detection)
        for prediction, _ in run(Batches(other).batches):
            own.update(prediction, True)
            if watch is not None:
                watch(name, prediction, None)
        scores |= _under(f"ood/{name}" if name else "ood", _detection_scores(own.compute()))
    return Evaluation(scores)


def _measure(
    pairs: Iterable[tuple[Predictive, Tensor | None]],
    reading: Mapping[str, Any],
    settings: Mapping[str, int],
    groups: Sequence[str] = GROUPS,
    shifted: bool = False,
) -> dict[str, Score]:
    """Score predictions by the declared metrics that fit the first of them.

    `reading` holds the arguments that read predictions, `settings` those of the metrics.
    """
    metrics: dict[str, Metric] | None = None
    count = 0
    for p, target in pairs:
        if target is None:
            raise ValueError("data must have targets to compute scores: pass batches of (x, y), got only inputs")
        if metrics is None:
            sizes = {**settings, "members": p.members}
            if p.reading.classes:
                sizes["classes"] = p.reading.class_count(p.predictions.shape[1:])
            # Metrics that store a number per row would store one per pixel or token.
            dense = len(places(p)) > (2 if p.reading.several_labels else 1)
            metrics = {
                each.score: each.streaming(**{name: sizes[name] for name in each.class_settings if name in sizes})
                for group in groups
                for each in METRICS.values()
                if each.group == group and each.kind.fits(p, reading["noise_precision"])
                and (each.shifted or not shifted) and not (each.kept and dense)
            }  # fmt: skip
        rows = read_batch(p, target, **reading)
        count += len(rows)
        for metric in metrics.values():
            metric.update(rows)
    return {name: Score(float(metric.compute()), count) for name, metric in (metrics or {}).items()}


def _under(place: str, scores: Mapping[str, Score]) -> dict[str, Score]:
    return {f"{place}/{name}": score for name, score in scores.items()}


def _corruption(name: str, severity: int, seed: int) -> InputTransform:
    """Return a function that corrupts each batch with its own noise, the same in every evaluation."""

    def transform(x: Any, index: int) -> Input:
        if not isinstance(x, Tensor):
            raise ValueError(f"shift={name!r} needs batches of images, got {type(x).__name__}")
        return corrupt(x, name, severity, seed=mixed(seed, index) % 2**63)

    return transform


def _detection_scores(table: OODTable) -> dict[str, Score]:
    measures = {"auroc": "auroc", "aupr": "aupr", "fpr95": "fpr"}
    return {
        f"{uncertainty}/{name}": Score(float(getattr(detection, measure)), table.inside + table.outside)
        for uncertainty, detection in table.items()
        for name, measure in measures.items()
    }


def _summary(scores: Mapping[str, Score], corruptions: Sequence[tuple[str, int]]) -> dict[str, Score]:
    """Return means over the corruptions, for each severity and for all."""
    groups: dict[str, list[Score]] = {}
    for place in ("shift/mean/{}", "shift/mean"):
        for name, severity in corruptions:
            for measure, score in Evaluation(scores).under(f"shift/{name}/{severity}").scores.items():
                groups.setdefault(f"{place.format(severity)}/{measure}", []).append(score)
    return {
        name: Score(sum(each.value for each in own) / len(own), sum(each.count for each in own))
        for name, own in groups.items()
    }


def _relative(
    scores: Mapping[str, Score], corruptions: Sequence[tuple[str, int]], baseline: Evaluation
) -> dict[str, Score]:
    """Return mCE, relative mCE, mCNLL and mCECE for a baseline; an empty dict for regression."""
    own = Evaluation(scores)

    def table(values: Mapping[str, float], measure: str) -> dict[str, list[float]]:
        rows: dict[str, list[float]] = {}
        for name, severity in corruptions:
            place = f"shift/{name}/{severity}/{measure}"
            if place not in values:
                raise ValueError(f"baseline must have the same corruptions and severities, but lacks {place!r}")
            rows.setdefault(name, []).append(1 - values[place] if measure == "accuracy" else values[place])
        return rows

    if "shift/mean/accuracy" not in own:
        return {}
    names = {"mean_corruption_error": "accuracy", "mcnll": "nll", "mcece": "ece"}
    relative: dict[str, Callable[[], Tensor]] = {
        name: partial(mean_corruption_error, table(own, measure), table(baseline, measure))
        for name, measure in names.items()
    }
    if "accuracy" in own and "accuracy" in baseline:
        ours, theirs = ((table(values, "accuracy"), 1 - values["accuracy"]) for values in (own, baseline))
        relative["relative_mean_corruption_error"] = partial(relative_mean_corruption_error, *ours, *theirs)
    count = scores["shift/mean/accuracy"].count
    return {f"shift/{name}": Score(_or_nan(value), count) for name, value in relative.items()}


def _or_nan(value: Callable[[], Tensor]) -> float:
    """Return a ratio, or NaN if a corruption does not increase the baseline's error."""
    try:
        return float(value())
    except ValueError:
        return math.nan


# -- arguments ---------------------------------------------------------------------------------------------


def _check_groups(tasks: str | Sequence[str] | None) -> tuple[str, ...]:
    groups = GROUPS if tasks is None else (tasks,) if isinstance(tasks, str) else tuple(tasks)
    for group in groups:
        check_choice("tasks", group, GROUPS)
    return groups


def _check_shift(shift: Any, severities: Sequence[int]) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Return corruptions with their severities, and versions of the data by name."""
    if shift is None or shift is False:
        return [], {}
    if isinstance(shift, Mapping):
        return [], dict(shift)
    names = CORRUPTIONS if shift is True else (shift,) if isinstance(shift, str) else tuple(shift)
    for name in names:
        if name not in CORRUPTIONS + EXTRA:
            known = ", ".join(CORRUPTIONS + EXTRA)
            raise ValueError(f"shift must be corruptions ({known}) or {{name: data}}, got {name!r}")
    for severity in severities:
        if isinstance(severity, bool) or severity not in (1, 2, 3, 4, 5):
            raise ValueError(f"severities must be whole numbers from 1 to 5, got {severity!r}")
    return [(name, severity) for name in names for severity in severities], {}
