"""The command line: its help, its errors, and the commands that need no trained network."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import multitudes
from multitudes.lab import data as datasets
from multitudes.lab.cli import main
from multitudes.lab.cli.options import located
from multitudes.lab.cli.screen import console, leaderboard_tables, watching
from multitudes.lab.study.results.result_rows import Row, Value
from multitudes.lab.study.run.monitor import JobProgress, Snapshot
from multitudes.lab.study.spec.method_rows import METHODS
from multitudes.lab.study.spec.network_sources import build_network

COMMANDS = [
    ["compare"], ["train"], ["evaluate"], ["predict"], ["serve"], ["explain"], ["report"], ["export"], ["methods"],
    ["bench"], ["data", "prepare"],
]  # fmt: skip
PACKAGE = str(Path(multitudes.__file__).resolve().parents[1])


@dataclass
class Ran:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def multitudes_says(*arguments: object) -> Ran:
    """Run the program in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return Ran(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def sentence(ran: Ran) -> str:
    """The one sentence by which a command has failed."""
    assert ran.code == 2, ran
    assert ran.out == "", "errors are told on stderr"
    assert "Traceback" not in ran.err
    lines = ran.err.strip().splitlines()
    assert lines[-1].startswith("Error: "), ran.err
    assert sum(line.startswith("Error: ") for line in lines) == 1
    return lines[-1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PACKAGE)
    monkeypatch.delenv("MULTITUDES_DATA", raising=False)
    return tmp_path


# -- help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_with_examples_and_takes_the_common_options(command: list[str]) -> None:
    ran = multitudes_says(*command, "--help")
    assert ran.code == 0
    for option in ("--device", "--precision", "--seed", "--debug"):
        assert option in ran.out
    assert "Examples" in ran.out
    assert f"multitudes {' '.join(command)}" in ran.out.partition("Examples")[2]
    assert "\x1b" not in ran.out


def test_the_program_lists_its_commands_without_control_codes_also_in_the_log_of_a_github_action() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "multitudes", "--help"], capture_output=True, text=True,
        env={**os.environ, "GITHUB_ACTIONS": "true"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert all(command[0] in done.stdout for command in COMMANDS)


# -- errors ------------------------------------------------------------------------------------------------


def wine(path: Path, rows: int = 60, bad: dict[int, str] | None = None) -> Path:
    """A table of numbers and words, with a number to predict."""
    lines = ["acid,colour,quality"]
    for row in range(rows):
        line = f"{row % 7},{'red' if row % 3 else 'white'},{(row % 7) * 0.5 + (row % 3)}"
        lines.append((bad or {}).get(row, line))
    path.write_text("\n".join(lines) + "\n")
    return path


PREPARE = ["data", "prepare", "wine.csv", "--target", "quality", "--to", "wine.mtdata"]
ERRORS: dict[str, tuple[list[str], list[str]]] = {
    "an unknown method": (
        ["compare", "digits", "--methods", "pakced"],
        ["single, deep, tabm, packed", "did you mean packed"],
    ),
    "an unknown network": (["compare", "digits", "--model", "resnet19"], ["resnet18", "'resnet19'"]),
    "no epochs": (["compare", "digits", "--epochs", "0"], ["--epochs must be greater than or equal to 1, got 0"]),
    "no seeds": (["compare", "digits", "--seeds", "0"], ["--seeds"]),
    "no data": (["compare"], ["DATA must be given", "digits"]),
    "data twice": (["compare", "digits", "--data", "wine.csv"], ["'digits'", "'wine.csv'"]),
    "no such file": (["compare", "nowhere.csv", "--target", "a"], ["nowhere.csv", "does not exist"]),
    "a column that is not there": (["compare", "wine.csv", "--target", "taste"], ["'taste'", "acid, colour, quality"]),
    "no target": (["compare", "wine.csv"], ["target", "acid, colour, quality"]),
    "an unknown corruption": (["compare", "digits", "--shift", "rain"], ["'rain'", "fog"]),
    "a severity that is none": (["compare", "digits", "--severities", "1,x"], ["--severities", "'1,x'"]),
    "a method for images on a table": (
        ["compare", "wine.csv", "--target", "quality", "--methods", "smooth"],
        ["methods.smooth", "no images"],
    ),
    "a wrong key in a study": (["compare", "wrong.toml"], ["wrong.toml, line 2", "'training.epoch'", "epochs"]),
    "a scale without a study": (["compare", "digits", "--scale", "smoke"], ["--scale=smoke needs a study.toml"]),
    "a fraction of a GPU without a cluster": (["compare", "digits", "--gpus", "0.5"], ["--gpus", "--ray"]),
    "a study that is not there": (["compare", "nowhere.toml"], ["nowhere.toml", "cannot be read"]),
    "a run directory that is a file": (["compare", "digits", "--out", "wine.csv"], ["wine.csv", "is a file"]),
    "a setting without a value": (["train", "digits", "--set", "members"], ["KEY=VALUE", "'members'"]),
    "a setting that a method has not": (["train", "digits", "--set", "tau=1"], ["'tau'", "members, alpha, gamma"]),
    "a folder of data that is none": (["compare", "x", "--data-root", "nowhere"], ["--data-root", "'nowhere'"]),
    "an unknown option": (["compare", "digits", "--frobnicate"], ["--frobnicate"]),
    "an unknown command": (["compere", "digits"], ["compere"]),
    "a device that is none": (["bench", "--device", "tpu"], ["--device", "tpu"]),
    "a shape that is none": (["bench", "--shape", "8,8"], ["--shape", "'8,8'"]),
    "no job": (["predict", ".", "wine.csv"], ["RUN/jobs/METHOD-SEED"]),
    "no run": (["report", "."], ["no run directory"]),
    "no place to export to": (["export", ".", "--to", "nowhere/a.onnx"], ["nowhere/a.onnx"]),
    "an export that is no float32": (["export", ".", "--to", "a.onnx", "--precision", "bfloat16"], ["float32"]),
    "a form that is not known": (["predict", ".", "wine.csv", "--to", "a.txt"], [".csv or .json", "a.txt"]),
    "no place for answers": (["predict", ".", "wine.csv", "--to", "nowhere/a.csv"], ["--to", "nowhere/a.csv"]),
    "no place for scores": (["evaluate", ".", "--to", "nowhere/a.json"], ["--to", "nowhere/a.json"]),
    "an interval of everything": (["predict", ".", "wine.csv", "--level", "1"], ["--level", "1.0"]),
    "a prepared file of another name": (["data", "prepare", "digits", "--to", "a.npz"], [".mtdata", "a.npz"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_sentence_that_names_what_is_wrong(case: str, elsewhere: Path) -> None:
    wine(elsewhere / "wine.csv")
    (elsewhere / "wrong.toml").write_text("[training]\nepoch = 3\n")
    arguments, words = ERRORS[case]
    told = sentence(multitudes_says(*arguments))
    assert [word for word in words if word not in told] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["compare", "digits"], ["train", "digits"], ["bench"]], ids=" ".join)
def test_a_gpu_that_is_not_there_is_said_before_any_work(command: list[str], elsewhere: Path) -> None:
    assert "no GPU" in sentence(multitudes_says(*command, "--device", "cuda"))
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("command", ["compare", "train"])
def test_a_precision_that_this_cpu_cannot_compute_is_said_before_any_work(
    command: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Mock(side_effect=ValueError("no bfloat16 here"))
    monkeypatch.setattr("multitudes.training.precision.check_precision", check)
    ran = multitudes_says(command, "digits", "--device", "cpu", "--precision", "bfloat16")
    assert sentence(ran) == "Error: no bfloat16 here"
    check.assert_called_once_with("bfloat16", torch.device("cpu"))
    assert not list(elsewhere.iterdir())


def test_debug_shows_the_traceback_and_ends_with_the_same_code() -> None:
    ran = multitudes_says("compare", "digits", "--epochs", "0", "--debug")
    assert ran.code == 2
    assert "Traceback (most recent call last)" in ran.err
    assert "training.epochs must be greater than or equal to 1, got 0" in ran.err


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load", Mock(side_effect=KeyError("surprise")))
    told = sentence(multitudes_says(*PREPARE))
    assert "KeyError: 'surprise'" in told and "--debug" in told


def test_ctrl_c_ends_with_130_and_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load", Mock(side_effect=KeyboardInterrupt))
    ran = multitudes_says(*PREPARE)
    assert ran.code == 130
    assert "same command" in ran.err and "Traceback" not in ran.err


# -- commands that need no network -------------------------------------------------------------------------


def test_methods_says_of_each_what_it_costs_and_when_to_pick_it() -> None:
    ran = multitudes_says("methods")
    assert ran.code == 0
    for method in METHODS.values():
        row = next(line for line in ran.out.splitlines() if line.split() and line.split()[0] == method.name)
        assert method.costs in row
        assert method.pick in row


@pytest.mark.slow
def test_bench_measures_in_multiples_of_the_single_network() -> None:
    ran = multitudes_says(
        "bench", "--model", "mlp", "--shape", "6", "--outputs", "3", "--methods", "deep,snapshots", "--batch", "8",
        "--draws", "2", "--device", "cpu",
    )  # fmt: skip
    assert ran.code == 0
    rows = {line.split()[0]: line for line in ran.out.splitlines() if " x)" in line}
    count = sum(tensor.numel() for tensor in build_network({"name": "mlp"}, (6,), 3).parameters())
    assert f"{count:,} (1.00 x)" in rows["single"]
    assert f"{4 * count:,} (4.00 x)" in rows["deep"]
    assert rows["single"].count("(1.00 x)") == 5
    assert rows["snapshots"].count("(4.00 x)") == 2, "four networks to keep and to run"


def test_prepared_data_are_the_data(elsewhere: Path) -> None:
    wine(elsewhere / "wine.csv")
    ran = multitudes_says(*PREPARE, "--seed", "3")
    assert ran.code == 0
    assert "regression" in ran.out and "wine.mtdata" in ran.out
    assert datasets.read("wine.mtdata").fingerprint == datasets.load("wine.csv", target="quality", seed=3).fingerprint


def test_bad_rows_stop_unless_they_are_skipped_and_counted(elsewhere: Path) -> None:
    wine(elsewhere / "wine.csv", bad={4: "1,red,nan", 9: ",,1.0", 20: "1,red"})
    told = sentence(multitudes_says(*PREPARE))
    assert "3 bad rows" in told and "line 6: 'quality'" in told and "--skip-bad leaves them out" in told
    ran = multitudes_says(*PREPARE, "--skip-bad")
    assert ran.code == 0
    assert ran.out.count("Left out 1 bad row:") == 3
    assert sum(len(part) for part in datasets.read("wine.mtdata").parts.values()) == 57


def test_how_each_column_is_read_is_told_and_can_be_said(elsewhere: Path) -> None:
    wine(elsewhere / "wine.csv", bad={4: "n.v.,red,1.0", 9: "1,,1.0"})
    told = multitudes_says(*PREPARE).err
    lines = {line.split()[0]: line.split(maxsplit=4)[1:] for line in told.splitlines() if line.strip()}
    assert lines["acid"][:1] + lines["acid"][2:] == ["number", "1", "1 read as missing: 'n.v.'"]
    assert lines["colour"][:3] == ["category", "2", "1"] and lines["quality"][0] == "target"
    told = multitudes_says(*PREPARE, "--drop", "colour", "--as", "acid=category").err
    assert "left out: excluded by the user" in told
    assert datasets.read("wine.mtdata").columns[0].startswith("acid=")
    assert "--as of 'colour' must be" in sentence(multitudes_says(*PREPARE, "--as", "colour=float"))
    assert "--as must be COLUMN=KIND, got 'colour'" in sentence(multitudes_says(*PREPARE, "--as", "colour"))
    assert "--drop 'smell' is not a column" in sentence(multitudes_says(*PREPARE, "--drop", "smell"))


def test_a_source_is_found_in_the_folder_of_data(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "sets").mkdir()
    wine(elsewhere / "sets" / "wine.csv")
    assert "does not exist" in sentence(multitudes_says(*PREPARE))
    assert multitudes_says(*PREPARE, "--data-root", "sets").code == 0
    monkeypatch.setenv("MULTITUDES_DATA", str(elsewhere / "sets"))
    assert multitudes_says(*PREPARE).code == 0
    assert located("wine.csv", elsewhere / "sets") == str(elsewhere / "sets" / "wine.csv")
    assert located("owner/name", elsewhere / "sets") == "owner/name"


# -- what is shown -----------------------------------------------------------------------------------------


def test_the_leaderboard_has_the_columns_of_the_page_and_marks_the_best() -> None:
    def row(name: str, accuracy: tuple[float, ...], nll: float, ratio: float) -> Row:
        values = {"accuracy": Value(accuracy, 100), "nll": Value((nll, nll))}
        values |= {
            "ood/svhn/entropy/auroc": Value((0.9, 0.9)),
            "ece": Value((0.012, 0.012)),
            "costs/parameters_ratio": Value((ratio, ratio)),
        }
        values |= {"costs/inference_time_ratio": Value((ratio,), low=0.9, high=5.0)}
        return Row(name, name, (0, 1), values)

    rows = [
        row("deep", (0.90, 0.92), 0.2, 4.0),
        row("packed", (0.89, 0.92), 0.3, 1.0),
        row("single", (0.5, 0.5), 0.4, 1.0),
    ]
    out = io.StringIO()
    with redirect_stdout(out):
        console().print(*leaderboard_tables(rows, "accuracy"))
    head, _, *body = out.getvalue().rstrip().splitlines()
    titles = ["method", "accuracy %", "NLL", "ECE %", "AUROC svhn %", "inference time ×", "parameters ×"]
    assert re.split(r"\s{2,}", head.strip()) == titles
    cells = [re.split(r"\s{2,}", line.strip()) for line in body]
    assert cells[0] == ["deep", "★ 91.0 ± 1.4", "★ 0.200 ± 0.000", "★ 1.2 ± 0.0", "★ 90.0 ± 0.0", "about 4.0", "4.00"]
    assert cells[1][:3] == ["packed", "90.5 ± 2.1", "0.300 ± 0.000"]
    assert cells[2][:2] == ["single", "50.0 ± 0.0"]
    narrow = leaderboard_tables(rows, "accuracy", width=50)
    assert [str(table.columns[0].header) for table in narrow] == ["method"] * len(narrow), "the methods stand in each"
    assert sum(len(table.columns) - 1 for table in narrow) == 6 and len(narrow) > 1


def test_in_a_pipe_progress_is_a_line_for_each_job_that_ends_and_one_now_and_then() -> None:
    err = io.StringIO()
    running = JobProgress("packed-0", "epoch", 3, 30, 0.25, 6.0)
    with redirect_stderr(err), watching(every=10) as listener:
        for seconds in (0, 1, 2, 9, 10.5):
            listener(Snapshot(2, 0, 0, (running,), seconds, 75.0))
        listener(Snapshot(2, 1, 0, (), 11, None))
        listener(Snapshot(2, 1, 1, (), 12, None))
    assert err.getvalue().splitlines() == [
        "0 of 2 jobs done; packed-0: epoch 3 of 30, loss 0.2500; about 1:15 left",
        "0 of 2 jobs done; packed-0: epoch 3 of 30, loss 0.2500; about 1:15 left",
        "1 of 2 jobs done",
        "1 of 2 jobs done, 1 failed",
    ]
