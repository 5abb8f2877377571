"""Deep ensembles against subspaces around one solution: which functions do they find?

S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019. Five MediumCNNs are trained on
CIFAR-10 from different initialisations, by Adam and without augmentation, and their checkpoints kept. All else looks
at these: how similar they are as weights and as functions, the landscape between them, how diverse their predictions
are for the accuracy that they have, and what ensembling adds to subspaces, also under corruption and on SVHN. The runs
are trained side by side: they see the same batches, and differ by their initialisation and their dropout.

    python -m recipes.ensembles_landscape --data-root DIR
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes import landscape
from multitudes.data import Data, Loader, Part
from multitudes.landscape import Solutions
from multitudes.shift import CORRUPTIONS, EXTRA
from multitudes.training import Progress
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
    foreign: int = 26_032  # images of SVHN
    per_epoch: int = 1  # checkpoints in an epoch
    last: int = 10  # checkpoints at the end of a run that subspaces are made of
    rank: int = 5
    random_scale: float = 10.0  # how far random draws go at most
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
        foreign=100, per_epoch=2, last=6, rank=3, random_scale=2.0, low_rank_scale=0.05, draws=3, plane_draws=3,
        points=5, tunnel_points=5, tunnel_steps=8, corruptions=("gaussian_noise", "contrast"), severities=(0, 5),
    ),
}  # fmt: skip


# -- what the pieces share ---------------------------------------------------------------------------------


def settings(recipe: Recipe) -> Settings:
    """What is done at the recipe's scale."""
    return SETTINGS[recipe.scale]


def images(recipe: Recipe) -> Data:
    """CIFAR-10, with SVHN as foreign images."""
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
    recorder = mt.Recorder(net, keep=want.checkpoints, directory=folder, resume=True)
    if len(recorder) < want.checkpoints:
        raise ValueError(f"{folder} must hold {want.checkpoints} checkpoints: run the piece train first")
    stacked = list(recorder)
    return [[{name: t[run] for name, t in state.items()} for state in stacked] for run in range(want.members)]


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


# -- training ----------------------------------------------------------------------------------------------


