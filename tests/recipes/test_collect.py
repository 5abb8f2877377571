"""Provenance of collected results."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import multitudes as mt
from multitudes.base.sealed_files import read_json, write_json
from multitudes.lab.study.run import costs, worker
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from recipes.collect import collect
from tests.recipes.recipe_cases import noise


def test_a_job_is_collected_with_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mt.data.save(noise(12, 3, 8, 8), tmp_path / "data.mtdata")
    small = {"epochs": 1, "shift": [], "device": "cpu"}
    spec = Spec.of(data=str(tmp_path / "data.mtdata"), model="small_cnn", methods={"single": {}}, seeds=[0], **small)
    (job,) = prepare(spec, tmp_path / "packed_cifar10").missing
    monkeypatch.setenv("MULTITUDES_COMMIT", "0123456789")
    worker.run(job.directory, "cpu")
    monkeypatch.setenv("MULTITUDES_COMMIT", "9876543210")  # that of the collection

    def collected() -> dict[str, Any]:
        (path,) = collect(tmp_path / "packed_cifar10", tmp_path / "results")
        return json.loads(path.read_text())

    piece, metrics = collected(), read_json(job.directory / "metrics.json")
    assert piece["commit"] == "0123456789" and piece["versions"] == metrics["versions"]
    assert piece["result"]["scores"]["nll"] == pytest.approx(metrics["scores"]["nll"]["value"], rel=1e-5)
    del metrics["commit"]  # jobs of earlier versions recorded none
    write_json(job.directory / "metrics.json", metrics)
    assert collected()["commit"] is None


def test_the_commit_is_that_of_the_checkout_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
