"""Kinds of data: adding one row is enough to read, prepare, train, measure, show and predict a new kind."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from multitudes.lab import data as datasets
from multitudes.lab import report
from multitudes.lab.data import kinds
from multitudes.lab.data.kinds import Kind, kind_of_shape
from multitudes.lab.data.preprocessing import Preprocessing
from multitudes.lab.data.tables.columns import Column, Encoded
from multitudes.lab.data.tables.table import TableEncoder, choose_columns
from multitudes.lab.study.run.worker import run as run_job
from multitudes.lab.study.spec.method_rows import METHODS, methods_for
from multitudes.lab.study.spec.planning import prepare
from multitudes.lab.study.spec.specification import Spec
from tests.lab.cli.test_cli import run_cli
from tests.zoo.predictions import raises


class StepEncoder(TableEncoder):
    """Encode series of one number per step, `[N, T, 1]`."""

    def __call__(self, columns: Mapping[str, Column], rows: Tensor, where: Any = None) -> Encoded:
        found = super().__call__(columns, rows)
        return replace(found, x=found.x[:, :, None])


SERIES = Kind(
    "series", "series", torch.float32, 2, "float32 series [N, T, F]",
    find=lambda source, choice, target: [] if "t0" in source.columns else None,
    options=("columns",),
    choose=choose_columns,
    fit=StepEncoder.fitted,
    encoder=lambda shape, names, features: StepEncoder(features),
    preprocessing=lambda x, features, numbers: Preprocessing(x.mean((0, 1)), x.std((0, 1), correction=0)),
    defaults=lambda shape, rows: {
        **kind_of_shape((4,)).defaults((4,), rows), "model": {"name": "mlp", "settings": {"hidden": [50]}},
    },
    arguments=lambda model, shape, outputs, taken: {"inputs": math.prod(shape), "outputs": outputs},
    has_columns=True,
)  # fmt: skip


def test_a_new_kind_of_data_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", [SERIES, *kinds.KINDS])
    steps = torch.randn(120, 6, generator=torch.Generator().manual_seed(0)).cumsum(1)
    rows = [[*map(str, row), "up" if row[-1] > row[0] else "down"] for row in steps.tolist()]
    header = [*(f"t{step}" for step in range(6)), "way"]
    (tmp_path / "walks.csv").write_text("\n".join(",".join(row) for row in [header, *rows]))
    methods = {"deep": {"members": 2}}
    run = prepare(Spec.of(data=tmp_path / "walks.csv", target="way", methods=methods), tmp_path / "run")
    data = datasets.read(run.data_path)
    assert repr(data) == "Data('walks': 84 + 12 + 24 series of [6, 1], 2 classes)"
    assert data.kind is SERIES and (run.about or {})["kind"] == "series"
    (job,) = run.jobs
    run_job(job.directory, "cpu")
    assert json.loads((job.directory / "metrics.json").read_text())["scores"]["accuracy"]["value"] > 0.75
    assert report.write(run.directory).is_file()
    answers = run_cli("predict", job.directory, tmp_path / "walks.csv", "--device", "cpu").out
    labels = [line.split(",")[1] for line in answers.splitlines()[1:]]
    assert sum(label == row[-1] for label, row in zip(labels, rows, strict=True)) > 90
    assert set(METHODS) - set(methods_for(data.shape)) == {"smooth", "smooth_dropout", "lora"}
    with raises("training.augment='crop' is for images"):
        Spec.of(augment="crop").resolved(data.shape)


def test_inputs_of_no_kind_are_refused() -> None:
    forms = "uint8 images [N, C, H, W] or int32 tokens [N, T] or float32 features [N, F]"
    with raises(f"shape must fit {forms}, got [2, 3]"):
        kind_of_shape((2, 3))
    with raises(f"x must be {forms}, got torch.uint8 [1, 4, 4]"):
        datasets.Part(torch.zeros(1, 4, 4, dtype=torch.uint8), torch.zeros(1))


def test_the_digits_are_cached() -> None:
    assert datasets.load("digits") is datasets.load("digits")
