"""Studies on Ray nodes of this machine end like local ones, also if a worker, a node, the head or the study is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from multitudes.lab.study.run import execution
from multitudes.lab.study.run.execution import run_cluster, run_local
from multitudes.lab.study.run.monitor import Interrupted
from multitudes.lab.study.spec.planning import prepare
from tests.lab.study.study_cases import fake, folders_left, kill_node, make, nodes, run  # noqa: F401
from tests.lab.study.test_interruptions import first_epochs, is_alive, processes, results, wait_until


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of one node with two workers, in this process."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture
def two_nodes():
    pytest.importorskip("ray")
    with nodes(2) as cluster:
        yield cluster


@pytest.fixture
def notes(tmp_path):
    """A folder in which each job leaves a note when it starts."""
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def swept(seconds: float = 15) -> bool:
    """Return whether no temporary folder is left, after a moment."""
    return wait_until(lambda: not folders_left(), seconds)


class Killer(threading.Thread):
    """Kill the worker of the first job that starts."""

    def __init__(self, notes):
        super().__init__(daemon=True)
        self.notes, self.killed = notes, None

    def run(self):
        while not (seen := list(self.notes.iterdir())):
            time.sleep(0.02)
        time.sleep(0.5)
        job, seed, _, child, driver = seen[0].name.split("-")
        above = Path(f"/proc/{driver}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(above), signal.SIGKILL)
        self.killed = f"{job}-{seed}", int(child)


@pytest.mark.slow
def test_a_study_whose_worker_is_killed_ends_like_a_local_one(make, fake, tmp_path, cluster, notes):
    def files(run):
        logs = {job.name: [event | {"time": None} for event in job.events()[0]] for job in run.jobs}
        names = ("metrics.json", "predictions.safetensors")
        return logs, {job.name: [(job.directory / name).read_bytes() for name in names] for job in run.done}

    spec = make(methods=["single", "packed", "deep"])
    local, remote = prepare(spec, tmp_path / "local"), prepare(spec, tmp_path / "remote")
    command = fake(seconds=1.5, notes=str(notes), **{"deep-1": "fails"})
    expected = run_local(local, command=command)
    for note in notes.iterdir():
        note.unlink()

    killer, seen = Killer(notes), []
    killer.start()
    outcome = run_cluster(remote, command=command, on_event=seen.append)
    killer.join()

    assert sorted(outcome.done) == sorted(expected.done) and len(outcome.done) == 5, outcome
    assert outcome.failed == expected.failed == {"deep-1": "the loss is not finite"}
    assert files(remote) == files(local)
    name, child = killer.killed
    assert len(list(notes.glob(f"{name}-*"))) == 2, "the job of the killed worker ran again"
    assert not os.path.exists(f"/proc/{child}"), "its first process ended with the worker"
    assert len(list(notes.glob("deep-1-*"))) == 1, "a job that fails by itself is not retried"
    assert (seen[0].done, seen[-1].done, seen[-1].failed) == (0, 5, 1)
    assert max(len(s.running) for s in seen) >= 2
    shown = {(p.epoch, p.epochs, p.loss) for s in seen for p in s.running}
    assert shown & {(1, 3, 1.0), (2, 3, 0.5), (3, 3, 1 / 3)}
    assert run_cluster(remote, command=command).done == [], "finished jobs are not repeated"


# -- unreachable clusters ----------------------------------------------------------------------------------


def test_an_address_without_a_cluster_is_refused_at_once(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match=rf"ray='127.0.0.1:{port}': cannot reach a cluster at this address"):
        run_cluster(run, f"127.0.0.1:{port}")
    with pytest.raises(ValueError, match="an address must be HOST:PORT, auto or local"):
        run_cluster(run, "head:node")
    with pytest.raises(ValueError, match="cpus must be above 0"):
        run_cluster(run, cpus=0)


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_given_up(run, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(execution, "PATIENCE", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match=rf"ray='{address}': the cluster does not answer, with 0 of 4 jobs done"):
            run_cluster(run, address)
    assert not processes(os.getpid())


@pytest.mark.slow
def test_a_cluster_without_gpus_is_refused_for_cuda(make, tmp_path, cluster):
    run = prepare(make(methods=["single"], device="cuda"), tmp_path / "run")
    with pytest.raises(ValueError, match="device='cuda' needs GPUs, got a cluster with 0 GPUs"):
        run_cluster(run)
    cluster.shutdown()
    with pytest.raises(ValueError, match="ray='auto': cannot reach a cluster at this address"):
        run_cluster(run, "auto")


@pytest.mark.slow
def test_a_cluster_without_large_enough_nodes_is_refused(run, two_nodes, monkeypatch):
    monkeypatch.setattr(execution, "PATIENCE", 5.0)
    with pytest.raises(ValueError, match="no node of the cluster has 8 CPU for a job"):
        run_cluster(run, two_nodes.address, cpus=8)


HEAD = """
import sys
from tests.lab.study.study_cases import nodes
with nodes(1) as cluster:
    print(cluster.address, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_refused_token_is_named(run, monkeypatch):
    pytest.importorskip("ray")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 32}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HEAD], env={**os.environ, **token}, **pipes) as head:
        address = head.stdout.readline().strip()
        for name, value in {**token, "RAY_AUTH_TOKEN": "b" * 32}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=r"refused the token \(RAY_AUTH_TOKEN\)|does not answer"):
            run_cluster(run, address)
        head.stdin.close()


