"""The page of a study: what is on it, that its numbers are those of the files, and that no name can break it."""

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

from multitudes.landscape.figures import COLOURS
from multitudes.report import Results, write
from multitudes.report import functions as functions_module
from multitudes.report.board import cost, standings
from multitudes.report.functions import diversity, function_map
from multitudes.report.html import image
from multitudes.report.numbers import intervals
from multitudes.report.page import page, sections
from multitudes.report.panels import reliability_bars
from multitudes.report.quality import calibration, refusal, shift, size
from multitudes.report.results import read_results
from multitudes.study.leaderboard import leaderboard, verdict
from multitudes.study.store import Run
from tests.fake_run import FEW, METHODS, Tags, image_data, table_data, write_run

FULL = [
    "leaderboard", "cost", "calibration", "size", "refusal", "foreign", "shift", "diversity", "map", "plane",
    "opinions", "made",
]  # fmt: skip
EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def results(run: Path) -> Results:
    return read_results(run)


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return read_results(write_run(tmp_path_factory.mktemp("table"), task="regression", data=table_data()))


def views(found: Any) -> dict[str, list[Any]]:
    """The figures of a section: traces and layout of each view, by name."""
    pattern = r'class="plot" id="([^"]+)".*?<script type="application/json">(.*?)</script>'
    return {name: json.loads(text) for name, text in re.findall(pattern, found.html, re.DOTALL)}


def traces(found: Any, name: str, view: int = 0) -> dict[int, dict[str, Any]]:
    """The lines of a figure, by the number of their method."""
    return {trace["meta"]: trace for trace in views(found)[name][view][0] if "meta" in trace}


# -- what is there -----------------------------------------------------------------------------------------


def test_a_full_run_has_every_section_in_order(results: Results) -> None:
    assert [section.name for section in sections(results)] == FULL


def test_the_page_is_whole_and_links_to_all_its_sections(run: Path) -> None:
    text = write(run).read_text(encoding="utf-8")
    tags = Tags(text)
    assert tags.open == []
    assert [link["href"] for link in tags.all("a")] == [f"#{name}" for name in FULL]
    ids = [attributes["id"] for _, attributes in tags.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) and set(FULL) <= set(ids)


def test_the_answer_is_at_the_top(run: Path) -> None:
    text = write(run).read_text(encoding="utf-8")
    header = text[text.index("<header>") : text.index("</header>")]
    assert f"<h1>Which of {len(FEW)} methods is worth its price on digits?</h1>" in header
    assert html.escape(verdict(leaderboard(Run(run)))) in header


def test_the_page_needs_no_network(run: Path) -> None:
    tags = Tags(write(run).read_text(encoding="utf-8"))
    assert not tags.all("link") and not tags.all("iframe")
    assert all("src" not in script for script in tags.all("script"))
    assert all(str(picture["src"]).startswith("data:image/png;base64,") for picture in tags.all("img"))
    policy = next(meta["content"] for meta in tags.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy


def test_the_same_run_gives_the_same_page_wherever_it_is(run: Path, tmp_path: Path) -> None:
    first = write(run).read_bytes()
    copy = shutil.copytree(run, tmp_path / "copy")
    path = write(copy, tmp_path / "other.html")
    assert path == tmp_path / "other.html" and path.read_bytes() == first


def test_everything_that_is_seen_is_also_told(run: Path) -> None:
    tags = Tags(write(run).read_text(encoding="utf-8"))
    assert all(picture["alt"] for picture in tags.all("img"))
    plots = [attributes for attributes in tags.all("div") if attributes.get("class") == "plot"]
    assert len(plots) == 9 and all(plot["role"] == "img" and plot["aria-label"] for plot in plots)
    pictures = [attributes for attributes in tags.all("svg") if attributes.get("class") != "key"]
    assert pictures and all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert len(tags.all("table")) == len(tags.all("caption"))


def test_every_figure_is_one_that_plotly_accepts(results: Results, regression: Results) -> None:
    from plotly.graph_objects import Figure

    count = 0
    for found in [*sections(results), *sections(regression)]:
        for name, each in views(found).items():
            for data, layout in each:
                plain = re.sub(r"var\(--c(\d)\)", lambda match: COLOURS[int(match[1])], json.dumps([data, layout]))
                Figure(*json.loads(plain.replace("var(--quiet)", "#888888")))  # raises on what it does not know
                count += 1
            assert each[0][0], name
    assert count > 20


# -- numbers -----------------------------------------------------------------------------------------------


def rows(table: str) -> dict[str, list[tuple[str, str]]]:
    """The style and value of the cells of a table's rows, by heading."""
    body = table[table.index("<tbody>") : table.index("</tbody>")]
    found = {}
    for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL):
        name = re.search(r'<th [^>]*data-value="([^"]*)"', row)
        assert name is not None
        cells = re.findall(r'<td(?: class="(\w+)")?(?: data-value="([^"]*)")?>', row)
        found[html.unescape(name[1])] = cells
    return found


