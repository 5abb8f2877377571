"""A run directory from somebody else is safe: no code runs, nothing outside is read or overwritten."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multitudes.base.sealed_files import read_json, write_json
from multitudes.lab import report
from multitudes.lab.study.run.conclusion import write_landscape
from multitudes.lab.study.run.store import Job, Run
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from tests.lab.cli.test_cli import PACKAGE
from tests.lab.cli.test_predict import refuses, says
from tests.lab.report.fake_run import Tags, write_run

MARKUP = "</script></style><img src=x onerror=alert(2)>\"'"
CODE = """
from pathlib import Path
from torch import nn

Path({mark!r}).touch()


class Mine(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.layer = nn.Linear(features, outputs)

    def forward(self, x):
        return self.layer(x.flatten(1))


def build(shape, outputs):
    return Mine(64, outputs)
"""
OPTIONS: dict[str, Any] = {
    "data": "digits", "methods": {"deep": {"members": 3}}, "epochs": 1, "shift": [], "device": "cpu", "sizes": [1]
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return a run with a custom network, the code of the network, and the file that the code touches."""
    folder = tmp_path_factory.mktemp("somebody")
    file, mark = folder / "net.py", folder / "ran"
    file.write_text(CODE.format(mark=str(mark)))
    messages: list[str] = []
    run = prepare(Spec.of(**OPTIONS, model=f"{file}:build"), folder / "run", notify=messages.append)
    assert any(f"build of {file}" in each for each in messages)
    run_job(run.jobs[0].directory)
    return run.directory, file, mark


@pytest.fixture
def foreign(made: tuple[Path, Path, Path], elsewhere: Path) -> Path:
    """A copy of the run whose code has not run here."""
    made[2].unlink(missing_ok=True)
    return Path(shutil.copytree(made[0], elsewhere / "foreign"))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewritten(job: Job, **changes: Any) -> None:
    """Change a configuration, with valid checksums."""
    write_json(job.directory / "config.json", {**(job.config or {}), **changes})
    job.write_metrics(job.metrics)


COMMANDS: dict[str, tuple[Any, ...]] = {
    "predict": ("foreign", "image.png"),
    "serve": ("foreign", "--port", 0),
    "evaluate": ("foreign",),
    "export": ("foreign", "--to", "x.onnx"),
    "explain": ("foreign",),
}


def test_no_command_that_reads_a_run_executes_its_code(foreign: Path, made: tuple[Path, Path, Path]) -> None:
    for command, arguments in COMMANDS.items():
        error = refuses(command, *arguments)
        assert "build of net-" in error and "--model-file FILE.py" in error
    with pytest.raises(ValueError, match="--model-file FILE.py"):
        write_landscape(Run(foreign))
    says("report", "foreign")
    job = Run(foreign).jobs[0]
    rewritten(job, model={**job.config["model"], "file": str(made[1])})  # type: ignore[index]
    for command, arguments in COMMANDS.items():
        refuses(command, *arguments)
    assert not made[2].exists()


def test_code_named_by_the_user_is_executed(foreign: Path, made: tuple[Path, Path, Path]) -> None:
    _, file, mark = made
    shutil.rmtree(foreign.parent / "nets", ignore_errors=True)
    for given in (str(file), f"{file}:build"):
        mark.unlink(missing_ok=True)
        assert type(Trained.read(foreign, model_file=given).net).__name__ in ("Members", "Calibrated")
        assert mark.exists()
    assert "nll" in says("evaluate", "foreign", "--model-file", file).out
    other = foreign.parent / "other.py"
    other.write_text(file.read_text() + "# changed\n")
    with pytest.warns(UserWarning, match=r"other\.py is not the file that deep-0 was trained with"):
        Trained.read(foreign, model_file=str(other))
    assert "net.py' has no function 'make'" in refuses("evaluate", "foreign", "--model-file", f"{file}:make")
    assert "'none.py', which does not exist" in refuses("evaluate", "foreign", "--model-file", "none.py")


def test_code_named_by_the_study_file_of_a_run_is_refused(foreign: Path, made: tuple[Path, Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"study\.toml, line \d+: model\.file: .*pass --model FILE\.py:FUNCTION"):
        Spec.load(foreign / "study.toml")
    assert Spec.load(foreign / "study.toml", model=f"{made[1]}:build").model.file == str(made[1])
    assert not made[2].exists()


def test_a_worker_refuses_changed_code(foreign: Path, made: tuple[Path, Path, Path]) -> None:
    job = Run(foreign).jobs[0]
    (job.directory / "metrics.json").unlink()
    copy = job.directory / job.config["model"]["file"]  # type: ignore[index]
    copy.write_text(copy.read_text() + "# changed\n")
    with pytest.raises(ValueError, match="was changed since the study was prepared; it is not executed"):
        run_job(job.directory)
    write_json(job.directory / "config.json", {**(job.config or {}), "model": {"file": str(made[1]), "name": "build"}})
    with pytest.raises(ValueError, match="outside of its run directory"):
        run_job(job.directory)
    assert not made[2].exists()


def test_compare_in_a_foreign_directory_executes_only_the_users_code(
    foreign: Path, made: tuple[Path, Path, Path], elsewhere: Path
) -> None:
    job = Run(foreign).jobs[0]
    copy = job.directory / job.config["model"]["file"]  # type: ignore[index]
    copy.write_text("raise SystemExit('foreign code')\n")
    (job.directory / "metrics.json").unlink()
    run = prepare(Spec.of(**OPTIONS, model=f"{made[1]}:build"), foreign)
    assert copy.read_text() == made[1].read_text()
    run_job(run.jobs[0].directory)
    assert run.jobs[0].done and write_landscape(run, points=2, images=8)


@pytest.mark.parametrize(
    "data, words",
    [
        ({"source": "somebody/dataset"}, "must be a prepared file or digits, got 'somebody/dataset'"),
        ({"source": "/etc/passwd"}, "must be a prepared file or digits"),
        ({"file": "../../../outside.mtdata"}, "outside of its run directory"),
        ({"file": "/etc/passwd"}, "outside of its run directory"),
    ],
)
def test_a_configuration_reads_nothing_outside_its_run(data: dict[str, str], words: str, foreign: Path) -> None:
    job = Run(foreign).jobs[0]
    rewritten(job, data=data, model={"name": "small_cnn"})
    with pytest.raises(ValueError, match=words):
        Trained.read(foreign)


@pytest.mark.parametrize("name", ["../../other", "..", "a/b", "a\\b", ""])
def test_names_of_methods_cannot_be_paths(name: str, foreign: Path) -> None:
    Run(foreign).write_spec(f"seeds = [0]\n[methods.'{name}']\n")
    with pytest.raises(ValueError, match="is not a valid name of a method"):
        _ = Run(foreign).jobs


def test_links_in_a_run_directory_cause_no_damage(foreign: Path, elsewhere: Path) -> None:
    precious = elsewhere / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    spec = Spec.of(**{**OPTIONS, "methods": ["single"]})
    for name in (".lock", "jobs"):
        run = elsewhere / f"run{name}"
        run.mkdir()
        (run / name).symlink_to(precious / "file" if name == ".lock" else precious)
        with pytest.raises(ValueError, match="is a (symbolic )?link"):
            prepare(spec, run)
    run = prepare(spec, elsewhere / "run")
    (run.jobs[0].directory / "log.jsonl").symlink_to(precious / "file")
    with pytest.raises(ValueError, match=r"log\.jsonl' is a (symbolic )?link"):
        run_job(run.jobs[0].directory)
    (run.jobs[0].directory / "output.txt").symlink_to(precious / "file")
    with pytest.raises(ValueError, match="is a (symbolic )?link"):
        prepare(spec, elsewhere / "run")
    for name in ("report.html", "study.toml", "data.json"):
        (foreign / name).unlink(missing_ok=True)
        (foreign / name).symlink_to(precious / "file")
    assert os.listdir(precious) == ["file"] and (precious / "file").read_text() == "mine"


@pytest.mark.slow
def test_files_in_the_working_folder_are_not_imported(made: tuple[Path, Path, Path], elsewhere: Path) -> None:
    for name in ("torch", "numpy", "safetensors", "json"):
        (elsewhere / f"{name}.py").write_text("raise SystemExit('a file of the working folder was run')\n")
    command = [sys.executable, "-P", "-m", "multitudes.lab.study.run.worker", str(Run(made[0]).jobs[0].directory)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PACKAGE})
    assert done.returncode == 0, done.stderr


def marked(value: Any) -> Any:
    """Replace texts by markup, except words that the page knows."""
    if isinstance(value, dict):
        return {key: marked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [marked(each) for each in value]
    return MARKUP if isinstance(value, str) and value not in ("classification", "inf") else value


def test_texts_of_a_run_are_escaped_on_its_page(elsewhere: Path) -> None:
    run = Run(write_run(elsewhere / "run", ["single", "deep"], [0, 1]))
    about = read_json(run.about_path)
    times, plane = run.times, run.read_table("landscape.json")
    assert times and plane
    for job in run.jobs:
        kept = {"scores": job.metrics["scores"], "costs": job.metrics["costs"]}
        job.write_metrics({**marked(job.metrics), **kept})
    write_json(run.about_path, {**marked(about), "fingerprint": about["fingerprint"]})
    run.write_table("costs.json", {**marked(times), "methods": times["methods"]}, run.timed)
    run.write_table("landscape.json", marked(plane))
    text = report.write(run.directory).read_text()
    assert "onerror=alert(2)" in text  # as text
    for tag, attributes in Tags(text).tags:
        assert attributes.get("src") != "x" and not any(name.startswith("on") for name in attributes), tag


def test_scores_that_are_not_numbers_are_damage(foreign: Path) -> None:
    job = Run(foreign).jobs[0]
    metrics = read_json(job.directory / "metrics.json")
    metrics["scores"]["nll"]["value"] = "<script>alert(1)</script>"
    write_json(job.directory / "metrics.json", metrics)
    assert job.damage and "the score 'nll' must have a value and a count" in job.damage
