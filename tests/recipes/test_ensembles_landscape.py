"""Deep ensembles and subspaces: analyses of the recipe, its section, and a smoke run."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes import Predictive
from multitudes.landscape import Solutions, growth, tunnel
from recipes.ensembles_landscape import centres, diversities, main
from recipes.landscape_runs import SETTINGS, spaced
from recipes.landscape_shift import under_corruption, variants
from recipes.report.ensembles_landscape import section, valleys
from recipes.report.landscape_claims import NAMES, near, on_path
from recipes.report.raw import Raw
from recipes.tunnel_to_origin import stitched
from tests.landscape.test_diversity_plane import X, Y, by_hand, net, walk
from tests.recipes.recipe_cases import raw_of, smoke, with_data

PIECES = ("train", "similarity", "tsne", "planes", "tunnel", "diversity", "subspaces", "shift", "reach")


# -- what the recipe computes itself -----------------------------------------------------------------------


def test_checkpoints_are_spaced_evenly_and_end_with_the_last() -> None:
    states: list[Any] = list(range(41))
    assert spaced(states, last=10, count=5) == [32, 34, 36, 38, 40]
    assert spaced(states, last=6, count=3) == [36, 38, 40]
    assert spaced(states, last=3, count=5) == [38, 39, 40]


def test_settings_are_consistent() -> None:
    for want in SETTINGS.values():
        assert want.rank < want.last < want.checkpoints and want.members <= want.last
        assert want.severities[0] == 0 and want.draws >= want.members
    assert SETTINGS["full"].checkpoints == 41


def made_up_solutions() -> Solutions:
    """Two runs of three images in two classes: a solution, and two draws around it, one of them the solution itself."""
    sure = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    labels = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0]])
    runs, kinds = ("run 0",) * 3 + ("run 1",) * 3, ("baseline", "random", "random") * 2
    networks = (nn.Identity(),) * 6
    names = tuple(f"{run}, {kind} {at}" for at, (run, kind) in enumerate(zip(runs, kinds, strict=True)))
    return Solutions(names, runs, kinds, Predictive(sure[labels]), networks, torch.tensor([0, 0, 1]))


def test_diversities_compare_runs_with_each_other_and_draws_within_their_run() -> None:
    found = diversities(made_up_solutions(), samples=2)
    assert list(found) == ["independent", "random"]
    assert found["independent"]["disagreement"] == 1.0  # (0, 0, 1) against (1, 1, 0)
    assert found["random"]["disagreement"] == pytest.approx((1 / 3 + 1 / 3) / 2)
    assert found["independent"]["accuracy"] == pytest.approx((1 + 0) / 2)
    assert found["random"]["accuracy"] == pytest.approx((3 + 2 + 1 + 0) / 12)
    p = 1 / (1 + math.exp(-9))
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert found["independent"]["divergence"] == pytest.approx(math.log(2) - entropy)  # in the mean, both are as likely
    assert found["random"]["divergence"] == pytest.approx((math.log(2) - entropy) / 3)


def test_draws_that_are_the_solution_itself_are_counted() -> None:
    assert centres(made_up_solutions()) == 2


def test_pieces_require_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must hold 9 checkpoints: run the piece train first"):
        main(["--data-root", str(tmp_path), "--scale", "smoke", "--out", str(tmp_path / "out"), "--only", "similarity"])


# -- what the page says ------------------------------------------------------------------------------------


def made_up() -> dict[str, Any]:
    """Results as the paper would have them, tiny."""
    kinds = ("baseline", "random", "diagonal", "low_rank", "weight averaging", "mc dropout", "trajectory")
    grow = {kind: [0.7, 0.75] if kind == "baseline" else [0.71, 0.76] for kind in kinds}
    fall = {kind: [0.9, 0.7] if kind == "baseline" else [0.8, 0.6] for kind in kinds}
    js = {
        "independent": 0.38,
        "trajectory": 0.15,
        "random": 0.16,
        "diagonal": 0.03,
        "low_rank": 0.09,
        "mc dropout": 0.1,
    }
    methods = ["baseline", *js, "independent + random", "independent + low_rank"]
    divergence = [[0.1 * js.get(method, 0.0), js.get(method, 0.0)] for method in methods]
    grid = [[0.1, 0.2], [0.3, 0.4]]
    measures = {"loss": [0.1, 0.3, 0.1], "accuracy": [0.9, 0.8, 0.9], "agreement": [[1.0, 0.7], [0.7, 0.7], [0.7, 1.0]]}
    rows = [[0.2, 0.7, 0.5]] * 3
    return {
        "train": {
            "network": "medium_cnn", "parameters": 971146, "epochs": 40, "images": 48000, "test_images": 10000,
            "loss": [1.0], "seconds": [1.0], "accuracy": [0.7, 0.72],
        },
        "similarity": {
            "along": {matrix: [[1.0, 0.5], [0.5, 1.0]] for matrix in ("cosine", "disagreement", "divergence")},
            "between": {}, "last": 10,
            "within_runs": {"cosine": 0.9, "disagreement": 0.1, "divergence": 0.01},
            "between_runs": {"cosine": 0.01, "disagreement": 0.25, "divergence": 0.1},
        },
        "tsne": {"runs": ["run 0", "run 1"], "kinds": ["checkpoint", "random"], "points": [[0.0, 1.0], [2.0, 3.0]]},
        "planes": {
            "images": 10, "axes": [[0.0, 1.0], [0.0, 1.0]],
            "paths": {"run 0": [[0.0, 0.0], [1.0, 1.0]], "diagonal": [[0.0, 0.5]]},
            "coordinates": [[0.0, 1.0], [1.0, 0.0]], "loss": grid, "accuracy": grid, "agreement": [grid, grid],
        },
        "tunnel": {
            "train_images": 10, "test_images": 10, "t": [0.0, 0.5, 1.0], "barrier": 0.2, "linear_barrier": 2.0,
            "tunnel": measures, "linear": measures,
            "alone": {"barrier": 0.6, "loss": [0.1, 0.8, 0.3, 0.7, 0.2], "accuracy": [0.7, 0.4, 0.6, 0.5, 0.7]},
            "stitched": {
                "x": rows, "y": rows, "share": [0.0, 1.0, 1.25], "knots": [0, 1, 2], "loss": rows, "accuracy": rows,
                "agreement": [rows, rows],
            },
        },
        "reach": {"norm": 90.0, "lengths": [10.0, 40.0], "accuracy": [0.7, 0.6], "svhn": [0.02, 0.15]},
        "diversity": {
            "runs": ["run 0", "run 0", "run 0", "run 1"], "kinds": ["optimum", "random", "random", "optimum"],
            "accuracy": [0.7, 0.68, 0.2, 0.7], "disagreement": [0.0, 0.16, 0.9, 0.24], "reference": 0, "classes": 10,
            "exponents": {"random": 0.5},
        },
        "subspaces": {
            "test_images": 10, "draws": 10, "samples": 2, "centres": 0,
            "accuracy": grow, "brier": fall, "nll": fall, "divergence": fall,
            "diversity": {
                kind: {"disagreement": value, "divergence": value, "accuracy": 0.7} for kind, value in js.items()
            },
        },
        "shift": {
            "methods": dict.fromkeys(methods, 5), "images": 10, "svhn_images": 10, "corruptions": ["fog"],
            "severities": [0, 5], "accuracy": divergence, "brier": divergence, "divergence": divergence,
            "svhn": dict.fromkeys(methods, 0.0) | js,
        },
    }  # fmt: skip


def test_the_page_shows_each_piece_and_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    made = section(raw_of(tmp_path, made_up()))
    assert "| within a trajectory | 5 | 1.5 | 15.0 | 0.015 | 0.150 | 0.015 | 0.150 | 0.153 | 0.150 |" in made.text
    assert "| test accuracy, % | 71 | 71.0 ± 1.4 |" in made.text
    for name in made.figures:
        assert f"(ensembles_landscape/{name}.svg)" in made.text
    assert len(made.figures) == made.text.count(".svg)") == 9


def test_claims_follow_from_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    assert [claim.holds for claim in section(raw_of(tmp_path / "good", made_up())).claims] == [True] * 9

    bad = copy.deepcopy(made_up())
    bad["similarity"]["between_runs"]["disagreement"] = 0.05
    bad["subspaces"]["diversity"]["mc dropout"]["divergence"] = 0.5
    bad["subspaces"]["accuracy"]["diagonal"], bad["subspaces"]["nll"]["diagonal"] = [0.76, 0.7], [0.5, 0.8]
    bad["diversity"]["disagreement"][1] = 0.4
    bad["shift"]["svhn"] |= {"diagonal": 0.1, "mc dropout": 0.5}
    bad["shift"]["divergence"][1] = [0.9, 0.5]
    bad["tunnel"]["barrier"] = 1.5
    assert [claim.holds for claim in section(raw_of(tmp_path / "bad", bad)).claims] == [False] * 9


def test_the_section_works_without_results(tmp_path: Path) -> None:
    empty = section(Raw(tmp_path))
    assert not empty.figures and {claim.holds for claim in empty.claims} == {None}
    pytest.importorskip("plotly")
    for piece, result in made_up().items():
        assert "**" in section(raw_of(tmp_path / piece, {piece: result})).text


def test_only_accurate_draws_are_compared_with_other_runs() -> None:
    groups = near(made_up()["diversity"])
    assert {kind: len(group) for kind, group in groups.items()} == {"random": 1, "other runs": 1}
    assert groups["other runs"].item() == pytest.approx(0.24 / 0.3)


def test_scores_on_the_path_have_a_share_of_1() -> None:
    accuracies, agreements = on_path(made_up()["tunnel"]["stitched"])
    assert accuracies == [0.7] * 3 and agreements == [[0.7, 0.7]] * 3


def test_points_alone_are_every_other_place_of_a_path() -> None:
    assert valleys(made_up()["tunnel"]["alone"]) == pytest.approx(0.3 - 0.2)


# -- corruption --------------------------------------------------------------------------------------------


def test_scores_under_corruption_are_those_of_the_corrupted_images() -> None:
    runs = [walk(0), walk(1)]
    methods = {"runs": [run.net for run in runs], "random": mt.subspace(runs[0].net, "random", runs[0], scale=1.0)}
    names = ("gaussian_noise", "contrast")
    found = under_corruption(methods, X, Y, corruptions=names, severities=(0, 2, 5), draws=3, seed=4)
    assert found.methods == ("runs", "random")
    networks = methods["random"].networks(3, seed=4)  # type: ignore[union-attr]
    for t, name in enumerate(names):
        for v, severity in enumerate((0, 2, 5)):
            x = mt.shift.corrupt(X, name, severity, seed=4) if severity else X
            ensemble = torch.stack([run.net(x) for run in runs])
            for k, logits in enumerate((ensemble, networks.predict(x).predictions)):
                want = by_hand(logits, Y)
                got = [score[k, t, v].item() for score in (found.accuracy, found.brier, found.divergence)]
                assert got == pytest.approx(want, abs=1e-6)


def test_images_are_preprocessed_after_the_corruption() -> None:
    model = net(0)

    class Normalised(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model((x - 0.5) / 0.25)

    options = {"corruptions": ["fog"], "severities": [1, 3]}
    inside = under_corruption({"m": Normalised()}, X, Y, **options)  # type: ignore[arg-type]
    outside = under_corruption({"m": model}, X, Y, preprocess=lambda x: (x - 0.5) / 0.25, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(inside.brier, outside.brier)


def test_layers_draw_the_same_for_every_image() -> None:
    dropped = mt.mc_dropout(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    )
    found = under_corruption({"m": dropped}, X, Y, corruptions=["brightness"], severities=[0, 1], draws=6, seed=2)
    want = by_hand(dropped.predict(mt.shift.corrupt(X, "brightness", 1, seed=2), draws=6, seed=2).predictions, Y)
    assert float(found.divergence[0, 0, 1]) == pytest.approx(want[2], abs=1e-6)


def test_a_network_passed_twice_counts_twice() -> None:
    a, b = net(0), net(1)
    found = under_corruption({"m": [a, a, b]}, X, Y, corruptions=["contrast"], severities=[3], seed=0)
    x = mt.shift.corrupt(X, "contrast", 3, seed=0)
    assert float(found.brier[0, 0, 0]) == pytest.approx(by_hand(torch.stack([a(x), a(x), b(x)]), Y)[1], abs=1e-6)
    pytest.importorskip("plotly")
    assert [list(trace.x) for trace in found.plot().data] == [[3]] * 3


def test_data_for_subspaces_may_be_an_iterator() -> None:
    kinds = variants(walk(0), data=iter([(X, Y)]), floor=0.0, kinds=["random", "diagonal"])
    assert list(kinds) == ["baseline", "random", "diagonal", "weight averaging"]
    assert growth([kinds], (X, Y), draws=2).accuracy.shape == (4, 1)


# -- from a path to the origin -----------------------------------------------------------------------------


def test_triangles_to_the_origin_keep_the_distances_of_the_weights() -> None:
    network, other = net(0), net(1)
    path = tunnel(network, network, other, (X, Y), points=5, steps=5)
    view = stitched(network, path, (X, Y), across=2, radii=3, reach=1.5)
    assert view.share.tolist() == [0, 0.75, 1, 1.5] and view.knots == tuple(range(0, 17, 2))
    at = torch.stack([view.x, view.y], 2)
    for segment, (left, right) in enumerate(zip(path.weights[:-1].double(), path.weights[1:].double(), strict=True)):
        own = at[2 * segment : 2 * segment + 3].flatten(0, 1)
        places = torch.stack([left, (left + right) / 2, right])
        weights = (view.share.view(1, -1, 1) * places.unsqueeze(1)).flatten(0, 1)
        torch.testing.assert_close(torch.cdist(own, own), torch.cdist(weights, weights), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(view.loss[::2, 2], path.scores.loss, rtol=1e-4, atol=1e-5)
    assert view.agreement is not None and view.agreement[0, 0, 2] == view.agreement[1, -1, 2] == 1
    assert view.loss[:, 0].tolist() == pytest.approx([math.log(3)] * 17, rel=1e-6)  # all weights 0
    pytest.importorskip("plotly")
    assert len(view.plot("agreement", end=1).data[0].x) == view.loss.numel()


# -- the whole recipe --------------------------------------------------------------------------------------


@with_data("cifar10")
def test_a_small_run_does_every_piece_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = smoke(main, PIECES, tmp_path, capsys)
    assert min(raw["train"]["accuracy"]) > 0.2  # chance is 0.1
    assert abs(raw["similarity"]["between_runs"]["cosine"]) < 0.1 < raw["similarity"]["within_runs"]["cosine"]
    scores = raw["subspaces"]["diversity"]
    assert scores["independent"]["disagreement"] > scores["trajectory"]["disagreement"] > 0
    assert raw["tunnel"]["barrier"] < raw["tunnel"]["linear_barrier"]
    assert len(raw["tunnel"]["t"]) == len(raw["tunnel"]["stitched"]["x"]) == len(raw["tunnel"]["alone"]["loss"])
    assert set(raw["shift"]["methods"]) <= set(NAMES) and raw["shift"]["svhn"]["baseline"] == 0
    assert all((tmp_path / f"{piece}.json").stat().st_size < 200_000 for piece in PIECES)
    pytest.importorskip("plotly")
    assert len(section(raw).figures) == 9
