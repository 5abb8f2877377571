"""The recipe for variance networks on MNIST, and what its page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import multitudes as mt
from multitudes.lab.data import Data, Loader
from multitudes.methods.variance import kappa
from multitudes.methods.variance.layers import VarianceLinear
from recipes import variance_mnist as recipe
from recipes.recipe import Recipe
from recipes.report import variance_mnist as report
from recipes.report.raw import Raw
from tests.recipes.recipe_cases import noise, raw_of, smoke, with_data


@pytest.fixture
def data() -> Data:
    return noise(30, 1, 28, 28)


# -- networks and their training ---------------------------------------------------------------------------


def test_measurements_are_denser_at_the_start_and_the_end() -> None:
    for epochs, records in ((1, 1), (2, 20), (100, 20)):
        at = sorted(recipe.record_epochs(epochs, records))
        assert at[0] >= 1 and at[-1] == epochs and len(at) <= records
    gaps = torch.tensor(sorted(recipe.record_epochs(100, 20))).diff()
    assert gaps[:5].max() < gaps[-5:].min()


@pytest.mark.parametrize(
    ("parameterization", "rates"),
    [
        ("layer", {"log_alpha": recipe.SHARED_RATE}),
        ("neuron", {"log_alpha": recipe.SHARED_RATE}),
        ("weight", {"log_alpha": recipe.OWN_RATE}),
        ("additive", {"log_sigma": recipe.OWN_RATE}),
        ("zero", {}),
    ],
)
def test_parameters_of_the_variance_have_their_own_learning_rate(
    parameterization: str, rates: dict[str, float]
) -> None:
    net = recipe.variance(parameterization)
    found = {id(p): group["lr"] for group in recipe.optimizer(net).param_groups for p in group["params"]}
    named = dict(net.named_parameters())
    assert {name: found[id(p)] for name, p in named.items()} == {
        name: rates.get(name.rpartition(".")[2], recipe.RATE) for name in named
    }


def test_dropout_has_a_layer_before_each_dense_one() -> None:
    net = recipe.dropout()
    rates = [module.p for module in net.modules() if type(module).__name__ == "Dropout"]
    assert rates == [0.5, 0.5]


# -- measures ----------------------------------------------------------------------------------------------


def test_accuracy_and_elbo_are_those_of_the_definition(data: Data) -> None:
    net = recipe.variance()
    loader = Loader(data.test, data, 20, shuffle=False)
    x = data.preprocess(data.scaled(data.test.x))
    with torch.no_grad():
        expected = net.eval()(x, draws=0)[0]
    right = (expected.argmax(1) == data.test.y).float().mean().item()
    assert recipe.accuracy(net, loader, draws=0) == pytest.approx(right, abs=1e-5)
    nn.init.constant_(net.network.fc1.log_alpha, -20.0)  # hardly any noise: the log-likelihood is the deterministic one
    bound = -nn.functional.cross_entropy(expected, data.test.y, reduction="sum") - net.kl()
    assert recipe.elbo(net, loader) == pytest.approx(bound.item(), rel=1e-4)


def test_a_centred_network_keeps_its_variances_and_has_no_expectations() -> None:
    net = recipe.variance("neuron")
    with torch.no_grad():
        net.network.fc1.log_alpha.uniform_(-1, 1)
    layer = recipe.centred(net).network.fc1
    assert isinstance(layer, VarianceLinear) and not layer.mean().any()
    torch.testing.assert_close(layer.variance(), net.network.fc1.variance())
    torch.testing.assert_close(layer.bias, net.network.fc1.bias)
    assert net.network.fc1.mean().any()  # the network itself is as it was


def test_log_alphas_have_their_range_and_zero_centred_layers_none() -> None:
    net = recipe.variance("neuron")
    with torch.no_grad():
        net.network.fc1.log_alpha.copy_(torch.linspace(-1, 3, 500).view(-1, 1))
    assert recipe.log_alphas(net) == {"fc1": pytest.approx([-1.0, 1.0, 3.0], abs=1e-3)}
    assert recipe.log_alphas(recipe.variance("zero")) == {}


def test_every_weight_is_in_one_bin_of_the_histogram() -> None:
    kappas = torch.tensor([0.0, 1e-30, 2.0, -2.0, 1e9])
    counts = recipe.histogram(kappas)
    assert len(counts) == recipe.BINS and sum(counts) == 5
    width = (recipe.LAST_BIN - recipe.FIRST_BIN) / recipe.BINS
    assert counts[0] == 2 and counts[-1] == 1 and counts[int((0.30103 - recipe.FIRST_BIN) / width)] == 2


def test_a_share_of_the_weights_lies_below_the_threshold() -> None:
    kappas = torch.randperm(1001).float() * torch.where(torch.rand(1001) < 0.5, -1, 1)
    for share in (0.0, 0.5, 0.98):
        below = (kappas.abs() < recipe.threshold_of(kappas, share)).float().mean().item()
        assert below == pytest.approx(share, abs=0.001)


def test_a_sparse_network_has_as_many_weights_fixed_as_it_should(data: Data) -> None:
    net = mt.variance(recipe.lenet(nn.Softplus()), ["fc1"], seed=0)
    x, y = next(iter(Loader(data.train, data, 10, shuffle=False)))
    kappas = kappa(net, x, y)["fc1"]
    found = recipe.sparse(net, recipe.threshold_of(kappas, 0.9), 3.0, Loader(data.test, data, 30), draws=2)
    assert found["fixed"] == pytest.approx(0.9, abs=0.001)
    assert found["threshold"] == pytest.approx(3 * recipe.threshold_of(kappas, 0.9), rel=1e-3)
    assert 0 <= found["zero"] <= 1 and 0 <= found["mean"] <= 1


# -- the page ----------------------------------------------------------------------------------------------


def result(deterministic: float, ensemble: float, elbo: float | None = None) -> dict[str, Any]:
    return {
        "epochs": 3, "batch": 50, "images": 1000, "draws": 5, "rates": [2e-3, 0.5, 5e-3], "stochastic": ensemble - 0.02,
        "deterministic": deterministic, "ensemble": ensemble, "centred": ensemble, "elbo": elbo,
        "log_alpha": {"fc1": [6.5, 6.5, 6.5]}, "curve": [],
    }  # fmt: skip


def phase_result() -> dict[str, Any]:
    looks = [(1, 0.98, 0), (2, 0.5, 30), (3, 0.1, 90)]
    curve = [
        {"epoch": epoch, "deterministic": share, "stochastic": 0.97, "ensemble": 0.99, "above": above,
         "log_alpha": {"fc1": [epoch] * 3}, "kappa": [epoch, 2, 3]}
        for epoch, share, above in looks
    ]  # fmt: skip
    sparse = [{"threshold": 0.1 * k, "fixed": share, "zero": zero, "mean": 0.99}
              for k, (share, zero) in enumerate(((0.0, 0.99), (0.97, 0.9895), (0.999, 0.5)))]  # fmt: skip
    more = {"curve": curve, "sparse": sparse, "bins": [-25.0, 5.0, 3], "kappa_images": 100, "weights": 400_000}
    return result(0.1, 0.99, -600.0) | more


def test_the_page_works_without_some_pieces(tmp_path: Path) -> None:
    section = report.section(Raw(tmp_path))
    assert "| layer-wise | -5.9e+02 | – | 11.3 | – |" in section.text
    assert {claim.holds for claim in section.claims} == {None} and not section.figures


def test_claims_are_read_from_the_numbers(tmp_path: Path) -> None:
    good = {
        "dropout": result(0.994, 0.994), "all": result(0.1, 0.992), "layer": result(0.11, 0.992, -600.0),
        "neuron": result(0.11, 0.991, -700.0), "weight": result(0.9, 0.99, -6e4), "additive": result(0.9, 0.99, -2e4),
        "student": result(0.1, 0.991, -600.0), "zero": result(0.1, 0.991, -500.0), "phase": phase_result(),
    }  # fmt: skip
    section = report.section(raw_of(tmp_path, good))
    assert all(claim.holds for claim in section.claims), [claim for claim in section.claims if not claim.holds]
    assert set(section.figures) == {"transition", "kappa", "sparsity"}
    assert [trace.name for trace in section.figures["kappa"].data] == [
        "epoch 1, deterministic 98 %", "epoch 2, deterministic 50 %", "epoch 3, deterministic 10 %",
    ]  # fmt: skip
    assert "| dropout | 99.1 | 97.40 | 99.4 | 99.4 | 99.4 | 99.40 |" in section.text
    bad = {"layer": result(0.98, 0.98, -3e4)}
    broken = {claim.text[:40]: claim.holds for claim in report.section(raw_of(tmp_path, bad)).claims}
    assert list(broken.values())[:2] == [False, False]


# -- for real ----------------------------------------------------------------------------------------------


@with_data("mnist")
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = smoke(Recipe(report.NAME, recipe.__doc__, recipe.PIECES).run, recipe.PIECES, tmp_path, capsys)
    for name in recipe.PIECES:  # with so few images, the divergence of four random layers drowns most of what they say
        assert raw[name]["ensemble"] > (0.13 if name == "all" else 0.5), name
    assert raw["zero"]["deterministic"] < 0.3
    log_alpha = raw["layer"]["log_alpha"]["fc1"][1]
    assert log_alpha > -4.5  # on its way from -5
    assert sum(raw["phase"]["curve"][-1]["kappa"]) == raw["phase"]["weights"] == 400_000
    assert raw["phase"]["sparse"][0]["zero"] == raw["phase"]["sparse"][0]["mean"] == raw["phase"]["ensemble"]
    report.section(raw)
