"""`evaluate`: score a network on data, on shifted data and on out-of-distribution data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from multitudes.base.checks import check_count, check_seed
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
"""`watch(name, p, target)` gets every prediction; `name` is that of its data, None for the data to score."""

Change = Callable[[Any, int], Input]
"""A function from an input, and the number of its batch, to the network's input."""


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
    """Score `net` on data, shifted data and out-of-distribution data; predictions are streamed, not kept.

    Args:
        net: a multitude, calibrated or not, or a plain network.
        data: a batch `(x, y)` of any size, or an iterable of batches such as a `DataLoader`.
        shift: corruptions of images in [0, 1] by name, or True for the fifteen of `shift.CORRUPTIONS`; or other
            versions of the data, `{name: data}`.
        severities: severities of the corruptions.
        ood: out-of-distribution data, of which only the inputs are used; or several, `{name: data}`.
        tasks: the groups of scores of `data` to compute: scores, calibration, selective and diversity; by default all
            that exist for the kind of predictions.
        baseline: the result of another network with the same shifts. Corruption errors are then also given relative to
            it: `"shift/mean_corruption_error"`, `"shift/mcnll"`, `"shift/mcece"` and, if both results have an
            `"accuracy"` without corruption, `"shift/relative_mean_corruption_error"`.
        preprocess: a function of inputs after the shift, such as normalisation.
        ignore: a label whose pixels do not count; for tokens, -100 never counts.
        noise_precision: for `task="regression"`, one over the variance of the noise around the members' values (see
            `metrics.log_density`).
        scale: a factor for values whose targets were standardised.
        bins: the number of confidence bins of the calibration errors `ece`, `mce`, `classwise_ece` and `adaptive_ece`.
        min_count: the minimum number of predictions for a bin to count in `ece` and `mce`.
        seed: the seed of the draws, if the network draws, and of the corruptions, which are always the same without it.
        device: the device for the inputs; by default that of the network's parameters.
        progress: whether to show progress on stderr; by default on a terminal, after two seconds.
        watch: a function that is called with every prediction of `data` and of `ood`, `watch(name, p, target)`; `name`
            is that of the `ood` data, and None for `data` itself.
        options: passed to the network's own `predict`: `task`, `draws`, `memory`, ...

    The scores depend on the task: classes, tokens (also `"perplexity"`), binary and multilabel (also `"auroc"`; the
    others are those of the two classes no and yes, with one row for each label of each input), values, quantiles
    (`"pinball"`, and `"coverage"` and `"width"` of the widest central interval).

    The result's names are those of the metrics, such as `"nll"`; then `"shift/fog/3/nll"`, `"shift/mean/3/nll"` and
    `"shift/mean/nll"` over the corruptions; and `"ood/svhn/entropy/auroc"` by uncertainty.

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
    unknown = {} if ood is None else dict(ood) if isinstance(ood, Mapping) else {"": ood}
    check_seed(seed)
    check_count("bins", bins)
    check_count("min_count", min_count)
    if seed is not None:
        options["seed"] = seed
    if baseline is not None and not isinstance(baseline, Evaluation):
        raise ValueError(f"baseline must be an Evaluation, got {baseline!r}")
    if baseline is not None and not corruptions:
        raise ValueError(f"baseline needs corruptions, shift=True or names of them, got shift={shift!r}")
    batches = data if isinstance(data, Iterator) and not corruptions else Batches(data).batches
    reading = {"ignore": ignore, "noise_precision": noise_precision, "scale": scale}
    settings = {"bins": bins, "min_count": min_count}
    detection = OODDetection()

    def predicted(batches: Any, change: Change | None = None) -> Iterator[tuple[Predictive, Tensor | None]]:
        def prepared(x: Any, index: int) -> Input:
            changed = x if change is None else change(x, index)
            return changed if preprocess is None else preprocess(changed)

        return predictions(net, batches, progress, device, prepared, **options)

    def watched(batches: Any) -> Iterator[tuple[Predictive, Tensor | None]]:
        for prediction, target in predicted(batches):
            if watch is not None:
                watch(None, prediction, target)
            if unknown:
                detection.update(prediction, False)
            yield prediction, target

    scores = _measured(watched(batches), reading, settings, groups)
    for name, severity in corruptions:
        pairs = predicted(batches, _corruption(name, severity, seed or 0))
        scores |= _under(f"shift/{name}/{severity}", _measured(pairs, reading, settings, shifted=True))
    scores |= _summary(scores, corruptions)
    if baseline is not None:
        scores |= _relative(scores, corruptions, baseline)
    for name, version in versions.items():
        pairs = predicted(Batches(version).batches)
        scores |= _under(f"shift/{name}", _measured(pairs, reading, settings, groups))
    for name, other in unknown.items():
        found = copy.deepcopy(detection)
        for prediction, _ in predicted(Batches(other).batches):
            found.update(prediction, True)
            if watch is not None:
                watch(name, prediction, None)
        scores |= _under(f"ood/{name}" if name else "ood", _detected(found.compute()))
    return Evaluation(scores)


def _measured(
    pairs: Iterable[tuple[Predictive, Tensor | None]],
    reading: Mapping[str, Any],
    settings: Mapping[str, int],
    groups: Sequence[str] = GROUPS,
    shifted: bool = False,
) -> dict[str, Score]:
    """Score predictions by the declared metrics that fit the first of them.

    `reading` holds the options that read predictions, `settings` those of the metrics.
    """
    metrics: dict[str, Metric] | None = None
    count = 0
    for p, target in pairs:
        if target is None:
            raise ValueError("data must have targets, batches of (x, y), to be scored; got inputs alone")
        if metrics is None:
            known = {**settings, "members": p.members}
            if p.reading.classes:
                known["classes"] = p.reading.class_count(p.predictions.shape[1:])
            # Metrics that store a number per row would store one per pixel or token.
            dense = len(places(p)) > (2 if p.reading.several_labels else 1)
            metrics = {
                each.score: each.streaming(**{name: known[name] for name in each.class_settings if name in known})
                for group in groups
                for each in METRICS.values()
                if each.group == group and each.kind.fits(p, reading["noise_precision"])
                and (each.shifted or not shifted) and not (each.kept and dense)
            }  # fmt: skip
        read = read_batch(p, target, **reading)
        count += len(read)
        for metric in metrics.values():
            metric.update(read)
    return {name: Score(float(metric.compute()), count) for name, metric in (metrics or {}).items()}


def _under(place: str, scores: Mapping[str, Score]) -> dict[str, Score]:
    return {f"{place}/{name}": score for name, score in scores.items()}


def _corruption(name: str, severity: int, seed: int) -> Change:
    """Corrupt each batch with its own noise, the same in every evaluation."""

    def change(x: Any, index: int) -> Input:
        if not isinstance(x, Tensor):
            raise ValueError(f"shift={name!r} needs batches of images, got {type(x).__name__}")
        return corrupt(x, name, severity, seed=mixed(seed, index) % 2**63)

    return change


def _detected(table: OODTable) -> dict[str, Score]:
    measures = {"auroc": "auroc", "aupr": "aupr", "fpr95": "fpr"}
    return {
        f"{uncertainty}/{name}": Score(float(getattr(detection, measure)), table.inside + table.outside)
        for uncertainty, detection in table.items()
        for name, measure in measures.items()
    }


def _summary(scores: Mapping[str, Score], corruptions: Sequence[tuple[str, int]]) -> dict[str, Score]:
    """Return means over the corruptions, for each severity and for all."""
    found: dict[str, list[Score]] = {}
    for place in ("shift/mean/{}", "shift/mean"):
        for name, severity in corruptions:
            for measure, score in Evaluation(scores).under(f"shift/{name}/{severity}").scores.items():
                found.setdefault(f"{place.format(severity)}/{measure}", []).append(score)
    return {
        name: Score(sum(each.value for each in own) / len(own), sum(each.count for each in own))
        for name, own in found.items()
    }


def _relative(
    scores: Mapping[str, Score], corruptions: Sequence[tuple[str, int]], baseline: Evaluation
) -> dict[str, Score]:
    """Return corruption errors relative to those of a baseline: mCE, relative mCE, mCNLL, mCECE; none for values."""
    own = Evaluation(scores)

    def table(values: Mapping[str, float], measure: str) -> dict[str, list[float]]:
        rows: dict[str, list[float]] = {}
        for name, severity in corruptions:
            place = f"shift/{name}/{severity}/{measure}"
            if place not in values:
                raise ValueError(f"baseline must be of the same corruptions and severities, but has no {place!r}")
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
    """Return a ratio, or NaN if a corruption does not hurt the baseline."""
    try:
        return float(value())
    except ValueError:
        return math.nan


# -- arguments ---------------------------------------------------------------------------------------------


def _checked_tasks(tasks: str | Sequence[str] | None) -> tuple[str, ...]:
    chosen = GROUPS if tasks is None else (tasks,) if isinstance(tasks, str) else tuple(tasks)
    for task in chosen:
        if task not in GROUPS:
            raise ValueError(f"tasks must be of {', '.join(GROUPS)}, got {task!r}")
    return chosen


def _checked_shift(shift: Any, severities: Sequence[int]) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Return corruptions with their severities, and versions of the data by name."""
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
