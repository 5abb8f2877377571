"""The recipe of ensemble model patching on the UCI sets, and what the page says of it."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multitudes as mt
from recipes import patching_uci as recipe
from recipes.report import patching_uci as report
from recipes.report.raw import Raw
from tests.recipes.recipe_cases import raw_of, smoke, with_data


@pytest.fixture
def splits() -> list[tuple[Tensor, Tensor]]:
    """Three splits of 230 training rows, in batches of 100, 100 and 30, and 20 test rows."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(250, 4, generator=generator) for _ in range(3)]
    return [(x, x[:, :1] + x[:, 1:2].sin()) for x in inputs]


def alone(net: recipe.Splits, index: int) -> recipe.Splits:
    """One member, with nothing beside it."""
    member = net.member(index)
    return recipe.Splits([member.network if isinstance(member, mt.Multitude) else member], 1)


# -- splits as members -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", recipe.METHODS)
def test_a_split_among_others_is_trained_like_a_single_one(
    method: str, splits: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def uniform(layer: Any, shape: Any, like: Tensor) -> Tensor:  # the same numbers for whoever makes the same steps
        nonlocal calls
        calls += 1
        return torch.from_numpy(np.random.default_rng(calls).random(tuple(shape), dtype="float32"))

    monkeypatch.setattr(mt.Stochastic, "uniform", uniform)
    together = recipe.members(method, splits, hidden=8)
    apart = [alone(together, index) for index in range(together.members)]
    before = [member.model[-1].weight.clone() for member in together.network]
    recipe.train(together, recipe.Rows(230, seed=1), epochs=8)
    for member, was in zip(together.network, before, strict=True):
        assert (member.model[-1].weight - was).abs().min() > 0
    for index, net in enumerate(apart):
        calls = 0
        recipe.train(net, recipe.Rows(230, seed=1), epochs=8)
        ours, theirs = (
            dict(member.named_parameters()) | dict(member.named_buffers())
            for member in (together.network[index], net.network[0])
        )
        assert ours.keys() == theirs.keys()
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4, msg=name)
    assert (calls > 0) == (method not in ("ensemble", "norm"))


def test_members_have_their_own_noise(splits: list[tuple[Tensor, Tensor]]) -> None:
    same = [splits[0]] * 2
    for method in ("ecmp", "emp", "dropout"):
        net = recipe.members(method, same, hidden=8)
        net.network[1].load_state_dict(net.network[0].state_dict())
        torch.manual_seed(0)
        errors = torch.stack([net(torch.arange(100)) for _ in range(20)])
        assert not torch.equal(errors[:, 0], errors[:, 1]), method