def kept(run: Path, method: str, seed: int, name: str = "metrics.json") -> Any:
    path = run / "jobs" / f"{method}-{seed}" / name
    return json.loads(path.read_text()) if name.endswith("json") else dict(np.load(path))


def test_the_leaderboard_has_means_over_seeds_and_marks_the_best(run: Path, results: Results) -> None:
    table = rows(standings(results).html)
    accuracy = {m: np.mean([kept(run, m, seed)["scores"]["accuracy"]["value"] for seed in range(3)]) for m in FEW}
    nll = {m: np.mean([kept(run, m, seed)["scores"]["nll"]["value"] for seed in range(3)]) for m in FEW}
    for method in FEW:
        assert float(table[method][0][1]) == pytest.approx(100 * accuracy[method])
        assert float(table[method][1][1]) == pytest.approx(nll[method])
    assert [method for method in table if table[method][0][0] == "best"] == [max(accuracy, key=accuracy.__getitem__)]
    assert [method for method in table if table[method][1][0] == "best"] == [min(nll, key=nll.__getitem__)]
    assert list(table) == sorted(nll, key=nll.__getitem__)


def test_inference_time_is_the_inverse_of_speed(run: Path, results: Results) -> None:
    speeds = [kept(run, "deep", seed)["costs"]["inference_per_second_ratio"] for seed in range(3)]
    x = traces(cost(results), "plot-cost")[FEW.index("deep")]["x"]
    assert x == [pytest.approx(np.mean([1 / speed for speed in speeds]), rel=1e-5)]


def test_on_the_line_of_costs_nothing_cheaper_is_better(results: Results) -> None:
    for data, _ in views(cost(results))["plot-cost"]:
        points = {trace["text"][0]: (trace["x"][0], trace["y"][0]) for trace in data if "error_y" in trace}
        front = next(trace for trace in data if "meta" not in trace)
        assert points.keys() == set(FEW)
        more = front["y"] == sorted(front["y"])  # accuracy grows along the line, NLL falls
        for name, (x, y) in points.items():
            beaten = any(
                (a <= x and (b > y if more else b < y)) or (a < x and b == y)
                for m, (a, b) in points.items()
                if m != name
            )
            if len(front["x"]) > 1:
                assert (name in front["text"]) == (not beaten)


def test_reliability_bars_are_the_accuracy_of_each_bin(run: Path, results: Results) -> None:
    both = [kept(run, "deep", seed, "predictions.npz") for seed in range(3)]
    probs, target = (np.concatenate([each[name] for each in both]) for name in ("probs", "target"))
    confidence, right = probs.max(1), probs.argmax(1) == target
    accuracy, sure, count = [], [], []
    for low in range(10):
        inside = (confidence > np.float32(low / 10)) & (confidence <= np.float32((low + 1) / 10))
        count.append(int(inside.sum()))
        accuracy.append(right[inside].mean() if inside.any() else float("nan"))
        sure.append(confidence[inside].mean(dtype=np.float64) if inside.any() else float("nan"))
    found = calibration(results)
    assert found is not None and reliability_bars(FEW.index("deep"), accuracy, sure, count) in found.html


def test_risk_is_the_share_of_wrong_answers_among_the_most_confident(run: Path, results: Results) -> None:
    trace = traces(refusal(results), "plot-refusal")[FEW.index("packed")]
    for coverage, risk in list(zip(trace["x"], trace["y"], strict=True))[::20]:
        shares = []
        for seed in range(3):
            kept_ = kept(run, "packed", seed, "predictions.npz")
            order = np.argsort(-kept_["probs"].max(1), kind="stable")[: round(coverage * len(kept_["target"]))]
            shares.append(np.mean(kept_["probs"].argmax(1)[order] != kept_["target"][order]))
        assert risk == pytest.approx(np.mean(shares), abs=2e-3)  # of equal confidences, the curve is the mean order


