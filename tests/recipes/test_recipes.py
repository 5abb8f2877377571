"""Recipes run, are collected, and give the page of results."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

import multitudes as mt
from multitudes.lab.data import Data, Part
from multitudes.lab.study.run.store import Run
from multitudes.lab.study.spec.planning import check_methods
from multitudes.lab.study.spec.specification import Spec
from recipes.collect import RESULTS, collect
from recipes.recipe import Recipe
from recipes.report import again, packed_cifar10, patching_cifar10
from recipes.report.__main__ import BEGIN, END, with_headline
from recipes.report.__main__ import main as report
from recipes.report.page import SECTIONS, Page
from recipes.report.raw import Claim, Raw, Section
from recipes.report.reasons import REASONS, reasons_for
from tests.lab.cli.test_cli import run_cli

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "recipes").glob("*.toml"))
CIFAR = {"shape": [3, 32, 32], "task": "classification", "outputs": 10, "parts": {"train": 49000}}


# -- study files -------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("scale", [pytest.param(None, marks=pytest.mark.slow), "smoke"])
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_file_is_valid_at_both_scales(path, scale):
    spec = Spec.load(path, scale).resolved((3, 32, 32))
    check_methods(spec, CIFAR, list(spec.methods))


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_runs_at_smoke_scale(path, tmp_path):
    root = os.environ.get("MULTITUDES_DATA")
    if root is None:
        pytest.skip("MULTITUDES_DATA names no folder with data")
    out = tmp_path / f"{path.stem}-smoke"
    ran = run_cli("compare", str(path), "--scale", "smoke", "--data-root", root, "--out", str(out))
    assert ran.code == 0, ran.err
    run = Run(out)
    assert len(run.done) == len(run.jobs) == len(Spec.load(path, "smoke").methods)
    for job in run.done:
        assert job.metrics["scores"]["accuracy"]["value"] > 0.05 and job.metrics["by_size"]["ece"]
    with pytest.raises(ValueError, match="has scale smoke: only full runs are collected"):
        collect(out, tmp_path / "results")


# -- scripts -----------------------------------------------------------------------------------------------


def counting(calls: list[str]) -> Recipe:
    def one(recipe):
        calls.append("one")
        recipe.saw("data", "abc")
        return {"value": 1.23456789}

    def two(recipe):
        calls.append("two")
        raise RuntimeError("killed")

    return Recipe("packed_cifar10", "A recipe.", {"one": one, "two": two})


def test_a_piece_is_done_once_with_its_provenance(tmp_path, capsys):
    calls: list[str] = []
    arguments = ["--data-root", str(tmp_path), "--out", str(tmp_path / "run"), "--device", "cpu"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="killed"):
            counting(calls).run(arguments)
    assert calls == ["one", "two", "two"] and "one: already done" in capsys.readouterr().out
    piece = json.loads((tmp_path / "run" / "one.json").read_text())
    assert piece["result"] == {"value": 1.23456789} and piece["data"] == {"data": "abc"}
    assert piece["command"] == "python -m recipes.packed_cifar10 --scale full" and piece["machine"]["device"] == "cpu"
    assert not (tmp_path / "run" / "two.json").exists()


def test_data_are_read_once_and_recorded_with_every_piece(tmp_path, monkeypatch):
    read: list = []
    part = Part(torch.zeros(2, 1), torch.zeros(2))

    def load(source, fold=0):
        read.append((source, fold))
        return Data("data", part, part, Part(torch.full((2, 1), float(fold)), torch.zeros(2)), columns=("a",))

    monkeypatch.setattr(mt.data, "load", load)

    def piece(folds):
        return lambda recipe: {"names": [recipe.data("uci/a.npz", fold=fold).name for fold in folds]}

    work = {"one": piece([0]), "two": piece([0, 1]), "three": piece([1, 0, 1])}
    Recipe("patching_uci", "A recipe.", work).run(["--data-root", str(tmp_path), "--out", str(tmp_path / "run")])
    assert read == [(tmp_path / "uci/a.npz", 0), (tmp_path / "uci/a.npz", 1)]
    one, two, three = (json.loads((tmp_path / "run" / f"{name}.json").read_text())["data"] for name in work)
    assert one == {"uci/a.npz": load("", 0).fingerprint} and list(two) == list(three) == ["uci/a.npz"]
    assert len({one["uci/a.npz"], two["uci/a.npz"], three["uci/a.npz"]}) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "three"], "--only must be among one, two, got 'three'"),
        (["--data-root", "/nowhere"], "--data-root must be a folder, got '/nowhere', which does not exist"),
        (["--scale", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_a_wrong_command_line_is_an_error(tmp_path, capsys, arguments, sentence):
    with pytest.raises(SystemExit):
        counting([]).run(["--data-root", str(tmp_path), *arguments])
    assert sentence in capsys.readouterr().err


# -- from runs to raw files --------------------------------------------------------------------------------


def test_pieces_are_collected_with_rounded_numbers(tmp_path):
    recipe = counting([])
    with pytest.raises(RuntimeError):
        recipe.run(["--data-root", str(tmp_path), "--out", str(tmp_path / "run"), "--device", "cpu"])
    assert recipe.device == torch.device("cpu") and recipe.networks.is_dir() and not recipe.smoke
    (path,) = collect(tmp_path / "run", tmp_path / "results")
    assert path == tmp_path / "results" / "packed_cifar10" / "one.json"
    assert json.loads(path.read_text())["result"] == {"value": 1.23457}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("nothing", "run must be the directory of a run, got .*nothing'"), ("empty", "run must have a finished piece")],
)
def test_collect_names_a_wrong_run(tmp_path, name, sentence):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=sentence):
        collect(tmp_path / name)


# -- from raw files to the page ----------------------------------------------------------------------------


def test_the_page_of_results_matches_the_raw_files():
    report(["--check"])


def test_a_changed_number_on_the_page_is_an_error(tmp_path, capsys):
    results = tmp_path / "results"
    write(results, "packed_cifar10", {"single-0": job()})
    report(["--results", str(results)])
    report(["--results", str(results), "--check"])
    page = results / "README.md"
    page.write_text(page.read_text().replace("95.0", "96.0"))
    with pytest.raises(SystemExit, match="does not match the raw files"):
        report(["--results", str(results), "--check"])


def test_the_readme_has_rows_of_the_results(tmp_path):
    raw = write(tmp_path, "packed_cifar10", {"single-0": job(0.9), "single-1": job(0.92), "deep-0": job(0.95)})
    text = with_headline(f"# Title\n{BEGIN}\n| single network | 99.9 |\n{END}\nThe end\n", raw)
    assert text.startswith(f"# Title\n{BEGIN}\n") and text.endswith(f"{END}\nThe end\n")
    assert "| single network | 91.0 | 0.200 | 0.030 | 1.50 | 1.50 |" in text and "| deep ensemble | 95.0 |" in text
    assert "99.9" not in text and with_headline(text, raw) == text
    with pytest.raises(ValueError, match="text must have the marks"):
        with_headline("# Title", raw)


def test_figures_of_the_page_exist():
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", Page(RESULTS).text)
    assert set(shown) == {f"{name}.svg" for name in Page(RESULTS).figures}
    for path in shown:
        assert (RESULTS / path).is_file()


def test_raw_files_are_small_and_contain_no_weights():
    for path in RESULTS.rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".svg", ".md")
        assert path.is_dir() or path.stat().st_size < 400_000


def test_there_is_a_section_for_every_recipe():
    folders = {folder for folders in SECTIONS.values() for folder in folders}
    scripts = {path.stem for path in (ROOT / "recipes").glob("*.py") if "Recipe(" in path.read_text("utf-8")}
    assert folders == {path.stem for path in STUDIES} | scripts - {"recipe"}


# -- sections ----------------------------------------------------------------------------------------------


def job(accuracy: float = 0.95, nll: float = 0.2, ece: float = 0.03, sizes: tuple[int, ...] = (1,)) -> dict:
    foreign = {f"ood/svhn/max_probability/{name}": 0.9 for name in ("aupr", "auroc", "fpr95")}
    names = ("parameters", "multiply_adds", "training_seconds", "inference_per_second", "peak_memory_bytes")
    return {
        "scores": {"accuracy": accuracy, "nll": nll, "ece": ece, "mce": 2 * ece, **foreign},
        "by_size": {"sizes": list(sizes), **{name: [0.5] * len(sizes) for name in ("nll", "accuracy", "ece", "mce")}},
        "costs": {**dict.fromkeys(names, 2e9), **{f"{name}_ratio": 1.5 for name in names}},
    }


def write(results: Path, recipe: str, pieces: dict[str, dict]) -> Raw:
    folder = results / recipe
    folder.mkdir(parents=True)
    about = {
        "recipe": recipe, "scale": "full", "command": f"multitudes compare recipes/{recipe}.toml", "commit": None,
        "data": {"cifar10": "0123456789abcdef"}, "machine": {"name": "a GPU"}, "versions": {"torch": "2"},
        "seconds": 9.0,
    }  # fmt: skip
    for name, result in pieces.items():
        (folder / f"{name}.json").write_text(json.dumps({**about, "piece": name, "result": result}))
    return Raw(folder)


def held(section: Section) -> dict[str, bool | None]:
    return {claim.text: claim.holds for claim in section.claims}


def test_packed_claims_follow_from_the_numbers(tmp_path):
    good = {"single-0": job(0.94, 0.25, 0.03), "packed-0": job(0.945, 0.2, 0.01), "deep-0": job(0.95, 0.15, 0.01)}
    section = packed_cifar10.section(write(tmp_path / "good", "packed_cifar10", {**good, "packed_1-0": job()}))
    assert list(held(section).values()) == [True] * 4
    assert "| Packed-(2, 4, 2) | 94.5 (94.3) | 0.200 (0.178) | 0.010 (0.007) |" in section.text
    bad = {"single-0": job(0.92, 0.1, 0.03), "packed-0": job(0.91, 0.2, 0.01), "deep-0": job(0.95, 0.15, 0.01)}
    assert list(held(packed_cifar10.section(write(tmp_path / "bad", "packed_cifar10", bad))).values()) == [False] * 4
    alone = packed_cifar10.section(write(tmp_path / "alone", "packed_cifar10", {"single-0": job()}))
    assert list(held(alone).values()) == [None]


def test_seeds_are_shown_as_mean_and_deviation(tmp_path):
    raw = write(tmp_path, "packed_cifar10", {f"single-{seed}": job(nll=0.2 + seed / 10) for seed in range(3)})
    assert "0.300 ± 0.100 (0.238)" in packed_cifar10.section(raw).text


def test_patching_claims_follow_from_the_numbers(tmp_path):
    pieces = {"single-0": job(ece=0.03), "mc_dropout-0": job(ece=0.02, sizes=(1, 20)), "cross_patched-0": job(ece=0.01)}
    section = patching_cifar10.section(write(tmp_path / "good", "patching_cifar10", pieces))
    assert list(held(section).values()) == [True]
    assert "| dropout | 20 | 50.0 (65.9) | 50.00 (7.64) |" in section.text
    pieces["mc_dropout-0"] = job(ece=0.005)
    assert list(held(patching_cifar10.section(write(tmp_path / "bad", "patching_cifar10", pieces))).values()) == [False]


def test_every_unconfirmed_claim_has_a_reason():
    for name, section in Page(RESULTS).sections.items():
        failed = [claim.text for claim in section.claims if claim.holds is False]
        assert all(any(part in text for part in REASONS.get(name, {})) for text in failed), (name, failed)


def test_reasons_are_given_only_for_unconfirmed_claims():
    assert reasons_for("camvid", [Claim("CamVid: with both, better", True)]) == {}
    assert list(reasons_for("camvid", [Claim("CamVid: with both, better", False), Claim("other", False)])) == [
        "with both"
    ]
    assert reasons_for("camvid", [Claim("CamVid: with both, better", None)]) == {}


def test_the_page_shows_claims_that_were_not_measured(tmp_path):
    write(tmp_path, "packed_cifar10", {"single-0": job()})
    text = Page(tmp_path).text
    assert "| not measured |" in text and "## Packed-Ensembles: Table 1" in text
    assert "| single-0 | `multitudes compare recipes/packed_cifar10.toml --data-root DIR` |" in text
    assert Claim("a", None).numbers == ""


def test_repeated_pieces_are_compared_by_number(tmp_path):
    write(tmp_path, "packed_cifar10", {"single-0": job()})
    assert again.section(tmp_path) is None
    write(tmp_path / "again", "packed_cifar10", {"single-0": job(nll=0.203)})
    text = Page(tmp_path).text
    assert "| packed_cifar10: single-0 | a GPU | 12 | 11 | 0.003000 | `scores.nll` |" in text
    assert "| Runs are reproducible from the recipe and the seed | yes | largest difference 0.003000 |" in text
    write(tmp_path / "worse" / "again", "packed_cifar10", {"single-0": job(nll=0.3)})
    write(tmp_path / "worse", "packed_cifar10", {"single-0": job()})
    assert "from the recipe and the seed | **no** |" in Page(tmp_path / "worse").text


@pytest.mark.parametrize(
    ("two", "sentence"), [({"b": 1}, "the result has other keys"), ({"a": [1]}, "a has another length")]
)
def test_different_results_cannot_be_compared(two, sentence):
    with pytest.raises(ValueError, match=sentence):
        dict(again.differences({"a": [1, 2]}, two))
