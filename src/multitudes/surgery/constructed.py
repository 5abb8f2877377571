"""What a constructor did to a network's parameters that its layers' own rules would not, told from their values.

A user's `__init__` may draw weights with another deviation, start gains at zero, forget gates at one, transformations
at the identity, positions at sinusoids. No layer knows of that, and its own `reset_parameters` would undo it. It shows,
though, when a parameter is compared with what the rule draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["Own", "compared"]

_SAMPLE = 2**16
"""As many numbers of a parameter are looked at."""
_SIDE = 256
"""Of a table, as many rows and columns."""
_FEW = 16
"""A parameter with more values than these that repeat is a table, not draws and constants."""
_NEIGHBOURS = 0.8
"""The correlation of neighbours in a table such as sinusoids; units of a layer, drawn or trained, have far less."""


@dataclass(frozen=True)
class Own:
    """How a parameter was initialised by other code than its layer's, and so how it is to be drawn again."""

    reason: str
    kept: bool = False
    """Whether it stays as it is."""
    constants: list[complex] = field(default_factory=list)
    """Values that stay where they are; the others are drawn."""
    centre: complex = 0.0
    """The mean of what the layer's own rule draws."""
    scale: float = 1.0
    """How many times the rule's deviation its own is."""
    mean: complex = 0.0
    orthogonal: float | None = None
    """The gain of an orthogonal matrix."""

    @property
    def exact(self) -> bool:
        """Whether drawing it again does what the constructor did: one constant, or its layer's own but for some."""
        ruled = not self.kept and self.orthogonal is None and self.scale == 1
        return ruled or (self.kept and len(self.constants) == 1)

    def settle(self, parameter: Tensor, before: Tensor) -> None:
        """Change what the layer's rule has drawn, in place, to what the constructor would have."""
        if self.kept:
            parameter.copy_(before)
            return
        if self.orthogonal is not None:
            blocks = [
                nn.init.orthogonal_(block.float(), self.orthogonal) for block in _square_blocks(parameter.clone())
            ]
            parameter.copy_(torch.cat(blocks).view(parameter.shape))
            return
        drawn = (parameter - self.centre) * self.scale + self.mean
        drawn = torch.where(before == parameter, before, drawn)  # what the rule sets to a constant, such as padding
        for constant in self.constants:
            drawn = torch.where(before == constant, before, drawn)
        parameter.copy_(drawn)


def compared(given: Tensor, drawn: Tensor) -> Own | None:
    """How a given parameter differs from what its layer's rule has drawn; None where that may be the rule's draw."""
    if torch.equal(given, drawn) or not given.numel():
        return None
    if given.numel() == 1:
        return Own("one constant", kept=True, constants=[given.item()]) if _is_round(given.item()) else None
    if _constant(given):
        return Own("one constant", kept=True, constants=[given.flatten()[0].item()])
    if _constant(drawn):  # where the rule gives a constant, training has changed it
        return None
    gain = _gain(given)
    if gain is not None and _gain(drawn) is None:
        return Own("orthogonal, and drawn so again", orthogonal=gain)
    if _is_table(given) and not _is_table(drawn):
        return Own("values that follow each other, no independent draws", kept=True)
    return _other_distribution(given, drawn)


