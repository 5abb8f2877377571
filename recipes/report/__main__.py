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
from recipes.report.packed_cifar10 import METHODS, cost, results_of, score
from recipes.report.page import Page
from recipes.report.raw import Raw, mean_of, number, percent, table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


BEGIN, END = "<!-- made from results/ by `make results` -->", "<!-- until here -->"
SHOWN = ("single", "packed", "masksembles", "deep")


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


def headline(raw: Raw) -> str:
    """Compare methods with the single network, from the runs of Packed-Ensembles' Table 1, and name the machines."""
    rows = []
    for method in SHOWN:
        if found := results_of(raw, method):
            right, nll, ece = (mean_of(map(score(name), found)) for name in ("accuracy", "nll", "ece"))
            size, time = (mean_of(map(cost(f"{name}_ratio"), found)) for name in ("parameters", "training_seconds"))
            numbers = [percent(right), number(nll), number(ece), number(size, 2), number(time, 2)]
            rows.append([METHODS[method], *numbers, str(len(found))])
    header = ["ResNet-18 on CIFAR-10", "accuracy %", "NLL", "ECE", "parameters, x", "training time, x", "seeds"]
    machines = ", ".join(sorted({piece["machine"]["name"] for piece in raw.pieces.values()}))
    return f"{table(header, rows)}\n\nTraining time is that of a step, not compiled; measured on: {machines}."


def with_headline(text: str, raw: Raw) -> str:
    """Regenerate the text between the marks.

    >>> from pathlib import Path
    >>> print(with_headline(f"before\\n{BEGIN}\\nold\\n{END}\\nafter", Raw(Path("nowhere"))).count("old"))
    0
    """
    before, found, rest = text.partition(BEGIN)
    _, also, after = rest.partition(END)
    if not (found and also):
        raise ValueError(f"text must have the marks {BEGIN!r} and {END!r}, got neither or one of them")
    return f"{before}{BEGIN}\n\n{headline(raw)}\n\n{END}{after}"


if __name__ == "__main__":
    main()
