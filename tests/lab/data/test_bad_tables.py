"""Faulty tables through the command line: each trains a network or ends with one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multitudes.lab.study.run.monitor import Outcome
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.trained_network import Trained
from multitudes.lab.study.run.worker import run as run_job
from tests.lab.cli.test_cli import run_cli, sentence

ROWS = 120
RNG = np.random.default_rng(0)
X, NOISE = RNG.uniform(0, 10, ROWS), RNG.normal(size=ROWS)
Y = 3 * X + 0.1 * NOISE
FAST = ("--model", "mlp", "--epochs", 40, "--batch-size", 16, "--lr", 0.01, "--patience", 0, "--device", "cpu")


def rows(**columns: Callable[[int], str]) -> list[list[str]]:
    """Return a header and rows: a number that determines the target, another one, the target, and more columns."""
    table = [["x", "noise", "y", *columns]]
    for at, each in enumerate(zip(X, NOISE, Y, strict=True)):
        table.append([*(f"{value:.4f}" for value in each), *(cell(at) for cell in columns.values())])
    return table


def text(table: list[list[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in table)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run jobs in this process, in an empty folder."""

    def run_jobs(run: Run, *_: Any) -> Outcome:
        for job in run.missing:
            run_job(job.directory)
        return Outcome([job.name for job in run.done], {})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("multitudes.lab.cli.study_commands._run", run_jobs)


def train(content: str, *options: object) -> Any:
    Path("t.csv").write_text(content)
    return run_cli("train", "t.csv", "--target", "y", "--method", "single", *FAST, "--out", "run", *options)


SHORT = text([*rows()[:40], ["1.5", "2"], *rows()[40:]])


def test_a_table_with_many_faults_trains_a_network() -> None:
    table = rows(
        same=lambda at: "7",
        user_id=lambda at: str(10**17 + 7919 * at),
        day=lambda at: f"2024-{at % 12 + 1:02}-{at % 28 + 1:02}",
    )
    for row, cell in {3: "", 4: "NA", 50: "?", 9: "broken", 12: "inf", 20: "-Infinity"}.items():
        table[row + 1][0] = cell
    ran = train(text([*table[:40], ["1.5", "2"], *table[40:]]), "--skip-bad")
    assert ran.code == 0, ran.err
    found = Trained.read("run", "cpu")
    dates = [f"day {part}" for part in ("month", "day", "weekday", "days")]
    assert list(found.data.columns) == ["x", "x missing", "noise", *dates]
    notes = {each.name: f"{each.missing} missing; {each.dropped}; {each.note}" for each in found.data.reading}
    for column, words in {"x": "3 read as missing: 'broken'", "same": "constant", "user_id": "an id"}.items():
        assert words in notes[column]
    assert sum(found.data.dropped.values()) == 1
    scores = found.job.metrics["scores"]
    assert math.isfinite(scores["rmse"]["value"]) and math.isfinite(scores["log_density"]["value"])
    test, predictions = found.data.test, found.job.predictions
    known = test.x[:, 1].numpy() == 0  # without x, the target cannot be predicted
    errors = predictions["mean"][known] - predictions["target"][known]
    assert np.sqrt((errors**2).mean()) < 0.3 * float(test.y.std())


BAD = {
    "a row with too few fields": (SHORT, "t.csv line 41: the number of cells is not 3"),
    "only constants": (
        text([["same", "y"], *(["7", row[2]] for row in rows()[1:])]),
        "'same': constant in the training rows",
    ),
    "no target": (text([["x", "z"], ["1", "2"]]), "--target 'y' is not a column of t.csv, which has x, z"),
}
"""The file and the message, by fault."""


@pytest.mark.parametrize("name", BAD)
def test_an_unusable_table_is_refused_in_one_sentence(name: str) -> None:
    content, message = BAD[name]
    assert message in sentence(train(content))
