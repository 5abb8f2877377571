"""What is collected into `results/` says what made it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from multitudes.study import costs
from recipes.collect import collect
from tests.fake_run import image_data, write_run


@pytest.mark.parametrize("recorded", ["0123456789", None])
def test_a_study_job_is_collected_with_the_commit_that_it_ran_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: str | None
) -> None:
    run = write_run(tmp_path / "packed_cifar10", ["single"], [0], data=image_data(("a", "b", "c")), landscape=False)
    metrics = run / "jobs" / "single-0" / "metrics.json"
    written = json.loads(metrics.read_text())
    metrics.write_text(json.dumps(written | ({"commit": recorded} if recorded else {})))
    monkeypatch.setenv("MULTITUDES_COMMIT", "9876543210")  # that of the collection
    (path,) = collect(run, tmp_path / "results")
    piece = json.loads(path.read_text())
    assert piece["commit"] == recorded  # unknown, where a job recorded none
    assert "commit" not in piece["result"] and piece["versions"] == written["versions"]


def test_the_commit_is_that_of_the_librarys_own_checkout_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        found = subprocess.run(["git", *name, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return found.stdout.strip()

    monkeypatch.delenv("MULTITUDES_COMMIT", raising=False)
    code = tmp_path / "src" / "package" / "costs.py"
    code.parent.mkdir(parents=True)
    code.write_text("")
    (tmp_path / "notes").write_text("")
    monkeypatch.setattr(costs, "__file__", str(code))
    assert costs.commit() is None  # no repository
    git("init")
    git("add", "notes")
    git("commit", "-m", "Notes")
    assert costs.commit() is None  # somebody else's repository, in which the library is installed
    git("add", "src")
    git("commit", "-m", "Code")
    assert costs.commit() == git("rev-parse", "--short=10", "HEAD")
    (tmp_path / "notes").write_text("changed")
    assert costs.commit() == git("rev-parse", "--short=10", "HEAD")  # no code
    code.write_text("changed = True")
    assert costs.commit() == git("rev-parse", "--short=10", "HEAD") + "+"
