"""A study on a cluster ends like one on this machine, also where a worker dies."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from multitudes.study.cluster import run_cluster
from multitudes.study.local import run_local
from multitudes.study.planning import prepare
from tests.study_cases import make  # noqa: F401

# What it writes depends on its configuration and its data alone.
FAKE = """
import hashlib, json, os, sys, time
from pathlib import Path

notes, directory = Path(sys.argv[1]), Path(sys.argv[2])
config = json.loads((directory / "config.json").read_text())
(notes / f"{directory.name}-{os.getpid()}-{os.getppid()}").touch()
(directory / "log.jsonl").write_text(json.dumps({"event": "epoch", "epoch": 1, "epochs": 2, "loss": 0.5}) + "\\n")
time.sleep(1.5)
if directory.name == "deep-1":
    with (directory / "log.jsonl").open("a") as file:
        file.write(json.dumps({"event": "failed", "message": "the loss is not finite"}) + "\\n")
    raise SystemExit(1)
digest = hashlib.sha256((directory / config["data"]["file"]).read_bytes())
digest.update(json.dumps({**config, "device": None}).encode())
(directory / "predictions.npz").write_bytes(digest.digest() * 1000)
result = {"threads": os.environ["OMP_NUM_THREADS"], "is": digest.hexdigest()}
(directory / "metrics.json").write_text(json.dumps(result))
"""


def results(run):
    files = ("metrics.json", "predictions.npz", "log.jsonl")
    return {job.name: [(job.directory / file).read_bytes() for file in files] for job in run.done}


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
        job, seed, child, worker = seen[0].name.split("-")
        os.kill(int(worker), signal.SIGKILL)
        self.killed = f"{job}-{seed}", int(child)


@pytest.mark.slow
def test_a_study_on_two_workers_one_of_which_is_killed_ends_like_a_local_one(make, tmp_path, cluster):
    script, notes = tmp_path / "fake.py", tmp_path / "notes"
    script.write_text(FAKE)
    notes.mkdir()
    spec = make(methods=["single", "packed", "deep"])
    local, remote = prepare(spec, tmp_path / "local"), prepare(spec, tmp_path / "remote")
    command = [sys.executable, "-S", str(script), str(notes)]
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
    assert {(p.epoch, p.epochs, p.loss) for s in seen for p in s.running} >= {(1, 2, 0.5)}

    assert run_cluster(remote, command=command).done == [], "what is done is not done again"


@pytest.mark.slow
def test_what_a_cluster_cannot_give_is_told(make, tmp_path, cluster):
    run = prepare(make(methods=["single"], device="cuda"), tmp_path / "run")
    with pytest.raises(ValueError, match="device='cuda' needs GPUs, got a cluster with 0"):
        run_cluster(run)
    with pytest.raises(ValueError, match="cpus must be above 0"):
        run_cluster(run, cpus=0)
    cluster.shutdown()
    with pytest.raises(ValueError, match="ray='auto': no cluster can be reached there"):
        run_cluster(run, "auto")