def train(recipe: Recipe) -> dict[str, Any]:
    """Train all runs, and keep their checkpoints."""
    want, data, folder = settings(recipe), images(recipe), recipe.networks / "trajectory"
    net = mt.deep_ensemble(network(recipe), want.members, seed=SEED).to(recipe.device)
    loader = Loader(data.train, data, want.batch_size, recipe.device, seed=SEED)
    shutil.rmtree(folder, ignore_errors=True)
    recorder = mt.Recorder(net, keep=want.checkpoints, every=len(loader) // want.per_epoch, directory=folder)
    recorder.record()

    def after_step(progress: Progress) -> None:
        if not progress.epoch_ended:  # an end of an epoch is told after its last step, and is none itself
            recorder.step()

    history = mt.fit(
        net, loader, want.epochs, optimizer="adam", lr=1.6e-3, seed=SEED, callbacks=[after_step],
        schedule={"name": "multistep", "milestones": [0.25, 0.5, 0.75], "factor": 0.5},
        precision=want.precision, channels_last=recipe.device.type == "cuda",
    )  # fmt: skip
    trajectories.cache_clear()
    found = landscape.read_solutions(solutions(recipe), batches(recipe, data.test, want.test), model=network(recipe))
    return {
        "network": want.network,
        "parameters": sum(weight.numel() for weight in network(recipe).parameters()),
        "epochs": want.epochs,
        "images": len(data.train),
        "test_images": len(found.classes()),
        "loss": [epoch.loss / want.members for epoch in history],
        "seconds": [epoch.seconds for epoch in history],
        "accuracy": plain(accuracies(found)),
    }


# -- the runs, as weights and as functions -----------------------------------------------------------------


def similarity(recipe: Recipe) -> dict[str, Any]:
    """Fig. 2 (a, b) and 3: along one trajectory, and between runs."""
    want, model, runs = settings(recipe), network(recipe), trajectories(recipe)
    test, matrices = batches(recipe, images(recipe).test, want.test), ("cosine", "disagreement", "divergence")
    along = landscape.similarity({"run 0": runs[0]}, test, model=model)
    between = landscape.similarity(solutions(recipe), test, model=model)
    ends = landscape.similarity({f"run {at}": run[-want.last :] for at, run in enumerate(runs)}, test, model=model)
    return {
        "along": parts_of(along, matrices),
        "between": parts_of(between, matrices),
        "last": want.last,
        "within_runs": {matrix: ends.mean(matrix, same_run=True) for matrix in matrices},
        "between_runs": {matrix: ends.mean(matrix, same_run=False) for matrix in matrices},
    }


def tsne(recipe: Recipe) -> dict[str, Any]:
    """Fig. 2 (c) and 4: a map of three runs, with their subspaces."""
    want, model = settings(recipe), network(recipe)
    runs = {
        f"run {run}": {"checkpoint": states, **landscape.subspaces(states[-want.last :], model, **options(recipe))}
        for run, states in enumerate(trajectories(recipe)[:3])
    }
    test = batches(recipe, images(recipe).test, want.few)
    found = landscape.function_map(runs, test, model=model, draws=want.draws, seed=SEED)
    return {"runs": list(found.runs), "kinds": list(found.kinds), "points": plain(found.points)}


def planes(recipe: Recipe) -> dict[str, Any]:
    """Fig. 5 and S1: the plane through the origin and two optima, with the ways to them."""
    want, model = settings(recipe), network(recipe)
    first, second = trajectories(recipe)[:2]
    test = batches(recipe, images(recipe).test, want.few)
    found = landscape.plane(model, test, radial=(first[-1], second[-1]), points=want.points)
    gaussian = mt.subspace(model, "diagonal", first[-want.last :])
    assert isinstance(gaussian, mt.Subspace)
    drawn = gaussian.samples(want.draws, SEED)
    gaussians = [drawn.member(index).state_dict() for index in range(want.draws)]
    paths = {"run 0": first, "run 1": second, "diagonal": gaussians}
    return {
        "images": want.few,
        "paths": {kind: plain(found.project(states, model)) for kind, states in paths.items()},
        **parts_of(found, ("axes", "coordinates", "loss", "accuracy", "agreement")),
    }


def tunnel(recipe: Recipe) -> dict[str, Any]:
    """Fig. S2 and S3: a path of low loss between two optima, and what lies between it and the origin."""
    want, model, data = settings(recipe), network(recipe), images(recipe)
    first, second = (states[-1] for states in trajectories(recipe)[:2])
    path = landscape.tunnel(
        model, first, second, Loader(data.train, data, 2 * want.batch_size, recipe.device, seed=SEED),
        points=want.tunnel_points, steps=want.tunnel_steps, lr=2e-3, seed=SEED,
        evaluation=batches(recipe, data.train, want.test),
    )  # fmt: skip
    under = landscape.stitched(model, path, batches(recipe, data.test, want.few), across=2, radii=9)
    measures = ("loss", "accuracy", "agreement")
    return {
        "train_images": want.test,
        "test_images": want.few,
        **parts_of(path, ("t", "barrier", "linear_barrier")),
        "tunnel": parts_of(path.scores, measures),
        "linear": parts_of(path.linear, measures),
        "stitched": parts_of(under, ("x", "y", "share", "knots", *measures)),
    }


# -- diversity and accuracy --------------------------------------------------------------------------------


def diversity(recipe: Recipe) -> dict[str, Any]:
    """Fig. 6: the diversity-accuracy plane around the first run, nothing rejected."""
    want, model = settings(recipe), network(recipe)
    first = trajectories(recipe)[0][-want.last :]
    runs: dict[str, Any] = {run: {"optimum": state} for run, state in solutions(recipe).items()}
    runs["run 0"] |= {"trajectory": first[:-1], **landscape.subspaces(first, model, **options(recipe))}
    test = batches(recipe, images(recipe).test, want.test)
    found = landscape.diversity_plane(runs, test, model=model, draws=want.plane_draws, seed=SEED)
    return {
        "runs": list(found.runs),
        "kinds": list(found.kinds),
        **parts_of(found, ("accuracy", "disagreement", "classes")),
        "reference": found.labels.index(found.reference),
        "exponents": dict(found.exponents),
    }


def around(recipe: Recipe, run: int, kinds: Iterable[str] = SUBSPACES) -> dict[str, Any]:
    """What section 5 makes of a run, with MC dropout and some of its own checkpoints beside."""
    want, states = settings(recipe), trajectories(recipe)[run]
    made: dict[str, Any] = landscape.variants(states[-want.last :], network(recipe), kinds, **accurate(recipe))
    made["mc dropout"] = mt.mc_dropout(made["baseline"])
    made["trajectory"] = spaced(states, want.last, want.members)
    return made


def subspaces(recipe: Recipe) -> dict[str, Any]:
    """Fig. 8: each subspace alone, and ensembles of 1, 2, ... runs of it; and how diverse its draws are."""
    want, test = settings(recipe), batches(recipe, images(recipe).test, settings(recipe).test)
    runs = {f"run {run}": around(recipe, run) for run in range(want.members)}
    found = landscape.read_solutions(runs, test, model=network(recipe), draws=want.draws, seed=SEED)
    grown = landscape.growth(found)
    scores: dict[str, Any] = {
        part: dict(zip(grown.kinds, getattr(grown, part), strict=True)) for part in ("accuracy", "brier", "divergence")
    }
    sizes = [grown.runs[: count + 1] for count in range(want.members)]
    scores["nll"] = {
        kind: [float(mt.metrics.nll(found.chosen(kind, some), found.classes())) for some in sizes]
        for kind in grown.kinds
    }
    return {
        "test_images": len(found.classes()),
        "draws": want.draws,
        **plain(scores),
        "samples": want.members,
        "diversity": diversities(found, want.members),
        "centres": centres(found),
    }


def diversities(found: Solutions, samples: int) -> dict[str, dict[str, float]]:
    """How much equally many solutions differ, independent ones or of one run (the mean over runs), by kind."""
    runs = list(dict.fromkeys(found.runs))
    groups = {"independent": [found.chosen("baseline", runs)]}
    for kind in dict.fromkeys(found.kinds):
        if kind not in ("baseline", "weight averaging"):
            groups[kind] = [mt.Predictive(found.chosen(kind, [run]).predictions[:samples]) for run in runs]

    def mean(values: Iterable[Tensor]) -> float:
        return float(torch.stack(list(values)).mean())

    return {
        kind: {
            "disagreement": mean(mt.metrics.disagreement(p) for p in group),
            "divergence": mean(mt.metrics.ensemble_js(p) for p in group),
            "accuracy": mean((p.predictions.argmax(2) == found.classes()).double().mean() for p in group),
        }
        for kind, group in groups.items()
    }


def centres(found: Solutions) -> int:
    """How many random draws were rejected so often that the centre was taken."""
    pairs = [[found.chosen(kind, [run]).predictions for kind in ("baseline", "random")] for run in set(found.runs)]
    return sum(int((drawn == centre).flatten(1).all(1).sum()) for centre, drawn in pairs)


def shift(recipe: Recipe) -> dict[str, Any]:
    """Fig. 9, and the divergences on SVHN: as many solutions of each kind, and ensembles of subspaces."""
    want, model, data = settings(recipe), network(recipe), images(recipe)
    runs = [around(recipe, run) for run in range(want.members)]
    methods = {
        "baseline": runs[0]["baseline"],
        "independent": [made["baseline"] for made in runs],
        **{kind: runs[0][kind] for kind in ("trajectory", *SUBSPACES, "mc dropout")},
        **{f"independent + {kind}": [made[kind] for made in runs] for kind in ("random", "low_rank")},
    }
    test = data.scaled(data.test.x[: want.few].to(recipe.device))
    found = landscape.under_corruption(
        methods, test, data.test.y[: want.few], corruptions=want.corruptions, severities=want.severities,
        preprocess=data.preprocess, model=model, draws=want.members, seed=SEED,
    )  # fmt: skip
    foreign = data.preprocess(data.scaled(data.ood["svhn"][: want.foreign].to(recipe.device)))
    digits = [(x,) for x in foreign.split(ROWS)]
    on_svhn = landscape.read_solutions({"": methods}, digits, model=model, draws=want.members, seed=SEED)
    answers = {method: on_svhn.chosen(method, on_svhn.runs) for method in methods}
    return {
        "methods": {method: answers[method].members for method in methods},
        "images": want.few,
        "svhn_images": len(foreign),
        "corruptions": list(want.corruptions),
        "severities": list(want.severities),
        **{part: plain(getattr(found, part).mean(1)) for part in ("accuracy", "brier", "divergence")},
        "svhn": {method: float(mt.metrics.ensemble_js(answers[method])) for method in methods},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    pieces = (train, similarity, tsne, planes, tunnel, diversity, subspaces, shift)
    Recipe("ensembles_landscape", __doc__, {piece.__name__: piece for piece in pieces}).run(arguments)


if __name__ == "__main__":
    main()
