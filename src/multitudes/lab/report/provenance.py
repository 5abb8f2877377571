"""Provenance of the results: data, network, training, versions and machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from multitudes.lab.report.run_results import Results


def provenance(results: Results) -> dict[str, Any]:
    """Return everything needed to reproduce the study."""
    about, spec, model = results.about, results.spec, results.spec.get("model", {})
    config = results.outcomes[0].config
    digest = (config.get("model", {}).get("weights") or {}).get("sha256")
    weights = f", from weights with the SHA-256 {digest}" if digest else ""
    facts = {
        "Data": results.name,
        "Parts": _words(about.get("parts", {})),
        "Rows left out": _words(about.get("dropped", {})),
        **_inputs(about),
        "Fingerprint (SHA-256)": about.get("fingerprint") or config.get("data", {}).get("fingerprint"),
        "Network": f"{model.get('name', '')} {_words(model.get('settings', {}))}".strip() + weights,
        "Training": _words(spec.get("training", {})),
        "Seeds": ", ".join(map(str, sorted({outcome.seed for outcome in results.outcomes}))),
        "To reproduce": "multitudes compare study.toml",
        "Machine": _distinct(results, "machine"),
        "Versions": _distinct(results, "versions"),
    }
    jobs = [
        (f"{job.method}-{job.seed}", _words(job.config.get("settings", {})), float(job.metrics.get("seconds") or 0))
        for job in results.outcomes
    ]
    return {"facts": facts, "spec": results.spec_text.strip(), "jobs": jobs}


def _inputs(about: Mapping[str, Any]) -> dict[str, str]:
    """Describe texts, or the normalisation of images for a pretrained model."""
    found = {}
    if text := about.get("text"):
        lengths = _words(text.get("lengths", {}))
        found["Texts"] = (
            f"column {text['column']}, at most {text['tokens']} tokens; tokens per training text: {lengths}"
        )
    if pixels := about.get("pixels"):
        found["Pixels"] = f"minus {pixels['mean']}, divided by {pixels['std']}, as in pretraining"
    return found


def _words(table: Mapping[str, Any]) -> str:
    """Format a table on one line: `epochs 30, lr 0.05`."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in table.items()
    )


def _distinct(results: Results, name: str) -> str:
    return "; ".join(dict.fromkeys(_words(outcome.metrics.get(name) or {}) for outcome in results.outcomes))
