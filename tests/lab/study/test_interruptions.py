"""Stopped and killed studies and jobs continue where they were, with the same results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from multitudes.lab import data
from multitudes.lab.study.run import worker
from multitudes.lab.study.run.execution import cores, run_local
from multitudes.lab.study.run.monitor import Interrupted
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.spec import planning
from multitudes.lab.study.spec.planning import prepare
from tests.lab.study.study_cases import fake, make, run  # noqa: F401

WORKER = (sys.executable, "-P", "-m", "multitudes.lab.study.run.worker")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux forks jobs and ends them together")
FILES = ("model.safetensors", "predictions.safetensors")


def results(job: Job) -> list[object]:
    history = [epoch["loss"] for epoch in job.metrics["history"]]
    return [job.metrics["scores"], history, *((job.directory / name).read_bytes() for name in FILES)]


def processes(parent: int) -> dict[int, str]:
    """Return the names of all descendants of a process."""
    found: dict[int, str] = {}
    parents = {parent}
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    rows = [(line.split("(")[0], line.split("(")[1].split(")")[0], line.rpartition(")")[2].split()) for line in stats]
    for pid, name, (state, above, *_) in sorted(rows, key=lambda row: int(row[0])):
        if int(above) in parents and state != "Z":
            parents.add(int(pid))
            found[int(pid)] = name
    return found


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Return whether a condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def has_epoch(job: Job, start: int = 0) -> bool:
    return any(event["event"] == "epoch" for event in job.events(start)[0])


def first_epochs(job: Job) -> list[int]:
    """Return the first epoch after each start."""
    events = [event for event in job.events()[0] if event["event"] in ("start", "epoch")]
    pairs = pairwise(events)
    return [later["epoch"] for event, later in pairs if event["event"] == "start" and later["event"] == "epoch"]


# -- fake jobs ---------------------------------------------------------------------------------------------


def started(run: Run) -> list[int]:
    return [int(path.name.split("-")[3]) for path in run.directory.glob("jobs/*/*-started-*")]


def interrupt():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("stop", [interrupt, terminate])
def test_a_stopped_study_ends_its_jobs_and_resumes(make, run, tmp_path, fake, stop):
    def after_one_job(snapshot):
        if snapshot.done == 1 and len(snapshot.running) == 1 and snapshot.running[0].epoch:
            stop()

    before = signal.getsignal(signal.SIGTERM)
    command = fake(seconds=0.3, **{"single-1": "hangs"})
    with pytest.raises(Interrupted, match="1 of 4 jobs done: the same command again resumes"):
        run_local(run, command=command, workers=1, on_event=after_one_job)
    assert len(started(run)) == 2 and not any(map(is_alive, started(run)))
    assert [job.name for job in run.done] == ["single-0"]
    assert signal.getsignal(signal.SIGTERM) == before
    assert sorted(run_local(prepare(make(), run.directory), command=fake()).done) == [
        "packed-0",
        "packed-1",
        "single-1",
    ]
    other = prepare(make(), tmp_path / "other")
    run_local(other, command=fake())
    assert [job.metrics["scores"]["nll"] for job in run.jobs] == [job.metrics["scores"]["nll"] for job in other.jobs]


STUDY = """
import sys
from multitudes.lab.study.run.execution import run_local
from multitudes.lab.study.run.store import Run
run_local(Run(sys.argv[1]), workers=int(sys.argv[2]), command=sys.argv[3:] or None)
"""


def study_process(run: Run, workers: int, *command: str) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", STUDY, str(run.directory), str(workers), *command]
    return subprocess.Popen(arguments, stderr=subprocess.DEVNULL)


@linux
def test_a_killed_study_ends_its_jobs_and_keeps_finished_ones(make, run, fake):
    study = study_process(run, 1, *fake(**{"packed-0": "hangs"}))
    half_written = run.directory / "jobs/packed-0/.metrics.json.0.unfinished"
    assert wait_until(half_written.exists)
    study.kill()
    study.wait()
    assert wait_until(lambda: not any(map(is_alive, started(run))))
    assert [job.name for job in run.missing] == ["packed-0", "packed-1"]
    prepare(make(), run.directory)
    assert not half_written.exists()
    assert sorted(run_local(run, command=fake()).done) == ["packed-0", "packed-1"]


def test_a_study_killed_while_preparing_data_prepares_them_again(make, tmp_path, monkeypatch):
    def killed(data, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(make(), tmp_path / "run")
    monkeypatch.undo()
    run = prepare(make(), tmp_path / "run")
    assert data.read(run.data_path).fingerprint == run.jobs[0].config["data"]["fingerprint"]


@linux
def test_a_driver_that_cannot_start_is_reported(run, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text("raise SystemExit('nothing works here')")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    with pytest.raises(ValueError, match="the process that runs the jobs was lost .*nothing works here"):
        run_local(run)


# -- trainings ---------------------------------------------------------------------------------------------


class Disturber(threading.Thread):
    """Send each signal to a job after it has logged another epoch."""

    def __init__(self, job: Job, signals: list[int]) -> None:
        super().__init__(daemon=True)
        self.job, self.signals, self.sent = job, signals, 0

    def pid(self) -> int | None:
        return next((pid for pid, name in processes(os.getpid()).items() if name == self.job.name[:15]), None)

    def run(self) -> None:
        for number in self.signals:
            _, start = self.job.events()
            while not has_epoch(self.job, start):
                time.sleep(0.005)
            pid = self.pid()
            if pid is not None:
                os.kill(pid, number)
                self.sent += 1
            while self.pid() == pid:
                time.sleep(0.005)


@linux
@pytest.mark.slow
def test_a_terminated_or_killed_worker_continues_with_the_same_result(make, tmp_path):
    spec = make(methods=["mc_dropout"], seeds=1, epochs=200)
    run, undisturbed = prepare(spec, tmp_path / "run"), prepare(spec, tmp_path / "undisturbed")
    disturber = Disturber(run.jobs[0], [signal.SIGTERM, signal.SIGKILL])
    disturber.start()
    assert run_local(run, workers=cores()).done == ["mc_dropout-0"]
    assert disturber.sent == 2
    first, second, third = first_epochs(run.jobs[0])
    assert first == 1 < second and third == second, "only the terminated one saved its training"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the jobs
    worker.run(undisturbed.jobs[0].directory)
    torch.set_num_threads(threads)
    assert results(run.jobs[0]) == results(undisturbed.jobs[0])


@linux
@pytest.mark.slow
def test_a_worker_that_is_killed_three_times_fails_alone(make, tmp_path):
    run = prepare(make(methods=["single", "packed"], seeds=1, epochs=200), tmp_path / "run")
    Disturber(run.jobs[1], [signal.SIGKILL] * 3).start()
    outcome = run_local(run)
    assert outcome.done == ["single-0"]
    assert outcome.failed["packed-0"].startswith("it was killed by SIGKILL 3 times")


@linux
@pytest.mark.slow
def test_forked_and_spawned_jobs_have_the_same_results(make, tmp_path):
    spec = make(methods=["deep", "swag"], seeds=1, epochs=10)
    forked, spawned = prepare(spec, tmp_path / "forked"), prepare(spec, tmp_path / "spawned")
    assert run_local(forked).done and run_local(spawned, command=WORKER).done
    for one, other in zip(forked.jobs, spawned.jobs, strict=True):
        assert results(one) == results(other)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_study_leaves_no_process_and_continues_with_the_same_results(make, tmp_path, number):
    spec = make(methods=["single", "mc_dropout"], seeds=1, epochs=300)
    run, undisturbed = prepare(spec, tmp_path / "run"), prepare(spec, tmp_path / "undisturbed")
    study = study_process(run, 2)
    assert wait_until(lambda: all(map(has_epoch, run.jobs)))
    children = processes(study.pid)
    assert len(children) >= 3, "a driver and two jobs"
    study.send_signal(number)
    study.wait(timeout=60)
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    assert all(job.started for job in run.jobs) == (number != signal.SIGKILL)
    assert len(run_local(run).done) == 2 and len(run_local(undisturbed).done) == 2
    for one, other in zip(run.jobs, undisturbed.jobs, strict=True):
        assert (first_epochs(one)[-1] > 1) == (number != signal.SIGKILL)
        assert results(one) == results(other)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])  # after SIGTERM a driver exits with code 0
def test_another_driver_replaces_a_killed_one(number, make, tmp_path):
    run = prepare(make(methods=["single", "packed"], seeds=1, epochs=200), tmp_path / "run")

    def kill():
        wait_until(lambda: has_epoch(run.jobs[0]))
        os.kill(min(processes(os.getpid())), number)

    threading.Thread(target=kill, daemon=True).start()
    assert sorted(run_local(run).done) == ["packed-0", "single-0"]
    assert len(first_epochs(run.jobs[0])) == 2
