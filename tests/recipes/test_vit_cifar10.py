"""The recipe for a vision transformer, and its section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes import vit_cifar10 as recipe
from recipes.recipe import Recipe
from recipes.report import vit_cifar10 as report
from tests.recipes.recipe_cases import raw_of, smoke, with_data

SCALE = recipe.Scale(24, 2, 4, 1, 8, 0, None)


def scores(accuracy: float, nll: float, ece: float = 0.05) -> dict[str, float]:
    return {"accuracy": accuracy, "nll": nll, "ece": ece, **dict.fromkeys(recipe.SCORES[4:], 0.9), "brier": 0.1}


def listed(*each: dict[str, float]) -> dict[str, list[float]]:
    return {name: [one[name] for one in each] for name in each[0]}


def made_up() -> dict[str, Any]:
    about = {"depth": 6, "images": 49500, "epochs": 80, "batch": 512}
    timed = {"single": {"ratio": 1.0}, "packed": {"ratio": 2.5}, "heads": {"ratio": 1.04}, "deep": {"ratio": 4.1}}
    return {
        "deep": about | {"scores": scores(0.90, 0.31, 0.01)},
        "packed": about | {"scores": scores(0.86, 0.44)},
        "heads": about | {"scores": scores(0.85, 0.50)},
        "single": {"scores": listed(scores(0.84, 0.50), scores(0.86, 0.60))},
        "laplace": {
            "draws": 32, "scores": listed(scores(0.8399, 0.45), scores(0.8599, 0.55)), "mixture": scores(0.9, 0.30),
        },
        "costs": {
            "batch": 512, "parameters": {"single": 100, "packed": 101, "heads": 103, "deep": 400},
            "multiply_adds": {"single": 10, "packed": 10, "heads": 10, "deep": 40},
            "training": timed, "inference": timed | {"laplace": {"ratio": 1.2}},
        },
    }  # fmt: skip


def test_networks_have_their_members_and_packed_has_half_the_heads() -> None:
    nets = {name: recipe.convert(name, SCALE) for name in ("deep", "packed", "heads")}
    assert [net.members for net in nets.values()] == [recipe.MEMBERS, recipe.MEMBERS, recipe.HEADS]
    packed = nets["packed"].member(0).blocks[0]
    assert packed.attention.qkv.weight.shape == (3 * 12, 12) and packed.attention.size == 6
    assert nets["deep"].member(0).blocks[0].attention.qkv.weight.shape == (3 * 24, 24)


def test_the_page_gives_means_over_the_members_and_the_prices(tmp_path: Path) -> None:
    made = report.section(raw_of(tmp_path / "vit", made_up()))
    lines = made.text.splitlines()
    assert any(line.startswith("| single network | 85.00 ± 1.41 | 0.550 ± 0.071 |") for line in lines)
    assert "| Packed-(2, 4, 1) | 1.01 | 1.00 | 2.50 | 2.50 |" in lines
    assert "| Laplace on its last layer | – | – | – | 1.20 |" in lines
    assert [claim.holds for claim in made.claims] == [True, True, True]


@pytest.mark.parametrize(
    ("piece", "worse", "index"),
    [("packed", scores(0.84, 0.4), 0), ("packed", scores(0.9, 0.56), 0), ("deep", scores(0.9, 0.3, 0.06), 1)],
)
def test_a_claim_fails_if_one_of_its_numbers_fails(tmp_path: Path, piece: str, worse: Any, index: int) -> None:
    results = made_up()
    results[piece]["scores"] = worse
    assert report.section(raw_of(tmp_path / "vit", results)).claims[index].holds is False


def test_claims_without_results_are_not_measured(tmp_path: Path) -> None:
    results = {"deep": made_up()["deep"]}
    made = report.section(raw_of(tmp_path / "vit", results))
    assert [claim.holds for claim in made.claims] == [None] * 3 and "| single network |" not in made.text


@with_data("cifar10")
def test_the_recipe_runs_at_its_small_scale(tmp_path: Path, capsys: Any) -> None:
    raw = smoke(Recipe("vit_cifar10", recipe.__doc__, recipe.PIECES).run, recipe.PIECES, tmp_path / "out", capsys)
    found = {method: report.scores_of(raw, method) for method in report.METHODS}
    assert all(own is not None and 0 < own["accuracy"][0] < 1 for own in found.values())
    assert len(found["single"]["nll"]) == len(found["laplace"]["nll"]) == recipe.MEMBERS
    assert report.section(raw).title
