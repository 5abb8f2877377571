"""Test cases for methods whose predictions are draws, on every kind of small network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import multitudes as mt
from multitudes.networks.stochastic import Stochastic
from tests.zoo.cases import CLASSES, NETWORKS, case_of

Convert = Callable[[nn.Module, Tensor, int], mt.Multitude]
"""`(model, example, seed) -> multitude`."""


class Jitter(Stochastic):
    """A layer that adds normal noise to each row."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.expects else x + self.normal(x.shape, like=x)


def before_all_but_the_first(model: nn.Module, x: Tensor, seed: int) -> mt.Multitude:
    layers = [name for name, layer in model.named_modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    inside = [name for name in layers[1:] if "encoder" not in name]  # attention reads its layers' weights directly
    return mt.mc_dropout(model, 0.3, inside, example=x)


def patched(model: nn.Module, x: Tensor, seed: int, cross: bool = False) -> mt.Multitude:
    norms = any("Norm" in type(module).__name__ for module in model.modules())
    where = "norm+output" if norms else "input+output"
    return mt.patched(model, 3, where, cross=cross, example=x, seed=seed)


def outside_attention(name: str, layer: nn.Module) -> bool:
    return "encoder" not in name and not name.endswith(("fc2", "head", "fc"))


MLP_OF_HF = "model.vit.layers.0.mlp.fc1"


def before_an_activation(name: str, layer: nn.Module) -> bool:
    """Select one layer with an activation after it: the mean of a zero-centered layer's outputs is always 0."""
    named = ("body.3.0", "fc1", "4", "encoder.linear1", "layer4.0.conv2", "mlp.layers.0", "blocks.0.fc1", MLP_OF_HF)
    return name in named or (name == "3" and layer.groups == 1)


def trajectory(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return five state dicts close to the model's, like checkpoints of its training."""
    generator = torch.Generator().manual_seed(3)
    return [
        {
            name: value + 0.05 * torch.randn(value.shape, generator=generator).to(value)
            if value.is_floating_point() and "running_var" not in name
            else value.clone()
            for name, value in model.state_dict().items()
        }
        for _ in range(5)
    ]


LEARNING: dict[str, Convert] = {
    "mc_dropout": before_all_but_the_first,
    "drop_connect": lambda model, x, seed: mt.drop_connect(model, 0.2, outside_attention),
    "patched": patched,
    "patched_cross": lambda model, x, seed: patched(model, x, seed, cross=True),
    "variance": lambda model, x, seed: mt.variance(model, outside_attention, seed=seed),
    "variance_zero": lambda model, x, seed: mt.variance(
        model, before_an_activation, parameterization="zero", seed=seed
    ),
}
"""Methods that are trained."""

SAMPLED: dict[str, Convert] = {
    "subspace": lambda model, x, seed: mt.subspace(model, "low_rank", trajectory(model), rank=3),
    "swag": lambda model, x, seed: mt.swag(model, trajectory(model)),
    "laplace": lambda model, x, seed: mt.laplace(model, (x, torch.arange(len(x)) % CLASSES), prior=1.0),
}
"""Methods that sample the weights of a trained network."""

VARIANTS: dict[str, Convert] = {
    "variance_neuron": lambda model, x, seed: mt.variance(model, outside_attention, "neuron", seed=seed),
    "variance_weight": lambda model, x, seed: mt.variance(model, outside_attention, "weight", seed=seed),
    "variance_additive": lambda model, x, seed: mt.variance(model, outside_attention, "additive", seed=seed),
    "family_network": lambda model, x, seed: mt.family(model, 3, "network", sigma=0.05, mixing="learned", seed=seed),
    "family_row": lambda model, x, seed: mt.family(model, 3, "row", mixing="learned", relaxation="weighted", seed=seed),
    "family_element": lambda model, x, seed: mt.family(model, 3, "element", sigma=0.01, seed=seed),
    "subspace_random": lambda model, x, seed: mt.subspace(model, "random", trajectory(model), scale=1.0),
    "subspace_dropout": lambda model, x, seed: mt.subspace(model, "dropout", trajectory(model)),
    "subspace_diagonal": lambda model, x, seed: mt.subspace(model, "diagonal", trajectory(model)),
}
"""Other settings of these methods, tested on one network."""

DRAWING = LEARNING | SAMPLED | VARIANTS

CASES = [
    case_of(method, network, drawing=True)
    for method in DRAWING
    for network in NETWORKS
    if method not in VARIANTS or network == "mlp"
]
LEARNING_CASES = [case for case in CASES if case.values[0] in LEARNING]


def build(method: str, network: str, seed: int = 0, model: nn.Module | None = None) -> mt.Multitude:
    """Convert a network's model with a method."""
    case = NETWORKS[network]
    model = case.model() if model is None else model
    x = case.batch(2)[0].to(next(model.parameters()))
    torch.manual_seed(seed)
    return DRAWING[method](model, x, seed)
