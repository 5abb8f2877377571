"""Ensemble model patching on nine UCI regression sets, the splits of a set trained side by side.

    python -m recipes.patching_uci --data-root DIR [--scale smoke] [--only yacht,boston]

Chang, Yao, Williams-King and Lipson, *Ensemble model patching*, 2019, appendix D.7, Tables 12 and 13: the root mean
squared error and the log predictive density of ECMP, EMP, MC dropout and an explicit ensemble, over the splits of
Hernandez-Lobato and Adams (2015). Each piece is a data set, and runs on a CPU.

Settings of the paper, equal for every set and not tuned: one hidden layer of 50 ReLU units (100 for protein); batch
norm (gamma 0.2, patched with 5 components), or dropout of rate 0.005, after the input and after the hidden layer, and
neither in the ensemble of 5; Adam at its default rate, weight decay 0.01, batches of 100; an output precision of 0.1
in the units of the target. The paper trains for 4,000 epochs with 10,000 draws; here it is 8,000 steps and 1,000 draws.
Batch norm without patching, `norm`, is our control.

All splits of a set have the same sizes, so one network has a member for each split. A member has the data of its split
as a buffer and is called with row indices: the same indices select different rows in every member.

Targets are standardised like inputs. "The data" in the paper may mean only inputs: the piece `yacht-own` trains on
targets in their own units.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.lab.data import Data, Part
from multitudes.metrics import fit_noise_precision, log_density, rmse
from recipes.recipe import Recipe, rounded

SETS = {
    "yacht": ("yacht", 20),
    "boston": ("bostonHousing", 20),
    "energy": ("energy", 20),
    "concrete": ("concrete", 20),
    "wine": ("wine-quality-red", 20),
    "kin8nm": ("kin8nm", 20),
    "power": ("power-plant", 20),
    "naval": ("naval-propulsion-plant", 20),
    "protein": ("protein-tertiary-structure", 5),
}
"""File of each set, and its number of splits."""

OWN_UNITS = "-own"
"""Suffix of pieces that train on unscaled targets."""

PIECES = (*SETS, f"yacht{OWN_UNITS}")

METHODS = ("ecmp", "emp", "dropout", "ensemble", "norm")
"""The paper's methods, and the unpatched network with batch norm, to isolate the effect of the norm."""

HIDDEN, WIDER = 50, 100  # the latter for protein
COMPONENTS = 5
GAMMA = 0.2
RATE = 0.005
PRECISION = 0.1
BATCH = 100
WEIGHT_DECAY = 0.01
LONGEST = 4000  # epochs


@dataclass(frozen=True)
class Scale:
    """Amount of work per set and method."""

    splits: int
    steps: int
    draws: int


FULL = Scale(splits=20, steps=8000, draws=1000)
SMOKE = Scale(splits=3, steps=150, draws=20)


# -- splits as members -------------------------------------------------------------------------------------


class Errors(nn.Module):
    """A network with its own data: maps row indices `[B]` to its errors there, prediction minus target, `[B, 1]`."""

    x: Tensor
    y: Tensor

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("x", x)
        self.register_buffer("y", y)

    def forward(self, rows: Tensor) -> Tensor:
        return self.model(self.x[rows]) - self.y[rows]


class Splits(mt.Members):
    """Networks with their own data as members: maps row indices `[B]` to errors `[M, B, 1]`.

    The objective is the sum of their mean squared errors, so that each member trains as it would alone. It is computed
    for all members at once: calling a criterion for each of a hundred members makes a step half as long again.
    """

    def loss(self, x: Any, y: Tensor, criterion: Any = None, **options: Any) -> Tensor:
        return self(x).square().mean((1, 2)).sum()


