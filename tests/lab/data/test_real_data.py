"""Real data sets in the folder `MULTITUDES_DATA`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from multitudes.lab import data as md

ROOT = Path(os.environ.get("MULTITUDES_DATA", "."))
UCI = {
    "bostonHousing": (455, 51, 13),
    "concrete": (927, 103, 8),
    "energy": (691, 77, 8),
    "kin8nm": (7373, 819, 8),
    "naval-propulsion-plant": (10741, 1193, 16),
    "power-plant": (8611, 957, 4),
    "protein-tertiary-structure": (41157, 4573, 9),
    "wine-quality-red": (1439, 160, 11),
    "yacht": (277, 31, 6),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("MULTITUDES_DATA" not in os.environ, reason="MULTITUDES_DATA names no folder of data sets"),
]


def test_cifar10_has_its_known_moments(tmp_path: Path) -> None:
    data = md.load(ROOT / "cifar10", ood=[ROOT / "svhn", ROOT / "mnist"])
    assert [len(part) for part in data.parts.values()] == [45000, 5000, 10000] and data.shape == (3, 32, 32)
    assert data.train.y.bincount().tolist() == [4500] * 10 and data.test.y.bincount().tolist() == [1000] * 10
    # The published moments are those of all 50,000 training images.
    assert data.preprocessing.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-3)
    assert data.preprocessing.std.flatten().tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=1e-3)
    assert {name: len(x) for name, x in data.ood.items()} == {"svhn": 26032, "mnist": 10000}
    assert md.read(md.save(data, tmp_path / "cifar10.mtdata")).fingerprint == data.fingerprint


@pytest.mark.parametrize("name", UCI)
def test_uci_sets_have_their_own_splits(name: str) -> None:
    train, test, features = UCI[name]
    arrays = np.load(ROOT / "uci" / f"{name}.npz")
    for fold in range(len(arrays["test_idx"])):
        data = md.load(ROOT / "uci" / f"{name}.npz", fold=fold, numbers="standard")
        assert (data.task, data.shape) == ("regression", (features,))
        assert (len(data.train) + len(data.validation), len(data.test)) == (train, test)
        rows = arrays["test_idx"][fold]
        np.testing.assert_array_equal(data.test.x.numpy(), arrays["X"][rows].astype("float32"))
        np.testing.assert_array_equal(data.test.y.numpy(), arrays["y"][rows].astype("float32"))
        z = data.preprocess(data.train.x).double()
        assert z.mean(0).abs().max() < 1e-3
        varies = data.train.x.amin(0) < data.train.x.amax(0)
        assert (z.std(0, correction=0)[varies] - 1).abs().max() < 1e-3
