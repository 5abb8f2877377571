"""Jobs that are killed, or asked to end, go on where they were, and end as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from multitudes.lab.study.run import worker
from multitudes.lab.study.run.execution import cores, run_local
from multitudes.lab.study.run.monitor import Interrupted
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.spec.planning import prepare
from tests.lab.study.study_cases import make  # noqa: F401

WORKER = (sys.executable, "-P", "-m", "multitudes.lab.study.run.worker")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks are for Linux")
FILES = ("model.safetensors", "predictions.safetensors")


def results(job: Job) -> list[object]:
    history = [epoch["loss"] for epoch in job.metrics["history"]]
    return [job.metrics["scores"], history, *((job.directory / name).read_bytes() for name in FILES)]


def processes(parent: int) -> dict[int, str]:
    """The processes below one, with the names that they go by."""
    below: dict[int, str] = {}
    parents = {parent}
    found = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    rows = [(line.split("(")[0], line.split("(")[1].split(")")[0], line.rpartition(")")[2].split()) for line in found]
    for pid, name, (state, above, *_) in sorted(rows, key=lambda row: int(row[0])):
        if int(above) in parents and state != "Z":
            parents.add(int(pid))
            below[int(pid)] = name
    return below


def of_job(name: str) -> int | None:
    return next((pid for pid, called in processes(os.getpid()).items() if called == name[:15]), None)


class Disturber(threading.Thread):
    """Sends signals, each when a job has logged so many epochs more; `numbers` says which."""

    def __init__(self, job: Job, numbers: list[int]) -> None:
        super().__init__(daemon=True)
        self.job, self.numbers, self.sent = job, numbers, 0

    def run(self) -> None:
        for number in self.numbers:
            _, here = self.job.events()
            while not any(event["event"] == "epoch" for event in self.job.events(here)[0]):
                time.sleep(0.005)
            pid = of_job(self.job.name)
            if pid is not None:
                os.kill(pid, number)
                self.sent += 1
            while of_job(self.job.name) == pid:
                time.sleep(0.005)


def first_epochs(job: Job) -> list[int]:
    """The first epoch that was logged after each start."""
    events = [event for event in job.events()[0] if event["event"] in ("start", "epoch")]
    pairs = pairwise(events)
    return [later["epoch"] for event, later in pairs if event["event"] == "start" and later["event"] == "epoch"]


@linux
@pytest.mark.slow
def test_a_worker_that_is_asked_to_end_or_killed_is_tried_again_and_goes_on_where_it_was(make, tmp_path):
    spec = make(methods=["mc_dropout"], seeds=1, epochs=300)
    run, whole = prepare(spec, tmp_path / "run"), prepare(spec, tmp_path / "whole")
    disturber = Disturber(run.jobs[0], [signal.SIGTERM, signal.SIGKILL])
    disturber.start()
    assert run_local(run, workers=cores()).done == ["mc_dropout-0"]
    assert disturber.sent == 2
    first, second, third = first_epochs(run.jobs[0])
    assert first == 1 < second and third == second, "the one asked to end saved its training, the killed one could not"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as jobs have here
    worker.run(whole.jobs[0].directory)
    torch.set_num_threads(threads)
    assert results(run.jobs[0]) == results(whole.jobs[0])


@linux
@pytest.mark.slow
def test_a_worker_that_is_killed_three_times_is_told_of(make, tmp_path):
    run = prepare(make(methods=["single", "packed"], seeds=1, epochs=300), tmp_path / "run")
    Disturber(run.jobs[1], [signal.SIGKILL] * 3).start()
    outcome = run_local(run)
    assert outcome.done == ["single-0"]
    assert outcome.failed["packed-0"].startswith("it was killed by SIGKILL 3 times")


@linux
@pytest.mark.slow
def test_a_forked_job_writes_what_a_process_of_its_own_writes(make, tmp_path):
    spec = make(methods=["single", "deep", "swag", "variance"], seeds=1, epochs=20)
    forked, alone = prepare(spec, tmp_path / "forked"), prepare(spec, tmp_path / "alone")
    assert run_local(forked).done and run_local(alone, command=WORKER).done
    for one, other in zip(forked.jobs, alone.jobs, strict=True):
        assert results(one) == results(other)


STUDY = """
import sys
from multitudes.lab.study.run import worker
from multitudes.lab.study.run.execution import cores, run_local
from multitudes.lab.study.run.store import Run
run_local(Run(sys.argv[1]))
"""


def study_process(run: Run) -> subprocess.Popen[bytes]:
    """A study in a process of its own, in the middle of a training."""
    study = subprocess.Popen([sys.executable, "-c", STUDY, str(run.directory)], stderr=subprocess.DEVNULL)
    while not all(any(event["event"] == "epoch" for event in job.events()[0]) for job in run.jobs):
        assert study.poll() is None
        time.sleep(0.01)
    return study


@linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_study_leaves_no_process_and_goes_on_where_it_was(make, tmp_path, number):
    spec = make(methods=["single", "mc_dropout"], seeds=1, epochs=500)
    run, whole = prepare(spec, tmp_path / "run"), prepare(spec, tmp_path / "whole")
    study = study_process(run)
    started = processes(study.pid)
    assert len(started) >= 3, "a driver and two jobs"
    study.send_signal(number)
    study.wait(timeout=60)
    deadline = time.monotonic() + 10
    while (left := [pid for pid in started if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert all(job.started for job in run.jobs) == (number != signal.SIGKILL)
    assert len(run_local(run).done) == 2 and len(run_local(whole).done) == 2
    for one, other in zip(run.jobs, whole.jobs, strict=True):
        assert (first_epochs(one)[-1] > 1) == (number != signal.SIGKILL)
        assert results(one) == results(other)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])  # after SIGTERM a driver ends well
def test_where_the_driver_is_killed_another_one_goes_on(number, make, tmp_path):
    run = prepare(make(methods=["single", "packed"], seeds=1, epochs=300), tmp_path / "run")

    def kill():
        while not any(event["event"] == "epoch" for event in run.jobs[0].events()[0]):
            time.sleep(0.005)
        os.kill(min(processes(os.getpid())), number)

    threading.Thread(target=kill, daemon=True).start()
    assert sorted(run_local(run).done) == ["packed-0", "single-0"]
    assert len(first_epochs(run.jobs[0])) == 2


@linux
@pytest.mark.slow
def test_a_driver_that_cannot_start_is_told_of(make, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text("raise SystemExit('nothing works here')")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    run = prepare(make(methods=["single"], seeds=1), tmp_path / "run")
    with pytest.raises(ValueError, match="the process that runs the jobs was lost .*nothing works here"):
        run_local(run)


def test_ctrl_c_in_the_program_is_an_interruption(make, tmp_path):
    def stop(snapshot):
        raise KeyboardInterrupt

    run = prepare(make(), tmp_path / "run")
    with pytest.raises(Interrupted, match="0 of 4 jobs done"):
        run_local(run, on_event=stop)