class Rows:
    """Batches of the indices of `count` rows, shuffled each epoch; they are their own targets."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return math.ceil(self.count / BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(self.count, generator=self.generator)
        return ((rows, rows) for rows in order.split(BATCH))


def network(method: str, inputs: int, hidden: int) -> nn.Module:
    """Build the paper's network for a method, `[B, inputs] -> [B, 1]`.

    The norms follow the input and the hidden layer's activation, like the dropout of Gal and Ghahramani (2016).
    """
    first, last = nn.Linear(inputs, hidden), nn.Linear(hidden, 1)
    if method == "ensemble":
        return nn.Sequential(first, nn.ReLU(), last)
    if method == "dropout":
        return mt.mc_dropout(nn.Sequential(nn.Dropout(RATE), first, nn.ReLU(), nn.Dropout(RATE), last)).network
    norms = nn.BatchNorm1d(inputs), nn.BatchNorm1d(hidden)
    for norm in norms:
        nn.init.constant_(norm.weight, GAMMA)
    model = nn.Sequential(norms[0], first, nn.ReLU(), norms[1], last)
    if method == "norm":
        return model
    # "pretrained" keeps gamma: components vary around 0.2; fresh ones would vary around 1.
    return mt.patched(model, COMPONENTS, "norm", cross=method == "ecmp", init="pretrained").network


def members(method: str, splits: Sequence[tuple[Tensor, Tensor]], hidden: int, seed: int = 0) -> Splits:
    """Build a network per split, five for the ensemble, one split after the other."""
    torch.manual_seed(seed)
    each = COMPONENTS if method == "ensemble" else 1
    networks = [Errors(network(method, x.shape[1], hidden), x, y) for x, y in splits for _ in range(each)]
    net = Splits(networks, len(networks))
    net.runner = "vmapped"  # on a CPU "auto" would loop, which takes twice as long here
    return net


def rows_of(data: Data, own_units: bool = False) -> tuple[Tensor, Tensor]:
    """Return inputs `[N, F]` and targets `[N, 1]`, training then test rows, standardised by the training rows."""
    x, y = (torch.cat([getattr(part, name) for part in (data.train, data.test)]) for name in "xy")
    return data.preprocess(x), (y if own_units else data.standardised(y))[:, None]


def load(recipe: Recipe, file: str, count: int) -> list[Data]:
    """Load the standard splits of a set. Nothing is tuned, so validation rows are used for training."""
    found = []
    for fold in range(count):
        data = recipe.data(f"uci/{file}.npz", fold=fold, task="regression", numbers="standard", validation=0.1)
        parts = data.train, data.validation
        train = Part(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
        found.append(replace(data, train=train))
    return found


# -- training and measuring --------------------------------------------------------------------------------


def train(net: Splits, rows: Rows, epochs: int, seed: int = 0) -> float:
    """Train all members side by side; return their mean squared error in the last epoch, averaged over members."""
    history = mt.fit(
        net, rows, epochs, optimizer="adam", weight_decay=WEIGHT_DECAY, schedule="constant", seed=seed, progress=False
    )
    return history[-1].loss / net.members


def errors(net: Splits, rows: Tensor, splits: int, at_once: int = 256) -> Tensor:
    """Return the errors of all draws or ensemble members on rows `[B]` of each split: `[splits, S, B]`.

    The seed makes weight draws the same for all rows and batch sizes.
    """
    parts = [net.predict(some, "regression", seed=0).predictions for some in rows.split(at_once)]
    return torch.cat(parts, 1).squeeze(2).unflatten(0, (splits, -1)).cpu()


def measured(test: Tensor, training: Tensor, std: float) -> dict[str, float]:
    """Score one split in the target's units, from errors `[S, B]` on test and training rows in units of `std`.

    The density uses the paper's precision, and also the one that fits the training errors best: the paper's is far from
    the size of the errors in several sets, and hides the effect of the draws there.
    """
    forecast, zeros = mt.Predictive(test, task="regression"), torch.zeros(test.shape[1])
    fitted = fit_noise_precision(mt.Predictive(training, task="regression"), torch.zeros(training.shape[1]))
    numbers = {
        "rmse": rmse(forecast, zeros, std),
        "log_density": log_density(forecast, zeros, PRECISION * std**2, std),
        "log_density_fitted": log_density(forecast, zeros, fitted, std),
    }
    return rounded({name: float(value) for name, value in numbers.items()})


def run_method(
    method: str, splits: Sequence[Data], hidden: int, scale: Scale, own_units: bool, device: torch.device
) -> dict[str, Any]:
    """Train a method on all splits at once, and measure each: lists with one number per split."""
    count, start = len(splits[0].train), time.time()
    net = members(method, [rows_of(data, own_units) for data in splits], hidden)
    net.to(device)
    loss = train(net, Rows(count, seed=0), epochs_of(count, scale.steps))
    trained = time.time()
    net.draws = scale.draws
    test = errors(net, torch.arange(count, count + len(splits[0].test), device=device), len(splits))
    net.draws = max(1, scale.draws // 10)
    training = errors(net, torch.arange(min(count, 1000), device=device), len(splits))
    units = [1.0 if own_units else data.target_std for data in splits]
    each = [measured(*of_one) for of_one in zip(test, training, units, strict=True)]
    return {name: [numbers[name] for numbers in each] for name in each[0]} | {
        "last_loss": rounded(loss),
        "training_seconds": round(trained - start, 1),
        "measuring_seconds": round(time.time() - trained, 1),
    }


def epochs_of(rows: int, steps: int) -> int:
    """Return the epochs needed for this many steps, at most the paper's."""
    return min(LONGEST, math.ceil(steps / math.ceil(rows / BATCH)))


def piece(name: str, recipe: Recipe) -> dict[str, Any]:
    """Run one data set: every method on every split."""
    scale = SMOKE if recipe.smoke else FULL
    own_units = name.endswith(OWN_UNITS)
    file, count = SETS[name.removesuffix(OWN_UNITS)]
    hidden = WIDER if name == "protein" else HIDDEN
    splits = load(recipe, file, min(count, scale.splits))
    rows = len(splits[0].train)
    return {
        "splits": len(splits),
        "rows": [rows, len(splits[0].test)],
        "features": splits[0].shape[0],
        "hidden": hidden,
        "epochs": epochs_of(rows, scale.steps),
        "draws": scale.draws,
        "target_std": rounded(splits[0].target_std),
        "methods": {method: run_method(method, splits, hidden, scale, own_units, recipe.device) for method in METHODS},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the pieces given on the command line."""
    Recipe("patching_uci", __doc__, {name: partial(piece, name) for name in PIECES}).run(arguments)


if __name__ == "__main__":
    main()
