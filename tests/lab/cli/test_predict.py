"""Commands for trained networks: predict, evaluate, explain, report."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from multitudes.files.save import load
from multitudes.lab import data as datasets
from multitudes.lab.data import Data
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from multitudes.tasks.predictive import Predictive
from tests.lab.cli.test_cli import PACKAGE, Ran, run_cli, sentence

CPU = ("--device", "cpu")


def trained(out: Path, **options: Any) -> Run:
    """Run a study in this process."""
    spec = Spec.of(device="cpu", shift=[], draws=3, sizes=[1], **options)
    run = prepare(spec, out)
    for job in run.jobs:
        run_job(job.directory)
    return run


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Run:
    methods = {"deep": {"members": 2}, "drop_connect": {}}
    return trained(tmp_path_factory.mktemp("images"), data="digits", limit=100, methods=methods, epochs=2)


@pytest.fixture(scope="module")
def deep(images: Run) -> Path:
    return images.job("deep", 0).directory


@pytest.fixture(scope="module")
def digits(images: Run) -> Data:
    return datasets.read(images.data_path)


def garden(path: Path, rows: int = 120) -> Path:
    """Write a table whose height depends on its other columns."""
    random = np.random.default_rng(0)
    lines = ["sun,kind,height"]
    for _ in range(rows):
        sun, kind = random.uniform(0, 8), random.choice(["fern", "rose", "oak"])
        lines.append(f"{sun:.3f},{kind},{100 + 5 * sun + 20 * (kind == 'oak') + random.normal():.3f}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("table")
    source = garden(folder / "garden.csv")
    options = {"target": "height", "methods": {"deep": {"members": 2}}, "epochs": 20}
    return trained(folder / "run", data=source, model="mlp", **options)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PACKAGE)
    return tmp_path


def draw(folder: Path, x: torch.Tensor) -> list[Path]:
    """Write images `[N, 1, H, W]` to files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03}.png" for number in range(len(x))]
    for path, image in zip(paths, x, strict=True):
        Image.fromarray(image[0].numpy()).save(path)
    return paths


def says(*arguments: Any) -> Ran:
    """Run a command on the CPU that must succeed."""
    ran = run_cli(*arguments, *CPU)
    assert ran.code == 0, ran.err
    return ran


def refuses(*arguments: Any) -> str:
    """Return the error of a command that must fail."""
    return sentence(run_cli(*arguments, *CPU))


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def predictions(job: Path, data: Data, x: torch.Tensor) -> Any:
    """Predict with the saved network."""
    net = load(job / "model.safetensors").eval()
    with torch.no_grad():
        return net.predict(data.normalised(x), seed=0)


# -- predict -----------------------------------------------------------------------------------------------


def test_predict_writes_a_row_for_each_image(deep: Path, digits: Data, folder: Path) -> None:
    draw(folder / "some", digits.test.x[:6])
    done = subprocess.run(
        [sys.executable, "-m", "multitudes", "predict", str(deep), "some", *CPU],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PACKAGE},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert list(rows[0]) == ["input", "label", "confidence", "entropy", "mutual_information"]
    assert [row["input"] for row in rows] == [f"some/{number:03}.png" for number in range(6)]
    want = predictions(deep, digits, digits.test.x[:6])
    assert [row["label"] for row in rows] == [digits.classes[label] for label in want.label.tolist()]
    for name in ("confidence", "entropy", "mutual_information"):
        assert [float(row[name]) for row in rows] == pytest.approx(getattr(want, name).tolist(), rel=1e-4, abs=1e-5)


def test_json_has_the_same_predictions_and_optional_probabilities(deep: Path, digits: Data, folder: Path) -> None:
    paths = draw(folder, digits.test.x[:3])
    as_csv = rows_of(says("predict", deep, *paths).out)
    says("predict", deep, *paths, "--to", "a.json", "--probs")
    found = json.loads((folder / "a.json").read_text())
    assert [row["label"] for row in found] == [row["label"] for row in as_csv]
    for row in found:
        probs = [row[f"p({name})"] for name in digits.classes]
        assert sum(probs) == pytest.approx(1, abs=1e-4)
        assert row["confidence"] == pytest.approx(max(probs))
        assert row["entropy"] == pytest.approx(-sum(p * math.log(p) for p in probs), rel=1e-3)


def test_draws_depend_on_the_seed_only(images: Run, digits: Data, folder: Path) -> None:
    job = images.job("drop_connect", 0).directory
    (path,) = draw(folder, digits.test.x[:1])
    one, two, other = (says("predict", job, path, "--seed", seed, "--draws", 5).out for seed in (1, 1, 2))
    assert one == two != other


