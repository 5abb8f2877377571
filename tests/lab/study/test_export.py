"""Exported networks take raw rows and images and predict as `predict` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from multitudes.lab import data as datasets
from multitudes.lab.data.tables.columns import Column
from multitudes.lab.data.tables.features import Category, Date, Feature, Number, date_parts, features_of
from tests.lab.cli.test_predict import draw, rows_of, says, trained

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def exported(job: Path, to: Path) -> Any:
    """Return an ONNX Runtime session of an exported job, and its metadata."""
    assert says("export", job, "--to", to).out.rstrip().endswith(f"Exported: {to}")
    onnx.checker.check_model(onnx.load(to), full_check=True)
    session = onnxruntime.InferenceSession(str(to), providers=["CPUExecutionProvider"])
    about = {name: json.loads(value) for name, value in session.get_modelmeta().custom_metadata_map.items()}
    return session, about


@pytest.mark.slow
def test_an_image_network_is_exported_with_pixel_inputs(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", data="digits", limit=100, methods={"deep": {"members": 2}}, epochs=2)
    session, about = exported(run.directory, tmp_path / "model.onnx")
    x = datasets.read(run.data_path).test.x[:5]
    names = ["probs", "entropy", "mutual_information", "members"]
    probs, entropy, information, members = session.run(names, {"image": x.numpy()})
    assert members.shape == (2, 5, 10) and x.dtype == torch.uint8
    rows = rows_of(says("predict", run.directory, *draw(tmp_path / "digits", x)).out)
    assert [about["classes"][label] for label in probs.argmax(1)] == [row["label"] for row in rows]
    for values, name in ((probs.max(1), "confidence"), (entropy, "entropy"), (information, "mutual_information")):
        assert values.tolist() == pytest.approx([float(row[name]) for row in rows], abs=1e-4)


COLOURS = ["red", "blue", "", "green"]


def houses(path: Path, rows: int = 150) -> pd.DataFrame:
    """Write a table with all column types, whose names are also those of outputs and operators."""
    random = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "mean": np.where(random.random(rows) < 0.1, np.nan, random.normal(50, 20, rows)),
            "cat": random.choice(COLOURS, rows),
            "built on": pd.Timestamp("2001-05-01 06:00") + pd.to_timedelta(random.integers(0, 90000, rows), unit="h"),
            "add": random.choice(["x", "y"], rows),
            "time": 1_600_000_000 + random.integers(0, 1000, rows),
        }
    )
    table["price"] = (
        1e5 + 1e3 * table["mean"].fillna(0) + 2e4 * (table["cat"] == "red") + 50 * table["built on"].dt.year
    )
    table.to_csv(path, index=False)
    return table


def test_a_table_network_is_exported_with_raw_inputs_and_units(tmp_path: Path) -> None:
    rows = houses(tmp_path / "houses.csv")
    options = {"methods": {"deep": {"members": 2}}, "epochs": 15, "target": "price"}
    run = trained(tmp_path / "run", data=tmp_path / "houses.csv", **options)
    session, about = exported(run.directory, tmp_path / "model.onnx")
    assert list(about["inputs"]) == ["input_mean", "cat", "built on", "add", "time"]
    new = rows.head(12).copy()
    new["time"] = new["time"].astype(float)
    new.loc[0, "cat"] = "never seen"
    new.loc[1, "add"], new.loc[2, "built on"], new.loc[3, "time"] = "", pd.NaT, np.nan  # never missing in training
    new.to_csv(tmp_path / "new.csv", index=False)
    feed = {
        "input_mean": new["mean"].to_numpy(),
        "cat": new["cat"].to_numpy(object),
        "built on": (new["built on"] - pd.Timestamp(0)).dt.total_seconds().to_numpy() / 86400,
        "add": new["add"].to_numpy(object),
        "time": new["time"].to_numpy(),
    }
    mean, std, members = session.run(["mean", "std", "members"], feed)
    want = rows_of(says("predict", run.directory, tmp_path / "new.csv").out)
    assert mean[:, 0].tolist() == pytest.approx([float(row["mean"]) for row in want], rel=1e-4)
    assert std[:, 0].tolist() == pytest.approx([float(row["std"]) for row in want], rel=1e-3)
    np.testing.assert_allclose(members.mean(0), mean, rtol=1e-5)
    assert abs(mean.mean() - new["price"].mean()) < 5 * new["price"].std()
    one = session.run(["mean"], {name: values[:1] for name, values in feed.items()})[0]
    np.testing.assert_allclose(one, mean[:1], rtol=1e-5)


FEATURES: list[tuple[Feature, Column]] = [
    (
        Number("a", 2.5, True, offset=1e6),
        Column("number", torch.tensor([1e6, torch.nan, 1e6 + 3], dtype=torch.float64)),
    ),
    (Category("c", ("a", "b"), True, True), Column("text", ["b", None, "z", "a"])),
    (Category("c", ("a", "b")), Column("text", ["b", "z", "a"])),
    (
        Date("d", start=18000.0, fill=18010.0, flag=True),
        Column("date", torch.tensor([18000.25, torch.nan, 18700.0, 21000.9], dtype=torch.float64)),
    ),
    (Date("d", ("month", "days"), start=18000.0), Column("date", torch.tensor([18000.0, 21000.0]).double())),
]


@pytest.mark.parametrize(("feature", "column"), FEATURES)
def test_restored_values_have_the_same_features(feature: Feature, column: Column) -> None:
    raw = feature.raw(column)
    x = features_of([feature], [raw])
    assert x.shape == (len(column), len(feature.names))
    torch.testing.assert_close(features_of([feature], [feature.restored(x)]), x)
    if isinstance(feature, Date) and "month" in feature.parts:
        assert torch.equal(x[:1, feature.parts.index("month")].double(), date_parts(raw[:1])["month"])
