"""The page: all sections in one HTML file that needs nothing else.

A section is a function from `Results` to plain data, empty where the run has nothing for it, and a template of the
section's name, which gets these data and `methods`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from multitudes.core.checks import needed
from multitudes.report.board import cost, standings
from multitudes.report.function_space import diversity, function_map, loss_landscape
from multitudes.report.ood import ood
from multitudes.report.provenance import provenance
from multitudes.report.quality import calibration, intervals, selective_prediction, shift, size
from multitudes.report.render import render
from multitudes.report.results import Results, read_results
from multitudes.report.uncertain_images import uncertain_images
from multitudes.study.recommendation import recommend
from multitudes.study.store import Run, write_atomically

__all__ = ["page", "sections", "write"]

SECTIONS: dict[str, tuple[str, Callable[[Results], dict[str, Any]]]] = {
    "leaderboard": ("Leaderboard", standings),
    "cost": ("Quality against cost", cost),
    "calibration": ("Calibration", calibration),
    "intervals": ("Prediction intervals", intervals),
    "size": ("Number of members", size),
    "selective": ("Selective prediction", selective_prediction),
    "ood": ("Out-of-distribution detection", ood),
    "shift": ("Corrupted inputs", shift),
    "diversity": ("Diversity of the members", diversity),
    "map": ("Map of function space", function_map),
    "landscape": ("Loss landscape", loss_landscape),
    "images": ("Most uncertain images", uncertain_images),
    "provenance": ("Provenance", provenance),
}
"""In their order on the page: by name, the heading and the function."""


class Section(NamedTuple):
    """A part of the page: its id, its heading, and its HTML."""

    name: str
    title: str
    html: Markup


def write(run_directory: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run, as its `report.html` or to another path, which it returns.

    It shows the jobs that are done, and lists those that are missing. The same run gives the same page, byte by byte.
    Plotly is needed to write it, a browser to read it, a network for neither.
    """
    target = Run(run_directory).report_path if path is None else Path(path)
    return write_atomically(target, page(read_results(run_directory)))


def sections(results: Results) -> list[Section]:
    """The parts of the page for which there is something to show."""
    found = {name: (title, function(results)) for name, (title, function) in SECTIONS.items()}
    return [
        Section(name, title, render(f"{name}.html", methods=results.methods, **data))
        for name, (title, data) in found.items()
        if data
    ]


def page(results: Results) -> str:
    """The whole page, as text."""
    scripts = [needed("plotly.offline", "plots", "a report").get_plotlyjs(), _file("page.js")]
    return render(
        "page.html", results=results, verdict=recommend(results.board).headline, sections=sections(results),
        css=Markup(_file("page.css")), scripts=map(Markup, scripts),
    )  # fmt: skip


def _file(name: str) -> str:
    return files("multitudes.report").joinpath(name).read_text(encoding="utf-8")
