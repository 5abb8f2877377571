"""The analyses of the loss landscape that are part of its recipe: under corruption, and from a path to the origin."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.landscape import growth, tunnel
from recipes.landscape_shift import under_corruption, variants
from recipes.tunnel_to_origin import stitched
from tests.landscape.test_diversity_plane import X, Y, by_hand, net, walk

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


def test_layers_that_draw_draw_alike_for_every_image() -> None:
    dropped = mt.mc_dropout(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    )
    found = under_corruption({"m": dropped}, X, Y, corruptions=["brightness"], severities=[0, 1], draws=6, seed=2)
    want = by_hand(dropped.predict(mt.shift.corrupt(X, "brightness", 1, seed=2), draws=6, seed=2).predictions, Y)
    assert float(found.divergence[0, 0, 1]) == pytest.approx(want[2], abs=1e-6)


def test_a_network_that_is_given_twice_counts_twice() -> None:
    a, b = net(0), net(1)
    found = under_corruption({"m": [a, a, b]}, X, Y, corruptions=["contrast"], severities=[3], seed=0)
    x = mt.shift.corrupt(X, "contrast", 3, seed=0)
    assert float(found.brier[0, 0, 0]) == pytest.approx(by_hand(torch.stack([a(x), a(x), b(x)]), Y)[1], abs=1e-6)
    pytest.importorskip("plotly")
    assert [list(trace.x) for trace in found.plot().data] == [[3]] * 3


def test_data_for_subspaces_may_come_only_once() -> None:
    kinds = variants(walk(0), data=iter([(X, Y)]), floor=0.0, kinds=["random", "diagonal"])
    assert list(kinds) == ["baseline", "random", "diagonal", "weight averaging"]
    assert growth([kinds], (X, Y), draws=2).accuracy.shape == (4, 1)


# -- from a path to the origin -----------------------------------------------------------------------------


def test_a_path_and_the_origin_are_laid_out_at_the_distances_of_the_weights() -> None:
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
