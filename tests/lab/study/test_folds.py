"""Cross-validation: every row is tested once, and folds are compared in pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from multitudes.lab.data import load
from multitudes.lab.report.page import page
from multitudes.lab.report.run_results import read_results
from multitudes.lab.study.results.leaderboard import leaderboard
from multitudes.lab.study.results.paired import Comparison
from multitudes.lab.study.results.recommendation import recommend
from multitudes.lab.study.results.result_rows import Row, Value
from multitudes.lab.study.run.conclusion import measure_all
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.sections import SpecError
from multitudes.lab.study.spec.specification import Spec

ROWS = 62


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A unique number per row, noise, and a rare and a common class."""
    rng = np.random.default_rng(0)
    lines = [f"{row + 0.5},{rng.normal():.4f},{'rare' if row % 5 == 0 else 'often'}" for row in range(ROWS)]
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    path.write_text("\n".join(["number,noise,kind", *lines]))
    return path


def rows_of(data: Any) -> dict[str, list[float]]:
    at = data.columns.index("number")
    return {name: part.x[:, at].tolist() for name, part in data.parts.items()}


# -- data --------------------------------------------------------------------------------------------------


def test_every_row_is_tested_once_and_folds_are_stratified(table: Path) -> None:
    folds = [load(table, target="kind", fold=fold, folds=4) for fold in range(4)]
    tested = [value for data in folds for value in rows_of(data)["test"]]
    assert sorted(tested) == [row + 0.5 for row in range(ROWS)]
    for data in folds:
        parts = rows_of(data)
        assert sorted(parts["train"] + parts["validation"] + parts["test"]) == [row + 0.5 for row in range(ROWS)]
        assert int((data.test.y == data.classes.index("rare")).sum()) in (3, 4)  # of 13


