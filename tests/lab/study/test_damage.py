"""Damaged runs: no wrong number is used, and the same command repeats only what was lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from multitudes.base.sealed_files import check_seal, read_json
from multitudes.lab import report
from multitudes.lab.study.results.leaderboard import leaderboard
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.run.trained_network import Trained, find_job
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec import planning
from multitudes.lab.study.spec.specification import Spec
from tests.campaigns.damage import Stopped, stopping

METHODS = {"single": {}, "packed": {"members": 2}, "snapshots": {"members": 2}}


def spec(folder: Path) -> Spec:
    """A study of a small table of numbers."""
    table = folder / "rows.csv"
    if not table.exists():
        table.write_text("a,b,y\n" + "".join(f"{i % 9},{i % 7},{(i % 9) - 0.5 * (i % 7)}\n" for i in range(80)))
    options = {"target": "y", "epochs": 4, "seeds": 1, "device": "cpu", "sizes": [1], "methods": METHODS}
    return Spec.of(data=table, model="mlp", **options)


def prepare(folder: Path) -> tuple[Run, list[str]]:
    said: list[str] = []
    return planning.prepare(spec(folder), folder / "run", notify=said.append), said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with all jobs done."""
    folder = tmp_path_factory.mktemp("study")
    for job in prepare(folder)[0].jobs:
        run_job(job.directory)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the study whose data are unchanged."""
    shutil.copytree(whole / "run", tmp_path / "run")
    monkeypatch.setattr(planning, "_stamps", lambda sources: [])  # the copied table has another time
    shutil.copy(whole / "rows.csv", tmp_path)
    prepare(tmp_path)
    return tmp_path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def swap(path: Path) -> None:
    """Replace a file by an intact one of another job."""
    shutil.copy(path.parents[1] / "single-0" / path.name, path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "truncated": truncate,
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
    "swapped": swap,
}


def scores(run: Run) -> dict[str, object]:
    return {job.name: job.metrics["scores"] for job in run.jobs}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("config.json", "flipped"), ("config.json", "deleted"),
        ("model.safetensors", "truncated"), ("model.safetensors", "swapped"),
        ("predictions.safetensors", "flipped"), ("predictions.safetensors", "emptied"),
        ("metrics.json", "truncated"), ("metrics.json", "swapped"), ("metrics.json", "deleted"),
    ],
)  # fmt: skip
def test_only_a_damaged_job_is_repeated(name: str, kind: str, folder: Path) -> None:
    run = Run(folder / "run")
    want = scores(run)
    job = run.job("packed", 0)
    DAMAGE[kind](job.directory / name)
    if (name, kind) == ("metrics.json", "swapped"):  # intact, but another job's
        assert job.damage and "metrics.json' is damaged: it is a different file" in job.damage
    assert [each.name for each in run.done] == ["single-0", "snapshots-0"]
    assert [row.name for row in leaderboard(run)] and "packed" not in [row.name for row in leaderboard(run)]
    if (name, kind) != ("metrics.json", "deleted"):
        path = str(job.directory / "") + "/"
        with pytest.raises(ValueError) as caught:
            find_job(job.directory) if (job.directory / "config.json").is_file() else find_job(run.directory)
        assert path in str(caught.value) or "choose one" in str(caught.value)
    before = {path: path.stat().st_mtime_ns for path in run.directory.glob("jobs/s*/*")}
    run, said = prepare(folder)
    if name == "config.json":  # rewritten from the specification
        assert job.done and not said
    for each in run.missing:
        assert each.name == "packed-0"
        run_job(each.directory)
    assert {path: path.stat().st_mtime_ns for path in run.directory.glob("jobs/s*/*")} == before
    assert scores(run) == want


def test_the_page_lists_damaged_jobs(folder: Path) -> None:
    run = Run(folder / "run")
    flip(run.job("packed", 0).directory / "predictions.safetensors")
    text = report.write(run.directory).read_text()
    assert "This page is incomplete" in text and "checksum does not match" in text
    for job in run.jobs:
        flip(job.directory / "metrics.json")
    with pytest.raises(ValueError, match=r"no job is done; '.*metrics\.json' is damaged: .*to repeat this job"):
        report.write(run.directory)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("data.mtdata", "flipped"), ("data.mtdata", "deleted"), ("data.json", "truncated"), ("data.json", "deleted"),
        ("study.toml", "flipped"), ("study.toml", "emptied"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_the_run_is_rewritten_and_all_results_stay(name: str, kind: str, folder: Path) -> None:
    run = Run(folder / "run")
    seals, path = run.results, run.directory / name
    content = path.read_bytes()
    DAMAGE[kind](path)
    if name != "data.mtdata" or kind != "deleted":  # the page does without pictures
        with pytest.raises(ValueError, match=rf"{name}|no run directory"):
            report.write(run.directory)
    run, said = prepare(folder)
    assert path.read_bytes() == content and run.results == seals and not run.missing
    assert name == "study.toml" or said


def test_data_of_another_run_are_noticed(folder: Path, whole: Path) -> None:
    other = Spec.of(data=whole / "rows.csv", target="a", epochs=1, methods=["single"], model="mlp", device="cpu")
    run = Run(folder / "run")
    other_run = planning.prepare(other, folder / "other")
    shutil.copy(other_run.data_path, run.data_path)
    with pytest.raises(ValueError, match="changed since the study was prepared"):
        Trained.read(run.job("single", 0).directory)
    run, said = prepare(folder)
    assert "'data.mtdata'" not in said and any("is not the file that data.json describes" in each for each in said)
    Trained.read(run.job("single", 0).directory)


def test_conclusions_from_other_results_are_not_used(folder: Path) -> None:
    run = Run(folder / "run")
    path = run.write_table("landscape.json", {"plane": 1})
    assert run.read_table("landscape.json") == {"plane": 1}
    flip(path)
    assert run.read_table("landscape.json") is None
    run.write_table("landscape.json", {"plane": 1})
    run.job("single", 0).write_metrics({**run.job("single", 0).metrics, "seconds": 0.0})
    assert run.read_table("landscape.json") is None


# -- trainings that were interrupted -----------------------------------------------------------------------


def interrupt(job: Job, steps: int) -> None:
    """Repeat a job and interrupt it after some steps, with a checkpoint of the last one."""
    (job.directory / "metrics.json").unlink()
    with stopping(steps), pytest.raises(Stopped):
        run_job(job.directory)


RESUMED: dict[str, Callable[[Job, Job], object]] = {
    "nothing": lambda job, other: None,
    "checkpoint flipped": lambda job, other: flip(job.directory / "checkpoint.safetensors"),
    "checkpoint emptied": lambda job, other: (job.directory / "checkpoint.safetensors").write_bytes(b""),
    "checkpoint of another job": lambda job, other: shutil.copy(
        other.directory / "checkpoint.safetensors", job.directory
    ),
    "recording flipped": lambda job, other: flip(job.directory / "recording" / "checkpoint-00000001.safetensors"),
    "recording deleted": lambda job, other: (job.directory / "recording" / "checkpoint-00000001.safetensors").unlink(),
    "moments emptied": lambda job, other: (job.directory / "recording" / "moments.safetensors").write_bytes(b""),
    "recording of another job": lambda job, other: shutil.copy(
        other.directory / "recording" / "checkpoint-00000001.safetensors", job.directory / "recording"
    ),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_damaged_training_restarts_and_ends_with_the_same_scores(case: str, folder: Path) -> None:
    run = Run(folder / "run")
    job, want = run.job("snapshots", 0), scores(run)
    other = Job(shutil.copytree(job.directory, job.directory.with_name("snapshots-1")))
    config = read_json(job.directory / "config.json")
    planning.write_json(other.directory / "config.json", {**config, "seed": 1})
    for each in (job, other):
        interrupt(each, steps=6)
    assert list((job.directory / "recording").glob("checkpoint-*"))
    RESUMED[case](job, other)
    run_job(job.directory)
    events, _ = job.events()
    restarts = [event for event in events if event["event"] == "restart"]
    assert bool(restarts) == (case != "nothing") and all(
        "restarting the training: " in event["message"] for event in restarts
    )
    assert scores(run) == want and check_seal(job.directory / "model.safetensors")
    assert not (job.directory / "recording").exists()