def test_a_line_of_sizes_ends_at_the_score_of_all_members(run: Path, results: Results) -> None:
    trace = traces(size(results), "plot-size")[FEW.index("deep")]
    values = [kept(run, "deep", seed)["by_size"]["nll"] for seed in range(3)]
    assert trace["x"] == [1, 2, 4]
    assert trace["y"] == pytest.approx(np.mean(values, 0), rel=1e-5)
    assert trace["error_y"]["array"] == pytest.approx(np.std(values, 0, ddof=1), rel=1e-5)


def test_severity_starts_at_the_clean_score(run: Path, results: Results) -> None:
    found = shift(results)
    for measure in ("accuracy", "nll", "ece"):
        trace = traces(found, f"plot-shift-{measure}")[0]
        names = [measure, *(f"shift/mean/{severity}/{measure}" for severity in (1, 3, 5))]
        values = [[kept(run, "single", seed)["scores"][name]["value"] for name in names] for seed in range(3)]
        assert trace["x"] == [0, 1, 3, 5] and trace["y"] == pytest.approx(np.mean(values, 0), rel=1e-5)


def test_diversity_is_disagreement_with_the_first_member_over_error(run: Path, results: Results) -> None:
    trace = traces(diversity(results), "plot-diversity")[FEW.index("deep")]
    expected = []
    for seed in range(3):
        kept_ = kept(run, "deep", seed, "predictions.npz")
        labels = kept_["members"].argmax(2)
        for member in labels[1:]:
            accuracy = np.mean(member == kept_["target"])
            expected.append((accuracy, np.mean(member != labels[0]) / (1 - accuracy)))
    points = list(zip(trace["x"], trace["y"], strict=True))
    assert np.allclose(points, expected, rtol=1e-4)
    single = traces(diversity(results), "plot-diversity")[0]
    assert len(single["x"]) == 2  # runs of a single network, beside the first of them


def test_coverage_is_the_share_of_values_within_gaussian_intervals(regression: Results) -> None:
    from scipy.stats import norm

    found = views(intervals(regression))
    coverage, width = (
        {t["meta"]: t for t in found[name][0][0] if "meta" in t} for name in ("plot-coverage", "plot-width")
    )
    for number, method in enumerate(regression.methods):
        for at, level in enumerate(coverage[number]["x"]):
            inside, wide = [], []
            for outcome in regression.of(method):
                mean, std, target = (outcome.array(name) for name in ("mean", "std", "target"))
                low, high = norm.interval(level, mean, std)
                inside.append(np.mean((low <= target) & (target <= high)))
                wide.append(np.mean(high - low))
            assert coverage[number]["y"][at] == pytest.approx(np.mean(inside), rel=1e-4)
            assert width[number]["y"][at] == pytest.approx(np.mean(wide), rel=1e-4)


def test_the_map_shows_every_member_up_to_a_number(results: Results) -> None:
    shown = traces(function_map(results), "plot-map")
    assert [len(shown[number]["x"]) for number in range(4)] == [3, 12, 12, 48]


def test_the_most_uncertain_images_are_shown_with_every_opinion(results: Results) -> None:
    found = next(section for section in sections(results) if section.name == "opinions").html
    entropy: Any = 0
    for method in results.methods:
        probs = results.of(method)[0].array("probs").astype("float64")
        entropy = entropy - (probs * np.log(probs)).sum(1)
    shown = [int(row) for row in re.findall(r"test image (\d+),", found)]
    assert shown == np.argsort(-entropy)[:10].tolist()
    assert len(re.findall(r'<td class="(?:right|wrong)">', found)) == 10 * len(results.methods)
    right = sum(int(np.sum(results.of(m)[0].array("probs").argmax(1)[shown] == _target(results)[shown])) for m in FEW)
    assert found.count('<td class="right">') == right


def _target(results: Results) -> Any:
    return results.outcomes[0].array("target")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_is_the_image(channels: int) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (channels, 5, 7), dtype=np.uint8)
    data = re.search(r"base64,([^\"]+)", image(pixels, "noise"))
    assert data is not None
    read = np.asarray(Image.open(io.BytesIO(base64.b64decode(data[1]))))
    assert np.array_equal(read, pixels[0] if channels == 1 else pixels.transpose(1, 2, 0))


