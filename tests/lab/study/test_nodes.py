"""Studies on two Ray nodes of this machine, one of which, or the head, or the study itself, is lost in the middle."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from multitudes.lab.study.run import execution
from multitudes.lab.study.run.execution import run_cluster, run_local
from multitudes.lab.study.run.monitor import Interrupted
from multitudes.lab.study.spec.planning import prepare
from tests.lab.study.ray_nodes import folders_left, kill_node, nodes
from tests.lab.study.study_cases import fake, make  # noqa: F401
from tests.lab.study.test_interruptions import first_epochs, processes, results
from tests.lab.study.test_stopped import is_alive


@pytest.fixture
def two_nodes():
    pytest.importorskip("ray")
    with nodes(2) as cluster:
        yield cluster


def swept(seconds: float = 15) -> bool:
    """Whether nothing is left of a study, after a moment."""
    deadline = time.monotonic() + seconds
    while folders_left() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not folders_left()


# -- nobody there ------------------------------------------------------------------------------------------


def test_an_address_where_nobody_listens_is_told_at_once(make, tmp_path):
    run = prepare(make(), tmp_path / "run")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match=rf"ray='127.0.0.1:{port}': cannot reach a cluster at this address"):
        run_cluster(run, f"127.0.0.1:{port}")
    with pytest.raises(ValueError, match="an address must be HOST:PORT, auto or local"):
        run_cluster(run, "head:node")


@pytest.mark.slow
def test_one_who_listens_and_does_not_answer_is_given_up(make, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(execution, "PATIENCE", 5.0)
    run = prepare(make(), tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(ValueError, match=rf"ray='{address}': the cluster does not answer, with 0 of 4 jobs done"):
            run_cluster(run, address)
    assert time.monotonic() - start < 60
    assert not processes(os.getpid())


HEAD = """
import sys
from tests.lab.study.ray_nodes import nodes
with nodes(1) as cluster:
    print(cluster.address, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_refused_token_is_told(make, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 32}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HEAD], env={**os.environ, **token}, **pipes) as head:
        address = head.stdout.readline().strip()
        for name, value in {**token, "RAY_AUTH_TOKEN": "b" * 32}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=r"refused the token \(RAY_AUTH_TOKEN\)|does not answer"):
            run_cluster(prepare(make(), tmp_path / "run"), address)
        head.stdin.close()


# -- losses ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_that_is_lost_costs_the_jobs_on_it_a_second_try(make, tmp_path, two_nodes):
    spec = make(methods=["single", "packed", "mc_dropout"], seeds=2, epochs=150)
    local, remote = prepare(spec, tmp_path / "local"), prepare(spec, tmp_path / "remote")
    lost = []

    def lose(snapshot):
        if not lost and snapshot.done == 1:
            (node,) = two_nodes.worker_nodes
            lost.append(node)
            kill_node(node)

    outcome = run_cluster(remote, two_nodes.address, on_event=lose)
    assert lost and len(outcome.done) == 6 and not outcome.failed
    run_local(local)
    for one, other in zip(remote.jobs, local.jobs, strict=True):
        assert results(one) == results(other)
    assert swept()


@pytest.mark.slow
def test_the_loss_of_the_head_is_one_sentence_and_what_is_done_stays_done(make, tmp_path, two_nodes, fake):
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
def test_a_cluster_without_a_place_for_a_job_is_told(make, tmp_path, two_nodes, monkeypatch):
    monkeypatch.setattr(execution, "PATIENCE", 5.0)
    run = prepare(make(), tmp_path / "run")
    with pytest.raises(ValueError, match="no node of the cluster has 8 CPU for a job"):
        run_cluster(run, two_nodes.address, cpus=8)


# -- stopped -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_brings_the_trainings_back_and_the_study_goes_on_elsewhere(make, tmp_path, two_nodes):
    spec = make(methods=["single", "mc_dropout"], seeds=1, epochs=1500, patience=0)
    run, whole = prepare(spec, tmp_path / "run"), prepare(spec, tmp_path / "whole")

    def stop(snapshot):
        if len(snapshot.running) == 2 and all(job.epoch for job in snapshot.running):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run_cluster(run, two_nodes.address, on_event=stop)
    assert all(job.started and not job.done for job in run.jobs)
    assert len(run_local(run).done) == len(run_local(whole).done) == 2
    for one, other in zip(run.jobs, whole.jobs, strict=True):
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
def test_a_killed_study_leaves_nothing_on_the_nodes(make, tmp_path, two_nodes, fake):
    run = prepare(make(), tmp_path / "run")
    notes = tmp_path / "notes"
    notes.mkdir()
    how = json.dumps(fake(seconds=60, notes=str(notes)))
    study = subprocess.Popen([sys.executable, "-c", STUDY, str(run.directory), two_nodes.address, how])
    while len(list(notes.iterdir())) < 2:
        assert study.poll() is None
        time.sleep(0.05)
    study.send_signal(signal.SIGKILL)
    study.wait()
    assert swept(60)
    started = [int(note.name.split("-")[3]) for note in notes.iterdir()]
    assert not any(map(is_alive, started))


# -- data --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_data_reach_a_node_once_and_not_with_every_job(make, tmp_path, two_nodes, fake):
    run = prepare(make(seeds=4), tmp_path / "run")
    notes = tmp_path / "notes"
    notes.mkdir()
    assert len(run_cluster(run, two_nodes.address, command=fake(data_notes=str(notes))).done) == 8
    assert len(list(notes.iterdir())) == 1, "both nodes are on this machine: it is one file for all jobs"
    assert swept()
