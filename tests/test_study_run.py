"""A study on this machine: prepared, and run by a pool of processes."""

from __future__ import annotations

import json
import os

import pytest

from multitudes import data
from multitudes.study import planning as jobs
from multitudes.study.local import run_local
from multitudes.study.planning import StaleError, planned, prepare
from multitudes.study.spec import Spec, SpecError
from tests.study_cases import fake, metrics_of, snapshot_of, spec, table  # noqa: F401

# -- preparing ---------------------------------------------------------------------------------------------


def test_a_job_is_a_method_and_a_seed_and_says_all_in_its_configuration(spec, tmp_path):
    run = prepare(spec, tmp_path / "run")
    assert [job.name for job in run.jobs] == ["single-0", "single-1", "packed-0", "packed-1"]
    prepared = data.read(run.data_path)
    resolved = Spec.load(run.spec_path)
    assert json.loads((run.directory / "jobs/packed-1/config.json").read_text()) == {
        "version": 1,
        "method": "packed",
        "settings": {"members": 4, "alpha": 2, "gamma": 1, "layers": None},
        "seed": 1,
        "data": {"file": "../../data.mtdata", "fingerprint": prepared.fingerprint},
        "model": {"name": "mlp", "settings": {"hidden": [50]}},
        "training": {**resolved.training.model_dump(), "epochs": 3, "augment": None},
        "evaluation": resolved.evaluation.model_dump(),
        "device": "auto",
    }
    assert (run.jobs[3].label, run.jobs[3].seed) == ("packed", 1)
    assert not run.done and len(run.missing) == 4


def test_no_clipping_and_no_augmentation_are_none_in_the_configuration(table, tmp_path):
    run = prepare(Spec.of(data=table, target="y", methods=["single"], clip=0, augment="none"), tmp_path / "run")
    training = run.jobs[0].config["training"]
    assert training["clip"] is None and training["augment"] is None and training["warmup"] == 0


def test_data_that_come_with_the_package_are_not_copied(tmp_path):
    run = prepare(Spec.of(data="digits", methods=["single"]), tmp_path / "run")
    assert run.jobs[0].config["data"] == {"source": "digits"}
    assert not run.data_path.exists()


def test_preparing_again_changes_nothing_and_reads_no_data(spec, tmp_path, monkeypatch):
    run = prepare(spec, tmp_path / "run")
    before = snapshot_of(run.directory)
    monkeypatch.setattr(jobs, "load", lambda *_, **__: pytest.fail("the data were read again"))
    prepare(spec, tmp_path / "run")
    after = snapshot_of(run.directory)
    assert {name: content for name, (_, content) in after.items()} == {n: content for n, (_, content) in before.items()}
    assert after["data.mtdata"] == before["data.mtdata"]


