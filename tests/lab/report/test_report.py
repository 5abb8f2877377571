"""The page of a study: its sections and numbers, escaping, and incomplete runs."""

from __future__ import annotations

import base64
import html
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.stats import norm

from multitudes.base.archives import write_arrays
from multitudes.base.sealed_files import read_json
from multitudes.lab.report import Results, write
from multitudes.lab.report import diversity as function_space_module
from multitudes.lab.report.board import standings
from multitudes.lab.report.calibration import calibration, intervals
from multitudes.lab.report.chart import png
from multitudes.lab.report.diversity import diversity, function_map
from multitudes.lab.report.input_examples import uncertain_images
from multitudes.lab.report.page import SECTIONS, page, sections
from multitudes.lab.report.quality import selective_prediction, shift, size
from multitudes.lab.report.run_results import read_results
from multitudes.lab.study.run.store import Job, Run
from tests.lab.report.fake_run import FEW, METHODS, Tags, evil_run, read_file, series, write_run

FULL = [name for name in SECTIONS if name not in ("intervals", "columns", "matter", "unsure", "texts")]


@pytest.fixture(scope="module")
def text(run: Path) -> str:
    return write(run).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tags(text: str) -> Tags:
    return Tags(text)


@pytest.fixture(scope="module")
def drawn(results: Results) -> dict[str, str]:
    return drawn_sections(results)


def drawn_sections(results: Results) -> dict[str, str]:
    """Return the HTML of the sections by name."""
    return {part.name: part.html for part in sections(results)}


def predictions(run: Path, method: str) -> list[dict[str, Any]]:
    return [read_file(run, method, seed, "predictions.safetensors") for seed in range(3)]


# -- structure -------------------------------------------------------------------------------------------


