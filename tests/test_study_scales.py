"""One study at several scales: what differs is said once, and everything else stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from multitudes.study.spec import Spec, SpecError
from multitudes.study.store import Run

from .test_cli import multitudes_says
from .test_cli_study import stopped  # noqa: F401

STUDY = """seeds = 3
[data]
source = "table.csv"
target = "y"
[methods.single]
[methods.packed]
members = 4
alpha = 2
[training]
epochs = 75
lr = 0.1
[scales.smoke]
seeds = 1
[scales.smoke.training]
epochs = 1
[scales.smoke.methods.packed]
members = 2
[scales.long.training]
epochs = 200
"""


def study(folder: Path, text: str = STUDY) -> Path:
    path = folder / "study.toml"
    path.write_text(text)
    return path


def test_a_scale_changes_what_it_names_and_nothing_else(tmp_path):
    plain, smoke = Spec.load(study(tmp_path)), Spec.load(study(tmp_path), "smoke")
    assert (plain.seeds, plain.training.epochs, plain.methods["packed"].settings["members"]) == ([0, 1, 2], 75, 4)
    assert (smoke.seeds, smoke.training.epochs, smoke.methods["packed"].settings["members"]) == ([0], 1, 2)
    assert smoke.training.lr == plain.training.lr and smoke.methods["packed"].settings["alpha"] == 2
    assert list(smoke.methods) == list(plain.methods)
    assert Spec.load(tmp_path / "study.toml", "long").training.epochs == 200


def test_options_come_before_the_scale(tmp_path):
    assert Spec.load(study(tmp_path), "smoke", epochs=7).training.epochs == 7


def test_a_fault_in_a_scale_is_told_with_its_line(tmp_path):
    path = study(tmp_path, STUDY.replace("epochs = 1\n", "epochs = 0\n"))
    with pytest.raises(SpecError, match="^study.toml, line 15: training.epochs must be 1 or more, got 0$"):
        Spec.load(path, "smoke")


@pytest.mark.parametrize(
    ("text", "scale", "sentence"),
    [
        (STUDY, "tiny", "study.toml: scale must be one of smoke, long, got 'tiny'"),
        (
            "seeds = 1",
            "smoke",
            r"study.toml: scale must be a table \[scales.NAME\] of the file, which has none, got 'smo",
        ),
        ("scales = 3", None, r"study.toml: scales must be tables, \[scales.NAME\], of what differs .*, got 3"),
        ("scales.smoke = 3", "smoke", r"study.toml: scales must be tables, \[scales.NAME\], .*, got {'smoke': 3}"),
    ],
)
def test_a_wrong_scale_gets_a_sentence(tmp_path, text, scale, sentence):
    with pytest.raises(ValueError, match=sentence):
        Spec.load(study(tmp_path, text), scale)


# -- the command line --------------------------------------------------------------------------------------


def test_the_data_root_is_where_a_file_finds_its_data(tmp_path, monkeypatch, stopped):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    rows = np.random.default_rng(0).normal(size=(60, 2))
    (root / "table.csv").write_text("a,y\n" + "\n".join(f"{a:.3f},{'yes' if b > 0 else 'no'}" for a, b in rows))
    monkeypatch.chdir(elsewhere)
    path = study(tmp_path)
    assert multitudes_says("compare", str(path), "--scale", "smoke", "--data-root", str(root)).code == 130
    run = Run(elsewhere / "runs" / "study-smoke")
    assert [job.name for job in run.jobs] == ["single-0", "packed-0"]
    assert run.about is not None and run.about["request"]["source"] == str(root / "table.csv")


def test_a_scale_needs_a_file():
    ran = multitudes_says("compare", "digits", "--scale", "smoke")
    assert ran.code == 2 and "--scale=smoke is one of a study.toml, and there is none" in ran.err