# -- names -------------------------------------------------------------------------------------------------


def test_no_name_can_break_the_page(tmp_path: Path) -> None:
    evil = {"<script>alert(1)": METHODS["deep"], 'single & "b"\'': METHODS["single"]}
    data = image_data([EVIL, "b", "c"], foreign=f"a/{EVIL}")
    text = write(write_run(tmp_path, evil, seeds=[0, 1], data=data)).read_text(encoding="utf-8")
    tags = Tags(text)
    assert tags.open == []
    names = [attributes.get("id", "") for attributes in tags.all("div") if attributes.get("class") == "plot"]
    assert len(tags.all("script")) == len(names) + 2  # one a plot, Plotly, and the page's own
    assert not any(key.startswith("on") for _, attributes in tags.tags for key in attributes)
    assert "<script>alert" not in text and "</script><img" not in text
    assert html.escape("<script>alert(1)") in text and html.escape(EVIL) in text


# -- what is not there -------------------------------------------------------------------------------------


def test_a_partial_run_says_what_is_missing(tmp_path: Path) -> None:
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
    assert results.methods == ["single", "deep", "packed"] and "1 to 2 seeds" in standings(results).html
    assert [section.name for section in sections(results)] == FULL


def test_a_complete_run_has_no_such_notice(results: Results) -> None:
    assert "<aside" not in page(results)


def test_a_run_without_results_is_no_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, ["single"], [0], failed={"single-0": "no memory"})
    with pytest.raises(ValueError, match="nothing to report.*none of its jobs is done; single-0 failed: no memory"):
        write(run)
    assert not (run / "report.html").exists()
    with pytest.raises(ValueError, match="no run directory: there is no study.toml"):
        write(tmp_path / "nowhere")


def test_regression_has_intervals_and_nothing_of_classes(regression: Results) -> None:
    assert [section.name for section in sections(regression)] == [
        "leaderboard",
        "cost",
        "intervals",
        "size",
        "map",
        "made",
    ]
    table = standings(regression).html
    assert all(
        title in table for title in ("RMSE\u00a0↓", "log density\u00a0↑", "CRPS\u00a0↓", "95 % interval holds %")
    )
    assert "accuracy" not in table and "ECE" not in table


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    results = read_results(write_run(tmp_path, ["single", "deep"], [0], landscape=False))
    assert "±" not in standings(results).html and "Mean over one seed." in standings(results).html
    names = [section.name for section in sections(results)]
    assert "plane" not in names and "diversity" in names


def test_one_method_alone_is_a_page_too(tmp_path: Path) -> None:
    text = page(read_results(write_run(tmp_path, ["single"], [0], landscape=False)))
    assert "Is single worth its price on digits?" in text and 'id="cost"' not in text and 'id="size"' not in text


def test_without_predictions_what_the_metrics_say_is_left(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    for path in copy.glob("jobs/*/predictions.npz"):
        path.unlink()
    names = [section.name for section in sections(read_results(copy))]
    assert names == ["leaderboard", "cost", "size", "shift", "plane", "made"]


def test_scores_that_are_no_numbers_are_dashes_or_infinite(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    for path in copy.glob("jobs/single-*/metrics.json"):
        metrics = json.loads(path.read_text())
        metrics["scores"]["ece"]["value"] = None
        metrics["scores"]["nll"]["value"] = "inf"
        metrics["by_size"]["nll"] = [None]
        path.write_text(json.dumps(metrics))
    results = read_results(copy)
    assert "NaN" not in "".join(json.dumps(views(found)) for found in sections(results))
    cells = re.search(r'data-value="single".*?</tr>', standings(results).html, re.DOTALL)
    assert cells is not None and ">–<" in cells[0] and "∞" in cells[0]
    assert list(rows(standings(results).html))[-1] == "single"


def test_without_scikit_learn_there_is_no_map(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions_module.importlib.util, "find_spec", lambda name: None)
    assert function_map(results) is None


def test_how_it_was_made_is_told(run: Path, results: Results) -> None:
    found = next(section for section in sections(results) if section.name == "made").html
    about = json.loads((run / "data.json").read_text())
    for told in (about["fingerprint"], "torch 2.13.0", "A processor", "0, 1, 2", "epochs 30", "small_cnn"):
        assert told in found
    assert html.escape((run / "study.toml").read_text().strip()) in found
