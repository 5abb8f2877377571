"""Names, references and comparisons for tests of `Predictive`."""

import re
from itertools import combinations

import numpy as np
import pytest
import scipy.stats
import torch

PER_CLASS = ("probs", "log_probs")
PER_MEMBER = ("member_probs", "member_log_probs")
PER_INPUT = (
    "label",
    "confidence",
    "entropy",
    "expected_entropy",
    "mutual_information",
    "variance",
    "disagreement",
    "max_logit",
)
CLASSIFICATION = PER_CLASS + PER_MEMBER + PER_INPUT
REFERENCES = {  # of the members' probabilities [S, B, C, ...]
    "member_probs": lambda members: members,
    "member_log_probs": np.log,
    "probs": lambda members: members.mean(0),
    "log_probs": lambda members: np.log(members.mean(0)),
    "label": lambda members: members.mean(0).argmax(1),
    "confidence": lambda members: members.mean(0).max(1),
    "entropy": lambda members: scipy.stats.entropy(members.mean(0), axis=1),
    "expected_entropy": lambda members: scipy.stats.entropy(members, axis=2).mean(0),
    "mutual_information": lambda members: scipy.stats.entropy(members, members.mean(0, keepdims=True), axis=2).mean(0),
    "variance": lambda members: members.var(0).mean(1),
    "disagreement": lambda members: np.mean(
        [one != two for one, two in combinations(members.argmax(2), 2)] or [0 * members[0, :, 0]], axis=0
    ),
}
MOMENTS = ("mean", "epistemic_variance", "aleatoric_variance", "variance", "std")


def randn(*shape, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def close(actual, expected, atol=1e-6, rtol=1e-5):
    """Assert equal shapes, and values equal up to rounding; dtypes may differ.

    Use it for computations whose last bits may differ: in other batches or chunks, by another runner or library, or on
    another CPU. Use `torch.equal` for the same operations on the same memory layout.
    """
    expected = torch.as_tensor(expected)
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=atol, rtol=rtol)


def raises(sentence):
    """Expect a ValueError with exactly this message."""
    return pytest.raises(ValueError, match=f"^{re.escape(sentence)}$")
