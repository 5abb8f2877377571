"""How well what is foreign is told from what is known: histograms of uncertainty, and AUROC by criterion."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from multitudes.report.html import Cell, Section, details, number, section, table, text
from multitudes.report.panels import histograms, panel, panels
from multitudes.report.results import Results, mean_spread
from multitudes.report.style import named

__all__ = ["foreign"]

BINS = 24
CRITERIA = {
    "max_probability": "confidence",
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "expected_entropy": "expected entropy",
    "variance": "variance",
    "disagreement": "disagreement",
    "max_logit": "largest logit",
    "energy": "energy",
}
MEASURES = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR at 95 % recall"}


def foreign(results: Results) -> Section | None:
    """Out-of-distribution data, one after the other: a table, histograms, and all measures folded away."""
    names = list(dict.fromkeys(name for outcome in results.outcomes for name in outcome.foreign()))
    parts = [_one(results, name) for name in names]
    if not any(parts):
        return None
    return section(
        "foreign",
        "Does it know what it does not know?",
        "<p>Inputs of another kind should make a method uncertain. AUROC is how often a foreign input looks more "
        "uncertain than a test input: 100 % tells them apart, 50 % is a coin.</p>",
        *parts,
    )


def _one(results: Results, name: str) -> str:
    prefix = f"ood/{name}/"
    criteria = [each for each in CRITERIA if f"{prefix}{each}/auroc" in results.score_names()]
    short = _table(results, prefix, "auroc", criteria, f"AUROC on <i>{text(name)}</i>, in %, by what is looked at")
    more = [
        _table(results, prefix, measure, criteria, f"{MEASURES[measure]} on <i>{text(name)}</i>, in %")
        for measure in ("aupr", "fpr95")
    ]
    pictures = {
        "entropy": _histograms(results, name, "entropy", _entropy),
        "mutual information": _histograms(results, name, "mutual information", _mutual_information),
    }
    colours = (
        '<p class="note"><span class="inside-key"></span> test data <span class="outside-key"></span> foreign data; '
        "heights are square roots of shares</p>"
    )
    return (
        f"<h3>{text(name)}</h3>{short}<h4>Entropy of the prediction, from sure to clueless</h4>{colours}"
        f"{pictures['entropy']}"
        + details("Mutual information: what the members disagree about", pictures["mutual information"])
        + details("AUPR, and false alarms at 95 % recall", *more)
    )


def _table(results: Results, prefix: str, measure: str, criteria: list[str], caption: str) -> str:
    rows = []
    for at, method in enumerate(results.methods):
        cells = [Cell(named(at, method), method)]
        for criterion in criteria:
            mean, spread = mean_spread(results.scores(method, f"{prefix}{criterion}/{measure}"))
            deviation = "" if math.isnan(spread) else f" <small>± {100 * spread:.1f}</small>"
            cells.append(Cell(f"{100 * mean:.1f}{deviation}" if math.isfinite(mean) else "–", mean))
        rows.append(cells)
    return table(caption, ["Method", *(CRITERIA[each] for each in criteria)], rows, sortable=True)


# -- histograms --------------------------------------------------------------------------------------------


def _entropy(members: Tensor) -> Tensor:
    """Of the mean prediction of members `[S, N, C]`, as a share of the largest that there is, `[N]`."""
    return torch.special.entr(members.mean(0)).sum(1) / math.log(members.shape[2])


def _mutual_information(members: Tensor) -> Tensor:
    """The entropy that is there because members disagree, as a share of the largest entropy, `[N]`."""
    expected = torch.special.entr(members).sum(2).mean(0) / math.log(members.shape[2])
    return (_entropy(members) - expected).clamp(min=0)


def _histograms(results: Results, name: str, what: str, uncertainty: Callable[[Tensor], Tensor]) -> str:
    """One panel a method: the shares of test and of foreign inputs for each bin of uncertainty, over all seeds."""
    found = {at: _inside_outside(results, method, name, uncertainty) for at, method in enumerate(results.methods)}
    # Of a single network nothing ever disagrees, and there is no histogram to draw.
    found = {
        at: both for at, both in found.items() if all(len(x) for x in both) and float(torch.cat(both).max()) > 1e-4
    }
    most = max((float(torch.cat(both).max()) for both in found.values()), default=1.0)
    pictures = []
    for at, both in found.items():
        method = results.methods[at]
        shares = [(torch.histc(values, BINS, 0, most) / len(values)).tolist() for values in both]
        auroc, _ = mean_spread(results.scores(method, f"ood/{name}/{what.replace(' ', '_')}/auroc"))
        note = f"AUROC {number(100 * auroc)} %"
        alt = f"{what} of {method} on test data and on {name}: {note}"
        pictures.append(panel(at, method, note, histograms(*shares), alt, ("0", f"{most:.2f}")))
    return panels(pictures)


def _inside_outside(
    results: Results, method: str, name: str, uncertainty: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The uncertainty of the test inputs and of the foreign ones, over all seeds."""

    def over_seeds(place: str) -> Tensor:
        arrays = [outcome.array(place) for outcome in results.of(method)]
        values = [uncertainty(torch.from_numpy(array).float()) for array in arrays if array is not None]
        return torch.cat(values) if values else torch.zeros(0)

    return over_seeds("members"), over_seeds(f"ood/{name}/members")
