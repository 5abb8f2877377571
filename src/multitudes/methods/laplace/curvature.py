"""The curvature of a likelihood in the weights of an output layer, in one pass over data.

Row n of the data has features `phi_n [F]` (the layer's input, with a one appended for the bias) and outputs
`f_n = W phi_n`. Let `H_n` be the Hessian of its negative log-likelihood in `f_n`. The generalised Gauss-Newton matrix
of all rows is

    full     sum_n H_n x phi_n phi_n^T
    kron     (sum_n H_n) x (mean_n phi_n phi_n^T)             Ritter, Botev & Barber, 2018
    diag     the diagonal of the full one

For a softmax `H_n = diag(p) - p p^T`. All other likelihoods treat outputs as independent: `H_n = diag(h)`, and the full
matrix has a block `sum_n h_no phi_n phi_n^T` per output. A row of weight k counts as k rows. One eigendecomposition
serves every prior.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from multitudes.methods.laplace.layers import STRUCTURES

WORKING = 4
"""Matrices of this size that a decomposition holds at once: the matrix, its eigenvectors, LAPACK's workspace."""
WIDE = 8
"""Bytes per number: curvatures are summed in float64."""
PART = 2**25
"""Bytes of intermediate results; larger batches are processed in parts."""


def wide(values: Tensor) -> Tensor:
    """Convert to float64, or to float32 on MPS, which has no float64."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def bytes_for(structure: str, outputs: int, features: int, softmax: bool) -> int:
    """Return the memory that a curvature and its decomposition take, in bytes."""
    weights = outputs * features
    if structure == "full":
        return WORKING * WIDE * (weights**2 if softmax else outputs * features**2)
    factors = WORKING * WIDE * (outputs**2 + features**2) if structure == "kron" else 0
    return factors + 3 * WIDE * weights


def structure_for(
    structure: str, outputs: int, features: int, softmax: bool, budget: float, full: float = float("inf")
) -> str:
    """Return the given structure, or for "auto" the richest one within `budget` bytes (`full` bytes for a full one)."""
    choices = STRUCTURES if structure == "auto" else (structure,)
    for choice in choices:
        most = min(budget, full) if (structure, choice) == ("auto", "full") else budget
        if bytes_for(choice, outputs, features, softmax) <= most:
            return choice
    needed = bytes_for(choices[-1], outputs, features, softmax)
    smaller = STRUCTURES[STRUCTURES.index(choices[-1]) + 1 :]
    instead = f"structure={' or '.join(map(repr, smaller))}, or more memory" if smaller else "more memory"
    raise ValueError(
        f"structure={structure!r} takes {needed / 1e9:,.3g} GB for the {outputs:,} x {features:,} weights of the "
        f"output layer, but memory is {budget / 1e9:,.3g} GB: pass {instead}"
    )


class Curvature:
    """Sum over rows in one of the three structures, for a softmax or for independent outputs."""

    def __init__(self, structure: str, outputs: int, features: int, softmax: bool, like: Tensor) -> None:
        self.structure, self.outputs, self.features, self.softmax = structure, outputs, features, softmax
        self.rows = 0.0
        self.dtype = wide(like[:0]).dtype

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=like.device)

        if structure == "full":
            self.whole = (
                zeros(1, outputs * features, outputs * features) if softmax else zeros(outputs, features, features)
            )
        elif structure == "kron":
            self.of_outputs = zeros(outputs, outputs) if softmax else zeros(outputs)
            self.of_features = zeros(features, features)
        else:
            self.diagonal = zeros(outputs, features)

    def add(self, phi: Tensor, curvatures: Tensor, weight: Tensor) -> None:
        """Add rows of features `[R, F]` and weights `[R]`.

        `curvatures [R, O]` are the probabilities p for a softmax, or else the second derivatives h times the weights.
        """
        widest = self.outputs * self.features if self.structure == "full" and self.softmax else self.features
        size = max(1, PART // (WIDE * max(widest, self.outputs)))
        for rows, own, weights in zip(phi.split(size), curvatures.split(size), weight.split(size), strict=True):
            self._add(rows.to(self.dtype), own.to(self.dtype), weights.to(self.dtype)[:, None])
        self.rows += float(weight.sum())

    def _add(self, phi: Tensor, curvatures: Tensor, weight: Tensor) -> None:
        weighted = weight * curvatures if self.softmax else curvatures
        if self.structure == "diag":
            second = weighted * (1 - curvatures) if self.softmax else curvatures
            self.diagonal += second.mT @ phi.square()
        elif self.structure == "kron":
            self.of_features += phi.mT @ (weight * phi)
            total = weighted.sum(0)
            self.of_outputs += total.diag() - weighted.mT @ curvatures if self.softmax else total
        else:
            for output in range(self.outputs):
                block = phi.mT @ (weighted[:, output, None] * phi)
                place = slice(output * self.features, (output + 1) * self.features)
                (self.whole[0, place, place] if self.softmax else self.whole[output]).add_(block)
            if self.softmax:
                products = (weight.sqrt() * curvatures)[:, :, None] * phi[:, None, :]
                self.whole[0].addmm_(products.flatten(1).mT, products.flatten(1), alpha=-1)

    def spectrum(self) -> Spectrum:
        """Decompose into eigenvalues and eigenvectors."""
        if self.structure == "diag":
            return Spectrum("diag", self.diagonal, self.outputs)
        if self.structure == "full":
            values, vectors = torch.linalg.eigh(self.whole)
            return Spectrum("full", values.clamp(min=0), self.outputs, vectors=vectors)
        of_features, right = torch.linalg.eigh(self.of_features / self.rows)
        if self.softmax:
            of_outputs, left = torch.linalg.eigh(self.of_outputs)
        else:
            of_outputs, left = self.of_outputs, torch.eye(self.outputs, dtype=self.dtype, device=right.device)
        values = of_outputs.clamp(min=0)[:, None] * of_features.clamp(min=0)
        return Spectrum("kron", values, self.outputs, left=left, right=right)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a curvature, `[K, R]` for K blocks if "full" and else `[O, F]`, and its eigenvectors.

    Without a softmax the first axis runs over the outputs.
    """

    structure: str
    values: Tensor
    outputs: int
    vectors: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None

    def posterior(self, precisions: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a `LaplaceLayer`, given the eigenvalues of the posterior precision."""
        deviations = precisions.rsqrt()
        if self.vectors is not None:
            return {"factor": self.vectors * deviations[:, None, :]}
        factors = {"left": self.left, "right": self.right}
        return {"deviations": deviations, **{name: own for name, own in factors.items() if own is not None}}

    def project(self, phi: Tensor) -> Tensor:
        """Project features `[R, F]` to the squares that `variances` needs, for any precisions."""
        phi = phi.to(self.values.dtype)
        if self.vectors is not None:
            blocks = self.vectors.reshape(self.outputs, phi.shape[1], -1)
            return torch.einsum("rf,ofk->rok", phi, blocks).square()
        return (phi if self.right is None else phi @ self.right).square()

    def variances(self, projected: Tensor, precisions: Tensor) -> Tensor:
        """Return the variances of the outputs, `[R, O]`, given the eigenvalues of the posterior precision."""
        variances = precisions.reciprocal()
        if self.vectors is not None:
            return (projected * variances).sum(-1)
        own = projected @ variances.mT
        return own if self.left is None else own @ self.left.square().mT
