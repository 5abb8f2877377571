"""The page's loss plane goes through networks of the study, and is measured anew when they change."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from multitudes.lab.study.run.conclusion import write_landscape
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    options = {"data": "digits", "methods": ["single", "deep"], "seeds": 1, "epochs": 1, "limit": 96, "shift": []}
    run = prepare(Spec.of(**options), tmp_path_factory.mktemp("study") / "run")
    for job in run.jobs:
        run_job(job.directory)
    return run


def test_the_plane_goes_through_three_members_of_the_deep_ensemble(run):
    table = json.loads(write_landscape(run, points=4, images=50).read_text())["plane"]
    assert (len(table["x"]), len(table["y"])) == (4, 4) and [len(row) for row in table["loss"]] == [4] * 4
    trained = Trained.read(run.job("deep", 0).directory)
    x, y = trained.data.normalised(trained.data.test.x[:50]), trained.data.test.y[:50]
    with torch.no_grad():
        losses = [float(F.cross_entropy(trained.multitude.member(i)(x), y)) for i in range(3)]
    assert [spot["loss"] for spot in table["points"]] == pytest.approx(losses, rel=1e-5)
    assert [spot["name"] for spot in table["points"]] == [f"deep-0, member {i}" for i in range(3)]
    first, second = table["points"][:2]
    assert (first["x"], first["y"], second["y"]) == pytest.approx((0, 0, 0), abs=1e-6) and second["x"] > 0


def test_it_is_measured_again_only_when_it_is_of_other_results(run):
    path = write_landscape(run, points=3, images=20)
    before = path.stat().st_mtime_ns
    assert write_landscape(run, points=3, images=20).stat().st_mtime_ns == before
    job = run.job("single", 0)
    job.write_metrics({**job.metrics, "seconds": 1.0})
    assert write_landscape(run, points=3, images=20).stat().st_mtime_ns != before


def test_a_run_without_three_networks_alike_has_no_plane(tmp_path):
    run = prepare(Spec.of(data="digits", methods=["single"], seeds=1, epochs=1, limit=64, shift=[]), tmp_path / "run")
    run_job(run.jobs[0].directory)
    assert write_landscape(run) is None and not (tmp_path / "run" / "landscape.json").exists()
