"""What the pieces of `recipes/ensembles_landscape.py` share: how much is done, the data, and the runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import multitudes as mt
from multitudes import landscape
from multitudes.data import Data, Loader, Part
from multitudes.landscape import Solutions
from multitudes.shift import CORRUPTIONS, EXTRA
from recipes.recipe import Recipe

State = dict[str, Tensor]  # the weights of one checkpoint, by name
SUBSPACES = ("random", "diagonal", "low_rank")  # of section 5
FLOOR = 0.65  # random draws of a lower validation accuracy are rejected (section 5)
ROWS = 2000  # images that run at a time where networks are measured
SEED = 0


@dataclass(frozen=True)
class Settings:
    """What the scales differ in; these are the full one's."""

    network: str = "medium_cnn"
    members: int = 5
    epochs: int = 40
    batch_size: int = 128
    precision: str = "bfloat16"
    limit: int | None = None  # images of each part that are read at all
    test: int = 10_000  # test images that solutions are compared on
    few: int = 1000  # test images for what is measured very often: planes, maps, corruptions
    ood: int = 26_032  # images of SVHN
    per_epoch: int = 1  # checkpoints in an epoch
    last: int = 10  # checkpoints at the end of a run that subspaces are made of
    rank: int = 5
    random_scale: float = 10.0  # how far random draws go at most
    lengths: tuple[float, ...] = (10.0, 20.0, 40.0, 60.0, 80.0)  # the same, of larger subspaces
    low_rank_scale: float = 1.0
    draws: int = 10  # from each subspace, as ensembles grow
    plane_draws: int = 30  # from each subspace, in the diversity-accuracy plane
    points: int = 25  # of the radial plane, in each direction
    tunnel_points: int = 7
    tunnel_steps: int = 1500
    corruptions: tuple[str, ...] = CORRUPTIONS + EXTRA
    severities: tuple[int, ...] = (0, 1, 2, 3, 4, 5)

    @property
    def checkpoints(self) -> int:
        """How many a run has, the initialisation included."""
        return self.epochs * self.per_epoch + 1


SETTINGS = {
    "full": Settings(),
    # The paper's SmallCNN: it has so few weights that its subspaces must be narrower.
    "smoke": Settings(
        "small_cnn", members=3, epochs=4, batch_size=64, precision="float32", limit=1500, test=300, few=100,
        ood=100, per_epoch=2, last=6, rank=3, random_scale=2.0, lengths=(2.0, 4.0), low_rank_scale=0.05, draws=3,
        plane_draws=3, points=5, tunnel_points=5, tunnel_steps=8, corruptions=("gaussian_noise", "contrast"),
        severities=(0, 5),
    ),
}  # fmt: skip


def settings(recipe: Recipe) -> Settings:
    """What is done at the recipe's scale."""
    return SETTINGS[recipe.scale]


def images(recipe: Recipe) -> Data:
    """CIFAR-10, with SVHN as out-of-distribution images."""
    return recipe.data("cifar10", ood=recipe.data_root / "svhn", validation=0.04, limit=settings(recipe).limit)


def batches(recipe: Recipe, part: Part, count: int) -> list[tuple[Tensor, Tensor]]:
    """The first `count` images of a part and their classes, as networks take them, on the device."""
    some = Part(part.x[:count], part.y[:count])
    return list(Loader(some, images(recipe), ROWS, recipe.device, shuffle=False))


def network(recipe: Recipe) -> nn.Module:
    """One network, on the device."""
    return getattr(mt.models, settings(recipe).network)().to(recipe.device)


@functools.cache
def trajectories(recipe: Recipe) -> list[list[State]]:
    """The checkpoints of each run, the initialisation first."""
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
    """Where each run has ended."""
    return {f"run {run}": states[-1] for run, states in enumerate(trajectories(recipe))}


def options(recipe: Recipe) -> dict[str, Any]:
    """How wide the subspaces are."""
    want = settings(recipe)
    return {
        "rank": want.rank,
        "random": {"scale": want.random_scale},
        "low_rank": {"scale": want.low_rank_scale},
        "dropout": {"p": (0.0, 0.2)},
    }


@functools.cache
def accurate(recipe: Recipe) -> dict[str, Any]:
    """The same, but random draws must be accurate: as the paper's, or where runs are worse, nine tenths of theirs."""
    validation = batches(recipe, images(recipe).validation, settings(recipe).test)
    found = landscape.read_solutions(solutions(recipe), validation, model=network(recipe))
    floor = min(FLOOR, 0.9 * float(accuracies(found).min()))
    given = options(recipe)
    return given | {"random": given["random"] | {"data": validation, "floor": floor}}


def accuracies(found: Solutions) -> Tensor:
    """The accuracy of each solution, `[S]`."""
    return (found.predictive.predictions.argmax(2) == found.classes()).double().mean(1)


def spaced(states: Sequence[State], last: int, count: int) -> list[State]:
    """`count` of the `last` checkpoints, as far from each other as they can be, the very last among them."""
    window = list(states[-last:])
    step = max(1, len(window) // count)
    return window[::-1][::step][:count][::-1]


def plain(value: Any) -> Any:
    """Tensors as lists, wherever they are: what goes into a JSON file."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def parts_of(found: Any, names: Iterable[str]) -> dict[str, Any]:
    """Some of a result's parts by name, for a JSON file."""
    return {name: plain(getattr(found, name)) for name in names}
