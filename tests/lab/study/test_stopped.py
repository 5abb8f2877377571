"""A study on this machine that is stopped, and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from multitudes.lab import data
from multitudes.lab.study.run.execution import run_local
from multitudes.lab.study.run.monitor import Interrupted
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.spec import planning
from multitudes.lab.study.spec.planning import prepare
from tests.lab.study.study_cases import fake, make, run  # noqa: F401


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def started(run: Run) -> list[int]:
    return [int(path.name.split("-")[3]) for path in run.directory.glob("jobs/*/*-started-*")]


def interrupt():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("stop", [interrupt, terminate])
def test_a_stopped_study_ends_its_jobs_says_how_to_resume_and_does(make, run, tmp_path, fake, stop):
    def after_one_job(snapshot):
        if snapshot.done == 1 and len(snapshot.running) == 1 and snapshot.running[0].epoch:
            stop()

    before = signal.getsignal(signal.SIGTERM)
    how = fake(seconds=0.3, **{"single-1": "hangs"})
    with pytest.raises(Interrupted, match="1 of 4 jobs done: the same command again resumes"):
        run_local(run, command=how, workers=1, on_event=after_one_job)
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
run_local(Run(sys.argv[1]), workers=1, command=sys.argv[2:])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a process with its parent")
def test_a_killed_study_takes_its_running_jobs_along_and_keeps_the_rest(make, run, fake):
    command = [sys.executable, "-c", STUDY, str(run.directory), *fake(**{"packed-0": "hangs"})]
    study = subprocess.Popen(command)
    half_written = run.directory / "jobs/packed-0/.metrics.json.0.unfinished"
    while not half_written.exists():
        assert study.poll() is None
        time.sleep(0.05)
    study.kill()
    study.wait()
    deadline = time.monotonic() + 60
    while any(map(is_alive, started(run))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, started(run)))
    assert [job.name for job in run.missing] == ["packed-0", "packed-1"]
    prepare(make(), run.directory)
    assert not half_written.exists()
    assert sorted(run_local(run, command=fake()).done) == ["packed-0", "packed-1"]


def test_a_study_killed_while_its_data_were_prepared_prepares_them_again(make, tmp_path, monkeypatch):
    def killed(data, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(make(), tmp_path / "run")
    monkeypatch.undo()
    run = prepare(make(), tmp_path / "run")
    assert data.read(run.data_path).fingerprint == run.jobs[0].config["data"]["fingerprint"]
