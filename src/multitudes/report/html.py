"""Small pieces of HTML: whatever comes from data goes through `text`, and nothing else does the escaping."""

from __future__ import annotations

import html
import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Cell",
    "Section",
    "details",
    "embedded",
    "facts",
    "image",
    "number",
    "plotted",
    "section",
    "table",
    "text",
]


def text(value: object) -> str:
    """A value as text that no browser takes for markup, in content or in a quoted attribute.

    >>> text("</script> & 'more'")
    '&lt;/script&gt; &amp; &#x27;more&#x27;'
    """
    return html.escape(str(value), quote=True)


def plotted(value: object) -> str:
    """A value as text that Plotly writes as it is, where it would take `<b>` for markup."""
    return html.escape(str(value), quote=False)


def embedded(value: Any) -> str:
    """JSON that may stand in a `<script>`: no `<` can end it, and what is not finite is null.

    >>> embedded({"a": ["</script>", float("nan"), 0.123456789]})
    '{"a":["\\\\u003c/script>",null,0.123457]}'
    """
    return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):  # six digits draw the same picture in half the space
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def number(value: float, digits: int = 3) -> str:
    """A number to read: so many significant digits, none of them an exponent, and a dash where there is none.

    >>> number(0.031415), number(1234567.0), number(12.0), number(float("nan"))
    ('0.0314', '1,234,567', '12.0', '–')
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(8, max(0, digits - 1 - size))}f}".replace("-", "−")


# -- parts of a page ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A part of the page: its id, which the contents link to, its heading, and its HTML."""

    name: str
    title: str
    html: str


def section(name: str, title: str, *parts: str) -> Section:
    """A part of the page with its heading."""
    body = "\n".join(part for part in parts if part)
    return Section(name, title, f'<section id="{name}">\n<h2>{text(title)}</h2>\n{body}\n</section>')


def details(summary: str, *parts: str) -> str:
    """Something long, folded away; `summary` is plain text."""
    return f"<details><summary>{text(summary)}</summary>\n" + "\n".join(parts) + "\n</details>"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its HTML, what it is sorted by, and a class of the style sheet."""

    html: str
    value: float | str = ""
    style: str = ""


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Cell]], *, sortable: bool = False, style: str = ""
) -> str:
    """A table in a box of its own that scrolls where it is too wide; the first cell of each row is its heading.

    `caption` is HTML. Headings are plain text; of a sortable table they are buttons.
    """
    lines = [f'<div class="scroll" tabindex="0" role="group" aria-label="table"><table class="{style}">']
    lines.append(f"<caption>{caption}</caption>\n<thead><tr>")
    for title in head:
        inside = f'<button type="button">{text(title)}</button>' if sortable else text(title)
        lines.append(f'<th scope="col"{" aria-sort=none" if sortable else ""}>{inside}</th>')
    lines.append("</tr></thead>\n<tbody>")
    for row in rows:
        lines.append("<tr>" + "".join(_cell(cell, "th" if at == 0 else "td") for at, cell in enumerate(row)) + "</tr>")
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def _cell(cell: Cell, tag: str) -> str:
    scope = ' scope="row"' if tag == "th" else ""
    style = f' class="{cell.style}"' if cell.style else ""
    missing = isinstance(cell.value, float) and not math.isfinite(cell.value)
    value = "" if missing or cell.value == "" else f' data-value="{text(cell.value)}"'
    return f"<{tag}{scope}{style}{value}>{cell.html}</{tag}>"


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """What is so, as a list of names and values; without those that are None or empty."""
    rows = [f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in pairs if value not in (None, "", [], {})]
    return "<dl>" + "".join(rows) + "</dl>"


# -- pictures ----------------------------------------------------------------------------------------------


def image(pixels: Any, alt: str) -> str:
    """An image, uint8 `[C, H, W]` with 1 or 3 channels, as a picture within the page."""
    import base64

    data = base64.b64encode(_png(pixels)).decode()
    return f'<img class="pixels" alt="{text(alt)}" src="data:image/png;base64,{data}">'


def _png(pixels: Any) -> bytes:
    """A PNG file of grey or coloured pixels: signature, header, rows each behind a 0 (no filter), end."""
    channels, height, width = pixels.shape
    rows = pixels.transpose(1, 2, 0).reshape(height, width * channels)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
