"""A study on a cluster ends like one on this machine, also where a worker dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from multitudes.lab.study.run.execution import run_cluster, run_local
from multitudes.lab.study.spec.planning import prepare
from tests.lab.study.study_cases import fake, make  # noqa: F401

FILES = ("metrics.json", "predictions.safetensors")


def results(run):
    logs = {job.name: [event | {"time": None} for event in job.events()[0]] for job in run.jobs}
    return logs, {job.name: [(job.directory / f).read_bytes() for f in FILES] for job in run.done}


@pytest.fixture
def cluster(monkeypatch):
    """Two workers."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


class Killer(threading.Thread):
    """Kills the worker of the first job that it sees."""

    def __init__(self, notes):
        super().__init__(daemon=True)
        self.notes, self.killed = notes, None

    def run(self):
        while not (seen := list(self.notes.iterdir())):
            time.sleep(0.02)
        time.sleep(0.5)
        job, seed, _, child, driver = seen[0].name.split("-")
        above = Path(f"/proc/{driver}/stat").read_text().rpartition(")")[2].split()[1]  # of the job's driver
        os.kill(int(above), signal.SIGKILL)
        self.killed = f"{job}-{seed}", int(child)


@pytest.mark.slow
def test_a_study_on_two_workers_one_of_which_is_killed_ends_like_a_local_one(make, fake, tmp_path, cluster):
    notes = tmp_path / "notes"
    notes.mkdir()
    spec = make(methods=["single", "packed", "deep"])
    local, remote = prepare(spec, tmp_path / "local"), prepare(spec, tmp_path / "remote")
    command = fake(seconds=1.5, notes=str(notes), **{"deep-1": "fails"})
    alone = run_local(local, command=command)
    for note in notes.iterdir():
        note.unlink()

    killer, seen = Killer(notes), []
    killer.start()
    outcome = run_cluster(remote, command=command, on_event=seen.append)
    killer.join()

    assert sorted(outcome.done) == sorted(alone.done) and len(outcome.done) == 5, outcome
    assert outcome.failed == alone.failed == {"deep-1": "the loss is not finite"}
    assert results(remote) == results(local)
    name, child = killer.killed
    tries = list(notes.glob(f"{name}-*"))
    assert len(tries) == 2, "the job whose worker was killed was run again"
    assert not os.path.exists(f"/proc/{child}"), "and its first process ended with the worker"
    assert len(list(notes.glob("deep-1-*"))) == 1, "a job that fails by itself is not tried again"
    assert (seen[0].done, seen[-1].done, seen[-1].failed) == (0, 5, 1)
    assert max(len(s.running) for s in seen) >= 2
    told = {(p.epoch, p.epochs, p.loss) for s in seen for p in s.running}
    assert told & {(1, 3, 1.0), (2, 3, 0.5), (3, 3, 1 / 3)}

    assert run_cluster(remote, command=command).done == [], "what is done is not done again"


@pytest.mark.slow
def test_what_a_cluster_cannot_give_is_told(make, tmp_path, cluster):
    run = prepare(make(methods=["single"], device="cuda"), tmp_path / "run")
    with pytest.raises(ValueError, match="device='cuda' needs GPUs, got a cluster with 0 GPUs"):
        run_cluster(run)
    with pytest.raises(ValueError, match="cpus must be above 0"):
        run_cluster(run, cpus=0)
    cluster.shutdown()
    with pytest.raises(ValueError, match="ray='auto': cannot reach a cluster at this address"):
        run_cluster(run, "auto")