def _other_distribution(given: Tensor, drawn: Tensor) -> Own | None:
    zeros = int((given == 0).sum()) > max(3, 2 * int((drawn == 0).sum()))  # padding, in whatever large a table
    at = _sampled(given)
    given, drawn = given.flatten()[at], drawn.flatten()[at]
    constants = _repeated(given, drawn) if not given.is_complex() else []
    constants += [0.0] if zeros and 0 not in constants else []
    if len(constants) > _FEW:
        return Own("few values, no independent draws", kept=True, constants=constants)
    free = torch.ones(len(given), dtype=torch.bool, device=given.device)
    for constant in constants:
        free &= given != constant
    count = int(free.sum())
    if not count:
        return Own("constants", kept=True, constants=constants)
    given, drawn = _exact(given[free]), _exact(drawn[free])
    differs = False
    if count >= 8:
        ratio = (given.std() / drawn.std().clamp(min=1e-30)).item()
        apart = abs(given.mean() - drawn.mean()) / torch.maximum(given.std(), drawn.std()).clamp(min=1e-30)
        # Five standard errors and more, whatever is drawn; a fifth more or less is no other rule in large tensors.
        differs = abs(math.log(max(ratio, 1e-30))) > max(0.22, 5 / math.sqrt(count)) or (
            apart.item() > max(0.1, 6 * math.sqrt(2 / count))
        )
    if differs:
        reason = f"{ratio:.3g} times the deviation of its layer's own, and drawn so again"
        return Own(reason, False, constants, drawn.mean().item(), ratio, given.mean().item())
    return Own("some constants, which stay", constants=constants) if constants else None


def _sampled(tensor: Tensor) -> Tensor:
    """The places of all numbers, or of as many as are looked at."""
    if tensor.numel() <= _SAMPLE:
        return torch.arange(tensor.numel(), device=tensor.device)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(tensor.numel(), (_SAMPLE,), generator=generator).to(tensor.device)


def _repeated(given: Tensor, drawn: Tensor) -> list[complex]:
    """The values that occur more often than they would among draws."""
    most = int(drawn.unique(return_counts=True)[1].max())
    values, counts = given.unique(return_counts=True)
    return [value.item() for value in values[counts >= max(3, 2 * most + 1)]]


def _constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _is_round(value: complex) -> bool:
    """Whether a number is written with three digits, as one that was drawn would hardly be."""
    return not isinstance(value, complex) and float(torch.tensor(float(f"{value:.3g}"))) == value


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _square_blocks(tensor: Tensor) -> list[Tensor]:
    """A matrix as the square ones that it is made of, as the gates of an LSTM are; itself where it is not."""
    matrix = tensor.flatten(1)
    rows, columns = matrix.shape
    return list(matrix.split(columns)) if rows % columns == 0 and columns > 1 else [matrix]


def _gain(tensor: Tensor) -> float | None:
    """The gain of an orthogonal matrix, or of a stack of them; None where it is none."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or min(tensor.flatten(1).shape) < 2:
        return None
    # Rows of few draws may be nearly orthogonal by chance: what was made so is so to rounding.
    close = 1e-4 if torch.finfo(tensor.dtype).eps < 1e-6 else 1e-2
    gains = []
    for block in _square_blocks(tensor):
        block = block if block.shape[0] <= block.shape[1] else block.mT
        for rows in (block[:16].float(), block[:2048].float()):  # a few tell of most that they are not
            products = rows @ rows.mT
            gain = products.diagonal().mean().clamp(min=1e-30)
            if not bool(((products / gain - torch.eye(len(products), device=products.device)).abs() < close).all()):
                return None
        if bool((block != 0).sum() <= 2 * len(block)):  # an identity, or a permutation: nothing that was drawn
            return None
        gains.append(gain.sqrt().item())
    return sum(gains) / len(gains)


def _is_table(tensor: Tensor) -> bool:
    """Whether neighbours along the first or the second axis are alike."""
    if tensor.dim() < 2 or tensor.numel() < 64:
        return False
    table = tensor.detach()[:_SIDE, :_SIDE]
    table = table.flatten(2) if table.dim() > 2 else table
    table = (torch.view_as_real(table).sum(-1) if table.is_complex() else table).float()
    for axis in (0, 1):
        rows = table.movedim(axis, 0).flatten(1)
        if len(rows) >= 8:
            rows = rows - rows.mean(0)
            if bool((rows[1:] * rows[:-1]).sum() > _NEIGHBOURS * rows.square().sum()):
                return True
    return False
