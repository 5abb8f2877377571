"""One study at several scales: what differs is said once, and everything else stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from multitudes.study.spec import Spec
from multitudes.study.store import Run

from .study_cases import write_table
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


@pytest.fixture
def study(tmp_path):
    """Writes a study.toml, and gives its path."""

    def write(text: str = STUDY) -> Path:
        path = tmp_path / "study.toml"
        path.write_text(text)
        return path

    return write


def test_a_scale_changes_what_it_names_and_nothing_else(study):
    plain, smoke = Spec.load(study()), Spec.load(study(), "smoke")
    assert (plain.seeds, plain.training.epochs, plain.methods["packed"].settings["members"]) == ([0, 1, 2], 75, 4)
    assert (smoke.seeds, smoke.training.epochs, smoke.methods["packed"].settings["members"]) == ([0], 1, 2)
    assert smoke.training.lr == plain.training.lr and smoke.methods["packed"].settings["alpha"] == 2
    assert list(smoke.methods) == list(plain.methods)
    assert Spec.load(study(), "long").training.epochs == 200
    assert Spec.load(study(), "smoke", epochs=7).training.epochs == 7, "options come before the scale"


@pytest.mark.parametrize(
    ("text", "scale", "sentence"),
    [
        (STUDY.replace("epochs = 1\n", "epochs = 0\n"), "smoke", ", line 15: training.epochs must be 1 or more, got 0"),
        (STUDY, "tiny", ": scale must be one of smoke, long, got 'tiny'"),
        ("seeds = 1", "smoke", ": scale must be a table [scales.NAME] of the file, which has none, got 'smoke'"),
        ("scales = 3", None, ": scales must be tables, [scales.NAME], of what differs at each scale, got 3"),
        (
            "scales.smoke = 3",
            "smoke",
            ": scales must be tables, [scales.NAME], of what differs at each scale, got {'smo",
        ),
    ],
)
def test_a_wrong_scale_gets_a_sentence(study, text, scale, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape('study.toml' + sentence)}"):
        Spec.load(study(text), scale)


# -- the command line --------------------------------------------------------------------------------------


def test_the_data_root_is_where_a_file_finds_its_data(tmp_path, monkeypatch, study, stopped):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    table = write_table(root)
    monkeypatch.chdir(elsewhere)
    path = study(STUDY.replace("table.csv", "rows.csv"))
    assert multitudes_says("compare", str(path), "--scale", "smoke", "--data-root", str(root)).code == 130
    run = Run(elsewhere / "runs" / "study-smoke")
    assert [job.name for job in run.jobs] == ["single-0", "packed-0"]
    assert run.about is not None and run.about["request"]["source"] == str(table)


def test_a_scale_needs_a_file():
    ran = multitudes_says("compare", "digits", "--scale", "smoke")
    assert ran.code == 2 and "--scale=smoke needs a study.toml" in ran.err
