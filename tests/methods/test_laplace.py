"""Last-layer Laplace against closed forms, brute force, and laplace-torch as the judge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multitudes as mt
from multitudes.methods.laplace import Laplace

STRUCTURES = ("full", "kron", "diag")


def trunk(outputs: int, bias: bool = True, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs, bias=bias)).double().eval()


def classes(count: int, rows: int = 60, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(count, (rows,), generator=generator)


def values(outputs: int, rows: int = 60, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, outputs, generator=generator, dtype=torch.float64)
    return x, torch.sin(x[:, :outputs]) + 0.3 * noise


def covariance(net: Laplace) -> Tensor:
    """The posterior's, of the weights `[O, F]` row by row, bias last, as the layer's tensors say."""
    layer = net.layer
    if layer.structure == "full":
        return torch.block_diag(*(block @ block.mT for block in layer.factor))
    spread = layer.deviations.flatten().square().diag()
    if layer.structure == "diag":
        return spread
    basis = torch.kron(layer.left, layer.right)
    return basis @ spread @ basis.mT


def features(model: nn.Sequential, x: Tensor) -> Tensor:
    """`[N, F]` with ones for the bias."""
    with torch.no_grad():
        phi = model[:-1](x)
    return torch.cat([phi, torch.ones_like(phi[:, :1])], 1) if model[-1].bias is not None else phi


def weights(model: nn.Sequential) -> Tensor:
    """`[O, F]`, bias last."""
    layer = model[-1]
    return (
        torch.cat([layer.weight, layer.bias[:, None]], 1).detach() if layer.bias is not None else layer.weight.detach()
    )


# -- closed forms ------------------------------------------------------------------------------------------


def test_the_posterior_of_linear_regression_is_bayes_closed_form() -> None:
    model, (x, y) = trunk(2), values(2)
    phi, prior, noise = features(model, x), 0.7, torch.tensor([0.2, 0.5], dtype=torch.float64)
    with torch.no_grad():  # the weights of the largest posterior, which is the posterior's mean
        for output in range(2):
            precision = phi.mT @ phi / noise[output] + prior * torch.eye(6, dtype=torch.float64)
            mean = torch.linalg.solve(precision, phi.mT @ y[:, output] / noise[output])
            model[-1].weight[output], model[-1].bias[output] = mean[:5], mean[5]
    net = mt.laplace(model, (x, y), structure="full", prior=prior, noise=noise, task="regression")
    evidence = 0.0
    for output in range(2):
        precision = phi.mT @ phi / noise[output] + prior * torch.eye(6, dtype=torch.float64)
        block = slice(6 * output, 6 * output + 6)
        torch.testing.assert_close(covariance(net)[block, block], precision.inverse(), rtol=1e-9, atol=1e-12)
        # Of the targets, with the weights integrated out: N(0, noise + phi phi^T / prior).
        marginal = torch.distributions.MultivariateNormal(
            torch.zeros(len(x), dtype=torch.float64),
            noise[output] * torch.eye(len(x), dtype=torch.float64) + phi @ phi.mT / prior,
        )
        evidence += float(marginal.log_prob(y[:, output]))
    assert float(net.log_marginal_likelihood) == pytest.approx(evidence, rel=1e-6)
    new = values(2, 9, seed=5)[0]
    net.approximation = "exact"
    p = net.predict(new)
    phi = features(model, new)
    for output in range(2):
        block = slice(6 * output, 6 * output + 6)
        want = (phi @ covariance(net)[block, block] * phi).sum(1)
        torch.testing.assert_close(p.epistemic_variance[:, output], want, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(p.mean, model(new).detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(p.aleatoric_variance, noise.expand(9, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.variance, p.epistemic_variance + p.aleatoric_variance)


@pytest.mark.parametrize("bias", [True, False])
def test_the_full_precision_of_classes_is_the_hessian_of_the_loss(bias: bool) -> None:
    model, (x, y) = trunk(3, bias), classes(3)
    phi, start = features(model, x), weights(model)
    net = mt.laplace(model, (x, y), structure="full", prior=0.5)

    def energy(w: Tensor) -> Tensor:
        return F.cross_entropy(phi @ w.view_as(start).mT, y, reduction="sum") + 0.25 * w.square().sum()

    hessian = torch.autograd.functional.hessian(energy, start.flatten())
    torch.testing.assert_close(covariance(net).inverse(), hessian, rtol=1e-8, atol=1e-9)
    determinant = torch.logdet(hessian)
    want = -energy(start.flatten()) + 0.5 * (start.numel() * math.log(0.5) - determinant)
    assert float(net.log_marginal_likelihood) == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_the_full_precision_of_yes_and_no_is_the_hessian_of_the_loss(task: str) -> None:
    outputs = 1 if task == "binary" else 3
    model, x = trunk(outputs), classes(2)[0]
    y = (values(3)[1][:, :outputs] > 0).double()
    phi, start = features(model, x), weights(model)
    net = mt.laplace(model, (x, y), structure="full", prior=0.5, task=task)

    def energy(w: Tensor) -> Tensor:
        logits = phi @ w.view_as(start).mT
        return F.binary_cross_entropy_with_logits(logits, y, reduction="sum") + 0.25 * w.square().sum()

    hessian = torch.autograd.functional.hessian(energy, start.flatten())
    torch.testing.assert_close(covariance(net).inverse(), hessian, rtol=1e-8, atol=1e-9)


def test_a_gaussian_head_has_the_hessian_of_its_means_and_keeps_its_variances() -> None:
    model, (x, y) = trunk(4), values(2)
    phi, start = features(model, x), weights(model)
    net = mt.laplace(model, (x, y), structure="full", prior=0.5, task="gaussian")

    def energy(w: Tensor) -> Tensor:
        both = torch.cat([w.view(2, 6), start[2:]])
        return mt.gaussian_nll(phi @ both.mT, y, reduction="sum") + 0.25 * w.square().sum()

    hessian = torch.autograd.functional.hessian(energy, start[:2].flatten())
    torch.testing.assert_close(covariance(net).inverse(), hessian, rtol=1e-8, atol=1e-9)
    drawn = net(x, draws=4, seed=0)
    torch.testing.assert_close(drawn[:, :, 2:], model(x)[None, :, 2:].expand(4, -1, -1))
    assert drawn[:, :, :2].std(0).min() > 0
    net.approximation = "exact"
    p = net.predict(x)
    torch.testing.assert_close(p.aleatoric_variance, F.softplus(model(x)[:, 2:]).detach() + 1e-6)
    assert float(p.epistemic_variance.min()) > 0


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
def test_kron_and_diag_are_their_definitions(task: str) -> None:
    model, x = trunk(3), classes(3)[0]
    y = {"classification": classes(3)[1], "multilabel": (values(3)[1] > 0).double(), "regression": values(3)[1]}[task]
    phi, logits = features(model, x), model(x).detach()
    if task == "classification":
        p = logits.softmax(1)
        each = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    elif task == "multilabel":
        each = torch.diag_embed(logits.sigmoid() * (1 - logits.sigmoid()))
    else:
        each = torch.eye(3, dtype=torch.float64).expand(len(x), 3, 3) / 0.4
    full = sum(torch.kron(h, torch.outer(f, f)) for h, f in zip(each, phi, strict=True))
    kron = torch.kron(each.sum(0), phi.mT @ phi / len(x))
    wanted = {"full": full, "kron": kron, "diag": full.diag().diag()}
    options: dict[str, Any] = {"noise": 0.4} if task == "regression" else {}
    for structure, curvature in wanted.items():
        net = mt.laplace(
            model, [(x[:25], y[:25]), (x[25:], y[25:])], structure=structure, prior=2.0, task=task, **options
        )
        want = (curvature + 2.0 * torch.eye(18, dtype=torch.float64)).inverse()
        torch.testing.assert_close(covariance(net), want, rtol=1e-8, atol=1e-10)
        per_output = want.reshape(3, 6, 3, 6).diagonal(dim1=0, dim2=2)  # [F, F, O]
        variances = torch.einsum("nf,fgo,ng->no", phi, per_output, phi)
        torch.testing.assert_close(net.layer.variances(features(model, x)).detach(), variances, rtol=1e-8, atol=1e-10)


def test_classes_can_be_probabilities() -> None:
    model, (x, y) = trunk(3), classes(3, 20)
    whole, soft = (mt.laplace(model, (x, target)) for target in (y, F.one_hot(y, 3).double()))
    torch.testing.assert_close(covariance(whole), covariance(soft))
    torch.testing.assert_close(whole.log_marginal_likelihood, soft.log_marginal_likelihood)


def test_the_weight_of_a_row_counts_it_so_many_times() -> None:
    model, (x, y) = trunk(3), classes(3, 20)
    weight = torch.ones(20)
    weight[:5] = 3
    for structure in STRUCTURES:
        weighted = mt.laplace(model, [(x, y, weight)], structure=structure)
        again = [(x, y), (x[:5], y[:5]), (x[:5], y[:5])]
        repeated = mt.laplace(model, again, structure=structure)
        torch.testing.assert_close(covariance(weighted), covariance(repeated), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(weighted.log_marginal_likelihood, repeated.log_marginal_likelihood)


# -- the prior and the noise -------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_marginal_prior_has_the_largest_marginal_likelihood(structure: str) -> None:
    model, (x, y) = trunk(3), classes(3)
    best = mt.laplace(model, (x, y), structure=structure)
    for factor in (0.5, 0.99, 1.01, 2.0):
        other = mt.laplace(model, (x, y), structure=structure, prior=float(best.prior) * factor)
        assert other.log_marginal_likelihood < best.log_marginal_likelihood + 1e-4 * (abs(factor - 1) < 0.1)
    grid = [
        mt.laplace(model, (x, y), structure=structure, prior=10 ** (k / 10)).log_marginal_likelihood
        for k in range(-30, 31)
    ]
    assert max(grid) <= best.log_marginal_likelihood + 1e-5


def test_the_noise_of_values_has_the_largest_marginal_likelihood_together_with_the_prior() -> None:
    from scipy.optimize import minimize

    model, (x, y) = trunk(2), values(2)
    phi, start = features(model, x), weights(model)
    errors = (y - model(x).detach()).square().sum(0)
    gram = torch.linalg.eigvalsh(phi.mT @ phi)

    def minus(logs: Any) -> float:
        prior, noise = math.exp(logs[0]), torch.tensor(logs[1:]).exp()
        fit = -0.5 * (len(x) * (2 * math.pi * noise).log() + errors / noise).sum()
        values = gram / noise[:, None]
        return -float(fit + 0.5 * (12 * math.log(prior) - (values + prior).log().sum() - prior * start.square().sum()))

    found = minimize(
        minus, [0.0, 0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10, "maxiter": 4000}
    )
    net = mt.laplace(model, (x, y), task="regression")
    assert float(net.prior) == pytest.approx(math.exp(found.x[0]), rel=1e-4)
    assert net.network.target_noise.tolist() == pytest.approx([math.exp(log) for log in found.x[1:]], rel=1e-4)
    assert float(net.log_marginal_likelihood) == pytest.approx(-found.fun, rel=1e-6)


def test_validation_takes_the_prior_of_the_best_likelihood_of_held_out_data() -> None:
    model, data, held = trunk(3), classes(3), classes(3, 40, seed=7)
    for structure in STRUCTURES:
        net = mt.laplace(model, data, structure=structure, prior="validation", validation=[held])
        scores = {}
        for quarter in range(-20, 21):
            other = mt.laplace(model, data, structure=structure, prior=10 ** (quarter / 4), approximation="probit")
            scores[10 ** (quarter / 4)] = float(F.nll_loss(other.predict(held[0]).log_probs, held[1]))
        assert float(net.prior) == pytest.approx(min(scores, key=lambda prior: scores[prior]))


# -- draws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_posteriors_mean_and_covariance(structure: str) -> None:
    model, (x, y) = trunk(3), classes(3)
    net = mt.laplace(model, (x, y), structure=structure, prior=1.0)
    layer, count = net.layer, 20_000
    torch.manual_seed(0)
    with torch.no_grad():
        weight = torch.vmap(lambda _: layer.draw_tensors(), randomness="different")(torch.arange(count))
    rows = torch.cat([weight[0], weight[1][:, :, None]], 2).flatten(1) - weights(model).flatten()
    want = covariance(net)
    # Entry ij of a covariance of n draws has the standard error sqrt((S_ii S_jj + S_ij^2) / n): 6 of them.
    error = ((want.diag()[:, None] * want.diag() + want.square()) / count).sqrt()
    assert ((rows.mT @ rows / count - want).abs() < 6 * error).all()
    assert (rows.mean(0).abs() < 6 * (want.diag() / count).sqrt()).all()


def test_the_probit_approximation_is_near_the_mean_of_many_draws() -> None:
    model, (x, y) = trunk(3), classes(3, 200)
    net = mt.laplace(model, (x, y), structure="full")
    many = net.predict(x, draws=4000, seed=0).probs
    net.approximation = "probit"
    p = net.predict(x)
    assert p.members == 1
    torch.testing.assert_close(p.probs, many, rtol=0, atol=0.02)


# -- the judge ---------------------------------------------------------------------------------------------


class WithOnes(nn.Module):
    """Adds a feature that is 1, whose weights are a bias: laplace-torch has blocks of their own for biases."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 1), value=1.0)


