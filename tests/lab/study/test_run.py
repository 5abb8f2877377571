"""Prepare a study on this machine, run it in a pool of processes, and read its files."""

from __future__ import annotations

import os

import numpy as np
import pytest

from multitudes.base.sealed_files import DamagedError, write_atomically
from multitudes.lab import data
from multitudes.lab.study.run.execution import run_local
from multitudes.lab.study.run.monitor import JobProgress, time_left
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.spec import planning
from multitudes.lab.study.spec.planning import StaleError, job_configs, prepare
from multitudes.lab.study.spec.specification import Spec, SpecError
from tests.lab.study.study_cases import fake, finished, make, metrics_of, run, snapshot_of  # noqa: F401

# -- preparing ---------------------------------------------------------------------------------------------


def test_a_configuration_holds_all_that_a_job_needs(make, run, tmp_path):
    assert [job.name for job in run.jobs] == ["single-0", "single-1", "packed-0", "packed-1"]
    prepared = data.read(run.data_path)
    resolved = Spec.load(run.spec_path)
    assert run.job("packed", 1).config == {
        "version": 1,
        "method": "packed",
        "settings": {"members": 4, "alpha": 2, "gamma": 1, "layers": None},
        "seed": 1,
        "data": {"file": "../../data.mtdata", "fingerprint": prepared.fingerprint},
        "model": {"name": "tabular", "settings": {}},
        "training": {**resolved.training.model_dump(), "epochs": 3, "augment": None, "class_weight": None},
        "evaluation": resolved.evaluation.model_dump(),
        "device": "auto",
    }
    assert (run.jobs[3].label, run.jobs[3].seed) == ("packed", 1)
    assert not run.done and len(run.missing) == 4
    training = prepare(make(clip=0, augment="none"), tmp_path / "other").jobs[0].config["training"]
    assert training["clip"] is None and training["augment"] is None and training["warmup"] == 0


def test_data_that_come_with_the_package_are_not_copied(tmp_path):
    run = prepare(Spec.of(data="digits", methods=["single"]), tmp_path / "run")
    assert run.jobs[0].config["data"] == {"source": "digits"}
    assert not run.data_path.exists()


def test_preparing_again_changes_nothing_and_reads_no_data(make, run, monkeypatch):
    before = snapshot_of(run.directory)
    monkeypatch.setattr(planning, "load", lambda *_, **__: pytest.fail("the data were read again"))
    prepare(make(), run.directory)
    after = snapshot_of(run.directory)
    assert {name: content for name, (_, content) in after.items()} == {n: content for n, (_, content) in before.items()}
    assert after["data.mtdata"] == before["data.mtdata"]