def test_the_loss_is_the_sum_of_the_members_own(splits: list[tuple[Tensor, Tensor]]) -> None:
    net = recipe.members("ensemble", splits, hidden=8)
    rows = torch.tensor([3, 7, 9])
    want = 0.0
    for index in range(15):
        x, y = splits[index // 5]
        model = net.member(index).model
        want += nn.functional.mse_loss(model(x[rows]), y[rows]).item()
    assert net.loss(rows, rows).item() == pytest.approx(want, rel=1e-5)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    rows = recipe.Rows(230, seed=3)
    epochs = [[x for x, _ in rows] for _ in range(2)]
    assert [len(batch) for batch in epochs[0]] == [100, 100, 30] and len(rows) == 3
    orders = [torch.cat(batches) for batches in epochs]
    assert all(order.sort().values.tolist() == list(range(230)) for order in orders)
    assert not torch.equal(*orders)
    assert torch.equal(orders[0], torch.cat([x for x, _ in recipe.Rows(230, seed=3)]))


def test_patched_networks_have_the_papers_layers() -> None:
    for method, assignment in (("ecmp", "element"), ("emp", "layer")):
        model = recipe.network(method, 4, 50)
        assert [type(layer).__name__ for layer in model.children()] == [
            "PatchedBatchNorm", "Linear", "ReLU", "PatchedBatchNorm", "Linear",
        ]  # fmt: skip
        for norm in (model[0], model[3]):
            assert norm.weight.shape[0] == 5 and norm.assignment == assignment
            torch.testing.assert_close(norm.weight.mean(0), torch.full_like(norm.weight[0], 0.2))
            assert norm.weight.std(0).min() > 0


def test_epochs_make_the_steps_and_are_never_more_than_the_papers() -> None:
    assert recipe.epochs_of(455, 8000) == 1600
    assert recipe.epochs_of(277, 50_000) == 4000


# -- measuring ---------------------------------------------------------------------------------------------


def test_errors_are_those_of_each_split_however_many_rows_at_once(splits: list[tuple[Tensor, Tensor]]) -> None:
    net = recipe.members("ensemble", splits, hidden=8)
    rows = torch.arange(230, 250)
    errors = recipe.errors(net, rows, 3, at_once=7)
    assert errors.shape == (3, 5, 20)
    for index in range(15):
        x, y = splits[index // 5]
        want = (net.member(index).model(x[rows]) - y[rows])[:, 0]
        torch.testing.assert_close(errors[index // 5, index % 5], want)
    patched = recipe.members("emp", splits, hidden=8)
    patched.draws = 6
    torch.testing.assert_close(recipe.errors(patched, rows, 3, at_once=7), recipe.errors(patched, rows, 3))
    assert recipe.errors(patched, rows, 3).shape == (3, 6, 20)


def test_numbers_are_in_the_targets_own_units() -> None:
    test, training, std = torch.tensor([[0.1, -0.3], [0.3, 0.1]]), torch.tensor([[0.2, -0.2]]), 5.0
    numbers = recipe.measured(test, training, std)
    assert numbers["rmse"] == pytest.approx(math.sqrt((1.0**2 + 0.5**2) / 2), rel=1e-4)

    def density(precision: float) -> float:
        def normal(error: float) -> float:
            return math.sqrt(precision / (2 * math.pi)) * math.exp(-precision * error**2 / 2)

        return statistics.fmean(math.log((normal(a) + normal(b)) / 2) for a, b in ((0.5, 1.5), (-1.5, 0.5)))

    assert numbers["log_density"] == pytest.approx(density(0.1), rel=1e-4)
    assert numbers["log_density_fitted"] == pytest.approx(density(1.0), rel=1e-4)  # training errors are 1 unit


# -- the page ----------------------------------------------------------------------------------------------


def made_up(folder: Path, names: list[str], **rmse: list[float]) -> Raw:
    numbers = {
        method: {"rmse": values, "log_density": [-v for v in values], "log_density_fitted": [-v for v in values]}
        for method, values in rmse.items()
    }
    result = {"splits": 3, "rows": [90, 10], "epochs": 7, "draws": 9, "target_std": 15.1, "methods": numbers}
    return raw_of(folder, dict.fromkeys(names, result), scale="full", seconds=3.0)


def test_the_page_shows_our_numbers_and_those_of_the_paper(tmp_path: Path) -> None:
    raw = made_up(
        tmp_path, ["yacht", "yacht-own"], ecmp=[1.0, 2.0, 3.0], emp=[2.0] * 3, dropout=[9.0] * 3, ensemble=[3.0] * 3
    )
    section = report.section(raw)
    assert "| Yacht, ours | 2.00 ± 0.58 | 2.00 ± 0.00 | 9.00 ± 0.00 | 3.00 ± 0.00 |" in section.text
    assert "| Yacht, paper | 1.59 ± 0.23 | 1.60 ± 0.28 | 12.90 ± 1.26 | 29.48 ± 5.14 |" in section.text
    assert "Boston" not in section.text and "targets as they are" in section.text
    assert [claim.holds for claim in section.claims] == [None] * 5
    assert "relative" in section.figures


def test_the_section_works_without_results(tmp_path: Path) -> None:
    section = report.section(Raw(tmp_path / "none"))
    assert not section.figures and all(claim.holds is None for claim in section.claims)


def test_claims_follow_from_the_numbers(tmp_path: Path) -> None:
    names = list(report.NAMES)
    worse, better = [3.0, 3.1, 2.9], [1.0, 1.1, 0.9]
    raw = made_up(tmp_path, names, ecmp=better, emp=worse, dropout=[2.0, 2.2, 1.9], ensemble=worse, norm=better)
    assert [claim.holds for claim in report.section(raw).claims] == [True, True, True, False, False]
    raw = made_up(tmp_path, names, ecmp=worse, emp=worse, dropout=worse, ensemble=better, norm=[4.0, 4.2, 3.8])
    assert [claim.holds for claim in report.section(raw).claims] == [False, False, False, False, True]
    raw = made_up(tmp_path, names, ecmp=better, emp=worse, dropout=worse, ensemble=worse)
    assert report.section(raw).claims[-1].holds is None


def test_the_papers_own_tables_are_read_as_the_paper_says() -> None:
    tables = ((report.TABLE_12, min, "rmse"), (report.TABLE_13, max, "log_density"))
    for paper, best, what in tables:
        ahead = []
        for name, row in paper.items():
            methods = {method: {what: [mean]} for method, (mean, _) in zip(report.METHODS, row, strict=True)}
            if report.patched_is_best({"methods": methods}, what, best):
                ahead.append(name)
        assert set(report.NAMES) - set(ahead) == {"power"} and len(ahead) == report.AHEAD


# -- real data ---------------------------------------------------------------------------------------------


@with_data("uci")
def test_the_recipe_learns_something_of_every_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = smoke(recipe.main, recipe.PIECES, tmp_path, capsys)
    for name in recipe.SETS:
        result = raw[name]
        for method in recipe.METHODS:
            errors = result["methods"][method]["rmse"]
            assert len(errors) == 3 and statistics.fmean(errors) < result["target_std"], (name, method)
    assert "smoke scale" in report.section(raw).text
