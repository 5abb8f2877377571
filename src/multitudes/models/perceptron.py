"""Multilayer perceptron: linear layers with an activation between them.

Each hidden layer is linear, norm, activation, dropout, with optional norm and dropout. A linear layer
follows the last. Inputs of more than one dimension are flattened.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from multitudes.base.checks import check_number
from multitudes.ensemble.packing.quick_dropout import QuickDropout
from multitudes.models.blocks import check_counts, reset_he

Norm = Literal["batch", "layer"]
NORMS: dict[Norm, type[nn.BatchNorm1d] | type[nn.LayerNorm]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


class MLP(nn.Module):
    """Hidden layers followed by a linear layer.

    Args:
        inputs: Numbers in one input.
        outputs: Outputs of the last layer.
        hidden: Units of each hidden layer; empty for a linear model.
        norm: "batch", "layer" or None.
        activation: A key of `ACTIVATIONS`.
        dropout: Rate of the dropout after each activation; 0 omits these layers.
        bias: Whether hidden layers have biases.
        output_bias: Whether the last layer has a bias.

    Shape: `[B, ...] -> [B, outputs]`, with `inputs` numbers in each input.

    Example:
        >>> import torch
        >>> net = mlp(64, 10, hidden=(32,), norm="batch", dropout=0.1)
        >>> [type(layer).__name__ for layer in net.layers]
        ['Linear', 'BatchNorm1d', 'ReLU', 'QuickDropout']
        >>> net(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    reset_parameters = reset_he

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden: Sequence[int] = (256, 256),
        norm: Norm | None = None,
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        output_bias: bool = True,
    ) -> None:
        super().__init__()
        check_counts(inputs=inputs, outputs=outputs)
        if any(units < 1 for units in hidden):
            raise ValueError(f"hidden must be numbers of at least 1, got {tuple(hidden)}")
        if norm is not None and norm not in NORMS:
            raise ValueError(f'norm must be "batch", "layer" or None, got {norm!r}')
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        check_number("dropout", dropout, 0, below=1)

        layers: list[nn.Module] = []
        for units in hidden:
            layers.append(nn.Linear(inputs, units, bias))
            if norm is not None:
                layers.append(NORMS[norm](units))
            layers.append(ACTIVATIONS[activation]())
            if dropout > 0:
                layers.append(QuickDropout(dropout))
            inputs = units
        self.flatten = nn.Flatten()
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, outputs, output_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.flatten(x)))


mlp = MLP
