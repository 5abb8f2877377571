"""The recipe for attacks on variance networks, and what its page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import multitudes as mt
from multitudes.lab.data import Data
from multitudes.methods.dropout import Dropout
from multitudes.methods.variance.kl import approximate_kl
from multitudes.methods.variance.layers import variance_layers
from recipes import variance_attacks as recipe
from recipes.recipe import Recipe
from recipes.report import variance_attacks as report
from recipes.report.raw import Raw
from tests.recipes.recipe_cases import noise, raw_of, smoke, with_data


@pytest.fixture
def data() -> Data:
    return noise(12, 3, 16, 16)


SCALE = recipe.Scale(1, 4, 1e-3, 4, 16, None, 2, 3, 10)


# -- networks ----------------------------------------------------------------------------------------------


def test_the_variance_layers_are_the_last_three_convolutions_and_the_first_dense_layer() -> None:
    net = recipe.variance(4)
    convolutions = [name for name, layer in net.named_modules() if isinstance(layer, nn.Conv2d)]
    assert list(variance_layers(net)) == [*convolutions[-3:], "classifier.1"]
    order = [name for name, layer in net.named_modules() if isinstance(layer, (Dropout, nn.Conv2d))]
    assert order[-6:] == ["features.36", *convolutions[-3:], "classifier.0", "classifier.4"]  # none in between


def test_a_network_of_pixels_standardises_images(data: Data) -> None:
    network = recipe.plain(4).network.eval()
    x = data.scaled(data.test.x)
    of_pixels = recipe.of_pixels(network, data)
    torch.testing.assert_close(of_pixels(x), network(data.preprocess(x)), atol=1e-5, rtol=1e-5)


def test_targets_are_other_classes_and_all_of_them() -> None:
    labels = torch.arange(10).repeat(200)
    wanted = recipe.targets(labels, 10)
    assert (wanted != labels).all() and wanted.min() >= 0 and wanted.max() < 10
    moves = ((wanted - labels) % 10).bincount(minlength=10)
    assert moves[0] == 0 and moves[1:].min() > 150
    assert torch.equal(wanted, recipe.targets(labels, 10))


def test_an_attack_in_batches_moves_pixels_towards_the_targets(data: Data) -> None:
    torch.manual_seed(0)
    linear = mt.Multitude(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10)))
    found = recipe.attacked(linear, data, SCALE, None, batch=4)
    assert {len(values) for values in found.values()} == {SCALE.steps + 1}
    assert found["success"][0] == 0 and found["success"][-1] > 0
    again = recipe.attacked(linear, data, SCALE, None, batch=10)  # the same, but for rounding: it does not draw
    assert found.keys() == again.keys() and all(found[name] == pytest.approx(again[name], abs=2e-5) for name in found)


def test_an_ensemble_of_missing_networks_names_the_piece_to_run(tmp_path: Path) -> None:
    work = Recipe(report.NAME, None, {"variance_ensemble": recipe.PIECES["variance_ensemble"]})
    with pytest.raises(ValueError, match=r"variance-0.safetensors' is missing: run the piece variance-0 first"):
        work.run(["--data-root", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"])


# -- the page ----------------------------------------------------------------------------------------------


def curve(success: float, entropy: list[float]) -> dict[str, list[float]]:
    return {"success": [0.0, success / 2, success], "entropy": entropy, "accuracy": [0.9, 0.5, 0.1]}


def results() -> dict[str, dict[str, Any]]:
    net = {"epochs": 2, "batch": 50, "images": 200, "attacked_images": 40, "stochastic": 0.9, "ensemble": 0.93}
    net |= {"log_alpha": {}, "log_alpha_rate": 0.01, "memory": 0.99}
    alphas = {"features.40": 15.0, "classifier.1": 12.0}
    return {
        "dropout-0": net | {"deterministic": 0.93, "attacks": {
            "dropout, deterministic": curve(0.9, [0.2, 0.2, 0.1]), "dropout": curve(0.8, [0.3, 0.3, 0.2])}},
        "variance-0": net | {"deterministic": 0.1, "log_alpha": alphas,
                             "attacks": {"variance": curve(0.6, [0.4, 0.5, 0.6])}},
        "deep_ensemble": {"members": 3, "ensemble": 0.94, "attacks": {"deep ensemble": curve(0.7, [0.3, 0.3, 0.2])}},
        "variance_ensemble": {"members": 3, "ensemble": 0.94,
                              "attacks": {"variance ensemble": curve(0.5, [0.5, 0.6, 0.7])}},
    }  # fmt: skip


def test_the_page_works_without_some_pieces(tmp_path: Path) -> None:
    section = report.section(Raw(tmp_path))
    assert "| variance | 91.3 | – | 10.0 | – | 93.4 | – |" in section.text
    assert {claim.holds for claim in section.claims} == {None} and not section.figures


@pytest.mark.parametrize(("steps", "rate", "memory"), [(400, 0.01, 0.999), (400, 0.05, 0.99), (300, 0.2, 0.9)])
def test_alpha_under_the_divergence_equals_adam_of_torch(steps: int, rate: float, memory: float) -> None:
    log_alpha = nn.Parameter(torch.tensor(report.START, dtype=torch.float64))
    optimizer = torch.optim.Adam([log_alpha], lr=rate, betas=(0.9, memory))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (1e4 * approximate_kl(log_alpha)).backward()
        optimizer.step()
        schedule.step()
    assert report.driven(steps, rate, memory) == pytest.approx(min(log_alpha.item(), 20.0), abs=1e-3)


def test_claims_are_read_from_the_numbers(tmp_path: Path) -> None:
    section = report.section(raw_of(tmp_path, results()))
    assert [claim.holds for claim in section.claims] == [True] * 5
    assert "features.40 15.0, classifier.1 12.0" in section.text and "in the 8 steps made here" in section.text
    assert [trace.name for trace in section.figures["success"].data] == list(report.CURVES)
    assert "features.40 15.0, classifier.1 12.0" in section.text
    worse = results()
    worse["variance-0"]["attacks"]["variance"] = curve(1.0, [0.4, 0.1, 0.1])
    assert [claim.holds for claim in report.claims(raw_of(tmp_path, worse))] == [True, False, True, False, False]


# -- for real ----------------------------------------------------------------------------------------------


@with_data("cifar10")
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = smoke(Recipe(report.NAME, recipe.__doc__, recipe.PIECES).run, recipe.PIECES, tmp_path, capsys)
    assert list(report.attacks(raw)) == list(report.CURVES)
    for name in ("dropout-0", "variance-0", "variance_ensemble"):
        assert raw[name]["ensemble"] > 0.13, name  # so short a training is only just above chance
    steps = raw["variance-0"]["epochs"] * (raw["variance-0"]["images"] // raw["variance-0"]["batch"])
    way = report.driven(steps, recipe.LOG_ALPHA_RATE, recipe.MEMORY)  # which data hardly matter for so early
    assert raw["variance-0"]["log_alpha"] == pytest.approx(dict.fromkeys(recipe.VARIANCE_LAYERS, way), abs=0.05)
    report.section(raw)
