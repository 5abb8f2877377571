"""How a job's training ends, and what its batches are: patience, and sizes by the number of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.run.worker import run
from multitudes.lab.study.spec.assignment import Assignment
from multitudes.training.optimizers import batch_size_for
from tests.lab.study.test_job import metrics_of, on_plane


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_training_ends_early_with_the_best_weights_by_the_validation_part(tmp_path: Path, task: str) -> None:
    directory = on_plane(tmp_path, task, "packed", training={"epochs": 300, "lr": 0.05, "patience": 3})
    run(directory)
    history = metrics_of(directory)["history"]
    scores = [epoch["validation"] for epoch in history]
    best = int(np.argmin(scores))
    assert len(history) < 300 and len(history) == best + 1 + 3
    trained = Trained.read(directory, "cpu")
    part, data = trained.data.validation, trained.data
    with torch.no_grad():
        p = trained.multitude.predict(data.normalised(part.x))
    if task == "classification":
        found = float(-p.log_probs.gather(1, part.y[:, None]).mean())
    else:
        found = float((p.mean - data.standardised(part.y)[:, None]).square().mean().sqrt())
    assert found == pytest.approx(scores[best], rel=1e-4)


def test_a_method_of_recorded_checkpoints_trains_all_its_epochs(tmp_path: Path) -> None:
    directory = on_plane(tmp_path, "regression", "swag", training={"epochs": 12, "patience": 1})
    run(directory)
    history = metrics_of(directory)["history"]
    assert len(history) >= 12 and history[0]["validation"] is None


def test_batches_by_the_number_of_rows(tmp_path: Path) -> None:
    directory = on_plane(tmp_path, "regression", "single", training={"batch_size": 0})
    job = Assignment.read(directory)
    assert job.loader.batch_size == batch_size_for(len(job.data.train))