@pytest.mark.parametrize(
    "text, line, reason",
    [
        ("[methods.packed]\nmembers = 0", 2, r"methods\.packed: members must be a whole number, 1 or more, got 0"),
        ("[methods.swag]\ncheckpoints = 500", 2, r"methods\.swag: checkpoints=500 do not fit"),
        ("[methods.swag]\nrank = 2\nshare = 2.0", 3, r"methods\.swag: share must be above 0 and at most 1, got 2.0"),
        ("[data]\n\ntarget = 'z'", 3, ".*a, b, y"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused_with_their_line(make, tmp_path, text, line, reason):
    path = tmp_path / "study.toml"
    path.write_text(text)
    options = {"data": make().data.source} | ({} if "target" in text else {"target": "y"})
    with pytest.raises(SpecError, match=rf"study.toml, line {line}: {reason}"):
        prepare(Spec.load(path, **options), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_is_refused_as_run_directory(make, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="out must be a run directory"):
        prepare(make(), tmp_path / "file")


def test_a_custom_model_is_copied_and_a_changed_one_makes_jobs_stale(make, tmp_path, fake):
    file = tmp_path / "net.py"
    code = "from torch import nn\n\ndef build(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"
    file.write_text(code)
    spec = make(methods=["single"], model=f"{file}:build")
    run = prepare(spec, tmp_path / "run")
    model = run.jobs[0].config["model"]
    assert model["name"] == "build"
    assert (run.jobs[0].directory / model["file"]).read_text() == code
    run_local(run, command=fake())
    file.write_text(code + "# and more\n")
    with pytest.raises(StaleError, match="model.file was"):
        prepare(spec, tmp_path / "run")


# -- a changed specification -------------------------------------------------------------------------------


def test_stale_jobs_are_listed_with_their_changes_and_repeated_on_request(make, finished, fake):
    files, before = snapshot_of(finished.directory), metrics_of(finished)
    with pytest.raises(StaleError) as caught:
        prepare(make(methods={"single": {}, "packed": {"members": 8}, "deep": {}}), finished.directory)
    assert caught.value.stale == {f"packed-{seed}": ["settings.members was 4, is 8"] for seed in (0, 1)}
    assert "packed-0, packed-1: settings.members was 4, is 8" in str(caught.value)
    assert "--rerun-stale" in str(caught.value) and "--out" in str(caught.value)
    assert snapshot_of(finished.directory) == files, "nothing was touched"
    run = prepare(make(methods={"single": {}, "packed": {"members": 8}}), finished.directory, rerun_stale=True)
    assert [job.name for job in run.missing] == ["packed-0", "packed-1"]
    assert sorted(run_local(run, command=fake()).done) == ["packed-0", "packed-1"]
    after = metrics_of(run)
    assert [name for name in before if before[name] != after[name]] == ["packed-0", "packed-1"]


def test_more_seeds_and_methods_keep_finished_jobs(make, finished):
    more = prepare(make(methods=["single", "packed", "deep"], seeds=3), finished.directory)
    assert [job.name for job in more.missing] == ["single-2", "packed-2", "deep-0", "deep-1", "deep-2"]
    fewer = prepare(make(methods=["packed"], seeds=[1]), finished.directory)
    assert [job.name for job in fewer.jobs] == ["packed-1"]
    assert fewer.job("single", 0).done


def test_only_other_data_make_jobs_stale(make, finished, tmp_path):
    table, run = tmp_path / "rows.csv", finished
    os.utime(table, (1, 1))
    prepare(make(device="cpu"), run.directory)
    assert len(run.done) == 4
    table.write_text(table.read_text().replace("59,3,29.5", "59,3,30.5"))
    with pytest.raises(StaleError, match=r"^4 jobs are stale.*data.fingerprint was"):
        prepare(make(), run.directory)
    prepare(make(), run.directory, rerun_stale=True)
    assert data.read(run.data_path).fingerprint == run.jobs[0].config["data"]["fingerprint"]
    assert len(run.missing) == 4


def test_a_job_with_a_checkpoint_can_be_stale(make, run):
    (run.jobs[0].directory / "checkpoint.safetensors").touch()
    with pytest.raises(StaleError, match=r"^1 job is stale .* single-0: training.epochs was 3, is 4"):
        prepare(make(epochs=4), run.directory)
    prepare(make(epochs=4), run.directory, rerun_stale=True)
    assert not run.jobs[0].started
    assert all(job.config["training"]["epochs"] == 4 for job in run.jobs)


def test_planning_does_not_depend_on_whether_defaults_were_filled_in(make, run):
    assert job_configs(make(), run.about) == job_configs(Spec.load(run.spec_path), run.about)


# -- running -----------------------------------------------------------------------------------------------


def test_only_what_is_missing_is_run(make, run, fake):
    outcome = run_local(run, command=fake())
    assert sorted(outcome.done) == sorted(job.name for job in run.jobs) and not outcome.failed
    (run.jobs[2].directory / "metrics.json").unlink()
    assert run_local(prepare(make(), run.directory), command=fake()).done == ["packed-0"]
    assert run_local(run, command=fake()).done == []


def test_a_failed_job_reports_its_reason_and_stops_no_other(make, tmp_path, fake):
    run = prepare(make(methods=["single"], seeds=6), tmp_path / "run")
    how = {"single-0": "fails", "single-1": "crashes", "single-2": "dies", "single-3": "writes nothing"}
    outcome = run_local(run, command=fake(**how))
    assert sorted(outcome.done) == ["single-4", "single-5"]
    assert outcome.failed == {
        "single-0": "the loss is not finite",
        "single-1": "it ended with exit code 1: RuntimeError: no memory left",
        "single-2": "it was killed by SIGKILL 3 times: perhaps there is not enough memory for this many jobs at once",
        "single-3": "it ended without results",
    }
    assert run.failed == {"single-0": "the loss is not finite"}
    assert sorted(run_local(run, command=fake()).done) == sorted(how)
    assert run.failed == {}


def test_progress_has_jobs_epochs_loss_and_time_left(run, fake):
    seen = []
    run_local(run, command=fake(seconds=0.6), workers=2, on_event=seen.append)
    assert (seen[0].done, seen[0].total, seen[-1].done) == (0, 4, 4)
    assert [s.done for s in seen] == sorted(s.done for s in seen)
    assert max(len(s.running) for s in seen) == 2
    shown = {(p.epoch, p.epochs, round(p.loss, 2)) for s in seen for p in s.running if p.loss}
    assert shown >= {(1, 3, 1.0), (2, 3, 0.5)}
    assert seen[0].left is None and seen[-1].left == 0 and any(s.left for s in seen)


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_share_the_cores(run, fake, workers, monkeypatch):
    monkeypatch.setattr("multitudes.lab.study.run.execution.cores", lambda: 8)
    run_local(run, command=fake(), workers=workers)
    assert {job.metrics["scores"]["threads"]["value"] for job in run.jobs} == {8 // workers}


def test_a_study_that_cannot_run_is_refused_before_any_job_starts(make, run, fake, monkeypatch):
    with pytest.raises(ValueError, match="workers must be a whole number, 1 or more, got 0"):
        run_local(run, workers=0)
    with run.locked(), pytest.raises(ValueError, match="another study runs"):
        run_local(run, command=fake())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match="device='cuda' needs a GPU"):
        run_local(prepare(make(device="cuda"), run.directory))


# -- files -------------------------------------------------------------------------------------------------


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = write_atomically(tmp_path / "new" / "a.json", "old")

    def full(number: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new and longer")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_broken_lines_of_a_log_are_skipped(tmp_path):
    job, log = Job(tmp_path), tmp_path / "log.jsonl"
    assert job.events() == ([], 0)
    log.write_bytes(b'{"event": "start"}\n{"event": "ep')
    events, end = job.events()
    assert events == [{"event": "start"}] and end == 19
    log.write_bytes(b'{"event": "start"}\n{"event": "ep{"event": "start"}\n{"event": "failed", "message": "why"}\n')
    assert job.events(end)[0] == [{"event": "failed", "message": "why"}]
    assert job.failure == "why"


def test_other_folders_are_refused_as_run_directories(tmp_path):
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


def test_time_left_is_estimated_from_epochs_and_finished_jobs():
    half = JobProgress("deep-0", "epoch", 5, 10, seconds=10.0, expected=20.0)
    begun = JobProgress("deep-1", seconds=1.0)
    assert time_left([], ["deep"], {}, 2) is None
    assert time_left([half], [], {}, 2) == 10
    assert time_left([half, begun], [], {}, 1) == 10 + 19
    # Known methods by their own times, others by the mean of all: 4 and 12 and the expected 20.
    assert time_left([half], ["single", "mimo"], {"single": [4.0], "packed": [12.0]}, 1) == 10 + 4 + 12
