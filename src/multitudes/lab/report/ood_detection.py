"""Out-of-distribution detection: histograms of uncertainty, and AUROC, AUPR and false alarms by criterion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multitudes.lab.report.board import Head, table_of
from multitudes.lab.report.run_results import Results, mean_spread
from multitudes.lab.study.results.leaderboard import better
from multitudes.lab.study.results.score_columns import Column
from multitudes.metrics.declare import Better

BINS = 24


def ood(results: Results) -> dict[str, Any]:
    """Return tables of all measures by criterion, and histograms, per out-of-distribution data set."""
    parts = [
        {
            "name": name,
            "tables": {measure: _table(results, name, measure) for measure in ("auroc", "aupr", "fpr95")},
            "entropy": _histograms(results, name, "entropy", _entropy),
            "mutual_information": _histograms(results, name, "mutual_information", _mutual_information),
        }
        for name in results.ood_names()
    ]
    return {"parts": parts, "bins": BINS} if parts else {}


def _table(results: Results, name: str, measure: str) -> dict[str, Any]:
    """Return a measure in percent, by method and criterion."""
    start, end = f"ood/{name}/", f"/{measure}"
    places = [place for place in results.score_names() if place.startswith(start) and place.endswith(end)]
    order = "descending" if better(measure) is Better.HIGHER else "ascending"
    by = next((at for at, place in enumerate(places) if "/entropy/" in place), 0)
    heads = [Head(place[len(start) : -len(end)].replace("_", " "), order, at == by) for at, place in enumerate(places)]
    table = table_of(results, [Column(place, "", "%", 1) for place in places], heads)
    sign = -1 if order == "descending" else 1
    table["rows"].sort(key=lambda line: (math.isnan(line.cells[by].value), sign * line.cells[by].value))
    return table


# -- histograms --------------------------------------------------------------------------------------------


def _entropy(members: Tensor) -> Tensor:
    """Return the entropy of the mean prediction of members `[S, N, C]`, as a fraction of its maximum, `[N]`."""
    return torch.special.entr(members.mean(0)).sum(1) / math.log(members.shape[2])


def _mutual_information(members: Tensor) -> Tensor:
    """Return the part of the entropy due to disagreement, as a fraction of the maximum entropy, `[N]`."""
    expected = torch.special.entr(members).sum(2).mean(0) / math.log(members.shape[2])
    return (_entropy(members) - expected).clamp(min=0)


def _histograms(
    results: Results, name: str, criterion: str, uncertainty: Callable[[Tensor], Tensor]
) -> list[dict[str, Any]]:
    """Return the fractions of test and OOD inputs in each bin of uncertainty, over all seeds, per method."""
    found: dict[int, list[Tensor]] = {}
    for at, method in enumerate(results.methods):
        arrays = [results.tensors(method, place) for place in ("members", f"ood/{name}/members")]
        if all(arrays):
            both = [torch.cat([uncertainty(members) for (members,) in each]) for each in arrays]
            # Members of a single network never disagree; there is nothing to plot.
            if float(torch.cat(both).max()) > 1e-4:
                found[at] = both
    most = max((float(torch.cat(both).max()) for both in found.values()), default=1.0)
    panels = []
    for at, both in found.items():
        inside, outside = ((torch.histc(values, BINS, 0, most) / len(values)).tolist() for values in both)
        auroc, _ = mean_spread(results.scores(results.methods[at], f"ood/{name}/{criterion}/auroc"))
        panels.append({"method": at, "inside": inside, "outside": outside, "end": most, "auroc": 100 * auroc})
    return panels