# -- losses ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_jobs_of_a_lost_node_run_again(make, tmp_path, two_nodes):
    spec = make(methods=["single", "mc_dropout"], seeds=2, epochs=100)
    local, remote = prepare(spec, tmp_path / "local"), prepare(spec, tmp_path / "remote")
    lost = []

    def lose(snapshot):
        if not lost and snapshot.done == 1:
            (node,) = two_nodes.worker_nodes
            lost.append(node)
            kill_node(node)

    outcome = run_cluster(remote, two_nodes.address, on_event=lose)
    assert lost and len(outcome.done) == 4 and not outcome.failed
    run_local(local)
    for one, other in zip(remote.jobs, local.jobs, strict=True):
        assert results(one) == results(other)
    assert swept()


@pytest.mark.slow
def test_a_lost_head_ends_the_study_and_keeps_finished_jobs(make, tmp_path, two_nodes, fake):
    run = prepare(make(seeds=3), tmp_path / "run")

    def lose(snapshot):
        if snapshot.done == 1:
            kill_node(two_nodes.head_node)

    with pytest.raises(ValueError, match=r"of 6 jobs done: the same command resumes the study$"):
        run_cluster(run, two_nodes.address, command=fake(seconds=2), on_event=lose)
    assert 1 <= len(run.done) < 6
    run_local(run, command=fake())
    assert not run.missing


@pytest.mark.slow
def test_ctrl_c_returns_the_trainings_and_the_study_continues_locally(make, tmp_path, two_nodes):
    spec = make(methods=["single", "mc_dropout"], seeds=1, epochs=1500, patience=0)
    run, undisturbed = prepare(spec, tmp_path / "run"), prepare(spec, tmp_path / "undisturbed")

    def stop(snapshot):
        if len(snapshot.running) == 2 and all(job.epoch for job in snapshot.running):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run_cluster(run, two_nodes.address, on_event=stop)
    assert all(job.started and not job.done for job in run.jobs)
    assert len(run_local(run).done) == len(run_local(undisturbed).done) == 2
    for one, other in zip(run.jobs, undisturbed.jobs, strict=True):
        assert first_epochs(one)[-1] > 1
        assert results(one) == results(other)
    assert swept()


STUDY = """
import json, sys
from multitudes.lab.study.run.execution import run_cluster
from multitudes.lab.study.run.store import Run
run_cluster(Run(sys.argv[1]), sys.argv[2], command=json.loads(sys.argv[3]))
"""


@pytest.mark.slow
def test_a_killed_study_leaves_nothing_on_the_nodes(run, two_nodes, fake, notes):
    command = json.dumps(fake(seconds=60, notes=str(notes)))
    study = subprocess.Popen([sys.executable, "-c", STUDY, str(run.directory), two_nodes.address, command])
    assert wait_until(lambda: len(list(notes.iterdir())) == 2, 120)
    study.kill()
    study.wait()
    assert swept(60)
    started = [int(note.name.split("-")[3]) for note in notes.iterdir()]
    assert not any(map(is_alive, started))


@pytest.mark.slow
def test_data_are_sent_to_a_node_once(make, tmp_path, two_nodes, fake, notes):
    run = prepare(make(seeds=4), tmp_path / "run")
    assert len(run_cluster(run, two_nodes.address, command=fake(data_notes=str(notes))).done) == 8
    assert len(list(notes.iterdir())) == 1, "both nodes are on this machine: all jobs share one file"
    assert swept()
