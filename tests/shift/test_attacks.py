"""Attacks on the predictive mean: closed forms, balls and bounds, and effects on a digits classifier."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import multitudes as mt
from multitudes.networks.seeds import mixed
from multitudes.shift.attacks import Attack, fgsm, iterative_fast_sign, pgd

Data = tuple[Tensor, Tensor]
Split = tuple[Data, Data]


@pytest.fixture(scope="module")
def digits() -> Split:
    """Images in [0, 1] and labels: 1,500 for training, 297 for testing."""
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def trained(net: mt.Multitude, data: Data) -> mt.Multitude:
    x, y = data
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    net.train()
    for _ in range(30):
        for batch in torch.randperm(len(x), generator=generator).split(100):
            optimizer.zero_grad()
            net.loss(x[batch], y[batch]).backward()
            optimizer.step()
    optimizer.zero_grad()
    return net.eval()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


@pytest.fixture(scope="module")
def ensemble(digits: Split) -> mt.Multitude:
    torch.manual_seed(0)
    return trained(mt.deep_ensemble(perceptron(), members=3), digits[0])


@pytest.fixture(scope="module")
def dropout(digits: Split) -> mt.Multitude:
    torch.manual_seed(0)
    return trained(mt.mc_dropout(perceptron()), digits[0])


def mean_loss(net: mt.Multitude, x: Tensor, y: Tensor) -> float:
    """The loss of the mean, computed in float64 from the probabilities."""
    probs = net.predict(x, seed=0).predictions.double().softmax(2).mean(0)
    return -probs[torch.arange(len(y)), y].log().mean().item()


def logistic(features: int = 12) -> tuple[nn.Linear, Tensor, Tensor]:
    """Logits `w x, 0`: the loss of class 0 falls along w, that of class 1 rises."""
    torch.manual_seed(1)
    net, w = nn.Linear(features, 2), torch.randn(features)
    net.weight.data.copy_(torch.stack([w, torch.zeros(features)]))
    return net, w, torch.rand(5, features) / 2 + 0.25


# -- closed forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targeted", [False, True])
def test_fgsm_on_a_logistic_model_steps_along_the_signs_of_its_weights(targeted: bool) -> None:
    net, w, x = logistic()
    y = torch.tensor([0, 1, 0, 1, 0])
    away = torch.where(y == 0, -1, 1)[:, None] * (-1 if targeted else 1)
    attack = fgsm(net, x, y, 0.125, targeted=targeted)
    torch.testing.assert_close(attack.images, x + 0.125 * away * w.sign(), atol=1e-7, rtol=0)


def test_l2_pgd_on_a_logistic_model_goes_along_its_weights_to_the_edge_of_the_ball() -> None:
    net, w, x = logistic()
    attack = pgd(net, x, torch.zeros(5, dtype=torch.int64), 0.2, steps=8, norm="l2", random_start=False)
    torch.testing.assert_close(attack.images, x - 0.2 * w / w.norm(), atol=1e-6, rtol=0)


def test_iterative_fast_sign_is_limited_only_by_the_bounds() -> None:
    net, w, x = logistic()
    y = torch.ones(5, dtype=torch.int64)
    for steps, bounds in [(3, (0, 1)), (20, (0, 1)), (20, None)]:
        attack = iterative_fast_sign(net, x, y, 0.0625, steps, targeted=True, bounds=bounds)
        reached = x - steps * 0.0625 * w.sign()
        torch.testing.assert_close(attack.images, reached if bounds is None else reached.clamp(0, 1))


def test_one_step_of_l2_pgd_goes_along_the_gradient(ensemble: mt.Multitude, digits: Split) -> None:
    x, y = digits[1][0][:20].double(), digits[1][1][:20]
    net = copy.deepcopy(ensemble).double()
    attack = pgd(net, x, y, 1.0, 1, step_size=0.01, norm="l2", random_start=False, bounds=None)
    free = x.clone().requires_grad_()
    gradient = torch.autograd.grad(F.nll_loss(net(free).softmax(2).mean(0).log(), y), free)[0].flatten(1)
    expected = 0.01 * gradient / gradient.norm(dim=1, keepdim=True)
    torch.testing.assert_close((attack.images - x).flatten(1), expected)


def test_fgsm_attacks_the_mean_of_probabilities(digits: Split) -> None:
    torch.manual_seed(0)
    net = mt.deep_ensemble(perceptron(), members=4).double().eval()
    for parameter in net.parameters():
        parameter.data *= 3  # members that disagree, so that the three differ
    x, y = torch.rand(50, 1, 8, 8, dtype=torch.float64), torch.randint(10, (50,))
    free = x.clone().requires_grad_()
    by_hand = torch.stack([net.member(i).eval()(free).softmax(1) for i in range(4)]).mean(0)
    sign = torch.autograd.grad(-by_hand[torch.arange(50), y].log().sum(), free)[0].sign()
    others = [F.cross_entropy(net(free).mean(0), y), torch.stack([F.cross_entropy(p, y) for p in net(free)]).mean()]
    moved = (fgsm(net, x, y, 0.1, bounds=None).images - x).sign()
    assert torch.equal(moved, sign)
    for other in others:
        assert not torch.equal(moved, torch.autograd.grad(other, free)[0].sign())


def test_the_gradient_is_that_of_the_mean_over_the_draws_of_the_seed(dropout: mt.Multitude) -> None:
    net = copy.deepcopy(dropout).double()
    x, y = torch.rand(30, 1, 8, 8, dtype=torch.float64), torch.randint(10, (30,))
    free = x.clone().requires_grad_()
    probs = net(free, draws=7, seed=mixed(11, 0)).softmax(2)
    assert len(probs) == 7
    gradient = torch.autograd.grad(-probs.mean(0)[torch.arange(30), y].log().sum(), free)[0]
    moved = fgsm(net, x, y, 0.1, draws=7, seed=11, bounds=None).images - x
    assert torch.equal(moved.sign(), gradient.sign())


def test_gradients_are_exact_for_probabilities_that_round_to_one() -> None:
    net, w, x = logistic()
    net.bias.data.copy_(torch.tensor([60.0, 0.0]))
    y = torch.zeros(5, dtype=torch.int64)
    assert net(x).softmax(1)[:, 0].eq(1).all()
    assert torch.equal((fgsm(net, x, y, 0.1).images - x).sign(), -w.sign().expand(5, -1))
    moved = pgd(net, x, y, 0.1, norm="l2", random_start=False).images - x
    torch.testing.assert_close(moved, (-0.1 * w / w.norm()).expand(5, -1), atol=1e-6, rtol=0)


# -- balls and bounds ----------------------------------------------------------------------------------------

STEPS: dict[str, Callable[..., Attack]] = {
    "fgsm": fgsm,
    "band-limited fgsm": lambda *a, **k: fgsm(*a, frequencies=(0.2, 0.6), **k),
    "linf pgd": lambda *a, **k: pgd(*a, 5, step_size=a[3], seed=1, **k),
    "one fast sign": lambda *a, **k: iterative_fast_sign(*a, 1, **k),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("epsilon", [8 / 255, 1 / 3, 1e-9, 0.0])
def test_no_pixel_moves_further_than_epsilon(name: str, dtype: torch.dtype, epsilon: float) -> None:
    torch.manual_seed(0)
    net = perceptron().to(dtype)
    x, y = torch.rand(20, 1, 8, 8).to(dtype), torch.randint(10, (20,))
    for bounds in [(0, 1), None]:
        images = STEPS[name](net, x, y, epsilon, bounds=bounds).images
        assert images.dtype == dtype
        assert (images.double() - x.double()).abs().max().item() <= epsilon
        assert (images - x).abs().max().item() <= epsilon
        if bounds:
            assert 0 <= images.min() <= images.max() <= 1
        elif epsilon > 0.01:
            assert (images - x).abs().max().item() > 0.98 * epsilon


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("epsilon", [0.05, 3.0, 1e-9, 0.0])
def test_no_image_leaves_the_l2_ball(dtype: torch.dtype, epsilon: float) -> None:
    torch.manual_seed(0)
    net = perceptron().to(dtype)
    x, y = torch.rand(40, 1, 8, 8).to(dtype), torch.randint(10, (40,))
    x[:, :, :4] = x[:, :, :4].round()  # pixels at the bounds
    for bounds in [(0, 1), None]:
        images = pgd(net, x, y, epsilon, 4, norm="l2", seed=2, bounds=bounds).images
        distance = (images.double() - x.double()).flatten(1).norm(dim=1)
        assert distance.max().item() <= epsilon
        if bounds:
            assert 0 <= images.min() <= images.max() <= 1
        elif epsilon >= 0.05 and dtype in (torch.float32, torch.float64):
            assert distance.min().item() > 0.99 * epsilon


def test_large_pixels_do_not_leave_the_ball_by_rounding() -> None:
    net = nn.Linear(6, 2)
    x = torch.tensor([[1e8, -1e8, 1.1e8, -1.9e8, 0.0, 1e-40]])
    for attack in (fgsm, pgd):
        images = attack(net, x, torch.tensor([0]), 5.0, bounds=None).images
        assert (images.double() - x.double()).abs().max().item() <= 5


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_random_start_is_uniform_in_the_ball(norm: str) -> None:
    net, _, _ = logistic(3)
    x = torch.zeros(20_000, 3)
    start = pgd(net, x, torch.zeros(len(x), dtype=torch.int64), 2.0, 1, 0.0, norm, seed=5, bounds=None).images
    radius = start.abs().amax(1) if norm == "linf" else start.norm(dim=1)
    # In three dimensions the cube of the radius is uniform; 0.015 is more than 1.6 / sqrt(20,000).
    share = (radius / 2).pow(3).sort().values
    assert (share - torch.linspace(0, 1, len(x))).abs().max() < 0.015
    assert start.mean(0).abs().max() < 0.04


# -- what attacks do to a classifier -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ensemble", "dropout"])
def test_pgd_harms_more_than_fgsm_and_fgsm_more_than_noise(kind: str, digits: Split, request: Any) -> None:
    net, (x, y) = request.getfixturevalue(kind), digits[1]
    signs = torch.randint(2, x.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    clean, noise = (mean_loss(net, images, y) for images in (x, (x + 0.1 * signs).clamp(0, 1)))
    single = mean_loss(net, fgsm(net, x, y, 0.1, seed=1).images, y)
    many = mean_loss(net, pgd(net, x, y, 0.1, 20, seed=1).images, y)
    assert clean < noise < single < many
    assert single > noise + 0.5


def test_targeted_attacks_reach_their_class(ensemble: mt.Multitude, digits: Split) -> None:
    x, labels = digits[1]
    target = (labels + 3) % 10
    attack = iterative_fast_sign(ensemble, x, target, 0.05, 12, targeted=True, labels=labels)
    assert attack.success_rate[0] == 0 < 0.95 < attack.success_rate[-1]
    assert attack.accuracy[0] > 0.85 > 0.05 > attack.accuracy[-1]
    assert pgd(ensemble, x, target, 0.4, 20, targeted=True, seed=0).success_rate[-1] > 0.9


# -- the record ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("random_start", [False, True])
def test_the_record_equals_the_predictions(ensemble: mt.Multitude, digits: Split, random_start: bool) -> None:
    x, y = digits[1]
    step = {"step_size": 0.02, "random_start": random_start, "seed": 0}
    attack = pgd(ensemble, x, y, 0.1, 4, **step)
    was_right = (ensemble.predict(x).label == y).numpy()
    assert attack.accuracy.shape == attack.success_rate.shape == attack.entropy.shape == (5,)
    for k in range(5):
        p = ensemble.predict(pgd(ensemble, x, y, 0.1, k, **step).images if k else x)
        probs = p.predictions.double().softmax(2).mean(0)
        right = (probs.argmax(1) == y).numpy()
        assert attack.accuracy[k].item() == pytest.approx(right.mean())
        assert attack.success_rate[k].item() == pytest.approx((was_right & ~right).sum() / was_right.sum())
        assert attack.entropy[k].item() == pytest.approx(torch.special.entr(probs).sum(1).mean().item(), rel=1e-5)


def test_targeted_success_counts_only_inputs_of_other_classes() -> None:
    predicted = torch.tensor([[0, 1, 2, 2], [2, 1, 2, 1]])
    attack = Attack(torch.zeros(4, 1), predicted, torch.zeros(2, 4), torch.tensor([2, 2, 2, 0]), True, None)
    torch.testing.assert_close(attack.success_rate, torch.tensor([0.0, 1 / 3]))
    with pytest.raises(ValueError, match="accuracy needs the true classes: pass labels="):
        _ = attack.accuracy


def test_joined_batches_equal_one_batch(ensemble: mt.Multitude, digits: Split) -> None:
    x, y = digits[1][0].double(), digits[1][1]
    net = copy.deepcopy(ensemble).double()  # batches of another size round otherwise, which no sign may depend on
    whole = fgsm(net, x, y, 0.1)
    joined = Attack.concat(fgsm(net, a, b, 0.1) for a, b in zip(x.split(100), y.split(100), strict=True))
    assert torch.equal(joined.images, whole.images)
    for name in ("accuracy", "success_rate", "entropy"):
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name))
    with pytest.raises(ValueError, match="parts must have the same .targeted"):
        Attack.concat([whole, fgsm(net, x, y, 0.1, targeted=True)])
    with pytest.raises(ValueError, match="parts must hold at least one Attack"):
        Attack.concat([])


# -- what stays as it was ------------------------------------------------------------------------------------


def test_a_seed_repeats_attacks_on_a_network_that_draws(dropout: mt.Multitude, digits: Split) -> None:
    x, y = digits[1][0][:50], digits[1][1][:50]
    state = torch.get_rng_state()
    for attack in (fgsm, pgd, iterative_fast_sign):
        first, second, other = (attack(dropout, x, y, 0.05, draws=3, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(first.images, second.images)
        assert torch.equal(first.entropies, second.entropies)
        assert not torch.equal(first.images, other.images)
    assert torch.equal(torch.get_rng_state(), state)


def test_network_and_input_do_not_change(digits: Split) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 10))
    for net in (mt.mc_dropout(model), mt.deep_ensemble(model, members=2), model):
        net.train()
        net[1].eval() if net is model else None
        modes = [module.training for module in net.modules()]
        first = next(net.parameters())
        first.grad = torch.ones_like(first)
        state = copy.deepcopy(net.state_dict())
        x, y = digits[1][0][:9].clone().requires_grad_(), digits[1][1][:9]
        before = x.detach().clone()
        for attack in (fgsm, pgd, iterative_fast_sign):
            result = attack(net, x, y, 0.1)
            assert not result.images.requires_grad | result.entropies.requires_grad
        assert x.grad is None and torch.equal(x, before)
        assert [module.training for module in net.modules()] == modes
        assert torch.equal(first.grad, torch.ones_like(first))
        assert all(p.grad is None and p.requires_grad for p in net.parameters() if p is not first)
        assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
        first.grad = None


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_attacks_work_with_gradients_disabled(without: Any, digits: Split, ensemble: mt.Multitude) -> None:
    x, y = digits[1][0][:9], digits[1][1][:9]
    for attack in (fgsm, iterative_fast_sign):
        expected = attack(ensemble, x, y, 0.1).images
        with without():
            assert torch.equal(attack(ensemble, x.clone(), y, 0.1).images, expected)


def test_the_mode_is_restored_after_an_error() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).train()
    with pytest.raises(ValueError, match="y must hold classes 0 to 2, got 3 at 1"):
        fgsm(net, torch.rand(2, 4), torch.tensor([0, 3]), 0.1)
    assert all(module.training for module in net.modules())


# -- wrong arguments -----------------------------------------------------------------------------------------


class NotDifferentiable(nn.Linear):
    """Differentiable, but not in its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach().flatten(1).round())


