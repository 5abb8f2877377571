"""The recipe of spatial smoothing: measures against closed forms, the section, and a smoke run."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import multitudes as mt
from multitudes.lab.data import Data, Part
from multitudes.shift import fgsm, translated
from recipes import smoothing, smoothing_measures
from recipes.recipe import Recipe
from recipes.report.raw import Raw
from recipes.report.smoothing import section
from recipes.report.smoothing_claims import smallest
from recipes.report.smoothing_networks import roughness
from tests.recipes.recipe_cases import DATA, raw_of, smoke, with_data


def tiny_data(rows: int = 12) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (rows, 3, 8, 8), generator=generator).to(torch.uint8)
    part = Part(x, torch.arange(rows) % 3)
    return Data("noise", part, part, part, ("a", "b", "c"))


def tiny_net(p: float = 0.5) -> mt.Multitude:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return mt.mc_dropout(nn.Sequential(*layers), p, "activation").eval()


# -- measures ----------------------------------------------------------------------------------------------


def test_a_network_for_images_includes_the_preprocessing():
    data, net = tiny_data(), tiny_net()
    images = data.scaled(data.test.x)
    whole = smoothing_measures.on_images(net, data, draws=5)
    own = net.predict(data.preprocess(images), draws=5, seed=3)
    torch.testing.assert_close(whole.predict(images, seed=3).predictions, own.predictions)
    assert smoothing_measures.on_images(net, data, draws=2).draws == 2 and whole.draws == 5


def test_consistency_equals_its_definition():
    data = tiny_data()
    net = smoothing_measures.on_images(tiny_net(p=0.0), data, draws=1)
    images = data.scaled(data.test.x)
    found = smoothing_measures.consistency_of(net, images, data.test.y, steps=3)
    with torch.no_grad():
        probs = torch.stack(
            [net.network(frame).softmax(1) for frame in translated(images, 3, direction="random", seed=0)]
        )
    labels = probs.argmax(2)
    stayed = (labels[1:] == labels[:-1]).float().mean()
    entropy = -(probs[:-1] * probs[1:].log()).sum(2).mean()
    sure = (probs[:, torch.arange(12), data.test.y] / probs.amax(2)).mean()
    assert found["consistency"] == pytest.approx(float(stayed), abs=1e-4)
    assert found["cross_entropy"] == pytest.approx(float(entropy), rel=1e-4)
    assert found["relative_confidence"] == pytest.approx(float(sure), rel=1e-4)


def test_an_attack_moves_a_linear_network_by_its_radius():
    torch.manual_seed(0)
    net = mt.Multitude(nn.Sequential(nn.Flatten(), nn.Linear(6, 2, bias=False))).eval()
    weight = net.network[1].weight.data
    weight[0] = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, -0.5])
    weight[1] = 0  # the margin of class 0 is w x, and an attack takes epsilon |w|_1 from it
    x = 0.3 + 0.4 * torch.rand(200, 6)
    margins = x @ weight[0]
    y = (margins < 0).long()  # all right before the attack
    kinds = {"fgsm": partial(fgsm, epsilon=0.05)}
    found = smoothing_measures.attacks_on(net, net, x, y, kinds)
    held = float((margins.abs() > 0.05 * weight[0].abs().sum()).float().mean())
    assert 0 < held < 1
    assert found["clean"]["accuracy"] == 1 and found["clean"]["success_rate"] == 0
    assert found["fgsm"]["accuracy"] == pytest.approx(held, abs=1e-4)
    assert found["fgsm"]["success_rate"] == pytest.approx(1 - held, abs=1e-4)
    assert found["fgsm"]["nll"] > found["clean"]["nll"]


def test_weight_decay_moves_the_largest_eigenvalue():
    data, net = tiny_data(), tiny_net()
    own = partial(smoothing_measures.spectrum_of, net, data, batches=2, batch_size=6, iterations=200)
    plain, decayed = own(weight_decay=0.0), own(weight_decay=1.0)
    for before, after in zip(plain["largest"], decayed["largest"], strict=True):
        assert after == pytest.approx(before + 1, rel=0.1)


def test_the_centre_of_a_landscape_has_the_loss_of_the_network():
    data, net = tiny_data(), tiny_net(p=0.0)
    found = smoothing_measures.landscape_of(net, data, images=12, points=3)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net.network(data.preprocess(data.scaled(data.train.x))), data.train.y)
    assert found["axis"] == [-1, 0, 1] and len(found["loss"]) == 3
    assert found["loss"][1][1] == found["centre"] == pytest.approx(float(loss), rel=1e-4)


def test_heads_have_their_layers():
    layers = {head: list(smoothing.build(head, True, 16).network.modules()) for head in smoothing.HEADS}
    smoothings = {head: sum(isinstance(m, mt.layers.Smooth) for m in layers[head]) for head in layers}
    assert smoothings == {"mlp": 0, "gap": 0, "smooth": 3}
    widths = {head: [m.out_features for m in layers[head] if isinstance(m, nn.Linear)] for head in layers}
    assert widths == {"mlp": [16, 16, 10], "gap": [10], "smooth": [10]}
    rates = {head: [m.p for m in layers[head] if type(m).__name__ == "Dropout"] for head in layers}
    assert rates == {"mlp": [0.3] * 3 + [0.5] * 2, "gap": [0.3] * 3, "smooth": [0.3] * 3}


@pytest.mark.parametrize(("piece", "message"), [("consistency", "multitudes compare"), ("hessian", "train_mlp")])
def test_an_error_names_what_to_run_first(tmp_path, monkeypatch, piece, message):
    monkeypatch.setattr(smoothing, "cifar10", lambda recipe: tiny_data())
    recipe = Recipe("smoothing", None, smoothing.PIECES)
    with pytest.raises(ValueError, match=message):
        recipe.run(["--data-root", str(tmp_path), "--out", str(tmp_path / "smoothing"), "--only", piece])


# -- the section -------------------------------------------------------------------------------------------


def test_numbers_of_the_section():
    assert smallest({1: 0.3, 2: 0.25, 3: 0.2}, 0.25) == 2 and smallest({1: 0.3}, 0.2) is None
    grid = [[x**2 + 3.0 * y for x in range(4)] for y in range(5)]
    assert roughness(grid) == pytest.approx((2 * 10 + 0 * 12) / 22)
    assert roughness([[None, 1.0, 2.0], [None, 1.0, 2.0], [None, 1.0, 2.0]]) == 0


def a_job(nll: list[float], error: float = 0.1) -> dict[str, Any]:
    training = {"epochs": 40, "batch_size": 512, "lr": 0.2, "schedule": "cosine", "precision": "bfloat16"}
    scores = {"nll": nll[-1], "accuracy": 1 - error, "ece": 0.02}
    scores |= {f"shift/mean/{level}/{name}": level * value for level in (1, 5) for name, value in scores.items()}
    by_size = {"sizes": [1, 2, 50][: len(nll)], "nll": nll, "accuracy": [0.9] * len(nll), "ece": [0.02] * len(nll)}
    return {
        "config": {"training": training, "evaluation": {"draws": 50, "bins": 10}},
        "scores": scores,
        "by_size": by_size,
        "losses": [2.0, nll[-1] / 2],
    }


def some_pieces() -> dict[str, Any]:
    scores = {"accuracy": 0.5, "nll": 1.0, "ece": 0.1, "success_rate": 0.0}
    struck = {"single": (0.6, 0.8), "smooth": (0.5, 0.8), "mc_dropout": (0.4, 0.4), "smooth_dropout": (0.5, 0.2)}
    moving = {"cross_entropy": 0.01, "relative_confidence": 0.99, "images": 10, "steps": 2, "draws": 50}
    about = {"images": 10, "gradient_draws": 5, "pgd_steps": 10, "draws": 50}
    steady = {"single": 0.97, "smooth": 0.98, "mc_dropout": 0.98, "smooth_dropout": 0.97}
    scored = {"nll": 0.3, "accuracy": 0.9, "ece": 0.02, "images": 100, "draws": 10}
    plane = {"axis": [-1, 0, 1], "loss": [[9, 2, None], [2, 0.1, 2], [9, 2, 9]], "centre": 0.1, "images": 100}
    spectrum = {"residuals": [0.1, 0.2], "batch_size": 128, "iterations": 30}
    return {
        "consistency": {name: {"consistency": value, **moving} for name, value in steady.items()},
        "attacks": {"about": about}
        | {
            name: {
                "clean": scores,
                "fgsm-1": scores | {"success_rate": weak},
                "pgd-2": scores | {"success_rate": strong},
            }
            for name, (weak, strong) in struck.items()
        },
        "train_gap": {"parameters": 11_000_000, "epochs": 25, "train": scored, "test": scored},
        "hessian": {
            "mlp": {"largest": [9.0, 30.0], **spectrum},
            "gap": {"largest": [5.0, 8.0], **spectrum},
            "smooth": {"largest": [2.0, 3.0], **spectrum},
        },
        "planes": {"mlp": plane, "gap": plane},
    }


def test_the_section_has_numbers_claims_and_figures(tmp_path):
    plain = {"mc_dropout-0": a_job([0.3, 0.25, 0.2]), "mc_dropout-1": a_job([0.3, 0.25, 0.22])}
    smoothed = {"smooth_dropout-0": a_job([0.25, 0.21, 0.15]), "smooth-0": a_job([0.29], error=0.09)}
    resnet18 = raw_of(tmp_path / "resnet18", {"single-0": a_job([0.3]), **plain, **smoothed})
    worse = {"mc_dropout-0": a_job([0.5, 0.45, 0.4]), "smooth_dropout-0": a_job([0.5, 0.45, 0.3])}
    vgg16 = raw_of(tmp_path / "vgg16", worse)
    made = section(raw_of(tmp_path / "smoothing", some_pieces()), resnet18, vgg16)
    holds = [claim.holds for claim in made.claims]
    assert holds[:6] == [True, True, True, False, False, True]  # MC dropout's error and both ECE stay as they are
    assert holds[6:12] == [False, False, None, None, None, None]  # of VGG-16 half is there
    assert holds[12:] == [False, True, True]
    assert "fewest draws: 50" in made.claims[7].numbers and "0.2100 with 50 draws" in made.claims[0].numbers
    assert "single network 10.00 %, single network + Smooth 9.00 %" in made.claims[3].numbers
    assert set(made.figures) == {"by_size", "corruptions", "hessian", "planes"}
    assert all(f"(smoothing/{name}.svg)" in made.text for name in made.figures)
    assert (
        "| MC dropout | 0.210 ± 0.014 | 90.0 ± 0.0 | 2.00 ± 0.00 | 0.105 ± 0.007 | 0.157 | 95.2 | 1.14 |" in made.text
    )
    assert "| single network + Smooth | – | – | – | – | 0.376 | 93.2 | 5.49 |" in made.text
    assert "| single network | 50.0 | 50.0 / 60.0 | 50.0 / 80.0 | 28.3 / 62.9 | 7.5 / 90.1 |" in made.text
    assert all(len(figure.data) for figure in made.figures.values())


def test_the_section_works_without_results(tmp_path):
    made = section(*(Raw(tmp_path / name) for name in "abc"))
    assert {claim.holds for claim in made.claims} == {None} and not made.figures


# -- all of it ---------------------------------------------------------------------------------------------


@with_data("cifar10")
def test_the_recipe_at_its_small_scale(tmp_path, capsys):
    from multitudes.lab.study.run import worker as job
    from multitudes.lab.study.spec.planning import prepare
    from multitudes.lab.study.spec.specification import Spec

    network = "mt.models.CifarResNet(8, outputs, width=8)"
    (tmp_path / "tiny.py").write_text(
        f"import multitudes as mt\n\n\ndef build(shape, outputs):\n    return {network}\n"
    )
    dropout = {"p": 0.3, "layers": "block"}
    methods = {"single": {}, "smooth": {"growing": True}, "mc_dropout": dropout}
    spec = Spec.of(
        data=f"{DATA}/cifar10", model=f"{tmp_path / 'tiny.py'}:build", limit=200, validation=0.02,
        methods={**methods, "smooth_dropout": {"growing": True, **dropout}}, epochs=1, draws=2, sizes=[1, 2], shift=[],
    )  # fmt: skip
    for each in prepare(spec, tmp_path / f"{smoothing.STUDY}-smoke").missing:
        job.run(each.directory, "cpu")
    run = Recipe("smoothing", None, smoothing.PIECES).run
    raw = smoke(run, smoothing.PIECES, tmp_path / "smoothing", capsys)
    assert len({json.dumps(piece["data"]) for piece in raw.pieces.values()}) == 1
    for method in smoothing.METHODS:
        assert 0.5 < raw["consistency"][method]["consistency"] <= 1
        assert raw["attacks"][method]["fgsm-4"]["nll"] > raw["attacks"][method]["clean"]["nll"]
    for head in smoothing.HEADS:
        assert raw[f"train_{head}"]["loss"][-1] < 2.6 and min(raw["hessian"][head]["largest"]) > 0
        assert raw["planes"][head]["loss"][0][0] > raw["planes"][head]["centre"]
    assert len(section(raw, Raw(tmp_path / "none"), Raw(tmp_path / "none")).figures) == 2
