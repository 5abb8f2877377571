"""Columns by importance, and the test inputs with the highest uncertainty."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multitudes.lab.data.tables.features import Category, Date, Feature
from multitudes.lab.report.chart import HIGHLIGHTED
from multitudes.lab.report.run_results import Results
from multitudes.lab.study.results.result_rows import TARGETS

MOST = 10
"""Maximum number of inputs in a section."""
MOST_COLUMNS = 20
"""Maximum number of columns with a bar."""
SHOWN = 8
"""Number of columns in the table of test rows."""
LONGEST = 280
"""Maximum characters shown of a text."""
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
"""Invisible characters, some of which change the text direction."""
WORDS = {"accuracy": "accuracy lost", "rmse": "RMSE added", "entropy": "change of entropy", "std": "change of std"}
"""Headings: the change of a score or an uncertainty when a column is shuffled."""
FIELDS = ("name", "read_as", "values", "missing", "dropped", "note")
"""Keys of a column in `data.json`."""


# -- columns -----------------------------------------------------------------------------------------------


def columns_read(results: Results) -> dict[str, Any]:
    """List each column with its kind and outcome; those with remarks come first."""
    columns = [{field: each.get(field, "") for field in FIELDS} for each in results.about.get("columns") or []]
    columns.sort(key=lambda each: not (each["dropped"] or each["note"]))
    if not columns:
        return {}
    changeable = results.about.get("kind") != "text"
    return {"columns": columns, "dropped": sum(bool(each["dropped"]) for each in columns), "changeable": changeable}


def important_columns(results: Results) -> dict[str, Any]:
    """List the effect of shuffling each column, with the length of its bar, per measured method."""
    table, kinds, panels = results.importance, ("score", "uncertainty"), []
    for label, own in (table.get("methods") or {}).items():
        means = {name: [statistics.fmean(each[kind]) for kind in kinds] for name, each in own["columns"].items()}
        most = [max((abs(pair[at]) for pair in means.values()), default=0.0) or 1.0 for at in (0, 1)]
        lines = [
            (name, [(_change(table[kind], pair[at]), pair[at] / most[at]) for at, kind in enumerate(kinds)])
            for name, pair in list(means.items())[:MOST_COLUMNS]
        ]
        panels.append({"method": label, "rows": own["rows"], "lines": lines, "left": max(0, len(means) - MOST_COLUMNS)})
    return {"panels": panels, "heads": [WORDS[table[kind]] for kind in kinds]} if panels else {}


def _change(score: str, value: float) -> str:
    text = f"{100 * value:.1f} points" if score == "accuracy" else f"{value:.3g}"
    return f"{'+' if value > 0 else ''}{text}".replace("-", "−")


# -- the most uncertain inputs ------------------------------------------------------------------------------


def unsure_rows(results: Results) -> dict[str, Any]:
    """List the test rows on which the best method is least certain: values, prediction and truth."""
    data = results.table
    if data is None:
        return {}
    names = ("probs", "target") if data.classes else ("std", "mean", "low", "high", "target")
    found = _first_seeds(results, results.ranked[:1], len(data.test), *names)
    if not found:
        return {}
    arrays = next(iter(found.values()))
    unsure = _mean_entropy(found) if data.classes else arrays[0]
    chosen = unsure.argsort(descending=True, stable=True)[:MOST]
    order = [name for own in list((results.importance.get("methods") or {}).values())[:1] for name in own["columns"]]
    values = table_values(data.encoder.features, data.test.x[chosen])
    columns = sorted(values, key=lambda name: order.index(name) if name in order else math.inf)[:SHOWN]
    shown = zip(*([_text(value) for value in values[name]] for name in columns), strict=True)
    predictions: list[tuple[list[str], bool]] = []
    if data.classes:
        heads = ["class", "confidence", "truth"]
        for row in chosen.tolist():
            truth = int(arrays[1][row])
            label, confidence, right = _vote(arrays[0][row], data.classes, truth)
            predictions.append(([label, f"{confidence:.0f} %", data.classes[truth]], right))
    else:
        heads = ["mean", "90 % interval", "truth"]
        for row in chosen.tolist():
            mean, low, high, value = (float(each[row]) for each in arrays[1:])
            predictions.append(([_text(mean), f"{_text(low)} to {_text(high)}", _text(value)], low <= value <= high))
    rows = list(zip(chosen.tolist(), shown, predictions, strict=True))
    hidden = len(values) - len(columns)
    return {"method": results.ranked[0], "columns": columns, "heads": heads, "rows": rows, "hidden": hidden}


def uncertain_images(results: Results) -> dict[str, Any]:
    """List the images with the largest mean entropy, with each method's class and confidence, for one seed."""
    if results.images is None:
        return {}
    found = _first_seeds(results, results.methods, len(results.images), "probs", "target")
    if not found:
        return {}
    chosen = _mean_entropy(found).argsort(descending=True, stable=True)[:MOST].tolist()
    target, names = next(iter(found.values()))[1], results.classes
    images = [(row, results.images[row], names[target[row]]) for row in chosen]
    rows = [(at, [_vote(probs[row], names, int(target[row])) for row in chosen]) for at, (probs, _) in found.items()]
    return {"images": images, "rows": rows}


