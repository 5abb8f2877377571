"""The command line: help, errors, output, and commands without a trained network."""

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
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def run_cli(*arguments: object) -> Ran:
    """Run the program in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return Ran(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def sentence(ran: Ran) -> str:
    """Return the only error message of a failed command."""
    assert ran.code == 2, ran
    assert ran.out == "", "errors go to stderr"
    assert "Traceback" not in ran.err
    lines = ran.err.strip().splitlines()
    assert lines[-1].startswith("Error: "), ran.err
    assert sum(line.startswith("Error: ") for line in lines) == 1
    return lines[-1]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PACKAGE)
    monkeypatch.delenv("MULTITUDES_DATA", raising=False)
    return tmp_path


# -- help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_examples_and_common_options(command: list[str]) -> None:
    ran = run_cli(*command, "--help")
    assert ran.code == 0
    for option in ("--device", "--precision", "--seed", "--debug"):
        assert option in ran.out
    assert "Examples" in ran.out
    assert f"multitudes {' '.join(command)}" in ran.out.partition("Examples")[2]
    assert "\x1b" not in ran.out


def test_help_has_no_control_codes_in_a_github_action() -> None:
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
    "no epochs": (["compare", "digits", "--epochs", "0"], ["--epochs must be greater than or equal to 1, got 0"]),
    "no data": (["compare"], ["DATA must be given", "digits"]),
    "data twice": (["compare", "digits", "--data", "wine.csv"], ["'digits'", "'wine.csv'"]),
    "a severity that is none": (["compare", "digits", "--severities", "1,x"], ["--severities", "'1,x'"]),
    "a method for images on a table": (
        ["compare", "wine.csv", "--target", "quality", "--methods", "smooth"],
        ["methods.smooth", "needs images"],
    ),
    "a wrong key in a study": (["compare", "wrong.toml"], ["wrong.toml, line 2", "'training.epoch'", "epochs"]),
    "a scale without a study": (["compare", "digits", "--scale", "smoke"], ["--scale=smoke requires a study.toml"]),
    "a fraction of a GPU without a cluster": (["compare", "digits", "--gpus", "0.5"], ["--gpus", "--ray"]),
    "a study that is not there": (["compare", "nowhere.toml"], ["nowhere.toml", "cannot be read"]),
    "a run directory that is a file": (["compare", "digits", "--out", "wine.csv"], ["wine.csv", "the file"]),
    "a setting without a value": (["train", "digits", "--set", "members"], ["KEY=VALUE", "'members'"]),
    "a folder of data that is none": (["compare", "x", "--data-root", "nowhere"], ["--data-root", "'nowhere'"]),
    "an unknown option": (["compare", "digits", "--frobnicate"], ["--frobnicate"]),
    "a device that is none": (["bench", "--device", "tpu"], ["--device", "tpu"]),
    "a shape that is none": (["bench", "--shape", "8,8"], ["--shape", "'8,8'"]),
    "no job": (["predict", ".", "wine.csv"], ["RUN/jobs/METHOD-SEED"]),
    "no run": (["report", "."], ["not a run directory"]),
    "no place to export to": (["export", ".", "--to", "nowhere/a.onnx"], ["nowhere/a.onnx"]),
    "an export that is no float32": (["export", ".", "--to", "a.onnx", "--precision", "bfloat16"], ["float32"]),
    "a form that is not known": (["predict", ".", "wine.csv", "--to", "a.txt"], [".csv or .json", "a.txt"]),
    "no place for answers": (["predict", ".", "wine.csv", "--to", "nowhere/a.csv"], ["--to", "nowhere/a.csv"]),
    "no place for scores": (["evaluate", ".", "--to", "nowhere/a.json"], ["--to", "nowhere/a.json"]),
    "an interval of everything": (["predict", ".", "wine.csv", "--level", "1"], ["--level", "1.0"]),
    "a prepared file of another name": (["data", "prepare", "digits", "--to", "a.npz"], [".mtdata", "a.npz"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_sentence_that_names_the_value(case: str, folder: Path) -> None:
    wine(folder / "wine.csv")
    (folder / "wrong.toml").write_text("[training]\nepoch = 3\n")
    arguments, words = ERRORS[case]
    told = sentence(run_cli(*arguments))
    assert [word for word in words if word not in told] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["compare", "digits"], ["bench"]], ids=" ".join)
def test_a_missing_gpu_is_an_error_before_any_work(command: list[str], folder: Path) -> None:
    assert "no usable GPU" in sentence(run_cli(*command, "--device", "cuda"))
    assert not list(folder.iterdir())


def test_an_unsupported_precision_is_an_error_before_any_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = Mock(side_effect=ValueError("no bfloat16 here"))
    monkeypatch.setattr("multitudes.training.precision.check_precision", check)
    ran = run_cli("train", "digits", "--device", "cpu", "--precision", "bfloat16")
    assert sentence(ran) == "Error: no bfloat16 here"
    check.assert_called_once_with("bfloat16", torch.device("cpu"))
    assert not list(folder.iterdir())


def test_debug_shows_the_traceback_and_ends_with_the_same_code() -> None:
    ran = run_cli("compare", "digits", "--epochs", "0", "--debug")
    assert ran.code == 2
    assert "Traceback (most recent call last)" in ran.err
    assert "training.epochs must be greater than or equal to 1, got 0" in ran.err


def test_an_unexpected_error_mentions_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load", Mock(side_effect=KeyError("surprise")))
    told = sentence(run_cli(*PREPARE))
    assert "KeyError: 'surprise'" in told and "--debug" in told


def test_ctrl_c_ends_with_130_and_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load", Mock(side_effect=KeyboardInterrupt))
    ran = run_cli(*PREPARE)
    assert ran.code == 130
    assert "repeat the command" in ran.err and "Traceback" not in ran.err


# -- commands without a network ---------------------------------------------------------------------------


def test_methods_lists_costs_and_uses() -> None:
    ran = run_cli("methods")
    assert ran.code == 0
    for method in METHODS.values():
        row = next(line for line in ran.out.splitlines() if line.split() and line.split()[0] == method.name)
        assert method.costs in row
        assert method.pick in row


@pytest.mark.slow
def test_bench_compares_costs_with_the_single_network() -> None:
    ran = run_cli(
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


def test_prepared_data_equal_the_data(folder: Path) -> None:
    wine(folder / "wine.csv")
    ran = run_cli(*PREPARE, "--seed", "3")
    assert ran.code == 0
    assert "regression" in ran.out and "wine.mtdata" in ran.out
    assert datasets.read("wine.mtdata").fingerprint == datasets.load("wine.csv", target="quality", seed=3).fingerprint


def test_bad_rows_are_an_error_unless_skipped(folder: Path) -> None:
    wine(folder / "wine.csv", bad={4: "1,red,nan", 9: ",,1.0", 20: "1,red"})
    told = sentence(run_cli(*PREPARE))
    assert "3 bad rows" in told and "line 6: 'quality'" in told and "--skip-bad leaves them out" in told
    ran = run_cli(*PREPARE, "--skip-bad")
    assert ran.code == 0
    assert ran.out.count("Left out 1 bad row:") == 3
    assert sum(len(part) for part in datasets.read("wine.mtdata").parts.values()) == 57


def test_types_of_columns_are_shown_and_can_be_set(folder: Path) -> None:
    wine(folder / "wine.csv", bad={4: "n.v.,red,1.0", 9: "1,,1.0"})
    told = run_cli(*PREPARE).err
    lines = {line.split()[0]: line.split(maxsplit=4)[1:] for line in told.splitlines() if line.strip()}
    assert lines["acid"][:1] + lines["acid"][2:] == ["number", "1", "1 read as missing: 'n.v.'"]
    assert lines["colour"][:3] == ["category", "2", "1"] and lines["quality"][0] == "target"
    told = run_cli(*PREPARE, "--drop", "colour", "--as", "acid=category").err
    assert "left out: excluded by the user" in told
    assert datasets.read("wine.mtdata").columns[0].startswith("acid=")
    assert "--as of 'colour' must be" in sentence(run_cli(*PREPARE, "--as", "colour=float"))
    assert "--as must be COLUMN=KIND, got 'colour'" in sentence(run_cli(*PREPARE, "--as", "colour"))
    assert "--drop 'smell' is not a column" in sentence(run_cli(*PREPARE, "--drop", "smell"))


def test_a_source_is_found_in_the_data_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sets").mkdir()
    wine(folder / "sets" / "wine.csv")
    assert "does not exist" in sentence(run_cli(*PREPARE))
    assert run_cli(*PREPARE, "--data-root", "sets").code == 0
    monkeypatch.setenv("MULTITUDES_DATA", str(folder / "sets"))
    assert run_cli(*PREPARE).code == 0
    assert located("wine.csv", folder / "sets") == str(folder / "sets" / "wine.csv")
    assert located("owner/name", folder / "sets") == "owner/name"


# -- output -----------------------------------------------------------------------------------------------


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


def test_progress_in_a_pipe_is_printed_as_lines() -> None:
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