def test_the_page_has_all_sections_in_order_folded_except_the_first(tags: Tags) -> None:
    assert tags.open == []
    assert [section["id"] for section in tags.all("section")] == FULL
    folds = [fold for fold in tags.all("details") if fold.get("class") == "fold"]
    assert len(folds) == len(FULL) - 1 and not any("open" in fold for fold in folds)
    ids = [attributes["id"] for _, attributes in tags.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_page_needs_no_network(tags: Tags) -> None:
    assert not tags.all("link") and not tags.all("iframe")
    assert all("src" not in script for script in tags.all("script"))
    assert all(str(picture["src"]).startswith("data:image/png;base64,") for picture in tags.all("img"))
    policy = next(meta["content"] for meta in tags.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy


def test_a_copied_run_gives_the_same_page(run: Path, text: str, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    path = write(copy, tmp_path / "other.html")
    assert path == tmp_path / "other.html" and path.read_text(encoding="utf-8") == text


def test_every_picture_has_a_description(tags: Tags) -> None:
    assert all(picture["alt"] for picture in tags.all("img"))
    assert len([each for each in tags.all("div") if str(each.get("class")).startswith("plot")]) == 10
    pictures = [attributes for attributes in tags.all("svg") if "aria-hidden" not in attributes]
    assert len(pictures) > 20 and all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert len(tags.all("table")) == len(tags.all("caption"))


# -- numbers -----------------------------------------------------------------------------------------------


def test_reliability_bars_show_the_accuracy_of_each_bin(run: Path, results: Results, drawn: dict[str, str]) -> None:
    both = predictions(run, "deep")
    probs, target = (np.concatenate([each[name] for each in both]) for name in ("probs", "target"))
    confidence, right = probs.max(1), probs.argmax(1) == target
    expected = []
    for low in range(10):
        inside = (confidence > np.float32(low / 10)) & (confidence <= np.float32((low + 1) / 10))
        if inside.any():
            means = right[inside].mean(), confidence[inside].mean(dtype=np.float64)
            expected.append((low, *means, int(inside.sum())))
    number = results.methods.index("deep")
    panel = next(each for each in calibration(results)["panels"] if each["method"] == number)
    assert np.allclose(panel["bins"], expected, rtol=1e-6)
    picture = drawn["calibration"].split('class="panel ')[1 + number]
    bars = re.findall(r'class="bar" x="([\d.]+)".*? height="([\d.]+)"', picture)
    heights = [(10 * low + 0.4, 100 * accuracy) for low, accuracy, _, _ in expected]
    assert np.allclose(np.array(bars, dtype=float), heights, atol=0.01)


def test_scores_are_shown_before_and_after_calibration(
    run: Path, results: Results, regression: Results, drawn: dict[str, str]
) -> None:
    table = calibration(results)["table"]
    titles = [head.title for head in table["head"]]
    assert titles[:4] == ["NLL before", "NLL after", "ECE % before", "ECE % after"]
    rows = {line.name: line.cells for line in table["rows"]}
    for at, (name, scale) in enumerate([("raw/nll", 1), ("nll", 1), ("raw/ece", 100), ("ece", 100)]):
        values = [scale * read_file(run, "deep", seed)["scores"][name]["value"] for seed in range(3)]
        assert rows["deep"][at].value == pytest.approx(np.mean(values))
    panel = next(each for each in calibration(results)["panels"] if results.methods[each["method"]] == "deep")
    probs = np.concatenate([each["raw/probs"] for each in predictions(run, "deep")])
    assert panel["before"][-1][0] == pytest.approx(probs.max(1)[probs.max(1) > np.float32(0.9)].mean(dtype=np.float64))
    assert "before calibration" in drawn["calibration"] and ", before " in drawn["calibration"]
    of_numbers = intervals(regression)
    assert [view.label for view in of_numbers["coverage"]] == ["after calibration", "before calibration"]
    after, before = (series(of_numbers["width"], regression, at)["deep"].y for at in (0, 1))
    assert all(narrow < wide for narrow, wide in zip(before, after, strict=True))
    below = series(of_numbers["quantiles"], regression)["deep"]
    cdf = np.stack([found[0] for found in regression.tensors("deep", "cdf")])
    assert below.y == pytest.approx([(cdf <= level).mean() for level in below.x])
    assert [head.title for head in of_numbers["table"]["head"]][4] == "coverage at 90 % before"


def test_without_calibration_the_page_does_not_mention_it(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    for path in copy.glob("jobs/*/metrics.json"):
        metrics = Job(path.parent).metrics
        metrics["scores"] = {name: each for name, each in metrics["scores"].items() if "raw/" not in name}
        arrays = Job(path.parent).predictions
        plain = {name: each for name, each in arrays.items() if "raw/" not in name}
        write_arrays(path.parent / "predictions.safetensors", plain)
        Job(path.parent).write_metrics(metrics)
    found = drawn_sections(read_results(copy))
    assert "before" not in found["calibration"]


def test_risk_is_the_error_rate_of_the_most_confident(run: Path, results: Results) -> None:
    line = series(selective_prediction(results)["views"], results)["packed"]
    for coverage, risk in list(zip(line.x, line.y, strict=True))[::20]:
        fractions = []
        for each in predictions(run, "packed"):
            order = np.argsort(-each["probs"].max(1), kind="stable")[: round(coverage * len(each["target"]))]
            fractions.append(np.mean(each["probs"].argmax(1)[order] != each["target"][order]))
        assert risk == pytest.approx(np.mean(fractions), abs=2e-3)  # the curve averages over ties


def test_lines_are_means_over_seeds_with_standard_deviations(run: Path, results: Results) -> None:
    seeds = [read_file(run, "deep", seed) for seed in range(3)]
    expected = {"size": (size(results)["views"], [1, 2, 4], [each["by_size"]["nll"] for each in seeds])}
    for measure in ("accuracy", "nll", "ece"):  # severity starts at the clean score
        places = [measure, *(f"shift/mean/{severity}/{measure}" for severity in (1, 3, 5))]
        values = [[each["scores"][place]["value"] for place in places] for each in seeds]
        expected[measure] = (shift(results)["plots"][f"plot-shift-{measure}"], [0, 1, 3, 5], values)
    for name, (views, x, values) in expected.items():
        line, mean, deviation = series(views, results)["deep"], np.mean(values, 0), np.std(values, 0, ddof=1)
        assert line.x == x, name
        assert line.y == pytest.approx(mean), name
        assert line.low == pytest.approx(mean - deviation) and line.high == pytest.approx(mean + deviation), name


def test_diversity_is_disagreement_with_the_first_member_divided_by_error(run: Path, results: Results) -> None:
    found = series(diversity(results)["views"], results)
    expected = []
    for each in predictions(run, "deep"):
        labels = each["members"].argmax(2)
        for member in labels[1:]:
            accuracy = np.mean(member == each["target"])
            expected.append((accuracy, np.mean(member != labels[0]) / (1 - accuracy)))
    deep = found["deep"]
    assert np.allclose(list(zip(deep.x, deep.y, strict=True)), expected)
    assert len(found["single"].x) == 2  # runs of a single network, compared with the first of them


def test_coverage_is_that_of_gaussian_intervals(regression: Results) -> None:
    found = intervals(regression)
    coverage, width = (series(found[name], regression) for name in ("coverage", "width"))
    for method in regression.methods:
        arrays = [[each.numpy() for each in one] for one in regression.tensors(method, "mean", "std", "target")]
        for at, level in enumerate(coverage[method].x):
            inside, wide = [], []
            for mean, std, target in arrays:
                low, high = norm.interval(level, mean, std)
                inside.append(np.mean((low <= target) & (target <= high)))
                wide.append(np.mean(high - low))
            assert coverage[method].y[at] == pytest.approx(np.mean(inside))
            assert width[method].y[at] == pytest.approx(np.mean(wide))


def test_the_map_limits_the_number_of_members(results: Results) -> None:
    shown = series(function_map(results)["views"], results)
    assert [len(shown[method].x) for method in FEW] == [3, 12, 12, 48]


def test_the_most_uncertain_images_have_all_predictions(run: Path, results: Results, drawn: dict[str, str]) -> None:
    found = [predictions(run, method)[0] for method in results.methods]
    entropy = sum(-(each["probs"].astype("float64") * np.log(each["probs"])).sum(1) for each in found)
    data = uncertain_images(results)
    shown = [row for row, _, _ in data["images"]]
    assert shown == np.argsort(-entropy)[:10].tolist()
    right = [[each["probs"][row].argmax() == each["target"][row] for row in shown] for each in found]
    assert [[cell[2] for cell in cells] for _, cells in data["rows"]] == right
    assert [int(row) for row in re.findall(r"test image (\d+),", drawn["images"])] == shown
    counts = [drawn["images"].count(f'<td class="{word}">') for word in ("right", "wrong")]
    assert counts == [np.sum(right), 40 - np.sum(right)]


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_encoded_as_png(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (channels, 5, 7), dtype=np.uint8)
    read = np.asarray(Image.open(io.BytesIO(base64.b64decode(png(pixels).partition("base64,")[2]))))
    assert np.array_equal(read, pixels[0] if channels == 1 else pixels.transpose(1, 2, 0))
    large = np.random.default_rng(0).integers(0, 256, (channels, 600, 300), dtype=np.uint8)
    assert Image.open(io.BytesIO(base64.b64decode(png(large).partition("base64,")[2]))).size == (56, 112)


# -- names -------------------------------------------------------------------------------------------------


def test_names_are_escaped(tmp_path: Path) -> None:
    text = write(evil_run(tmp_path, {'single & "b"\'': METHODS["single"]})).read_text(encoding="utf-8")
    tags = Tags(text)
    assert tags.open == []
    assert len(tags.all("script")) == 1
    assert not any(key.startswith("on") for _, attributes in tags.tags for key in attributes)
    assert "<script>alert" not in text and "</script><img" not in text
    assert all(html.escape(name) in text for name in ("<script>alert(1)", "</script><img src=x onerror=alert(1)>"))


# -- missing parts -----------------------------------------------------------------------------------------


def test_a_partial_run_lists_what_is_missing(tmp_path: Path) -> None:
    run = write_run(
        tmp_path, seeds=[0, 1], missing=["packed-1", "mc_dropout-0", "mc_dropout-1"],
        failed={"deep-0": "step 3: the loss of <deep> is nan"},
    )  # fmt: skip
    results = read_results(run)
    text = page(results)
    notice = text[text.index("<aside") : text.index("</aside>")]
    assert "4 of 8 jobs have no result" in notice
    assert "deep-0 failed: step 3: the loss of &lt;deep&gt; is nan" in notice
    assert "not done: packed-1, mc_dropout-0, mc_dropout-1" in notice
    assert sorted(results.methods) == ["deep", "packed", "single"] and "Mean over 1 to 2 seeds" in text
    assert all(f'<section id="{name}">' in text for name in FULL)


def test_a_run_without_results_has_no_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, ["single"], [0], failed={"single-0": "no memory"})
    with pytest.raises(ValueError, match="nothing to report.*no job is done; single-0 failed: no memory"):
        write(run)
    assert not (run / "report.html").exists()
    with pytest.raises(ValueError, match="not a run directory: it has no study.toml"):
        write(tmp_path / "nowhere")


def test_regression_has_intervals_instead_of_classes(regression: Results) -> None:
    assert list(drawn_sections(regression)) == [
        "leaderboard",
        "cost",
        "intervals",
        "size",
        "map",
        "unsure",
        "columns",
        "provenance",
    ]
    table = standings(regression)
    heads = ["log density\u00a0↑", "RMSE\u00a0↓", "CRPS\u00a0↓", "coverage at 90 %", "width at 90 %"]
    titles = [head.title for head in table["first"]["head"]]
    assert titles[:5] == heads
    assert not any(word in head for head in titles for word in ("accuracy", "ECE"))


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    found = {
        part.name: part.html for part in sections(read_results(write_run(tmp_path, FEW[:2], [0], landscape=False)))
    }
    assert "±" not in found["leaderboard"] and "Mean over one seed." in found["leaderboard"]
    assert "landscape" not in found and "diversity" in found


def test_one_method_alone_is_a_page_too(tmp_path: Path) -> None:
    text = page(read_results(write_run(tmp_path, ["single"], [0], landscape=False)))
    assert "Only the single network" in text and 'id="cost"' not in text and 'id="size"' not in text


def test_without_predictions_the_page_shows_the_metrics(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    for path in copy.glob("jobs/*/predictions.safetensors"):
        path.unlink()
        job = Job(path.parent)
        job.write_metrics(job.metrics)
    Run(copy).write_table("landscape.json", read_json(copy / "landscape.json"), Run(copy).results)
    expected = ["leaderboard", "cost", "size", "shift", "landscape", "provenance"]
    assert list(drawn_sections(read_results(copy))) == expected


def test_missing_scores_are_dashes_and_infinite_ones_are_shown(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    for path in copy.glob("jobs/single-*/metrics.json"):
        metrics = Job(path.parent).metrics
        metrics["scores"]["ece"]["value"] = None
        metrics["scores"]["nll"]["value"] = "inf"
        metrics["by_size"]["nll"] = [None]
        Job(path.parent).write_metrics(metrics)
    results = read_results(copy)
    found = drawn_sections(results)
    assert not any(re.search(r"\bnan\b|\binf\b", each) for each in found.values())
    cells = re.search(r'data-value="single".*?</tr>', found["leaderboard"], re.DOTALL)
    assert cells is not None and ">–<" in cells[0] and "∞" in cells[0]
    methods = [line.name for line in standings(results)["first"]["rows"] if line.method is not None]
    assert methods[-1] == "single"


def test_without_scikit_learn_there_is_no_map(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_space_module.importlib.util, "find_spec", lambda name: None)
    assert function_map(results) == {}


def test_columns_with_remarks_are_listed_first(regression: Results) -> None:
    text = drawn_sections(regression)["columns"]
    names = re.findall(r'<th scope="row" data-value="([^"]*)"', text)
    assert names == ["id", "day &lt;b&gt;", "a", "b", "c"]
    assert "1 of 5 columns was left out" in text and "left out: every row has another value" in text


def test_the_page_shows_the_provenance(run: Path, drawn: dict[str, str]) -> None:
    about = json.loads((run / "data.json").read_text())
    for fact in (about["fingerprint"], "torch 2.13.0", "A processor", "0, 1, 2", "epochs 30", "small_cnn"):
        assert fact in drawn["provenance"]
    # Jinja and the standard library write quotation marks differently.
    assert (run / "study.toml").read_text().strip() in html.unescape(drawn["provenance"])
