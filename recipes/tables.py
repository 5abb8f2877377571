"""Tables: our estimators at their defaults beside gradient boosting, a random forest, and the package of TabM.

    python -m recipes.tables --data-root DIR [--scale smoke] [--only energy-tabm,energy-boosting]

Eleven tables of 150 to 46,000 rows: six UCI regression sets on their own splits (Hernandez-Lobato and Adams, 2015), and
five that come with scikit-learn, five splits of each. All methods have the same training and test rows, and default
settings: nothing is tuned here (how the defaults were found is on the page). Each piece is a table and a method.

Numbers are in the target's own units. Densities and scores of regression are those of a normal distribution with the
predicted mean and deviation; probabilities of classes below 1e-6, which forests give, count as 1e-6.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from recipes.recipe import Recipe, rounded
from recipes.tables_models import METHODS, Answer, Table

UCI = {
    "energy": "energy",
    "concrete": "concrete",
    "wine-red": "wine-quality-red",
    "power": "power-plant",
    "kin8nm": "kin8nm",
    "protein": "protein-tertiary-structure",
}
"""File of each set."""

BUNDLED = ("diabetes", "breast-cancer", "wine", "iris", "digits")
"""Tables included in scikit-learn."""

TABLES = (*UCI, *BUNDLED)
SPLITS, QUICK_SPLITS, QUICK_ROWS = 5, 2, 400
LEAST = 1e-6
"""Lower bound on probabilities."""


# -- splits ------------------------------------------------------------------------------------------------


def splits(name: str, recipe: Recipe) -> Iterator[tuple[Table, Any]]:
    """Yield the rows of each split, and the targets of its test rows."""
    count = QUICK_SPLITS if recipe.smoke else SPLITS
    for table, y in (uci if name in UCI else bundled)(name, recipe, count):
        if recipe.smoke:
            rows = np.random.default_rng(0).permutation(len(table.y))[:QUICK_ROWS]
            table = Table(table.x[rows], table.y[rows], table.test, table.classes, table.device)
        yield table, y


def uci(name: str, recipe: Recipe, count: int) -> Iterator[tuple[Table, Any]]:
    """Yield the standard splits; our validation rows are used for training."""
    for fold in range(count):
        data = recipe.data(f"uci/{UCI[name]}.npz", fold=fold, task="regression", numbers="standard")
        parts = data.train, data.validation
        x, y = (torch.cat([getattr(part, each) for part in parts]).double().numpy() for each in "xy")
        yield Table(x, y, data.test.x.double().numpy(), 0, recipe.device), data.test.y.double().numpy()


def bundled(name: str, recipe: Recipe, count: int) -> Iterator[tuple[Table, Any]]:
    """Yield random splits: a tenth of the rows for testing in regression, else a stratified fifth."""
    from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit

    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name.replace('-', '_')}")(return_X_y=True)
    recipe.saw(f"scikit-learn/{name}", hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest())
    classes = 0 if name == "diabetes" else int(y.max()) + 1
    kind, share = (StratifiedShuffleSplit, 0.2) if classes else (ShuffleSplit, 0.1)
    for train, test in kind(SPLITS, test_size=share, random_state=0).split(x, y):
        if count:
            yield Table(x[train], y[train], x[test], classes, recipe.device), y[test]
            count -= 1


# -- measuring ---------------------------------------------------------------------------------------------


def of_numbers(answer: Answer, y: Any) -> dict[str, float]:
    """Return RMSE, negative log density, CRPS, and coverage and width of intervals for the target `y [T]`."""
    from scipy.stats import norm

    z = (y - answer.mean) / answer.std
    nll = 0.5 * np.log(2 * math.pi * answer.std**2) + 0.5 * z**2
    crps = answer.std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    inside = (answer.low <= y) & (y <= answer.high)
    return {
        "rmse": math.sqrt(float(np.mean((y - answer.mean) ** 2))),
        "nll": float(nll.mean()),
        "crps": float(crps.mean()),
        "coverage": float(inside.mean()),
        "width": float(np.mean(answer.high - answer.low)),
    }


def of_classes(answer: Answer, y: Any) -> dict[str, float]:
    """Return accuracy, negative log probability, Brier score, and coverage and size of sets, if any, for `y [T]`."""
    right = np.maximum(answer.probs[np.arange(len(y)), y], LEAST)
    wanted = np.eye(answer.probs.shape[1])[y]
    numbers = {
        "accuracy": float((answer.probs.argmax(1) == y).mean()),
        "nll": float(-np.log(right).mean()),
        "brier": float(((answer.probs - wanted) ** 2).sum(1).mean()),
    }
    if answer.sets is not None:
        numbers |= {
            "coverage": float(answer.sets[np.arange(len(y)), y].mean()),
            "width": float(answer.sets.sum(1).mean()),
        }
    return numbers


def measured(method: str, table: Table, y: Any, seed: int, quick: bool) -> dict[str, float]:
    """Score a method on one split, with the seconds it takes to train and predict."""
    start = time.time()
    answer = METHODS[method](table, seed, quick)
    seconds = time.time() - start
    return (of_classes(answer, y) if table.classes else of_numbers(answer, y)) | {"seconds": seconds}


def piece(name: str, method: str, recipe: Recipe) -> dict[str, Any]:
    """Run a method on every split of a table: lists with one number per split."""
    rows = list(splits(name, recipe))
    found = [measured(method, table, y, seed, recipe.smoke) for seed, (table, y) in enumerate(rows)]
    return together(name, method, rows[0], found)


def together(name: str, method: str, first: tuple[Table, Any], found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Combine the numbers of each split into the result of a piece."""
    table, y = first
    about = {"rows": [len(table.y), len(y)], "features": table.x.shape[1], "classes": table.classes}
    scores = {score: [rounded(numbers[score]) for numbers in found] for score in found[0]}
    return {"table": name, "method": method, **about, "scores": scores}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the pieces given on the command line."""
    pieces = {f"{name}-{method}": partial(piece, name, method) for name in TABLES for method in METHODS}
    Recipe("tables", __doc__, pieces).run(arguments)


if __name__ == "__main__":
    main()
