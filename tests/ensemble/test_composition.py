"""Methods compose by function composition; with members and draws together, S = members * draws."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import multitudes as mt
from multitudes.models.resnet import BasicBlock, ResNet

IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def resnet() -> nn.Module:
    torch.manual_seed(0)
    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=4, width=8).train()
    model(torch.randn(16, 3, 16, 16))  # statistics that are not those of a new network
    return model.eval()


def smooth() -> nn.Module:
    return mt.smooth(resnet(), example=IMAGES)


def dropped(model: nn.Module) -> mt.Multitude:
    return mt.mc_dropout(model, 0.3, "block", example=IMAGES)


COMPOSITIONS: dict[str, tuple[Callable[[], mt.Multitude], int, bool]] = {
    "packed x smooth": (lambda: mt.packed(smooth(), 4, 2, example=IMAGES), 4, False),
    "packed x mc_dropout": (lambda: mt.packed(dropped(resnet()), 4, 2, example=IMAGES), 4, True),
    "packed x smooth x mc_dropout": (lambda: mt.packed(dropped(smooth()), 4, 2, example=IMAGES), 4, True),
    "deep_ensemble x variance": (lambda: mt.deep_ensemble(mt.variance(resnet(), ["layer4.0.conv2"]), 3), 3, True),
    "deep_ensemble x patched": (lambda: mt.deep_ensemble(mt.patched(resnet(), 3, example=IMAGES), 3), 3, True),
    "smooth x mc_dropout": (lambda: dropped(smooth()), 1, True),
    "batch_ensemble x mc_dropout": (lambda: mt.batch_ensemble(dropped(resnet()), 3), 3, True),
    "masksembles x mc_dropout": (lambda: mt.masksembles(dropped(resnet()), 3, example=IMAGES), 3, True),
    "mimo x mc_dropout": (lambda: mt.mimo(dropped(resnet()), 3, example=IMAGES), 3, True),
    "variance x mc_dropout": (lambda: mt.variance(dropped(resnet()), ["layer3.0.conv1"]), 1, True),
    "patched x variance": (lambda: mt.patched(mt.variance(resnet(), ["layer3.0.conv1"]), 3, example=IMAGES), 1, True),
}
composed = pytest.mark.parametrize(("build", "members", "draws"), COMPOSITIONS.values(), ids=COMPOSITIONS.keys())


@pytest.mark.quick(4)
@composed
def test_members_and_draws_multiply(build: Callable[[], mt.Multitude], members: int, draws: bool) -> None:
    net = build().eval()
    assert net.members == members
    if not draws:
        assert net(IMAGES).shape == (members, 6, 4)
        return
    drawn = net(IMAGES, draws=5, seed=1)
    assert drawn.shape == (5 * members, 6, 4)
    assert torch.equal(net(IMAGES, draws=5, seed=1), drawn)
    torch.testing.assert_close(net(IMAGES, draws=5, seed=1, memory=1), drawn, rtol=1e-4, atol=1e-5)
    spread = drawn.unflatten(0, (members, 5)).std(1)
    assert (spread > 0).all()
    assert net(IMAGES, draws=0).shape == (members, 6, 4)


@pytest.mark.slow
@composed
def test_every_member_is_what_it_is_alone(build: Callable[[], mt.Multitude], members: int, draws: bool) -> None:
    mt.check(build(), IMAGES)


@pytest.mark.quick(3)
@composed
def test_a_composition_learns(build: Callable[[], mt.Multitude], members: int, draws: bool) -> None:
    torch.manual_seed(0)
    net = build().train()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    losses = []
    for _ in range(25):
        loss = net.loss(IMAGES, LABELS, dataset_size=10**6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_packed_members_keep_their_dropout_and_their_smoothing() -> None:
    net = mt.packed(dropped(smooth()), 4, 2, example=IMAGES)
    member = net.member(1)
    assert isinstance(member, mt.Multitude)
    kinds = [type(module).__name__ for module in member.modules()]
    assert kinds.count("Dropout") == 4
    assert kinds.count("Smooth") == 4
    assert member.draws == net.draws


def test_how_a_network_draws_is_passed_on() -> None:
    net = dropped(resnet())
    net.draws, net.training_draws, net.memory = 7, 2, "1GB"
    ensemble = mt.deep_ensemble(net, 2)
    assert (ensemble.draws, ensemble.training_draws, ensemble.memory) == (7, 2, "1GB")
    assert ensemble.eval()(IMAGES).shape == (14, 6, 4)
    assert ensemble.train()(IMAGES).shape == (4, 6, 4)


def test_divergences_of_two_methods_add_up() -> None:
    once = mt.variance(resnet(), ["layer3.0.conv1"], seed=0)
    both = mt.patched(once, 3, "norm", example=IMAGES, init="pretrained", seed=0)
    terms = [divergence(both.network) for divergence in both.divergences]
    assert len(terms) == 2
    torch.testing.assert_close(both.kl(), sum(terms))
    torch.testing.assert_close(terms[0], once.kl())


PEAK = """
import resource, torch
import multitudes as mt
model = mt.models.resnet18().eval()
net = mt.mc_dropout(model, 0.3, r"layer[234].*conv2").eval()
x = torch.randn(64, 3, 32, 32)
with torch.no_grad():
    net(x[:, :, :8, :8], draws=2)  # what torch itself needs to start
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    drawn = net(x, draws=200, memory="1GB")
assert drawn.shape == (200, 64, 10)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
def test_two_hundred_draws_of_a_resnet_stay_inside_a_gigabyte() -> None:
    """The process as a whole, what its operations need for themselves included."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1e9
