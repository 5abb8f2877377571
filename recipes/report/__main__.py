"""Write `results/README.md`, its figures, and the results in the project's README, from the raw files."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multitudes.base.sealed_files import write_atomically
from recipes.collect import RESULTS
from recipes.recipe import ROOT
from recipes.report.headline import with_headline
from recipes.report.page import Page

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["drawn", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.report", description="Render the page of results.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the raw files")
    given = parser.parse_args(arguments)
    page = Page(given.results)
    texts = {given.results / "README.md": page.text}
    if given.results == RESULTS:
        readme = ROOT / "README.md"
        texts[readme] = with_headline(readme.read_text("utf-8"), page.raws["packed_cifar10"])
    if given.check:
        for path, text in texts.items():
            if not path.is_file() or path.read_text("utf-8") != text:
                sys.exit(f"{path} does not match the raw files: run `make results`")
        return
    for path, text in texts.items():
        write_atomically(path, text)
    for name, figure in page.figures.items():
        write_atomically(given.results / f"{name}.svg", drawn(figure))


def drawn(figure: Figure) -> str:
    """Render a figure as reproducible SVG; Plotly inserts random names."""
    for index, trace in enumerate(figure.data):
        trace.uid = f"trace{index}"
    panels = sum(name.startswith("xaxis") for name in figure.to_dict()["layout"])
    svg = figure.to_image("svg", width=max(700, 320 * panels + 220), height=480).decode()
    end = re.search(r'id="defs-(\w+)"', svg)
    return svg if end is None else svg.replace(end.group(1), "figure")


if __name__ == "__main__":
    main()
