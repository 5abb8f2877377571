"""The page: all sections in one self-contained HTML file.

A section is a function from `Results` to plain data, empty if the run has nothing for it, and a template with the
section's name, which gets these data and `methods`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from multitudes.base.sealed_files import write_atomically
from multitudes.lab.report.board import answer_figure, cost, standings
from multitudes.lab.report.calibration import calibration, intervals
from multitudes.lab.report.chart import HIGHLIGHTED, render, resource
from multitudes.lab.report.diversity import diversity, function_map, loss_landscape
from multitudes.lab.report.input_examples import (
    columns_read,
    important_columns,
    uncertain_images,
    uncertain_texts,
    unsure_rows,
)
from multitudes.lab.report.ood_detection import ood
from multitudes.lab.report.provenance import provenance
from multitudes.lab.report.quality import selective_prediction, shift, size
from multitudes.lab.report.run_results import Results, read_results
from multitudes.lab.study.run.store import Run

SECTIONS: dict[str, tuple[str, Callable[[Results], dict[str, Any]]]] = {
    "leaderboard": ("All methods", standings),
    "cost": ("Scores against costs", cost),
    "calibration": ("Calibration: does confidence match accuracy?", calibration),
    "intervals": ("Prediction intervals: does coverage match the level?", intervals),
    "size": ("Members: how many are enough?", size),
    "selective": ("Abstention: how many errors remain among the most confident predictions?", selective_prediction),
    "ood": ("Out-of-distribution inputs: are they detected?", ood),
    "shift": ("Corrupted inputs: how much do predictions degrade?", shift),
    "diversity": ("Diversity: do members make different errors?", diversity),
    "map": ("Map of all networks, by their predictions", function_map),
    "landscape": ("Loss landscape", loss_landscape),
    "matter": ("Columns: which ones matter?", important_columns),
    "unsure": ("The most uncertain rows", unsure_rows),
    "images": ("The most uncertain images", uncertain_images),
    "texts": ("The most uncertain texts", uncertain_texts),
    "columns": ("How the columns were read", columns_read),
    "provenance": ("How to reproduce this study", provenance),
}
"""Sections in page order: heading and function by name. All but the first are collapsed."""


class Section(NamedTuple):
    """A part of the page: its id, heading and HTML."""

    name: str
    title: str
    html: Markup


def write(run_directory: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run to its `report.html` or another path; return the path.

    It shows finished jobs and lists missing ones. The same run gives a byte-identical page, readable with just a
    browser.
    """
    target = Run(run_directory).report_path if path is None else Path(path)
    return write_atomically(target, page(read_results(run_directory)))


def sections(results: Results) -> list[Section]:
    """Return the non-empty sections of the page."""
    return [
        Section(name, title, render(f"{name}.html", methods=results.methods, **data))
        for name, (title, function) in SECTIONS.items()
        if (data := function(results))
    ]


def page(results: Results) -> str:
    """Return the whole page as text."""
    return render(
        "page.html", results=results, methods=results.methods, answer=results.recommendation,
        figure=answer_figure(results), sections=sections(results), most=HIGHLIGHTED, css=resource("page.css"),
        script=resource("page.js"),
    )  # fmt: skip
