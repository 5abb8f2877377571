"""The files of a run directory, whole or not there and never unpickled, and the time that they say is left."""

from __future__ import annotations

import os

import numpy as np
import pytest

from multitudes.base.sealed_files import DamagedError, write_atomically
from multitudes.lab.study.run.monitor import JobProgress, time_left
from multitudes.lab.study.run.store import Job, Run


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = write_atomically(tmp_path / "new" / "a.json", "old")

    def full(number: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new and longer")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_a_log_is_read_line_by_line_and_broken_lines_say_nothing(tmp_path):
    job, log = Job(tmp_path), tmp_path / "log.jsonl"
    assert job.events() == ([], 0)
    log.write_bytes(b'{"event": "start"}\n{"event": "ep')
    events, end = job.events()
    assert events == [{"event": "start"}] and end == 19
    log.write_bytes(b'{"event": "start"}\n{"event": "ep{"event": "start"}\n{"event": "failed", "message": "why"}\n')
    assert job.events(end)[0] == [{"event": "failed", "message": "why"}]
    assert job.failure == "why"


def test_what_is_no_run_directory_is_told(tmp_path):
    with pytest.raises(ValueError, match="is not a run directory"):
        _ = Run(tmp_path).jobs
    (tmp_path / "study.toml").write_text("methods = ['single']")
    with pytest.raises(ValueError, match="is not a run directory: its study.toml has not been run"):
        _ = Run(tmp_path).jobs
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json' is damaged: it has no checksum"):
        _ = Job(tmp_path).config


def test_predictions_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", probs=np.array([{"a": 1}], dtype=object))
    (tmp_path / "a.npz").rename(tmp_path / "predictions.safetensors")
    with pytest.raises(DamagedError):
        _ = Job(tmp_path).predictions


def test_time_left_is_what_the_epochs_and_the_jobs_that_ended_say():
    half = JobProgress("deep-0", "epoch", 5, 10, seconds=10.0, expected=20.0)
    begun = JobProgress("deep-1", seconds=1.0)
    assert time_left([], ["deep"], {}, 2) is None
    assert time_left([half], [], {}, 2) == 10
    assert time_left([half, begun], [], {}, 1) == 10 + 19
    # Known methods by their own times, others by the mean of all: 4 and 12 and the expected 20.
    assert time_left([half], ["single", "mimo"], {"single": [4.0], "packed": [12.0]}, 1) == 10 + 4 + 12
