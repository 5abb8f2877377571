"""The page of results: the papers' claims, and a section per recipe with its provenance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.report import again
from recipes.report.raw import MISSING, Raw, Section, table
from recipes.report.reasons import reasons_for

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "packed_cifar10": ("packed_cifar10",),
    "smoothing": ("smoothing", "smoothing_resnet18", "smoothing_vgg16"),
    "patching_cifar10": ("patching_cifar10",),
    "patching_uci": ("patching_uci",),
    "variance_mnist": ("variance_mnist",),
    "variance_attacks": ("variance_attacks",),
    "ensembles_landscape": ("ensembles_landscape",),
    "camvid": ("camvid",),
    "tables": ("tables",),
    "vit_cifar10": ("vit_cifar10",),
}
"""Sections in order, each a module of this package, and the folders of raw files it reads."""

HEAD = """# Results

Experiments of papers, repeated with the [recipes](../recipes/README.md) on real data at the scale of one GPU, next to
the numbers of the papers. `make results` renders this page from the raw files in this folder; only the numbers of the
papers are written by hand. Several pieces ran at the same time on one GPU, and their seconds are wall-clock times.
Costs were measured on otherwise idle machines.
"""

HOLDS = {True: "yes", False: "**no**", None: "not measured"}


class Page:
    """The page, from the raw files in a directory."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.raws = {name: Raw(results / name) for folders in SECTIONS.values() for name in folders}

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Sections of recipes with measurements."""
        found = {}
        for name, folders in SECTIONS.items():
            raws = [self.raws[folder] for folder in folders]
            if any(raw.pieces for raw in raws):
                section: Callable[..., Section] = import_module(f"recipes.report.{name}").section
                found[name] = section(*raws)
        twice = again.section(self.results)
        return found if twice is None else {**found, again.FOLDER: twice}

    @property
    def figures(self) -> dict[str, Figure]:
        """Figures by file path without suffix."""
        return {
            f"{name}/{file}": figure
            for name, section in self.sections.items()
            for file, figure in section.figures.items()
        }

    @property
    def text(self) -> str:
        """The whole page as Markdown."""
        parts = [HEAD, "## Claims of the papers, and our measurements\n", self._claims(), self._reasons()]
        for name, section in self.sections.items():
            parts += [f"## {section.title}\n", section.text.strip() + "\n", self._made(name)]
        return "\n".join(parts)

    def _claims(self) -> str:
        claims = [claim for section in self.sections.values() for claim in section.claims]
        known = [claim.holds for claim in claims if claim.holds is not None]
        summary = f"We measured {len(known)} of {len(claims)} claims, and confirm {sum(known)}.\n\n"
        rows = [
            ["" if index else section.title, claim.text.rstrip("."), HOLDS[claim.holds], claim.numbers or MISSING]
            for section in self.sections.values()
            for index, claim in enumerate(section.claims)
        ]
        return summary + table(["section", "claim", "confirmed", "numbers"], rows).replace("---:", "---") + "\n"

    def _reasons(self) -> str:
        found = {section.title: reasons_for(name, section.claims) for name, section in self.sections.items()}
        lists = [
            f"**{title}**\n\n" + "".join(f"- *{part}*: {reason}\n" for part, reason in reasons.items())
            for title, reasons in found.items()
            if reasons
        ]
        return "\n".join(["### Claims that are not confirmed, and known reasons\n", *lists]) if lists else ""

    def _made(self, name: str) -> str:
        """Write the provenance of the pieces."""
        if name not in SECTIONS:
            return ""
        pieces = [piece for folder in SECTIONS[name] for piece in self.raws[folder].pieces.values()]
        rows = [_row(piece) for piece in pieces]
        header = ["piece", "command", "commit", "data", "machine", "seconds"]
        body = table(header, rows).replace("---:", "---")
        return f"<details><summary>Provenance</summary>\n\n{body}\n\n</details>\n"


def _row(piece: Mapping[str, Any]) -> list[str]:
    data = ", ".join(f"{name} `{str(fingerprint)[:12]}`" for name, fingerprint in piece["data"].items())
    machine = f"{piece['machine']['name']}, torch {piece['versions']['torch']}"
    return [
        piece["piece"],
        f"`{piece['command']} --data-root DIR`",
        f"`{piece['commit'] or MISSING}`",
        data or MISSING,
        machine,
        f"{piece['seconds']:.0f}",
    ]
