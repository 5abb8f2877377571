"""What is wrong with tables, through the command line: each file ends in a model that has learned, or in a sentence."""

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
from tests.lab.cli.test_cli import Ran, multitudes_says, sentence

ROWS = 120
RNG = np.random.default_rng(0)
X, NOISE = RNG.uniform(0, 10, ROWS), RNG.normal(size=ROWS)
Y = 3 * X + 0.1 * NOISE
Row = list[str]
FAST = ("--model", "mlp", "--epochs", 40, "--batch-size", 16, "--lr", 0.01, "--patience", 0, "--device", "cpu")


def rows() -> list[Row]:
    """A header and rows of a number that tells the target, another one, and the target."""
    return [["x", "noise", "y"], *([f"{a:.4f}", f"{b:.4f}", f"{c:.4f}"] for a, b, c in zip(X, NOISE, Y, strict=True))]


def with_column(name: str, cell: Callable[[int], str]) -> list[Row]:
    table = rows()
    return [[name, *table[0]], *([cell(at), *row] for at, row in enumerate(table[1:]))]


def changed(column: str, cells: dict[int, str]) -> list[Row]:
    table = rows()
    for row, text in cells.items():
        table[row + 1][table[0].index(column)] = text
    return table


def text(table: list[Row], separator: str = ",") -> bytes:
    return "".join(separator.join(row) + "\n" for row in table).encode()


def in_this_process(run: Run, *_: Any) -> Outcome:
    """The jobs, without a process for each."""
    for job in run.missing:
        run_job(job.directory)
    return Outcome([job.name for job in run.done], {})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("multitudes.lab.cli.study_commands._run", in_this_process)


def trained_on(content: bytes, *options: object) -> Ran:
    Path("t.csv").write_bytes(content)
    return multitudes_says("train", "t.csv", "--target", "y", "--method", "single", *FAST, "--out", "run", *options)


def check_learned(found: Trained, columns: list[str]) -> None:
    assert list(found.data.columns) == columns
    scores = found.job.metrics["scores"]
    assert math.isfinite(scores["rmse"]["value"]) and math.isfinite(scores["log_density"]["value"])
    test, kept = found.data.test, found.job.predictions
    known = test.x[:, columns.index("x missing")].numpy() == 0 if "x missing" in columns else np.full(len(test), True)
    off = kept["mean"][known] - kept["target"][known]  # of a row without x nobody can know the target
    assert np.sqrt((off**2).mean()) < 0.3 * float(test.y.std())


FLAGGED = ["x", "x missing", "noise"]
GOOD = {
    "missing values": (changed("x", {3: "", 4: "NA", 50: "?"}), FLAGGED, {"x": "3 missing"}),
    "a word among numbers": (changed("x", {3: "unknown", 9: "broken"}), FLAGGED, {"x": "'unknown'"}),
    "infinity": (changed("x", {3: "inf", 9: "-Infinity"}), FLAGGED, {"x": "read as missing"}),
    "a constant column": (with_column("same", lambda at: "7"), ["x", "noise"], {"same": "constant"}),
    "huge ids": (with_column("user_id", lambda at: str(10**17 + 7919 * at)), ["x", "noise"], {"user_id": "an id"}),
    "dates": (
        with_column("day", lambda at: f"2024-{at % 12 + 1:02}-{at % 28 + 1:02}"),
        ["day month", "day day", "day weekday", "day days", "x", "noise"],
        {},
    ),
}
"""By fault: the table, the features that are made of it, and what is said of columns."""


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be_read_is_learned_from(name: str) -> None:
    table, columns, told = GOOD[name]
    ran = trained_on(text(table))
    assert ran.code == 0, ran.err
    found = Trained.read("run", "cpu")
    check_learned(found, columns)
    said = {each.name: f"{each.missing} missing; {each.dropped}; {each.note}" for each in found.data.reading}
    for column, words in told.items():
        assert words in said[column]


@pytest.mark.parametrize(
    "content",
    [text(rows(), ";"), text(rows(), ";").replace(b".", b","), b"\xef\xbb\xbf" + text(rows()), text(rows(), "\t")],
    ids=["semicolons", "semicolons and decimal commas", "BOM", "tabs"],
)
def test_other_forms_of_the_same_file_are_the_same_table(content: bytes) -> None:
    ran = trained_on(content)
    assert ran.code == 0, ran.err
    found = Trained.read("run", "cpu")
    check_learned(found, ["x", "noise"])
    every = np.concatenate([part.x[:, 0].numpy() for part in found.data.parts.values()])
    assert sorted(every.tolist()) == pytest.approx(sorted(X.tolist()), abs=1e-4)


LATIN = text(with_column("größe", lambda at: str(at % 7))).decode().encode("latin-1")
SHORT = text([*rows()[:40], ["1.5", "2"], *rows()[40:]])
BAD = {
    "a row with too few fields": (SHORT, "t.csv line 41: the number of cells is not 3"),
    "a header twice": (
        text([["x", "x", "y"], *rows()[1:]]),
        "must have distinct column names in its first line, got 'x'",
    ),
    "Latin-1": (LATIN, "t.csv must be UTF-8, but byte 2 is invalid"),
    "one class": (text([["x", "y"], *([row[0], "yes"] for row in rows()[1:])]), "2 or more classes, got only yes"),
    "a missing target": (text(changed("y", {5: ""})), "t.csv line 7: 'y' is missing or not finite"),
    "an infinite target": (text(changed("y", {5: "inf"})), "t.csv line 7: 'y' is missing or not finite"),
    "no rows": (text(rows()[:1]), "t.csv holds no rows"),
    "nothing but constants": (
        text([["same", "y"], *(["7", row[2]] for row in rows()[1:])]),
        "'same': constant in the training rows",
    ),
    "two rows": (text(rows()[:3]), "2 rows are too few to take"),
}
"""By fault: the file, and what is said."""


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_told_in_one_sentence(name: str) -> None:
    content, told = BAD[name]
    assert told in sentence(trained_on(content))


def test_bad_rows_can_be_left_out() -> None:
    ran = trained_on(SHORT, "--skip-bad")
    assert ran.code == 0, ran.err
    found = Trained.read("run", "cpu")
    check_learned(found, ["x", "noise"])
    assert sum(found.data.dropped.values()) == 1


def test_the_column_to_predict_must_be_said() -> None:
    Path("t.csv").write_bytes(text(rows()))
    told = sentence(multitudes_says("train", "t.csv", "--method", "single", *FAST))
    assert "--target must name the column of t.csv to predict, one of x, noise, y" in told
