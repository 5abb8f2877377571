"""Test cases: every method on every kind of small network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import multitudes as mt
from multitudes.models.resnet import BasicBlock, ResNet

CLASSES = 5


class Mlp(nn.Module):
    """An MLP as users write it: nested, with batch norm and a functional activation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Sequential(nn.Linear(24, 20)))
        self.norm = nn.BatchNorm1d(20)
        self.head = nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.body(x))))


class Cnn(nn.Module):
    """A small CNN that flattens its feature maps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 2 * 2, 24)
        self.fc2 = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.view(x.size(0), -1))))


def group_norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.PReLU(24), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(24, CLASSES),
    )  # fmt: skip


def separable_net() -> nn.Module:
    """Depthwise and pointwise convolutions, with inverted widths as in MobileNets."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 24, 1), nn.ReLU6(), nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.BatchNorm2d(24), nn.ReLU6(),
        nn.Conv2d(24, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


class Transformer(nn.Module):
    """One encoder layer over patches, with a class token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1) + self.position
        return self.head(self.encoder(tokens)[:, 0])


class HuggingFace(nn.Module):
    """A Hugging Face model inside a custom network."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, image_size=8,
            patch_size=4, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.model = transformers.ViTForImageClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def model(self, seed: int = 0) -> nn.Module:
        """Return a copy of the network after some training batches, which change its running statistics."""
        model, state = self._made(seed)
        torch.set_rng_state(state)
        return copy.deepcopy(model)

    @cache  # noqa: B019 - a few networks, for the whole test run
    def _made(self, seed: int) -> tuple[nn.Module, Tensor]:
        """Return the network of a seed, and the random state after building it."""
        torch.manual_seed(seed)
        model = self.build().train()
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(8, *self.shape) * 2 + 0.5)
        return model.eval(), torch.get_rng_state()

    def batch(self, size: int = 7, seed: int = 1) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, *self.shape, generator=generator)
        return x, torch.randint(CLASSES, (size,), generator=generator)


NETWORKS: dict[str, Network] = {
    "mlp": Network(Mlp, (6,)),
    "cnn": Network(Cnn, (3, 8, 8)),
    "resnet": Network(lambda: ResNet(BasicBlock, (1, 1, 1, 1), CLASSES, width=12), (3, 8, 8)),
    "group_norm": Network(group_norm_net, (3, 8, 8)),
    "separable": Network(separable_net, (3, 8, 8)),
    "transformer": Network(Transformer, (3, 8, 8)),
    "vit": Network(lambda: mt.models.vit(CLASSES, size=8, width=16, depth=1, heads=4, expansion=2), (3, 8, 8)),
    "hugging_face": Network(HuggingFace, (3, 8, 8)),
    "tabular": Network(lambda: mt.models.tabular(6, CLASSES, width=4, bins=5, hidden=(12, 12), dropout=0.0), (6,)),
}


def small_adapters(model: nn.Module, members: int = 8, **options: Any) -> mt.Multitude:
    """Convert with adapters on every supported layer, including convolutions."""
    return mt.lora(model, members, 2, layers=lambda name, layer: True, **options)


METHODS: dict[str, Callable[..., mt.Multitude]] = {
    "deep_ensemble": mt.deep_ensemble,
    "packed": mt.packed,
    "batch_ensemble": mt.batch_ensemble,
    "tabm": mt.tabm,
    "masksembles": mt.masksembles,
    "mimo": mt.mimo,
    "heads": mt.heads,
    "lora": small_adapters,
}

INDEPENDENT = ("deep_ensemble", "packed", "lora")

SEEING = ("packed", "masksembles", "mimo", "tabm", "heads", "lora")
"""Methods that run the network on an example during conversion."""

REFUSED = {("mimo", "hugging_face")}
"""Hugging Face models check the number of image channels, which MIMO changes."""

EVERYWHERE = ("packed", "masksembles", "mc_dropout")
"""Methods that change most of a network; the quick suite tests them on all networks but one."""
MOST_UNLIKE = ("mlp", "resnet", "transformer", "hugging_face")
"""Networks on which the quick suite tests methods that change little of a network."""
SHARING = ("heads", "lora", "laplace")


def case_of(method: str, network: str, drawing: bool = False) -> Any:
    """Return a test case, marked as slow if the quick suite has similar ones."""
    alike = {"vit"} | ({"group_norm", "separable"} if method not in EVERYWHERE else set())
    if drawing and method not in ("mc_dropout", "laplace"):  # draws do not depend on the network
        alike |= {"hugging_face", "cnn", "tabular"} | ({"resnet"} if method not in ("patched", "swag") else set())
    left = network in alike or (method in SHARING and network not in MOST_UNLIKE)
    return pytest.param(method, network, id=f"{method}-{network}", marks=[pytest.mark.slow] if left else [])


# TabM is a BatchEnsemble.
CASES = [
    case_of(method, network)
    for method in METHODS
    for network in NETWORKS
    if (method, network) not in REFUSED and (method != "tabm" or network in ("mlp", "cnn", "tabular"))
]

QUICK = ("mlp", "transformer")
"""Networks on which the quick suite trains every method until its loss falls."""


def slow_but_for(networks: tuple[str, ...], cases: list[Any]) -> list[Any]:
    """Return the cases, with those of other networks marked as slow."""
    return [c if c.values[1] in networks else pytest.param(*c.values, id=c.id, marks=pytest.mark.slow) for c in cases]


def build(method: str, model: nn.Module, network: str, members: int = 3, **options: object) -> mt.Multitude:
    """Convert a model with a method and its default options for tests."""
    if method == "packed":
        options.setdefault("alpha", 1.0 if members == 1 else 2.0)
    if method in SEEING:
        options.setdefault("example", NETWORKS[network].batch(2)[0])
    return METHODS[method](model, members, **options)


def stacked_parameters(net: mt.Members) -> dict[str, Tensor]:
    """Return each parameter of all members, `[M, ...]`, by its name in a member."""
    names = dict(net.member(0).named_parameters())
    return {name: torch.stack([member.get_parameter(name) for member in net.network]) for name in names}