@pytest.mark.parametrize(
    "text, line, told",
    [
        ("[methods.deep]\n[methods.packed]\nmembers = 0", 3, "members must be a whole number, 1 or more, got 0"),
        ("[methods.swag]\ncheckpoints = 500", 2, "checkpoints=500 do not fit"),
        ("[methods.swag]\nrank = 2\nshare = 2.0", 3, "share must be above 0 and at most 1, got 2.0"),
    ],
)
def test_a_method_that_cannot_be_built_is_told_before_anything_is_written(table, tmp_path, text, line, told):
    path = tmp_path / "study.toml"
    path.write_text(f"{text}\n[data]\nsource = 'rows.csv'\ntarget = 'y'")
    with pytest.raises(SpecError, match=rf"study.toml, line {line}: methods\.\w+: {told}"):
        prepare(Spec.load(path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_wrong_column_is_told_with_its_line_and_the_columns(table, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text("[data]\nsource = 'rows.csv'\n\ntarget = 'z'")
    with pytest.raises(SpecError, match=r"line 4: .*a, b, y"):
        prepare(Spec.load(path), tmp_path / "run")


def test_a_file_is_no_run_directory(spec, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="out must be a directory"):
        prepare(spec, tmp_path / "file")


def test_a_network_of_ones_own_is_copied_and_a_changed_one_makes_jobs_stale(table, tmp_path, fake):
    net = tmp_path / "net.py"
    code = "from torch import nn\n\ndef build(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"
    net.write_text(code)
    spec = Spec.of(data=table, target="y", methods=["single"], model=f"{net}:build")
    run = prepare(spec, tmp_path / "run")
    model = run.jobs[0].config["model"]
    assert model["name"] == "build"
    assert (run.jobs[0].directory / model["file"]).read_text() == code
    run_local(run, command=fake())
    net.write_text(code + "# and more\n")
    with pytest.raises(StaleError, match="model.file was"):
        prepare(spec, tmp_path / "run")


# -- a changed specification -------------------------------------------------------------------------------


def test_stale_jobs_are_named_with_what_changed_and_nothing_is_touched(spec, table, tmp_path, fake):
    run = prepare(spec, tmp_path / "run")
    run_local(run, command=fake())
    before = snapshot_of(run.directory)
    changed = {"single": {}, "packed": {"members": 8}, "deep": {}}
    with pytest.raises(StaleError) as caught:
        prepare(Spec.of(data=table, target="y", methods=changed, seeds=2, epochs=3), run.directory)
    assert caught.value.stale == {f"packed-{seed}": ["settings.members was 4, is 8"] for seed in (0, 1)}
    assert "packed-0, packed-1: settings.members was 4, is 8" in str(caught.value)
    assert "--rerun-stale" in str(caught.value) and "--out" in str(caught.value)
    assert snapshot_of(run.directory) == before


def test_stale_jobs_are_run_again_when_asked_and_the_others_stay(spec, table, tmp_path, fake):
    run = prepare(spec, tmp_path / "run")
    run_local(run, command=fake())
    before = metrics_of(run)
    changed = Spec.of(data=table, target="y", methods={"single": {}, "packed": {"members": 8}}, seeds=2, epochs=3)
    prepare(changed, run.directory, rerun_stale=True)
    assert [job.name for job in run.missing] == ["packed-0", "packed-1"]
    assert run_local(run, command=fake()).done == ["packed-0", "packed-1"]
    after = metrics_of(run)
    assert [name for name in before if before[name] != after[name]] == ["packed-0", "packed-1"]


def test_more_seeds_and_methods_leave_what_is_done(spec, table, tmp_path, fake):
    run = prepare(spec, tmp_path / "run")
    run_local(run, command=fake())
    more = Spec.of(data=table, target="y", methods=["single", "packed", "deep"], seeds=3, epochs=3)
    prepare(more, run.directory)
    assert [job.name for job in run.missing] == ["single-2", "packed-2", "deep-0", "deep-1", "deep-2"]
    fewer = Spec.of(data=table, target="y", methods=["packed"], seeds=[1], epochs=3)
    assert [job.name for job in prepare(fewer, run.directory).jobs] == ["packed-1"]
    assert (run.directory / "jobs/single-0/metrics.json").exists()


def test_other_data_make_all_jobs_stale_and_the_same_in_a_new_file_do_not(spec, table, tmp_path, fake):
    run = prepare(spec, tmp_path / "run")
    run_local(run, command=fake())
    os.utime(table, (1, 1))
    prepare(spec, run.directory)
    assert len(run.done) == 4
    table.write_text(table.read_text().replace("59,3,29.5", "59,3,30.5"))
    with pytest.raises(StaleError, match=r"^4 jobs are stale.*data.fingerprint was"):
        prepare(spec, run.directory)
    prepare(spec, run.directory, rerun_stale=True)
    assert data.read(run.data_path).fingerprint == run.jobs[0].config["data"]["fingerprint"]
    assert len(run.missing) == 4


def test_where_a_job_runs_does_not_make_it_stale(spec, tmp_path, fake):
    run = prepare(spec, tmp_path / "run")
    run_local(run, command=fake())
    prepare(spec.model_copy(update={"device": "cpu"}), run.directory)
    assert len(run.done) == 4


def test_a_checkpoint_counts_as_work_and_a_job_without_any_is_simply_asked_anew(spec, tmp_path):
    run = prepare(spec, tmp_path / "run")
    longer = spec.model_copy(update={"training": spec.training.model_copy(update={"epochs": 4})})
    (run.jobs[0].directory / "checkpoint.safetensors").touch()
    with pytest.raises(StaleError, match=r"^1 job is stale .* single-0: training.epochs was 3, is 4"):
        prepare(longer, run.directory)
    prepare(longer, run.directory, rerun_stale=True)
    assert not run.jobs[0].started
    assert all(job.config["training"]["epochs"] == 4 for job in run.jobs)


def test_a_run_directory_whose_specification_was_edited_knows_which_jobs_are_stale(spec, tmp_path, fake):
    run = prepare(spec, tmp_path / "run")
    run_local(run, command=fake())
    assert run.stale == {}
    run.spec_path.write_text(run.spec_path.read_text().replace("members = 4", "members = 2"))
    assert run.stale == {f"packed-{seed}": ["settings.members was 4, is 2"] for seed in (0, 1)}


def test_planning_does_not_depend_on_whether_defaults_were_filled_in(spec, tmp_path):
    run = prepare(spec, tmp_path / "run")
    about = run.about
    assert planned(spec, about) == planned(Spec.load(run.spec_path), about)


# -- running -----------------------------------------------------------------------------------------------


def test_only_what_is_missing_is_run(spec, tmp_path, fake):
    run = prepare(spec, tmp_path / "run")
    outcome = run_local(run, command=fake())
    assert sorted(outcome.done) == sorted(job.name for job in run.jobs) and not outcome.failed
    (run.jobs[2].directory / "metrics.json").unlink()
    assert run_local(prepare(spec, run.directory), command=fake()).done == ["packed-0"]
    assert run_local(run, command=fake()).done == []


def test_a_failed_job_stops_no_other_and_says_why(spec, table, tmp_path, fake):
    spec = Spec.of(data=table, target="y", methods=["single"], seeds=6)
    run = prepare(spec, tmp_path / "run")
    how = {"single-0": "fails", "single-1": "crashes", "single-2": "dies", "single-3": "says nothing"}
    outcome = run_local(run, command=fake(**how))
    assert sorted(outcome.done) == ["single-4", "single-5"]
    assert outcome.failed == {
        "single-0": "the loss is not finite",
        "single-1": "it ended with exit code 1: RuntimeError: no memory left",
        "single-2": "it was killed by SIGKILL",
        "single-3": "it ended without results",
    }
    assert str(outcome).startswith("2 jobs done, 4 failed:\n")
    assert run.failed == {"single-0": "the loss is not finite"}
    assert sorted(run_local(run, command=fake()).done) == ["single-0", "single-1", "single-2", "single-3"]
    assert run.failed == {}


def test_progress_tells_jobs_epochs_loss_and_time_left(spec, tmp_path, fake):
    run = prepare(spec, tmp_path / "run")
    seen = []
    run_local(run, command=fake(seconds=0.6), workers=2, on_event=seen.append)
    assert (seen[0].done, seen[0].total, seen[-1].done) == (0, 4, 4)
    assert [s.done for s in seen] == sorted(s.done for s in seen)
    assert max(len(s.running) for s in seen) == 2
    told = {(p.epoch, p.epochs, round(p.loss, 2)) for s in seen for p in s.running if p.loss}
    assert told >= {(1, 3, 1.0), (2, 3, 0.5)}
    assert seen[0].left is None and seen[-1].left == 0 and any(s.left for s in seen)


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_share_the_cores(spec, tmp_path, fake, workers, monkeypatch):
    monkeypatch.setattr("multitudes.study.local.cores", lambda: 8)
    run = prepare(spec, tmp_path / "run")
    run_local(run, command=fake(), workers=workers)
    assert {job.metrics["scores"]["threads"]["value"] for job in run.jobs} == {8 // workers}


def test_workers_are_a_count(spec, tmp_path):
    with pytest.raises(ValueError, match="workers must be a whole number, 1 or more, got 0"):
        run_local(prepare(spec, tmp_path / "run"), workers=0)


def test_a_gpu_that_is_not_there_is_told_before_any_job_starts(spec, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match="device='cuda' needs a GPU"):
        run_local(prepare(spec.model_copy(update={"device": "cuda"}), tmp_path / "run"))


def test_two_studies_do_not_share_a_directory(spec, tmp_path, fake):
    run = prepare(spec, tmp_path / "run")
    with run.locked(), pytest.raises(ValueError, match="another study is running"):
        run_local(run, command=fake())
    assert len(run_local(run, command=fake()).done) == 4