def test_images_of_any_size_are_read_and_bad_ones_can_be_skipped(deep: Path, folder: Path) -> None:
    draw(folder / "some", torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    Image.new("RGB", (31, 17), (200, 30, 30)).save(folder / "some" / "red.jpg")
    (folder / "some" / "labels.csv").write_text("file,label\n000.png,3\n")  # not what an image network reads
    assert len(rows_of(says("predict", deep, "some").out)) == 3
    (folder / "some" / "bad.png").write_text("no image")
    error = refuses("predict", deep, "some")
    assert "some/bad.png" in error and "--skip-bad" in error
    ran = says("predict", deep, "some", "--skip-bad")
    assert "Left out 1 of 4" in ran.err and len(rows_of(ran.out)) == 3


def test_an_interval_without_a_bound_is_null_in_json_and_an_empty_cell(
    table: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Predictive, "interval", lambda self, level: (self.mean - math.inf, self.mean + math.inf))
    (folder / "new.csv").write_text("kind,sun\noak,4\n")
    (found,) = json.loads(says("predict", table.directory, "new.csv", "--format", "json").out)
    assert (found["low"], found["high"]) == (None, None) and math.isfinite(found["mean"])
    (row,) = rows_of(says("predict", table.directory, "new.csv").out)
    assert (row["low"], row["high"]) == ("", "")


def test_predict_writes_means_and_intervals_for_a_table(table: Run, folder: Path) -> None:
    (folder / "new.csv").write_text("kind,id,sun\noak,a,4\nrose,b,0.5\n")  # other order, more columns, no target
    rows = rows_of(says("predict", table.directory, "new.csv").out)
    assert [row["input"] for row in rows] == ["line 2", "line 3"]
    data = datasets.read(table.data_path)
    x = torch.zeros(2, len(data.columns))
    x[:, data.columns.index("sun")] = torch.tensor([4.0, 0.5])
    x[0, data.columns.index("kind=oak")] = x[1, data.columns.index("kind=rose")] = 1
    want = predictions(table.jobs[0].directory, data, x)
    mean = want.mean[:, 0] * data.target_std + data.target_mean
    reach = 1.959964 * want.std[:, 0] * data.target_std
    for name, values in (("mean", mean), ("low", mean - reach), ("high", mean + reach)):
        assert [float(row[name]) for row in rows] == pytest.approx(values.tolist(), rel=1e-4)
    narrower = rows_of(says("predict", table.directory, "new.csv", "--level", "0.5").out)
    assert float(narrower[0]["low"]) > float(rows[0]["low"])


TABLES = {
    "a column that is missing": ("sun,height\n1,2\n", ["'kind'", "sun, height"]),
    "a row that is empty": ("sun,kind\n1,oak\n\n,\n", ["line 4", "all inputs are missing", "--skip-bad"]),
    "words for numbers": ("sun,kind\nlow,oak\nhigh,oak\n", ["'sun'", "numbers"]),
}


@pytest.mark.parametrize("case", TABLES)
def test_an_unsuitable_table_is_an_error(case: str, table: Run, folder: Path) -> None:
    text, words = TABLES[case]
    (folder / "new.csv").write_text(text)
    error = refuses("predict", table.directory, "new.csv")
    for word in words:
        assert word in error


def test_unknown_categories_are_reported(table: Run, folder: Path) -> None:
    (folder / "new.csv").write_text("sun,kind\n1,oak\n2,palm\n")
    error = says("predict", table.directory, "new.csv").err
    assert "1 row has a category that does not occur in the training data" in error


def test_missing_values_are_imputed_and_reported(table: Run, folder: Path) -> None:
    data = datasets.read(table.data_path)
    median = np.median(data.train.x[:, data.columns.index("sun")])
    (folder / "new.csv").write_text(f"sun,kind\n,oak\n{median:.6f},oak\nn.v.,oak\n1,oak\n")
    ran = says("predict", table.directory, "new.csv")
    means = [float(row["mean"]) for row in rows_of(ran.out)]
    assert means[0] == means[2] == pytest.approx(means[1], rel=1e-5)
    assert "'sun' is missing in 2 rows" in ran.err


def test_a_network_for_tables_refuses_images(table: Run, folder: Path) -> None:
    (path,) = draw(folder, torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    error = refuses("predict", table.directory, path)
    assert error.endswith(f"rows must be in a CSV, Parquet or .npz file or a folder of them, got {str(path)!r}")


@pytest.mark.parametrize("command", ["predict", "evaluate", "explain"])
def test_an_unsupported_precision_is_an_error(
    command: str, deep: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(precision: str, device: object) -> None:
        if precision == "bfloat16":
            raise ValueError("precision='bfloat16' does not work on this CPU")

    monkeypatch.setattr("multitudes.lab.study.run.trained_network.check_precision", cannot)
    inputs = draw(folder, torch.zeros(1, 1, 8, 8, dtype=torch.uint8)) if command == "predict" else []
    assert "--precision 'bfloat16' does not work" in refuses(command, deep, *inputs, "--precision", "bfloat16")


def test_predict_requires_a_finished_job(images: Run, deep: Path, folder: Path) -> None:
    draw(folder, torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    error = refuses("predict", images.directory, "000.png")
    assert "deep-0, drop_connect-0" in error and "the best" in error
    (folder / "packed-0").mkdir()
    shutil.copy(deep / "config.json", folder / "packed-0")
    assert "without results" in refuses("predict", "packed-0", "packed-0")
    assert "'nothing.png' does not exist" in refuses("predict", deep, "nothing.png")


# -- evaluate ----------------------------------------------------------------------------------------------


def test_evaluate_repeats_the_scores_of_the_study(deep: Path, folder: Path) -> None:
    ran = says("evaluate", deep, "--to", "scores.json")
    found = json.loads((folder / "scores.json").read_text())
    want = json.loads((deep / "metrics.json").read_text())["scores"]
    for name in ("accuracy", "nll", "ece", "ood/photographs/mutual_information/auroc"):
        assert found[name]["value"] == pytest.approx(want[name]["value"], rel=1e-5)
        assert f"{name} " in ran.out


def test_other_images_have_labels_by_folder(deep: Path, digits: Data, folder: Path) -> None:
    for number, name in enumerate(digits.classes[:3]):
        draw(folder / "other" / name, digits.test.x[digits.test.y == number])
    draw(folder / "blank", torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    says("evaluate", deep, "other", "--to", "scores.json", "--shift", "contrast", "--severities", "5", "--ood", "blank")
    found = json.loads((folder / "scores.json").read_text())
    chosen = digits.test.y < 3
    want = predictions(deep, digits, digits.test.x[chosen])
    accuracy = (want.label == digits.test.y[chosen]).float().mean().item()
    assert found["accuracy"] == {"value": pytest.approx(accuracy), "count": int(chosen.sum())}
    assert {"shift/contrast/5/accuracy", "ood/blank/entropy/auroc", "ood/photographs/entropy/auroc"} < set(found)
    draw(folder / "other" / "cat", torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    assert "'cat'" in refuses("evaluate", deep, "other")


def test_a_table_is_scored_in_the_units_of_its_target(table: Run, folder: Path) -> None:
    garden(folder / "garden.csv")
    command = ["evaluate", table.directory, "garden.csv", "--to", "scores.json"]
    assert "sun, kind, height" in refuses(*command)
    says(*command, "--target", "height")
    predicted = rows_of(says("predict", table.directory, "garden.csv").out)
    heights = np.array([float(row["height"]) for row in rows_of((folder / "garden.csv").read_text())])
    means = np.array([float(row["mean"]) for row in predicted])
    found = json.loads((folder / "scores.json").read_text())["rmse"]
    assert found["count"] == 120
    assert found["value"] == pytest.approx(np.sqrt(np.mean((means - heights) ** 2)), rel=1e-3)


# -- explain, report ---------------------------------------------------------------------------------------


def test_explain_compares_the_networks_of_a_run_on_a_page(images: Run, folder: Path) -> None:
    ran = says("explain", images.directory, "--to", "why.html", "--points", "3", "--inputs", "32")
    assert "Comparing 2 networks: deep-0, member 0; deep-0, member 1" in ran.err
    assert "plotly" in (folder / "why.html").read_text(encoding="utf-8")
    assert "deep, drop_connect" in refuses("explain", images.directory, "--methods", "packed")
    assert "two networks" in refuses("explain", images.job("drop_connect", 0).directory)


def test_explain_compares_networks_that_predict_numbers(table: Run, folder: Path) -> None:
    ran = says("explain", table.directory, "--to", "why.html", "--points", "3", "--inputs", "32")
    assert "Comparing 2 networks: deep-0, member 0; deep-0, member 1" in ran.err
    assert "RMS difference of means" in (folder / "why.html").read_text(encoding="utf-8")


def test_report_rewrites_the_page(images: Run) -> None:
    images.report_path.unlink(missing_ok=True)
    ran = run_cli("report", images.directory)
    assert ran.code == 0, ran.err
    assert ran.out == f"Report: {images.report_path}\n"
    assert images.report_path.is_file()
