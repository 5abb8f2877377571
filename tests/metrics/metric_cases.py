"""Predictions, ways to stream them and textbook loops that the tests of metrics share."""

import itertools

import numpy as np
import torch

# Predictions and targets ----------------------------------------------------------------------------------


def logits(*shape, seed=0, scale=2.0, dtype=torch.float32):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def classes(count, *shape, seed=1):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def random_case(n=57, c=4, seed=0, dtype=torch.float32):
    """Probabilities `[n, c]` and classes."""
    return logits(n, c, seed=seed, dtype=dtype).softmax(1), classes(c, n, seed=seed + 1)


def binary(confidences, correct):
    """Predictions of two classes with the given confidences, right where `correct`."""
    p = torch.tensor(confidences)
    return torch.stack([p, 1 - p], 1), 1 - torch.tensor(correct).long()


def with_twins(p):
    """The same probabilities, but that several rows are the same."""
    return torch.where(p.amax(1, keepdim=True) > 0.7, p, p[:1])


def changed(values, value, *index):
    """A copy with another value at an index."""
    values = values.clone()
    values[index] = value
    return values


def pixels(p, y, ignore=None):
    """The pixels of dense probabilities `[B, C, H, W]` and classes `[B, H, W]`, one after the other."""
    found = [at for at in np.ndindex(*y.shape) if y[at] != ignore]
    return torch.stack([p[b, :, i, j] for b, i, j in found]), torch.stack([y[at] for at in found])


MEMBERS = {
    "random": logits(4, 40, 5),
    "two members": logits(2, 40, 5),
    "two classes": logits(3, 40, 2),
    "one sample": logits(3, 1, 4),
    "alike": logits(1, 20, 4).expand(3, -1, -1),
    "nearly sure": 20 * logits(3, 20, 4),
    "float64": logits(3, 20, 4).double(),
    "many classes": logits(2, 3, 700),
}
"""Logits `[S, B, C]` of members to be compared."""


# Streaming ------------------------------------------------------------------------------------------------


def streamed(metric, batch, *data):
    """What a metric says that saw the data in batches."""
    for start in range(0, len(data[0]), batch):
        metric.update(*(part[start : start + batch] for part in data))
    return metric.compute()


def orders(members, samples, seed):
    """A random order of each."""
    mixed = torch.Generator().manual_seed(seed)
    return torch.randperm(members, generator=mixed), torch.randperm(samples, generator=mixed)


# Textbook computations ------------------------------------------------------------------------------------


def text_consistency(labels, masks=None):
    """Eq. (37) for each place of labels `[T, ...]`, mean over all steps that count."""
    same = [
        labels[t][at] == labels[t + 1][at]
        for t in range(len(labels) - 1)
        for at in np.ndindex(*labels.shape[1:])
        if masks is None or (masks[t][at] and masks[t + 1][at])
    ]
    return np.mean(same)


def text_matrix(of_pair, z):
    """What is said of each pair of members of `[S, ...]`, and 0 of a member and itself."""
    return np.array([[of_pair(z, i, j) if i != j else 0.0 for j in range(len(z))] for i in range(len(z))])


def text_mean(of_pair, z):
    """The mean over both orders of all pairs of members."""
    return np.mean([of_pair(z, i, j) for i, j in itertools.permutations(range(len(z)), 2)])