def uncertain_texts(results: Results) -> dict[str, Any]:
    """List the texts with the largest mean entropy, with each method's predictions, for one seed; for regression,
    those with the largest deviation of the best method."""
    if results.texts is None:
        return {}
    return _texts_of_classes(results) if TARGETS[results.task].classes else _texts_of_numbers(results)


def _texts_of_classes(results: Results) -> dict[str, Any]:
    methods, names = results.methods[:HIGHLIGHTED], results.classes
    found = _first_seeds(results, methods, len(results.texts), "probs", "members", "target")
    if not found:
        return {}
    several = [
        name for name in results.ranked if (at := results.methods.index(name)) in found and len(found[at][1]) > 1
    ]
    voting = next(iter([*several, *(results.methods[at] for at in found)]))
    _, members, target = found[results.methods.index(voting)]
    unsure, rows = _mean_entropy(found), []
    for row in _most(results.texts, unsure):
        own, truth = members[:, row].double(), int(target[row])
        information = torch.special.entr(own.mean(0)).sum() - torch.special.entr(own).sum(1).mean()
        cells = [_vote(probs[row], names, truth) for probs, _, _ in found.values()]
        numbers = float(unsure[row]), max(0.0, float(information))
        rows.append((shortened(results.texts[row]), names[truth], *numbers, _votes(own, names), cells))
    return {"columns": list(found), "rows": rows, "best": voting, "several": len(members) > 1}


def _texts_of_numbers(results: Results) -> dict[str, Any]:
    found = _first_seeds(results, results.ranked[:1], len(results.texts), "std", "mean", "low", "high", "target")
    if not found:
        return {}
    std, *others = next(iter(found.values()))
    rows = [
        (shortened(results.texts[row]), *(float(each[row]) for each in (*others, std)))
        for row in _most(results.texts, std)
    ]
    return {"numbers": rows, "best": results.ranked[0]}


def _most(texts: list[str], unsure: Tensor) -> list[int]:
    """Return the rows of the most uncertain distinct texts, most uncertain first."""
    first: dict[str, int] = {}
    for row in unsure.argsort(descending=True, stable=True).tolist():
        first.setdefault(texts[row], row)
    return list(first.values())[:MOST]


def _votes(members: Tensor, names: Sequence[str]) -> str:
    """Count the members that predict each class, most votes first.

    >>> _votes(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]), ("no", "yes"))
    '2 yes, 1 no'
    """
    labels, counts = members.argmax(1).unique(return_counts=True)
    order = counts.argsort(descending=True, stable=True).tolist()
    return ", ".join(f"{counts[at]} {names[int(labels[at])]}" for at in order)


def shortened(text: str) -> str:
    """Return the start of a text, with invisible characters replaced.

    >>> shortened("one line"), len(shortened("word " * 100))
    ('one line', 280)
    """
    shown = UNSEEN.sub("\ufffd", text.replace("\r\n", "\n"))
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 2].rstrip()} …"


# -- helpers -----------------------------------------------------------------------------------------------


def _first_seeds(results: Results, methods: Sequence[str], rows: int, *names: str) -> dict[int, tuple[Tensor, ...]]:
    """Return arrays of each method's first seed, by method index, if they cover the page's test rows."""
    found = {}
    for method in methods:
        outcome = next(iter(results.comparable(method)), None)
        arrays = outcome and outcome.tensors(*names)
        if arrays and len(arrays[-1]) == rows:
            found[results.methods.index(method)] = arrays
    return found


def _mean_entropy(found: dict[int, tuple[Tensor, ...]]) -> Tensor:
    """Return the entropy of each row `[N]`, averaged over methods; their first arrays are probabilities."""
    return torch.special.entr(torch.stack([arrays[0] for arrays in found.values()])).sum(2).mean(0)


def _vote(probs: Tensor, names: Sequence[str], truth: int) -> tuple[str, float, bool]:
    """Return the predicted class of probabilities `[C]`, its confidence in percent, and whether it is right."""
    label = int(probs.argmax())
    return names[label], 100 * float(probs[label]), label == truth


def table_values(features: Sequence[Feature], x: Tensor) -> dict[str, list[Any]]:
    """Return the values of feature rows `[n, F]` by column, in their own units: numbers, texts, or None if missing."""
    parts = x.split([len(feature.names) for feature in features], 1)
    return {feature.column: list(_restored(feature, part)) for feature, part in zip(features, parts, strict=True)}


def _restored(feature: Feature, x: Tensor) -> Iterable[Any]:
    for value in feature.restored(x).tolist():
        if isinstance(feature, Category):
            yield [*feature.known, "other", None][value]
        elif not math.isfinite(value):
            yield None
        elif isinstance(feature, Date):
            yield str(np.datetime64(round(24 * 60 * value), "m")).replace("T", " ").removesuffix(" 00:00")
        else:
            yield value


def _text(value: Any) -> str:
    """Format a value of a table in a few digits.

    >>> _text(3.14159), _text(1234567.0), _text(None), _text(-0.5), _text("oak")
    ('3.142', '1,234,567', 'missing', '−0.5', 'oak')
    """
    if value is None or value != value:
        return "missing"
    if not isinstance(value, float):
        return str(value)
    text = f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"
    return text.replace("-", "−").replace("inf", "∞")
