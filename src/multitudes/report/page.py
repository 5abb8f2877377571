"""The page: all sections in one HTML file that needs nothing else."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from multitudes.core.checks import needed
from multitudes.report.board import answer, cost, standings
from multitudes.report.functions import diversity, function_map, loss_plane
from multitudes.report.html import Section, text
from multitudes.report.numbers import intervals
from multitudes.report.ood import foreign
from multitudes.report.provenance import made
from multitudes.report.quality import calibration, refusal, shift, size
from multitudes.report.results import Results, read_results
from multitudes.report.uncertain_images import opinions
from multitudes.study.store import Run, write_atomically

__all__ = ["page", "sections", "write"]

ORDER = (
    standings, cost, calibration, intervals, size, refusal, foreign, shift, diversity, function_map, loss_plane,
    opinions, made,
)  # fmt: skip
"""Each makes a part of the page, or None where the run has nothing for it."""

POLICY = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What a browser may load: nothing but what is in the file."""


def write(run_directory: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run, as its `report.html` or to another path, which it returns.

    It tells of the jobs that are done, and says which are missing. The same run gives the same page, byte by byte.
    Plotly is needed to write it, a browser to read it, a network for neither.
    """
    target = Run(run_directory).report_path if path is None else Path(path)
    return write_atomically(target, page(read_results(run_directory)))


def sections(results: Results) -> list[Section]:
    """The parts of the page for which there is something to show."""
    return [found for make in ORDER if (found := make(results)) is not None]


def page(results: Results) -> str:
    """The whole page, as text."""
    plotly = needed("plotly.offline", "plots", "a report").get_plotlyjs()
    parts = sections(results)
    links = "".join(f'<li><a href="#{part.name}">{text(part.title)}</a></li>' for part in parts)
    body = "\n".join(part.html for part in parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{text(results.name)}: which method is worth its price?</title>
<style>
{_file("page.css")}</style>
</head>
<body>
<main>
{answer(results)}
<nav aria-label="Contents"><ul>{links}</ul></nav>
<noscript><p>The plots are drawn by JavaScript, which is off; the tables are all there.</p></noscript>
{body}
</main>
<script>{plotly}</script>
<script>
{_file("page.js")}</script>
</body>
</html>
"""


def _file(name: str) -> str:
    return files("multitudes.report").joinpath(name).read_text(encoding="utf-8")
