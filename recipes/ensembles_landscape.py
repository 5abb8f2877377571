"""Deep ensembles and subspaces around one solution: weights, functions and diversity.

S. Fort, H. Hu, B. Lakshminarayanan: Deep Ensembles: A Loss Landscape Perspective, 2019. Five MediumCNNs are trained on
CIFAR-10 from different initialisations, with Adam and without augmentation, and their checkpoints saved. Other pieces
analyse these: similarity of weights and functions, the landscape between them, diversity of predictions by accuracy,
and ensembles of subspaces, also under corruption and on SVHN. The runs are trained side by side: they have the same
batches, and differ by their initialisation and dropout.

    python -m recipes.ensembles_landscape --data-root DIR
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import multitudes as mt
from multitudes import landscape
from multitudes.lab.data import Loader
from multitudes.lab.study.run.costs import parameters
from multitudes.landscape import Solutions
from multitudes.training.trainer import Progress
from recipes.landscape_runs import (
    EXACT,
    ROWS,
    SEED,
    SUBSPACES,
    accuracies,
    accurate,
    batches,
    images,
    network,
    options,
    parts_of,
    settings,
    solutions,
    spaced,
    trajectories,
)
from recipes.landscape_shift import under_corruption, variants
from recipes.recipe import Recipe, rounded
from recipes.tunnel_to_origin import stitched

# -- training ----------------------------------------------------------------------------------------------


def train(recipe: Recipe) -> dict[str, Any]:
    """Train all runs, and save their checkpoints."""
    want, data, folder = settings(recipe), images(recipe), recipe.networks / "trajectory"
    net = mt.deep_ensemble(network(recipe), want.members, seed=SEED).to(recipe.device)
    loader = Loader(data.train, data, want.batch_size, recipe.device, seed=SEED)
    shutil.rmtree(folder, ignore_errors=True)
    recorder = mt.Recorder(net, keep=want.checkpoints, every=len(loader) // want.per_epoch, folder=folder)
    recorder.record()

    def after_step(progress: Progress) -> None:
        if not progress.epoch_ended:  # the end of an epoch is reported in addition to its last step
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
        "parameters": parameters(network(recipe)),
        "epochs": want.epochs,
        "images": len(data.train),
        "test_images": len(found.classes()),
        "loss": [epoch.loss / want.members for epoch in history],
        "seconds": [epoch.seconds for epoch in history],
        "accuracy": rounded(accuracies(found), EXACT),
    }


# -- the runs, as weights and as functions -----------------------------------------------------------------


def similarity(recipe: Recipe) -> dict[str, Any]:
    """Fig. 2 (a, b) and 3: similarity along one trajectory, and between runs."""
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
    return {"runs": list(found.runs), "kinds": list(found.kinds), "points": rounded(found.points, EXACT)}


def planes(recipe: Recipe) -> dict[str, Any]:
    """Fig. 5 and S1: the plane through the origin and two optima, with their trajectories."""
    want, model = settings(recipe), network(recipe)
    first, second = trajectories(recipe)[:2]
    test = batches(recipe, images(recipe).test, want.few)
    found = landscape.plane(model, test, radial=(first[-1], second[-1]), points=want.points)
    gaussian = mt.subspace(model, "diagonal", first[-want.last :])
    assert isinstance(gaussian, mt.layers.Subspace)
    drawn = gaussian.networks(want.draws, SEED)
    gaussians = [drawn.member(index).state_dict() for index in range(want.draws)]
    paths = {"run 0": first, "run 1": second, "diagonal": gaussians}
    return {
        "images": want.few,
        "paths": {kind: rounded(found.project(states, model), EXACT) for kind, states in paths.items()},
        **parts_of(found, ("axes", "coordinates", "loss", "accuracy", "agreement")),
    }


def tunnel(recipe: Recipe) -> dict[str, Any]:
    """Fig. S2 and S3: a path of low loss between two optima, and the landscape from it to the origin.

    Also measures the ridges between points that are optimised one by one, as in the paper.
    """
    want, model, data = settings(recipe), network(recipe), images(recipe)
    first, second = (states[-1] for states in trajectories(recipe)[:2])
    found = functools.partial(
        landscape.tunnel, model, first, second, points=want.tunnel_points, steps=want.tunnel_steps, lr=2e-3, seed=SEED,
        data=Loader(data.train, data, 2 * want.batch_size, recipe.device, seed=SEED),
        evaluation=batches(recipe, data.train, want.test),
    )  # fmt: skip
    path, alone = found(), found(between=False)
    under = stitched(model, path, batches(recipe, data.test, want.few), across=1, radii=9)
    measures = ("loss", "accuracy", "agreement")
    return {
        "train_images": want.test,
        "test_images": want.few,
        **parts_of(path, ("t", "barrier", "linear_barrier")),
        "alone": parts_of(alone, ("barrier",)) | parts_of(alone.scores, ("loss", "accuracy")),
        "tunnel": parts_of(path.scores, measures),
        "linear": parts_of(path.linear, measures),
        "stitched": parts_of(under, ("x", "y", "share", "knots", *measures)),
    }


# -- diversity and accuracy --------------------------------------------------------------------------------


def diversity(recipe: Recipe) -> dict[str, Any]:
    """Fig. 6: the diversity-accuracy plane around the first run, without rejections."""
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
    """Return the solutions of section 5 for a run, with MC dropout and some of its own checkpoints."""
    want, states = settings(recipe), trajectories(recipe)[run]
    made: dict[str, Any] = variants(states[-want.last :], network(recipe), kinds, **accurate(recipe))
    made["mc dropout"] = mt.mc_dropout(made["baseline"])
    made["trajectory"] = spaced(states, want.last, want.members)
    return made


def subspaces(recipe: Recipe) -> dict[str, Any]:
    """Fig. 8: each subspace alone, ensembles of 1, 2, ... runs of it, and the diversity of its draws."""
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
        **rounded(scores, EXACT),
        "samples": want.members,
        "diversity": diversities(found, want.members),
        "centres": centres(found),
    }


def diversities(found: Solutions, samples: int) -> dict[str, dict[str, float]]:
    """Return the diversity of equally many solutions by kind, independent or from one run (mean over runs)."""
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
    """Count random draws that were rejected so often that the centre was used."""
    pairs = [[found.chosen(kind, [run]).predictions for kind in ("baseline", "random")] for run in set(found.runs)]
    return sum(int((drawn == centre).flatten(1).all(1).sum()) for centre, drawn in pairs)


def shift(recipe: Recipe) -> dict[str, Any]:
    """Fig. 9, and divergences on SVHN: equally many solutions of each kind, and ensembles of subspaces."""
    want, model, data = settings(recipe), network(recipe), images(recipe)
    runs = [around(recipe, run) for run in range(want.members)]
    methods = {
        "baseline": runs[0]["baseline"],
        "independent": [made["baseline"] for made in runs],
        **{kind: runs[0][kind] for kind in ("trajectory", *SUBSPACES, "mc dropout")},
        **{f"independent + {kind}": [made[kind] for made in runs] for kind in ("random", "low_rank")},
    }
    test = data.scaled(data.test.x[: want.few].to(recipe.device))
    found = under_corruption(
        methods, test, data.test.y[: want.few], corruptions=want.corruptions, severities=want.severities,
        preprocess=data.preprocess, model=model, draws=want.members, seed=SEED,
    )  # fmt: skip
    ood = svhn(recipe)
    on_svhn = landscape.read_solutions({"": methods}, ood, model=model, draws=want.members, seed=SEED)
    predictions = {method: on_svhn.chosen(method, on_svhn.runs) for method in methods}
    return {
        "methods": {method: predictions[method].members for method in methods},
        "images": want.few,
        "svhn_images": sum(len(x) for (x,) in ood),
        "corruptions": list(want.corruptions),
        "severities": list(want.severities),
        **{part: rounded(getattr(found, part).mean(1), EXACT) for part in ("accuracy", "brier", "divergence")},
        "svhn": {method: float(mt.metrics.ensemble_js(predictions[method])) for method in methods},
    }


def reach(recipe: Recipe) -> dict[str, Any]:
    """Measure the distance at which random draws around the first run differ on SVHN, and their loss of accuracy."""
    want, model, data = settings(recipe), network(recipe), images(recipe)
    end = trajectories(recipe)[0][-1:]
    draws = {str(length): mt.subspace(model, "random", end, scale=length) for length in want.lengths}
    test, ood = batches(recipe, data.test, want.test), svhn(recipe)
    here, there = (
        landscape.read_solutions({"": draws}, each, model=model, draws=want.members, seed=SEED) for each in (test, ood)
    )
    right = accuracies(here)
    return {
        "norm": float(torch.cat([weight.flatten() for weight in end[0].values()]).norm()),
        "lengths": list(want.lengths),
        "accuracy": [float(right[[kind == name for kind in here.kinds]].mean()) for name in draws],
        "svhn": [float(mt.metrics.ensemble_js(there.chosen(name, there.runs))) for name in draws],
    }


def svhn(recipe: Recipe) -> list[tuple[Tensor]]:
    """Return SVHN images, preprocessed, on the device."""
    data = images(recipe)
    x = data.preprocess(data.scaled(data.ood["svhn"][: settings(recipe).ood].to(recipe.device)))
    return [(rows,) for rows in x.split(ROWS)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    pieces = (train, similarity, tsne, planes, tunnel, diversity, subspaces, shift, reach)
    Recipe("ensembles_landscape", __doc__, {piece.__name__: piece for piece in pieces}).run(arguments)


if __name__ == "__main__":
    main()
