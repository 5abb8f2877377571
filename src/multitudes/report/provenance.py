"""How the numbers were made: data, network, training, versions and machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from multitudes.report.html import Cell, Section, details, facts, number, section, table, text
from multitudes.report.results import Results

__all__ = ["made"]


def made(results: Results) -> Section:
    """Everything that is needed to make them again."""
    about, spec = results.about, results.spec
    first = results.outcomes[0]
    seeds = sorted({outcome.seed for outcome in results.outcomes})
    model = spec.get("model", {})
    pairs: list[tuple[str, object]] = [
        ("Data", results.name),
        ("Parts", _words(about.get("parts", {}))),
        ("Rows left out", _words(about.get("dropped", {}))),
        ("Fingerprint (SHA-256)", about.get("fingerprint") or first.config.get("data", {}).get("fingerprint")),
        ("Network", f"{model.get('name', '')} {_words(model.get('settings', {}))}".strip()),
        ("Training", _words(spec.get("training", {}))),
        ("Seeds", ", ".join(map(str, seeds))),
        ("To make it again", "multitudes compare study.toml"),
        ("Machine", "; ".join(_distinct(results, "machine"))),
        ("Versions", "; ".join(_distinct(results, "versions"))),
    ]
    return section(
        "made",
        "How it was made",
        facts(pairs),
        details("study.toml", f"<pre>{text(results.spec_text.strip())}</pre>"),
        details("All jobs", _jobs(results)),
    )


def _words(table: Mapping[str, Any]) -> str:
    """A table on one line: `epochs 30, lr 0.05`."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in table.items()
    )


def _distinct(results: Results, name: str) -> list[str]:
    """What the jobs say of themselves, each thing once."""
    return list(dict.fromkeys(_words(outcome.metrics.get(name) or {}) for outcome in results.outcomes))


def _jobs(results: Results) -> str:
    rows = []
    for outcome in results.outcomes:
        seconds = float(outcome.metrics.get("seconds") or 0)
        settings = _words(outcome.config.get("settings", {}))
        name = f"{outcome.method}-{outcome.seed}"
        rows.append([Cell(text(name), name), Cell(text(settings)), Cell(number(seconds), seconds)])
    return table("The jobs that are done", ["Job", "settings", "seconds"], rows, sortable=True)
