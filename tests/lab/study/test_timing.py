"""Times of a study: all methods in turns, when all jobs are done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from multitudes.lab.study.run import costs
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec

METHODS = {"single": {}, "deep": {"members": 3}, "mc_dropout": {}, "snapshots": {}}


def study(folder: Path, **options: object) -> Run:
    small = {"epochs": 4, "shift": [], "device": "cpu", "limit": 40, "draws": 3, **options}
    run = prepare(Spec.of(data="digits", methods=METHODS, seeds=[0], **small), folder)
    for job in run.missing:
        run_job(job.directory)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return study(tmp_path_factory.mktemp("study"))


@pytest.mark.slow
def test_every_method_has_the_times_of_predicting_and_training_beside_a_single_network(run: Run) -> None:
    found = costs.measure_times(run)
    assert found is not None and list(found["methods"]) == list(METHODS)
    for own in found["methods"].values():
        for kind in ("inference", "training"):
            assert 0 < own[kind]["low"] <= own[kind]["ratio"] <= own[kind]["high"]
            assert own[kind]["seconds"] > 0
    assert found["tiny"] is True  # a network of a few thousand weights is a matter of calls
    assert found["machine"]["device"] == "cpu"


def test_times_are_of_what_each_method_predicts_and_trains_with(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are replaced by what is computed: members and draws of a prediction, and members of a step."""
    monkeypatch.setattr(costs.TimedPrediction, "seconds", lambda self: float(len(self.net.predict(self.x).predictions)))
    monkeypatch.setattr(costs.TrainingStep, "seconds", lambda self: float(self.net.members))
    found = costs.measure_times(run)
    assert found is not None
    ratios = {label: (own["inference"]["ratio"], own["training"]["ratio"]) for label, own in found["methods"].items()}
    assert ratios["single"] == (1, 1) and ratios["deep"] == (3, 3) and ratios["mc_dropout"] == (3, 1)
    assert ratios["snapshots"][0] > 1 and ratios["snapshots"][1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [True, False])
def test_networks_whose_speeds_are_compared_are_laid_out_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels_last: bool
) -> None:
    seen: list[bool] = []

    def once(self: costs.TimedPrediction) -> float:
        wide = [weight for weight in self.net.parameters() if weight.dim() == 4 and weight.shape[1] > 1]
        seen.extend(weight.is_contiguous(memory_format=torch.channels_last) for weight in wide)
        return 1.0

    run = study(tmp_path, channels_last=channels_last)
    monkeypatch.setattr(costs.TimedPrediction, "once", once)
    costs.measure_times(run)
    assert seen and set(seen) == {channels_last}


def test_where_nothing_is_done_there_is_nothing_to_time(tmp_path: Path) -> None:
    run = prepare(Spec.of(data="digits", methods=METHODS, seeds=[0], device="cpu"), tmp_path)
    assert costs.measure_times(run) is None
