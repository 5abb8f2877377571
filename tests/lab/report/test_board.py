"""The first screen and the leaderboard of a page, compared with the terminal and the files."""

from __future__ import annotations

import html
import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from multitudes.lab.cli.screen import leaderboard_tables, show
from multitudes.lab.report import Results
from multitudes.lab.report.board import answer_figure, cost, standings
from multitudes.lab.report.page import page, sections
from multitudes.lab.report.run_results import read_results
from multitudes.lab.study.results.leaderboard import leaderboard
from multitudes.lab.study.results.recommendation import recommend
from multitudes.lab.study.run.store import Run
from tests.lab.report.fake_run import FEW, METHODS, Tags, read_file, series, write_run


@pytest.fixture(scope="module")
def text(results: Results) -> str:
    return page(results)


@pytest.fixture(scope="module")
def board(results: Results) -> str:
    """Return the HTML of the leaderboard."""
    return next(part.html for part in sections(results) if part.name == "leaderboard")


# -- the first screen --------------------------------------------------------------------------------------


def test_the_page_starts_with_the_recommendation(run: Path, text: str) -> None:
    header = text[text.index("<header>") : text.index("</header>")]
    found = recommend(leaderboard(Run(run)))
    assert f"<h1>{html.escape(found.headline)}</h1>" in header and found.advice and found.notes
    for each in found.advice:
        assert f"<dt>{each.budget}</dt><dd>{html.escape(each.sentence)}</dd>" in header
    assert all(html.escape(note) in header for note in found.notes)
    assert "<aside" not in text


def test_the_first_figure_shows_the_points_of_the_recommendation(results: Results) -> None:
    found, view = results.recommendation, answer_figure(results)
    assert view is not None
    single = next(row["nll"] for row in results.board if row.name == "single")
    own = series([view], results)
    assert {name: (each.x[0], each.y[0]) for name, each in own.items()} == {
        point.method: (point.cost, point.score) for point in found.points
    }
    for point in found.points:  # a lower NLL is a gain
        ends = [*own[point.method].low, *own[point.method].high]
        assert ends == ([] if point.method == "single" else pytest.approx([single - point.high, single - point.low]))
    line = next(each for each in view.series if each.method is None)
    assert list(zip(line.x, line.y, strict=True)) == [(p.cost, p.score) for p in found.points if p.on_frontier]


def test_six_methods_are_highlighted_including_recommended_and_single(tmp_path: Path) -> None:
    many = {f"bad_{at}": replace(METHODS["smooth"], wrong=1.0 + at) for at in range(6)}
    given = {"single": replace(METHODS["single"], wrong=4.0), "good": replace(METHODS["smooth"], wrong=0.1), **many}
    results = read_results(write_run(tmp_path, given, [0, 1], landscape=False))
    chosen, ranked = results.recommendation.methods, [row.name for row in results.board if not row.baseline]
    assert chosen and {*chosen, "single"} <= set(results.methods[:6]) and sorted(results.methods) == sorted(ranked)
    assert results.methods[:6] == [name for name in ranked if name in results.methods[:6]], "the best first"
    tags = Tags(page(results))
    pressed = [button["aria-pressed"] for button in tags.all("button") if "data-method" in button]
    assert pressed == ["true"] * 6 + ["false"] * 2
    assert {g["data-method"] for g in tags.all("g") if g.get("class") == "m on"} == set(map(str, range(6)))


# -- the leaderboard ---------------------------------------------------------------------------------------


