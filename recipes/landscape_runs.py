"""Shared parts of `recipes/ensembles_landscape.py`: settings, data, and runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import multitudes as mt
from multitudes import landscape
from multitudes.lab.data import Data, Loader, Part
from multitudes.landscape import Solutions
from multitudes.shift import CORRUPTIONS, EXTRA
from recipes.recipe import Recipe, rounded

State = dict[str, Tensor]  # the weights of one checkpoint, by name
SUBSPACES = ("random", "diagonal", "low_rank")  # of section 5
FLOOR = 0.65  # random draws with lower validation accuracy are rejected (section 5)
ROWS = 2000  # batch size for evaluating networks
SEED = 0
EXACT = 17  # digits of float64


@dataclass(frozen=True)
class Settings:
    """Settings of a scale; the defaults are those of the full one."""

    network: str = "medium_cnn"
    members: int = 5
    epochs: int = 40
    batch_size: int = 128
    precision: str = "bfloat16"
    limit: int | None = None  # images read per part
    test: int = 10_000  # test images for comparing solutions
    few: int = 1000  # test images for frequent measurements: planes, maps, corruptions
    ood: int = 26_032  # images of SVHN
    per_epoch: int = 1  # checkpoints per epoch
    last: int = 10  # checkpoints at the end of a run that define its subspaces
    rank: int = 5
    random_scale: float = 10.0  # maximum distance of random draws
    lengths: tuple[float, ...] = (10.0, 20.0, 40.0, 60.0, 80.0)  # the same for larger subspaces
    low_rank_scale: float = 1.0
    draws: int = 10  # per subspace, in growing ensembles
    plane_draws: int = 30  # per subspace, in the diversity-accuracy plane
    points: int = 25  # of the radial plane, per direction
    tunnel_points: int = 7
    tunnel_steps: int = 1500
    corruptions: tuple[str, ...] = CORRUPTIONS + EXTRA
    severities: tuple[int, ...] = (0, 1, 2, 3, 4, 5)

    @property
    def checkpoints(self) -> int:
        """Number of checkpoints of a run, including the initialisation."""
        return self.epochs * self.per_epoch + 1


SETTINGS = {
    "full": Settings(),
    # The paper's SmallCNN: with so few weights, its subspaces must be narrower.
    "smoke": Settings(
        "small_cnn", members=3, epochs=4, batch_size=64, precision="float32", limit=1500, test=300, few=100,
        ood=100, per_epoch=2, last=6, rank=3, random_scale=2.0, lengths=(2.0, 4.0), low_rank_scale=0.05, draws=3,
        plane_draws=3, points=5, tunnel_points=5, tunnel_steps=8, corruptions=("gaussian_noise", "contrast"),
        severities=(0, 5),
    ),
}  # fmt: skip


def settings(recipe: Recipe) -> Settings:
    """Return the settings of the recipe's scale."""
    return SETTINGS[recipe.scale]


def images(recipe: Recipe) -> Data:
    """Load CIFAR-10, with SVHN as out-of-distribution images."""
    return recipe.data("cifar10", ood=recipe.data_root / "svhn", validation=0.04, limit=settings(recipe).limit)


def batches(recipe: Recipe, part: Part, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return the first `count` images of a part and their classes, preprocessed, on the device."""
    some = Part(part.x[:count], part.y[:count])
    return list(Loader(some, images(recipe), ROWS, recipe.device, shuffle=False))


def network(recipe: Recipe) -> nn.Module:
    """Build one network on the device."""
    return getattr(mt.models, settings(recipe).network)().to(recipe.device)


@functools.cache
def trajectories(recipe: Recipe) -> list[list[State]]:
    """Return the checkpoints of each run, the initialisation first."""
    want, folder = settings(recipe), recipe.networks / "trajectory"
    net = mt.deep_ensemble(network(recipe), want.members)
    recorder = mt.Recorder(net, keep=want.checkpoints, folder=folder, resume=True)
    if len(recorder) < want.checkpoints:
        raise ValueError(f"{folder} must hold {want.checkpoints} checkpoints: run the piece train first")
    states = list(recorder)
    return [[_of_member(run, state) for state in states] for run in range(want.members)]


def _of_member(index: int, state: State) -> State:
    prefix = f"{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def solutions(recipe: Recipe) -> dict[str, State]:
    """Return the last checkpoint of each run."""
    return {f"run {run}": states[-1] for run, states in enumerate(trajectories(recipe))}


def options(recipe: Recipe) -> dict[str, Any]:
    """Return the widths of the subspaces."""
    want = settings(recipe)
    return {
        "rank": want.rank,
        "random": {"scale": want.random_scale},
        "low_rank": {"scale": want.low_rank_scale},
        "dropout": {"p": (0.0, 0.2)},
    }


@functools.cache
def accurate(recipe: Recipe) -> dict[str, Any]:
    """Return `options` with a floor on random draws' accuracy: the paper's, or 90 % of the runs' if that is lower."""
    validation = batches(recipe, images(recipe).validation, settings(recipe).test)
    found = landscape.read_solutions(solutions(recipe), validation, model=network(recipe))
    floor = min(FLOOR, 0.9 * float(accuracies(found).min()))
    given = options(recipe)
    return given | {"random": given["random"] | {"data": validation, "floor": floor}}


def accuracies(found: Solutions) -> Tensor:
    """Return the accuracy of each solution, `[S]`."""
    return (found.predictive.predictions.argmax(2) == found.classes()).double().mean(1)


def spaced(states: Sequence[State], last: int, count: int) -> list[State]:
    """Return `count` of the `last` checkpoints, evenly spaced, including the last one."""
    window = list(states[-last:])
    step = max(1, len(window) // count)
    return window[::-1][::step][:count][::-1]


def parts_of(found: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return some attributes of a result, for JSON."""
    return {name: rounded(getattr(found, name), EXACT) for name in names}