def judged(
    model: nn.Sequential, likelihood: str, structure: str, x: Tensor, y: Tensor, prior: float, **options: Any
) -> Any:
    judge = pytest.importorskip("laplace")
    twin = model
    if structure == "kron":
        twin = nn.Sequential(*model[:-1], WithOnes(), nn.Linear(6, len(model[-1].weight), bias=False).double())
        twin[-1].weight.data = weights(model)
    la = judge.Laplace(
        twin, likelihood, subset_of_weights="last_layer", hessian_structure=structure, prior_precision=prior, **options
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=20))
    return la


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_laplace_torch_agrees(likelihood: str, structure: str) -> None:
    regression = likelihood == "regression"
    model, (x, y) = trunk(3), values(3) if regression else classes(3)
    torch.set_default_dtype(torch.float64)
    try:
        la = judged(model, likelihood, structure, x, y, 1.7, **({"sigma_noise": 0.5} if regression else {}))
        options: dict[str, Any] = {"noise": 0.25} if regression else {}
        net = mt.laplace(model, [(x, y)], structure=structure, prior=1.7, task=likelihood, **options)
        assert float(net.log_marginal_likelihood) == pytest.approx(float(la.log_marginal_likelihood()), rel=1e-6)
        new = classes(3, 11, seed=4)[0]
        _, variance = la._glm_predictive_distribution(new)
        got = net.layer.variances(features(model, new))
        torch.testing.assert_close(got, variance.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=1e-7)
        if structure == "full":  # its parameters are the weights and then the biases
            order = torch.cat([torch.arange(18).view(3, 6)[:, :5].flatten(), torch.arange(18).view(3, 6)[:, 5]])
            own = covariance(net)[order][:, order]
            torch.testing.assert_close(own, la.posterior_covariance, rtol=1e-5, atol=1e-7)
        if not regression:
            net.approximation = "probit"
            torch.testing.assert_close(net.predict(new).probs, la(new, link_approx="probit"), rtol=1e-5, atol=1e-7)
            la.optimize_prior_precision(method="marglik", n_steps=600, lr=0.1)
            best = mt.laplace(model, [(x, y)], structure=structure)
            assert float(best.prior) == pytest.approx(float(la.prior_precision), rel=1e-3)
    finally:
        torch.set_default_dtype(torch.float32)


# -- memory ------------------------------------------------------------------------------------------------


def test_a_thousand_classes_of_two_thousand_features_never_make_the_full_matrix() -> None:
    from multitudes.networks.devices import Meter

    model = nn.Linear(2048, 1000)
    x, y = torch.randn(16, 2048), torch.randint(1000, (16,))
    with pytest.raises(ValueError, match=r"structure='full' takes 1.34e\+05 GB for the 1,000 x 2,049 weights"):
        mt.laplace(model, (x, y), structure="full")
    meter = Meter()
    with meter:
        net = mt.laplace(model, (x, y), structure="diag", memory="200MB")
    assert meter.peak < 200e6 and net.structure == "diag"


def test_auto_takes_the_richest_structure_that_fits() -> None:
    model, data = trunk(3), classes(3)
    full, kron = 4 * 8 * 18**2, 4 * 8 * (3**2 + 6**2) + 3 * 8 * 18
    for memory, structure in ((full, "full"), (full - 1, "kron"), (kron, "kron"), (kron - 1, "diag")):
        assert mt.laplace(model, data, memory=memory).structure == structure
    with pytest.raises(ValueError, match="structure='auto' takes .* memory is"):
        mt.laplace(model, data, memory=100)
