"""Differences between two runs of the same recipe and seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.report.raw import MISSING, Claim, Raw, Section, number, table

FOLDER = "again"
"""Folder of second runs, as RECIPE/PIECE.json, like the first ones above it."""

TIMES = ("seconds", "per_second", "costs", "machine", "versions")
"""Values that always differ."""

NOISE = 0.01
"""Tolerance for scores, since GPUs sum in varying order: a point of accuracy, a hundredth of an NLL."""


def section(results: Path) -> Section | None:
    """Compare all pieces that were run twice; None if there are none."""
    rows, worst = [], 0.0
    for folder in sorted((results / FOLDER).glob("*")):
        first, second = Raw(results / folder.name), Raw(folder)
        for piece in second.pieces:
            if piece not in first:
                raise ValueError(f"{FOLDER}/{folder.name}/{piece}.json has no first run")
            changes = dict(differences(first[piece], second[piece]))
            name, most = max(changes.items(), key=lambda item: item[1])
            worst = max(worst, most)
            equal = sum(value == 0 for value in changes.values())
            row = [f"{folder.name}: {piece}", second.pieces[piece]["machine"]["name"], str(len(changes)), str(equal)]
            rows.append([*row, number(most, 6), f"`{name}`" if most else MISSING])
    if not rows:
        return None
    header = ["piece", "machine", "numbers", "equal", "largest difference", "of"]
    text = f"""Pieces that were run twice with the same recipe and seed, in separate processes. All numbers of the two
raw files except times are compared, by absolute differences, or relative ones for numbers larger than 1.

{table(header, rows)}
"""
    claim = Claim(
        "Runs are reproducible from the recipe and the seed", worst <= NOISE, f"largest difference {number(worst, 6)}"
    )
    return Section("Reproducibility", text, [claim])


def differences(one: Any, two: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield differences of the numbers of two results, with their place; relative for numbers larger than 1.

    >>> dict(differences({"nll": [0.25, 200.0], "seconds": 3.0}, {"nll": [0.5, 100.0], "seconds": 9.0}))
    {'nll[0]': 0.25, 'nll[1]': 0.5}
    """
    if isinstance(one, Mapping):
        if not isinstance(two, Mapping) or list(one) != list(two):
            raise ValueError(f"{place or 'the result'} has other keys in the second run")
        for key in one:
            if not any(word in key for word in TIMES):
                yield from differences(one[key], two[key], f"{place}.{key}" if place else key)
    elif isinstance(one, Sequence) and not isinstance(one, str):
        if len(one) != len(two):
            raise ValueError(f"{place} has another length in the second run")
        for index, pair in enumerate(zip(one, two, strict=True)):
            yield from differences(*pair, f"{place}[{index}]")
    elif isinstance(one, (int, float)) and not isinstance(one, bool):
        yield place, abs(one - two) / max(1.0, abs(one), abs(two))