class Steep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sqrt()


IMAGES, CLASSES = torch.full((2, 1, 8, 8), 0.5), torch.tensor([0, 1])
BAD = IMAGES.clone()
BAD[1, 0, 2, 3] = 1.5
REGRESSION = mt.deep_ensemble(perceptron(), members=2)
REGRESSION.task = "regression"


@pytest.mark.parametrize(
    ("attack", "arguments", "message"),
    [
        (fgsm, {"epsilon": -0.1}, "epsilon must be 0 or more, got -0.1"),
        (pgd, {"epsilon": 0.1, "norm": "l1"}, "norm must be one of linf, l2, got 'l1'"),
        (pgd, {"epsilon": 0.1, "steps": 0}, "steps must be a whole number, 1 or more, got 0"),
        (pgd, {"epsilon": 0.1, "step_size": "a"}, "step_size must be 0 or more, got 'a'"),
        (iterative_fast_sign, {"step_size": -1}, "step_size must be 0 or more, got -1"),
        (fgsm, {"epsilon": 0.1, "seed": "a"}, "seed must be None or a whole number, .* got 'a'"),
        (fgsm, {"epsilon": 0.1, "x": BAD}, r"x must lie in \[0, 1\] \(bounds\), got 1.5 at \[1, 0, 2, 3\]"),
        (fgsm, {"epsilon": 0.1, "x": BAD * torch.nan}, r"x must lie in \[0, 1\] \(bounds\), got nan at"),
        (fgsm, {"epsilon": 0.1, "x": BAD / 0, "bounds": None}, r"x must be finite, got inf at \[0, 0, 0, 0\]"),
        (fgsm, {"epsilon": 0.1, "x": IMAGES.int()}, "x must be a floating-point tensor, got torch.int32"),
        (fgsm, {"epsilon": 0.1, "x": IMAGES[:0], "y": CLASSES[:0]}, "x must be .* with at least one input"),
        (fgsm, {"epsilon": 0.1, "bounds": (1, 0)}, "bounds must be .* in this order"),
        (fgsm, {"epsilon": 0.1, "y": CLASSES[:1]}, r"y must hold one class for each of 2 inputs, got shape \[1\]"),
        (fgsm, {"epsilon": 0.1, "y": CLASSES + 9}, "y must hold classes 0 to 9, got 10 at 1"),
        (fgsm, {"epsilon": 0.1, "frequencies": (0.5, 0.2)}, r"frequencies must be \(low, high\), from 0 to 1 in units"),
        (fgsm, {"epsilon": 0.1, "frequencies": (0.3, 0.4)}, "no frequency of 8 x 8 images is from 0.3 to 0.4"),
        (fgsm, {"epsilon": 0.1, "frequencies": (0, 1), "x": torch.rand(2, 64)}, r"x must be images \[B, ..., H, W\]"),
        (fgsm, {"epsilon": 0.1, "labels": CLASSES}, "labels are only for a targeted attack"),
        (fgsm, {"epsilon": 0.1, "labels": CLASSES + 9, "targeted": True}, "labels must hold classes 0 to 9, got 10"),
        (fgsm, {"epsilon": 0.1, "draws": 3}, "draws=3 needs a multitude, got a Sequential"),
        (fgsm, {"epsilon": 0.1, "net": REGRESSION}, "net must be for classification, got a multitude for regression"),
        (fgsm, {"epsilon": 0.1, "net": abs}, "net must be a multitude or a network, got builtin"),
        (fgsm, {"epsilon": 0.1, "net": mt.temporal(perceptron(), 2, 1.0)}, "got a Stream: pass its network, net.net"),
        (fgsm, {"epsilon": 0.1, "net": nn.Conv2d(1, 1, 1)}, r"net must return \[S, B, C\]"),
        (fgsm, {"epsilon": 0.1, "net": NotDifferentiable(64, 10)}, "net must be differentiable in x"),
        (fgsm, {"epsilon": 0.1, "net": Steep(), "x": IMAGES * 0}, "net must have finite gradients, .* for input 0"),
    ],
)
def test_invalid_arguments_raise_an_error(attack: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attack(**{"net": perceptron(), "x": IMAGES, "y": CLASSES} | arguments)