def test_the_folds_of_an_archive_are_its_splits(tmp_path: Path) -> None:
    x = np.arange(60.0).reshape(30, 2) ** 1.1
    test = np.stack([np.arange(10 * fold, 10 * fold + 10) for fold in range(3)])
    train = np.stack([np.setdiff1d(np.arange(30), own) for own in test])
    np.savez(tmp_path / "a.npz", X=x, y=x[:, 0], train_idx=train, test_idx=test)
    for fold in range(3):
        data = load(tmp_path / "a.npz", fold=fold, folds=3)
        assert data.test.x.numpy() == pytest.approx(x[test[fold]], rel=1e-6)
    with pytest.raises(ValueError, match="fold=3 must be one of the 3 splits"):
        load(tmp_path / "a.npz", fold=3, folds=5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"folds": 1}, "folds must be a whole number, 2 or more, got 1"),
        ({"folds": 2.5}, "folds must be a whole number, 2 or more, got 2.5"),
        ({"folds": 3, "fold": 3}, "fold must be below folds=3, got 3"),
        ({"folds": 100}, "folds=100 must be at most the number of rows, 62"),
    ],
)
def test_wrong_folds_are_refused(table: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(table, target="kind", **options)


def test_data_with_a_test_part_have_no_folds(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("a,y\n" + "\n".join(f"{row}.5,{row}.25" for row in range(30)))
    with pytest.raises(ValueError, match="folds=3 must be left out, since the source has a test part"):
        load(tmp_path, target="y", folds=3)
    with pytest.raises(ValueError, match="folds= has no effect on 'digits'"):
        load("digits", folds=3)


# -- specifications ----------------------------------------------------------------------------------------


def test_each_fold_has_one_seed() -> None:
    spec = Spec.of(data="a.csv", folds=4)
    assert spec.seeds == [0, 1, 2, 3]
    with pytest.raises(SpecError, match="seeds must be left out with data.folds=4, since each fold has one"):
        Spec.of(data="a.csv", folds=4, seeds=3)
    with pytest.raises(SpecError, match="data.fold must be left out with data.folds=4, got 2"):
        Spec.of(data="a.csv", folds=4, fold=2)


# -- comparisons -------------------------------------------------------------------------------------------


def of_folds(name: str, values: list[float], overlap: float = 0.25) -> Row:
    seeds = tuple(range(len(values)))
    return Row(name, name, seeds, {"nll": Value(tuple(values), 20)}, folds=seeds, overlap=overlap)


def test_a_difference_over_folds_is_that_of_nadeau_and_bengio() -> None:
    rng = np.random.default_rng(0)
    hard = rng.normal(size=5)  # common to both, so it cancels
    ours, theirs = hard + 0.1 * rng.normal(size=5), hard + 0.5 + 0.1 * rng.normal(size=5)
    rows = of_folds("a", ours.tolist()), of_folds("b", theirs.tolist())
    found = Comparison(rows, "nll").difference(*rows)
    assert found is not None
    each = ours - theirs
    error = math.sqrt((1 / 5 + 1 / 4) * each.var(ddof=1))
    low, high = stats.t.interval(0.95, 4, each.mean(), error)
    assert found.interval() == pytest.approx((low, high)) and found.significant()


def test_only_common_folds_are_compared() -> None:
    whole, part = of_folds("a", [1.0, 2.0, 9.0]), of_folds("b", [0.5, 1.6])
    found = Comparison([whole, part], "nll").difference(whole, part)
    assert found is not None and found.mean == pytest.approx(0.45)
    alone = of_folds("c", [1.0])
    assert Comparison([whole, alone], "nll").difference(whole, alone) is None


# -- a whole study -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    options = {"model": "mlp", "epochs": 3, "patience": 0, "batch_size": 16, "device": "cpu"}
    spec = Spec.of(data=str(table), target="kind", methods=["single", "packed"], folds=3, **options)
    found = prepare(spec, tmp_path_factory.mktemp("run"))
    for job in found.jobs:
        run_job(job.directory)
    measure_all(found, lambda message: None)
    return found


def test_a_study_of_folds_tests_every_row_once(run: Run) -> None:
    assert [job.name for job in run.jobs] == [f"{label}-{fold}" for label in ("single", "packed") for fold in range(3)]
    for label in ("single", "packed"):
        jobs = [run.job(label, fold) for fold in range(3)]
        assert sum(len(job.predictions["target"]) for job in jobs) == ROWS
        assert len({str((job.config or {})["data"]) for job in jobs}) == 3
    assert run.folds == [0, 1, 2]


def test_baselines_and_methods_are_compared_fold_by_fold(run: Run) -> None:
    rows = {row.name: row for row in leaderboard(run)}
    for row in rows.values():
        assert row.folds == (0, 1, 2) and len(row.values["nll"].values) == 3
        assert row.overlap == pytest.approx(1 / 2, abs=0.05)
        assert row.examples()["nll"].shape == (1, ROWS)
    single = [run.job("single", fold).metrics["scores"]["nll"]["value"] for fold in range(3)]
    boosting = rows["gradient_boosting"]
    found = Comparison(list(rows.values()), "nll").difference(rows["single"], boosting)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(np.array(single) - np.array(boosting.values["nll"].values)))


def test_notes_and_page_count_folds(run: Run) -> None:
    notes = " ".join(recommend(leaderboard(run)).notes)
    assert f"over 3 folds and {ROWS} test rows" in notes and "seed" not in notes
    text = page(read_results(run.directory))
    assert "Mean over 3 folds" in text


def test_preparing_again_keeps_data_and_results(run: Run, table: Path) -> None:
    options = {"model": "mlp", "epochs": 3, "patience": 0, "batch_size": 16, "device": "cpu"}
    spec = Spec.of(data=str(table), target="kind", methods=["single", "packed"], folds=3, **options)
    before = {path.name: path.stat().st_mtime_ns for path in run.directory.glob("*.mtdata")}
    again = prepare(spec, run.directory)
    assert not again.missing and len(before) == 3
    assert before == {path.name: path.stat().st_mtime_ns for path in run.directory.glob("*.mtdata")}
    assert torch.equal(load(run.directory / "data.mtdata").test.y, load(table, target="kind", folds=3).test.y)