def test_the_leaderboard_has_baselines_and_flags_worse_methods(tmp_path: Path) -> None:
    bad = {"bad": replace(METHODS["single"], wrong=40.0), "single": METHODS["single"]}
    results = read_results(write_run(tmp_path, bad, [0], landscape=False))
    lines = standings(results)["first"]["rows"]
    remarks = {line.name: line.remark for line in lines}
    assert remarks == {
        "single": "",
        "chance": "baseline",
        "a constant prediction": "baseline",
        "bad": f"worse than {[line.name for line in lines if line.remark == 'baseline'][-1]}",
    }
    assert [line.name for line in lines][-1] == "bad" and lines[0].name == "single"
    text = page(results)
    assert any("worse" in warning and html.escape(warning) in text for warning in results.recommendation.warnings)
    shown = io.StringIO()
    with redirect_stdout(shown):
        show(*leaderboard_tables(results.board, results.by))
    for line in lines:
        assert (f"{line.name} ({line.remark})" if line.remark else line.name) in shown.getvalue()


def test_terminal_and_page_show_the_same_table(results: Results, regression: Results) -> None:
    for each in (results, regression):
        shown = io.StringIO()
        with redirect_stdout(shown):
            show(*leaderboard_tables(each.board, each.by))
        head, _, *body = shown.getvalue().rstrip().splitlines()
        table = standings(each)["first"]
        titles = re.split(r"\s{2,}", head.strip())
        assert titles[1:] == [own.title.split("\u00a0")[0] for own in table["head"]]
        cells = [[re.sub("^★ ", "", cell) for cell in re.split(r"\s{2,}", line.strip())] for line in body]
        on_page = [[f"{c.text} ± {c.spread}" if c.spread else c.text for c in line.cells] for line in table["rows"]]
        assert [line[1:] for line in cells] == on_page


def test_the_leaderboard_averages_seeds_and_marks_the_best(run: Path, results: Results, board: str) -> None:
    lines = [line for line in standings(results)["first"]["rows"] if line.method is not None]
    table = {line.name: line.cells for line in lines}
    for at, (name, scale, choose) in enumerate([("nll", 1, min), ("accuracy", 100, max)]):
        mean = {m: np.mean([read_file(run, m, seed)["scores"][name]["value"] for seed in range(3)]) for m in FEW}
        assert {m: table[m][at].value for m in FEW} == pytest.approx({m: scale * mean[m] for m in FEW})
        best = choose(FEW, key=mean.__getitem__)
        assert [m for m in table if table[m][at].best] == [best]
        assert f'<td class="best" data-value="{table[best][at].value}"><b class="sign" title="the best">★' in board
    nll = {m: table[m][0].value for m in FEW}
    assert list(table) == sorted(FEW, key=nll.__getitem__)


def test_the_table_is_sorted_by_the_ranking_score(results: Results, board: str) -> None:
    heads = standings(results)["first"]["head"]
    assert [head.title for head in heads if head.sorted] == ["NLL\u00a0↓"]
    by_title = {head.title.split("\u00a0")[0]: head.order for head in heads}
    assert (by_title["accuracy %"], by_title["NLL"], by_title["parameters ×"]) == (
        "descending",
        "ascending",
        "ascending",
    )
    assert 'aria-sort="ascending"><button type="button">NLL' in board


def test_the_line_of_costs_is_the_pareto_frontier(run: Path, results: Results) -> None:
    views = cost(results)["views"]
    timed = next(at for at, view in enumerate(views) if view.label == "NLL against inference time")
    times = json.loads((run / "costs.json").read_text())["methods"]
    assert series(views, results, timed)["deep"].x == [times["deep"]["inference"]["ratio"]]
    for at, view in enumerate(views):
        points = {name: (each.x[0], each.y[0]) for name, each in series(views, results, at).items()}
        line = next(each for each in view.series if each.method is None)
        front = set(zip(line.x, line.y, strict=True))
        assert points.keys() == set(FEW)
        sign = 1 if view.label.startswith("accuracy") else -1
        for name, (x, y) in points.items():
            others = [point for other, point in points.items() if other != name]
            beaten = any((a <= x and sign * b > sign * y) or (a < x and b == y) for a, b in others)
            assert ((x, y) in front) == (not beaten)
            assert series(views, results, at)[name].labels == ["" if beaten else name]
