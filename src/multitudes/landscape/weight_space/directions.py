"""Directions in weight space: vectors `[P]`, in the order of `recorder.flat_weights`.

Li et al., *Visualizing the loss landscape of neural nets*, 2018, make the landscapes of two networks comparable: they
scale each filter of a random direction d to the norm of this filter in the weights theta, and set biases and norm
layers to zero:

    d_ij  <-  d_ij / |d_ij| * |theta_ij|            filter j of layer i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from multitudes.base.checks import check_seed
from multitudes.surgery.select import TRANSPOSED
from multitudes.training.recorder import weights_of

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def random_direction(network: nn.Module, seed: int = 0) -> Tensor:
    """Draw a standard normal direction, one number per weight.

    Args:
        network: Network whose weights define P.
        seed: Seed of the direction.

    Returns:
        Direction `[P]` on the CPU.
    Example:
        >>> random_direction(nn.Linear(3, 2)).shape
        torch.Size([8])
    """
    check_seed(seed)
    return torch.randn(_count(network), generator=torch.Generator().manual_seed(seed))


def filter_normalised(direction: Tensor, network: nn.Module) -> Tensor:
    """Scale each filter of a direction to the norm of this filter in the network, and set biases and norms to zero.

    A filter produces one output channel: a row of a matrix or kernel, or a column in transposed convolutions.

    Args:
        direction: Direction `[P]`, for example from `random_direction`.
        network: Network whose weights define the norms.

    Returns:
        Direction `[P]` on the CPU.
    Example:
        >>> network = nn.Linear(2, 2)
        >>> _ = network.weight.data.copy_(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        >>> filter_normalised(torch.tensor([1.0, 0.0, 0.0, -7.0, 1.0, 1.0]), network)
        tensor([ 5.,  0.,  0., -2.,  0.,  0.])
    """
    check_direction("direction", direction, network)
    owners = {id(p): module for module in network.modules() for p in module._parameters.values() if p is not None}
    parts, scaled = direction.detach().cpu().split([w.numel() for w in weights_of(network).values()]), []
    for part, (name, weight) in zip(parts, weights_of(network).items(), strict=True):
        owner, theta = owners[id(weight)], weight.detach().to(part)
        if isinstance(owner, _NORMS) or theta.dim() < 2 or "bias" in name.rpartition(".")[2]:
            scaled.append(torch.zeros_like(part))
            continue
        across = tuple(range(1, theta.dim()))
        if isinstance(owner, TRANSPOSED):  # [groups * inputs, outputs, ...]
            theta, across = theta.unflatten(0, (owner.groups, -1)), (1, *range(3, theta.dim() + 1))
        d = part.view_as(theta)
        norm, length = (torch.linalg.vector_norm(each, dim=across, keepdim=True) for each in (d, theta))
        scaled.append(torch.where(norm > 0, d / norm * length, 0.0).flatten())
    return torch.cat(scaled)


# -- coordinates -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Frame:
    """Coordinates on a line (A = 1) or plane (A = 2): `origin [P]` and `directions [A, P]`, float64."""

    origin: Tensor
    directions: Tensor

    @classmethod
    def through(cls, points: Sequence[Tensor], names: Sequence[str] = ("a", "b", "c")) -> Frame:
        """Return the frame through two or three points: directions from a to b and towards c, by Gram-Schmidt.

        >>> frame = Frame.through([torch.zeros(3), torch.tensor([0.0, 0, 2]), torch.tensor([3.0, 0, 4])])
        >>> frame.project(torch.tensor([3.0, 0, 4])), frame.directions
        (tensor([4., 3.], dtype=torch.float64), tensor([[0., 0., 1.], [1., 0., 0.]], dtype=torch.float64))
        """
        origin, *others = (point.double() for point in points)
        directions: list[Tensor] = []
        for name, point in zip(names[1:], others, strict=True):
            step = rest = point - origin
            for direction in directions:
                rest = rest - (rest @ direction) * direction
            if not rest.norm() > 1e-6 * step.norm():
                what = f"lies on the line through {names[0]} and {names[1]}" if directions else f"equals {names[0]}"
                raise ValueError(f"{name} {what}: they do not span a {'plane' if directions else 'line'}")
            directions.append(rest / rest.norm())
        return cls(origin, torch.stack(directions))

    @classmethod
    def along(cls, origin: Tensor, directions: Sequence[Tensor]) -> Frame:
        """Return the frame with these directions, not normalised: one unit is the length of a direction."""
        frame = cls(origin.double(), torch.stack([direction.detach().cpu().double() for direction in directions]))
        unit = frame.directions / frame.directions.norm(dim=1, keepdim=True)
        if frame.axes == 2 and not (unit[1] - (unit[0] @ unit[1]) * unit[0]).norm() > 1e-6:
            raise ValueError("the two directions are parallel: they do not span a plane")
        return frame

    @property
    def axes(self) -> int:
        """Number of directions."""
        return len(self.directions)

    def to(self, device: torch.device | str) -> Frame:
        """Return the frame on another device, which then computes weights."""
        return Frame(self.origin.to(device), self.directions.to(device))

    def weights(self, coordinates: Tensor) -> Tensor:
        """Return the weights at coordinates, `[..., A] -> [..., P]`, float64."""
        weights, coordinates = self.origin, coordinates.to(self.origin.device)
        for axis, direction in enumerate(self.directions):
            weights = weights + coordinates[..., axis, None] * direction
        return weights

    def project(self, weights: Tensor) -> Tensor:
        """Return the coordinates of the nearest point, `[..., P] -> [..., A]`, float64."""
        gram = self.directions @ self.directions.T
        return (weights.double() - self.origin) @ self.directions.T @ torch.linalg.inv(gram)


def check_direction(name: str, direction: Tensor, network: nn.Module) -> None:
    """Raise unless a direction has one finite number per weight and is not zero."""
    count = _count(network)
    if not isinstance(direction, Tensor) or direction.shape != (count,):
        got = f"shape {list(direction.shape)}" if isinstance(direction, Tensor) else type(direction).__name__
        raise ValueError(f"{name} must be a vector with one number per weight, [{count}], got {got}")
    bad = (~direction.isfinite()).nonzero()
    if len(bad):
        at = int(bad[0])
        raise ValueError(f"{name} must be finite, got {direction[at].item()} at index {at}")
    if not direction.any():
        raise ValueError(f"{name} must not be zero")


def _count(network: nn.Module) -> int:
    if not isinstance(network, nn.Module):
        raise ValueError(f"network must be an nn.Module, got {type(network).__name__}")
    return sum(weight.numel() for weight in weights_of(network).values())
