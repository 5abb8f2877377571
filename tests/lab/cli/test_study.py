"""`compare` and `train`: complete runs, interrupts, options."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from multitudes.lab.study.run.monitor import Outcome
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.method_rows import METHODS, methods_for
from tests.lab.cli.test_cli import PACKAGE, run_cli, sentence
from tests.lab.study.study_cases import write_table

STUDY = """
methods = ["single", "packed"]
device = "cpu"

[data]
source = "digits"
limit = 100

[training]
epochs = 2

[evaluation]
shift = ["contrast"]
severities = [2]
draws = 2
sizes = [1, 2]
"""
COMPARE = ("compare", "study.toml", "--out", "run", "--workers", "1", "--seeds", "1")


def program(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the program in a separate session, like a shell."""
    return subprocess.Popen(
        [sys.executable, "-m", "multitudes", *arguments],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": PACKAGE},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore Ctrl-C
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until the condition is true; fail if the process ends."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def epochs_logged(job: Job) -> int:
    return sum(event["event"] == "epoch" for event in job.events()[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a study in a folder, with its output in said.json."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.toml").write_text(STUDY)
    process = program(folder, *COMPARE)
    out, err = process.communicate(timeout=600)
    (folder / "said.json").write_text(json.dumps([process.returncode, out, err]))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the study file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PACKAGE)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


@pytest.fixture
def copied(folder: Path, here: Path) -> Path:
    """A copy of the finished study in the working directory."""
    return Path(shutil.copytree(folder, here, dirs_exist_ok=True))


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt before the first job starts."""
    monkeypatch.setattr("multitudes.lab.cli.study_commands._run", Mock(side_effect=KeyboardInterrupt))


# -- a complete run ---------------------------------------------------------------------------------------


def test_compare_writes_a_run_directory_and_prints_the_leaderboard(folder: Path) -> None:
    code, out, err = json.loads((folder / "said.json").read_text())
    assert code == 0, err
    run = Run(folder / "run")
    assert [job.name for job in run.done] == ["single-0", "packed-0"]
    for job in run.jobs:
        for name in ("config.json", "metrics.json", "predictions.safetensors", "model.safetensors", "log.jsonl"):
            assert (job.directory / name).is_file()
    page = (folder / "run" / "report.html").read_text(encoding="utf-8")
    assert "packed" in page and "<html" in page
    assert out.rstrip().endswith("Report: run/report.html")
    accuracy = 100 * run.jobs[1].metrics["scores"]["accuracy"]["value"]
    row = next(line for line in out.splitlines() if line.startswith("packed "))
    assert f"{accuracy:.1f}" in row
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", out + err), "no control codes in a pipe"
    assert "0 of 2 jobs done" in err and "1 of 2 jobs done" in err
    assert "\n2 of 2 jobs done\n" in err


def test_repeating_a_finished_command_does_nothing(copied: Path) -> None:
    before = {job.name: (job.directory / "metrics.json").stat().st_mtime_ns for job in Run("run").jobs}
    ran = run_cli(*COMPARE)
    assert ran.code == 0
    assert "2 of 2 jobs are already done" in ran.err
    assert ran.out == json.loads((copied / "said.json").read_text())[1]
    assert {job.name: (job.directory / "metrics.json").stat().st_mtime_ns for job in Run("run").jobs} == before


def test_a_changed_study_lists_stale_jobs_and_reruns_them_on_request(copied: Path, stopped: None) -> None:
    told = sentence(run_cli(*COMPARE, "--epochs", "3"))
    assert "2 jobs are stale" in told
    assert "single-0, packed-0: training.epochs was 2, is 3" in told
    assert "--rerun-stale" in told and "--out" in told
    run = Run("run")
    assert len(run.done) == 2, "nothing was touched"
    assert run_cli(*COMPARE, "--epochs", "3", "--rerun-stale").code == 130
    assert not run.done
    assert [(job.config or {})["training"]["epochs"] for job in run.jobs] == [3, 3]


def test_a_failed_job_is_reported_with_the_results_of_others(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (Run("run").job("packed", 0).directory / "metrics.json").unlink()
    failed = Outcome([], {"packed-0": "the loss is nan at step 3"})
    monkeypatch.setattr("multitudes.lab.cli.study_commands._run", Mock(return_value=failed))
    ran = run_cli(*COMPARE)
    assert ran.code == 2
    assert "packed-0 failed: the loss is nan at step 3\n" in ran.err
    assert ran.err.rstrip().splitlines()[-1].startswith("Error: 1 job failed")
    assert "\nsingle " in ran.out and "\npacked " not in ran.out
    assert ran.out.rstrip().endswith("Report: run/report.html")


# -- interrupts -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_stops_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY.replace("epochs = 2", "epochs = 2000"))
    process = program(tmp_path, *COMPARE)
    job = Run(tmp_path / "run").job("single", 0)
    wait_for(lambda: epochs_logged(job) > 0, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "0 of 2 jobs done: the same command again resumes the study" in err
    assert "Traceback" not in err
    said = epochs_logged(job)
    time.sleep(0.5)
    assert epochs_logged(job) == said, "the job has ended too"


# -- options -----------------------------------------------------------------------------------------------


def test_options_override_the_file(here: Path, stopped: None) -> None:
    ran = run_cli(
        "compare", "study.toml", "--methods", "deep", "--seeds", "2", "--seed", "5", "--epochs", "7", "--lr", "0.2",
        "--shift", "none", "--precision", "bfloat16", "--limit", "50",
    )  # fmt: skip
    assert ran.code == 130
    run = Run("runs/study")
    assert [job.name for job in run.jobs] == ["deep-5", "deep-6"]
    config = run.jobs[0].config
    assert config is not None
    training = {name: config["training"][name] for name in ("epochs", "lr", "precision")}
    assert training == {"epochs": 7, "lr": 0.2, "precision": "bfloat16"}
    assert config["evaluation"]["shift"] == []
    assert run.about is not None and run.about["parts"]["train"] == 50
    run_cli("compare", "study.toml", "--methods", "all", "--epochs", "10")
    assert [job.label for job in run.jobs] == methods_for((1, 8, 8)), "all methods are those that fit the data"


def test_a_scale_of_a_file_finds_its_data_in_the_data_root(here: Path, stopped: None) -> None:
    (here / "root").mkdir()
    table = write_table(here / "root")
    (here / "study.toml").write_text(
        "[data]\nsource = 'rows.csv'\ntarget = 'y'\n[methods.single]\n[scales.few]\nseeds = 1"
    )
    assert run_cli("compare", "study.toml", "--scale", "few", "--data-root", "root").code == 130
    run = Run("runs/study-few")
    assert [job.name for job in run.jobs] == ["single-0"]
    assert run.about is not None and run.about["request"]["source"] == str(table)


# -- train -------------------------------------------------------------------------------------------------


def test_train_writes_one_job_that_evaluate_accepts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_this_process(run: Run, *_: object) -> Outcome:
        run_job(run.jobs[0].directory)
        return Outcome([run.jobs[0].name], {})

    monkeypatch.setattr("multitudes.lab.cli.study_commands._run", in_this_process)
    ran = run_cli(
        "train", "digits", "--limit", "60", "--epochs", "1", "--set", "members=2", "--shift", "none", "--seed", "4",
        "--device", "cpu",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.out.rstrip().endswith("Trained: runs/digits-packed/jobs/packed-4")
    (job,) = Run("runs/digits-packed").done
    assert job.config is not None and job.config["settings"]["members"] == 2
    assert f"{job.metrics['scores']['nll']['value']:.4f}" in ran.out
    again = run_cli("evaluate", "runs/digits-packed", "--device", "cpu")
    assert again.code == 0
    shown = dict(re.findall(r"^(\w+) +([-\d.]+)", again.out, re.M))
    assert float(shown["nll"]) == pytest.approx(job.metrics["scores"]["nll"]["value"], abs=1e-4)


@pytest.mark.slow
def test_two_processes_of_accelerate_train_one_network(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    train = ["train", "digits", "--limit", "128", "--epochs", "2", "--method", "snapshots", "--set", "members=2"]
    done = subprocess.run(
        [sys.executable, *launch, "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "multitudes", *train,
         "--shift", "none", "--device", "cpu", "--out", "run"],
        cwd=tmp_path, text=True, capture_output=True, env={**os.environ, "PYTHONPATH": PACKAGE},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (job,) = Run(tmp_path / "run").done
    assert done.stdout.count("Trained: ") == 1, "one process speaks for all"
    assert len(job.metrics["history"]) == 2
    assert [event["event"] for event in job.events()[0]] == ["start", "epoch", "epoch", "evaluate", "done"]


@pytest.mark.slow
def test_a_comparison_on_the_digits_trains_every_method_but_those_for_other_networks_and_data(tmp_path: Path) -> None:
    process = program(tmp_path, "compare", "digits", "--device", "cpu", "--workers", "2")
    _, err = process.communicate()
    assert process.returncode == 0, err
    run = Run(tmp_path / "runs" / "digits")
    others = {"lora", "tabm"}  # for trained networks and for tables
    assert others < set(METHODS)
    assert {job.label for job in run.done} == set(METHODS) - others
    assert run.report_path.is_file()
